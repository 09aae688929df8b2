"""What arrives in a simulated world."""

from __future__ import annotations

import itertools

import pytest

from headrace.clients.load.schedule import Pattern
from headrace.planner.streams import PatternSource, TraceSource
from headrace.planner.trace_file import TraceFrame, TraceKind

SMALL = TraceKind((8, 8, 3), 192)
LARGE = TraceKind((16, 16, 3), 768)


def arrivals(source: PatternSource | TraceSource) -> list[tuple[int, int, int]]:
    return [
        arrival
        for block in source.blocks()
        for arrival in zip(block.times_ns, block.streams, block.kinds, strict=True)
    ]


def test_cameras_send_at_their_own_steady_rate() -> None:
    """Each stream's gaps are one period; phases differ; order is by time across blocks."""
    found = arrivals(PatternSource(5, 10.0, [(SMALL, 1.0)], 2.0, seed=1))

    assert len(found) == 100
    assert found == sorted(found, key=lambda one: one[0])
    phases = set()
    for stream in range(5):
        times = [time for time, number, _ in found if number == stream]
        gaps = {round((b - a) / 1e6) for a, b in itertools.pairwise(times)}
        assert gaps == {100}
        phases.add(times[0])
    assert len(phases) == 5


@pytest.mark.parametrize("pattern", [Pattern.POISSON, Pattern.BURSTS])
def test_random_arrivals_have_the_mean_rate(pattern: Pattern) -> None:
    """Over a long time as many frames come as were asked for, in order and within the run."""
    found = arrivals(PatternSource(20, 50.0, [(SMALL, 1.0)], 60.0, pattern=pattern, seed=3))

    assert len(found) == pytest.approx(60_000, rel=0.15)
    assert found == sorted(found, key=lambda one: one[0])
    assert found[-1][0] < 60e9


def test_a_ramp_rises_from_nothing() -> None:
    """Half of the frames of a steady rate come, three quarters of them in the second half."""
    found = arrivals(PatternSource(20, 50.0, [(SMALL, 1.0)], 40.0, pattern=Pattern.RAMP, seed=3))

    assert len(found) == pytest.approx(20_000, rel=0.05)
    late = sum(time_ns >= 20e9 for time_ns, _, _ in found)
    assert late / len(found) == pytest.approx(0.75, abs=0.02)


def test_bursts_come_closer_than_chance() -> None:
    """The variance of counts in 100 ms is far above that of a Poisson stream."""

    def variance_ratio(pattern: Pattern) -> float:
        counts = [0] * 300
        for time_ns, _, _ in arrivals(PatternSource(20, 50.0, [(SMALL, 1.0)], 30.0, pattern=pattern)):
            counts[time_ns // 100_000_000] += 1
        mean = sum(counts) / len(counts)
        return sum((count - mean) ** 2 for count in counts) / len(counts) / mean

    assert variance_ratio(Pattern.BURSTS) > 5 * variance_ratio(Pattern.POISSON)


def test_kinds_are_shared_out_over_the_streams() -> None:
    """One kind a stream, in the shares asked for, interleaved."""
    source = PatternSource(10, 1.0, [(SMALL, 3.0), (LARGE, 2.0)], 1.0)

    kind_of = {stream: kind for _, stream, kind in arrivals(source)}

    assert [source.kinds[kind_of[stream]] for stream in range(5)].count(SMALL) == 3
    assert list(kind_of.values()).count(0) == 6


def test_equal_seeds_give_equal_arrivals() -> None:
    """And another seed others."""
    first, second, third = (
        arrivals(PatternSource(7, 9.0, [(SMALL, 1.0)], 3.0, pattern=Pattern.BURSTS, seed=seed))
        for seed in (4, 4, 5)
    )

    assert first == second
    assert first != third


def test_a_trace_keeps_its_times_streams_and_kinds() -> None:
    """At twice the speed all times halve; what lies beyond the end is left out."""
    frames = [
        TraceFrame(0.0, "b", SMALL),
        TraceFrame(1.0, "a", LARGE),
        TraceFrame(3.0, "b", SMALL),
        TraceFrame(9.0, "c", SMALL),
    ]
    source = TraceSource(frames, speed=2.0, seconds=2.0)

    found = arrivals(source)

    assert found == [(0, 0, 0), (500_000_000, 1, 1), (1_500_000_000, 0, 0)]
    assert source.streams == ["b", "a"]
    assert source.kinds == [SMALL, LARGE]
