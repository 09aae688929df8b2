"""Durations in logarithmic buckets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.histogram import Histogram


@given(st.lists(st.integers(1_000, 3_600_000_000_000), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_every_quantile_is_within_one_percent(durations: list[int], share: float) -> None:
    """The answer is next to a duration that was counted, whatever the distribution."""
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)

    exact_ns = sorted(durations)[max(1, math.ceil(share * len(durations) - 1e-9)) - 1]

    assert histogram.quantile_ms(share) * 1e6 == pytest.approx(exact_ns, rel=0.01)


def test_what_is_out_of_range_is_counted_at_the_ends() -> None:
    """Nothing is lost and nothing fails, however short or long."""
    histogram = Histogram()

    histogram.add(0)
    histogram.add(10**18)

    assert histogram.count == 2
    assert histogram.quantile_ms(0.5) < 0.0011
    assert histogram.quantile_ms(1.0) > 3.6e6


def test_no_durations_have_no_quantile() -> None:
    """An empty histogram says so."""
    assert math.isnan(Histogram().quantile_ms(0.5))
