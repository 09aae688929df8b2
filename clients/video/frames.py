"""What every video source gives: frames with their own time, and counts of what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import LocalError

Image: TypeAlias = NDArray[np.uint8]

INSTALL_HINT = "pip install 'headrace[video]'"


class SourceError(LocalError):
    """A video source that can't be opened or read: names the source and what to do."""


class VideoFrame:
    """One frame of a source. ``pts_ns`` is the source's own time, None where it has none (images).

    ``index`` counts the frames the source gave. The pixels are converted when first asked for, so that
    a frame which is skipped costs no conversion; ``image`` is uint8 [height, width, 3] in RGB order,
    contiguous, turned upright as the source's rotation says, without any padding of the decoder.
    """

    __slots__ = ("_image", "_make_image", "duration_ns", "index", "pts_ns")

    def __init__(
        self,
        make_image: Callable[[], Image],
        *,
        pts_ns: int | None,
        index: int,
        duration_ns: int | None = None,
    ) -> None:
        self._make_image = make_image
        self._image: Image | None = None
        self.pts_ns = pts_ns
        self.index = index
        self.duration_ns = duration_ns

    @property
    def image(self) -> Image:
        """The pixels: uint8 [height, width, 3], RGB."""
        if self._image is None:
            self._image = self._make_image()
        return self._image


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How sources are opened. ``rtsp_transport`` is "tcp" (nothing lost, the default) or "udp".

    ``decode_threads`` 0 lets the decoder choose. A live source that fails after it once worked is opened
    again after 0.5 s, 1 s, 2 s ... up to ``back_off_limit_ms``, without end unless ``max_reconnects``
    failures in a row are named; the first opening is not repeated, so that a wrong address is told at once.
    """

    rtsp_transport: str = "tcp"
    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    back_off_first_ms: int = 500
    back_off_limit_ms: int = 30_000
    max_reconnects: int | None = None
    decode_threads: int = 0


@dataclass(slots=True)
class SourceCounts:
    """What happened to a source so far. Damage is counted, never fatal by itself."""

    frame_count: int = 0
    damaged_count: int = 0  # packets or images that could not be decoded, or only in part
    reconnect_count: int = 0


class VideoSource(Protocol):
    """A source of frames. ``frames`` may be called again to read it from the start (files, folders)."""

    name: str
    is_live: bool
    counts: SourceCounts

    def frames(self) -> Iterator[VideoFrame]:
        """Yield the frames in order. Raises SourceError when the source can't be read."""
        ...

    def close(self) -> None:
        """Let go of the source; a running ``frames`` ends soon. May be called from any thread."""
        ...
