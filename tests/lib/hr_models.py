"""Small ONNX models for tests, each with one known behaviour, written to a folder of the test.

Every builder returns the graph as a ModelProto; ``save`` writes it and gives the ModelSpec and the files map
that an engine's ``load`` takes. Image models take float32 [batch, channels, height, width] unless said
otherwise, and their answer is the mean of each channel, so the right output of a frame is plain numpy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from headrace.protocol.messages import (
    EmulatedCost,
    ImageInput,
    ModelFile,
    ModelSpec,
    SizeClassSpec,
)

OPSET = 17
IR_VERSION = 8

#: A row whose first value is this makes ``failing_on_mark`` fail (the staged pixel, before scaling).
MARK = 251


def _value(name: str, shape: list[int | str | None] | None, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _constant(name: str, values: NDArray[Any]) -> onnx.TensorProto:
    return numpy_helper.from_array(values, name)


def _model(
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[Any],
    constants: list[Any] | None = None,
    *,
    opset: int = OPSET,
    ir_version: int = IR_VERSION,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "test", inputs, outputs, constants or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def mean_color(
    batch: int | str = "n",
    height: int | str = "h",
    width: int | str = "w",
    channels: int | str = 3,
    *,
    opset: int = OPSET,
    ir_version: int = IR_VERSION,
) -> onnx.ModelProto:
    """Mean of each channel: x float32 [n, 3, h, w] -> mean [n, 3]. The usual honest model."""
    return _model(
        [helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0)],
        [_value("x", [batch, channels, height, width])],
        [_value("mean", [batch, channels])],
        opset=opset,
        ir_version=ir_version,
    )


def mean_color_plus(bias: float) -> onnx.ModelProto:
    """The mean of each channel and a constant: another version of ``mean_color``."""
    return _model(
        [
            helper.make_node("ReduceMean", ["x"], ["plain"], axes=[2, 3], keepdims=0),
            helper.make_node("Add", ["plain", "bias"], ["mean"]),
        ],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("mean", ["n", 3])],
        [_constant("bias", np.array([bias], np.float32))],
    )


def mean_color_nhwc() -> onnx.ModelProto:
    """Mean of each channel of float32 [n, h, w, 3]."""
    return _model(
        [helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1, 2], keepdims=0)],
        [_value("x", ["n", "h", "w", 3])],
        [_value("mean", ["n", 3])],
    )


def mean_color_uint8(layout: str = "nhwc") -> onnx.ModelProto:
    """Mean of each channel of a uint8 input in either layout: needs no arithmetic before it."""
    shape: list[int | str | None] = ["n", "h", "w", 3] if layout == "nhwc" else ["n", 3, "h", "w"]
    axes = [1, 2] if layout == "nhwc" else [2, 3]
    return _model(
        [
            helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["float"], ["mean"], axes=axes, keepdims=0),
        ],
        [_value("x", shape, TensorProto.UINT8)],
        [_value("mean", ["n", 3])],
    )


def probability_map() -> onnx.ModelProto:
    """The mean over channels as a map [n, 1, h, w], as a text detector's output looks."""
    return _model(
        [helper.make_node("ReduceMean", ["x"], ["map"], axes=[1], keepdims=1)],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("map", ["n", 1, "h", "w"])],
    )


def pixels() -> onnx.ModelProto:
    """Every pixel as the model saw it: x float32 [n, 3, h, w] -> pixels, the same."""
    return _model(
        [helper.make_node("Identity", ["x"], ["pixels"])],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("pixels", ["n", 3, "h", "w"])],
    )


