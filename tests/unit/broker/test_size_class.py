"""Which size class a frame goes to."""

from __future__ import annotations

from dataclasses import replace

import hr_core as hr
import pytest
from hr_records import make_frame

from headrace.broker.records import Refusal
from headrace.broker.size_class import MAX_KNOWN_SHAPES, TENSOR_CLASS, SizeClasses, padding_waste
from headrace.errors import Code
from headrace.protocol.messages import Encoding, Fit, ImageInput, ModelSpec, Oversize, SizeClassSpec

SMALL = SizeClassSpec("small", 160, 192)
WIDE = SizeClassSpec("wide", 288, 640)
LARGE = SizeClassSpec("large", 384, 640)


def classes(
    *specs: SizeClassSpec, oversize: Oversize = Oversize.LETTERBOX, is_image: bool = True
) -> SizeClasses:
    image = ImageInput() if is_image else None
    return SizeClasses(ModelSpec("m", "1", image=image, oversize=oversize), specs)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((144, 176, 3), "small"),
        ((160, 192, 3), "small"),
        ((161, 192, 3), "wide"),
        ((160, 193, 3), "wide"),
        ((272, 640, 3), "wide"),
        ((289, 640, 3), "large"),
        ((100, 600), "wide"),
        ((300, 10, 1), "large"),
        ((10, 10, 4), "small"),
        ((720, 1280, 3), "large"),
        ((2000, 100, 3), "large"),
    ],
    ids=str,
)
def test_places_in_the_smallest_class_that_contains_the_frame(shape: tuple[int, ...], name: str) -> None:
    """Nearest by distance is wrong: a class smaller in one direction is never chosen."""
    placed = classes(LARGE, SMALL, WIDE).place(make_frame(shape=shape))

    assert isinstance(placed, SizeClassSpec)
    assert placed.name == name


def test_oversize_goes_where_it_is_scaled_down_least() -> None:
    """A tall frame prefers the tall class although another has more pixels."""
    tall, broad = SizeClassSpec("tall", 600, 100), SizeClassSpec("broad", 200, 900)

    placed = classes(tall, broad).place(make_frame(shape=(1200, 100, 3)))

    assert placed == tall


@pytest.mark.parametrize(
    ("table", "frame", "code"),
    [
        (classes(SMALL, oversize=Oversize.REJECT), make_frame(shape=(161, 192, 3)), Code.OVERSIZE),
        (classes(SizeClassSpec("x", 8, 8, fit=Fit.EXACT)), make_frame(shape=(7, 8, 3)), Code.OVERSIZE),
        (classes(SMALL), make_frame(shape=(8, 8, 3), dtype="float32"), Code.WRONG_DTYPE),
        (classes(SMALL), make_frame(shape=(8,)), Code.WRONG_SHAPE),
        (classes(SMALL), make_frame(shape=(3, 8, 8)), Code.WRONG_CHANNELS),
        (
            classes(SizeClassSpec(TENSOR_CLASS, 0, 0), is_image=False),
            make_frame(encoding=Encoding.JPEG),
            Code.BAD_ENCODING,
        ),
    ],
    ids=["oversize", "not-exact", "dtype", "axes", "channels", "image-for-tensors"],
)
def test_refuses_with_a_code(table: SizeClasses, frame: object, code: Code) -> None:
    """IMG-05: what can't be placed is refused for that frame alone, with what was expected."""
    placed = table.place(frame)  # type: ignore[arg-type]

    assert isinstance(placed, Refusal)
    assert placed.code is code
    assert placed.message


def test_the_channels_of_a_file_are_its_decoders_business() -> None:
    """IMG-05: a PNG of gray and alpha has two channels; only a raw image must not."""
    frame = make_frame(shape=(8, 8, 2), encoding=Encoding.PNG)

    assert classes(SMALL).place(frame) == SMALL
    assert isinstance(classes(SMALL).place(make_frame(shape=(8, 8, 2))), Refusal)


def test_exact_classes_take_their_own_size_only() -> None:
    """Fit exact neither pads nor scales."""
    exact = SizeClassSpec("exact", 8, 8, fit=Fit.EXACT)

    assert classes(exact, SMALL).place(make_frame(shape=(8, 8, 3))) == exact
    assert classes(exact, SMALL).place(make_frame(shape=(7, 8, 3))) == SMALL


def test_tensor_models_have_one_class() -> None:
    """A plain tensor of any rank goes to the tensor class."""
    table = classes(SizeClassSpec(TENSOR_CLASS, 0, 0), is_image=False)

    placed = table.place(make_frame(shape=(5,), dtype="float32"))

    assert placed == table.get(TENSOR_CLASS)
    assert table.names == (TENSOR_CLASS,)


@pytest.mark.parametrize(
    ("shape", "size_class", "waste"),
    [
        ((160, 192, 3), SMALL, 0.0),
        ((80, 192, 3), SMALL, 0.5),
        ((80, 96), SMALL, 0.75),
        ((80, 96, 3), SizeClassSpec("l", 160, 192, fit=Fit.LETTERBOX), 0.0),
        ((720, 1280, 3), LARGE, 1 - 360 / 384),
        ((5,), SizeClassSpec(TENSOR_CLASS, 0, 0), 0.0),
        ((5,), SMALL, 0.0),
    ],
    ids=["full", "half", "quarter", "letterbox-up", "oversize", "tensor", "no-image"],
)
def test_counts_padding(shape: tuple[int, ...], size_class: SizeClassSpec, waste: float) -> None:
    """The share of a class's area that holds no pixel of the frame."""
    assert padding_waste(shape, size_class) == pytest.approx(waste)


def test_places_of_many_shapes_are_not_all_remembered() -> None:
    """A peer that sends ever new shapes fills no table."""
    driver = hr.CoreDriver()
    served = driver.core.models.classes[0]
    placer = driver.core.models.find("").placer  # type: ignore[union-attr]
    for number in range(MAX_KNOWN_SHAPES + 1):
        shape = (1 + number // 60, 1 + number % 60, 1)
        place = placer.place(replace(hr.frame(), shape=shape))  # type: ignore[union-attr]
        assert place == hr.SMALL
        assert served.waste_of(shape) == pytest.approx(padding_waste(shape, hr.SMALL))

    assert len(placer._known) == len(served.waste_by_shape) == 1  # type: ignore[union-attr]
