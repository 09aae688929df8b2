"""How a frame sits in its size class, and the way back from class pixels to frame pixels.

Staging uses a Placement to know where to write; adapters use the same object to give coordinates in the
pixels of the frame as sent. Coordinates are continuous (the left edge of pixel 0 is 0.0, its centre is
0.5), as OpenCV's resize has them: mapping an edge needs no half-pixel correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Fit, Oversize, SizeClassSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """The rectangle of the class in which the whole frame lies, scaled or not.

    Invariants: ``0 <= top``, ``top + height <= class_height``, the same for the columns, and every size
    is at least 1. All are pixels. ``height`` and ``width`` are rounded, so the two axes may be scaled by
    slightly different factors; the mappings use each axis' own.
    """

    frame_height: int
    frame_width: int
    class_height: int
    class_width: int
    top: int
    left: int
    height: int
    width: int

    @property
    def scale_y(self) -> float:
        """Class pixels per frame pixel, downwards."""
        return self.height / self.frame_height

    @property
    def scale_x(self) -> float:
        """Class pixels per frame pixel, rightwards."""
        return self.width / self.frame_width

    @property
    def is_scaled(self) -> bool:
        """True when the frame must be resized, not just copied."""
        return (self.height, self.width) != (self.frame_height, self.frame_width)

    @property
    def rows(self) -> slice:
        """Rows of the class buffer that the frame covers."""
        return slice(self.top, self.top + self.height)

    @property
    def columns(self) -> slice:
        """Columns of the class buffer that the frame covers."""
        return slice(self.left, self.left + self.width)

    def to_class(self, points: ArrayLike) -> NDArray[np.float64]:
        """Map frame points [..., 2] (x, y) to class pixels. Nothing is clipped."""
        xy = np.asarray(points, dtype=np.float64)
        return xy * (self.scale_x, self.scale_y) + (self.left, self.top)

    def to_frame(self, points: ArrayLike) -> NDArray[np.float64]:
        """Map class points [..., 2] (x, y) to frame pixels, clipped to [0, width] x [0, height]."""
        xy = np.asarray(points, dtype=np.float64)
        mapped = (xy - (self.left, self.top)) / (self.scale_x, self.scale_y)
        return np.clip(mapped, 0.0, (float(self.frame_width), float(self.frame_height)))

    def boxes_to_class(self, boxes: ArrayLike) -> NDArray[np.float64]:
        """Map frame boxes [n, 4] (x1, y1, x2, y2) to class pixels. Nothing is clipped."""
        return self.to_class(np.asarray(boxes, dtype=np.float64).reshape(-1, 2, 2)).reshape(-1, 4)

    def boxes_to_frame(self, boxes: ArrayLike) -> NDArray[np.float64]:
        """Map class boxes [n, 4] (x1, y1, x2, y2) to frame pixels, clipped to the frame."""
        return self.to_frame(np.asarray(boxes, dtype=np.float64).reshape(-1, 2, 2)).reshape(-1, 4)


def place(shape: tuple[int, ...], size_class: SizeClassSpec, oversize: Oversize) -> Placement:
    """Return how a frame of ``shape`` (height, width[, channels]) sits in ``size_class``.

    A frame that the class contains follows the class's ``fit``. One that sticks out of it on either axis
    is letterboxed, scaled down and centred, when ``oversize`` allows; an ``exact`` class never scales.
    Raises InvalidFrameError: ``oversize`` for one that sticks out and must not be scaled, ``wrong_shape``
    for one that is smaller than an ``exact`` class.
    """
    height, width = shape[0], shape[1]
    name, fit = size_class.name, size_class.fit
    if min(height, width) < 1:
        raise InvalidFrameError(Code.BAD_SHAPE, f"frame of {height}x{width} pixels has no area")
    if (height, width) == (size_class.height, size_class.width):
        return _at(shape, size_class, 0, 0, height, width)
    if height > size_class.height or width > size_class.width:
        if oversize is Oversize.REJECT or fit is Fit.EXACT:
            raise InvalidFrameError(
                Code.OVERSIZE,
                f"frame of {height}x{width} is larger than size class {name}"
                f" ({size_class.height}x{size_class.width})",
            )
        return _letterbox(shape, size_class)
    match fit:
        case Fit.EXACT:
            raise InvalidFrameError(
                Code.WRONG_SHAPE,
                f"size class {name} takes exactly {size_class.height}x{size_class.width},"
                f" the frame has {height}x{width}",
            )
        case Fit.PAD:
            return _at(shape, size_class, 0, 0, height, width)
        case Fit.LETTERBOX:
            return _letterbox(shape, size_class)


def _letterbox(shape: tuple[int, ...], size_class: SizeClassSpec) -> Placement:
    scale = min(size_class.height / shape[0], size_class.width / shape[1])
    # The limiting axis comes out as the class's own size; the other is rounded to the nearest pixel, and
    # kept at 1 or more so that a 4000x1 frame still has an area.
    height = min(size_class.height, max(1, round(shape[0] * scale)))
    width = min(size_class.width, max(1, round(shape[1] * scale)))
    top, left = (size_class.height - height) // 2, (size_class.width - width) // 2
    return _at(shape, size_class, top, left, height, width)


def _at(
    shape: tuple[int, ...], size_class: SizeClassSpec, top: int, left: int, height: int, width: int
) -> Placement:
    return Placement(
        frame_height=shape[0],
        frame_width=shape[1],
        class_height=size_class.height,
        class_width=size_class.width,
        top=top,
        left=left,
        height=height,
        width=width,
    )
