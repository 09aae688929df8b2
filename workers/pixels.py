"""Writes one image into its row of a staging buffer: scaling, border, colour order, channels.

OpenCV writes into the row itself. A frame that is scaled *and* changes its channels goes through one
scratch image of the scaled size, as OpenCV has no call for both.

The rules (docs/protocol.md states them for users):

- Scaling is bilinear. The border that a frame leaves in its size class is filled with ``pad_value``.
- rgb and bgr are swapped to the model's order. [h, w] and [h, w, 1] are gray and are repeated for a
  model of 3 channels; the fourth channel of [h, w, 4] is dropped, not blended. For a model of 1
  channel colour becomes luma by BT.601 (0.299 R + 0.587 G + 0.114 B).
"""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Color, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.geometry import Placement, place

#: What the reference code of the YOLO and PaddleOCR families uses for both directions.
_SCALED = cv2.INTER_LINEAR

Pixels = NDArray[np.uint8]


def place_image(
    array: NDArray[np.generic],
    color: Color,
    spec: ModelSpec,
    size_class: SizeClassSpec,
    row: Pixels,
) -> Placement:
    """Write one image into its row, border included.

    ``array``: uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4] in the order ``color``. ``row``: uint8
    [class height, class width, model channels], C-contiguous, contents undefined before. Returns where
    the frame lies. Raises InvalidFrameError: ``wrong_dtype``, ``wrong_channels``, ``oversize``,
    ``wrong_shape``.
    """
    pixels = _as_pixels(array, color)
    placement = place(pixels.shape, size_class, spec.oversize)
    image = spec.image or ImageInput()
    _fill_border(row, placement, image.pad_value)
    target = row[placement.rows, placement.columns]
    conversion = _conversion(pixels, color, image.color, row.shape[2])
    if not placement.is_scaled:
        _convert_into(pixels, conversion, target)
    elif conversion is None and pixels.ndim == target.ndim:
        _write(cv2.resize(pixels, (placement.width, placement.height), target, interpolation=_SCALED), target)
    else:
        scaled = cv2.resize(pixels, (placement.width, placement.height), interpolation=_SCALED)
        _convert_into(cast("Pixels", scaled), conversion, target)
    return placement


def _as_pixels(array: NDArray[np.generic], color: Color) -> Pixels:
    """Return the image as uint8 [h, w] (gray) or [h, w, 3 or 4]."""
    if array.dtype != np.uint8:
        raise InvalidFrameError(
            Code.WRONG_DTYPE, f"an image model takes uint8 frames, this one is {array.dtype}"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_gray = array.ndim == 2
    is_color = array.ndim == 3 and array.shape[2] in {3, 4}
    if not (is_gray or (is_color and color is not Color.GRAY)):
        raise InvalidFrameError(
            Code.WRONG_CHANNELS,
            f"a frame of shape {list(array.shape)} sent as {color.value}; expected [height, width] or"
            " [height, width, 1] for gray, [height, width, 3] or [height, width, 4] for rgb and bgr",
        )
    return cast("Pixels", array)


def _conversion(pixels: Pixels, color: Color, wanted: Color, channels: int) -> int | None:
    """Return OpenCV's code for what must happen to the channels, None for a plain copy."""
    if channels == 1:
        if pixels.ndim == 2:
            return None
        codes = {
            (Color.RGB, 3): cv2.COLOR_RGB2GRAY,
            (Color.BGR, 3): cv2.COLOR_BGR2GRAY,
            (Color.RGB, 4): cv2.COLOR_RGBA2GRAY,
            (Color.BGR, 4): cv2.COLOR_BGRA2GRAY,
        }
        return codes[color, pixels.shape[2]]
    if pixels.ndim == 2:
        return cv2.COLOR_GRAY2BGR
    is_swapped = color is not wanted
    if pixels.shape[2] == 4:
        return cv2.COLOR_RGBA2BGR if is_swapped else cv2.COLOR_BGRA2BGR
    return cv2.COLOR_RGB2BGR if is_swapped else None


def _convert_into(pixels: Pixels, conversion: int | None, target: Pixels) -> None:
    if conversion is None:
        np.copyto(target if pixels.ndim == target.ndim else target[:, :, 0], pixels)
        return
    _write(cv2.cvtColor(pixels, conversion, target), target)


def _write(written: object, target: Pixels) -> None:
    """Make sure that OpenCV wrote into the target and not into an array of its own.

    It returns the very array it was given when size, type and strides suit it; otherwise (a one-channel
    target, which it returns without its last axis) this copies."""
    if written is target:
        return
    result = np.asarray(written)
    if not np.shares_memory(result, target):
        np.copyto(target, result.reshape(target.shape))


def _fill_border(row: Pixels, placement: Placement, value: int) -> None:
    bottom, right = placement.top + placement.height, placement.left + placement.width
    row[: placement.top] = value
    row[bottom:] = value
    row[placement.top : bottom, : placement.left] = value
    row[placement.top : bottom, right:] = value
