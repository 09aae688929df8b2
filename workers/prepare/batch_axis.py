"""Opens the batch axis of a graph, and proves that rows of a batch equal the same rows alone.

A file exported for one image fixes 1 in its inputs, its outputs and the constants of its Reshape nodes. All
three are opened here. Whether that was right is not argued but run: a graph that mixes rows, or whose
outputs are not one row for each input row (WongKinYiu/yolov7#425), is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from headrace.workers.onnx_model import OnnxModel, OnnxTensor, first_line, open_session
from headrace.workers.prepare.graph import is_float, tensor_types
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

if TYPE_CHECKING:
    import onnxruntime

#: Rows of the proof. Three: a graph that only reverses or repeats its rows shows it.
PROOF_ROWS = 3

#: Name of the open axis in every prepared file.
BATCH_AXIS = "batch"

#: These look at a tensor's shape alone: what follows them does not move with the values.
_SHAPE_ONLY = frozenset({"Shape", "Size"})

Array = NDArray[np.generic]
Feed = dict[str, Array]


def open_batch_axis(model: OnnxModel) -> OnnxModel:
    """Return ``model`` with a symbolic first axis of every input and output.

    Raises PrepareRefusedError for control flow, and for inputs without a first axis or with different ones.
    """
    _check_batchable(model)
    first_axis = (model.inputs[0].shape or (0,))[0]
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    if first_axis > 0:
        shapes = {t.name: t.shape for t in (*model.inputs, *tensor_types(model).values())}
        _open_reshapes(proto.graph, first_axis, {t.name for t in model.inputs}, shapes)
    fed = {tensor.name for tensor in model.inputs}
    for info in [*(i for i in proto.graph.input if i.name in fed), *proto.graph.output]:
        if info.type.tensor_type.shape.dim:
            info.type.tensor_type.shape.dim[0].dim_param = BATCH_AXIS
    del proto.graph.value_info[:]  # shapes for the old batch
    opened = tuple(_opened(tensor) for tensor in model.inputs)
    return replace(model, proto=proto, inputs=opened, outputs=tuple(_opened(t) for t in model.outputs))


def prove_rows(model: OnnxModel, feed: Feed, tolerance: float) -> float:
    """Run the rows of ``feed`` together and one by one; return the largest difference relative to the output.

    Raises PrepareRefusedError when an output can't be split by rows, when values are not finite, or when a
    row differs by more than ``tolerance``.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = open_session(model, options)
    rows = len(next(iter(feed.values())))
    alone = [_run(model, session, {k: v[n : n + 1] for k, v in feed.items()}) for n in range(rows)]
    together = _run(model, session, feed)
    worst = 0.0
    for number, output in enumerate(model.outputs):
        found, parts = together[number], [each[number] for each in alone]
        if found.ndim == 0 or len(found) != rows or any(part.ndim == 0 or len(part) != 1 for part in parts):
            raise PrepareRefusedError(
                Reason.ROWS_NOT_SPLIT,
                f"model {model.label}: output {output.name} is {list(found.shape)} for {rows} rows: it can't"
                " be split by rows, so the model can't be batched; served as it is, without prepare, it runs"
                " in batches of one",
            )
        worst = max(worst, _row_difference(model, output.name, parts, found, tolerance))
    return worst


def relative_difference(expected: Array, found: Array) -> float:
    """Return the largest difference over the largest expected magnitude; inf where not comparable."""
    if expected.shape != found.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    wide, other = expected.astype(np.float64), found.astype(np.float64)
    if not (np.isfinite(wide).all() and np.isfinite(other).all()):
        return float("inf")
    return float(np.abs(wide - other).max() / max(float(np.abs(wide).max()), 1e-12))


