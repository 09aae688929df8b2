"""Reading ONNX files: what is described, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import hr_models
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace.errors import ModelError
from headrace.protocol.messages import ModelSpec
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.engine import ModelKey
from headrace.workers.onnx_model import OnnxTensor, open_session, read_model, supported_versions


def test_inputs_and_outputs_are_described(tmp_path: Path) -> None:
    """Names, numpy dtypes and shapes come from the file; -1 stands for an open axis."""
    model = read_model(str(hr_models.write(tmp_path, hr_models.several_inputs())))

    assert model.inputs == (
        OnnxTensor("values", "float32", (-1, 4)),
        OnnxTensor("scale", "float32", (-1, 1)),
        OnnxTensor("size", "int64", (-1, 2)),
    )
    assert model.outputs == (OnnxTensor("result", "float32", (-1, 4)),)
    assert (model.ir_version, model.opset) == (hr_models.IR_VERSION, hr_models.OPSET)


def test_initializers_listed_as_inputs_are_none(tmp_path: Path) -> None:
    """Old exporters list weights among the inputs; nobody has to feed them."""
    proto = hr_models.matrix_multiply(8)
    proto.graph.input.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [3, 8]))

    model = read_model(str(hr_models.write(tmp_path, proto)))

    assert [tensor.name for tensor in model.inputs] == ["x"]


def test_newer_versions_are_refused_with_both_numbers(tmp_path: Path) -> None:
    """ORT-08: IR version 99 and opset 99 name what was found and the highest supported."""
    supported = supported_versions()
    for proto, highest in (
        (hr_models.mean_color(ir_version=99), f"IR version 99 .* {supported.ir_version} is the highest"),
        (hr_models.mean_color(opset=99), f"opset 99 .* {supported.opset} is the highest"),
    ):
        path = hr_models.write(tmp_path, proto)

        with pytest.raises(ModelError, match=highest):
            read_model(str(path))


def test_supported_versions_are_the_runtime_s_own(tmp_path: Path) -> None:
    """The limits found by asking are real: a model at the limit opens, one beyond is refused."""
    supported = supported_versions()
    path = hr_models.write(tmp_path, hr_models.mean_color_uint8())
    proto = onnx.load(str(path))
    proto.ir_version = supported.ir_version
    hr_models.write(tmp_path, proto)

    session = open_session(read_model(str(path)), onnxruntime.SessionOptions())

    assert supported.runtime == onnxruntime.__version__
    assert session.get_inputs()[0].name == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "the file is empty", id="ORT-08-empty"),
        pytest.param(b"model: resnet50\nformat: onnx\n", "it is a text of 29 bytes", id="ORT-08-text"),
        pytest.param(b"\x08\x07", "no graph in it", id="no-graph"),
        pytest.param(bytes(range(256)) * 8, "not an ONNX model", id="noise"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """The error says what the file looks like, and which it is."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=message) as caught:
        read_model(str(path))

    assert "broken.onnx" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The path and the system's reason are named."""
    with pytest.raises(ModelError, match=r"gone\.onnx: No such file"):
        read_model(str(tmp_path / "gone.onnx"))


@pytest.mark.parametrize("folder", ["", "deep/er", "/"])
def test_external_weights_load_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """ORT-09: where the process stands makes no difference."""
    path = hr_models.write_with_weights(tmp_path / "model", hr_models.matrix_multiply(8))
    standing = tmp_path / folder
    standing.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(standing)

    session = open_session(read_model(str(path)), onnxruntime.SessionOptions())

    (output,) = session.run(None, {"x": np.ones((1, 3), np.float32)})
    np.testing.assert_array_equal(output[0], [24, 27, 30, 33, 36, 39, 42, 45])


@pytest.mark.parametrize("prefix", ["", "export/v1/"])
def test_external_weights_load_from_a_cache_of_hashed_names(tmp_path: Path, prefix: str) -> None:
    """A worker that fetched a model keeps its files under their hashes; the graph's own names still work."""
    path = hr_models.write_with_weights(tmp_path / "model", hr_models.matrix_multiply(8))
    graph = hr_models.model_file(path, f"{prefix}model.onnx")
    weights = hr_models.model_file(tmp_path / "model/data/weights.bin", f"{prefix}data/weights.bin")
    files = {}
    for number, (file, source) in enumerate(((graph, path), (weights, path.parent / "data/weights.bin"))):
        cached = tmp_path / "cache" / str(number) / file.sha256
        cached.parent.mkdir(parents=True)
        source.rename(cached)
        files[file.path] = str(cached)
    engine = CpuEngine()

    engine.load(ModelSpec("m", "1", files=(graph, weights)), files)

    assert engine.profile(ModelKey("m", "1")).inputs[0].name == "x"


def test_weights_beyond_two_gigabytes_are_reached(tmp_path: Path) -> None:
    """ORT-09: one protobuf message ends there, and so do 32-bit offsets. All but the file's end is a hole."""
    begin = 5 * 2**29
    values = np.arange(6, dtype=np.float32)
    with (tmp_path / "weights.bin").open("wb") as file:
        file.seek(begin)
        file.write(values.tobytes())
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[6], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", begin), ("length", values.nbytes)):
        weights.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "far",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    session = open_session(read_model(str(hr_models.write(tmp_path, model))), onnxruntime.SessionOptions())

    (output,) = session.run(None, {"x": np.ones((1, 6), np.float32)})
    np.testing.assert_array_equal(output[0], values + 1)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """ORT-09: the error names the file that is not there, and an empty one too."""
    path = hr_models.write_with_weights(tmp_path, hr_models.matrix_multiply(8))
    weights = tmp_path / "data/weights.bin"

    weights.write_bytes(b"")
    with pytest.raises(ModelError, match=r"empty: data/weights\.bin"):
        read_model(str(path))
    weights.unlink()
    with pytest.raises(ModelError, match=r"missing: data/weights\.bin"):
        read_model(str(path))


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret.bin", "a/../../secret.bin", "..\\secret.bin"])
def test_weights_outside_the_model_s_folder_are_refused(tmp_path: Path, location: str) -> None:
    """A model file is no way to read other files of the machine."""
    path = hr_models.write_with_weights(tmp_path / "model", hr_models.matrix_multiply(8))
    proto = onnx.load(str(path), load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    (tmp_path / "secret.bin").write_bytes(bytes(1000))
    path.write_bytes(proto.SerializeToString())

    with pytest.raises(ModelError, match="outside the model's folder"):
        read_model(str(path))


def test_an_unsupported_element_type_is_named(tmp_path: Path) -> None:
    """Strings can't travel as frames: the input and its type are named."""
    proto = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["s"], ["t"])],
            "g",
            [helper.make_tensor_value_info("s", TensorProto.STRING, ["n"])],
            [helper.make_tensor_value_info("t", TensorProto.STRING, ["n"])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )

    with pytest.raises(ModelError, match="s has element type STRING"):
        read_model(str(hr_models.write(tmp_path, proto)))


def test_a_graph_that_the_runtime_refuses_names_the_model(tmp_path: Path) -> None:
    """An operator that nobody has is an error of the model, not a crash."""
    proto = hr_models.mean_color()
    proto.graph.node[0].op_type = "NoSuchOperator"
    model = read_model(str(hr_models.write(tmp_path, proto)), label="m:1")

    with pytest.raises(ModelError, match=r"m:1.*ONNX Runtime.*refuses"):
        open_session(model, onnxruntime.SessionOptions())
