"""The production core in virtual time, with workers that take T(b): no sockets, no processes, no waiting.

What it is for: the core's own speed (``core``) and what its decisions are worth without any transport
(``goodput``). What it is not: the simulator of faults.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.arrivals import SIZES, Arrivals
from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.protocol.messages import (
    ClassProfile,
    Done,
    Frame,
    FrameResult,
    ImageInput,
    ModelProfile,
    ModelSpec,
    Ready,
    SizeClassSpec,
    Status,
    WorkerHello,
)

_BUCKETS = (1, 2, 4, 8, 16, 32)
_OK = FrameResult(Status.OK, outputs=0)

#: What the way to the broker, to the worker and back takes in a real pool on one host. Zero: the core alone.
WAY_NS = 0

Cost = Callable[[int, int], float]  # frames, side -> seconds


@dataclass(slots=True)
class Outcome:
    """What a run brought. ``latencies_ms``: None for a frame without a result."""

    latencies_ms: list[float | None]
    events_count: int = 0
    frame_events_count: int = 0
    busy_ns: dict[bytes, int] = field(default_factory=dict)
    batches_count: int = 0
    late_count: int = 0


def core_settings(policy: ClassPolicy, sides: tuple[int, ...] = SIZES) -> CoreSettings:
    """Return settings of one model with a size class for each side, batches to 32."""
    spec = ModelSpec(
        "m", "1", image=ImageInput(), size_classes=tuple(SizeClassSpec(f"{s}", s, s, 32) for s in sides)
    )
    return CoreSettings(models=(ModelSettings(spec, {"": policy}),), max_bytes=2**40, max_workers=4_096)


class VirtualPool:
    """One run: a core, ``workers`` emulated devices of two slots each, arrivals."""

    def __init__(self, settings: CoreSettings, cost: Cost, workers: int = 1) -> None:
        self._core = BrokerCore(settings, boot=1)
        self._cost = cost
        self._now_ns = 1_000_000_000
        self._pending: list[tuple[int, int, events.Event]] = []
        self._order = 0
        self._late_ms = math.inf
        self._free_at_ns: dict[bytes, int] = {}
        self._sides = {c.name: c.height for c in settings.models[0].spec.size_classes}
        self.outcome = Outcome([])
        for number in range(workers):
            self._join(f"w{number}".encode(), settings.models[0].spec)

    def keeps(self, arrivals: Arrivals, latency_ms: float, late_share: float) -> bool:
        """Tell whether at most that share of the frames takes longer, and none goes without a result. As soon
        as the answer is no, the rest is not served."""
        most = int(late_share * len(arrivals.times_s))
        return self.run(arrivals, late_ms=latency_ms, max_late_count=most).late_count <= most

    def run(
        self,
        arrivals: Arrivals,
        *,
        turn_s: float = 0.0,
        late_ms: float = math.inf,
        max_late_count: int = sys.maxsize,
    ) -> Outcome:
        """Serve all arrivals, or until more than ``max_late_count`` frames took longer than ``late_ms`` or
        were lost. What arrives within ``turn_s`` of a turn's begin is taken in that turn."""
        self._late_ms = late_ms
        result = self.outcome
        result.latencies_ms = [None] * len(arrivals.times_s)
        base_ns = self._now_ns + 1_000_000
        due_ns = [base_ns + round(time_s * 1e9) for time_s in arrivals.times_s]
        frames, where = _frames(arrivals)
        following, total, left = 0, len(due_ns), len(due_ns)
        turn_ns = round(turn_s * 1e9)
        while left and result.late_count <= max_late_count:
            self._now_ns = self._next_ns(due_ns[following] if following < total else None)
            until_ns = self._now_ns + turn_ns
            told: list[act.Action] = []
            while self._pending and self._pending[0][0] <= until_ns:
                time_ns, _, event = heapq.heappop(self._pending)
                self._now_ns = max(self._now_ns, time_ns)
                told += self._tell(event)
            while following < total and due_ns[following] <= until_ns:
                self._now_ns = max(self._now_ns, due_ns[following])
                told += self._tell(events.FrameArrived(None, frames[following]))
                result.frame_events_count += 1
                following += 1
            told += self._tell(events.Tick())
            left -= self._carry_out(told, where, due_ns)
        return result

    def _next_ns(self, arrival_ns: int | None) -> int:
        times = [time for time in (arrival_ns, self._core.next_wakeup_ns()) if time is not None]
        if self._pending:
            times.append(self._pending[0][0])
        return max(self._now_ns, min(times))

    def _tell(self, event: events.Event) -> list[act.Action]:
        self.outcome.events_count += 1
        return self._core.handle(event, self._now_ns)

    def _carry_out(self, told: list[act.Action], where: dict[tuple[str, int], int], due_ns: list[int]) -> int:
        ended = 0
        for action in told:
            match action:
                case act.PublishOutcome(outcome):
                    ended += 1
                    self.outcome.frame_events_count += 1
                    if outcome.status is Status.OK:
                        index = where[outcome.stream, outcome.seq]
                        latency_ms = (self._now_ns - due_ns[index]) / 1e6
                        self.outcome.latencies_ms[index] = latency_ms
                        self.outcome.late_count += latency_ms > self._late_ms
                    else:
                        self.outcome.late_count = sys.maxsize
                case act.SendBatch():
                    self._run_batch(action)
                case act.SendHeartbeat(peer, _, probe):
                    heard = events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe)
                    self._later(self._now_ns, heard)
                case _:
                    pass
        return ended

    def _run_batch(self, sent: act.SendBatch) -> None:
        batch, peer = sent.batch, sent.peer
        count = len(batch.frames)
        cost_ns = round(self._cost(count, self._sides[batch.size_class]) * 1e9)
        begin_ns = max(self._now_ns, self._free_at_ns[peer])
        self._free_at_ns[peer] = begin_ns + cost_ns
        self.outcome.batches_count += 1
        self.outcome.busy_ns[peer] = self.outcome.busy_ns.get(peer, 0) + cost_ns
        # No way at all: what the worker had it for is what passed.
        total_us = -(-(self._free_at_ns[peer] - self._now_ns) // 1000)
        done = Done(batch.batch, (_OK,) * count, staged_us=0, ran_us=cost_ns // 1000, total_us=total_us)
        self._later(begin_ns + cost_ns, events.BatchDone(peer, done))

    def _later(self, time_ns: int, event: events.Event) -> None:
        self._order += 1
        heapq.heappush(self._pending, (time_ns, self._order, event))

    def _join(self, peer: bytes, spec: ModelSpec) -> None:
        name = peer.decode()
        profiles = tuple(
            ClassProfile(c, tuple((b, self._cost(b, c.height) * 1e3) for b in _BUCKETS))
            for c in spec.size_classes
        )
        self._tell(events.WorkerArrived(peer, WorkerHello(name, 1, "host", "emulated", "emulated", "0")))
        ready = Ready(name, 1, 2, (ModelProfile(spec.name, spec.version, profiles, ()),))
        self._tell(events.WorkerReady(peer, ready))
        self._free_at_ns[peer] = self._now_ns


def _frames(arrivals: Arrivals) -> tuple[list[Frame], dict[tuple[str, int], int]]:
    next_seq: dict[int, int] = {}
    frames: list[Frame] = []
    where: dict[tuple[str, int], int] = {}
    for index, stream in enumerate(arrivals.streams):
        seq = next_seq.get(stream, 0)
        next_seq[stream] = seq + 1
        side = SIZES[arrivals.size_index(index)]
        name = f"camera-{stream}"
        frames.append(Frame(name, b"", side * side * 3, (side, side, 3), seq=seq))
        where[name, seq] = index
    return frames, where
