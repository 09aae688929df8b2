"""Sends a load: frames are pushed when they are due, whatever became of those before.

A frame that can't leave within MAX_LAG_S of its time is left out and counted as unsent, so that a step ends
on time even when the pool or the generator is too slow for it. Why frames were late is kept apart: the
producers had no room (the pool's doing), or this process was not there in time (its own). Not here: the
schedule, and what the figures mean.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import numpy as np

from headrace.clients.lane import LaneChoice
from headrace.clients.load.ledger import Ledger
from headrace.clients.load.payloads import Content, Payloads, Size
from headrace.clients.load.schedule import Pattern, Schedule, draw, spread
from headrace.clients.producer import Producer
from headrace.clients.records import FrameId, ProducerAccount
from headrace.clients.subscriber import Subscriber
from headrace.errors import NotDeliveredError, RequestTimeoutError
from headrace.protocol.messages import Encoding, Keep

#: A frame that is later than this is not sent any more: whatever came of it would tell nothing of the pool.
MAX_LAG_S = 1.0

#: Frames and bytes that the producers hold without a known end, all together. Large, since the load is to
#: wait in the pool and not here; bounded, since a pool that stands still must not take this machine's memory.
WINDOW_FRAMES = 65_536
WINDOW_BYTES = 1024 * 1024 * 1024

#: How often progress is told while waiting.
TICK_S = 0.1

#: Time to be ready for the first frame of a step.
LEAD_S = 0.05

#: How long the outcomes of frames whose end the producers know may take to come to the subscriber: it asks
#: for lost ones twice a second.
TAIL_LIMIT_S = 3.0

CONNECT_TIMEOUT_S = 10.0


class Cause(StrEnum):
    """Why a frame was not sent: the generator was late, or its producers had no room."""

    SENDER = "sender"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent. ``sizes`` and ``priorities`` are (value, share): a stream has one of each, so that frames
    of one priority never wait for another's to keep their stream's order."""

    sizes: tuple[tuple[Size, float], ...]
    rates: tuple[float, ...] = (30.0,)
    pattern: Pattern = Pattern.CAMERAS
    streams_count: int = 20
    priorities: tuple[tuple[int, float], ...] = ((0, 1.0),)
    ttl_ms: int | None = None
    keep: Keep = Keep.ALL
    seconds: float = 10.0
    warm_up_s: float = 1.0
    drain_limit_s: float = 30.0
    model: str = ""
    encoding: Encoding = Encoding.RAW
    content: Content = Content.NOISE
    producers_count: int = 4
    lane: LaneChoice = LaneChoice.AUTO
    seed: int = 0

    @property
    def step_s(self) -> float:
        """How long frames are sent at each rate."""
        return self.warm_up_s + self.seconds


@dataclass(slots=True)
class Step:
    """What happened at one rate: lines ``first`` to ``end`` of the ledger, and what it does not hold. Times
    are on the monotonic clock; CPU seconds are those used while sending. ``unsent`` has when each frame was
    due, ``held_up`` counts frames that found no room at once. What the producers know of the ends comes
    last."""

    rate: float
    first: int
    scheduled: int
    began_s: float
    seed: int
    end: int = 0
    sending_s: float = 0.0
    unsent: list[tuple[float, Cause]] = field(default_factory=list)
    unfinished_lines: frozenset[int] = frozenset()
    held_up: int = 0
    process_cpu_s: float = 0.0
    sender_cpu_s: float = 0.0
    drain_s: float = 0.0
    is_interrupted: bool = False
    sent: int = 0
    unknown: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    by_lane: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    is_missed_unknown: bool = False
    duplicates: int = 0
    strangers: int = 0


