"""The I/O thread of a subscriber: owns its sockets, carries out what the session asks for.

Not here: what is fetched and yielded when (``subscriber_session``), what users call (``subscriber``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
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


class Sink(Protocol):
    """Where items go, in the loop's thread."""

    def has_room(self) -> bool: ...

    def put(self, items: Sequence[Outcome | Missed]) -> None: ...


class SubscriberLoop:
    """Runs until ``stop()``. ``stop`` and ``wake`` may be called from any thread.

    ``put_all`` is called in the loop's thread when all items of a turn were put, ``changed`` when the
    session's state has changed, ``ended`` once when the thread ends, with the error that ended it or None.
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
        self._waker = Waker()
        self._context: Context = zmq.Context()
        self._poller = zmq.Poller()
        self._links: tuple[Link, Link] | None = None
        self._is_reading = False
        self._subscribed: set[bytes] = set()
        self.thread = threading.Thread(target=self._run, name="headrace-subscriber", daemon=True)

    def wake(self) -> None:
        self._waker.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False when it did not end in time."""
        self._is_stopping.set()
        self._waker.wake()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._poller.register(self._waker.fileno(), zmq.POLLIN)
            while not self._is_stopping.is_set():
                self._turn()
        except Exception as error:  # noqa: BLE001 - the thread's edge: readers must learn what happened
            _log.exception("the subscriber's thread ended by an error of its own")
            failure = error
        finally:
            self._close_links()
            self._context.term()
            self._waker.close()
            self._ended(failure)

    def _turn(self) -> None:
        ready: dict[object, int] = dict(self._poller.poll(self._poll_ms()))
        if self._waker.fileno() in ready:
            self._waker.drain()
        state = self._session.state
        if self._links is not None and ready:
            self._read(*self._links, ready)
            self._put_all()
        has_room = self._sink.has_room()
        if self._session.needs_tick(has_room, time.monotonic_ns()):
            self._handle(se.Tick(has_room))
            self._put_all()
        self._read_results(wanted=has_room)
        if self._session.state is not state:
            self._changed()

    def _poll_ms(self) -> int:
        wakeup_ns = self._session.next_wakeup_ns()
        if wakeup_ns is None:
            return MAX_POLL_MS
        return max(0, min(MAX_POLL_MS, -((time.monotonic_ns() - wakeup_ns) // 1_000_000)))

    def _read(self, results: Link, control: Link, ready: Container[object]) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN if control.socket in ready else 0):
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
            if self._links is not None and link.monitor in ready and link.is_lost():
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
        self._is_reading = True
        results.register(self._poller)
        control.register(self._poller)
        self._handle(se.Connected())

    def _subscribe(self, topic: bytes) -> None:
        if self._links is None:
            return
        results = self._links[0].socket
        if topic in self._subscribed:
            results.setsockopt(zmq.UNSUBSCRIBE, topic)
        results.setsockopt(zmq.SUBSCRIBE, topic)
        self._subscribed.add(topic)

    def _read_results(self, *, wanted: bool) -> None:
        """Stop polling results while the reader has no room: they wait at the broker's side."""
        if self._links is None or wanted is self._is_reading:
            return
        self._is_reading = wanted
        if wanted:
            self._poller.register(self._links[0].socket, zmq.POLLIN)
        else:
            self._poller.unregister(self._links[0].socket)

    def _close_links(self) -> None:
        if self._links is not None:
            for link in self._links:
                link.unregister(self._poller)
                link.close()
            self._links = None
