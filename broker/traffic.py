"""What comes in: when a frame of each priority was admitted last, and how fast a class's frames come.

Not here: what waits (queues.py).
"""

from __future__ import annotations

#: A priority has traffic for this long after a frame of it: long enough for a camera of one frame a second,
#: short enough that a single urgent frame does not change the pace for long.
TRAFFIC_NS = 5_000_000_000

#: The arrival rate of a class is measured over pieces of this length ...
RATE_PIECE_NS = 100_000_000

#: ... and a new piece counts for this part: a burst of 0.2 s moves the rate, a single frame does not.
RATE_WEIGHT = 0.5


class Traffic:
    """Written per admitted frame, so it is one list."""

    def __init__(self, priority_levels: int) -> None:
        self.seen_ns: list[int | None] = [None] * priority_levels

    def is_mixed(self, now_ns: int) -> bool:
        """Return True when frames of several priorities came lately: a more urgent one may come any time."""
        live = [seen_ns for seen_ns in self.seen_ns if seen_ns is not None and now_ns - seen_ns < TRAFFIC_NS]
        return len(live) > 1


class ArrivalRate:
    """How fast frames of one class come: a moving mean, fed with a counter when somebody asks."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._piece_ns: int | None = None
        self._piece_count = 0

    def frames_per_ns(self, arrived_count: int, now_ns: int) -> float:
        """Return the rate, given how many frames of the class have come so far."""
        if self._piece_ns is None:
            self._piece_ns, self._piece_count = now_ns, arrived_count
        elapsed_ns = now_ns - self._piece_ns
        if elapsed_ns >= RATE_PIECE_NS:
            rate = (arrived_count - self._piece_count) / elapsed_ns
            self._rate += (rate - self._rate) * (RATE_WEIGHT if self._rate else 1.0)
            self._piece_ns, self._piece_count = now_ns, arrived_count
        return self._rate
