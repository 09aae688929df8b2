"""Boxes of a converted model against those of FP32: who matches whom, F1 and average precision.

FP32's boxes are the truth, the candidate's the detections. As in PASCAL VOC (Everingham et al., IJCV 2010):
detections come best first, and each takes the free box of the truth, of its class and frame, that it overlaps
most, when the intersection over union is at least 0.5; every other one is false.
    box_f1       = 2 TP / (2 TP + FP + FN) over all frames
    box_ap       area under precision and recall, the precision made monotonic (VOC 2010 on), at IoU 0.5, mean
                 over the classes of the truth
    box_map      the mean of that at IoU 0.50, 0.55, ... 0.95 (COCO, Lin et al., ECCV 2014)
    box_mean_iou of the matched pairs at 0.5
Boxes are convex polygons: rectangles of two corners, or the four corners of rotated text boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

#: Overlap from which two boxes are one (PASCAL VOC).
MATCH_IOU = 0.5

#: COCO's overlaps.
_COCO_IOUS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one frame: ``points`` float64 [n, 2, 2] (two corners) or [n, 4, 2]; ``scores`` [n];
    ``classes`` int64 [n]."""

    points: Floats
    scores: Floats
    classes: NDArray[np.int64]


class BoxMeter:
    """Collects pairs of frames. Keeps per frame the overlaps, scores and classes: a few hundred numbers."""

    def __init__(self) -> None:
        self._frames: list[tuple[Boxes, Boxes, Floats]] = []

    def add(self, reference: Boxes, candidate: Boxes) -> None:
        """Add one frame: FP32's boxes and the candidate's."""
        self._frames.append((reference, candidate, overlaps(candidate, reference)))

    def figures(self) -> dict[str, float]:
        """Return the figures of all frames; without any box on either side the candidate is perfect."""
        truth = sum(len(reference.scores) for reference, _, _ in self._frames)
        found = sum(len(candidate.scores) for _, candidate, _ in self._frames)
        hits, ious = 0, 0.0
        for reference, candidate, matrix in self._frames:
            taken = match(reference, candidate, matrix, MATCH_IOU)
            hits += int(np.count_nonzero(taken >= 0))
            ious += float(sum(matrix[row, column] for row, column in enumerate(taken) if column >= 0))
        precisions = [self._mean_precision(iou) for iou in _COCO_IOUS]
        return {
            "box_f1": 2 * hits / (truth + found) if truth + found else 1.0,
            "box_ap": precisions[0],
            "box_map": sum(precisions) / len(precisions),
            "box_mean_iou": ious / hits if hits else float(truth + found == 0),
            "reference_boxes": float(truth),
            "candidate_boxes": float(found),
        }

    def _mean_precision(self, iou: float) -> float:
        hits: dict[int, list[tuple[float, bool]]] = {}
        counts: dict[int, int] = {}
        for reference, candidate, matrix in self._frames:
            for each in reference.classes.tolist():
                counts[each] = counts.get(each, 0) + 1
            taken = match(reference, candidate, matrix, iou)
            for each, score, column in zip(
                candidate.classes.tolist(), candidate.scores.tolist(), taken.tolist(), strict=True
            ):
                hits.setdefault(each, []).append((score, column >= 0))
        if not counts:
            return float(not hits)
        return sum(average_precision(hits.get(c, []), n) for c, n in counts.items()) / len(counts)


def match(reference: Boxes, candidate: Boxes, matrix: Floats, iou: float) -> NDArray[np.int64]:
    """Return for each box of the candidate the reference's box that it takes, or -1.

    ``matrix`` is overlaps(candidate, reference)."""
    taken = np.full(len(candidate.scores), -1, np.int64)
    is_free = np.ones(len(reference.scores), bool)
    for row in np.argsort(-candidate.scores, kind="stable"):
        may_take = is_free & (reference.classes == candidate.classes[row]) & (matrix[row] >= iou)
        if may_take.any():
            taken[row] = int(np.argmax(np.where(may_take, matrix[row], -1.0)))
            is_free[taken[row]] = False
    return taken


def average_precision(detections: list[tuple[float, bool]], truth_count: int) -> float:
    """Return the area under precision over recall of (score, is_hit) detections."""
    if not detections or not truth_count:
        return 0.0
    is_hit = np.array([hit for _, hit in sorted(detections, key=lambda each: -each[0])])
    hits = np.cumsum(is_hit)
    recall = hits / truth_count
    precision = hits / np.arange(1, len(is_hit) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.diff(recall, prepend=0.0)
    return float(np.sum(steps * precision))


def overlaps(first: Boxes, second: Boxes) -> Floats:
    """Return the intersection over union of each box of ``first`` with each of ``second``: [n, m]."""
    found = np.zeros((len(first.scores), len(second.scores)))
    if not found.size:
        return found
    if first.points.shape[1] == 2:
        return _rectangle_overlaps(first.points, second.points)
    bounds = _rectangle_overlaps(_bounds(first.points), _bounds(second.points))
    for row, column in np.argwhere(bounds > 0):
        found[row, column] = polygon_iou(first.points[row], second.points[column])
    return found


def polygon_iou(first: Floats, second: Floats) -> float:
    """Return the intersection over union of two convex polygons [n, 2], whichever way round they go."""
    a, b = _counter_clockwise(first), _counter_clockwise(second)
    shared = _area(_clip(a, b))
    union = _area(a) + _area(b) - shared
    return shared / union if union > 0 else 0.0


def _rectangle_overlaps(first: Floats, second: Floats) -> Floats:
    a, b = first[:, np.newaxis], second[np.newaxis]
    sides = np.clip(np.minimum(a[..., 1, :], b[..., 1, :]) - np.maximum(a[..., 0, :], b[..., 0, :]), 0, None)
    shared = sides.prod(axis=-1)
    areas = [np.clip(each[:, 1] - each[:, 0], 0, None).prod(axis=-1) for each in (first, second)]
    union = areas[0][:, np.newaxis] + areas[1][np.newaxis] - shared
    found: Floats = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return found


def _bounds(points: Floats) -> Floats:
    return np.stack([points.min(axis=1), points.max(axis=1)], axis=1)


def _signed_area(polygon: Floats) -> float:
    x, y = polygon[:, 0], polygon[:, 1]
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def _area(polygon: Floats) -> float:
    return abs(_signed_area(polygon)) if len(polygon) > 2 else 0.0


def _counter_clockwise(polygon: Floats) -> Floats:
    return polygon if _signed_area(polygon) >= 0 else polygon[::-1]


def _clip(subject: Floats, clip: Floats) -> Floats:
    """Cut a convex polygon by the edges of another (Sutherland and Hodgman, CACM 1974)."""
    corners = [tuple(point) for point in subject.tolist()]
    for (ax, ay), (bx, by) in zip(clip.tolist(), np.roll(clip, -1, axis=0).tolist(), strict=True):
        kept: list[tuple[float, ...]] = []
        sides = [(bx - ax) * (y - ay) - (by - ay) * (x - ax) for x, y in corners]
        for index, (corner, side) in enumerate(zip(corners, sides, strict=True)):
            before, side_before = corners[index - 1], sides[index - 1]
            if (side >= 0) != (side_before >= 0):
                share = side_before / (side_before - side)
                kept.append(tuple(p + share * (q - p) for p, q in zip(before, corner, strict=True)))
            if side >= 0:
                kept.append(corner)
        corners = kept
        if not corners:
            break
    return np.array(corners, np.float64).reshape(-1, 2)
