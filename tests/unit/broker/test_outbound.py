"""Carrying actions out: order, bundles, messages that come out too large, peers that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import structlog
import zmq

from headrace.broker import actions
from headrace.broker.counters import Counters
from headrace.broker.outbound import MAX_BUNDLE, Outbound
from headrace.broker.sockets import Role, Socket
from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Cancel,
    Credit,
    Endpoints,
    Frame,
    Goodbye,
    Heartbeat,
    Limits,
    Message,
    ModelFile,
    ModelSpec,
    Outcome,
    Outcomes,
    Refused,
    Reject,
    ReplayReply,
    Reply,
    Setup,
    Status,
    Welcome,
)

LIMITS = Limits()
FRAMES = (Frame("a", b"123", 3, (1, 1, 3), seq=0, epoch=1),)
ENDPOINTS = Endpoints(1, "f", "i", "r", "w", "c", "", "key")


@dataclass
class World:
    """An Outbound with one connected peer per ROUTER and a subscriber to everything."""

    outbound: Outbound
    counters: Counters
    producer: Socket
    worker: Socket
    caller: Socket
    subscriber: Socket

    def received(self, socket: Socket, count: int = 1) -> list[Message]:
        messages: list[Message] = []
        for _ in range(count):
            assert socket.poll(5_000), "nothing arrived"
            messages.append(codec.decode(socket.recv_multipart(), LIMITS))
        return messages

    def published(self) -> list[tuple[Outcome, ...]]:
        """Return the bundles published so far; the order on this socket is that of sending."""
        self.outbound.confirm_subscription(b"end")
        bundles = []
        while True:
            assert self.subscriber.poll(5_000), "nothing arrived"
            message = codec.decode_published(self.subscriber.recv_multipart(), LIMITS)
            if not isinstance(message, Outcomes):
                return bundles
            bundles.append(message.outcomes)


def make_world(context: zmq.Context[Socket], limits: Limits = LIMITS) -> World:
    kinds = {
        Role.FRAMES: zmq.ROUTER,
        Role.WORKERS: zmq.ROUTER,
        Role.CONTROL: zmq.ROUTER,
        Role.RESULTS: zmq.XPUB,
    }
    sockets = {role: context.socket(kind) for role, kind in kinds.items()}
    peers = {}
    for role, socket in sockets.items():
        socket.bind(f"inproc://{role.value}")
        if role is not Role.RESULTS:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            peers[role] = context.socket(zmq.DEALER)
            peers[role].setsockopt(zmq.ROUTING_ID, b"p")
            peers[role].connect(f"inproc://{role.value}")
            peers[role].send(b"here")
            assert socket.poll(5_000)
            socket.recv_multipart()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect("inproc://results")
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    assert sockets[Role.RESULTS].poll(5_000)
    sockets[Role.RESULTS].recv()
    counters = Counters()
    outbound = Outbound(sockets, ENDPOINTS, limits, 1_000, counters)
    return World(outbound, counters, peers[Role.FRAMES], peers[Role.WORKERS], peers[Role.CONTROL], subscriber)


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    made: zmq.Context[Socket] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def world(context: zmq.Context[Socket]) -> World:
    return make_world(context)


def outcome(stream: str, pub_seq: int, outputs: str | None = None) -> Outcome:
    return Outcome(stream, 1, pub_seq, 1, pub_seq, Status.OK, outputs=outputs)


def publish(*names: tuple[str, int]) -> list[actions.Action]:
    return [actions.PublishOutcome(outcome(stream, pub_seq)) for stream, pub_seq in names]


def test_outcomes_of_a_run_are_bundled_by_stream(world: World) -> None:
    """Two streams in turn become two messages, each in its stream's order."""
    world.outbound.carry_out(publish(("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)))

    bundles = world.published()

    assert [[(o.stream, o.pub_seq) for o in bundle] for bundle in bundles] == [
        [("a", 0), ("a", 1), ("a", 2)],
        [("b", 0), ("b", 1)],
    ]
    assert (world.counters.published_count, world.counters.published_message_count) == (5, 2)


def test_a_bundle_never_passes_another_action(world: World) -> None:
    """A credit between two outcomes ends the run: what comes before it is published before it."""
    credit = actions.GrantCredit(b"fp", Credit(1, {}, {}))

    world.outbound.carry_out([*publish(("a", 0)), credit, *publish(("a", 1))])

    assert [len(bundle) for bundle in world.published()] == [1, 1]


def test_a_bundle_has_a_bound(world: World) -> None:
    """A long run of one stream is cut at MAX_BUNDLE."""
    world.outbound.carry_out(publish(*(("a", number) for number in range(MAX_BUNDLE + 1))))

    assert [len(bundle) for bundle in world.published()] == [MAX_BUNDLE, 1]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_header_bytes=4_096),
        Limits(max_message_bytes=4_096),
        Limits(max_frames_per_message=2),
    ],
    ids=["header", "message", "count"],
)
def test_a_bundle_that_no_receiver_would_take_is_halved(context: zmq.Context[Socket], limits: Limits) -> None:
    """What one message can't carry leaves in several, in order, each within the limits."""
    world = make_world(context, limits)
    todo: list[actions.Action] = [
        actions.PublishOutcome(outcome("a", number, "x" * 1_500)) for number in range(5)
    ]

    world.outbound.carry_out(todo)
    bundles = world.published()

    assert [o.pub_seq for bundle in bundles for o in bundle] == list(range(5))
    assert max(len(bundle) for bundle in bundles) <= 2


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_header_bytes=4_096),
        Limits(max_message_bytes=4_096),
        Limits(max_frames_per_message=2),
    ],
    ids=["header", "message", "count"],
)
def test_a_replay_that_no_receiver_would_take_is_cut_and_says_so(
    context: zmq.Context[Socket], limits: Limits
) -> None:
    """The caller asks again from the next number."""
    world = make_world(context, limits)
    outcomes = tuple(outcome("a", number, "x" * 1_500) for number in range(5))

    world.outbound.reply(b"cp", ReplayReply(9, outcomes, missed=((0, 1),)))
    (reply,) = world.received(world.caller)

    assert isinstance(reply, ReplayReply)
    assert (reply.id, reply.has_more, reply.missed) == (9, True, ((0, 1),))
    assert [o.pub_seq for o in reply.outcomes] == [0, 1]


