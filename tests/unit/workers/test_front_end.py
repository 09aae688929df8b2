"""The uint8 front end gives what the same arithmetic gives outside the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hr_models
import numpy as np
import onnx
import onnxruntime
import pytest

from headrace.errors import ModelError
from headrace.protocol.messages import ImageInput
from headrace.workers.front_end import ImageModel, add_front_end
from headrace.workers.onnx_model import open_session, read_model

IMAGENET = ImageInput(scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def _prepare(folder: Path, model: onnx.ModelProto, image: ImageInput) -> ImageModel:
    return add_front_end(read_model(str(hr_models.write(folder, model))), image)


def _run(prepared: ImageModel, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = open_session(prepared.model, onnxruntime.SessionOptions())
    output: np.ndarray[Any, Any] = session.run(None, {prepared.feed_name: images})[0]
    return output


def _images() -> np.ndarray[Any, Any]:
    return np.random.default_rng(4).integers(0, 256, (2, 8, 12, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("model", "image"),
    [
        pytest.param(hr_models.mean_color(), IMAGENET, id="nchw"),
        pytest.param(hr_models.mean_color(channels="c"), IMAGENET, id="nchw-open-channels"),
        pytest.param(hr_models.mean_color(), ImageInput(), id="nchw-no-arithmetic"),
        pytest.param(hr_models.mean_color(), ImageInput(scale=2, mean=(0.5,), std=(0.25,)), id="one-for-all"),
        pytest.param(hr_models.mean_color_nhwc(), IMAGENET, id="nhwc"),
        pytest.param(hr_models.mean_color_nhwc(), ImageInput(), id="nhwc-no-arithmetic"),
        pytest.param(hr_models.mean_color_uint8("nchw"), ImageInput(), id="uint8-nchw"),
        pytest.param(hr_models.mean_color_uint8(), ImageInput(), id="uint8-nhwc"),
    ],
)
def test_the_graph_normalises_as_numpy_does(
    tmp_path: Path, model: onnx.ModelProto, image: ImageInput
) -> None:
    """(pixel * scale - mean) / std per channel, whatever layout and dtype the graph has."""
    images = _images()
    mean, std = image.mean or (0.0,), image.std or (1.0,)

    means = _run(_prepare(tmp_path, model, image), images)

    expected = ((images.astype(np.float64) * image.scale - mean) / std).mean(axis=(1, 2))
    np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-5)


def test_float16_models_are_fed_too(tmp_path: Path) -> None:
    """The arithmetic is done in the graph's own dtype."""
    proto = hr_models.mean_color()
    for info in (proto.graph.input[0], proto.graph.output[0]):
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    images = _images()

    means = _run(_prepare(tmp_path, proto, IMAGENET), images)

    expected = ((images / 255.0 - IMAGENET.mean) / IMAGENET.std).mean(axis=(1, 2))
    assert means.dtype == np.float16
    np.testing.assert_allclose(means, expected, atol=0.01)


def test_transpose_stands_before_cast(tmp_path: Path) -> None:
    """One byte per value is moved, not four."""
    prepared = _prepare(tmp_path, hr_models.mean_color(), IMAGENET)

    assert [n.op_type for n in prepared.model.proto.graph.node] == [
        "Transpose",
        "Cast",
        "Mul",
        "Add",
        "ReduceMean",
    ]
    onnx.checker.check_model(prepared.model.proto)


def test_a_uint8_nhwc_model_is_left_alone(tmp_path: Path) -> None:
    """It takes frames as they stand in the buffer already."""
    prepared = _prepare(tmp_path, hr_models.mean_color_uint8(), ImageInput())

    assert prepared.feed_name == "x"
    assert [n.op_type for n in prepared.model.proto.graph.node] == ["Cast", "ReduceMean"]


def test_the_model_that_was_read_is_not_changed(tmp_path: Path) -> None:
    """The front end is put on a copy."""
    model = read_model(str(hr_models.write(tmp_path, hr_models.mean_color())))
    before = model.proto.SerializeToString()

    add_front_end(model, IMAGENET)

    assert model.proto.SerializeToString() == before


def test_names_of_the_front_end_never_meet_the_graph_s(tmp_path: Path) -> None:
    """A graph that already uses the names gets others."""
    proto = hr_models.mean_color()
    first = proto.graph.node[0]
    proto.graph.node.append(onnx.helper.make_node("Identity", [first.output[0]], ["x_uint8_nhwc"]))
    images = _images()

    prepared = _prepare(tmp_path, proto, ImageInput())

    assert prepared.feed_name == "x_uint8_nhwc_"
    np.testing.assert_allclose(_run(prepared, images), images.mean(axis=(1, 2)), rtol=1e-5)


def test_size_and_batch_of_the_graph_are_read(tmp_path: Path) -> None:
    """Fixed axes are found in either layout; -1 stands for open ones."""
    fixed = _prepare(tmp_path, hr_models.mean_color(4, 32, 48), ImageInput())
    open_one = _prepare(tmp_path, hr_models.mean_color_nhwc(), ImageInput())

    assert (fixed.batch, fixed.height, fixed.width) == (4, 32, 48)
    assert (open_one.batch, open_one.height, open_one.width) == (-1, -1, -1)


def test_a_model_without_a_matching_input_lists_what_it_has(tmp_path: Path) -> None:
    """Gray images for a colour model: the error shows the inputs."""
    with pytest.raises(ModelError, match=r"images of 1 channels.*x float32 \[-1, 3, -1, -1\]"):
        _prepare(tmp_path, hr_models.mean_color(), ImageInput(channels=1))
