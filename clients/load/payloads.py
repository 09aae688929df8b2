"""The frames a load is made of: prepared before the clock starts, different from each other.

``noise`` is random pixels, the dearest for whoever compresses or compares; ``scene`` is shapes and writing on
a smooth ground, so that a detector finds something and a JPEG has the size of a photograph. A raw frame
carries its number in its first bytes, so that no two frames of a run are equal. Not here: when they are sent.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.errors import LocalError
from headrace.protocol.messages import Encoding, ModelSpec

Image = npt.NDArray[np.uint8]

#: All prepared frames together, about: more than any cache holds, as a camera's frames are.
POOL_BYTES = 128 * 1024 * 1024
MIN_POOL_FRAMES, MAX_POOL_FRAMES = 2, 64

#: Adapters that look for something in an image: with noise they would find nothing, or nonsense.
_DETECTING_ADAPTERS = frozenset({"detect", "text"})

#: What a frame's number takes at its begin.
_STAMP_BYTES = 8

_SHAPES_COUNT = 8


class Content(StrEnum):
    """What is in the frames. ``auto``: a scene where something is detected or compressed, else noise."""

    AUTO = "auto"
    NOISE = "noise"
    SCENE = "scene"


@dataclass(frozen=True, slots=True)
class Size:
    """Height and width of a frame in pixels."""

    height: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}"


class Payloads:
    """Frames of several sizes; one is handed out again after all of its size were."""

    def __init__(self, sizes: Sequence[Size], *, encoding: Encoding, content: Content, seed: int) -> None:
        """Make all frames. Raises LocalError when encoding needs a library that is not there."""
        rng = np.random.default_rng(seed)
        make = scene if content is Content.SCENE else noise
        self._is_raw = encoding is Encoding.RAW
        self._frames: list[list[Image | bytes]] = []
        for size in sizes:
            nbytes = size.height * size.width * 3
            room = POOL_BYTES // len(sizes) // nbytes
            count = max(MIN_POOL_FRAMES, min(MAX_POOL_FRAMES, room))
            images = (make(rng, size) for _ in range(count))
            self._frames.append([image if self._is_raw else _encode(image, encoding) for image in images])

    def get(self, size_index: int, number: int) -> Image | bytes:
        """Return frame ``number`` of a run. A raw one is good until the next call for the same size."""
        frames = self._frames[size_index]
        frame = frames[number % len(frames)]
        if isinstance(frame, np.ndarray):
            stamp = np.frombuffer(number.to_bytes(_STAMP_BYTES, "little"), np.uint8)
            room = frame.reshape(-1)[:_STAMP_BYTES]
            room[:] = stamp[: len(room)]
        return frame


def resolve(content: Content, encoding: Encoding, spec: ModelSpec | None) -> Content:
    """Return what ``auto`` means for this encoding and model."""
    if content is not Content.AUTO:
        return content
    is_seen = spec is not None and spec.adapter in _DETECTING_ADAPTERS
    return Content.SCENE if is_seen or encoding is not Encoding.RAW else Content.NOISE


def noise(rng: np.random.Generator, size: Size) -> Image:
    """Return random pixels: uint8 [height, width, 3]."""
    return rng.integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)


def scene(rng: np.random.Generator, size: Size) -> Image:
    """Return shapes and, where OpenCV is installed, writing on a smooth ground: uint8 [height, width, 3]."""
    across = np.linspace(0.0, 0.5, size.width, dtype=np.float32)
    down = np.linspace(0.0, 0.5, size.height, dtype=np.float32)
    ground = across[None, :] + down[:, None]
    image: Image = np.empty((size.height, size.width, 3), np.uint8)
    for channel, (low, high) in enumerate(rng.integers(60, 200, (3, 2))):
        image[:, :, channel] = low + (high - low) * ground
    for _ in range(_SHAPES_COUNT):
        height, width = (max(1, int(side * rng.uniform(0.05, 0.3))) for side in (size.height, size.width))
        top = int(rng.integers(0, max(1, size.height - height)))
        left = int(rng.integers(0, max(1, size.width - width)))
        image[top : top + height, left : left + width] = rng.integers(0, 256, 3)
    if importlib.util.find_spec("cv2") is not None:
        _write_on(image, rng)
    return image


def _write_on(image: Image, rng: np.random.Generator) -> None:
    import cv2

    height, width = image.shape[:2]
    for _ in range(3):
        at = (int(rng.integers(0, max(1, width // 2))), int(rng.integers(height // 4, max(height, 2))))
        text = f"HEADRACE {int(rng.integers(0, 10_000)):04d}"
        cv2.putText(image, text, at, cv2.FONT_HERSHEY_SIMPLEX, max(height, 32) / 400, (255, 255, 255), 1)


def _encode(image: Image, encoding: Encoding) -> bytes:
    try:
        import cv2
    except ImportError:
        raise LocalError(
            f"frames as {encoding} need OpenCV: pip install 'headrace[video]', or send them raw"
        ) from None
    is_done, data = cv2.imencode(".jpg" if encoding is Encoding.JPEG else ".png", image[:, :, ::-1])
    if not is_done:
        raise LocalError(f"a frame of {image.shape[0]}x{image.shape[1]} can't be written as {encoding}")
    return bytes(data.tobytes())