def tensor_as_it_is(length: int = 4, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A plain tensor model that gives back what it was given: x [n, length] -> same."""
    return _model(
        [helper.make_node("Identity", ["x"], ["same"])],
        [_value("x", ["n", length], kind)],
        [_value("same", ["n", length], kind)],
    )


def row_mixing() -> onnx.ModelProto:
    """A bad model: each row of a batch is shifted by the mean over the batch."""
    return _model(
        [
            helper.make_node("ReduceMean", ["x"], ["own"], axes=[2, 3], keepdims=0),
            helper.make_node("ReduceMean", ["own"], ["all"], axes=[0], keepdims=1),
            helper.make_node("Add", ["own", "all"], ["mean"]),
        ],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("mean", ["n", 3])],
    )


def first_row_only(batch: int | str = "n") -> onnx.ModelProto:
    """A bad model: every row gets the answer of the first row."""
    return _model(
        [
            helper.make_node("ReduceMean", ["x"], ["own"], axes=[2, 3], keepdims=0),
            helper.make_node("Slice", ["own", "zero", "one", "zero"], ["first"]),
            helper.make_node("Mul", ["own", "nothing"], ["empty"]),
            helper.make_node("Add", ["empty", "first"], ["mean"]),
        ],
        [_value("x", [batch, 3, "h", "w"])],
        [_value("mean", [batch, 3])],
        [
            _constant("zero", np.array([0], dtype=np.int64)),
            _constant("one", np.array([1], dtype=np.int64)),
            _constant("nothing", np.array([0.0], dtype=np.float32)),
        ],
    )


def constant_output() -> onnx.ModelProto:
    """A bad model: 1.0, 2.0, 3.0 whatever the input is."""
    return _model(
        [
            helper.make_node("ReduceMean", ["x"], ["own"], axes=[2, 3], keepdims=0),
            helper.make_node("Mul", ["own", "nothing"], ["empty"]),
            helper.make_node("Add", ["empty", "answer"], ["mean"]),
        ],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("mean", ["n", 3])],
        [
            _constant("nothing", np.array([0.0], dtype=np.float32)),
            _constant("answer", np.array([1.0, 2.0, 3.0], dtype=np.float32)),
        ],
    )


def hidden_batch_of_one(channels: int = 3) -> onnx.ModelProto:
    """Says its batch is dynamic, but a Reshape inside has the exporter's 1 in it: a batch of two fails."""
    return _model(
        [
            helper.make_node("ReduceMean", ["x"], ["own"], axes=[2, 3], keepdims=0),
            helper.make_node("Reshape", ["own", "shape"], ["mean"]),
        ],
        [_value("x", ["n", channels, "h", "w"])],
        [_value("mean", ["n", channels])],
        [_constant("shape", np.array([1, channels], dtype=np.int64))],
    )


def built_in_nms() -> onnx.ModelProto:
    """One list for the whole batch: rows [image index, channel, y, x] of every non-zero value."""
    return _model(
        [
            helper.make_node("NonZero", ["x"], ["indexes"]),
            helper.make_node("Transpose", ["indexes"], ["boxes"], perm=[1, 0]),
        ],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("boxes", ["found", 4], TensorProto.INT64)],
    )


def scalar_output() -> onnx.ModelProto:
    """One number for the whole batch."""
    return _model(
        [helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0, 1, 2, 3], keepdims=0)],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("mean", [])],
    )


