"""Open-loop load on the broker's core with emulated workers: a run of seconds takes part of one.

Arrivals are drawn beforehand from a seeded generator (Poisson), so that the system under load can't slow
its own load down. Latency counts from the intended time of arrival. A worker runs one batch after another in
T(b) = base + per_frame * b, as the emulated engine does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import hr_core as hr

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.broker.settings import CoreSettings
from headrace.protocol.messages import Done, Status

#: Frames of the first part are not counted: the queues fill and the costs settle.
WARM_UP_SHARE = 0.2


@dataclass(frozen=True)
class Mix:
    """One kind of traffic: ``share`` of all frames, of one size, priority and time to live."""

    share: float
    priority: int = 0
    ttl_ms: int | None = None
    size: int = 32


@dataclass
class Result:
    """What came of a run, warm-up left out: ``in_time`` by the time of the outcome, all else by the intended
    time of arrival. Latencies in milliseconds, of frames that ended ok."""

    seconds: float
    in_time: int = 0
    by_status: dict[str, int] = field(default_factory=dict)
    latencies: dict[int, list[float]] = field(default_factory=dict)
    rejects: list[tuple[str, int | None]] = field(default_factory=list)
    peak_bytes: int = 0
    hedged: int = 0

    @property
    def goodput(self) -> float:
        """Frames a second that ended ok within their time to live."""
        return self.in_time / self.seconds

    def p99(self, priority: int) -> float:
        """99th percentile of the latency of one priority."""
        ordered = sorted(self.latencies[priority])
        return ordered[len(ordered) * 99 // 100]


class Load:
    """A core under load. ``base_ms`` and ``per_frame_ms`` are the workers' true costs."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        workers: int = 1,
        slots: int = 2,
        base_ms: float = 2.0,
        per_frame_ms: float = 0.15,
        hang_ns: int | None = None,
    ) -> None:
        self.driver = hr.CoreDriver(settings)
        self.base_ms = base_ms
        self.per_frame_ms = per_frame_ms
        self.hang_ns = hang_ns  # the first worker never finishes what it begins after this
        self.peers = [f"w{n}".encode() for n in range(workers)]
        for peer in self.peers:
            self.driver.join_worker(peer, slots=slots, per_batch_ms=base_ms, per_frame_ms=per_frame_ms)
        self.free_at_ns = dict.fromkeys(self.peers, self.driver.now_ns)
        self.running: list[tuple[int, int, act.SendBatch, int, int]] = []

    @property
    def core(self) -> BrokerCore:
        """The core."""
        return self.driver.core

    def run(self, rate: float, seconds: float, mixes: Sequence[Mix], seed: int = 1) -> Result:
        """Offer ``rate`` frames a second for some seconds, then let everything finish."""
        driver = self.driver
        rng = random.Random(seed)
        start_ns = driver.now_ns
        counted_ns = start_ns + int(seconds * WARM_UP_SHARE * 1e9)
        stop_ns = start_ns + int(seconds * 1e9)
        result = Result(seconds * (1 - WARM_UP_SHARE))
        arrivals: dict[tuple[str, int], tuple[int, Mix]] = {}
        next_ns, seq = start_ns + int(rng.expovariate(rate) * 1e9), 0
        weights = [mix.share for mix in mixes]
        while next_ns < stop_ns or self.core.account.unfinished:
            times = [driver.now_ns + 100 * hr.MS]
            times += [next_ns] if next_ns < stop_ns else []
            times += [self.running[0][0]] if self.running else []
            wakeup_ns = self.core.next_wakeup_ns()
            times += [wakeup_ns] if wakeup_ns is not None else []
            driver.now_ns = max(driver.now_ns, min(times))
            actions: list[act.Action] = []
            while next_ns <= driver.now_ns and next_ns < stop_ns:
                mix = rng.choices(mixes, weights)[0]
                # A stream of one priority: outcomes of a stream keep its order, whatever their priority.
                stream = f"p{mix.priority}-{seq % 31}"
                arrivals[stream, seq] = (next_ns, mix)
                one = hr.frame(
                    stream, seq, size=mix.size, priority=mix.priority, ttl_ms=mix.ttl_ms, nbytes=1000
                )
                actions += driver.push(one, peer=None)
                next_ns += int(rng.expovariate(rate) * 1e9)
                seq += 1
            while self.running and self.running[0][0] <= driver.now_ns:
                _, _, sent, ran_ns, total_ns = heappop(self.running)
                results = tuple(hr.ok() for _ in sent.batch.frames)
                done = Done(sent.batch.batch, results, 100, ran_ns // 1000, total_ns // 1000)
                actions += driver.send(events.BatchDone(sent.peer, done))
            driver.hear(*self.peers)
            actions += driver.tick()
            self._take(actions)
            self._count(result, actions, arrivals, counted_ns, stop_ns)
            driver.actions.clear()
        driver.core.check_invariants()
        result.hedged = self.core.hedges.frames_count
        return result

    def _take(self, actions: list[act.Action]) -> None:
        now_ns = self.driver.now_ns
        for sent in hr.batches(actions):
            begin_ns = max(self.free_at_ns[sent.peer], now_ns)
            ran_ns = int((self.base_ms + self.per_frame_ms * len(sent.batch.frames)) * hr.MS)
            if self.hang_ns is not None and sent.peer == self.peers[0] and begin_ns >= self.hang_ns:
                ran_ns = 1 << 60
            self.free_at_ns[sent.peer] = begin_ns + ran_ns
            done_ns = begin_ns + ran_ns
            heappush(self.running, (done_ns, sent.batch.batch, sent, ran_ns, done_ns - now_ns))

    def _count(
        self,
        result: Result,
        actions: list[act.Action],
        arrivals: dict[tuple[str, int], tuple[int, Mix]],
        counted_ns: int,
        stop_ns: int,
    ) -> None:
        now_ns = self.driver.now_ns
        result.peak_bytes = max(result.peak_bytes, self.core.outcomes.unfinished_bytes)
        for outcome in hr.outcomes(actions):
            due_ns, mix = arrivals.pop((outcome.stream, outcome.seq))
            latency_ms = (now_ns - due_ns) / hr.MS
            if outcome.status is Status.OK and counted_ns <= now_ns < stop_ns:
                result.in_time += mix.ttl_ms is None or latency_ms <= mix.ttl_ms
            if not counted_ns <= due_ns < stop_ns:
                continue
            status = outcome.status.value
            result.by_status[status] = result.by_status.get(status, 0) + 1
            if outcome.status is Status.REJECTED:
                result.rejects.append((str(outcome.code), outcome.retry_after_ms))
            if outcome.status is Status.OK:
                result.latencies.setdefault(mix.priority, []).append(latency_ms)