def test_an_outcome_that_is_too_large_alone_leaves_all_the_same(context: zmq.Context[Socket]) -> None:
    """There is nothing left to halve: a receiver with larger limits can still read it."""
    world = make_world(context, Limits(max_header_bytes=1_024))

    world.outbound.carry_out([actions.PublishOutcome(outcome("a", 0, "x" * 2_000))])

    assert [len(bundle) for bundle in world.published()] == [1]


def test_each_action_reaches_its_socket(world: World) -> None:
    """Producers hear on frames, workers on workers; models go to producers without their files."""
    model = ModelSpec("m", "1", files=(ModelFile("m.onnx", "0" * 64, 5),))

    with structlog.testing.capture_logs() as logs:
        world.outbound.carry_out(
            [
                actions.WelcomeProducer(b"fp", 8, (model,)),
                actions.SendReject(b"fp", Reject("code", "why")),
                actions.SendHeartbeat(b"fp", is_worker=False),
                actions.SetUpWorker(b"wp", (model,)),
                actions.SendBatch(b"wp", Batch(5, "m", "1", "c", FRAMES)),
                actions.CancelBatch(b"wp", 5),
                actions.SendHeartbeat(b"wp", is_worker=True),
                actions.SendHeartbeat(b"wp", is_worker=True, probe=3),
                actions.RefusePeer(b"wp", "id_in_use", "why"),
                actions.Report("worker lost", {"worker": "w"}),
                actions.Report("batch failed", {"code": "x"}),
            ]
        )

    welcome, *to_producer = world.received(world.producer, 3)
    setup, *to_worker = world.received(world.worker, 6)
    assert isinstance(welcome, Welcome)
    assert (welcome.credits, welcome.endpoints, welcome.models) == (8, ENDPOINTS, (ModelSpec("m", "1"),))
    assert isinstance(setup, Setup)
    assert setup.models == (model,)
    assert to_producer == [Reject("code", "why"), Heartbeat()]
    assert to_worker[1:] == [Cancel(5), Heartbeat(), Heartbeat(3), Refused("id_in_use", "why")]
    assert [(line["log_level"], line["event"]) for line in logs] == [
        ("info", "worker lost"),
        ("warning", "batch failed"),
    ]
    assert world.counters.reports == {"worker lost": 1, "batch failed": 1}


def test_an_answer_that_nobody_could_read_is_replaced_by_the_reason(context: zmq.Context[Socket]) -> None:
    """The caller is told, instead of waiting for an answer that its own limits refuse."""
    world = make_world(context, Limits(max_header_bytes=2_000))

    world.outbound.reply(b"cp", Reply(7, {"text": "x" * 2_000}))
    world.outbound.reply(b"cp", Reply(8, {"text": "x"}, payloads=(b"y" * 3_000,)))

    refused, taken = world.received(world.caller, 2)
    assert isinstance(refused, Reply)
    assert (refused.id, refused.code, refused.result) == (7, "message_too_large", {})
    assert "limits.max_header_bytes" in refused.message
    assert isinstance(taken, Reply)
    assert taken.code == ""


def test_a_peer_that_is_gone_is_noted(world: World) -> None:
    """ZMQ-08: nothing is raised; the peer is in ``unreachable`` with the batches that never left, and the
    others get theirs."""
    world.outbound.carry_out(
        [
            actions.SendHeartbeat(b"wgone", is_worker=True),
            actions.SendBatch(b"wgone", Batch(1, "m", "1", "c", FRAMES)),
            actions.SendBatch(b"wgone", Batch(2, "m", "1", "c", FRAMES)),
            actions.SendHeartbeat(b"wp", is_worker=True),
        ]
    )

    assert world.outbound.unreachable == {b"wgone": [1, 2]}
    assert world.counters.unreachable_count == 1  # what follows a dropped message is not even tried
    assert world.received(world.worker) == [Heartbeat()]


def test_goodbye_is_said_to_those_that_introduced_themselves(world: World) -> None:
    """A peer that left, was refused or could not be reached is not told."""
    world.outbound.carry_out(
        [
            actions.WelcomeProducer(b"fp", 8, ()),
            actions.WelcomeProducer(b"fgone", 8, ()),
            actions.SetUpWorker(b"wp", ()),
        ]
    )
    world.outbound.forget(b"wp")
    world.outbound.say_goodbye("the broker stops")

    assert world.received(world.producer, 2)[1] == Goodbye("the broker stops")
    assert isinstance(world.received(world.worker)[0], Setup)
    assert not world.worker.poll(50)
    assert world.outbound.unreachable == {b"fgone": []}
