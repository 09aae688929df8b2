"""The I/O thread of a producer: owns its socket, carries out what the session asks for.

Not here: what is sent when (``producer_session``), what users call (``producer``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import assert_never

import zmq

from headrace import addresses
from headrace.clients import producer_session as ps
from headrace.clients.lane import Lane
from headrace.clients.sockets import GOODBYE_LINGER_MS, PRODUCER, Context, Link, Waker
from headrace.errors import HeadraceError, RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import Frame, Limits, ModelSpec, Welcome

_log = logging.getLogger("headrace.clients.producer")

#: One discovery attempt; after it the session's own back-off decides when to try again.
DISCOVERY_TIMEOUT_S = 2.0

#: Messages read before frames are sent again, so that neither direction starves the other.
MAX_MESSAGES_PER_TURN = 256

#: A poll is never longer, so that a clock that was asked for too late can't hang the thread.
MAX_POLL_MS = 1_000


@dataclass(frozen=True, slots=True)
class Situation:
    """What the loop knows about its broker, replaced as a whole on each change."""

    is_connected: bool = False
    away_reason: str = "not connected yet"
    boot: int | None = None
    limits: Limits = field(default_factory=Limits)
    models: tuple[ModelSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What one turn brought. Counts are cumulative."""

    finished: tuple[ps.Finished, ...]
    by_status: dict[str, int]
    situation: Situation
    resent: int
    sessions: int


