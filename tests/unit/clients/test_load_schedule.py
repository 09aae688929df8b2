"""Schedules: the rate asked for, the same frames for the same seed, streams in their shares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.clients.load import schedule
from headrace.clients.load.generator import share_out
from headrace.clients.load.schedule import Pattern, draw, ladder, spread

rates = st.floats(1.0, 2_000.0)
durations = st.floats(0.5, 5.0)
seeds = st.integers(0, 2**32 - 1)
patterns = st.sampled_from(Pattern)


@given(patterns, rates, durations, st.integers(1, 50), seeds)
@settings(max_examples=60, deadline=None)
def test_frames_are_in_order_within_the_duration_and_of_known_streams(
    pattern: Pattern, rate: float, duration: float, streams: int, seed: int
) -> None:
    """Whatever is asked for, times ascend from 0 and end before the duration."""
    drawn = draw(pattern, rate, duration, streams, seed)

    assert len(drawn.times_s) == len(drawn.streams)
    assert list(drawn.times_s) == sorted(drawn.times_s)
    assert all(0 <= time_s < duration for time_s in drawn.times_s)
    assert all(0 <= stream < streams for stream in drawn.streams)


@given(patterns, rates, durations, seeds)
@settings(max_examples=40, deadline=None)
def test_one_seed_gives_one_schedule(pattern: Pattern, rate: float, duration: float, seed: int) -> None:
    """Two systems measured with one seed get the same frames."""
    assert draw(pattern, rate, duration, 7, seed) == draw(pattern, rate, duration, 7, seed)


@pytest.mark.parametrize("pattern", Pattern)
def test_seeds_differ(pattern: Pattern) -> None:
    """Another seed is another run."""
    assert draw(pattern, 100.0, 2.0, 5, 1) != draw(pattern, 100.0, 2.0, 5, 2)


@given(rates, durations, st.integers(1, 50), seeds)
@settings(max_examples=40, deadline=None)
def test_cameras_keep_their_own_pace(rate: float, duration: float, streams: int, seed: int) -> None:
    """Each camera's frames are one period apart; together they are the rate, to one frame a camera."""
    drawn = draw(Pattern.CAMERAS, rate, duration, streams, seed)

    assert abs(len(drawn.times_s) - rate * duration) <= streams
    period_s = streams / rate
    for stream in range(streams):
        own = [t for t, s in zip(drawn.times_s, drawn.streams, strict=True) if s == stream]
        assert np.allclose(np.diff(own), period_s)
        assert not own or own[0] < period_s


@pytest.mark.parametrize(
    ("pattern", "share", "tolerance"),
    # Poisson counts of 40,000 stray by 200; bursts by as much as a few of them fall into the span or not.
    [(Pattern.POISSON, 1.0, 0.02), (Pattern.BURSTS, 1.0, 0.1), (Pattern.RAMP, 0.5, 0.03)],
)
def test_the_mean_rate_is_the_one_asked_for(pattern: Pattern, share: float, tolerance: float) -> None:
    """A ramp rises from nothing, so its mean is half of its end."""
    drawn = draw(pattern, 200.0, 200.0, 10, seed=4)

    assert len(drawn.times_s) == pytest.approx(share * 40_000, rel=tolerance)


def test_a_ramp_ends_at_its_rate() -> None:
    """The last tenth has nearly the whole rate, the first nearly none."""
    times = np.array(draw(Pattern.RAMP, 1_000.0, 100.0, 1, seed=3).times_s)

    assert np.count_nonzero(times < 10) == pytest.approx(1_000 * 10 * 0.05, rel=0.2)
    assert np.count_nonzero(times >= 90) == pytest.approx(1_000 * 10 * 0.95, rel=0.05)