def _check_batchable(model: OnnxModel) -> None:
    for node in model.proto.graph.node:
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            raise PrepareRefusedError(
                Reason.CONTROL_FLOW,
                f"model {model.label}: node {node.name or node.output[0]} is {node.op_type}: a graph with"
                " control flow can't be batched, because it takes one way for all rows; export the model"
                " without it",
            )
    for tensor in model.inputs:
        if not tensor.shape:
            raise PrepareRefusedError(
                Reason.NO_BATCH_AXIS, f"model {model.label}: input {tensor.name} has no axis to batch along"
            )
    if len({tensor.shape[0] for tensor in model.inputs if tensor.shape}) > 1:
        shapes = ", ".join(f"{t.name} {list(t.shape or ())}" for t in model.inputs)
        raise PrepareRefusedError(
            Reason.BATCH_AXES_DIFFER,
            f"model {model.label}: its inputs differ in their first axis ({shapes}): no common batch axis",
        )


def _row_difference(model: OnnxModel, name: str, parts: list[Array], found: Array, tolerance: float) -> float:
    if any(part.shape[1:] != found.shape[1:] for part in parts):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise PrepareRefusedError(
            Reason.ROWS_NOT_SPLIT,
            f"model {model.label}: output {name} is {list(found.shape)} for {len(parts)} rows and {shapes}"
            " for each alone: the length of a row depends on its neighbours, so the model can't be batched",
        )
    expected = np.concatenate(parts)
    if is_float(expected.dtype) and not (np.isfinite(expected).all() and np.isfinite(found).all()):
        raise PrepareRefusedError(
            Reason.NOT_FINITE, f"model {model.label}: output {name} is not finite for the test input"
        )
    difference = relative_difference(expected, found)
    if not difference <= tolerance:
        raise PrepareRefusedError(
            Reason.ROWS_MIXED,
            f"model {model.label}: rows of a batch differ from the same rows alone by {difference:.2g} in"
            f" output {name}: the model mixes the rows of a batch",
        )
    return difference


def _run(model: OnnxModel, session: onnxruntime.InferenceSession, feed: Feed) -> list[Array]:
    try:
        return [np.asarray(value) for value in session.run(None, feed)]
    except Exception as error:  # ONNX Runtime has no public root of its error classes
        rows = len(next(iter(feed.values())))
        raise PrepareRefusedError(
            Reason.CANNOT_RUN, f"model {model.label}: can't run {rows} rows together: {first_line(error)}"
        ) from error


def _opened(tensor: OnnxTensor) -> OnnxTensor:
    return replace(tensor, shape=(-1, *tensor.shape[1:])) if tensor.shape else tensor


def _open_reshapes(
    graph: onnx.GraphProto,
    old_batch: int,
    inputs: set[str],
    shapes: dict[str, tuple[int, ...] | None],
) -> None:
    """Let the first axis of each Reshape to a constant shape follow the batch.

    0 copies the input's first axis, where both were the old batch; -1 is what the other axes leave over,
    where the batch was multiplied into the first one ([heads * batch, ...]) and no other axis is open.
    Constants that are reshaped stay as they are.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    moving = set(inputs)
    for number, node in enumerate(graph.node):
        if node.op_type not in _SHAPE_ONLY and any(name in moving for name in node.input):
            moving.update(node.output)
        if node.op_type != "Reshape" or len(node.input) < 2 or node.input[0] not in moving:
            continue
        constant = constants.get(node.input[1])
        shape = numpy_helper.to_array(constant).tolist() if constant is not None else []
        if not shape or any(a.name == "allowzero" and a.i for a in node.attribute):
            continue
        came = shapes.get(node.input[0])
        if shape[0] == old_batch and came and came[0] == old_batch:
            first = 0
        elif shape[0] > 0 and -1 not in shape:
            first = -1
        else:
            continue
        # A new constant: the old one may serve other nodes, too.
        name = f"{node.input[1]}_batch_{number}"
        opened = [first, *(int(length) for length in shape[1:])]
        graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [len(opened)], opened))
        node.input[1] = name
