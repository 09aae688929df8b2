"""Received messages become events or answers: every type on every socket that takes or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import hr_wire
import pytest
import zmq

from headrace.broker import events
from headrace.broker.control import Control
from headrace.broker.counters import Counters
from headrace.broker.inbound import Inbound
from headrace.broker.outbound import Outbound
from headrace.broker.sockets import Role, Socket
from headrace.errors import RemoteError
from headrace.protocol import codec
from headrace.protocol.messages import Message, Reply, Request

ENDPOINTS = hr_wire.ENDPOINTS

#: Socket -> type on the wire -> what it becomes: events, or the answer it gets.
TAKEN: dict[Role, dict[str, str]] = {
    Role.FRAMES: {
        "frame": "FramesArrived",
        "heartbeat": "PeerHeard",
        "hello": "ProducerArrived",
        "goodbye": "forgotten ProducerLeft",
        "discover": "introduced",
    },
    Role.INTAKE: {"frame": "FramesArrived"},
    Role.WORKERS: {
        "worker_hello": "WorkerArrived",
        "ready": "WorkerReady",
        "done": "BatchDone",
        "failed": "BatchFailed",
        "heartbeat": "PeerHeard",
        "telemetry": "PeerHeard",
        "loaded": "ModelLoaded",
        "not_loaded": "ModelNotLoaded",
        "compared": "BatchCompared",
        "goodbye": "WorkerLeft",
        "discover": "introduced",
    },
    Role.CONTROL: {"request": "answered", "heartbeat": "", "goodbye": "", "discover": "introduced"},
}


class StubControl:
    """Answers every request with nothing."""

    def answer(self, request: Request, _now_ns: int) -> Reply:
        return Reply(request.id)


@dataclass
class StubOutbound:
    """Notes what is to be sent."""

    notes: list[str] = field(default_factory=list)
    refusals: list[RemoteError] = field(default_factory=list)

    def reply(self, _peer: bytes, _message: Message) -> None:
        self.notes.append("answered")

    def introduce(self, _peer: bytes) -> None:
        self.notes.append("introduced")

    def forget(self, _peer: bytes) -> None:
        self.notes.append("forgotten")

    def refuse(self, _peer: bytes, error: RemoteError) -> None:
        self.notes.append("refused")
        self.refusals.append(error)


class World:
    """An Inbound behind one inproc socket, with a peer that sends to it."""

    def __init__(self, context: zmq.Context[Socket], role: Role) -> None:
        self.role = role
        kind, peer_kind = (zmq.PULL, zmq.PUSH) if role is Role.INTAKE else (zmq.ROUTER, zmq.DEALER)
        self.socket = context.socket(kind)
        self.socket.bind("inproc://socket")
        self.peer = context.socket(peer_kind)
        self.peer.connect("inproc://socket")
        self.outbound = StubOutbound()
        self.counters = Counters()
        self.inbound = Inbound(
            {role: self.socket},
            cast("Outbound", self.outbound),
            cast("Control", StubControl()),
            ENDPOINTS,
            hr_wire.LIMITS,
            self.counters,
            self._tell,
        )

    def _tell(self, event: events.Event, _now_ns: int) -> None:
        self.outbound.notes.append(type(event).__name__)

    def take(self, message: Message) -> list[str]:
        """Let one message arrive; return what became of it, repeats left out."""
        self.outbound.notes.clear()
        self.peer.send_multipart(codec.encode(message))
        assert self.socket.poll(10_000)
        self.inbound.drain(self.role, 10, lambda: 1)
        return list(dict.fromkeys(self.outbound.notes))


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    made: zmq.Context[Socket] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("role", TAKEN)
def test_every_message_is_taken_or_refused_by_its_type(context: zmq.Context[Socket], role: Role) -> None:
    """Nothing falls between: what a socket does not take is refused where that can be told, and counted."""
    world = World(context, role)

    for name, message in hr_wire.SAMPLES.items():
        type_name = codec.TYPE_NAMES[type(message)]
        refused = ["PeerMisbehaved"] if role is Role.INTAKE else ["refused", "PeerMisbehaved"]

        became = world.take(message)

        assert became == (TAKEN[role][type_name].split() if type_name in TAKEN[role] else refused), name
    assert set(world.counters.misbehaved_count) == {"unexpected_type"}


def test_a_misplaced_message_is_told_what_is_taken_and_where_it_belongs(
    context: zmq.Context[Socket],
) -> None:
    """Somebody who mixed up two ports reads both."""
    world = World(context, Role.WORKERS)

    world.take(hr_wire.SAMPLES["hello"])

    (error,) = world.outbound.refusals
    assert error.code == "unexpected_type"
    assert error.message == (
        "type hello has no place here, which takes compared, discover, done, failed, goodbye,"
        " heartbeat, loaded, not_loaded, ready,"
        f" telemetry, worker_hello; it belongs on the frames socket of this broker, {ENDPOINTS.frames}"
    )


def test_a_wrong_type_is_refused_before_its_content_is_looked_at(context: zmq.Context[Socket]) -> None:
    """A frame with nothing right in it, sent to the workers socket, is first of all misplaced."""
    world = World(context, Role.WORKERS)
    world.peer.send_multipart(codec.encode(hr_wire.SAMPLES["frame"])[:1])
    assert world.socket.poll(10_000)

    world.inbound.drain(Role.WORKERS, 1, lambda: 1)

    assert [error.code for error in world.outbound.refusals] == ["unexpected_type"]
