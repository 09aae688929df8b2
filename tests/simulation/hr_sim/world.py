"""One simulated world: a seed in, a summary or a failure out.

Theory of operation. Time is a heap of (ns, ticket, function); nothing runs but in its order, and all
randomness comes from the seed, so a seed is a schedule. First the safety phase: processes work and faults
strike; whatever a referee sees that must not be ends the seed. Then the world heals: faults end, what is dead
is started again, nothing more is pushed; and liveness is demanded: every frame of a living producer is
concluded, every subscriber has or was told of everything, queues are empty, slots are free.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from headrace.broker.reload_state import Phase, Reload
from headrace.clients.subscriber_events import Mode, Start
from headrace.errors import Code, RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import Frames, Limits, Outcome, Status
from hr_sim.arenas import Arenas
from hr_sim.book import Violation
from hr_sim.brokers import BrokerNode
from hr_sim.faults import Faults
from hr_sim.frames import FrameMaker, as_received
from hr_sim.network import MS, Node
from hr_sim.options import Options, draw
from hr_sim.producers import PlainSender, ProducerNode
from hr_sim.push_checks import PushRecord
from hr_sim.referee import Referee
from hr_sim.subscribers import SubscriberNode
from hr_sim.workers import HOST_KEY, WorkerNode

#: After the world has healed everything must be done within this virtual time.
LIVENESS_NS = 60_000 * MS

#: How often it is looked at meanwhile.
_LOOK_NS = 200 * MS

#: A schedule with more steps than this spins.
MAX_STEPS = 3_000_000


class SimulationError(AssertionError):
    """A seed failed. The text begins with the seed and ends with the frame's story."""


@dataclass(slots=True)
class Summary:
    """What one seed, or many together, have seen."""

    seeds: int = 0
    events: int = 0
    frame_events: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    frames: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    trace: str = ""

    def add(self, other: Summary) -> None:
        """Count another one in."""
        self.seeds += other.seeds
        self.events += other.events
        self.frame_events += other.frame_events
        self.frames += other.frames
        for mine, theirs in ((self.faults, other.faults), (self.outcomes, other.outcomes)):
            for kind, number in theirs.items():
                mine[kind] = mine.get(kind, 0) + number


def is_under_way(reload: Reload) -> bool:
    """Tell whether a reload still has to end by itself."""
    return reload.is_active or reload.phase is Phase.SWITCHING


