"""The detect adapter on hand-made outputs of each layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import Code
from headrace.protocol.messages import FrameResult, Value
from headrace.workers.adapters import load_adapter
from headrace.workers.adapters.detect import suppress
from headrace.workers.geometry import Placement

#: A 200x400 frame, scaled by half into the middle of a 320x320 class.
PLACEMENT = Placement(200, 400, 320, 320, top=110, left=60, height=100, width=200)

#: cx, cy, w, h in class pixels; the same in frame pixels is (20, 20, 60, 100) and (200, 100, 400, 200).
FIRST = (80.0, 140.0, 20.0, 40.0)
FIRST_IN_FRAME = [20.0, 20.0, 60.0, 100.0]
SECOND = (210.0, 185.0, 100.0, 50.0)
SECOND_IN_FRAME = [200.0, 100.0, 400.0, 200.0]


def _v5(rows: list[tuple[float, ...]], lines: int = 20) -> np.ndarray[Any, Any]:
    table = np.zeros((lines, 8), np.float32)
    for index, row in enumerate(rows):
        table[index] = row
    return table


ROWS = [
    (*FIRST, 0.9, 0.1, 1.0, 0.0),
    (*SECOND, 0.8, 1.0, 0.2, 0.0),
    (81.0, 140.0, 20.0, 40.0, 0.7, 0.1, 1.0, 0.0),  # the first once more, one pixel aside
    (80.0, 140.0, 20.0, 40.0, 0.6, 0.0, 0.1, 1.0),  # the same place, another class
    (10.0, 10.0, 5.0, 5.0, 0.1, 1.0, 0.0, 0.0),  # too weak
]


def _detect(table: np.ndarray[Any, Any], **options: Value) -> FrameResult:
    (result,) = load_adapter("detect", options).process({"out": table[np.newaxis]}, [PLACEMENT])
    return result


def _outputs(result: FrameResult) -> dict[str, Any]:
    assert isinstance(result.outputs, dict), result.message
    return result.outputs


@pytest.mark.parametrize("layout", ["auto", "v5"])
def test_v5_rows_become_boxes_in_frame_pixels(layout: str) -> None:
    """Weak boxes go, near copies of a class are suppressed, coordinates are those of the frame as sent."""
    outputs = _outputs(_detect(_v5(ROWS), layout=layout, labels=["a", "b", "c"]))

    assert outputs["boxes"] == [FIRST_IN_FRAME, SECOND_IN_FRAME, FIRST_IN_FRAME]
    assert outputs["classes"] == [1, 0, 2]
    assert outputs["labels"] == ["b", "a", "c"]
    assert outputs["scores"] == pytest.approx([0.9, 0.8, 0.6])


@pytest.mark.parametrize("layout", ["auto", "v8"])
def test_v8_is_the_same_transposed_without_objectness(layout: str) -> None:
    """[4 + classes, boxes] gives the same boxes."""
    v5 = _v5(ROWS)
    v8 = np.concatenate([v5[:, :4], v5[:, 5:] * v5[:, 4:5]], axis=1).T

    assert _outputs(_detect(v8, layout=layout)) == _outputs(_detect(v5))


@pytest.mark.parametrize("columns", [6, 7])
def test_nms_rows_are_taken_as_they_are(columns: int) -> None:
    """A graph that suppresses by itself is only filtered, sorted and mapped to the frame."""
    rows = np.float32([[0, 70, 120, 90, 160, 0.5, 3], [0, 70, 120, 90, 160, 0.9, 3], [0, 0, 0, 9, 9, 0.1, 1]])

    outputs = _outputs(_detect(rows[:, 7 - columns :], layout="nms"))

    assert outputs["boxes"] == [FIRST_IN_FRAME, FIRST_IN_FRAME]
    assert outputs["scores"] == pytest.approx([0.9, 0.5])
    assert outputs["classes"] == [3, 3]


def test_suppression_across_classes_when_asked() -> None:
    """class_agnostic keeps one box per place."""
    outputs = _outputs(_detect(_v5(ROWS), class_agnostic=True))

    assert outputs["classes"] == [1, 0]


def test_relative_coordinates() -> None:
    """Exports with coordinates of 0 to 1 are scaled to the class first."""
    relative = _v5(ROWS)
    relative[:, :4] /= 320

    outputs = _outputs(_detect(relative, coordinates="relative"))

    np.testing.assert_allclose(outputs["boxes"][0], FIRST_IN_FRAME, atol=0.02)


def test_boxes_in_the_padding_are_clipped_to_the_frame() -> None:
    """Coordinates never lie outside the frame."""
    outputs = _outputs(_detect(_v5([(160.0, 160.0, 320.0, 320.0, 1.0, 1.0, 0.0, 0.0)])))

    assert outputs["boxes"] == [[0.0, 0.0, 400.0, 200.0]]


def test_nothing_found_is_an_empty_list() -> None:
    """No box is a result, not an error; so are outputs without any row."""
    empty = {"boxes": [], "scores": [], "classes": []}

    assert _outputs(_detect(_v5([]))) == empty
    assert _outputs(_detect(np.zeros((0, 6), np.float32), layout="nms")) == empty


def test_the_number_of_boxes_is_bounded() -> None:
    """max_boxes keeps the best."""
    rows = [(20.0 + 12 * i, 150.0, 10.0, 10.0, 0.5 + i / 100, 1.0, 0.0, 0.0) for i in range(20)]

    outputs = _outputs(_detect(_v5(rows), max_boxes=3))

    assert outputs["scores"] == pytest.approx([0.69, 0.68, 0.67])


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        pytest.param(np.zeros(5, np.float32), {}, "two axes", id="one-axis"),
        pytest.param(np.zeros((9, 4), np.float32), {}, "not of layout v5", id="too-few-columns"),
        pytest.param(np.zeros((9, 8), np.float32), {"layout": "nms"}, "not of layout nms", id="no-nms"),
        pytest.param(_v5(ROWS), {"labels": ["a"]}, "class 1 has no label", id="labels"),
        pytest.param(_v5(ROWS), {"output": "y"}, "no output y", id="output"),
    ],
)
def test_outputs_of_another_layout_are_told(
    table: np.ndarray[Any, Any], options: dict[str, Value], message: str
) -> None:
    """An error of the frame, in our own words."""
    result = _detect(table, **options)

    assert result.code == Code.POST_PROCESS_FAILED
    assert message in result.message


def test_a_model_without_an_image_input_has_no_boxes() -> None:
    """There are no frame pixels to give coordinates in."""
    (result,) = load_adapter("detect").process({"out": _v5(ROWS)[np.newaxis]}, [None])

    assert "image input" in result.message


def test_suppression_equals_the_definition() -> None:
    """Greedy suppression by its definition, box by box, keeps the same boxes on 200 random sets."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        corners = rng.uniform(0, 50, (30, 2)).astype(np.float32)
        boxes = np.concatenate([corners, corners + rng.uniform(1, 30, (30, 2))], axis=1).astype(np.float32)
        groups = rng.integers(0, 2, 30)

        kept = suppress(boxes, groups, 0.4)

        expected: list[int] = []
        for i in range(30):
            if all(groups[i] != groups[k] or _iou(boxes[i], boxes[k]) <= 0.4 for k in expected):
                expected.append(i)
        assert kept.tolist() == expected


def _iou(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return float(width * height / (areas - width * height))
