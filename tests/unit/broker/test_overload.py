"""Overload, and a worker that hangs, on the simulated clock: the core driven by emulated workers.

The cost models: W3 of the design, T(b) = 2 + 0.15 b ms, where a full batch of 32 takes three times as long
as a single frame, and a GPU-like one, T(b) = 6 + 0.02 b ms, where the fixed cost decides.
"""

from __future__ import annotations

from functools import cache

import hr_core as hr
import pytest
from hr_load import Load, Mix, Result

from headrace.protocol.messages import SizeClassSpec

W3 = (2.0, 0.15)
GPU = (6.0, 0.02)
LIMIT = 32

#: A tenth is urgent.
MIXED = ((0.1, 9), (0.3, 5), (0.6, 0))


def run(
    cost: tuple[float, float], times: float, *, ttl_ms: int | None, seconds: float = 1.0, workers: int = 1
) -> Result:
    """Offer ``times`` the capacity of full batches, Poisson, with mixed priorities."""
    return _run(cost, times, ttl_ms, seconds, workers)


@cache
def _run(cost: tuple[float, float], times: float, ttl_ms: int | None, seconds: float, workers: int) -> Result:
    spec = hr.make_spec(classes=(SizeClassSpec("c", 64, 64, max_batch_size=LIMIT),))
    load = Load(hr.make_settings(spec), workers=workers, base_ms=cost[0], per_frame_ms=cost[1])
    mixes = [Mix(share, priority, ttl_ms) for share, priority in MIXED]
    return load.run(times * capacity(cost) * workers, seconds, mixes)


def capacity(cost: tuple[float, float]) -> float:
    """Frames a second of one worker in full batches."""
    return LIMIT / (cost[0] + cost[1] * LIMIT) * 1_000


@pytest.mark.parametrize("ttl_ms", [50, None], ids=["deadlines", "no deadlines"])
@pytest.mark.parametrize("cost", [W3, GPU], ids=["W3", "GPU"])
def test_goodput_at_twice_the_load_is_that_of_the_peak(cost: tuple[float, float], ttl_ms: int | None) -> None:
    """Must-show 7: at least 95 %, by frames that are done within their time to live."""
    peak = max(run(cost, times, ttl_ms=ttl_ms).goodput for times in (0.9, 1.0, 1.2))

    twice = run(cost, 2.0, ttl_ms=ttl_ms).goodput

    assert peak >= 0.85 * capacity(cost)
    assert twice >= 0.95 * peak


def test_top_priority_keeps_its_latency() -> None:
    """Must-show 7: its p99 at twice the load is within 1.2 times that at half load."""
    half = run(GPU, 0.5, ttl_ms=None).p99(9)

    twice = run(GPU, 2.0, ttl_ms=None).p99(9)

    assert twice <= 1.2 * half


@pytest.mark.parametrize("cost", [W3, GPU], ids=["W3", "GPU"])
def test_top_priority_waits_for_one_running_batch_at_most(cost: tuple[float, float]) -> None:
    """What runs can't be interrupted, and nothing else is before it: two full batches and the lead of one
    that is sent ahead, whatever the load."""
    full_ms = cost[0] + cost[1] * LIMIT

    for times in (1.2, 2.0):
        assert run(cost, times, ttl_ms=None).p99(9) <= 2 * full_ms + 1.0


def test_every_refused_frame_says_why_and_when_to_come_again() -> None:
    """Must-show 7, BAT-09: codes of overload alone, each with retry_after_ms; memory stays in its bound."""
    for ttl_ms, codes in ((50, {"wont_make_it", "queue_full"}), (None, {"queue_full"})):
        result = run(W3, 2.0, ttl_ms=ttl_ms)

        assert result.rejects
        assert {code for code, _ in result.rejects} <= codes
        assert all(retry_ms is not None and 10 <= retry_ms <= 10_000 for _, retry_ms in result.rejects)
        # max_queue_size, the reserve of nine higher priorities, and two batches in flight, of 1,000 bytes.
        assert result.peak_bytes <= (1_024 + 9 * 64 + 2 * LIMIT) * 1_000


def test_a_worker_that_hangs_for_ever_costs_the_others_little() -> None:
    """Must-show 6: p99 of all frames under three times the fault-free one, hedged load within its share."""
    spec = hr.make_spec(classes=(SizeClassSpec("c", 64, 64, max_batch_size=8),))
    rate, seconds = 0.5 * 4 * 1_000, 4.0
    results = []
    for hang_ns in (None, 2_500 * hr.MS):
        load = Load(hr.make_settings(spec), workers=4, base_ms=6.0, per_frame_ms=0.25, hang_ns=hang_ns)
        results.append(load.run(rate, seconds, [Mix(1.0)]))
    sound, hung = results

    assert sound.hedged == 0
    assert 0 < hung.hedged <= 0.02 * rate * seconds + 64
    assert hung.by_status == sound.by_status
    assert hung.p99(0) < 3 * sound.p99(0)
