"""The models of the benchmarks: a mean, and a ResNet-50 whose batched rows equal single rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SEED = 20_240_501


def write_mean(folder: Path) -> Path:
    """Write W1's model: the mean of each frame, uint8 [n, h, w, 3] -> float32 [n, 1]."""
    nodes = [
        helper.make_node("Cast", ["frames"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels"], ["each"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Unsqueeze", ["each", "axis"], ["mean"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info("frames", TensorProto.UINT8, ["n", "h", "w", 3])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["n", 1])],
        [numpy_helper.from_array(np.array([1], dtype=np.int64), "axis")],
    )
    return _write(folder / "mean.onnx", graph, opset=17)


def write_resnet50(folder: Path) -> Path:
    """Write W2's model: the ResNet-50 of the onnx package's own tests with an open batch axis.

    The package ships it with constant weights, so that every input gives the same answer; here the weights
    are seeded random values (scaled by fan-in, so that activations stay finite) stored in the file. Its
    Reshape fixes one row; here it keeps the batch axis.
    """
    source = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
    model = onnx.load(str(source))
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    rng = np.random.default_rng(SEED)
    nodes, weights = [], []
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shape = tuple(numpy_helper.to_array(constants.pop(node.input[0])).tolist())
            weights.append(numpy_helper.from_array(_weight(rng, node.output[0], shape), node.output[0]))
        else:
            nodes.append(node)
    reshape = next(node for node in nodes if node.op_type == "Reshape")
    constants[reshape.input[1]] = numpy_helper.from_array(np.array([0, -1], dtype=np.int64), reshape.input[1])
    used = {name for node in nodes for name in node.input}
    data, output = graph.input[0].name, graph.output[0].name
    opened = helper.make_graph(
        nodes,
        "resnet50",
        [helper.make_tensor_value_info(data, TensorProto.FLOAT, ["n", 3, 224, 224])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", 1000])],
        [tensor for tensor in (*constants.values(), *weights) if tensor.name in used],
    )
    return _write(folder / "resnet50.onnx", opened, opset=9)


def session(path: Path, threads: int) -> Any:
    """Return an ONNX Runtime session with so many threads, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) > 1:
        fan_in = int(np.prod(shape[1:]))
        return rng.normal(0.0, (1.0 / fan_in) ** 0.5, shape).astype(np.float32)
    # Batch normalisation: variances and scales are positive, means and biases are zero.
    is_scale = name.endswith(("_riv_0", "_bn_s_0"))
    return np.full(shape, 1.0 if is_scale else 0.0, dtype=np.float32)


def _write(path: Path, graph: onnx.GraphProto, opset: int) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path