class ProducerLoop:
    """Runs until ``stop()``. ``submit`` and ``stop`` may be called from any thread.

    ``report`` is called in the loop's thread with what changed; ``fail`` when the loop ends by an error
    of its own.
    """

    def __init__(
        self,
        address: str,
        session: ps.ProducerSession,
        lane: Lane,
        *,
        report: Callable[[Progress], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._address = address
        self._session = session
        self._lane = lane
        self._report = report
        self._fail = fail
        # Appending and taking from the left are atomic; who orders the appends is the caller.
        self._inbox: deque[tuple[Frame, int]] = deque()
        self._is_asleep = False
        self._is_stopping = threading.Event()
        self._waker = Waker()
        self._context: Context = zmq.Context()
        self._poller = zmq.Poller()
        self._link: Link | None = None
        self._situation = Situation()
        self.thread = threading.Thread(target=self._run, name="headrace-producer", daemon=True)

    def submit(self, frame: Frame, header_bytes: int) -> None:
        """Hand a frame over. The caller orders its calls for one stream by seq."""
        self._inbox.append((frame, header_bytes))
        # The loop looks into the inbox after it has said that it sleeps, so one of the two sees the other.
        if self._is_asleep:
            self._is_asleep = False
            self._waker.wake()

    def stop(self, timeout_s: float) -> bool:
        """Say goodbye and end the thread; False when it did not end in time."""
        self._is_stopping.set()
        self._waker.wake()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poller.register(self._waker.fileno(), zmq.POLLIN)
            while not self._is_stopping.is_set():
                self._turn()
            self._carry_out(self._session.handle(ps.CloseRequested(), time.monotonic_ns()))
        except Exception as error:  # noqa: BLE001 - the thread's edge: the next call must say what happened
            _log.exception("the producer's thread ended by an error of its own")
            self._fail(error)
        finally:
            self._close_link(linger_ms=GOODBYE_LINGER_MS)
            # Blocks until the goodbye is out, at most the linger.
            self._context.term()
            self._waker.close()

    def _turn(self) -> None:
        self._is_asleep = True
        ready: dict[object, int] = dict(self._poller.poll(0 if self._inbox else self._poll_ms()))
        self._is_asleep = False
        if self._waker.fileno() in ready:
            self._waker.drain()
        now_ns = time.monotonic_ns()
        finished: list[ps.Finished] = []
        events = self._events(ready)
        for event in events:
            finished += self._carry_out(self._session.handle(event, now_ns))
        finished += self._carry_out(self._session.handle(ps.Tick(), now_ns))
        self._tell(finished, events)

    def _poll_ms(self) -> int:
        wakeup_ns = self._session.next_wakeup_ns()
        if wakeup_ns is None:
            return MAX_POLL_MS
        # Rounded up: waking a fraction of a millisecond early would spin until the time has come.
        return max(0, min(MAX_POLL_MS, -((time.monotonic_ns() - wakeup_ns) // 1_000_000)))

    def _events(self, ready: Container[object]) -> list[ps.Event]:
        events: list[ps.Event] = []
        link = self._link
        if link is not None and (link.socket in ready or link.monitor in ready):
            events += self._read(link)
            if link.monitor in ready and link.is_lost():
                self._close_link()
                events.append(ps.Disconnected(f"the connection to {link.endpoint} was lost"))
        inbox = self._inbox
        if inbox:
            # What is pushed meanwhile is for the next turn.
            pushed = [inbox.popleft() for _ in range(len(inbox))]
            frames, header_bytes = zip(*pushed, strict=True)
            events.append(ps.FramesPushed(frames, header_bytes))
        return events

    def _read(self, link: Link) -> list[ps.Event]:
        events: list[ps.Event] = []
        for _ in range(MAX_MESSAGES_PER_TURN):
            parts = link.receive()
            if parts is None:
                break
            try:
                message = codec.decode(parts, self._situation.limits, codec.TO_PRODUCER)
            except RemoteProtocolError as error:
                _log.warning("a message of the broker at %s can't be read: %s", link.endpoint, error)
                continue
            if isinstance(message, Welcome):
                self._lane.note_welcome(message.is_shm_possible)
                self._situation = Situation(True, "", message.boot, message.limits, message.models)
            events.append(ps.MessageReceived(message))
        return events

    def _carry_out(self, actions: list[ps.Action]) -> list[ps.Finished]:
        finished: list[ps.Finished] = []
        for action in actions:
            match action:
                case ps.Finished():
                    finished.append(action)
                case ps.Send(message):
                    if self._link is not None and not self._link.send(codec.encode(message)):
                        endpoint = self._link.endpoint
                        self._close_link()
                        lost = ps.Disconnected(f"{endpoint} takes no more messages")
                        self._session.handle(lost, time.monotonic_ns())
                case ps.Disconnect(reason):
                    _log.info("leaving the broker at %s: %s", self._address, reason)
                    self._close_link()
                case ps.Connect():
                    finished += self._connect()
                case _:
                    assert_never(action)
        return finished

    def _connect(self) -> list[ps.Finished]:
        try:
            endpoints = addresses.discover(
                self._address,
                DISCOVERY_TIMEOUT_S,
                context=self._context,
                should_stop=self._is_stopping.is_set,
            )
            self._link = Link(
                self._context,
                PRODUCER,
                endpoints.frames,
                max_message_bytes=self._situation.limits.max_message_bytes,
            )
        except HeadraceError as error:
            return self._carry_out(self._session.handle(ps.Disconnected(str(error)), time.monotonic_ns()))
        self._link.register(self._poller)
        connected = ps.Connected(self._lane.prepare(endpoints.host_key))
        return self._carry_out(self._session.handle(connected, time.monotonic_ns()))

    def _close_link(self, linger_ms: int = 0) -> None:
        if self._link is not None:
            self._link.unregister(self._poller)
            self._link.close(linger_ms)
            self._link = None

    def _tell(self, finished: list[ps.Finished], events: list[ps.Event]) -> None:
        session, told = self._session, self._situation
        if session.state is not ps.State.OPEN and (
            self._situation.is_connected or self._situation.away_reason != session.away_reason
        ):
            was = self._situation
            self._situation = Situation(False, session.away_reason, was.boot, was.limits, was.models)
        if not finished and self._situation is told and all(type(each) is ps.FramesPushed for each in events):
            return  # nothing but pushes: what is known of the frames' ends is the same
        self._report(
            Progress(
                tuple(finished),
                session.by_status(),
                self._situation,
                session.resent_count,
                session.sessions_count,
            )
        )
