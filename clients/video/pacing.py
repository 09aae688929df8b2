"""When to send which frame of a video: pure decisions, no clock and no sleeping in here.

A frame's time is what its source says (``pts_ns``, nanoseconds on the source's own time line). It is
never a frame count divided by a rate: that drifts as soon as the rate varies. All methods take times
and return times; the push loop reads the clock and waits.
"""

from __future__ import annotations

from fractions import Fraction

NANOSECONDS = 1_000_000_000

#: A frame that comes this much early still counts for its slot, at most a quarter of the slot. Timestamps are
#: often rounded to milliseconds and cameras jitter: at 30 fps with ``--fps 30`` no frame may be lost to that.
EARLY_NS = 5_000_000


class Timeline:
    """Joins the pieces of a source (loops of a file, connections of a camera) to one rising time line.

    Invariant: within a piece the distances of the source are kept exactly, and the first piece is kept
    unchanged; each later piece starts ``gap_ns`` after the last frame before it.
    """

    def __init__(self) -> None:
        self._offset_ns = 0
        self._last_ns: int | None = None
        self._last_step_ns = 0
        self._gap_ns: int | None = None  # set between pieces

    @property
    def step_ns(self) -> int:
        """Return the distance of the last two frames: how long the last one is assumed to last."""
        return self._last_step_ns

    def begin_piece(self, gap_ns: int) -> None:
        """Say that the next frame starts a new piece, ``gap_ns`` (at least 1 is used) after the last."""
        if self._last_ns is not None:
            self._gap_ns = max(1, gap_ns)

    def place(self, pts_ns: int) -> int:
        """Return the frame's time on the joined time line."""
        if self._gap_ns is not None and self._last_ns is not None:
            self._offset_ns = self._last_ns + self._gap_ns - pts_ns
            self._gap_ns = None
        placed_ns = pts_ns + self._offset_ns
        if self._last_ns is not None and placed_ns > self._last_ns:
            self._last_step_ns = placed_ns - self._last_ns
        self._last_ns = placed_ns
        return placed_ns


class Subsampler:
    """Picks about ``fps`` frames a second by their timestamps; None picks every frame.

    The time line is cut into slots of 1/fps seconds from the first frame on, and the first frame of
    each slot is taken. So the mean rate is exact whatever the source's rate, and after a gap in the
    source there is no burst.
    """

    def __init__(self, fps: float | None) -> None:
        if fps is not None and not 0 < fps < float("inf"):
            raise ValueError(f"fps must be above 0, not {fps}")
        self._fps = None if fps is None else Fraction(fps)
        early = EARLY_NS * Fraction(fps or 0) / NANOSECONDS
        self._early_share = min(Fraction(1, 4), early)
        self._first_ns: int | None = None
        self._last_slot = -1

    def is_wanted(self, pts_ns: int | None) -> bool:
        """Return whether to send the frame with this time. Frames without a time are all wanted."""
        if self._fps is None or pts_ns is None:
            return True
        if self._first_ns is None:
            self._first_ns = pts_ns
        slot = int((pts_ns - self._first_ns) * self._fps / NANOSECONDS + self._early_share)
        if slot <= self._last_slot:
            return False
        self._last_slot = slot
        return True


class Pacer:
    """Turns source time into sending time on the monotonic clock.

    ``is_realtime`` false sends at once (``--fast``, and live sources, which pace themselves). A source
    without timestamps (a folder of images) is sent at ``fps`` if that is given, else at once.
    """

    def __init__(self, *, is_realtime: bool, fps: float | None = None) -> None:
        self._is_realtime = is_realtime
        self._period_ns = None if fps is None else Fraction(NANOSECONDS) / Fraction(fps)
        self._anchor: tuple[int, int] | None = None  # (pts_ns, clock_ns) of one frame
        self._last_pts_ns = 0
        self._untimed_count = 0
        self._untimed_start_ns: int | None = None

    def due_ns(self, pts_ns: int | None, now_ns: int) -> int:
        """Return the clock time at which to send the frame; in the past when the sender is late.

        A late sender is not forgiven: the intended times stay those of the source, so that delay shows
        up as latency instead of as a slower source. Only when the source's time steps back does the
        time line start afresh at ``now_ns``.
        """
        if not self._is_realtime:
            return now_ns
        if pts_ns is None:
            return self._untimed_due_ns(now_ns)
        if self._anchor is None or pts_ns < self._last_pts_ns:
            self._anchor = (pts_ns, now_ns)
        self._last_pts_ns = pts_ns
        anchor_pts_ns, anchor_clock_ns = self._anchor
        return anchor_clock_ns + (pts_ns - anchor_pts_ns)

    def _untimed_due_ns(self, now_ns: int) -> int:
        if self._period_ns is None:
            return now_ns
        if self._untimed_start_ns is None:
            self._untimed_start_ns = now_ns
        due_ns = self._untimed_start_ns + int(self._untimed_count * self._period_ns)
        self._untimed_count += 1
        return due_ns


class BackOff:
    """How long to wait before connecting again: doubles from ``first_ms`` up to ``limit_ms``.

    A connection that delivered frames resets it, so one short break costs ``first_ms`` only.
    ``failure_count`` counts the waits since then.
    """

    def __init__(self, first_ms: int = 500, limit_ms: int = 30_000) -> None:
        if not 0 < first_ms <= limit_ms:
            raise ValueError(f"back-off needs 0 < first_ms <= limit_ms, not {first_ms} and {limit_ms}")
        self._first_ms = first_ms
        self._limit_ms = limit_ms
        self._next_ms = first_ms
        self.failure_count = 0

    def next_ms(self) -> int:
        """Return the wait before the next try and double the one after it."""
        self.failure_count += 1
        wait_ms = self._next_ms
        self._next_ms = min(self._limit_ms, wait_ms * 2)
        return wait_ms

    def reset(self) -> None:
        """Forget past failures: the connection works."""
        self.failure_count = 0
        self._next_ms = self._first_ms