class World:
    """Everything of one seed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(f"world {options.seed}")
        self.now_ns = 1_000 * MS
        self.is_healing = False
        self.event_count = 0
        self.faults: dict[str, int] = {}
        self.frames = FrameMaker(options, random.Random(f"frames {options.seed}"))
        self.pushes = PushRecord()
        self.arenas = Arenas()
        self.boots: list[Referee] = []
        # (boot, stream, pub_seq) -> (stream, epoch, seq), status, when.
        self.outcomes: dict[tuple[int, str, int], tuple[tuple[str, int, int], Status, int]] = {}
        self.next_pub_seq: dict[tuple[int, str], int] = {}
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._tickets = count()
        self._trace = hashlib.sha256()
        self.broker = BrokerNode(self)
        self.producers: list[ProducerNode] = []
        self.plain: list[PlainSender] = []
        self.workers: list[WorkerNode] = []
        self.twins: list[WorkerNode] = []
        self.subscribers: list[SubscriberNode] = []
        self._populate()
        self._injector = Faults(self)

    def _populate(self) -> None:
        options, rng = self.options, self.rng
        for number in range(options.producers):
            names = [
                f"site-{number % 2}/cam-{number}-{index}" for index in range(options.streams_per_producer)
            ]
            self.producers.append(ProducerNode(self, f"producer-{number}", names))
        for number in range(options.plain_senders):
            self.plain.append(PlainSender(self, f"script-{number}", is_intake=number % 2 == 1))
        for number in range(options.workers):
            key = "another host" if number < options.remote_workers else HOST_KEY
            self.workers.append(WorkerNode(self, f"worker-{number}", key))
        for number in range(options.subscribers):
            self.add_subscriber(f"subscriber-{number}", is_plain=number == 0)
        del rng

    def add_subscriber(self, name: str, *, is_plain: bool = False) -> None:
        """Start one more subscriber. A plain one wants everything from the beginning."""
        rng = self.rng
        topics: tuple[bytes, ...] = (b"",)
        mode, start = Mode.EVERY, Start.EARLIEST
        if not is_plain:
            topics = rng.choice(((b"",), (b"site-0/",), (b"site-0/cam-0-0\0", b"site-1/")))
            mode = rng.choice((Mode.EVERY, Mode.EVERY, Mode.LATEST))
            start = rng.choice((Start.EARLIEST, Start.NOW))
        self.subscribers.append(SubscriberNode(self, name, topics, mode, start))

    # -- time ---------------------------------------------------------------------------------------

    def at(self, ns: int, function: Callable[[Any], None], argument: Any) -> None:
        """Call a function at a time."""
        heapq.heappush(self._heap, (ns, next(self._tickets), function, argument))

    def after(self, ns: int, function: Callable[[Any], None], argument: Any) -> None:
        """Call a function some time from now."""
        self.at(self.now_ns + ns, function, argument)

    def _run_until(self, until_ns: int) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            self.now_ns, ticket, function, argument = heapq.heappop(heap)
            if ticket > MAX_STEPS:
                raise AssertionError(f"more than {MAX_STEPS} steps: something spins")
            function(argument)
        self.now_ns = until_ns

    def run(self) -> Summary:
        """Run the seed. Raises SimulationError."""
        try:
            self._run_until(self.now_ns + self.options.safety_ms * MS)
            self._heal()
            self._demand_liveness()
            self.broker.check()
            self.broker.referee.demand_finished()
        except Exception as error:  # whatever a state machine raises is a failure of its seed
            raise self._failure(error) from error
        return self._summary()

    def _failure(self, error: Exception) -> SimulationError:
        key = error.key if isinstance(error, Violation) else None
        what = str(error) if isinstance(error, AssertionError) else repr(error)
        lines = [f"seed {self.options.seed}: {what}", "options:", self.options.lines()]
        lines.append(f"at {self.now_ns / MS:.3f} ms, boot {len(self.boots)}, faults {self.faults}")
        if key is not None:
            story = self.broker.core.story(*key) or ["(this boot knows nothing of it)"]
            lines += [f"story of {key}:", *(f"  {line}" for line in story)]
        lines.append(f"again with: make sim SEED={self.options.seed}")
        return SimulationError("\n".join(lines))

    def _summary(self) -> Summary:
        outcomes: dict[str, int] = {}
        for referee in self.boots:
            for status, number in referee.counts.items():
                outcomes[status.value] = outcomes.get(status.value, 0) + number
        return Summary(
            1,
            self.event_count,
            sum(referee.frame_event_count for referee in self.boots),
            self.faults,
            self.frames.last_id,
            outcomes,
            self._trace.hexdigest(),
        )

    # -- the end ------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.is_healing = True
        now_ns = self.now_ns
        nodes: list[Node] = [self.broker, *self.producers, *self.plain, *self.workers, *self.subscribers]
        for node in nodes:
            node.partitioned_until_ns = now_ns
            node.paused_until_ns = now_ns
        for twin in self.twins:
            if twin.is_up:
                twin.kill()
        for node in nodes:
            if not node.is_up:
                self.start_again(node)
            node.wake(now_ns)
        for worker in self.workers:
            if worker.is_hanging:
                worker.kill()
                worker.revive()
            worker.unhang()

    def start_again(self, node: Node) -> None:
        """Start a process that has ended."""
        if not node.is_up:
            node.revive()

    def _demand_liveness(self) -> None:
        until_ns = self.now_ns + LIVENESS_NS
        reason: str | None = "nothing was looked at"
        while reason is not None:
            if self.now_ns >= until_ns:
                raise Violation(f"not done {LIVENESS_NS // MS} ms after all was well: {reason}", self._stuck)
            self._run_until(self.now_ns + _LOOK_NS)
            for worker in self.workers:
                if worker.is_hanging:
                    worker.kill()
                    worker.revive()
            reason = self._find_unfinished()

    _stuck: tuple[str, int, int] | None = None

    def _find_unfinished(self) -> str | None:
        self._stuck = None
        pushed = self.pushes.unfinished()
        if pushed is not None:
            frame = pushed.frame
            self._stuck = (frame.stream, frame.epoch or 0, frame.seq or 0)
            return "a producer waits for a frame"
        for order in self.broker.referee.order.values():
            if order:
                self._stuck = order[0].key
                return "an admitted frame has no outcome"
        if not self.broker.is_up:
            return "the broker is not up"
        core = self.broker.core
        if core.ledger.batches or any(served.waiting_count for served in core.models.classes):
            return "slots are taken or frames wait"
        if any(model.retired or (model.reload and is_under_way(model.reload)) for model in core.models.all()):
            return "a reload is under way, or an old version is still loaded"
        for subscriber in self.subscribers:
            hole = subscriber.record.hole()
            if hole is not None:
                return hole
        return None

    # -- what nodes tell and ask --------------------------------------------------------------------

    def count_fault(self, kind: str) -> None:
        """Count a fault that has struck."""
        self.faults[kind] = self.faults.get(kind, 0) + 1

    def published(self, boot: int, outcome: Outcome, frame_id: int | None) -> None:
        """See referee.Clock."""
        key = (outcome.stream, outcome.epoch, outcome.seq)
        self.outcomes[boot, outcome.stream, outcome.pub_seq] = (key, outcome.status, self.now_ns)
        self.next_pub_seq[boot, outcome.stream] = outcome.pub_seq + 1
        if frame_id is not None:
            self.pushes.published(frame_id, outcome.status)
        self._trace.update(
            f"{self.now_ns} {key} {outcome.pub_seq} {outcome.status} {outcome.worker};".encode()
        )

    def allowed_lateness_ns(self, due_ns: int) -> int:
        """See referee.Clock."""
        late_ns = self.options.turn_us * 2_000
        if self.broker.paused_until_ns > due_ns:
            late_ns += self.broker.paused_until_ns - due_ns
        return late_ns

    def is_twin_about(self, worker: WorkerNode) -> bool:
        """Tell whether a worker may be refused because another process has its id."""
        return any(twin.name.startswith(worker.name) or worker is twin for twin in self.twins)

    def wrap(self, message: Any) -> Any:
        """Return what crosses a link."""
        return codec.encode(message) if self.options.is_encoded else message

    def unwrap(self, wrapped: Any, limits: Limits) -> Any:
        """Return what arrives. Raises RemoteProtocolError."""
        if isinstance(wrapped, list):
            return codec.decode(wrapped, limits)
        if wrapped is None:
            raise RemoteProtocolError(Code.BAD_MSGPACK, "rubbish")
        if isinstance(wrapped, Frames):
            return Frames(tuple(as_received(frame) for frame in wrapped.frames))
        return wrapped

    def garbage(self) -> Any:
        """Return something that can't be read."""
        return [self.rng.randbytes(self.rng.randint(0, 40))] if self.options.is_encoded else None


def run_seed(seed: int) -> Summary:
    """Run one seed. Raises SimulationError."""
    return World(draw(seed)).run()
