"""Video files, cameras and network streams, read with PyAV.

Theory of operation: a file is opened, demuxed packet by packet and decoded; a packet that can't be decoded
is counted and skipped, since the next key frame mends the picture. A live source is the same in a loop: when
it ends or fails it is opened again after a growing wait, and the times of its frames go on rising across the
break (by the time that passed). The size of the frames may change at any point; each frame has its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from headrace.clients.video.frames import (
    INSTALL_HINT,
    Image,
    SourceCounts,
    SourceError,
    SourceOptions,
    VideoFrame,
)
from headrace.clients.video.pacing import NANOSECONDS, BackOff, Timeline

if TYPE_CHECKING:
    from av import VideoFrame as AvFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

#: So many packets in a row that give an error and no frame mean that the file is beyond reading. A key frame
#: comes at least every 250 frames with common encoders, so a readable rest is not given up too early.
MAX_DAMAGED_IN_A_ROW = 500


class ContainerSource:
    """A file (``is_live`` false) or a live stream read through PyAV.

    ``target`` is what FFmpeg opens (path, URL or device), ``av_format`` names an input format for devices.
    ``is_live`` None opens the target now and calls it live when it states no duration: a web address may be
    either, and a recording must neither be opened again at its end nor sent without pacing.
    """

    def __init__(
        self, target: str, *, is_live: bool | None, options: SourceOptions, av_format: str | None = None
    ) -> None:
        require_av()
        self.name = redact(target)
        self.counts = SourceCounts()
        self._opened: InputContainer | None = None
        self._target = target
        self._format = av_format
        self._options = options
        self._closed = threading.Event()
        self.is_live = True  # while probing, so that the time limits hold
        if is_live is None:
            self._opened = self._open()
            is_live = self._opened.duration is None
        self.is_live = is_live

    def frames(self) -> Iterator[VideoFrame]:
        """See VideoSource."""
        if self.is_live:
            yield from self._live_frames()
            return
        with closing(self._open()) as container:
            has_frames = False
            for frame in self._read(container):
                has_frames = True
                yield self._video_frame(frame, _pts_ns(frame))
        if not has_frames and not self._closed.is_set():
            raise SourceError(f"{self.name}: not one picture could be decoded")

    def close(self) -> None:
        """See VideoSource. Reading ends with the packet in hand, or at its read timeout."""
        self._closed.set()

    def _live_frames(self) -> Iterator[VideoFrame]:
        import av

        back_off = BackOff(self._options.back_off_first_ms, self._options.back_off_limit_ms)
        timeline = Timeline()
        last_seen_ns = time.monotonic_ns()
        container: InputContainer | None = self._open()  # a failure here is most likely a wrong address
        while container is not None:
            try:
                with closing(container):
                    for frame in self._read(container):
                        pts_ns = _pts_ns(frame)
                        back_off.reset()
                        last_seen_ns = time.monotonic_ns()
                        yield self._video_frame(frame, None if pts_ns is None else timeline.place(pts_ns))
            except (av.FFmpegError, OSError):
                self.counts.damaged_count += 1
            container = self._reopen(back_off)
            timeline.begin_piece(time.monotonic_ns() - last_seen_ns)

    def _reopen(self, back_off: BackOff) -> InputContainer | None:
        """Wait and open again until it works; None when the source was closed meanwhile."""
        limit = self._options.max_reconnects
        while limit is None or back_off.failure_count < limit:
            if self._closed.wait(back_off.next_ms() / 1000):
                return None
            try:
                container = self._open()
            except SourceError:
                continue
            self.counts.reconnect_count += 1
            return container
        raise SourceError(f"{self.name}: gave up after {limit} failed connections in a row")

    def _open(self) -> InputContainer:
        import av

        if self._opened is not None:
            container, self._opened = self._opened, None
            return container
        options = {"rtsp_transport": self._options.rtsp_transport} if self._target.startswith("rtsp") else {}
        timeout = (self._options.open_timeout_s, self._options.read_timeout_s) if self.is_live else None
        try:
            container = av.open(self._target, "r", format=self._format, options=options, timeout=timeout)
        except av.InvalidDataError:
            raise SourceError(f"{self.name} is not a video that can be read (or it is empty)") from None
        except (av.FFmpegError, OSError) as error:
            raise SourceError(f"can't open {self.name}: {error.strerror or 'no reason given'}") from None
        if not container.streams.video:
            kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
            container.close()
            raise SourceError(f"{self.name} has no video stream (it holds: {kinds})")
        return container

    def _read(self, container: InputContainer) -> Iterator[AvFrame]:
        """Decode a container to its end. Errors of single packets are counted; those of the input
        itself (a lost connection) are raised for a live source and end a file."""
        stream = container.streams.video[0]
        stream.thread_type = "SLICE" if self.is_live else "AUTO"  # frame threads would add delay
        stream.codec_context.thread_count = self._options.decode_threads
        in_a_row = 0
        for frames in self._decoded(container, stream):
            if frames is None:
                self.counts.damaged_count += 1
                in_a_row += 1
                if in_a_row > MAX_DAMAGED_IN_A_ROW:
                    raise SourceError(f"{self.name}: {in_a_row} damaged packets in a row, giving up")
                continue
            for frame in frames:
                in_a_row = 0
                self.counts.damaged_count += int(frame.is_corrupt)
                yield frame
            if self._closed.is_set():
                return

    def _decoded(self, container: InputContainer, stream: VideoStream) -> Iterator[list[AvFrame] | None]:
        """Yield the frames of each packet, None for one that can't be decoded."""
        import av

        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except (av.FFmpegError, OSError):
                if self.is_live:
                    raise
                self.counts.damaged_count += 1  # a file cut short: what was read before stands
                packet = None
            if packet is None:
                return
            try:
                yield [frame for frame in packet.decode() if isinstance(frame, av.VideoFrame)]
            except av.EOFError:
                return
            except av.FFmpegError:
                yield None

    def _video_frame(self, frame: AvFrame, pts_ns: int | None) -> VideoFrame:
        index = self.counts.frame_count
        self.counts.frame_count += 1
        duration_ns = _to_ns(frame.duration, frame.time_base) if frame.duration and frame.time_base else None
        return VideoFrame(partial(rgb_of, frame), pts_ns=pts_ns, index=index, duration_ns=duration_ns)


def rgb_of(frame: AvFrame) -> Image:
    """Return a decoded frame as uint8 [height, width, 3] RGB, upright and without line padding."""
    pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    quarter_turns = round(frame.rotation / 90) % 4  # FFmpeg counts degrees counterclockwise, as rot90 does
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns))


def redact(target: str) -> str:
    """Return a source's name for messages: a password in a URL is never shown."""
    if "://" not in target:
        return target
    parts = urlsplit(target)
    if parts.password is None:
        return target
    return target.replace(f":{parts.password}@", ":***@", 1)


def require_av() -> None:
    """Raise SourceError with the remedy when PyAV is not installed."""
    try:
        import av  # noqa: F401  (only to see whether it is there)
    except ImportError as error:
        raise SourceError(f"reading video needs PyAV ({error}): {INSTALL_HINT}") from None


def _pts_ns(frame: AvFrame) -> int | None:
    ticks = frame.pts if frame.pts is not None else frame.dts
    if ticks is None or frame.time_base is None:
        return None
    return _to_ns(ticks, frame.time_base)


def _to_ns(ticks: int, time_base: Fraction) -> int:
    return round(ticks * time_base * NANOSECONDS)
