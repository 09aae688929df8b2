"""What the demo knows of each frame between sending it and seeing its outcome.

Two threads report: the camera that sent a frame, the subscriber that saw an outcome. Either may be first (a
fast broker answers before ``push`` has returned), so a pair is complete when both have reported. No clock in
here; times are the caller's.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from headrace.clients.video.frames import VideoFrame
from headrace.clients.video.sinks import detections_of
from headrace.protocol.messages import Outcome, Status

#: Latencies kept for the percentiles: beyond that the oldest are forgotten.
MAX_LATENCIES = 100_000

#: The table's frames a second and latency are means over this time.
WINDOW_NS = 3_000_000_000

Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class AnalysedFrame:
    """A frame with its outcome, ready to be drawn."""

    frame: VideoFrame
    outcome: Outcome


@dataclass(slots=True)
class StreamProgress:
    """One stream's counts and its recent results: (seen_ns, latency_ns, boxes) of ``ok`` outcomes."""

    sent_count: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    box_count: int = 0
    recent: deque[tuple[int, int, int]] = field(default_factory=deque)


class FrameTracker:
    """Matches sent frames with outcomes. Thread-safe.

    Invariant: a frame's picture is held only until its outcome is seen, so memory is bounded by the frames
    that the producers may have unfinished.
    """

    def __init__(self, streams: list[str]) -> None:
        self.duplicate_count = 0
        self.missed_count = 0
        self._changed = threading.Condition()
        self._streams = {stream: StreamProgress() for stream in streams}
        self._sent: dict[Key, tuple[VideoFrame, int]] = {}
        self._early: dict[Key, tuple[Outcome, int]] = {}
        # One entry a frame for the length of a demo: an hour at native rate is 290,000.
        self._ended: set[Key] = set()
        self._latencies_ns: deque[int] = deque(maxlen=MAX_LATENCIES)

    def add_sent(self, key: Key, frame: VideoFrame, intended_ns: int) -> AnalysedFrame | None:
        """Note a frame as sent; returns it with its outcome if that came first and is ok."""
        with self._changed:
            self._streams[key[0]].sent_count += 1
            early = self._early.pop(key, None)
            if early is None:
                self._sent[key] = (frame, intended_ns)
                return None
            return self._match(frame, intended_ns, *early)

    def add_outcome(self, outcome: Outcome, seen_ns: int) -> AnalysedFrame | None:
        """Note an outcome as seen; returns its frame with it if the frame is known and ended ok."""
        key = (outcome.stream, outcome.epoch, outcome.seq)
        with self._changed:
            if key in self._ended:
                self.duplicate_count += 1
                return None
            self._ended.add(key)
            progress = self._streams.setdefault(outcome.stream, StreamProgress())
            progress.by_status[outcome.status.value] += 1
            self._changed.notify_all()
            sent = self._sent.pop(key, None)
            if sent is None:
                self._early[key] = (outcome, seen_ns)
                return None
            return self._match(*sent, outcome, seen_ns)

    def add_missed(self, count: int) -> None:
        """Note outcomes that the subscriber was told it can't have."""
        with self._changed:
            self.missed_count += count
            self._changed.notify_all()

    def wait_complete(self, timeout_s: float) -> bool:
        """Wait until every sent frame has its outcome; false when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sent, timeout_s)

    def progress(self, now_ns: int) -> dict[str, StreamProgress]:
        """Return a copy of every stream's progress; ``recent`` holds the last three seconds."""
        with self._changed:
            copies = {}
            for stream, progress in self._streams.items():
                while progress.recent and progress.recent[0][0] < now_ns - WINDOW_NS:
                    progress.recent.popleft()
                copies[stream] = StreamProgress(
                    progress.sent_count,
                    Counter(progress.by_status),
                    progress.box_count,
                    deque(progress.recent),
                )
            return copies

    def latency_ms(self, share: float) -> float | None:
        """Return a percentile of the latency of ``ok`` frames (0.5 is the median); None without any."""
        with self._changed:
            return percentile_ms(list(self._latencies_ns), share)

    def _match(
        self, frame: VideoFrame, intended_ns: int, outcome: Outcome, seen_ns: int
    ) -> AnalysedFrame | None:
        if outcome.status is not Status.OK:
            return None
        latency_ns = seen_ns - intended_ns
        boxes = len(detections_of(outcome.outputs))
        progress = self._streams[outcome.stream]
        progress.box_count += boxes
        progress.recent.append((seen_ns, latency_ns, boxes))
        self._latencies_ns.append(latency_ns)
        return AnalysedFrame(frame, outcome)


def percentile_ms(values_ns: list[int], share: float) -> float | None:
    """Return the nearest-rank percentile in milliseconds, rounded to 0.1; None of nothing."""
    if not values_ns:
        return None
    ranked = sorted(values_ns)
    rank = max(1, min(len(ranked), math.ceil(share * len(ranked))))
    return round(ranked[rank - 1] / 1e6, 1)
