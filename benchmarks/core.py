"""Events a second of the broker's core alone: no sockets, no bytes, virtual time.

The baseline of the same run is the cheapest thing that could take its place: a deque per size class and a
batch when the device is free, in the same virtual time.
"""

from __future__ import annotations

import heapq
import time
from collections import deque

from benchmarks.arrivals import Arrivals, draw
from benchmarks.emulation import cost_s
from benchmarks.report import Budget, Report, Table, median
from benchmarks.stats import ratio_text, spread
from benchmarks.virtual import VirtualPool, core_settings
from headrace.broker.process import collect_seldom
from headrace.broker.settings import ClassPolicy

#: DESIGN section 9, simulator. A frame is two frame events: its arrival and its outcome.
FRAME_EVENTS_PER_S = 100_000.0

#: Name -> workers, frames a second of virtual time, seconds that one turn of the shell takes in at once.
CASES = {
    "1 worker, a turn a frame": (1, 3_000.0, 0.0),
    "1 worker, turns of 5 ms": (1, 3_000.0, 0.005),
    "100 workers, turns of 1 ms": (100, 200_000.0, 0.001),
    "1000 workers, turns of 1 ms": (1_000, 2_000_000.0, 0.001),
}


def run(*, quick: bool) -> Report:
    """Measure each case and the bare queues."""
    frames_count = 5_000 if quick else 40_000
    collect_seldom()  # as the broker's process does
    rounds: list[dict[str, float]] = []
    for number in range(1 if quick else 3):
        figures: dict[str, float] = {}
        for case, (workers, rate, turn_s) in CASES.items():
            arrivals = draw("poisson", rate, frames_count / rate, seed=number)
            began_s = time.perf_counter()
            _bare_queues(arrivals, workers)
            bare_s = time.perf_counter() - began_s
            pool = VirtualPool(core_settings(ClassPolicy(max_queue_size=0)), _cost, workers)
            before_count = pool.outcome.events_count
            began_s = time.perf_counter()
            outcome = pool.run(arrivals, turn_s=turn_s)
            took_s = time.perf_counter() - began_s
            frames = len(arrivals.times_s)
            figures[f"{case} events/s"] = (outcome.events_count - before_count) / took_s
            figures[f"{case} frame events/s"] = outcome.frame_events_count / took_s
            figures[f"{case} us per frame"] = took_s / frames * 1e6
            figures[f"{case} of bare queues"] = bare_s / took_s
        rounds.append(figures)
    budgets = tuple(
        Budget.at_least(
            f"core, {case}, frame events/s",
            median([each[f"{case} frame events/s"] for each in rounds]),
            FRAME_EVENTS_PER_S,
        )
        for case in CASES
    )
    return Report("core", tuple(rounds), (_table(rounds),), budgets)


def _table(rounds: list[dict[str, float]]) -> Table:
    figures = ("events/s", "frame events/s", "us per frame")
    rows = tuple(
        (
            case,
            *(spread([each[f"{case} {figure}"] for each in rounds], 1) for figure in figures),
            ratio_text([each[f"{case} of bare queues"] for each in rounds]),
        )
        for case in CASES
    )
    return Table("Core alone, virtual time", ("case", *figures, "speed of bare queues"), rows)


def _cost(count: int, side: int) -> float:
    return cost_s(count, side, is_scaled=False)


def _bare_queues(arrivals: Arrivals, workers: int) -> int:
    """Serve arrivals with nothing but queues; return the frames served."""
    queues: list[deque[tuple[float, int]]] = [deque(), deque(), deque()]
    free_at = [(0.0, number) for number in range(workers)]
    served = 0
    for index, time_s in enumerate(arrivals.times_s):
        queues[arrivals.size_index(index)].append((time_s, index))
        while free_at[0][0] <= time_s and any(queues):
            _, worker = heapq.heappop(free_at)
            queue = min((each for each in queues if each), key=lambda each: each[0])
            batch = [queue.popleft() for _ in range(min(32, len(queue)))]
            served += len(batch)
            heapq.heappush(free_at, (time_s + cost_s(len(batch), 224, is_scaled=False), worker))
    return served