def failing_on_mark() -> onnx.ModelProto:
    """``mean_color`` that fails when a row of the batch begins with MARK (scale 1): a Gather out of range.

    The index of each row is 0 unless its first value is MARK, then 1000 in a table of one entry.
    """
    return _model(
        [
            helper.make_node("Slice", ["x", "zeros", "ones", "axes"], ["corner"]),
            helper.make_node("Reshape", ["corner", "flat"], ["value"]),
            helper.make_node("Equal", ["value", "mark"], ["is_marked"]),
            helper.make_node("Cast", ["is_marked"], ["marked"], to=TensorProto.INT64),
            helper.make_node("Mul", ["marked", "thousand"], ["index"]),
            helper.make_node("Gather", ["table", "index"], ["zero"]),
            helper.make_node("Unsqueeze", ["zero", "last"], ["zero_column"]),
            helper.make_node("ReduceMean", ["x"], ["own"], axes=[2, 3], keepdims=0),
            helper.make_node("Add", ["own", "zero_column"], ["mean"]),
        ],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("mean", ["n", 3])],
        [
            _constant("zeros", np.array([0, 0, 0], dtype=np.int64)),
            _constant("ones", np.array([1, 1, 1], dtype=np.int64)),
            _constant("axes", np.array([1, 2, 3], dtype=np.int64)),
            _constant("flat", np.array([-1], dtype=np.int64)),
            _constant("mark", np.array([MARK], dtype=np.float32)),
            _constant("thousand", np.array([1000], dtype=np.int64)),
            _constant("table", np.array([0.0], dtype=np.float32)),
            _constant("last", np.array([1], dtype=np.int64)),
        ],
    )


def multiples_of(step: int) -> onnx.ModelProto:
    """``mean_color`` that runs only at heights and widths that ``step`` divides (a Reshape in cells)."""
    return _model(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Slice", ["shape", "two", "four"], ["sides"]),
            helper.make_node("Div", ["sides", "step"], ["cells"]),
            helper.make_node("Mul", ["cells", "step"], ["whole"]),
            helper.make_node("Slice", ["shape", "zero", "two"], ["head"]),
            helper.make_node("Concat", ["head", "whole"], ["cut"], axis=0),
            helper.make_node("Reshape", ["x", "cut"], ["same"]),
            helper.make_node("ReduceMean", ["same"], ["mean"], axes=[2, 3], keepdims=0),
        ],
        [_value("x", ["n", 3, "h", "w"])],
        [_value("mean", ["n", 3])],
        [
            _constant("zero", np.array([0], dtype=np.int64)),
            _constant("two", np.array([2], dtype=np.int64)),
            _constant("four", np.array([4], dtype=np.int64)),
            _constant("step", np.array([step], dtype=np.int64)),
        ],
    )


def tensor_sum(length: int | str = 4, batch: int | str = "n") -> onnx.ModelProto:
    """A plain tensor model: x float32 [n, length] -> sum [n]."""
    return _model(
        [helper.make_node("ReduceSum", ["x", "axis"], ["sum"], keepdims=0)],
        [_value("x", [batch, length])],
        [_value("sum", [batch])],
        [_constant("axis", np.array([1], dtype=np.int64))],
    )


