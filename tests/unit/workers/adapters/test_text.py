"""The text adapter on drawn maps, and on the trained detector with frames of real clips."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest

from headrace.errors import Code
from headrace.protocol.messages import FrameResult, Oversize, SizeClassSpec, Value
from headrace.workers.adapters import load_adapter
from headrace.workers.adapters.text import TextBox, reading_order
from headrace.workers.geometry import Placement, place

WHOLE = Placement(96, 128, 96, 128, top=0, left=0, height=96, width=128)


def _map(*rectangles: tuple[int, int, int, int], value: float = 0.9) -> np.ndarray[Any, Any]:
    """A 96x128 map with upright rectangles (x, y, width, height) of one probability."""
    drawn = np.zeros((96, 128), np.float32)
    for x, y, width, height in rectangles:
        drawn[y : y + height, x : x + width] = value
    return drawn


def _find(drawn: np.ndarray[Any, Any], placement: Placement = WHOLE, **options: Value) -> FrameResult:
    output = drawn[np.newaxis, np.newaxis]
    (result,) = load_adapter("text", options).process({"map": output}, [placement])
    return result


def _outputs(result: FrameResult) -> dict[str, Any]:
    assert isinstance(result.outputs, dict), result.message
    return result.outputs


def _bounds(box: list[list[float]]) -> tuple[float, float, float, float]:
    points = np.array(box)
    return (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())


def test_a_rectangle_is_grown_by_the_published_distance() -> None:
    """Offset = area * ratio / perimeter on every side of the region."""
    outputs = _outputs(_find(_map((30, 40, 41, 11)), dilation=False))

    offset = (40 * 10) * 1.6 / (2 * (40 + 10))
    assert outputs["scores"] == pytest.approx([0.9], abs=1e-3)
    np.testing.assert_allclose(
        _bounds(outputs["boxes"][0]), (30 - offset, 40 - offset, 70 + offset, 50 + offset), atol=1.0
    )


def test_points_are_clockwise_from_the_top_left() -> None:
    """Four points, in the order in which anybody draws them."""
    (box,) = _outputs(_find(_map((30, 40, 41, 11))))["boxes"]

    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = box
    assert x0 < x1
    assert y0 < y3
    assert (x1, y1) == pytest.approx((x2, y1))
    assert (x3, y3) == pytest.approx((x0, y2))


def test_rotated_text_gets_a_rotated_box() -> None:
    """The smallest rectangle follows the text's direction."""
    drawn = np.zeros((96, 128), np.float32)
    corners = cv2.boxPoints(((64, 48), (60, 12), 30))
    cv2.fillPoly(drawn, [np.round(corners).astype(np.int32)], 0.8)

    (box,) = _outputs(_find(drawn))["boxes"]

    (x0, y0), (x1, y1) = box[0], box[1]
    assert np.degrees(np.arctan2(y1 - y0, x1 - x0)) == pytest.approx(30, abs=3)
    np.testing.assert_allclose(np.mean(box, axis=0), (64, 48), atol=1.5)


@pytest.mark.parametrize(
    ("drawn", "options", "count"),
    [
        pytest.param(_map((30, 40, 41, 11), value=0.4), {}, 0, id="below-box-thresh"),
        pytest.param(_map((30, 40, 41, 11), value=0.4), {"box_thresh": 0.35}, 1, id="box-thresh-lowered"),
        pytest.param(_map((30, 40, 41, 11), value=0.25), {"box_thresh": 0.1}, 0, id="below-thresh"),
        pytest.param(
            _map((30, 40, 41, 11), value=0.25), {"box_thresh": 0.1, "thresh": 0.2}, 1, id="thresh-low"
        ),
        pytest.param(_map((30, 40, 30, 2)), {}, 0, id="thinner-than-min-size"),
        pytest.param(_map((30, 40, 30, 2)), {"min_size": 1}, 1, id="min-size-lowered"),
        pytest.param(_map(*((x, 10, 14, 8) for x in (2, 42, 82))), {}, 3, id="three"),
        pytest.param(_map(*((x, 10, 14, 8) for x in (2, 42, 82))), {"max_candidates": 2}, 2, id="candidates"),
        pytest.param(_map((10, 10, 20, 8), (31, 10, 20, 8)), {}, 1, id="dilation-joins-a-pixel-gap"),
        pytest.param(_map((10, 10, 20, 8), (31, 10, 20, 8)), {"dilation": False}, 2, id="no-dilation"),
        pytest.param(_map(), {}, 0, id="nothing"),
    ],
)
def test_options(drawn: np.ndarray[Any, Any], options: dict[str, Value], count: int) -> None:
    """Each option does what its name says."""
    assert len(_outputs(_find(drawn, **options))["boxes"]) == count


