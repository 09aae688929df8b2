"""What the steps of preparing share: reading a graph with its weights, tidying it, writing it, its types.

Files above 2 GB can't be one protobuf message: their weights go into a second file, and nothing here ever
serialises a graph together with weights beyond EXTERNAL_BYTES.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from headrace.workers.onnx_model import DYNAMIC, OnnxModel, OnnxTensor, first_line, open_session, read_model
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

#: Weights above this go into a file of their own: protobuf ends at 2 GiB, and the graph needs room as well.
EXTERNAL_BYTES = 1_900_000_000

#: Tensors up to this stay in the graph in any case: shapes and scales, which the steps must be able to read.
SMALL_BYTES = 1024

#: ONNX Runtime's words for types, as far as they matter here.
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
}


def read_source(path: Path) -> OnnxModel:
    """Read a model to be prepared and tidy it: functions inlined, constants as initializers, unique names.

    Weights in other files stay there, apart from small ones. Raises ModelError for what can't be read.
    """
    model = read_model(str(path))
    proto = model.proto
    if proto.functions:
        from onnx.inliner import inline_local_functions

        proto = inline_local_functions(proto)
    for tensor in proto.graph.initializer:
        if uses_external_data(tensor) and _nbytes(tensor) <= SMALL_BYTES:
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    _constants_to_initializers(proto.graph)
    _name_nodes(proto.graph)
    # Old files list initializers as inputs, so that a caller may override them: nobody does here, and a
    # converter would take them for inputs.
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs = [info for info in proto.graph.input if info.name not in initializers]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)
    return replace(model, proto=proto, ir_version=proto.ir_version)


def load_proto(path: Path) -> onnx.ModelProto:
    """Return the graph at ``path`` with all its weights in memory."""
    return onnx.load(str(path))


def weight_bytes(proto: onnx.ModelProto) -> int:
    """Return the bytes of all initializers, wherever they are."""
    return sum(_nbytes(tensor) for tensor in proto.graph.initializer)


def save(proto: onnx.ModelProto, path: Path, folder: Path | None = None) -> list[Path]:
    """Write a graph, its weights beside it when they are large; return the files, the graph first.

    ``folder`` is where external weights of ``proto`` lie now. The weights are taken out of ``proto``.
    Raises PrepareRefusedError when the result is no valid ONNX file.
    """
    if folder is not None:
        for tensor in proto.graph.initializer:
            if uses_external_data(tensor):
                load_external_data_for_tensor(tensor, str(folder))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
    read = {name for node in proto.graph.node for name in node.input}
    read |= {info.name for info in proto.graph.output}
    for number in reversed(range(len(proto.graph.initializer))):
        if proto.graph.initializer[number].name not in read:
            del proto.graph.initializer[number]
    files = [path]
    if weight_bytes(proto) > EXTERNAL_BYTES:
        weights = path.with_name(f"{path.name}.weights")
        weights.unlink(missing_ok=True)  # onnx appends
        onnx.save_model(
            proto,
            str(path),
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=weights.name,
            size_threshold=SMALL_BYTES,
        )
        files.append(weights)
    else:
        path.write_bytes(proto.SerializeToString())
    try:
        # By path: the checker, too, can't take more than 2 GB in memory.
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise PrepareRefusedError(
            Reason.CANNOT_RUN, f"{path.name}: the result is no valid ONNX graph: {first_line(error)}"
        ) from error
    return files


def tensor_types(model: OnnxModel) -> dict[str, OnnxTensor]:
    """Return what ONNX Runtime infers of every tensor that nodes give: more than onnx can, which knows no
    nodes of other domains, and at any size of the weights.

    Only tensors; ``dtype`` is ONNX Runtime's own word where it is no float.
    """
    import onnxruntime

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    known = {info.name for info in proto.graph.output}
    for node in proto.graph.node:
        for name in node.output:
            if name and name not in known:
                known.add(name)
                proto.graph.output.append(onnx.ValueInfoProto(name=name))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(replace(model, proto=proto), options)
    return {
        o.name: OnnxTensor(o.name, _TYPES.get(o.type, o.type), _shape(o.shape)) for o in session.get_outputs()
    }


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Tell whether values of this type may be infinite."""
    return dtype.kind == "f"


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put the nodes in an order in which each stands after those it reads from, as ONNX asks for."""
    made = {name: number for number, node in enumerate(graph.node) for name in node.output if name}
    nodes = list(graph.node)
    placed: set[int] = set()
    order: list[int] = []
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            number = stack[-1]
            needed = [made[n] for n in nodes[number].input if n in made and made[n] not in placed]
            if number in placed:
                stack.pop()
            elif needed:
                stack += needed
            else:
                placed.add(number)
                order.append(number)
                stack.pop()
    replace_nodes(graph, [nodes[number] for number in order])


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Let a graph have these nodes, which may be some of its own."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def consumers(nodes: Iterable[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes that read each tensor."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in dict.fromkeys(node.input):
            if name:
                found.setdefault(name, []).append(node)
    return found


def _nbytes(tensor: onnx.TensorProto) -> int:
    width = int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return int(np.prod(tensor.dims, dtype=np.int64)) * width


def _shape(shape: Iterable[int | str | None]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else DYNAMIC for axis in shape)


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes into initializers: each then has one place, and its users are known."""
    outputs = {info.name for info in graph.output}
    kept = []
    for node in graph.node:
        tensor = _constant(node) if node.op_type == "Constant" and node.output[0] not in outputs else None
        if tensor is None:
            kept.append(node)
        else:
            graph.initializer.append(tensor)
    if len(kept) < len(graph.node):
        replace_nodes(graph, kept)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        match attribute.name:
            case "value":
                tensor = onnx.TensorProto()
                tensor.CopyFrom(value)
                tensor.name = node.output[0]
                return tensor
            case "value_float" | "value_floats":
                return numpy_helper.from_array(np.array(value, dtype=np.float32), node.output[0])
            case "value_int" | "value_ints":
                return numpy_helper.from_array(np.array(value, dtype=np.int64), node.output[0])
    return None


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give each node a name of its own: reports name nodes, and the converters know them by name."""
    taken: set[str] = set()
    for number, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{number}"
        while name in taken:
            name += "_"
        taken.add(name)
        node.name = name


def rounded(tensor: onnx.TensorProto) -> NDArray[np.float32]:
    """Return the values of a float32 tensor as FP16 holds them: clipped as the converter clips them."""
    from onnxruntime.transformers.float16 import convert_np_to_float16

    values = numpy_helper.to_array(tensor)
    flat = convert_np_to_float16(values.reshape(-1))  # it can't take an array without axes
    result: NDArray[np.float32] = flat.astype(np.float32).reshape(values.shape)
    return result
