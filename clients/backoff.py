"""How long to wait before connecting again. Pure."""

from __future__ import annotations

MS = 1_000_000

#: The first new attempt comes at once (a broker that restarts is often back by then), each further one
#: after twice the time, up to a second: well under the time in which a stream's owner is given up.
FIRST_RETRY_NS = 50 * MS
MAX_RETRY_NS = 1_000 * MS


class Backoff:
    """0, 50, 100 ... 1000 ms, each spread by a quarter so that many clients do not come at once."""

    def __init__(self, jitter: float) -> None:
        """``jitter``: 0 to 1, drawn by the caller once."""
        self._spread = 0.75 + jitter / 2
        self._delay_ns = 0

    def reset(self) -> None:
        """Begin at 0 again: the last connection was a good one."""
        self._delay_ns = 0

    def next_delay_ns(self) -> int:
        """Return how long to wait now; the next one is longer."""
        delay_ns = int(self._delay_ns * self._spread)
        self._delay_ns = min(MAX_RETRY_NS, max(FIRST_RETRY_NS, self._delay_ns * 2))
        return delay_ns
