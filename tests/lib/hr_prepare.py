"""Models to prepare: small ones with one known trouble, and those that the onnx package ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SEED = 20_241_201

#: Input and output of the chains below.
WIDTH = 4


def constant(name: str, values: Any, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=dtype), name)


def graph(
    nodes: list[onnx.NodeProto],
    constants: list[onnx.TensorProto],
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
) -> onnx.ModelProto:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        constants,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chain(*steps: tuple[str, str, float | None], tail: int = 0, batch: int | str = "n") -> onnx.ModelProto:
    """A chain over x [batch, 4] of (op, node name, constant or None), then ``tail`` times Relu."""
    nodes, constants, value = [], [], "x"
    steps = (*steps, *(("Relu", f"tail{i}", None) for i in range(tail)))
    for number, (op, name, factor) in enumerate(steps):
        following = "y" if number == len(steps) - 1 else f"v{number}"
        inputs = [value]
        if factor is not None:
            constants.append(constant(f"c{number}", factor))
            inputs.append(f"c{number}")
        nodes.append(helper.make_node(op, inputs, [following], name=name))
        value = following
    return graph(nodes, constants, {"x": [batch, WIDTH]}, {"y": [batch, WIDTH]})


def repairable() -> onnx.ModelProto:
    """Values of 300 000 between two nodes, small ones before and after."""
    steps = (("Mul", "grow", 60_000.0), ("Mul", "more", 5.0), ("Mul", "shrink", 1e-6))
    return chain(*steps, tail=6)


def beyond_repair() -> onnx.ModelProto:
    """Values of 300 000 all the way to the output."""
    return chain(("Mul", "grow", 300_000.0), tail=6)


def small_net(
    batch: int | str = 1, size: int | str = 16, classes: int = 10, *, has_reshape: bool = True
) -> onnx.ModelProto:
    """A convolutional classifier: x [batch, 3, size, size] -> logits [batch, classes], seeded weights.

    With a fixed batch its Reshape names it, as exporters write it.
    """
    rng = np.random.default_rng(SEED)
    weights = [
        constant("w1", rng.normal(0, 0.3, (8, 3, 3, 3))),
        constant("w2", rng.normal(0, 0.2, (16, 8, 3, 3))),
        constant("w3", rng.normal(0, 0.4, (16, classes))),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], name="pool"),
    ]
    if has_reshape:
        weights.append(constant("shape", [batch if isinstance(batch, int) else -1, 16], np.int64))
        nodes.append(helper.make_node("Reshape", ["d", "shape"], ["e"], name="flat"))
    else:
        nodes.append(helper.make_node("Flatten", ["d"], ["e"], name="flat"))
    nodes.append(helper.make_node("MatMul", ["e", "w3"], ["logits"], name="head"))
    return graph(nodes, weights, {"x": [batch, 3, size, size]}, {"logits": [batch, classes]})


def two_inputs(batch: int | str = 1) -> onnx.ModelProto:
    """An image [batch, 3, 8, 8] and a vector [batch, 3] that is added to its mean."""
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["mean"], name="mean", axes=[2, 3], keepdims=0),
        helper.make_node("Add", ["mean", "bias"], ["y"], name="add"),
    ]
    return graph(nodes, [], {"image": [batch, 3, 8, 8], "bias": [batch, 3]}, {"y": [batch, 3]})


def write(model: onnx.ModelProto, path: Path, *, is_external: bool = False) -> Path:
    """Write a model; its weights, if ``is_external``, into a file of their own beside it."""
    if is_external:
        options = {"save_as_external_data": True, "location": f"{path.stem}.data", "size_threshold": 0}
        onnx.save_model(model, str(path), **options)
    else:
        path.write_bytes(model.SerializeToString())
    return path


def write_shipped(name: str, path: Path) -> Path:
    """Write a model that the onnx package ships for its own tests, ``light_NAME.onnx``.

    It ships them with constant weights, so that every input gives the same answer; here they are seeded
    random values, scaled by fan-in so that activations neither vanish nor grow. A softmax at its end is left
    out: of random scores it makes one and zeros.
    """
    model = onnx.load(str(Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx"))
    rng = np.random.default_rng(SEED)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.dims and t.dims[0] <= 8}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
            continue
        value = node.output[0]
        reader = next(n for n in model.graph.node if value in n.input)
        if reader.op_type == "Unsqueeze":
            value = reader.output[0]
            reader = next(n for n in model.graph.node if value in n.input)
        place = list(reader.input).index(value)
        values = _weight(rng, reader.op_type, place, tuple(shapes[node.input[0]].tolist()))
        model.graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
    if nodes[-1].op_type == "Softmax":
        scores = nodes.pop().input[0]
        maker = next(node for node in nodes if scores in node.output)
        maker.output[0] = model.graph.output[0].name
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return write(model, path)


def _weight(rng: np.random.Generator, op: str, place: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if op == "BatchNormalization":  # scale and variance are one, bias and mean zero
        return np.full(shape, 1.0 if place in (1, 4) else 0.0, dtype=np.float32)
    if len(shape) > 1:
        return rng.normal(0.0, (1.0 / np.prod(shape[1:])) ** 0.5, shape).astype(np.float32)
    return np.full(shape, 1.0 if op == "Mul" else 0.0, dtype=np.float32)
