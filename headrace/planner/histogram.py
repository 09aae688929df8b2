"""Durations in logarithmic buckets: flat memory however many there are, every quantile within 1 %.

Bucket i holds durations from RATIO ** i up to RATIO ** (i + 1) microseconds and answers for them with its
geometric middle, which is off by at most half a bucket: 0.5 %.
"""

from __future__ import annotations

import math

#: Width of a bucket. 1 % of 1 us to an hour are 2,212 buckets.
RATIO = 1.01

_PER_LOG = 1.0 / math.log(RATIO)

#: Everything above an hour is in the last bucket.
_BUCKETS = int(math.log(3.6e9) * _PER_LOG) + 2


class Histogram:
    """Counts of durations. Invariant: ``count`` is the sum of all buckets."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets = [0] * _BUCKETS

    def add(self, duration_ns: int) -> None:
        """Count one duration; what is shorter than a microsecond counts as one."""
        us = duration_ns / 1e3
        index = int(math.log(us) * _PER_LOG) if us > 1.0 else 0
        self._buckets[index if index < _BUCKETS else _BUCKETS - 1] += 1
        self.count += 1

    def quantile_ms(self, share: float) -> float:
        """Return the duration that ``share`` (0 to 1) of all do not exceed; NaN when there is none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count - 1e-9))
        seen = 0
        for index, count in enumerate(self._buckets):
            seen += count
            if seen >= rank:
                return math.pow(RATIO, index + 0.5) / 1e3
        raise AssertionError("the buckets hold fewer than were counted")
