"""What one open-loop run brought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.stats import percentile


def probe_result(
    question: dict[str, Any],
    times_s: Sequence[float],
    latencies_ms: Sequence[float | None],
    *,
    largest_lag_s: float,
) -> dict[str, Any]:
    """Return the figures of a run after its warm-up. A latency of None is a frame without a result.

    ``lost`` counts those in the whole run: a frame lost while warming up is lost all the same."""
    warm_up_s = question["warm_up_s"]
    kept = [
        latency
        for time_s, latency in zip(times_s, latencies_ms, strict=True)
        if time_s >= warm_up_s and latency is not None
    ]
    return {
        "sent": len(times_s),
        "lost": sum(latency is None for latency in latencies_ms),
        "p50_ms": percentile(kept, 0.50),
        "p99_ms": percentile(kept, 0.99),
        "p999_ms": percentile(kept, 0.999),
        "largest_lag_ms": largest_lag_s * 1e3,
        "measured": len(kept),
        "good": sum(latency <= question.get("objective_ms", float("inf")) for latency in kept),
    }
