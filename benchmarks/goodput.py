"""W3: the highest rate at which p99 stays within 50 ms and nothing is lost, on an emulated GPU.

T(b) = 2.0 + 0.15 b ms, one worker, 60/30/10 % of 224, 416 and 640 squares from 100 cameras of one size each,
Poisson arrivals. Open loop: frames are pushed when they are due, latency runs from then. The highest rate is
found by bisection from a guess; the arrivals are seeded and the same for every system, stretched to the rate.

Rows of real processes. "in-process": one thread, one queue per size class, a batch grows while the device is
busy (the baseline). "in-process, one queue": one queue for all sizes, which cuts a batch at each change of
size. "headrace POLICY, LANE". Bursty arrivals, costs in proportion to the pixels, all policies with their
options and a bound that no scheduler can exceed are looked at in virtual time
(``benchmarks.goodput_virtual``): there the transport does not hide what a decision is worth. ``--rounds 0``
does that alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import goodput_virtual
from benchmarks.arrivals import SIZES
from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.emulation import BASE_MS, PER_FRAME_MS
from benchmarks.goodput_virtual import HIGHEST_PER_S, OF_ONE_QUEUE, P99_MS
from benchmarks.lanes import INLINE, SHM, has_lane
from benchmarks.processes import Processes
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.stats import ratio_text, spread
from headrace.config_queues import QueuesSection

LOWEST_PER_S = 50.0

IN_PROCESS, ONE_QUEUE = "in-process", "in-process, one queue"

#: DESIGN section 9.
OF_IN_PROCESS = 1.0

#: Policy -> its max_queue_delay_ms.
POLICIES: dict[str, float | str] = {"adaptive": 0.0, "deferred": 0.0, "window": "auto"}

#: Where a search begins: a wrong guess costs a few probes more.
GUESSES_PER_S = {IN_PROCESS: 3_400.0, ONE_QUEUE: 600.0}
GUESS_PER_S = 1_500.0

Probe = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Search:
    """How long each probe is, how far apart the first ones are, and when the bisection ends."""

    duration_s: float
    warm_up_s: float
    step: float
    resolution: float

    @classmethod
    def of(cls, *, quick: bool) -> Search:
        return cls(1.0, 0.3, 2.0, 0.3) if quick else cls(4.0, 1.0, 1.2, 0.05)

    def highest(self, probe: Probe, seed: int, guess_per_s: float) -> float:
        """Return the highest rate that holds, within ``resolution``; 0 when none does."""

        def holds(rate: float) -> bool:
            # Twice: one hiccup of a machine that does other things too must not halve the answer.
            return any(_holds(probe(self._question(rate, seed))) for _ in range(2))

        low = high = guess_per_s
        if holds(guess_per_s):
            while high == low and low < HIGHEST_PER_S:
                high = min(high * self.step, HIGHEST_PER_S)
                low = high if holds(high) else low
        else:
            while low == high or not holds(low):
                high, low = low, low / self.step
                if low < LOWEST_PER_S:
                    return 0.0
        while high / low > 1 + self.resolution:
            # Halving the ratio, not the difference: the answers lie within two orders of magnitude.
            rate = math.sqrt(low * high)
            low, high = (rate, high) if holds(rate) else (low, rate)
        return low

    def _question(self, rate: float, seed: int) -> dict[str, Any]:
        return {
            "pattern": "poisson",
            "rate": rate,
            "duration_s": self.duration_s,
            "warm_up_s": self.warm_up_s,
            "seed": seed,
            "drain_s": 1.0,
        }


def run(*, quick: bool, rounds: int = 3) -> Report:
    """Look at every policy in virtual time, then at real processes ``rounds`` times."""
    virtual, tables, budgets = goodput_virtual.run(quick=quick)
    search = Search.of(quick=quick)
    measured: list[dict[str, float]] = []
    for seed in range(min(rounds, 1) if quick else rounds):
        measured.append(_systems(search, seed, measured[-1] if measured else {}))
    if measured:
        tables.append(_table(measured))
        budgets += _budgets(measured)
    return Report("goodput", (virtual, *measured), tuple(tables), tuple(budgets))


def lanes_of(policy: str) -> tuple[str, ...]:
    """Return the lanes that a policy is measured on: the default one on each, others on the better one."""
    best = SHM if has_lane(SHM) else INLINE
    return (INLINE, SHM) if policy == QueuesSection().policy and best == SHM else (best,)


def _systems(search: Search, seed: int, before: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}

    def guess(name: str) -> float:
        return before.get(name) or GUESSES_PER_S.get(name, GUESS_PER_S)

    for name, has_classes in ((IN_PROCESS, True), (ONE_QUEUE, False)):
        with Processes() as processes:
            child = processes.role("in-process-loop", has_classes=has_classes, is_scaled=False)
            child.read()
            found[name] = search.highest(child.ask, seed, guess(name))
    for policy in POLICIES:
        for lane in lanes_of(policy):
            name = f"headrace {policy}, {lane}"
            found[name] = _headrace(search, seed, policy, lane, guess(name))
    return found


def _headrace(search: Search, seed: int, policy: str, lane: str, guess_per_s: float) -> float:
    model = Model(tuple(SquareClass(side) for side in SIZES), emulated_ms=(BASE_MS, PER_FRAME_MS))
    config = broker_config(
        model, credits_count=1_024, policy=policy, max_queue_delay_ms=POLICIES[policy], objective_ms=P99_MS
    )
    with Processes() as processes:
        address = processes.broker(config)
        processes.workers(address, 1, "emulated")
        names = [model.name] * len(SIZES)
        child = processes.role("headrace-loop", address=address, lane=lane, in_flight=1_024, models=names)
        child.read()
        return search.highest(child.ask, seed, guess_per_s)


def _holds(result: dict[str, Any]) -> bool:
    return bool(result["lost"] == 0 and result["p99_ms"] <= P99_MS)


def _table(rounds: list[dict[str, float]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for key in rounds[0]:
        shares = (ratio_text(_shares(rounds, key, baseline)) for baseline in (IN_PROCESS, ONE_QUEUE))
        rows.append((key, spread([each[key] for each in rounds]), *shares))
    title = f"W3, real processes, poisson: highest rate with p99 <= {P99_MS:g} ms and nothing lost"
    return Table(title, ("system", "frames/s", "of in-process", "of one queue"), tuple(rows))


def _shares(rounds: list[dict[str, float]], key: str, baseline: str) -> list[float]:
    return [each[key] / max(each[baseline], 1.0) for each in rounds]


def _budgets(rounds: list[dict[str, float]]) -> list[Budget]:
    default = QueuesSection().policy
    deferred, ours = (f"headrace {policy}, {lanes_of(policy)[-1]}" for policy in ("deferred", default))
    of_one_queue = median(_shares(rounds, deferred, ONE_QUEUE))
    of_in_process = median(_shares(rounds, ours, IN_PROCESS))
    return [
        Budget.at_least("W3, deferred of one queue", of_one_queue, OF_ONE_QUEUE),
        Budget.at_least(f"W3, {default}, of in-process", of_in_process, OF_IN_PROCESS),
    ]
