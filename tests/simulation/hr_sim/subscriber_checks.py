"""Judges what one subscriber process was handed: each outcome once, in order, and no hole without a word.

What the promise can't cover, and what is left out here: a boot that the subscriber never saw, and in a
boot that has ended a stream of which nothing had reached it by then (nobody is left who knows of it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.clients.records import Missed
from headrace.clients.subscriber_events import Mode, Start
from headrace.protocol.messages import Outcome
from hr_sim.book import Violation

if TYPE_CHECKING:
    from hr_sim.world import World

_Place = tuple[int, str]  # boot, stream


class SubscriberRecord:
    """Everything that one subscriber process was handed."""

    def __init__(self, world: World, name: str, topics: tuple[bytes, ...], mode: Mode, start: Start) -> None:
        self.name = name
        self._world = world
        self._topics = topics
        self._is_latest = mode is Mode.LATEST
        self._is_from_now = start is Start.NOW
        self._had: dict[tuple[str, int, int], int] = {}
        self._next: dict[_Place, int] = {}
        self._first: dict[_Place, int] = {}
        self._open_ended: dict[_Place, int] = {}
        self._opened_at: dict[int, int] = {}
        self.outcomes_count = 0
        self.missed_count = 0

    def covers(self, stream: str) -> bool:
        """Tell whether a stream's outcomes are wanted."""
        topic = stream.encode() + b"\0"
        return any(topic.startswith(wanted) for wanted in self._topics)

    def opened(self, boot: int) -> None:
        """The subscriber is up: from here on it misses nothing of this boot silently."""
        self._opened_at.setdefault(boot, self._world.now_ns)

    def take(self, item: Outcome | Missed) -> None:
        """Judge what is handed to the reader."""
        if isinstance(item, Outcome):
            self._take_outcome(item)
        else:
            self._take_missed(item)

    def _take_outcome(self, outcome: Outcome) -> None:
        key = (outcome.stream, outcome.epoch, outcome.seq)
        self.outcomes_count += 1
        if not self.covers(outcome.stream):
            raise Violation(f"{self.name} gets {outcome.stream}, not one of {self._topics}", key)
        truth = self._world.outcomes.get((outcome.boot, outcome.stream, outcome.pub_seq))
        if truth is None or truth[0] != key or truth[1] is not outcome.status:
            raise Violation(f"{self.name} gets what was never published: {outcome}, but {truth}", key)
        before = self._had.get(key)
        if before is not None:
            raise Violation(f"{self.name} gets it twice: in boot {before} and in {outcome.boot}", key)
        self._had[key] = outcome.boot
        self._advance(outcome.boot, outcome.stream, outcome.pub_seq, outcome.pub_seq + 1, key)

    def _take_missed(self, missed: Missed) -> None:
        self.missed_count += 1
        if self._is_latest:
            raise Violation(f"{self.name} reads in mode latest and is told {missed}")
        if missed.last is None:
            self._open_ended[missed.boot, missed.stream] = missed.first
            return
        if missed.last < missed.first:
            raise Violation(f"{self.name} is told an empty range: {missed}")
        broker = self._world.broker
        if missed.boot == broker.boot and not broker.has_left_ring(missed.stream, missed.last):
            raise Violation(f"{self.name} is told {missed}, but the broker still has {missed.last}")
        self._advance(missed.boot, missed.stream, missed.first, missed.last + 1, None)

    def _advance(
        self, boot: int, stream: str, first: int, end: int, key: tuple[str, int, int] | None
    ) -> None:
        place = (boot, stream)
        if place in self._open_ended:
            raise Violation(f"{self.name} gets {first} of {place} after the rest was missed", key)
        expected = self._next.get(place)
        if expected is None:
            self._first[place] = first
            expected = first if self._is_from_now or self._is_latest else 0
        while expected < first and self._is_repeat(boot, stream, expected):
            expected += 1
        if first < expected or (first > expected and not self._is_latest):
            raise Violation(f"{self.name} gets {first} of {stream} (boot {boot}) after {expected - 1}", key)
        self._next[place] = end

    def _is_repeat(self, boot: int, stream: str, pub_seq: int) -> bool:
        """Tell whether an outcome is of a frame that this subscriber has had from an earlier boot."""
        truth = self._world.outcomes.get((boot, stream, pub_seq))
        return truth is not None and self._had.get(truth[0], boot) != boot

    # -- the end ------------------------------------------------------------------------------------

    def hole(self) -> str | None:
        """Return what this subscriber should have been handed by now, None if nothing."""
        last_boot = self._world.broker.boot
        for (boot, stream), next_pub_seq in self._world.next_pub_seq.items():
            if boot not in self._opened_at or not self.covers(stream):
                continue
            place = (boot, stream)
            if place in self._open_ended or (boot != last_boot and place not in self._next):
                continue
            if self._is_latest:
                if boot != last_boot:
                    continue
                expected = self._next.get(place, 0)
                is_done = expected == next_pub_seq or self._is_repeat(boot, stream, next_pub_seq - 1)
                is_done = is_done or self._world.broker.has_left_ring(stream, next_pub_seq - 1)
                published_ns = self._world.outcomes[boot, stream, next_pub_seq - 1][2]
                if not is_done and not (self._is_from_now and published_ns < self._opened_at[boot]):
                    return f"{self.name} has {stream} up to {expected - 1}, the newest is {next_pub_seq - 1}"
                continue
            expected = self._start_of(place, next_pub_seq)
            while expected < next_pub_seq and self._is_repeat(boot, stream, expected):
                expected += 1
            if expected < next_pub_seq and (boot == last_boot or place in self._next):
                return (
                    f"{self.name} has {stream} (boot {boot}) up to {expected - 1},"
                    f" published are {next_pub_seq - 1}, nothing says missed"
                )
        return None

    def _start_of(self, place: _Place, next_pub_seq: int) -> int:
        """Return what is expected next of a stream."""
        expected = self._next.get(place)
        if expected is not None:
            return expected
        if not self._is_from_now:
            return 0
        boot, stream = place
        opened_ns = self._opened_at[boot]
        for pub_seq in range(next_pub_seq):
            if self._world.outcomes[boot, stream, pub_seq][2] > opened_ns:
                return pub_seq
        return next_pub_seq