def test_the_padding_is_never_looked_at() -> None:
    """A region in the padding gives nothing; one across the edge counts only as far as the frame goes."""
    padded = Placement(48, 64, 96, 128, top=0, left=0, height=48, width=64)
    drawn = _map((80, 60, 30, 12), (40, 20, 60, 12))

    (box,) = _outputs(_find(drawn, padded))["boxes"]

    left, top, right, bottom = _bounds(box)
    inner = _outputs(_find(_map((40, 20, 24, 12))[:48, :64], Placement(48, 64, 48, 64, 0, 0, 48, 64)))
    assert (left, top, right, bottom) == _bounds(inner["boxes"][0])
    assert right <= 64


@pytest.mark.parametrize("step", [1, 2, 4])
def test_boxes_come_back_in_frame_pixels(step: int) -> None:
    """A letterboxed frame of twice the size, and maps of a half or a quarter of the input's size."""
    placement = place((160, 256, 3), SizeClassSpec("c", 96, 128), Oversize.LETTERBOX)
    assert (placement.top, placement.left, placement.height, placement.width) == (8, 0, 80, 128)
    drawn = _map((32, 40, 48, 24))[::step, ::step]

    (box,) = _outputs(_find(drawn, placement, unclip_ratio=0.0, min_size=0))["boxes"]

    np.testing.assert_allclose(_bounds(box), (64, 64, 160, 112), atol=2 * step)


def test_boxes_are_clipped_to_the_frame() -> None:
    """Growing at the edge of the frame ends there."""
    (box,) = _outputs(_find(_map((0, 0, 128, 96))))["boxes"]

    assert _bounds(box) == (0.0, 0.0, 128.0, 96.0)


def test_boxes_come_in_reading_order() -> None:
    """Lines from top to bottom, each from left to right, also when a line is not quite level."""
    boxes = [
        TextBox(np.float32([[x, y], [x + 20, y], [x + 20, y + 10], [x, y + 10]]), score)
        for x, y, score in ((60, 12, 0.3), (5, 40, 0.4), (5, 14, 0.1), (30, 10, 0.2))
    ]

    assert [box.score for box in reading_order(boxes)] == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(np.zeros((1, 5), np.float32), "shape", id="no-map"),
        pytest.param(np.zeros((1, 2, 8, 8), np.float32), "shape", id="two-channels"),
        pytest.param(np.zeros((1, 1, 8, 8), np.int64), "shape", id="integers"),
        pytest.param(np.zeros((1, 1, 0, 8), np.float32), "empty", id="empty"),
    ],
)
def test_outputs_that_are_no_map_are_told(output: np.ndarray[Any, Any], message: str) -> None:
    """An error of the frame, in our own words."""
    (result,) = load_adapter("text").process({"map": output}, [WHOLE])

    assert result.code == Code.POST_PROCESS_FAILED
    assert message in result.message


def test_a_model_without_an_image_input_has_no_boxes() -> None:
    """There are no frame pixels to give coordinates in."""
    (result,) = load_adapter("text").process({"map": _map()[np.newaxis]}, [None])

    assert "image input" in result.message
