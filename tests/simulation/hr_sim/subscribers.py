"""Subscriber processes: the production session in a loop as clients/subscriber_loop.py's, and a reader."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from headrace.clients import subscriber_events as se
from headrace.clients.subscriber_events import Mode, Start
from headrace.clients.subscriber_session import SubscriberSession
from headrace.errors import RemoteProtocolError
from headrace.protocol.messages import Limits
from hr_sim.network import MS, Dialer, Link, Node
from hr_sim.subscriber_checks import SubscriberRecord

if TYPE_CHECKING:
    from hr_sim.world import World


class SubscriberNode(Node):
    """One subscriber. A restart is a new process that has had nothing yet."""

    def __init__(self, world: World, name: str, topics: tuple[bytes, ...], mode: Mode, start: Start) -> None:
        super().__init__(world, name)
        self.topics = topics
        self.mode = mode
        self.start = start
        self._dialer = Dialer(self, ("results", "control"))
        self._begin()

    def _begin(self) -> None:
        self.session = SubscriberSession(
            self.topics, mode=self.mode, start=self.start, jitter=self.world.rng.random()
        )
        self.record = SubscriberRecord(self.world, self.name, self.topics, self.mode, self.start)
        self._limits = Limits()
        self._results: deque[tuple[bytes, Any]] = deque()
        self._answers: list[Any] = []
        self._lost: list[str] = []
        self._links: tuple[Link, Link] | None = None
        self._subscribed: set[bytes] = set()
        self._unread = 0
        self._is_reading = False
        self._was_open = False
        self.wake(self.world.now_ns)

    # -- the reader ---------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self.mode is Mode.LATEST or self._unread < self.world.options.reader_count

    def _put(self, item: Any) -> None:
        self.record.take(item)
        read_ms = self.world.options.read_ms
        if read_ms and not self.world.is_healing:
            self._unread += 1
            if not self._is_reading:
                self._is_reading = True
                self.world.after(read_ms * MS, self._read_one, self.run)

    def _read_one(self, run: int) -> None:
        if run != self.run or not self.is_up:
            return
        self._unread = 0 if self.world.is_healing else self._unread - 1
        self._is_reading = self._unread > 0
        if self._is_reading:
            self.world.after(self.world.options.read_ms * MS, self._read_one, run)
        self.wake(self.world.now_ns)

    # -- the process --------------------------------------------------------------------------------

    def receive(self, link: Link, message: Any) -> None:
        if self._links is None or link not in self._links:
            return
        if link is self._links[0]:
            self._results.append(message)
            link.unread += 1
        else:
            self._answers.append(message)
        self.wake(self.world.now_ns)

    def lose(self, link: Link) -> None:
        if self._links is not None and link in self._links:
            self._close_links()
            self._lost.append("the connection was lost")
            self.wake(self.world.now_ns)

    def dialled(self, links: list[Link]) -> None:
        if links:
            self._links = (links[0], links[1])
            self._subscribed = set()
            self._results.clear()
            self._answers.clear()
            self._handle(se.Connected(), self.world.now_ns)
        else:
            self._handle(se.Disconnected("no answer"), self.world.now_ns)
        self.wake(self.world.now_ns)

    def kill(self) -> None:
        super().kill()
        self._dialer.forget()

    def revive(self) -> None:
        super().revive()
        self._begin()

    def wakeup_ns(self) -> int | None:
        return self.session.next_wakeup_ns()

    def turn(self, now_ns: int) -> None:
        answers, self._answers = self._answers, []
        for message in answers:
            self._handle(se.Answered(self._read(message)), now_ns)
        while self._results and self._links is not None and self._has_room():
            topic, message = self._results.popleft()
            self._links[0].unread -= 1
            self._handle(se.Published(topic, self._read(message)), now_ns)
        lost, self._lost = self._lost, []
        for reason in lost:
            self._results.clear()
            self._answers.clear()
            self._handle(se.Disconnected(reason), now_ns)
        self._handle(se.Tick(self._has_room()), now_ns)
        self.check_now_and_then(self.session)

    def _read(self, message: Any) -> Any:
        try:
            return self.world.unwrap(message, self._limits)
        except RemoteProtocolError as error:
            raise AssertionError(f"{self.name} can't read the broker: {error}") from error

    def _handle(self, event: se.Event, now_ns: int) -> None:
        self.world.event_count += 1
        for action in self.session.handle(event, now_ns):
            match action:
                case se.Deliver(item):
                    self._put(item)
                case se.Ask(request):
                    if self._links is not None:
                        self._links[1].send(self, self.world.wrap(request))
                case se.Subscribe(topic):
                    self._subscribe(topic)
                case se.Disconnect():
                    self._close_links()
                case se.Connect():
                    self._dialer.dial()
        is_open = self.session.state is se.State.OPEN
        if is_open and not self._was_open and self.session.boot is not None:
            self.record.opened(self.session.boot)
        self._was_open = is_open

    def _subscribe(self, topic: bytes) -> None:
        if self._links is None:
            return
        if topic in self._subscribed:
            self._links[0].send(self, ("unsubscribe", topic))
        self._links[0].send(self, ("subscribe", topic))
        self._subscribed.add(topic)

    def _close_links(self) -> None:
        if self._links is not None:
            for link in self._links:
                link.close(self)
            self._links = None