def test_bursts_are_burstier_than_chance() -> None:
    """Counts of a tenth of a second vary more than those of a Poisson process, whose variance is the mean."""
    counts = {
        pattern: np.bincount((np.array(draw(pattern, 500.0, 100.0, 1, 5).times_s) * 10).astype(int))
        for pattern in (Pattern.POISSON, Pattern.BURSTS)
    }

    ratio = {pattern: each.var() / each.mean() for pattern, each in counts.items()}
    assert ratio[Pattern.POISSON] == pytest.approx(1.0, rel=0.2)
    assert ratio[Pattern.BURSTS] > 5


def test_a_rate_stretches_the_same_arrivals() -> None:
    """Twice the rate are the same gaps, half as long: a search over rates compares like with like."""
    slow = draw(Pattern.POISSON, 50.0, 10.0, 1, seed=9).times_s
    fast = draw(Pattern.POISSON, 100.0, 5.0, 1, seed=9).times_s

    assert np.allclose(np.array(slow), 2 * np.array(fast))


@pytest.mark.parametrize(
    ("rate", "duration", "words"),
    [(0.0, 1.0, "above zero"), (-1.0, 1.0, "above zero"), (1.0, 0.0, "above zero"), (1e6, 1e6, "at most")],
)
def test_a_schedule_that_makes_no_sense_is_refused(rate: float, duration: float, words: str) -> None:
    """Before memory is taken for it."""
    with pytest.raises(ValueError, match=words):
        draw(Pattern.POISSON, rate, duration, 1, 0)


@given(st.lists(st.floats(0.05, 10.0), min_size=1, max_size=6), st.integers(0, 60))
def test_streams_are_spread_by_share(shares: list[float], extra: int) -> None:
    """Every share gets its streams, to one; so does any first part of them."""
    count = int(sum(shares) / min(shares)) + 1 + extra

    chosen = spread(shares, count)

    for length in (count, count // 2):
        seen = Counter(chosen[:length])
        for index, share in enumerate(shares):
            assert abs(seen[index] - share / sum(shares) * length) <= len(shares)
    assert set(chosen) == set(range(len(shares)))


def test_a_share_without_a_stream_is_refused() -> None:
    """Rather than measuring another mix than was asked for."""
    with pytest.raises(ValueError, match="4 streams are too few"):
        spread([0.95, 0.05], 4)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((100.0, 300.0, 100.0), (100.0, 200.0, 300.0)),
        ((100.0, 290.0, 100.0), (100.0, 200.0)),
        ((0.1, 0.3, 0.1), (0.1, 0.2, 0.3)),
        ((50.0, 50.0, 1.0), (50.0,)),
    ],
)
def test_a_ladder_reaches_its_end(ends: tuple[float, float, float], expected: tuple[float, ...]) -> None:
    """The last rate is included when the steps meet it, also in tenths."""
    assert ladder(*ends) == pytest.approx(expected)


@pytest.mark.parametrize("ends", [(0.0, 5.0, 1.0), (5.0, 1.0, 1.0), (1.0, 5.0, 0.0), (1.0, 5.0, -1.0)])
def test_a_ladder_that_does_not_rise_is_refused(ends: tuple[float, float, float]) -> None:
    """It would be endless or empty."""
    with pytest.raises(ValueError, match="rise"):
        ladder(*ends)


def test_a_step_too_large_for_memory_is_refused() -> None:
    """The bound is on frames, which is what takes the memory."""
    with pytest.raises(ValueError, match=f"{schedule.MAX_FRAMES:,}"):
        draw(Pattern.CAMERAS, schedule.MAX_FRAMES, 2.0, 10, 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 10))
def test_no_two_priorities_share_a_connection(priority_of: list[int], count: int) -> None:
    """Every stream has a producer, every producer a stream, and one priority alone."""
    chosen = share_out(priority_of, count)

    assert set(chosen) == set(range(max(chosen) + 1))
    assert (
        len({(producer, own) for producer, own in zip(chosen, priority_of, strict=True)}) == max(chosen) + 1
    )
    assert max(chosen) + 1 <= count + len(set(priority_of))
