"""A pool in simulated time: the production BrokerCore, workers that are costs, streams that are times.

What is real: every decision of the broker. What is not: transport, staging and the device, which take the
times that ``Overheads`` and the costs say. Nothing is lost, nobody dies.

Theory of operation. The world holds a heap of events to come and the arrivals of one block. A turn takes all
that happens within ``turn_us`` of the first thing to happen, hands it to the core, then one Tick, as the
broker's loop does. A frame carries the time at which it was due as its ``pts_ns``, which comes back with its
outcome, so that nothing is remembered per frame. An outcome counts for the run if its frame was due after
the warm-up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.broker.settings import CoreSettings
from headrace.planner.costs import Cost, Costs
from headrace.planner.histogram import Histogram
from headrace.planner.streams import Block, Source
from headrace.protocol.messages import (
    ClassProfile,
    Done,
    Frame,
    FrameResult,
    ModelProfile,
    Outcome,
    Ready,
    Status,
    WorkerHello,
)

_OK = FrameResult(Status.OK)

#: Time 0 of a run on the core's clock, so that nothing is earlier than 0.
_START_NS = 1_000_000_000

#: The world's streams have one producer each, alive for the whole run.
_EPOCH = 1

#: What is unfinished so long after the last arrival counts as lost: nobody waits longer.
DRAIN_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a pool on one host takes beside the device, in microseconds.

    `python -m benchmarks agreement` prints those of the machine it runs on; these are medians of two cores
    that did other things too. On a network, add its way to the first two and the last two.
    """

    #: From the time a frame is due until the broker has it.
    to_broker_us: float = 850.0
    #: From the broker's decision until the worker has the batch.
    to_worker_us: float = 650.0
    #: Into the batch's buffer while another batch runs: per batch, and per frame in it (150 KB at 10 GB/s).
    stage_us: float = 165.0
    stage_frame_us: float = 15.0
    #: From the end of the run until the broker has the results.
    to_results_us: float = 650.0
    #: From the broker's outcome until a subscriber has it.
    to_subscriber_us: float = 850.0
    #: Length of one turn of the broker's loop: what comes within it is decided together.
    turn_us: float = 200.0


