"""Placement of frames in size classes and the mapping of coordinates there and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Fit, Oversize, SizeClassSpec
from headrace.workers.geometry import Placement, place


def _class(height: int, width: int, fit: Fit) -> SizeClassSpec:
    return SizeClassSpec("c", height, width, fit=fit)


@pytest.mark.parametrize(
    ("shape", "size_class", "rectangle"),
    [
        pytest.param((100, 200, 3), _class(100, 200, Fit.EXACT), (0, 0, 100, 200), id="exact"),
        pytest.param((90, 150, 3), _class(100, 200, Fit.PAD), (0, 0, 90, 150), id="pad-top-left-unscaled"),
        pytest.param(
            (50, 50, 3), _class(100, 200, Fit.LETTERBOX), (0, 50, 100, 100), id="letterbox-enlarges"
        ),
        pytest.param((200, 200, 3), _class(100, 200, Fit.PAD), (0, 50, 100, 100), id="oversize-letterbox"),
        pytest.param((50, 400), _class(100, 200, Fit.PAD), (37, 0, 25, 200), id="oversize-one-axis"),
        pytest.param((1, 4000), _class(64, 64, Fit.LETTERBOX), (31, 0, 1, 64), id="thin-frame-keeps-a-row"),
    ],
)
def test_place_gives_the_rectangle(
    shape: tuple[int, ...], size_class: SizeClassSpec, rectangle: tuple[int, int, int, int]
) -> None:
    """Each fit puts the frame where the class says."""
    placement = place(shape, size_class, Oversize.LETTERBOX)

    assert (placement.top, placement.left, placement.height, placement.width) == rectangle
    assert (placement.frame_height, placement.frame_width) == shape[:2]


@pytest.mark.parametrize(
    ("shape", "fit", "code"),
    [
        pytest.param((101, 200, 3), Fit.PAD, Code.OVERSIZE, id="oversize"),
        pytest.param((100, 201, 3), Fit.LETTERBOX, Code.OVERSIZE, id="oversize-letterbox-class"),
        pytest.param((100, 199, 3), Fit.EXACT, Code.WRONG_SHAPE, id="smaller-than-exact"),
        pytest.param((0, 10, 3), Fit.PAD, Code.BAD_SHAPE, id="no-area"),
    ],
)
def test_place_refuses(shape: tuple[int, ...], fit: Fit, code: Code) -> None:
    """A frame that the class can't take is refused by code, and the class is named."""
    with pytest.raises(InvalidFrameError) as caught:
        place(shape, _class(100, 200, fit), Oversize.REJECT)

    assert caught.value.code is code


_SIDE = st.integers(1, 4000)
_CLASS_SIDE = st.integers(16, 1280)


@given(_SIDE, _SIDE, _CLASS_SIDE, _CLASS_SIDE, st.sampled_from([Fit.PAD, Fit.LETTERBOX]))
def test_mapping_there_and_back_is_identity(
    height: int, width: int, class_height: int, class_width: int, fit: Fit
) -> None:
    """Points of the frame come back to themselves, and the frame's corners to the rectangle's."""
    placement = place((height, width), _class(class_height, class_width, fit), Oversize.LETTERBOX)
    points = np.array([[0, 0], [width, height], [width / 3, height / 7]], dtype=np.float64)

    in_class = placement.to_class(points)

    assert placement.top >= 0
    assert placement.top + placement.height <= class_height
    assert placement.left >= 0
    assert placement.left + placement.width <= class_width
    np.testing.assert_allclose(in_class[0], (placement.left, placement.top), atol=1e-9)
    np.testing.assert_allclose(in_class[1], (placement.columns.stop, placement.rows.stop), atol=1e-6)
    np.testing.assert_allclose(placement.to_frame(in_class), points, atol=1e-6)


def test_boxes_outside_the_frame_are_clipped_to_it() -> None:
    """A box that reaches into the padding ends at the frame's edge, and no boxes stay no boxes."""
    placement = Placement(50, 100, 64, 128, top=7, left=14, height=50, width=100)

    boxes = placement.boxes_to_frame([[0, 0, 128, 64], [14, 7, 24, 17]])

    np.testing.assert_array_equal(boxes, [[0, 0, 100, 50], [0, 0, 10, 10]])
    assert placement.boxes_to_frame(np.zeros((0, 4))).shape == (0, 4)
    np.testing.assert_array_equal(placement.boxes_to_class([[0, 0, 10, 10]]), [[14, 7, 24, 17]])


def test_an_exact_class_never_scales() -> None:
    """A frame larger than an exact class is refused even where oversize frames are letterboxed."""
    with pytest.raises(InvalidFrameError) as caught:
        place((200, 200, 3), _class(100, 200, Fit.EXACT), Oversize.LETTERBOX)

    assert caught.value.code is Code.OVERSIZE


def test_is_scaled_tells_a_copy_from_a_resize() -> None:
    """Only a frame whose rectangle differs from its own size must be resized."""
    assert not place((10, 10), _class(32, 32, Fit.PAD), Oversize.LETTERBOX).is_scaled
    assert place((10, 10), _class(32, 32, Fit.LETTERBOX), Oversize.LETTERBOX).is_scaled


@pytest.mark.parametrize("fit", [Fit.PAD, Fit.LETTERBOX])
def test_a_frame_keeps_its_own_pixels_in_a_larger_class(fit: Fit) -> None:
    """A frame that rides in a larger class's batch: its boxes come back as they would from its own class."""
    boxes = np.array([[3.0, 5.0, 60.0, 40.0], [0.0, 0.0, 100.0, 48.0]])

    for side in (112, 640):
        placement = place((48, 100, 3), SizeClassSpec("c", side, side, 8, fit), Oversize.REJECT)
        back = placement.boxes_to_frame(placement.boxes_to_class(boxes))
        np.testing.assert_allclose(back, boxes)
        assert placement.is_scaled == (fit is Fit.LETTERBOX)
