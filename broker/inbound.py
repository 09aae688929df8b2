"""Turn received messages into events for the core, or into answers where the core has no say.

Not here: sockets (``shell`` reads them), decisions. A message that can't be read or that arrives on the wrong
socket is answered where its sender can be answered, counted by code, logged once an interval, and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import zmq

from headrace.broker import events
from headrace.broker.arenas import Arenas
from headrace.broker.control import Control
from headrace.broker.counters import Counters, count
from headrace.broker.outbound import PREFIXES, Outbound
from headrace.broker.recording import Recording
from headrace.broker.sockets import Role, Socket, has_message, receive, receive_routed
from headrace.errors import Code, RemoteProtocolError, UnexpectedTypeError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Compared,
    Discover,
    Done,
    Endpoints,
    Failed,
    Frames,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Loaded,
    Message,
    NotLoaded,
    Ready,
    Request,
    Telemetry,
    WorkerHello,
)

#: What each socket takes. Anything else is refused by its type, before its payload is looked at.
_EXPECTED: dict[Role, frozenset[type]] = {
    Role.FRAMES: codec.FROM_PRODUCER,
    Role.INTAKE: codec.FROM_INTAKE,
    Role.WORKERS: codec.FROM_WORKER,
    Role.CONTROL: codec.FROM_CONTROL,
}

#: Where each message of a peer belongs; on another socket it is answered with the right address.
_HOME: dict[type, Role] = {
    Frames: Role.FRAMES,
    Hello: Role.FRAMES,
    WorkerHello: Role.WORKERS,
    Ready: Role.WORKERS,
    Done: Role.WORKERS,
    Failed: Role.WORKERS,
    Loaded: Role.WORKERS,
    NotLoaded: Role.WORKERS,
    Compared: Role.WORKERS,
    Request: Role.CONTROL,
}

#: Descriptors that no producer gets, at most: those of subscribers, workers and callers, of recordings and of
#: a reload. An eighth of all where there are few.
SPARE_DESCRIPTORS = 64

_SUBSCRIBE = 1
_UNSUBSCRIBE = 0

log = structlog.get_logger()


class Inbound:
    """Reads one message at a time from one socket. ``tell(event, now_ns)`` hands an event to the core."""

    def __init__(
        self,
        sockets: dict[Role, Socket],
        outbound: Outbound,
        control: Control,
        endpoints: Endpoints,
        limits: Limits,
        counters: Counters,
        tell: Callable[[events.Event, int], None],
        arenas: Arenas | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._sockets = sockets
        self._outbound = outbound
        self._control = control
        self._endpoints = endpoints
        self._limits = limits
        self._counters = counters
        self._tell = tell
        self._arenas = arenas or Arenas(None, "")
        self._recording = recording or Recording()
        # Bound once: the level is checked without making a logger for each batch.
        self._log = log.bind()
        self._takers: dict[Role, Callable[[bytes, Message, int], None]] = {
            Role.FRAMES: self._take_from_producer,
            Role.WORKERS: self._take_from_worker,
            Role.CONTROL: self._take_from_caller,
        }

    def drain(self, role: Role, max_count: int, now: Callable[[], int]) -> None:
        """Take up to ``max_count`` messages from one socket."""
        take = {Role.INTAKE: self._take_intake, Role.RESULTS: self._take_subscription}.get(role)
        taken = 0
        try:
            for _ in range(max_count):
                # On an idle system one message comes at a time. Behind a second there are more, and asking
                # for each costs more than the exception that ends it.
                if taken == 1 and not has_message(self._sockets[role]):
                    break
                if take is None:
                    self._take_routed(role, now)
                else:
                    take(now())
                taken += 1
        except zmq.Again:
            pass
        count(self._counters.received_count, role.value, taken)

    def _take_routed(self, role: Role, now: Callable[[], int]) -> None:
        routing_id, parts = receive_routed(self._sockets[role])
        peer = PREFIXES[role] + routing_id
        now_ns = now()
        try:
            message = codec.decode(parts, self._limits, _EXPECTED[role])
        except RemoteProtocolError as raised:
            error = self._with_home(raised)
            self._outbound.refuse(peer, error)
            self._report_misbehaved(role, peer, error, now_ns)
        else:
            self._takers[role](peer, message, now_ns)

    def _take_intake(self, now_ns: int) -> None:
        parts = receive(self._sockets[Role.INTAKE])
        try:
            message = codec.decode(parts, self._limits, _EXPECTED[Role.INTAKE])
        except RemoteProtocolError as error:
            self._report_misbehaved(Role.INTAKE, None, self._with_home(error), now_ns)
            return
        if isinstance(message, Frames):
            self._record(message, now_ns)
            self._tell(events.FramesArrived(None, message.frames), now_ns)

    def _take_subscription(self, now_ns: int) -> None:
        parts = receive(self._sockets[Role.RESULTS])
        change = bytes(parts[0])
        if len(parts) == 1 and change[:1] == bytes([_SUBSCRIBE]):
            self._counters.subscription_count += 1
            self._outbound.confirm_subscription(change[1:])
        elif len(parts) == 1 and change[:1] == bytes([_UNSUBSCRIBE]):
            self._counters.subscription_count -= 1
        else:
            error = RemoteProtocolError(Code.UNEXPECTED_TYPE, "the results socket takes subscriptions only")
            self._report_misbehaved(Role.RESULTS, None, error, now_ns)

    def _take_from_producer(self, peer: bytes, message: Message, now_ns: int) -> None:
        match message:
            case Frames(frames):
                self._record(message, now_ns)
                self._tell(events.FramesArrived(peer, frames), now_ns)
            case Heartbeat():
                self._tell(events.PeerHeard(peer, is_heartbeat=True), now_ns)
            case Hello():
                self._take_hello(peer, message, now_ns)
            case Goodbye():
                self._outbound.forget(peer)
                self._tell(events.ProducerLeft(peer), now_ns)
            case Discover():
                self._outbound.introduce(peer)

    def _take_hello(self, peer: bytes, hello: Hello, now_ns: int) -> None:
        descriptors = self._arenas.descriptors
        if descriptors.open_count() > descriptors.limit - min(SPARE_DESCRIPTORS, descriptors.limit // 8):
            message = (
                f"{descriptors.open_count()} of the broker's {descriptors.limit} descriptors are in use: its"
                " limit on open files (ulimit -n) allows no more producers"
            )
            log.warning("producer refused", producer=hello.name, reason=message)
            self._outbound.refuse(peer, RemoteProtocolError(Code.TOO_MANY_PRODUCERS, message))
            return
        descriptors.note_opened()  # that of its connection, which the last count may not have seen
        self._tell(events.ProducerArrived(peer, hello, self._arenas.open(hello)), now_ns)

    def _record(self, message: Frames, now_ns: int) -> None:
        if self._recording.is_on:
            for frame in message.frames:
                self._recording.note(frame, now_ns)

    def _take_from_worker(self, peer: bytes, message: Message, now_ns: int) -> None:
        match message:
            case Done():
                self._tell(events.BatchDone(peer, message), now_ns)
                self._log.debug(
                    "batch done",
                    batch=message.batch,
                    frames_count=len(message.results),
                    staged_us=message.staged_us,
                    ran_us=message.ran_us,
                    total_us=message.total_us,
                )
            case Heartbeat(probe):
                self._tell(events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe), now_ns)
            case Failed():
                self._tell(events.BatchFailed(peer, message), now_ns)
            case Ready():
                self._tell(events.WorkerReady(peer, message), now_ns)
            case Telemetry():
                self._counters.figures.note(message, now_ns)
                self._tell(events.PeerHeard(peer, is_worker=True), now_ns)
            case Loaded():
                self._tell(events.ModelLoaded(peer, message), now_ns)
            case NotLoaded():
                self._tell(events.ModelNotLoaded(peer, message), now_ns)
            case Compared():
                self._tell(events.BatchCompared(peer, message), now_ns)
            case WorkerHello():
                self._tell(events.WorkerArrived(peer, message), now_ns)
            case Goodbye():
                self._tell(events.WorkerLeft(peer), now_ns)
            case Discover():
                self._outbound.introduce(peer)

    def _take_from_caller(self, peer: bytes, message: Message, now_ns: int) -> None:
        match message:
            case Request():
                self._outbound.reply(peer, self._control.answer(message, now_ns))
            case Heartbeat() | Goodbye():
                pass  # control calls stand alone: there is no session to keep alive or to end
            case Discover():
                self._outbound.introduce(peer)

    def _with_home(self, error: RemoteProtocolError) -> RemoteProtocolError:
        """Return the error of a misplaced message with the address where it belongs, any other as it is."""
        home = _HOME.get(error.kind) if isinstance(error, UnexpectedTypeError) else None
        if home is None:
            return error
        address = getattr(self._endpoints, home.value)
        return RemoteProtocolError(
            error.code, f"{error.message}; it belongs on the {home.value} socket of this broker, {address}"
        )

    def _report_misbehaved(
        self, role: Role, peer: bytes | None, error: RemoteProtocolError, now_ns: int
    ) -> None:
        count(self._counters.misbehaved_count, error.code)
        log.warning(
            "message not understood",
            code=error.code,
            socket=role.value,
            peer=peer[1:].hex() if peer else "",
            reason=error.message,
        )
        self._tell(events.PeerMisbehaved(peer, error.code, error.kind), now_ns)