class Generator:
    """Connections to one broker and the ledger of everything sent through them; a context manager.

    Invariant: every frame handed to a producer has exactly one line of the ledger."""

    def __init__(self, address: str, plan: LoadPlan) -> None:
        """Make the frames and connect. Raises UnreachableError, ConfigError, LocalError, and ValueError when
        the streams are too few for the shares."""
        self.plan = plan
        count = plan.streams_count
        self.size_of = spread([share for _, share in plan.sizes], count)
        self.priority_of = _shuffled(spread([share for _, share in plan.priorities], count), plan.seed)
        self._payloads = Payloads(
            [size for size, _ in plan.sizes], encoding=plan.encoding, content=plan.content, seed=plan.seed
        )
        # A name of its own for each run: two generators on one pool do not take each other's streams.
        self.prefix = f"bench-{secrets.token_hex(4)}/"
        self.ledger = Ledger(tuple(f"{self.prefix}cam-{number}" for number in range(count)))
        self._producer_of = share_out(self.priority_of, plan.producers_count)
        self._producers: list[Producer] = []
        self._subscriber = Subscriber(
            address, prefix=self.prefix, start="now", sink=self.ledger, timeout=CONNECT_TIMEOUT_S
        )
        try:
            for number in range(max(self._producer_of) + 1):
                self._producers.append(self._producer(address, number))
            for producer in self._producers:
                producer.wait_connected(CONNECT_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, rate: float, seed: int, on_tick: Callable[[], None], stop: threading.Event) -> Step:
        """Send one step and wait for the outcomes of its frames, at most ``drain_limit_s`` for the last.

        ``on_tick`` is called in this thread several times a second. ``stop`` ends the sending early."""
        schedule = draw(self.plan.pattern, rate, self.plan.step_s, self.plan.streams_count, seed)
        before, ledger = self._totals(), self.ledger
        missed, duplicates, strangers = ledger.missed_count, ledger.duplicate_count, ledger.stranger_count
        step = Step(rate, len(ledger), len(schedule.times_s), time.monotonic() + LEAD_S, seed)
        process_s, sender_s = time.process_time(), time.thread_time()
        self._send(schedule, step, on_tick, stop)
        step.process_cpu_s = time.process_time() - process_s
        step.sender_cpu_s = time.thread_time() - sender_s
        step.end = len(ledger)
        step.is_interrupted = stop.is_set()
        self._drain(step, on_tick)
        after = self._totals()
        step.sent = after.sent - before.sent
        step.unfinished_lines = self._unfinished_lines(step.first)
        step.unknown = after.unknown - before.unknown
        step.by_status = Counter(after.by_status) - Counter(before.by_status)
        step.rejected = Counter(after.rejected) - Counter(before.rejected)
        step.by_lane = Counter(after.by_lane) - Counter(before.by_lane)
        step.missed = ledger.missed_count - missed
        step.is_missed_unknown = ledger.is_missed_unknown
        step.duplicates = ledger.duplicate_count - duplicates
        step.strangers = ledger.stranger_count - strangers
        return step

    def close(self) -> None:
        """End all connections at once; what has no outcome yet is given up."""
        for producer in self._producers:
            with contextlib.suppress(NotDeliveredError):
                producer.close(timeout=0)
        self._subscriber.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- sending -------------------------------------------------------------------------------------

    def _send(
        self, schedule: Schedule, step: Step, on_tick: Callable[[], None], stop: threading.Event
    ) -> None:
        cause = Cause.SENDER
        next_tick_s = 0.0
        for offset_s, stream in zip(schedule.times_s, schedule.streams, strict=True):
            due_s = step.began_s + offset_s
            now_s = time.monotonic()
            while True:
                if now_s >= next_tick_s:
                    on_tick()
                    next_tick_s = now_s + TICK_S
                if now_s >= due_s or stop.is_set():
                    break
                cause = Cause.SENDER  # ahead of the schedule: whatever held it up is over
                time.sleep(min(due_s - now_s, TICK_S))
                now_s = time.monotonic()
            if stop.is_set():
                break
            room_s = MAX_LAG_S - (now_s - due_s)
            if room_s <= 0:
                step.unsent.append((due_s, cause))
                continue
            self.ledger.open(stream, due_s, now_s, is_held_up=cause is Cause.WINDOW)
            if self._push(stream, 0.0):
                continue
            cause = Cause.WINDOW
            step.held_up += 1
            self.ledger.is_held_up[-1] = True
            if not self._push(stream, room_s):
                self.ledger.withdraw()
                step.unsent.append((due_s, cause))
        step.sending_s = time.monotonic() - step.began_s

    def _push(self, stream: int, timeout_s: float) -> bool:
        plan = self.plan
        producer = self._producers[self._producer_of[stream]]
        try:
            producer.push(
                self._payloads.get(self.size_of[stream], len(self.ledger)),
                stream=self.ledger.names[stream],
                model=plan.model,
                priority=plan.priorities[self.priority_of[stream]][0],
                ttl_ms=plan.ttl_ms,
                keep=plan.keep,
                timeout=timeout_s,
            )
        except RequestTimeoutError:
            return False
        return True

    def _drain(self, step: Step, on_tick: Callable[[], None]) -> None:
        began_s = time.monotonic()
        known_s: float | None = None  # since when the producers know the end of every frame
        while not self.ledger.wait_settled(TICK_S):
            on_tick()
            now_s = time.monotonic()
            if now_s - began_s >= self.plan.drain_limit_s:
                break
            if any(producer.account.unfinished for producer in self._producers):
                known_s = None
            elif known_s is None:
                known_s = now_s
            elif now_s - known_s >= TAIL_LIMIT_S:
                break
        with contextlib.suppress(RequestTimeoutError):
            # The subscriber may have been faster than the credit that tells the producer.
            for producer in self._producers:
                producer.flush(0.0 if self.ledger.open_count else TAIL_LIMIT_S)
        step.drain_s = time.monotonic() - began_s

    def _unfinished_lines(self, first: int) -> frozenset[int]:
        """Return the open lines from ``first`` on whose end the producers do not know either."""
        found = []
        for stream, name in enumerate(self.ledger.names):
            producer = self._producers[self._producer_of[stream]]
            for seq, index in self.ledger.open_of(stream, first):
                if producer.is_unfinished(FrameId(name, producer.epoch, seq)):
                    found.append(index)
        return frozenset(found)

    # -- connections ---------------------------------------------------------------------------------

    def _producer(self, address: str, number: int) -> Producer:
        count = max(self._producer_of) + 1
        return Producer(
            address,
            name=f"headrace bench {number}",
            max_unfinished_frames=max(1, WINDOW_FRAMES // count),
            max_unfinished_bytes=WINDOW_BYTES // count,
            linger_s=0.0,
            lane=self.plan.lane,
        )

    def _totals(self) -> ProducerAccount:
        accounts = [producer.account for producer in self._producers]
        by_status: Counter[str] = Counter()
        rejected: Counter[str] = Counter()
        by_lane: Counter[str] = Counter()
        for account in accounts:
            by_lane.update(account.by_lane)
            by_status.update(account.by_status)
            rejected.update(account.rejected)
        return ProducerAccount(
            sent=sum(account.sent for account in accounts),
            finished=sum(account.finished for account in accounts),
            unfinished=sum(account.unfinished for account in accounts),
            by_status=dict(by_status),
            rejected=dict(rejected),
            by_lane=dict(by_lane),
        )


def share_out(priority_of: Sequence[int], count: int) -> tuple[int, ...]:
    """Return which producer each stream sends by: about ``count`` of them, none for two priorities.

    A producer sends in the order of its pushes when it waits for credits: urgent frames must not wait there
    for others, as those of a camera with a connection of its own do not."""
    chosen = [0] * len(priority_of)
    first = 0
    for priority in sorted(set(priority_of)):
        streams = [stream for stream, own in enumerate(priority_of) if own == priority]
        own_count = max(1, min(len(streams), round(count * len(streams) / len(priority_of))))
        for number, stream in enumerate(streams):
            chosen[stream] = first + number % own_count
        first += own_count
    return tuple(chosen)


def _shuffled(values: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return the values in a random order, so that priorities do not go with sizes."""
    return tuple(np.random.default_rng(seed).permutation(values).tolist())
