"""The I/O of a subscriber: owns its sockets, carries out what the session asks for.

Not here: what is fetched and yielded when (``subscriber_session``), what users call (``subscriber``).

Theory of operation. A turn reads what came, lets the session decide and puts the items. A reader that waits
runs the turns itself (it leads), one reader at a time: an item then takes no way through another thread. The
loop's own thread runs them while no reader waits. Sockets may move between threads with a full memory
barrier: whoever runs a turn holds the turn lock. Sleepers hold no lock, since descriptors can be slept on
without touching a socket; they are signalled once for all that came since it was last used, so each looks
whether something came before it sleeps. The main thread never leads: Python runs signal handlers there,
and their exceptions would come in the middle of a turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import zmq

from headrace import addresses
from headrace.clients import subscriber_events as se
from headrace.clients.records import Missed
from headrace.clients.sockets import CONTROL, SUBSCRIBER, Context, Link, Waker
from headrace.clients.subscriber_session import SubscriberSession
from headrace.errors import HeadraceError, RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import Limits, Outcome

_log = logging.getLogger("headrace.clients.subscriber")

DISCOVERY_TIMEOUT_S = 2.0
MAX_MESSAGES_PER_TURN = 256
MAX_POLL_MS = 1_000


#: How long the thread leaves the turns to a reader that went off with its item: it is back in far less, and a
#: slow one must not keep other streams' items and the session's timers waiting. Looking whether it is back
#: costs the thread a few microseconds each time.
HOLD_S = 0.02


class Sink(Protocol):
    """Where items go, in the thread that runs the turn."""

    def has_room(self) -> bool: ...

    def put(self, items: Sequence[Outcome | Missed]) -> None: ...


class _Bed:
    """What one thread at a time sleeps on: the links' descriptors, and a waker of its own."""

    def __init__(self) -> None:
        self.waker = Waker()
        self.is_slept_in = False
        self._poller = zmq.Poller()
        self._poller.register(self.waker.fileno(), zmq.POLLIN)

    def watch(self, *links: Link) -> None:
        for link in links:
            for descriptor in link.descriptors():
                self._poller.register(descriptor, zmq.POLLIN)

    def forget(self, *links: Link) -> None:
        for link in links:
            for descriptor in link.descriptors():
                self._poller.unregister(descriptor)

    def sleep(self, timeout_ms: int) -> None:
        ready = self._poller.poll(timeout_ms)
        if any(descriptor == self.waker.fileno() for descriptor, _ in ready):
            self.waker.drain()


