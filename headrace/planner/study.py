"""Compare alternatives in simulated time: how many workers, which policy, which configuration.

An alternative is a configuration, a policy and a number of workers. It *meets* the objective when at least
``share`` of the frames offered were ok within it; what was rejected, expired or superseded was not. The
cheapest is the one with the fewest workers, then the most good frames. Not here: the command line and its
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.errors import ConfigError
from headrace.planner.costs import Costs
from headrace.planner.streams import Source
from headrace.planner.world import Overheads, Run, World
from headrace.protocol.messages import Frame

#: Workers that the search for the fewest tries at most.
MAX_WORKERS = 4_096

#: Frames looked at to guess how many workers there must be.
_GUESS_FRAMES = 20_000


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A batching policy for every size class; "" leaves each as configured, and so does None the delay."""

    name: str = ""
    max_queue_delay_ms: float | Literal["auto"] | None = None

    @property
    def label(self) -> str:
        """Return the policy as the command line writes it."""
        delay = self.max_queue_delay_ms
        if delay is None:
            return self.name or "as configured"
        return f"{self.name}:{delay}" if delay == "auto" else f"{self.name}:{delay:g}"

    def apply(self, settings: CoreSettings) -> CoreSettings:
        """Return the settings with this policy everywhere."""
        if not self.name:
            return settings
        models = []
        for model in settings.models:
            policies = model.policies or {"": ClassPolicy()}
            changed = {name: self._changed(policy) for name, policy in policies.items()}
            models.append(ModelSettings(model.spec, changed))
        return replace(settings, models=tuple(models))

    def _changed(self, policy: ClassPolicy) -> ClassPolicy:
        if self.max_queue_delay_ms is None:
            return replace(policy, policy=self.name)
        return replace(policy, policy=self.name, max_queue_delay_ms=self.max_queue_delay_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration to try: its label, the core's settings, what batches cost in it."""

    label: str
    settings: CoreSettings
    costs: Costs
    slots: int = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One alternative and what it brought. ``cost`` is relative to the fewest workers of the study."""

    plan: str
    policy: str
    run: Run
    meets: bool
    cost: float = 1.0


@dataclass(frozen=True, slots=True)
class Study:
    """What all alternatives of a study share.

    ``source`` makes the arrivals anew for each run: the same ones every time. ``share``: part of the frames
    that must be good.
    """

    source: Callable[[], Source]
    seconds: float
    warm_up_s: float
    objective_ms: float
    share: float
    overheads: Overheads

    def measure(self, plan: Plan, choice: PolicyChoice, workers: int) -> Row:
        """Run one alternative."""
        settings = choice.apply(plan.settings)
        world = World(settings, plan.costs, workers, slots=plan.slots, overheads=self.overheads)
        run = world.run(self.source(), self.seconds, warm_up_s=self.warm_up_s, objective_ms=self.objective_ms)
        return Row(plan.label, choice.label, run, run.good_share >= self.share)

    def find_fewest(
        self, plan: Plan, choice: PolicyChoice, say: Callable[[Row], None] = lambda row: None
    ) -> list[Row]:
        """Search for the fewest workers that meet the objective; return every run, fewest workers first.

        Whoever has more workers is taken to do no worse: the search halves. ``say`` is told of each run."""
        rows: dict[int, Row] = {}

        def meets(workers: int) -> bool:
            if workers not in rows:
                rows[workers] = self.measure(plan, choice, workers)
                say(rows[workers])
            return rows[workers].meets

        high = self.guess(plan)
        low = 0  # does not meet
        while not meets(high):
            low, high = high, min(high * 2, MAX_WORKERS)
            if low == high:
                break
            last = rows[low].run
            if not _is_short_of_workers(last) and last.good_share <= _best_share(rows, low) + 1e-3:
                break
        else:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if meets(middle) else (middle, high)
        return [rows[workers] for workers in sorted(rows)]

    def guess(self, plan: Plan) -> int:
        """Return how many workers could bear the load if every batch were full."""
        placers = _placers(plan)
        work_ns, count, last_ns = 0.0, 0, 1
        source = self.source()
        for block in source.blocks():
            for time_ns, number in zip(block.times_ns, block.kinds, strict=True):
                kind = source.kinds[number]
                key = (kind.model, kind.shape)
                work_ns += placers(key)
                count += 1
                last_ns = max(last_ns, time_ns)
            if count >= _GUESS_FRAMES:
                break
        return min(max(1, -int(-work_ns // last_ns)), MAX_WORKERS)


def with_costs_relative(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their cost in multiples of the fewest workers among them."""
    fewest = min(row.run.workers for row in rows)
    return [replace(row, cost=row.run.workers / fewest) for row in rows]


def cheapest(rows: Sequence[Row]) -> Row | None:
    """Return the cheapest row that meets the objective; of equal ones, that with the most good frames."""
    meeting = [row for row in rows if row.meets]
    return min(meeting, key=lambda row: (row.run.workers, -row.run.tally.good), default=None)


def _is_short_of_workers(run: Run) -> bool:
    """False when frames find an idle device, or run alone: more workers will hardly help."""
    return run.utilisation > 0.9 and run.mean_batch > 1.1


def _best_share(rows: dict[int, Row], but: int) -> float:
    """Return the best share with other numbers of workers; none is better than no share at all."""
    return max((row.run.good_share for workers, row in rows.items() if workers != but), default=-1.0)


def _placers(plan: Plan) -> Callable[[tuple[str, tuple[int, ...]]], float]:
    """Return a function from (model, shape) to the device time of one frame in a full batch, in ns."""
    from headrace.broker.records import Refusal
    from headrace.broker.size_class import SizeClasses

    specs = {model.spec.name: model.spec for model in plan.settings.models}
    first = next(iter(specs))
    known: dict[tuple[str, tuple[int, ...]], float] = {}

    def cost_ns(key: tuple[str, tuple[int, ...]]) -> float:
        if key not in known:
            model, shape = key
            spec = specs.get(
                model.partition(":")[0] or plan.settings.default_model.partition(":")[0] or first
            )
            known[key] = 0.0
            if spec is not None:
                placed = SizeClasses(spec, plan.costs.classes_of(spec)).place(Frame("s", b"", 0, shape))
                if not isinstance(placed, Refusal):
                    size = placed.max_batch_size
                    known[key] = plan.costs.of(spec, placed).run_ns(size) / size
        return known[key]

    return cost_ns


def check_models(plan: Plan) -> None:
    """Raise ConfigError when there is no model, or the cost of a class is not known."""
    if not plan.settings.models:
        raise ConfigError(f"{plan.label}: no [[models]]: there is nothing to simulate")
    for model in plan.settings.models:
        for size_class in plan.costs.classes_of(model.spec):
            plan.costs.of(model.spec, size_class)
