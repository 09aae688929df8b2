"""The I/O thread of a producer: owns its socket, carries out what the session asks for.

Not here: what is sent when (``producer_session``), what users call (``producer``).

Theory of operation. Whoever uses session or socket holds the turn: the I/O thread while it is awake, and a
thread that pushes, for as long as it takes to send its frame, when the I/O thread sleeps and no frame came
shortly before. That saves a lone frame the way through another thread; frames that come fast are left to the
I/O thread, which sends in one message what came while it sent the one before. A socket may move between
threads with a full memory barrier, which a lock is. The I/O thread sleeps on descriptors, which leaves the
socket to others; they are signalled once for all that came since the socket was last used, so whoever has
used it looks whether something came, and wakes the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
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

#: A frame that comes so long after the one before has nothing to share a message with: whoever pushes it
#: sends it. Shorter, and a burst begins with a message of its own; longer, and a camera of 1,000 frames/s
#: pays for waking a thread: 0.1 ms of latency on an idle machine.
LONE_NS = 500_000

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
        self._turn_lock = threading.Lock()
        self._submitted_ns = 0
        self._fault = ""  # why the link is of no more use, found by a thread that pushed
        self._error: Exception | None = None  # a bug that it met
        self._refused: list[ps.Finished] = []  # what it was not to send, to be told by the I/O thread
        self._is_stopping = threading.Event()
        self._waker = Waker()
        self._context: Context = zmq.Context()
        self._poller = zmq.Poller()
        self._link: Link | None = None
        self._situation = Situation()
        self.thread = threading.Thread(target=self._run, name="headrace-producer", daemon=True)

    def submit(self, frame: Frame, header_bytes: int) -> None:
        """Hand a frame over. The caller orders its calls for one stream by seq."""
        now_ns = time.monotonic_ns()
        was_ns, self._submitted_ns = self._submitted_ns, now_ns
        if now_ns - was_ns >= LONE_NS and self._is_asleep and self._turn_lock.acquire(blocking=False):
            try:
                is_sent = self._send_now(frame, header_bytes, now_ns)
            finally:
                self._turn_lock.release()
            if is_sent:
                return
        self._inbox.append((frame, header_bytes))
        # The loop looks into the inbox after it has said that it sleeps, so one of the two sees the other.
        if self._is_asleep:
            self._is_asleep = False
            self._waker.wake()

    def _send_now(self, frame: Frame, header_bytes: int, now_ns: int) -> bool:
        """Send a frame from the thread that pushes it; False, with nothing done, when it has to queue."""
        link = self._link
        if link is None or self._fault or self._inbox or self._session.state is not ps.State.OPEN:
            return False
        must_wake = True
        try:
            for action in self._session.handle(ps.FramesPushed((frame,), (header_bytes,)), now_ns):
                # A push leads to nothing else: it is sent, kept until there is credit, or refused.
                if type(action) is ps.Finished:
                    self._refused.append(action)
                elif type(action) is ps.Send and not link.send(codec.encode(action.message)):
                    self._fault = f"{link.endpoint} takes no more messages"
            must_wake = bool(self._fault or self._refused) or link.has_input()
        except Exception as error:  # noqa: BLE001 - a bug of ours, not of the caller: it ends the thread
            self._error = error
        except BaseException:
            # A signal's: what of the frame was sent nobody knows. On a new connection all is sent again.
            self._fault = "a push was interrupted"
            raise
        finally:
            if must_wake:
                self._waker.wake()
        return True

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
            with self._turn_lock:
                self._carry_out(self._session.handle(ps.CloseRequested(), time.monotonic_ns()))
        except Exception as error:  # noqa: BLE001 - the thread's edge: the next call must say what happened
            _log.exception("the producer's thread ended by an error of its own")
            self._fail(error)
        finally:
            with self._turn_lock:
                self._close_link(linger_ms=GOODBYE_LINGER_MS)
            # Blocks until the goodbye is out, at most the linger.
            self._context.term()
            self._waker.close()

    def _turn(self) -> None:
        with self._turn_lock:
            # First said, then looked: who submits does it the other way round, so one sees the other.
            self._is_asleep = True
            timeout_ms = self._poll_ms()
        ready = self._poller.poll(timeout_ms)
        with self._turn_lock:
            self._is_asleep = False
            if any(descriptor == self._waker.fileno() for descriptor, _ in ready):
                self._waker.drain()
            if self._error is not None:
                raise self._error
            now_ns = time.monotonic_ns()
            finished, self._refused = self._refused, []
            events = self._events()
            for event in events:
                finished += self._carry_out(self._session.handle(event, now_ns))
            finished += self._carry_out(self._session.handle(ps.Tick(), now_ns))
            self._tell(finished, events)

    def _poll_ms(self) -> int:
        if self._inbox or (self._link is not None and self._link.has_input()):
            return 0
        wakeup_ns = self._session.next_wakeup_ns()
        if wakeup_ns is None:
            return MAX_POLL_MS
        # Rounded up: waking a fraction of a millisecond early would spin until the time has come.
        return max(0, min(MAX_POLL_MS, -((time.monotonic_ns() - wakeup_ns) // 1_000_000)))

    def _events(self) -> list[ps.Event]:
        events: list[ps.Event] = []
        link = self._link
        fault, self._fault = self._fault, ""
        if link is not None:
            events += self._read(link)
            if link.is_lost():
                fault = f"the connection to {link.endpoint} was lost"
            if fault:
                self._close_link()
                events.append(ps.Disconnected(fault))
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
        for descriptor in self._link.descriptors():
            self._poller.register(descriptor, zmq.POLLIN)
        connected = ps.Connected(self._lane.prepare(endpoints.host_key))
        return self._carry_out(self._session.handle(connected, time.monotonic_ns()))

    def _close_link(self, linger_ms: int = 0) -> None:
        if self._link is not None:
            for descriptor in self._link.descriptors():
                self._poller.unregister(descriptor)
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
