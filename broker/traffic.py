"""Which priorities have traffic: when a frame of each was admitted last.

Not here: what waits (queues.py).
"""

from __future__ import annotations

#: A priority has traffic for this long after a frame of it: long enough for a camera of one frame a second,
#: short enough that a single urgent frame does not change the pace for long.
TRAFFIC_NS = 5_000_000_000


class Traffic:
    """Written per admitted frame, so it is one list."""

    def __init__(self, priority_levels: int) -> None:
        self.seen_ns: list[int | None] = [None] * priority_levels

    def is_mixed(self, now_ns: int) -> bool:
        """Return True when frames of several priorities came lately: a more urgent one may come any time."""
        live = [seen_ns for seen_ns in self.seen_ns if seen_ns is not None and now_ns - seen_ns < TRAFFIC_NS]
        return len(live) > 1
