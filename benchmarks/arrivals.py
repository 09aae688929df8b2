"""When frames arrive and how large they are: seeded, open loop, the same for every system under test.

A pattern is drawn once at unit rate and stretched to the rate asked for, so that a search over rates compares
like with like. The load generator draws them too. Not here: sending.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.clients.load import schedule

#: W3: sides of the square frames and their shares.
SIZES = (224, 416, 640)
SHARES = (0.6, 0.3, 0.1)

#: Streams: cameras of one size each, in the same shares.
STREAMS = 100

_PATTERNS = {"poisson": schedule.Pattern.POISSON, "bursty": schedule.Pattern.BURSTS}


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
    if pattern == "steady":
        times = np.arange(0.0, duration_s, 1.0 / rate_per_s).tolist()
        streams = np.random.default_rng(seed + 1).integers(0, STREAMS, len(times)).tolist()
        return Arrivals(tuple(times), tuple(streams))
    if pattern not in _PATTERNS:
        raise ValueError(f"pattern {pattern!r}: expected poisson, bursty or steady")
    drawn = schedule.draw(_PATTERNS[pattern], rate_per_s, duration_s, STREAMS, seed)
    return Arrivals(drawn.times_s, drawn.streams)