@dataclass(slots=True)
class Tally:
    """What became of the frames that were due after the warm-up."""

    offered: int = 0
    good: int = 0  # ok within the objective
    by_status: dict[str, int] = field(default_factory=dict)
    rejected_by_code: dict[str, int] = field(default_factory=dict)
    latency: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class ClassUse:
    """One size class over the whole run. ``padding_waste``: share of the padded area."""

    model: str
    size_class: str
    frames: int
    batches: int
    padding_waste: float


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run. ``seconds`` is the time after the warm-up; ``frame_events`` counts arrivals and
    ends of frames in the whole run, ``events`` what the core was told."""

    workers: int
    seconds: float
    tally: Tally
    utilisation: float
    classes: tuple[ClassUse, ...]
    frame_events: int
    events: int
    unfinished: int

    @property
    def mean_batch(self) -> float:
        """Return frames per batch."""
        return sum(use.frames for use in self.classes) / max(sum(use.batches for use in self.classes), 1)

    @property
    def padding_waste(self) -> float:
        """Return the mean share of padding over all frames that ran."""
        frames = sum(use.frames for use in self.classes)
        return sum(use.padding_waste * use.frames for use in self.classes) / max(frames, 1)

    @property
    def goodput_per_s(self) -> float:
        """Return frames a second that were ok within the objective."""
        return self.tally.good / self.seconds

    @property
    def good_share(self) -> float:
        """Return the share of the frames offered that were ok within the objective."""
        return self.tally.good / max(self.tally.offered, 1)


@dataclass(slots=True, eq=False)
class _Device:
    """One worker. Its batches are staged one after another, and run one after another."""

    peer: bytes
    staged_until_ns: int = 0
    busy_until_ns: int = 0


class World:
    """One run. To be used once."""

    def __init__(
        self,
        settings: CoreSettings,
        costs: Costs,
        workers: int,
        *,
        slots: int = 2,
        overheads: Overheads | None = None,
    ) -> None:
        """Make a pool whose workers are READY.

        Raises ConfigError when the cost of a class is not known."""
        self._core = BrokerCore(_without_memory(settings), boot=1)
        self._overheads = overheads or Overheads()
        self._slots = slots
        self._now_ns = _START_NS
        self._pending: list[tuple[int, int, events.Event]] = []
        self._order = 0
        self._cost_of: dict[tuple[str, str, str], Cost] = {}
        self._devices: dict[bytes, _Device] = {}
        self._tally = Tally()
        self._events_count = 0
        self._ended_count = 0
        self._busy_ns = 0
        self._window_ns = (0, 0)
        self._objective_ns = 0
        self._seqs: list[int] = []
        profiles = self._profiles(settings, costs)
        for number in range(workers):
            self._join(f"worker-{number}".encode(), profiles)

    def run(
        self, source: Source, seconds: float, *, warm_up_s: float = 0.0, objective_ms: float = 100.0
    ) -> Run:
        """Serve all arrivals of the source and return the figures.

        Args:
            source: what arrives, within ``seconds``.
            seconds: length of the run; what is still to be done after it is done, but no longer counted as
                work of the devices.
            warm_up_s: frames due before this count for nothing.
            objective_ms: a frame is good when it is ok so soon after it was due.
        """
        base_ns = self._now_ns
        self._window_ns = (base_ns + round(warm_up_s * 1e9), base_ns + round(seconds * 1e9))
        self._objective_ns = round(objective_ms * 1e6)
        offered = 0
        for block in source.blocks():
            offered += len(block.times_ns)
            self._serve(block, source, base_ns)
        self._drain(self._now_ns + DRAIN_NS)
        length_s = seconds - warm_up_s
        return Run(
            workers=len(self._devices),
            seconds=length_s,
            tally=self._tally,
            utilisation=self._busy_ns / max(len(self._devices) * length_s * 1e9, 1.0),
            classes=tuple(self._uses()),
            frame_events=offered + self._ended_count,
            events=self._events_count,
            unfinished=self._core.account.unfinished,
        )

    # -- time ---------------------------------------------------------------------------------------

    def _serve(self, block: Block, source: Source, base_ns: int) -> None:
        frames = self._frames(block, source, base_ns)
        way_ns = base_ns + round(self._overheads.to_broker_us * 1e3)
        turn_ns = round(self._overheads.turn_us * 1e3)
        handle = self._core.handle
        times = block.times_ns
        following, total = 0, len(times)
        while following < total:
            arrival_ns = times[following] + way_ns
            self._now_ns = self._next_ns(arrival_ns)
            until_ns = self._now_ns + turn_ns
            told = self._take_pending(until_ns)
            while following < total and (arrival_ns := times[following] + way_ns) <= until_ns:
                if arrival_ns > self._now_ns:
                    self._now_ns = arrival_ns
                told += handle(events.FrameArrived(None, next(frames)), self._now_ns)
                self._events_count += 1
                following += 1
            self._end_turn(told)

    def _drain(self, until_ns: int) -> None:
        while self._core.account.unfinished and self._now_ns < until_ns:
            self._now_ns = self._next_ns(until_ns)
            self._end_turn(self._take_pending(self._now_ns))

    def _next_ns(self, other_ns: int) -> int:
        wakeup_ns = self._core.next_wakeup_ns()
        if wakeup_ns is not None and wakeup_ns < other_ns:
            other_ns = wakeup_ns
        if self._pending and self._pending[0][0] < other_ns:
            other_ns = self._pending[0][0]
        return max(self._now_ns, other_ns)

    def _take_pending(self, until_ns: int) -> list[act.Action]:
        told: list[act.Action] = []
        pending = self._pending
        while pending and pending[0][0] <= until_ns:
            time_ns, _, event = heapq.heappop(pending)
            self._now_ns = max(self._now_ns, time_ns)
            told += self._tell(event)
        return told

    def _end_turn(self, told: list[act.Action]) -> None:
        told += self._tell(events.Tick())
        for action in told:
            match action:
                case act.PublishOutcome(outcome):
                    self._count(outcome)
                case act.SendBatch():
                    self._start(action)
                case act.SendHeartbeat(peer, _, probe):
                    heard = events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe)
                    self._later(self._now_ns, heard)
                case _:
                    pass  # credits, reports: nobody here to tell

    def _tell(self, event: events.Event) -> list[act.Action]:
        self._events_count += 1
        return self._core.handle(event, self._now_ns)

    def _later(self, time_ns: int, event: events.Event) -> None:
        self._order += 1
        heapq.heappush(self._pending, (time_ns, self._order, event))

    # -- frames -------------------------------------------------------------------------------------

    def _frames(self, block: Block, source: Source, base_ns: int) -> Iterator[Frame]:
        names, kinds, seqs = source.streams, source.kinds, self._seqs
        seqs += [0] * (len(names) - len(seqs))
        begin_ns, _ = self._window_ns
        for time_ns, stream, number in zip(block.times_ns, block.streams, block.kinds, strict=True):
            kind = kinds[number]
            seq = seqs[stream]
            seqs[stream] = seq + 1
            due_ns = base_ns + time_ns
            if due_ns >= begin_ns:
                self._tally.offered += 1
            yield Frame(
                names[stream],
                b"",
                kind.nbytes,
                kind.shape,
                dtype=kind.dtype,
                encoding=kind.encoding,
                seq=seq,
                epoch=_EPOCH,
                model=kind.model,
                priority=kind.priority,
                ttl_ms=kind.ttl_ms,
                keep=kind.keep,
                pts_ns=due_ns,
            )

    def _count(self, outcome: Outcome) -> None:
        self._ended_count += 1
        due_ns = outcome.pts_ns or 0
        if due_ns < self._window_ns[0]:
            return
        tally = self._tally
        status = outcome.status
        tally.by_status[status] = tally.by_status.get(status, 0) + 1
        if status is Status.OK:
            latency_ns = self._now_ns - due_ns + round(self._overheads.to_subscriber_us * 1e3)
            tally.latency.add(latency_ns)
            if latency_ns <= self._objective_ns:
                tally.good += 1
        elif status is Status.REJECTED:
            tally.rejected_by_code[outcome.code] = tally.rejected_by_code.get(outcome.code, 0) + 1

    # -- workers ------------------------------------------------------------------------------------

    def _start(self, sent: act.SendBatch) -> None:
        batch, device, over = sent.batch, self._devices[sent.peer], self._overheads
        count = len(batch.frames)
        run_ns = self._cost_of[batch.model, batch.version, batch.size_class].run_ns(count)
        arrived_ns = self._now_ns + round(over.to_worker_us * 1e3)
        stage_ns = round((over.stage_us + over.stage_frame_us * count) * 1e3)
        staged_ns = device.staged_until_ns = max(arrived_ns, device.staged_until_ns) + stage_ns
        begin_ns = max(staged_ns, device.busy_until_ns)
        end_ns = device.busy_until_ns = begin_ns + run_ns
        low_ns, high_ns = self._window_ns
        self._busy_ns += max(0, min(end_ns, high_ns) - max(begin_ns, low_ns))
        done = Done(
            batch.batch,
            (_OK,) * count,
            staged_us=(staged_ns - arrived_ns) // 1000,
            ran_us=run_ns // 1000,
            total_us=(end_ns - arrived_ns) // 1000,
        )
        self._later(end_ns + round(over.to_results_us * 1e3), events.BatchDone(sent.peer, done))

    def _profiles(self, settings: CoreSettings, costs: Costs) -> tuple[ModelProfile, ...]:
        profiles = []
        for model in settings.models:
            spec = model.spec
            described = []
            for size_class in costs.classes_of(spec):
                cost = costs.of(spec, size_class)
                self._cost_of[spec.name, spec.version, size_class.name] = cost
                described.append(ClassProfile(size_class, cost.buckets(size_class.max_batch_size)))
            profiles.append(ModelProfile(spec.name, spec.version, tuple(described), ()))
        return tuple(profiles)

    def _join(self, peer: bytes, profiles: Sequence[ModelProfile]) -> None:
        name = peer.decode()
        self._tell(events.WorkerArrived(peer, WorkerHello(name, 1, "host", "simulated", "simulated", "0")))
        self._tell(events.WorkerReady(peer, Ready(name, 1, self._slots, tuple(profiles))))
        self._devices[peer] = _Device(peer)

    def _uses(self) -> Iterator[ClassUse]:
        for served in self._core.models.classes:
            waste = served.waste_sum / max(served.frames_count, 1)
            yield ClassUse(served.model, served.spec.name, served.frames_count, served.batches_count, waste)


def _without_memory(settings: CoreSettings) -> CoreSettings:
    """Return settings that keep nothing for readers: no decision hangs on it, and a run stays flat.

    Credits bound refusals that are remembered too; streams here have no producer that has any."""
    return replace(settings, retention_frames=1, credits_per_producer=1)
