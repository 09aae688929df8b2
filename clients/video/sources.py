"""Open a video source by what the user wrote: a file, a folder of images, a camera number, a network address.

Usage: ``for frame in open_source("clip.mp4").frames(): use(frame.image, frame.pts_ns)``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from headrace.clients.video.containers import ContainerSource
from headrace.clients.video.frames import (
    INSTALL_HINT,
    Image,
    SourceCounts,
    SourceError,
    SourceOptions,
    VideoFrame,
    VideoSource,
)

__all__ = [
    "ImageSource",
    "SourceError",
    "SourceOptions",
    "VideoFrame",
    "VideoSource",
    "natural_key",
    "open_source",
]

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

#: Addresses that pace themselves and are opened again when they break.
LIVE_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "udp", "tcp", "srt", "rtp"})

#: Addresses behind which a recording or a live stream may be: they are looked at.
WEB_SCHEMES = frozenset({"http", "https"})


def open_source(text: str, options: SourceOptions | None = None) -> VideoSource:
    """Return the source that ``text`` names. Files, folders and web addresses are looked at now; cameras and
    streaming addresses are first contacted when ``frames`` is called.

    Args:
        text: a path of a video file, an image or a folder of images; a camera number ("0"); or an address
            (rtsp://, http:// ...).
        options: time limits, transport and reconnect rules.

    Raises:
        SourceError: there is no such file, the folder holds no image, the web address does not answer, or a
            needed package is missing.
    """
    options = options or SourceOptions()
    scheme, separator, _ = text.partition("://")
    if separator and scheme.lower() in LIVE_SCHEMES | WEB_SCHEMES:
        is_live = True if scheme.lower() in LIVE_SCHEMES else None
        return ContainerSource(text, is_live=is_live, options=options)
    if separator and scheme.lower() != "file":
        known = ", ".join(sorted(LIVE_SCHEMES | WEB_SCHEMES))
        raise SourceError(f"source {text}: addresses of kind {scheme}:// are not known (known: {known})")
    path = Path(text.partition("://")[2] if separator else text)
    if text.isdecimal() and not path.exists():
        return _camera(int(text), options)
    if not text or not path.exists():
        raise SourceError(f"no such video file or folder: {text or '(empty)'}")
    if path.is_dir():
        images = sorted((p for p in path.iterdir() if _is_image(p)), key=lambda p: natural_key(p.name))
        if not images:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise SourceError(f"folder {text} holds no image (looked for {kinds})")
        return ImageSource(text, images)
    if _is_image(path):
        return ImageSource(text, [path])
    return ContainerSource(str(path), is_live=False, options=options)


class ImageSource:
    """Image files one after another, each with its own size and without a time (``pts_ns`` is None).

    A file that is not a readable image is counted as damaged and skipped.
    """

    def __init__(self, name: str, paths: list[Path]) -> None:
        try:
            import cv2  # noqa: F401  (only to see whether it is there)
        except ImportError as error:
            raise SourceError(f"reading images needs OpenCV ({error}): {INSTALL_HINT}") from None
        self.name = name
        self.is_live = False
        self.counts = SourceCounts()
        self._paths = paths
        self._is_closed = False

    def frames(self) -> Iterator[VideoFrame]:
        """See VideoSource."""
        for path in self._paths:
            if self._is_closed:
                return
            image = read_image(path)
            if image is None:
                self.counts.damaged_count += 1
                continue
            index = self.counts.frame_count
            self.counts.frame_count += 1
            yield VideoFrame(partial(_same, image), pts_ns=None, index=index)

    def close(self) -> None:
        """See VideoSource."""
        self._is_closed = True


def read_image(path: Path) -> Image | None:
    """Read an image as uint8 [height, width, 3] RGB, turned upright by its EXIF; None if it can't be."""
    import cv2

    try:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        pixels = cv2.imdecode(data, cv2.IMREAD_COLOR) if data.size else None
    except (OSError, cv2.error):
        return None
    if pixels is None:
        return None
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), np.uint8)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key by which ``img2`` comes before ``img10``."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def _is_image(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES


def _same(image: Image) -> Image:
    return image


def _camera(number: int, options: SourceOptions) -> ContainerSource:
    if sys.platform == "darwin":
        return ContainerSource(str(number), is_live=True, options=options, av_format="avfoundation")
    device = Path(f"/dev/video{number}")
    if not sys.platform.startswith("linux"):
        raise SourceError(f"camera {number}: cameras by number work on Linux and macOS only; give an address")
    if not device.exists():
        present = sorted((p.name for p in Path("/dev").glob("video*")), key=natural_key)
        found = ", ".join(present) or "none"
        raise SourceError(f"no camera {number}: {device} does not exist (present: {found})")
    return ContainerSource(str(device), is_live=True, options=options, av_format="v4l2")
