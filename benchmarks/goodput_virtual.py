"""W3 in virtual time: what the decisions alone are worth, without transport; the same on every machine.

The production core with each policy; the in-process loops, with size classes and as one queue that cuts a
batch at each change of size; and a bound that no scheduler can exceed. Seeded and deterministic: one run is
enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.arrivals import Arrivals, draw
from benchmarks.bound import LATE_SHARE, is_possible
from benchmarks.emulation import cost_s
from benchmarks.report import Budget, Cell, Table
from benchmarks.stats import percentile
from benchmarks.virtual import VirtualPool, core_settings
from benchmarks.virtual_loop import serve
from headrace.broker.settings import ClassPolicy
from headrace.config_queues import QueuesSection

P99_MS = 50.0

#: Full batches of 32 of the smallest class would allow 4,706/s: no system can do more.
HIGHEST_PER_S = 4_800.0

LOOP, ONE_QUEUE, BOUND = "one thread", "one thread, one queue", "clairvoyant bound"

#: Every policy, and what each option adds to it.
POLICIES: dict[str, ClassPolicy] = {
    "adaptive": ClassPolicy("adaptive"),
    "adaptive, learns a wait": ClassPolicy("adaptive", "auto"),
    "adaptive, promote": ClassPolicy("adaptive", promote=True),
    "deferred": ClassPolicy("deferred"),
    "window of 5 ms": ClassPolicy("window", 5.0),
    "window auto": ClassPolicy("window", "auto"),
}

#: The issue that asks for this benchmark, and DESIGN section 9.
OF_ONE_QUEUE, CORE_OF_BOUND = 1.5, 0.9

#: Tells whether a rate is kept up: at most LATE_SHARE of the frames take more than P99_MS.
Holds = Callable[[Arrivals], bool]


@dataclass(frozen=True, slots=True)
class Variant:
    """Arrivals and cost."""

    pattern: str
    is_scaled: bool

    @property
    def name(self) -> str:
        return f"{self.pattern}, cost by area" if self.is_scaled else self.pattern

    def cost(self, count: int, side: int) -> float:
        """Return the seconds that a batch takes."""
        return cost_s(count, side, is_scaled=self.is_scaled)


VARIANTS = tuple(
    Variant(pattern, is_scaled) for is_scaled in (False, True) for pattern in ("poisson", "bursty")
)


@dataclass(frozen=True, slots=True)
class Search:
    """How much is simulated, and how closely the highest rate is found."""

    duration_s: float
    resolution: float

    def highest(self, variant: Variant, holds: Holds, high_per_s: float) -> float:
        """Return the highest rate that holds, up to ``high_per_s``."""

        def at(rate_per_s: float) -> bool:
            return holds(draw(variant.pattern, rate_per_s, self.duration_s, seed=0))

        low, high = high_per_s / 2, high_per_s
        while not at(low):
            low, high = low / 2, low
        while high / low > 1 + self.resolution:
            rate = math.sqrt(low * high)
            low, high = (rate, high) if at(rate) else (low, rate)
        return low


def run(*, quick: bool) -> tuple[dict[str, float], list[Table], list[Budget]]:
    """Return the figures, a table per variant and the budgets."""
    search = Search(1.0, 0.1) if quick else Search(5.0, 0.015)
    figures: dict[str, float] = {}
    tables: list[Table] = []
    budgets: list[Budget] = []
    for variant in VARIANTS:
        found, rows = _measure(variant, search)
        figures |= {f"virtual, {variant.name}: {name}": rate for name, rate in found.items()}
        title = f"In virtual time, {variant.name}: highest rate with p99 <= {P99_MS:g} ms"
        columns = ("system", "frames/s", "of one queue", "of the bound", "p50 ms at half load", "p99 ms")
        tables.append(Table(title, columns, tuple(rows)))
        share = found["deferred"] / found[ONE_QUEUE]
        budgets.append(
            Budget.at_least(f"virtual, {variant.name}, deferred of one queue", share, OF_ONE_QUEUE)
        )
        if variant == VARIANTS[0]:
            default = QueuesSection().policy
            share = found[default] / found[BOUND]
            budgets.append(Budget.at_least(f"W3, core {default}, of the bound", share, CORE_OF_BOUND))
    return figures, tables, budgets


def _measure(variant: Variant, search: Search) -> tuple[dict[str, float], list[tuple[Cell, ...]]]:
    bound = search.highest(variant, lambda arrivals: _is_possible(variant, arrivals, search), HIGHEST_PER_S)
    half = draw(variant.pattern, bound / 2, search.duration_s, seed=0)
    found: dict[str, float] = {}
    latencies_ms: dict[str, list[float]] = {}
    for name, has_classes in ((ONE_QUEUE, False), (LOOP, True)):
        found[name] = search.highest(
            variant, lambda each, has_classes=has_classes: _loop_holds(variant, each, has_classes), bound
        )
        latencies_ms[name] = [1e3 * one for one in serve(half, variant.cost, has_classes=has_classes)]
    for name, policy in POLICIES.items():
        settings = core_settings(replace(policy, max_queue_size=0))
        found[name] = search.highest(
            variant,
            lambda each, settings=settings: VirtualPool(settings, variant.cost).keeps(
                each, P99_MS, LATE_SHARE
            ),
            bound,
        )
        outcome = VirtualPool(settings, variant.cost).run(half)
        latencies_ms[name] = [math.inf if one is None else one for one in outcome.latencies_ms]
    found[BOUND] = bound
    rows: list[tuple[Cell, ...]] = []
    for name, rate in found.items():
        cells = (
            [f"{percentile(latencies_ms[name], q):.1f}" for q in (0.5, 0.99)] if name != BOUND else ["", ""]
        )
        shares = (f"{rate / found[ONE_QUEUE]:.2f}", f"{rate / bound:.3f}")
        rows.append((name, f"{rate:,.0f}", *shares, *cells))
    return found, rows


def _is_possible(variant: Variant, arrivals: Arrivals, search: Search) -> bool:
    return is_possible(arrivals, search.duration_s, P99_MS / 1e3, is_scaled=variant.is_scaled)


def _loop_holds(variant: Variant, arrivals: Arrivals, has_classes: bool) -> bool:
    latencies_s = serve(arrivals, variant.cost, has_classes=has_classes)
    late_count = sum(each > P99_MS / 1e3 for each in latencies_s)
    return late_count <= LATE_SHARE * len(latencies_s)
