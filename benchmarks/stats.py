"""Figures over samples and over rounds."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import median
from headrace.clients.load.figures import percentile as percentile


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return "median (lowest to highest)" of the rounds, or the one value."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratio_text(values: Sequence[float]) -> str:
    """Return ratios of the rounds as text."""
    return spread(values, 2)
