"""Figures over samples and over rounds."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import median


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` (0 to 1) of the values do not exceed; NaN for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    # Nearest rank: always a value that was measured, never one between two.
    return ordered[min(len(ordered) - 1, max(0, -(-round(share * len(ordered) * 1e6) // 1_000_000) - 1))]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return "median (lowest to highest)" of the rounds, or the one value."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratio_text(values: Sequence[float]) -> str:
    """Return ratios of the rounds as text."""
    return spread(values, 2)
