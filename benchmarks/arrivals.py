"""When frames arrive and how large they are: seeded, open loop, the same for every system under test.

A pattern is drawn once at unit rate and stretched to the rate asked for, so that a search over rates compares
like with like. Not here: sending.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: W3: sides of the square frames and their shares.
SIZES = (224, 416, 640)
SHARES = (0.6, 0.3, 0.1)

#: Streams: cameras of one size each, in the same shares.
STREAMS = 100

#: Bursty arrivals: a two-state Markov-modulated Poisson process, 3 times the calm rate while it bursts. A
#: state lasts 0.2 s (burst) or 0.6 s (calm) on average: a quarter of the time bursts, the mean rate is the
#: one asked for.
BURST_RATIO = 3.0
BURST_S, CALM_S = 0.2, 0.6


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``times_s``: ascending, from 0. ``streams``: the stream of each frame, 0 to STREAMS - 1."""

    times_s: tuple[float, ...]
    streams: tuple[int, ...]

    def size_index(self, index: int) -> int:
        """Return which of SIZES frame ``index`` has."""
        return size_index_of(self.streams[index])


def size_index_of(stream: int) -> int:
    """Return which of SIZES the frames of a stream have."""
    share = stream / STREAMS
    return 0 if share < SHARES[0] else 1 if share < SHARES[0] + SHARES[1] else 2


def draw(pattern: str, rate_per_s: float, duration_s: float, seed: int) -> Arrivals:
    """Return arrivals: "poisson", "bursty" or "steady"."""
    rng = np.random.default_rng(seed)
    if pattern == "steady":
        times = np.arange(0.0, duration_s, 1.0 / rate_per_s)
    elif pattern == "poisson":
        times = _poisson(rng, rate_per_s, duration_s)
    elif pattern == "bursty":
        times = _bursty(rng, rate_per_s, duration_s)
    else:
        raise ValueError(f"pattern {pattern!r}: expected poisson, bursty or steady")
    # A generator of its own, so that the sizes do not depend on how many gaps were drawn.
    streams = np.random.default_rng(seed + 1).integers(0, STREAMS, len(times))
    return Arrivals(tuple(times.tolist()), tuple(streams.tolist()))


def _poisson(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> np.ndarray:
    count = int(rate_per_s * duration_s * 1.2) + 100
    times = np.cumsum(rng.exponential(1.0, count)) / rate_per_s
    return times[times < duration_s]


def _bursty(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> np.ndarray:
    mean_ratio = (CALM_S + BURST_S * BURST_RATIO) / (CALM_S + BURST_S)
    calm_rate = rate_per_s / mean_ratio
    # Modulation by time change: unit-rate arrivals, placed where the integral of the rate reaches them.
    ends, areas, is_burst = [0.0], [0.0], False
    while ends[-1] < duration_s:
        length_s = float(rng.exponential(BURST_S if is_burst else CALM_S))
        ends.append(ends[-1] + length_s)
        areas.append(areas[-1] + length_s * calm_rate * (BURST_RATIO if is_burst else 1.0))
        is_burst = not is_burst
    unit = np.cumsum(rng.exponential(1.0, int(areas[-1] * 1.2) + 100))
    times = np.interp(unit[unit < areas[-1]], areas, ends)
    return times[times < duration_s]
