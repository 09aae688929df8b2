"""Measure what a batch of each bucket costs, within a time budget.

A start-up that runs every bucket of a slow detector many times would take minutes; the broker's cost table
corrects itself with every batch served, so a rough first figure is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

#: Most timed runs of one bucket. Five give a median that one preemption can't move.
MAX_RUNS = 5

#: A first run longer than this is itself taken as a sample: allocation no longer dominates it.
SLOW_NS = 100_000_000

#: Portions are worth their calls only where they save at least a tenth per row; less is noise.
PORTION_SAVES = 0.1

#: A batch that takes less is run as a whole: its figures are too small to be told apart.
MIN_PORTIONED_MS = 0.5

#: Of the portions that cost about the same per row the largest is taken: it needs the fewest calls.
ABOUT_THE_SAME = 1.03


def buckets_up_to(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... and ``largest`` itself, ascending."""
    buckets = []
    bucket = 1
    while bucket < largest:
        buckets.append(bucket)
        bucket *= 2
    return (*buckets, largest)


def measure_buckets(
    run: Callable[[int], None],
    buckets: Sequence[int],
    budget_ns: int,
    clock: Callable[[], int] = time.perf_counter_ns,
    *,
    largest_run: int | None = None,
) -> tuple[tuple[tuple[int, float], ...], tuple[int, ...]]:
    """Time ``run(bucket)`` for each bucket, ascending, up to ``largest_run`` rows.

    Returns the median milliseconds per bucket, and the buckets that were not run because the budget was
    spent or they are larger: their figure is the last measured one scaled by rows. The first bucket is
    always run.
    """
    started_ns = clock()
    measured: list[tuple[int, float]] = []
    estimated: list[int] = []
    for bucket in buckets:
        if measured:
            last_bucket, last_ms = measured[-1]
            expected_ns = last_ms * 1e6 * bucket / last_bucket
            is_too_large = largest_run is not None and bucket > largest_run
            if is_too_large or clock() - started_ns + expected_ns > budget_ns:
                estimated.append(bucket)
                measured.append((bucket, last_ms * bucket / last_bucket))
                continue
        measured.append((bucket, _measure(run, bucket, budget_ns // (2 * len(buckets)), clock)))
    return tuple(measured), tuple(estimated)


def cheapest_portion(measured: Sequence[tuple[int, float]]) -> int:
    """Return how many rows to run at once so that a large batch costs least.

    ``measured``: (bucket, milliseconds), ascending. What a run computes between input and output grows with
    its rows until it no longer fits the cache: 32 frames of 224 squares as float32 are 19 MB, and each cost
    25 us where those of a batch of 16 cost 19. The largest bucket unless portions of it save enough."""
    largest, largest_ms = measured[-1]
    least_ms = min(cost_ms / bucket for bucket, cost_ms in measured)
    if largest_ms < MIN_PORTIONED_MS or least_ms > (1 - PORTION_SAVES) * largest_ms / largest:
        return largest
    return max(bucket for bucket, cost_ms in measured if cost_ms / bucket <= ABOUT_THE_SAME * least_ms)


def cost_in_portions(measured: Sequence[tuple[int, float]], portion: int) -> tuple[tuple[int, float], ...]:
    """Return ``measured`` with buckets above ``portion`` at the cost of as many portions as they take."""
    portion_ms = dict(measured)[portion]
    return tuple(
        (bucket, cost_ms if bucket <= portion else portion_ms * bucket / portion)
        for bucket, cost_ms in measured
    )


def _measure(run: Callable[[int], None], bucket: int, share_ns: int, clock: Callable[[], int]) -> float:
    begun_ns = clock()
    run(bucket)
    warm_up_ns = clock() - begun_ns
    samples = [warm_up_ns] if warm_up_ns > SLOW_NS else []
    while not samples or (len(samples) < MAX_RUNS and clock() - begun_ns < share_ns):
        before_ns = clock()
        run(bucket)
        samples.append(clock() - before_ns)
    return median(samples) / 1e6
