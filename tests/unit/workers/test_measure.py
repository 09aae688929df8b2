"""Measuring buckets within a budget, on a clock that the run itself moves."""

from __future__ import annotations

import pytest

from headrace.workers.measure import (
    MAX_RUNS,
    buckets_up_to,
    cheapest_portion,
    cost_in_portions,
    measure_buckets,
)

MS = 1_000_000


class _Device:
    """Runs cost ``row_ms`` per row, the first of each bucket twice that."""

    def __init__(self, row_ms: float) -> None:
        self.row_ms = row_ms
        self.now_ns = 0
        self.runs: list[int] = []

    def run(self, bucket: int) -> None:
        factor = 1 if bucket in self.runs else 2
        self.runs.append(bucket)
        self.now_ns += round(self.row_ms * bucket * factor * MS)

    def clock(self) -> int:
        return self.now_ns


@pytest.mark.parametrize(
    ("largest", "buckets"),
    [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (33, (1, 2, 4, 8, 16, 32, 33))],
)
def test_buckets_are_powers_of_two_and_the_largest(largest: int, buckets: tuple[int, ...]) -> None:
    """A largest batch that is no power of two has its own bucket."""
    assert buckets_up_to(largest) == buckets


def test_buckets_above_the_largest_run_are_estimated() -> None:
    """BAT-11: a limit of thousands of rows is never run, so nothing is allocated for it."""
    device = _Device(row_ms=0.001)

    measured, estimated = measure_buckets(
        device.run, buckets_up_to(4096), 10_000 * MS, device.clock, largest_run=16
    )

    assert max(device.runs) == 16
    assert estimated == (32, 64, 128, 256, 512, 1024, 2048, 4096)
    assert dict(measured)[4096] == pytest.approx(4.096)


def test_a_fast_model_is_measured_at_every_bucket() -> None:
    """The warm-up run is not counted, and each bucket is timed a few times."""
    device = _Device(row_ms=1.0)

    measured, estimated = measure_buckets(device.run, (1, 2, 4), 3000 * MS, device.clock)

    assert measured == ((1, 1.0), (2, 2.0), (4, 4.0))
    assert estimated == ()
    assert device.runs.count(4) == MAX_RUNS + 1


def test_a_slow_model_stays_within_its_budget() -> None:
    """What no longer fits is estimated from the last measured bucket, and told."""
    device = _Device(row_ms=300.0)

    measured, estimated = measure_buckets(device.run, (1, 2, 4, 8), 2000 * MS, device.clock)

    assert [bucket for bucket, _ in measured] == [1, 2, 4, 8]
    assert estimated == (4, 8)
    assert measured[3][1] == pytest.approx(2 * measured[2][1])
    assert device.now_ns <= 3000 * MS


def test_the_first_bucket_is_always_run() -> None:
    """A class that was never run would only be found broken by its first frame."""
    device = _Device(row_ms=9000.0)

    measured, estimated = measure_buckets(device.run, (1, 2), 10 * MS, device.clock)

    assert device.runs == [1]
    assert measured[0][1] > 0
    assert estimated == (2,)


@pytest.mark.parametrize(
    ("measured", "portion"),
    [
        pytest.param(((1, 1.0), (2, 1.8), (4, 3.2)), 4, id="larger-is-cheaper"),
        pytest.param(((1, 1.0), (8, 4.0), (16, 7.9), (32, 24.0)), 16, id="the-largest-leaves-the-cache"),
        pytest.param(((1, 1.0), (8, 4.0), (16, 8.1), (32, 24.0)), 16, id="about-the-same-takes-the-larger"),
        pytest.param(((1, 1.0), (8, 4.0), (16, 9.0), (32, 24.0)), 8, id="the-cheapest"),
        pytest.param(((1, 1.0), (8, 4.0), (16, 8.5)), 16, id="too-little-to-gain"),
        pytest.param(((1, 0.01), (8, 0.1), (16, 0.4)), 16, id="too-short-to-tell"),
        pytest.param(((4, 9.0),), 4, id="fixed-batch"),
    ],
)
def test_a_portion_is_what_costs_least_per_row(measured: tuple[tuple[int, float], ...], portion: int) -> None:
    """A large batch is run in parts only where that saves a tenth, and then in the largest cheap ones."""
    assert cheapest_portion(measured) == portion


def test_buckets_above_a_portion_cost_their_portions() -> None:
    """The broker is told what a batch will take, not what it took before it was run in portions."""
    measured = ((1, 1.0), (8, 4.0), (12, 8.0), (32, 24.0))

    assert cost_in_portions(measured, 8) == ((1, 1.0), (8, 4.0), (12, 6.0), (32, 16.0))
