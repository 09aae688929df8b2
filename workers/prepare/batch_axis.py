"""Opens the batch axis of a graph, and proves that rows of a batch equal the same rows alone.

A file exported for one image fixes 1 in its inputs, its outputs and the constants of its Reshape nodes. All
three are opened here. Whether that was right is not argued but run: a graph that mixes rows, or whose
outputs are not one row for each input row (WongKinYiu/yolov7#425), is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from headrace.errors import ModelError
from headrace.workers.onnx_model import OnnxModel, open_session

#: Rows of the proof. Three: a graph that only reverses or repeats its rows shows it.
PROOF_ROWS = 3

Feed = dict[str, NDArray[np.generic]]


def open_batch_axis(model: OnnxModel) -> OnnxModel:
    """Return ``model`` with a symbolic first axis of every input and output.

    Raises ModelError for control flow, and for inputs without a first axis or with different ones.
    """
    for node in model.proto.graph.node:
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            raise ModelError(
                f"model {model.label}: node {node.name or node.output[0]} is {node.op_type}: a graph with"
                " control flow can't be batched, because it takes one way for all rows"
            )
    for tensor in model.inputs:
        if not tensor.shape:
            raise ModelError(f"model {model.label}: input {tensor.name} has no axis to batch along")
    if len({tensor.shape[0] for tensor in model.inputs if tensor.shape}) > 1:
        raise ModelError(f"model {model.label}: its inputs differ in their first axis: no common batch axis")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph, fed = proto.graph, {tensor.name for tensor in model.inputs}
    for info in [*(i for i in graph.input if i.name in fed), *graph.output]:
        if info.type.tensor_type.shape.dim:
            info.type.tensor_type.shape.dim[0].dim_param = "batch"
    del graph.value_info[:]  # shapes for the old batch
    first_axis = next(tensor.shape[0] for tensor in model.inputs if tensor.shape)
    if first_axis > 0:
        _open_reshapes(graph, first_axis)
    opened = tuple(replace(t, shape=(-1, *t.shape[1:]) if t.shape else t.shape) for t in model.inputs)
    outputs = tuple(replace(t, shape=(-1, *t.shape[1:]) if t.shape else t.shape) for t in model.outputs)
    return replace(model, proto=proto, inputs=opened, outputs=outputs)


def prove_rows(model: OnnxModel, feed: Feed, tolerance: float) -> float:
    """Run the rows of ``feed`` together and one by one; return the largest difference relative to the output.

    Raises ModelError when an output can't be split by rows, or when a row differs by more than ``tolerance``.
    """
    import onnxruntime

    session = open_session(model, onnxruntime.SessionOptions())
    rows = len(next(iter(feed.values())))
    worst = 0.0
    try:
        together = session.run(None, feed)
        alone = [session.run(None, {k: v[n : n + 1] for k, v in feed.items()}) for n in range(rows)]
    except Exception as error:  # ONNX Runtime has no public root of its error classes
        raise ModelError(f"model {model.label}: can't run {rows} rows together: {error}") from error
    for number, output in enumerate(model.outputs):
        found = np.asarray(together[number])
        parts = [np.asarray(each[number]) for each in alone]
        if found.ndim == 0 or len(found) != rows or any(len(part) != 1 for part in parts):
            raise ModelError(
                f"model {model.label}: output {output.name} is {list(found.shape)} for {rows} rows: it can't"
                " be split by rows, so the model can't be batched"
            )
        expected = np.concatenate(parts)
        difference = relative_difference(expected, found)
        if not difference <= tolerance:
            raise ModelError(
                f"model {model.label}: rows of a batch differ from the same rows alone by {difference:.2g} in"
                f" output {output.name}: the model mixes the rows of a batch"
            )
        worst = max(worst, difference)
    return worst


def relative_difference(expected: NDArray[np.generic], found: NDArray[np.generic]) -> float:
    """Return the largest difference over the largest expected magnitude; inf where not comparable."""
    if expected.shape != found.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    wide, other = expected.astype(np.float64), found.astype(np.float64)
    if not (np.isfinite(wide).all() and np.isfinite(other).all()):
        return float("inf")
    return float(np.abs(wide - other).max() / max(float(np.abs(wide).max()), 1e-12))


def _open_reshapes(graph: onnx.GraphProto, old_batch: int) -> None:
    """Let each Reshape to a constant shape that starts with the old batch copy its input's first axis (0)."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.dims}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    for number, node in enumerate(graph.node):
        if node.op_type != "Reshape" or len(node.input) < 2:
            continue
        shape = constants.get(node.input[1])
        if shape is None or not shape.size or shape[0] != old_batch:
            continue
        if any(a.name == "allowzero" and a.i for a in node.attribute):
            continue
        # A new constant: the old one may serve other nodes, too.
        name = f"{node.input[1]}_batch_{number}"
        opened = [0, *(int(length) for length in shape[1:])]
        graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [len(opened)], opened))
        node.input[1] = name