class SubscriberLoop:
    """Runs until ``stop()``. ``stop``, ``wake`` and ``lead`` may be called from any thread.

    ``put_all`` is called when all items of a turn were put, ``changed`` when the session's state has changed,
    both by whoever runs the turn; ``ended`` once when the thread ends, with the error that ended it or None.
    """

    def __init__(
        self,
        address: str,
        session: SubscriberSession,
        sink: Sink,
        *,
        put_all: Callable[[], None],
        changed: Callable[[], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._address = address
        self._session = session
        self._sink = sink
        self._put_all = put_all
        self._changed = changed
        self._ended = ended
        self._limits = Limits()
        self._is_stopping = threading.Event()
        self._failure: BaseException | None = None
        self._context: Context = zmq.Context()
        self._links: tuple[Link, Link] | None = None
        self._subscribed: set[bytes] = set()
        self._turn_lock = threading.Lock()
        self._own, self._leaders = _Bed(), _Bed()
        self._lead_lock = threading.Lock()
        self._leader: int | None = None
        self._led_s = -HOLD_S
        self._relief = threading.Event()
        self._main_thread = threading.main_thread().ident
        self.thread = threading.Thread(target=self._run, name="headrace-subscriber", daemon=True)

    def wake(self) -> None:
        for bed in (self._own, self._leaders):
            bed.waker.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False when it did not end in time."""
        self._is_stopping.set()
        self._relief.set()
        self.wake()
        if threading.get_ident() not in {self.thread.ident, self._leader}:
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def lead(
        self, is_done: Callable[[], bool], deadline_s: float | None, *, others_wait: Callable[[], bool]
    ) -> bool:
        """Run turns in the calling thread until ``is_done()`` or ``time.monotonic()`` reaches the deadline;
        False, at once, when another thread does so or this one must not, or when the loop has ended."""
        ident = threading.get_ident()
        if ident == self._main_thread or not self._lead_lock.acquire(blocking=False):
            return False
        try:
            self._leader = ident
            if self._own.is_slept_in:
                self._own.waker.wake()
            while not self._is_stopping.is_set():
                if is_done():
                    return True
                limit_ms = MAX_POLL_MS
                if deadline_s is not None:
                    limit_ms = -int((time.monotonic() - deadline_s) * 1_000 // 1)
                    if limit_ms <= 0:
                        return False
                self._turn(self._leaders, limit_ms)
        except BaseException as error:
            # What of a turn was done nobody knows: the subscriber ends rather than lose an outcome unseen.
            self._failure = error
            self._is_stopping.set()
            if not isinstance(error, Exception):
                raise
            _log.exception("a reader's turn ended by an error of its own")
        finally:
            self._led_s = time.monotonic()
            self._leader = None
            self._lead_lock.release()
            if self._own.is_slept_in:
                self._own.waker.wake()
            if self._is_stopping.is_set() or others_wait():
                self._relief.set()
        return False

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                if self._leader is None and time.monotonic() >= self._led_s + HOLD_S:
                    self._turn(self._own, MAX_POLL_MS)
                    if self._leader is not None:
                        # It began meanwhile, and may sleep although its item is there.
                        self._leaders.waker.wake()
                elif self._relief.wait(HOLD_S):
                    self._relief.clear()
                    self._led_s = -HOLD_S
        except Exception as error:  # noqa: BLE001 - the thread's edge: readers must learn what happened
            _log.exception("the subscriber's thread ended by an error of its own")
            self._failure = error
            self._is_stopping.set()
        finally:
            self._leaders.waker.wake()
            with self._lead_lock:
                self._close_links()
                self._context.term()
                self._own.waker.close()
                self._leaders.waker.close()
            self._ended(self._failure)

    # -- a turn, of the thread or of a reader ----------------------------------------------------------

    def _turn(self, bed: _Bed, limit_ms: int) -> None:
        with self._turn_lock:
            # Said before it is looked whether something came: who uses the socket after that wakes this bed.
            bed.is_slept_in = True
            timeout_ms = min(limit_ms, self._sleep_ms())
        if timeout_ms:
            bed.sleep(timeout_ms)
        bed.is_slept_in = False
        with self._turn_lock:
            self._work()

    def _sleep_ms(self) -> int:
        if self._links is not None and (
            self._links[1].has_input() or (self._links[0].has_input() and self._sink.has_room())
        ):
            return 0
        wakeup_ns = self._session.next_wakeup_ns()
        if wakeup_ns is None:
            return MAX_POLL_MS
        return max(0, min(MAX_POLL_MS, -((time.monotonic_ns() - wakeup_ns) // 1_000_000)))

    def _work(self) -> None:
        state = self._session.state
        if self._links is not None:
            self._read(*self._links)
            self._put_all()
        has_room = self._sink.has_room()
        if self._session.needs_tick(has_room, time.monotonic_ns()):
            self._handle(se.Tick(has_room))
            self._put_all()
        if self._session.state is not state:
            self._changed()

    def _read(self, results: Link, control: Link) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN if control.has_input() else 0):
            parts = control.receive()
            if parts is None:
                break
            try:
                answer = codec.decode(parts, self._limits, codec.TO_CONTROL)
            except RemoteProtocolError as error:
                _log.warning("an answer of the broker at %s can't be read: %s", self._address, error)
                continue
            self._handle(se.Answered(answer))
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._links is None or not self._sink.has_room():
                break
            parts = results.receive()
            if parts is None:
                break
            try:
                published = codec.decode_published(parts, self._limits)
            except RemoteProtocolError as error:
                # Its outcomes are a gap from here on, seen by their pub_seq and fetched or missed.
                _log.warning("a result of the broker at %s can't be read: %s", self._address, error)
                continue
            self._handle(se.Published(parts[0], published))
        for link in (results, control):
            if self._links is not None and link.is_lost():
                self._close_links()
                self._handle(se.Disconnected(f"the connection to {link.endpoint} was lost"))

    def _handle(self, event: se.Event) -> None:
        items: list[Outcome | Missed] = []
        for action in self._session.handle(event, time.monotonic_ns()):
            if type(action) is se.Deliver:
                items.append(action.item)
            else:
                self._carry_out(action)
        if items:
            self._sink.put(items)

    def _carry_out(self, action: se.Action) -> None:
        match action:
            case se.Deliver(item):
                self._sink.put([item])
            case se.Ask(request):
                if self._links is not None and not self._links[1].send(codec.encode(request)):
                    _log.warning("control of the broker at %s takes no more requests", self._address)
            case se.Subscribe(topic):
                self._subscribe(topic)
            case se.Disconnect(reason):
                _log.info("leaving the broker at %s: %s", self._address, reason)
                self._close_links()
            case se.Connect():
                self._connect()
            case _:
                assert_never(action)

    def _connect(self) -> None:
        results: Link | None = None
        try:
            endpoints = addresses.discover(
                self._address,
                DISCOVERY_TIMEOUT_S,
                context=self._context,
                should_stop=self._is_stopping.is_set,
            )
            max_bytes = self._limits.max_message_bytes
            results = Link(self._context, SUBSCRIBER, endpoints.results, max_message_bytes=max_bytes)
            control = Link(self._context, CONTROL, endpoints.control, max_message_bytes=max_bytes)
        except HeadraceError as error:
            if results is not None:
                results.close()
            self._handle(se.Disconnected(str(error)))
            return
        self._links = (results, control)
        self._subscribed = set()
        for bed in (self._own, self._leaders):
            bed.watch(results, control)
        self._handle(se.Connected())

    def _subscribe(self, topic: bytes) -> None:
        if self._links is None:
            return
        results = self._links[0].socket
        if topic in self._subscribed:
            results.setsockopt(zmq.UNSUBSCRIBE, topic)
        results.setsockopt(zmq.SUBSCRIBE, topic)
        self._subscribed.add(topic)

    def _close_links(self) -> None:
        if self._links is not None:
            for bed in (self._own, self._leaders):
                bed.forget(*self._links)
            for link in self._links:
                link.close()
            self._links = None
