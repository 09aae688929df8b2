"""Boxes are matched, and F1 and average precision computed, as the cited papers say."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.workers.prepare.boxes import Boxes, BoxMeter, average_precision, overlaps, polygon_iou


def _boxes(*rows: tuple[float, float, float, float, float, int]) -> Boxes:
    """Rectangles: x1, y1, x2, y2, score, class."""
    points = np.array([row[:4] for row in rows], np.float64).reshape(-1, 2, 2)
    return Boxes(points, np.array([row[4] for row in rows]), np.array([row[5] for row in rows], np.int64))


def _quad(points: list[tuple[float, float]]) -> np.ndarray:
    return np.array(points, np.float64)


SQUARE = _quad([(0, 0), (2, 0), (2, 2), (0, 2)])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (SQUARE, 1.0),
        (SQUARE[::-1], 1.0),
        (SQUARE + 1, 1 / 7),
        (SQUARE + 2, 0.0),
        (SQUARE + 5, 0.0),
        (SQUARE * 0.5, 0.25),
        (_quad([(1, 0), (2, 1), (1, 2), (0, 1)]), 0.5),
        (_quad([(1, 1), (1, 1), (1, 1), (1, 1)]), 0.0),
    ],
    ids=["same", "other way round", "shifted", "corner", "apart", "inside", "diamond", "a point"],
)
def test_polygons_overlap_by_their_shared_area(other: np.ndarray, expected: float) -> None:
    """Intersection over union of convex polygons, in either direction of their corners."""
    assert polygon_iou(SQUARE, other) == pytest.approx(expected)
    assert polygon_iou(other, SQUARE) == pytest.approx(expected)


def test_rectangles_and_polygons_agree() -> None:
    """The fast way for rectangles gives what the general way gives."""
    rng = np.random.default_rng(3)
    low = rng.uniform(0, 5, (6, 2))
    corners = np.stack([low, low + rng.uniform(0.5, 4, (6, 2))], axis=1)
    (x1, y1), (x2, y2) = corners[:, 0].T, corners[:, 1].T
    quads = np.stack([np.stack(p, axis=1) for p in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))], axis=1)
    marks = np.ones(6), np.zeros(6, np.int64)

    fast, general = (overlaps(boxes, boxes) for boxes in (Boxes(corners, *marks), Boxes(quads, *marks)))

    assert np.allclose(fast, general)
    assert np.allclose(np.diag(fast), 1.0)


def test_the_same_boxes_are_perfect() -> None:
    """Every figure is at its best when nothing has changed."""
    meter = BoxMeter()
    boxes = _boxes((0, 0, 10, 10, 0.9, 0), (20, 0, 30, 10, 0.8, 1))

    meter.add(boxes, boxes)

    assert meter.figures() == {
        "box_f1": 1.0,
        "box_ap": 1.0,
        "box_map": 1.0,
        "box_mean_iou": 1.0,
        "reference_boxes": 2.0,
        "candidate_boxes": 2.0,
    }


def test_lost_false_and_doubled_boxes_cost() -> None:
    """Of two boxes one is found, twice, and something else is: one hit, two false, one lost."""
    meter = BoxMeter()
    reference = _boxes((0, 0, 10, 10, 0.9, 0), (20, 0, 30, 10, 0.8, 0))
    candidate = _boxes((0, 0, 10, 10, 0.9, 0), (0, 0, 10, 9, 0.7, 0), (50, 50, 60, 60, 0.3, 0))

    meter.add(reference, candidate)

    assert meter.figures()["box_f1"] == pytest.approx(2 * 1 / (2 + 3))
    assert meter.figures()["box_ap"] == pytest.approx(0.5)  # recall 0.5 at precision 1, then none
    assert meter.figures()["box_mean_iou"] == 1.0


def test_a_box_of_another_class_matches_nothing() -> None:
    """A class is part of what a box says."""
    meter = BoxMeter()

    meter.add(_boxes((0, 0, 10, 10, 0.9, 0)), _boxes((0, 0, 10, 10, 0.9, 1)))

    assert meter.figures()["box_f1"] == 0.0
    assert meter.figures()["box_ap"] == 0.0


def test_frames_without_boxes() -> None:
    """Nothing found on both sides is perfect, on one side it is a miss or a false box."""
    both, lost, false = BoxMeter(), BoxMeter(), BoxMeter()
    none, one = _boxes(), _boxes((0, 0, 10, 10, 0.9, 0))

    both.add(none, none)
    lost.add(one, none)
    false.add(none, one)

    assert [m.figures()["box_f1"] for m in (both, lost, false)] == [1.0, 0.0, 0.0]
    assert [m.figures()["box_ap"] for m in (both, lost, false)] == [1.0, 0.0, 0.0]


def test_slightly_moved_boxes_cost_in_the_mean_over_overlaps_alone() -> None:
    """An overlap of 0.82 is a match at 0.5, but not at 0.85 and above: 7 of the 10 limits hold."""
    meter = BoxMeter()

    meter.add(_boxes((0, 0, 10, 10, 0.9, 0)), _boxes((1, 0, 11, 10, 0.9, 0)))

    assert meter.figures()["box_ap"] == 1.0
    assert meter.figures()["box_mean_iou"] == pytest.approx(9 / 11)
    assert meter.figures()["box_map"] == pytest.approx(0.7)


def test_average_precision_by_hand() -> None:
    """Hit, miss, hit of two: precision 1 up to recall 0.5, then 2/3."""
    assert average_precision([(0.9, True), (0.8, False), (0.7, True)], 2) == pytest.approx(
        0.5 * 1 + 0.5 * 2 / 3
    )
