"""The ``text`` adapter: boxes of a DB text detector ("Real-time Scene Text Detection with Differentiable
Binarization", Liao et al., AAAI 2020), in frame pixels.

The detector gives a probability map. Each connected region above ``thresh`` becomes its smallest rotated
rectangle, is scored by the mean probability inside it, and is grown: DB is trained on shrunken text, so the
rectangle is offset outwards by area * unclip_ratio / perimeter (the paper's D').

Only the part of the map that the frame covers is looked at: what the model sees in the padding is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import cv2.typing
import numpy as np
import pyclipper
from numpy.typing import NDArray

from headrace.workers.adapters.base import Adapter, AdapterError, Array, Outputs, RowResult, pick_output
from headrace.workers.adapters.options import Options
from headrace.workers.adapters.text_options import TextOptions
from headrace.workers.geometry import Placement

#: Joins regions that thresholding tore apart by one pixel, as the reference implementation does.
_DILATION_KERNEL = np.ones((2, 2), np.uint8)


@dataclass(frozen=True, slots=True)
class TextBox:
    """One text region: ``points`` float32 [4, 2] (x, y), clockwise from the top left, and its score."""

    points: NDArray[np.float32]
    score: float


class TextAdapter(Adapter):
    """Options: see TextOptions.

    Gives ``boxes`` (four [x, y] points each, in frame pixels) and ``scores``, in reading order.
    """

    name = "text"

    def __init__(self, options: Options) -> None:
        self._options = TextOptions.read(options)

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Return the text boxes of one frame; its output is a map [1, height, width] or [height, width]."""
        if placement is None:
            raise AdapterError("text boxes need a model with an image input")
        frame_map, scale, corner = _covered(pick_output(row, self._options.output), placement)
        boxes = []
        for box in self._find(frame_map):
            points = placement.to_frame(box.points * scale + corner)
            boxes.append(TextBox(points.astype(np.float32), box.score))
        ordered = reading_order(boxes)
        return RowResult(
            {
                "boxes": [np.round(box.points.astype(np.float64), 2).tolist() for box in ordered],
                "scores": [round(box.score, 4) for box in ordered],
            }
        )

    def _find(self, frame_map: NDArray[np.float32]) -> list[TextBox]:
        mask = (frame_map > self._options.thresh).astype(np.uint8)
        if self._options.dilation:
            mask = cv2.dilate(mask, _DILATION_KERNEL).astype(np.uint8)
        contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
        boxes = []
        for contour in contours[: self._options.max_candidates]:
            inner, short_side = _smallest_rectangle(contour)
            if short_side < self._options.min_size:
                continue
            score = _mean_inside(frame_map, inner)
            if score < self._options.box_thresh:
                continue
            grown = _grow(inner, self._options.unclip_ratio)
            if grown is None:
                continue
            outer, short_side = _smallest_rectangle(grown)
            # Growing adds at least a pixel on each side of anything that is text.
            if short_side >= self._options.min_size + 2:
                boxes.append(TextBox(outer, score))
        return boxes


def reading_order(boxes: list[TextBox]) -> list[TextBox]:
    """Sort boxes into lines from top to bottom, each from left to right.

    A box belongs to a line when its centre is less than half the smaller height from the line's first box.
    """
    lines: list[list[TextBox]] = []
    for box in sorted(boxes, key=lambda b: (float(b.points[:, 1].mean()), float(b.points[:, 0].min()))):
        if lines and _is_same_line(lines[-1][0], box):
            lines[-1].append(box)
        else:
            lines.append([box])
    return [box for line in lines for box in sorted(line, key=lambda b: float(b.points[:, 0].min()))]


def _is_same_line(first: TextBox, other: TextBox) -> bool:
    heights = [float(np.ptp(box.points[:, 1])) for box in (first, other)]
    centres = [float(box.points[:, 1].mean()) for box in (first, other)]
    return abs(centres[1] - centres[0]) < min(heights) / 2


def _covered(
    output: Array, placement: Placement
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
    """Return the part of the map that the frame covers, class pixels per map pixel (x, y), and its corner."""
    if output.ndim < 2 or any(axis != 1 for axis in output.shape[:-2]) or output.dtype.kind != "f":
        raise AdapterError(
            f"a probability map has shape [1, height, width], this output has {list(output.shape)}"
        )
    height, width = output.shape[-2:]
    full = output.reshape(height, width).astype(np.float32, copy=False)
    if not full.size:
        raise AdapterError(f"the probability map is empty: {list(output.shape)}")
    # Some detectors give a map of half or a quarter of the input's size.
    scale_y, scale_x = placement.class_height / height, placement.class_width / width
    top, bottom = round(placement.top / scale_y), round((placement.top + placement.height) / scale_y)
    left, right = round(placement.left / scale_x), round((placement.left + placement.width) / scale_x)
    part = full[top : max(bottom, top + 1), left : max(right, left + 1)]
    corner = np.array([left * scale_x, top * scale_y])
    return np.ascontiguousarray(part), np.array([scale_x, scale_y]), corner


def _smallest_rectangle(points: cv2.typing.MatLike) -> tuple[NDArray[np.float32], float]:
    """Return the smallest rectangle's corners, clockwise from the top left, and its shorter side."""
    rectangle = cv2.minAreaRect(points)
    by_x = sorted(cv2.boxPoints(rectangle).tolist())
    (top_left, bottom_left), (top_right, bottom_right) = (
        sorted(side, key=lambda point: point[1]) for side in (by_x[:2], by_x[2:])
    )
    corners = np.array([top_left, top_right, bottom_right, bottom_left], np.float32)
    return corners, float(min(rectangle[1]))


def _mean_inside(frame_map: NDArray[np.float32], corners: NDArray[np.float32]) -> float:
    last = (frame_map.shape[1] - 1, frame_map.shape[0] - 1)
    low = np.clip(np.floor(corners.min(axis=0)), 0, last).astype(int)
    high = np.clip(np.ceil(corners.max(axis=0)), 0, last).astype(int)
    mask = np.zeros((high[1] - low[1] + 1, high[0] - low[0] + 1), np.uint8)
    # Corners are cut to whole pixels, as the reference does: scores stay comparable with published limits.
    cv2.fillPoly(mask, [(corners - low).astype(np.int32)], 1)
    return float(cv2.mean(frame_map[low[1] : high[1] + 1, low[0] : high[0] + 1], mask)[0])


def _grow(corners: NDArray[np.float32], ratio: float) -> NDArray[np.int32] | None:
    x, y = corners[:, 0].astype(np.float64), corners[:, 1].astype(np.float64)
    area = abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2
    length = float(np.hypot(x - np.roll(x, -1), y - np.roll(y, -1)).sum())
    if length == 0.0:
        return None
    offset = pyclipper.PyclipperOffset()
    # Clipper works on whole numbers and cuts floats itself, as the reference lets it.
    offset.AddPath(corners.astype(np.int64).tolist(), pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    paths = offset.Execute(area * ratio / length)
    if not paths:
        return None
    return np.array([point for path in paths for point in path], np.int32).reshape(-1, 1, 2)
