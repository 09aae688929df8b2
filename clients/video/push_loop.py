"""Send a video source through a producer at the right times: the body of ``headrace push``.

Theory of operation: read a frame, drop it if it is not wanted at this rate, wait until it is due, push it.
Times come from ``pacing``; this module reads the clock and waits. A file is sent whole, so a producer that
can't take more holds the reading up; a live source is read on in its own thread and the newest frame is sent.
At the end the loop waits for the outcome of every frame it sent, so that nothing is lost at exit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.clients.video.frames import Image, VideoFrame, VideoSource
from headrace.clients.video.newest import NewestFrames
from headrace.clients.video.pacing import Pacer, Subsampler, Timeline
from headrace.errors import NotDeliveredError, RequestTimeoutError
from headrace.protocol.messages import Encoding, Keep

#: How long one push may block before the loop looks whether it was asked to stop.
PUSH_SLICE_S = 0.25

#: How often the wait for the last outcomes tells its progress.
FLUSH_SLICE_S = 0.5

JPEG_QUALITY = 90


class SentId(Protocol):
    """What the loop reads of the id that ``push`` returns."""

    @property
    def stream(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def seq(self) -> int: ...


class ProducerCounts(Protocol):
    """What the loop reads of a producer's account."""

    @property
    def unfinished(self) -> int: ...
    @property
    def finished(self) -> int: ...