def several_inputs() -> onnx.ModelProto:
    """Three tensor inputs: (values [n, 4] * scale [n, 1]) + size [n, 2] summed -> result [n, 4]."""
    return _model(
        [
            helper.make_node("Mul", ["values", "scale"], ["scaled"]),
            helper.make_node("ReduceSum", ["size", "axis"], ["area"], keepdims=1),
            helper.make_node("Cast", ["area"], ["offset"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["scaled", "offset"], ["result"]),
        ],
        [
            _value("values", ["n", 4]),
            _value("scale", ["n", 1]),
            _value("size", ["n", 2], TensorProto.INT64),
        ],
        [_value("result", ["n", 4])],
        [_constant("axis", np.array([1], dtype=np.int64))],
    )


def image_and_scale(scale_batch: int | str = "n", batch: int | str = "n") -> onnx.ModelProto:
    """An image input and a plain one: mean of each channel [n, 3] times scale [n, 1]."""
    return _model(
        [
            helper.make_node("ReduceMean", ["image"], ["own"], axes=[2, 3], keepdims=0),
            helper.make_node("Mul", ["own", "scale"], ["mean"]),
        ],
        [_value("image", [batch, 3, "h", "w"]), _value("scale", [scale_batch, 1])],
        [_value("mean", [batch, 3])],
    )


def without_batch() -> onnx.ModelProto:
    """Inputs that share no first axis: vector [3] times factor (no axes) -> result [3]."""
    return _model(
        [helper.make_node("Mul", ["vector", "factor"], ["result"])],
        [_value("vector", [3]), _value("factor", [])],
        [_value("result", [3])],
    )


def vector_scaled(length: int) -> onnx.ModelProto:
    """A vector in, a vector out, no batch axis: x [length] -> y [length], doubled."""
    return _model(
        [helper.make_node("Add", ["x", "x"], ["y"])], [_value("x", [length])], [_value("y", [length])]
    )


def open_length_in_steps(step: int = 16) -> onnx.ModelProto:
    """A tensor model whose open axis must be a multiple of ``step``: x [n, length] -> sum [n]."""
    return _model(
        [
            helper.make_node("Reshape", ["x", "shape"], ["cells"]),
            helper.make_node("ReduceSum", ["cells", "axes"], ["sum"], keepdims=0),
        ],
        [_value("x", ["n", "length"])],
        [_value("sum", ["n"])],
        [
            _constant("shape", np.array([0, -1, step], dtype=np.int64)),
            _constant("axes", np.array([1, 2], dtype=np.int64)),
        ],
    )


def without_inputs() -> onnx.ModelProto:
    """A graph that takes nothing."""
    return _model(
        [helper.make_node("Identity", ["constant"], ["y"])],
        [],
        [_value("y", [1])],
        [_constant("constant", np.zeros(1, np.float32))],
    )


def unknown_rank() -> onnx.ModelProto:
    """A graph whose input does not even say how many axes it has."""
    return _model([helper.make_node("Identity", ["x"], ["y"])], [_value("x", None)], [_value("y", None)])


def matrix_multiply(size: int = 512) -> onnx.ModelProto:
    """x [n, 3] times a large weight [3, size]: a model whose weights can live in a second file."""
    weight = np.arange(3 * size, dtype=np.float32).reshape(3, size)
    return _model(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        [_value("x", ["n", 3])],
        [_value("y", ["n", size])],
        [_constant("weight", weight)],
    )


def write(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    """Write a graph and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def write_with_weights(folder: Path, model: onnx.ModelProto, weights: str = "data/weights.bin") -> Path:
    """Write a graph whose weights stand in a second file, ``weights`` relative to the graph."""
    path = folder / "model.onnx"
    (folder / weights).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path), save_as_external_data=True, location=weights, size_threshold=0)
    return path


def model_file(path: Path, name: str = "") -> ModelFile:
    """Return the ModelFile of a file on disk, under ``name`` (default: its own)."""
    content = path.read_bytes()
    return ModelFile(name or path.name, hashlib.sha256(content).hexdigest(), len(content))


def save(folder: Path, model: onnx.ModelProto, **fields: Any) -> tuple[ModelSpec, dict[str, str]]:
    """Write a graph and return its ModelSpec (name "m", version "1" unless given) and the files map."""
    path = write(folder, model)
    fields = {"name": "m", "version": "1", **fields}
    return ModelSpec(files=(model_file(path),), **fields), {path.name: str(path)}


def image_spec(
    folder: Path, model: onnx.ModelProto, *classes: SizeClassSpec, **fields: Any
) -> tuple[ModelSpec, dict[str, str]]:
    """``save`` for an image model: pixels unscaled, one 32x48 class with batches to 4 unless given."""
    fields = {"image": ImageInput(), **fields}
    return save(folder, model, size_classes=classes or (SizeClassSpec("small", 32, 48, 4),), **fields)


def emulated_spec(
    *classes: SizeClassSpec, base_ms: float = 1.0, per_frame_ms: float = 0.5, **fields: Any
) -> ModelSpec:
    """Return a ModelSpec that the emulated engine serves."""
    fields = {"name": "m", "version": "1", "image": ImageInput(), **fields}
    return ModelSpec(
        size_classes=classes or (SizeClassSpec("small", 32, 48, 4),),
        emulated=EmulatedCost(base_ms, per_frame_ms),
        **fields,
    )
