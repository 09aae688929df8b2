"""`headrace up --model FILE`: what a configuration file would say is read from the graph."""

from __future__ import annotations

from pathlib import Path

import hr_models
import pytest

from headrace.errors import ConfigError, ModelError
from headrace.quick_model import model_section


def test_a_fixed_image_input_gives_its_own_size_class(tmp_path: Path) -> None:
    """NCHW with 3 channels: RGB pixels scaled to 0..1, one class of the graph's size."""
    path = hr_models.write(tmp_path, hr_models.mean_color(height=32, width=48), "my model.onnx")

    section = model_section(path)

    assert section.name == "my-model"
    assert section.path == str(path)
    assert section.image is not None
    assert (section.image.color, section.image.channels) == ("rgb", 3)
    assert section.image.scale == pytest.approx(1 / 255)
    assert [(item.label, item.height, item.width) for item in section.size_classes] == [("32x48", 32, 48)]


def test_one_channel_is_gray(tmp_path: Path) -> None:
    """[n, 1, h, w] takes gray frames."""
    path = hr_models.write(tmp_path, hr_models.mean_color(height=32, width=48, channels=1))

    section = model_section(path)

    assert section.image is not None
    assert (section.image.color, section.image.channels) == ("gray", 1)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_uint8_pixels_are_left_as_they_are(tmp_path: Path, layout: str) -> None:
    """A graph that takes uint8 does its own arithmetic."""
    path = hr_models.write(tmp_path, hr_models.mean_color_uint8(layout))

    section = model_section(path, sizes=["480x640", "720x1280"], adapter="classify")

    assert section.image is not None
    assert section.image.scale == 1.0
    assert [item.label for item in section.size_classes] == ["480x640", "720x1280"]
    assert section.adapter == "classify"


@pytest.mark.parametrize(
    "model", [hr_models.tensor_sum(), hr_models.several_inputs()], ids=["one", "several"]
)
def test_anything_else_is_served_as_plain_tensors(tmp_path: Path, model: object) -> None:
    """No image, no size classes: the graph's own shapes hold."""
    path = hr_models.write(tmp_path, model)  # type: ignore[arg-type]

    section = model_section(path)

    assert section.image is None
    assert section.size_classes == ()


def test_external_weights_are_named(tmp_path: Path) -> None:
    """The files beside the graph travel with it."""
    path = hr_models.write_with_weights(tmp_path, hr_models.matrix_multiply())

    assert model_section(path).extra_files == ("data/weights.bin",)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "--size HEIGHTxWIDTH"),
        (["640"], "must read HEIGHTxWIDTH"),
        (["0x640"], "must read HEIGHTxWIDTH"),
        (["99999x1"], "must read HEIGHTxWIDTH"),
    ],
)
def test_an_open_size_needs_a_choice(tmp_path: Path, sizes: list[str], words: str) -> None:
    """A graph that takes any size does not say which ones to pad to."""
    path = hr_models.write(tmp_path, hr_models.mean_color())

    with pytest.raises(ConfigError, match=words):
        model_section(path, sizes=sizes)


def test_sizes_for_a_tensor_model_are_refused(tmp_path: Path) -> None:
    """--size means padding, and padding is for images; the inputs are named."""
    path = hr_models.write(tmp_path, hr_models.tensor_sum())

    with pytest.raises(ConfigError, match=r"takes no image \(its inputs are x \[\?, 4\]\)"):
        model_section(path, sizes=["3x4"])


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """A text file, or none."""
    path = tmp_path / "model.onnx"
    path.write_text("not a model")

    with pytest.raises(ModelError, match=r"model\.onnx"):
        model_section(path)
    with pytest.raises(ConfigError, match="no such file"):
        model_section(tmp_path / "none.onnx")