class FrameProducer(Protocol):
    """What the loop needs of a headrace.Producer."""

    def push(
        self,
        image: Image | bytes,
        /,
        *,
        stream: str,
        model: str = "",
        priority: int = 0,
        ttl_ms: int | None = None,
        keep: Keep = Keep.ALL,
        pts_ns: int | None = None,
        timeout: float | None = None,
    ) -> SentId:
        """Send one frame; RequestTimeoutError when there was no room for it in time."""
        ...

    def flush(self, timeout: float | None = None) -> object:
        """Wait until every frame has its outcome; RequestTimeoutError after ``timeout`` seconds."""
        ...

    @property
    def account(self) -> ProducerCounts:
        """Return the counts so far."""
        ...


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to send a source. ``keep`` None means ``latest`` for a live source and ``all`` for a file.

    ``fps`` sends about that many frames a second, picked by their timestamps. ``max_seconds`` counts
    from the first frame. The last outcomes are waited for as long as any come within ``stall_limit_s``, and
    no longer than ``flush_timeout_s`` in all (None: no such limit).
    """

    stream: str
    model: str = ""
    priority: int = 0
    ttl_ms: int | None = None
    keep: Keep | None = None
    encoding: Encoding = Encoding.RAW
    is_fast: bool = False
    is_looping: bool = False
    fps: float | None = None
    max_frames: int | None = None
    max_seconds: float | None = None
    stall_limit_s: float = 30.0
    flush_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class SentFrame:
    """One frame as it was sent. ``intended_ns`` is when it was due on the monotonic clock."""

    id: SentId
    frame: VideoFrame
    pts_ns: int | None
    intended_ns: int


@dataclass(slots=True)
class PushReport:
    """What became of a source. ``unwanted_count`` frames were left out by ``fps``; ``missed_count`` frames
    of a live source, or of a stream that keeps the latest, were overtaken by a newer one before they could
    be sent."""

    stream: str
    sent_count: int = 0
    unwanted_count: int = 0
    missed_count: int = 0
    damaged_count: int = 0
    reconnect_count: int = 0
    unfinished_count: int = 0  # sent by this producer, outcome not known yet
    elapsed_s: float = 0.0
    last_pts_ns: int | None = None


def push_source(
    source: VideoSource,
    producer: FrameProducer,
    options: PushOptions,
    *,
    on_sent: Callable[[SentFrame], None] | None = None,
    on_progress: Callable[[PushReport], None] | None = None,
    stop: threading.Event | None = None,
) -> PushReport:
    """Send a source and wait for its outcomes; returns the report.

    Args:
        source: where the frames come from; it is closed at the end.
        producer: sends them; it is not closed.
        options: stream name, pace and limits.
        on_sent: called after each push, in this thread.
        on_progress: called after each frame read, and while waiting at the end, with the report so far.
        stop: ends the loop early when set; what was sent is still waited for.

    Raises:
        SourceError: the source can't be read.
        NotDeliveredError: outcomes were still missing when the wait for them ended.
    """
    tell = on_progress or (lambda _: None)
    loop = _PushLoop(source, producer, options, stop or threading.Event())
    try:
        for sent in loop.run():
            if sent is not None and on_sent is not None:
                on_sent(sent)
            tell(loop.report)
    finally:
        source.close()
    loop.wait_for_outcomes(tell)
    loop.update_report()
    tell(loop.report)
    return loop.report


def joined_loops(source: VideoSource, is_looping: bool) -> Iterator[tuple[VideoFrame, int | None]]:
    """Yield frames with their time; when looping, the time goes on rising from loop to loop.

    The last frame of a loop lasts as long as the container says, else as long as the one before it."""
    timeline = Timeline()
    while True:
        frame: VideoFrame | None = None
        for frame in source.frames():
            yield frame, None if frame.pts_ns is None else timeline.place(frame.pts_ns)
        if not is_looping or frame is None:
            return
        timeline.begin_piece(frame.duration_ns or timeline.step_ns)


class _PushLoop:
    def __init__(
        self, source: VideoSource, producer: FrameProducer, options: PushOptions, stop: threading.Event
    ) -> None:
        self.report = PushReport(options.stream)
        self._source = source
        self._producer = producer
        self._options = options
        self._stop = stop
        self._keep = options.keep or (Keep.LATEST if source.is_live else Keep.ALL)
        self._newest: NewestFrames | None = None
        self._start_ns: int | None = None

    def run(self) -> Iterator[SentFrame | None]:
        """Send until the source ends or a limit is reached; yields after each frame read."""
        options = self._options
        subsampler = Subsampler(options.fps)
        pacer = Pacer(is_realtime=not options.is_fast and not self._source.is_live, fps=options.fps)
        frames = self._frames()
        try:
            for frame, pts_ns in frames:
                if self._stop.is_set() or self.report.sent_count == options.max_frames:
                    return
                if not subsampler.is_wanted(pts_ns):
                    self.report.unwanted_count += 1
                    yield None
                    continue
                now_ns = time.monotonic_ns()
                due_ns = pacer.due_ns(pts_ns, now_ns)
                if self._is_past_end(due_ns) or not self._wait_until(due_ns):
                    return
                yield self._push(frame, pts_ns, due_ns)
                self.update_report()
        finally:
            if self._newest is not None:
                self._newest.close()

    def wait_for_outcomes(self, tell: Callable[[PushReport], None]) -> None:
        """Wait until every frame has its outcome, telling the progress; give up when nothing moves."""
        start_s = moved_s = time.monotonic()
        fewest = self._producer.account.unfinished
        limit_s = math.inf if self._options.flush_timeout_s is None else self._options.flush_timeout_s
        while True:
            try:
                self._producer.flush(min(FLUSH_SLICE_S, limit_s))
            except RequestTimeoutError:
                now_s = time.monotonic()
                account = self._producer.account
                if account.unfinished < fewest:
                    fewest, moved_s = account.unfinished, now_s
                if now_s - moved_s >= self._options.stall_limit_s or now_s - start_s >= limit_s:
                    raise NotDeliveredError(
                        f"{account.unfinished} frames have no outcome {now_s - start_s:.1f} s after the last"
                        f" frame of {self._options.stream}",
                        unfinished=account.unfinished,
                        delivered=account.finished,
                    ) from None
                self.update_report()
                tell(self.report)
            else:
                return

    def update_report(self) -> None:
        """Copy the counts of the source and of the producer into the report."""
        self.report.unfinished_count = self._producer.account.unfinished
        counts = self._source.counts
        self.report.damaged_count = counts.damaged_count
        self.report.reconnect_count = counts.reconnect_count
        if self._start_ns is not None:
            self.report.elapsed_s = (time.monotonic_ns() - self._start_ns) / 1e9

    def _frames(self) -> Iterator[tuple[VideoFrame, int | None]]:
        if not (self._source.is_live and self._keep is Keep.LATEST):
            yield from joined_loops(self._source, self._options.is_looping)
            return
        self._newest = NewestFrames(self._source)
        seen = 0
        for frame in self._newest:
            self.report.missed_count += self._newest.missed_count - seen
            seen = self._newest.missed_count
            yield frame, frame.pts_ns

    def _is_past_end(self, due_ns: int) -> bool:
        if self._start_ns is None:
            self._start_ns = due_ns
        limit_s = self._options.max_seconds
        return limit_s is not None and due_ns - self._start_ns >= limit_s * 1e9

    def _wait_until(self, due_ns: int) -> bool:
        """Wait for the due time; false when asked to stop."""
        wait_ns = due_ns - time.monotonic_ns()
        return not (self._stop.wait(wait_ns / 1e9) if wait_ns > 0 else self._stop.is_set())

    def _push(self, frame: VideoFrame, pts_ns: int | None, due_ns: int) -> SentFrame | None:
        """Push one frame; None when it was given up (asked to stop, or overtaken on a latest stream)."""
        options = self._options
        payload = encoded(frame.image, options.encoding)
        while True:
            try:
                frame_id = self._producer.push(
                    payload,
                    stream=options.stream,
                    model=options.model,
                    priority=options.priority,
                    ttl_ms=options.ttl_ms,
                    keep=self._keep,
                    pts_ns=pts_ns,
                    timeout=PUSH_SLICE_S,
                )
            except RequestTimeoutError:
                if self._stop.is_set() or self._keep is Keep.LATEST:
                    self.report.missed_count += 1
                    return None
                continue
            self.report.sent_count += 1
            self.report.last_pts_ns = pts_ns
            return SentFrame(frame_id, frame, pts_ns, due_ns)


def encoded(image: Image, encoding: Encoding) -> Image | bytes:
    """Return the image itself, or its JPEG or PNG bytes. ``image``: uint8 [height, width, 3] RGB."""
    if encoding is Encoding.RAW:
        return image
    import cv2

    suffix, parameters = (
        (".jpg", [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]) if encoding is Encoding.JPEG else (".png", [])
    )
    is_done, data = cv2.imencode(suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), parameters)
    if not is_done:
        raise ValueError(f"OpenCV could not encode an image of shape {image.shape} as {encoding}")
    return np.asarray(data, np.uint8).tobytes()
