"""What a model would take of a GPU, from its file and its size classes alone: nothing is run or loaded.

An estimate for planning: weights as they stand in the file, the results of nodes that must exist at the same
time by the order of the graph, inputs and outputs of every bucket, and ``ESTIMATED_GRAPH_BYTES`` for each
graph. ONNX Runtime fuses nodes, which takes less; cuDNN takes workspaces, which is more; CUDA, cuDNN and
torch themselves come on top. Not compared with a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.protocol.messages import ModelSpec, SizeClassSpec
from headrace.workers.cuda.graphs import ESTIMATED_GRAPH_BYTES
from headrace.workers.cuda.served import DATA_DEPENDENT
from headrace.workers.measure import buckets_up_to
from headrace.workers.model_io import ModelIO, describe
from headrace.workers.onnx_model import DYNAMIC, OnnxModel

if TYPE_CHECKING:
    import onnx

#: Constants of more values than this say nothing of a shape: their bytes are left out while shapes are found.
_LARGEST_SHAPE_CONSTANT = 64


@dataclass(frozen=True, slots=True)
class BucketNeed:
    """One bucket: the bytes of its inputs and outputs at fixed addresses, and its part of the traffic."""

    label: str
    share: float
    input_bytes: int
    output_bytes: int

    @property
    def io_bytes(self) -> int:
        return self.input_bytes + self.output_bytes


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """One model. ``result_bytes``: results of nodes that exist at the same time, in the largest bucket; None
    where the shapes can't be told from the file. ``why_loose``: why it can have no graphs, or nothing."""

    label: str
    weight_bytes: int
    result_bytes: int | None
    buckets: tuple[BucketNeed, ...]
    why_loose: str = ""

    @property
    def arena_bytes(self) -> int:
        """Return what the session takes: weights, and the results of nodes as far as they are known."""
        return self.weight_bytes + (self.result_bytes or 0)

    @property
    def graph_bytes(self) -> int:
        """Return what all graphs take with their inputs and outputs: what ``gpu_memory_mb`` bounds."""
        return sum(each.io_bytes + ESTIMATED_GRAPH_BYTES for each in self.buckets)

    def slot_bytes(self, slots: int) -> int:
        """Return what the stages of ``slots`` batches on the device take."""
        largest_in = max((each.input_bytes for each in self.buckets), default=0)
        return slots * (largest_in + max((each.output_bytes for each in self.buckets), default=0))


def estimate(spec: ModelSpec, model: OnnxModel, path: Path) -> ModelNeed:
    """Estimate what ``model``, read from ``path``, takes when it is served as ``spec`` says.

    Raises ModelError when the graph and the specification do not go together."""
    io = describe(spec, model)
    label = f"{spec.name}:{spec.version}"
    weights = sum(file.stat().st_size for file in (path, *map(Path, model.weights.values())))
    why_loose = _why_loose(io)
    if why_loose:
        return ModelNeed(label, weights, None, (), why_loose)
    skeleton = _skeleton(io.model.proto)
    buckets: list[BucketNeed] = []
    largest: int | None = 0
    for size_class in io.classes:
        for rows in reversed(_rows(io, size_class)):
            inputs = _inputs(io, size_class, rows)
            sizes = _value_bytes(skeleton, {name: shape for name, (shape, _) in inputs.items()})
            outputs = [sizes.get(output.name) for output in skeleton.graph.output]
            buckets.append(
                BucketNeed(
                    f"{label} {size_class.name} x{rows}",
                    size_class.traffic_share,
                    sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in inputs.values()),
                    sum(size or 0 for size in outputs),
                )
            )
            peak = _peak(skeleton.graph, sizes)
            largest = None if peak is None or largest is None else max(largest, peak)
    return ModelNeed(label, weights, largest, tuple(buckets))


def _why_loose(io: ModelIO) -> str:
    if io.has_open_shape:
        return "its inputs have open axes besides the batch"
    found = sorted({node.op_type for node in io.model.proto.graph.node} & DATA_DEPENDENT)
    return f"the shape of what {', '.join(found)} gives is known only after a run" if found else ""


def _rows(io: ModelIO, size_class: SizeClassSpec) -> tuple[int, ...]:
    if io.batch > 1:
        return (io.batch,)
    return buckets_up_to(size_class.max_batch_size) if io.batch == DYNAMIC else (1,)


def _inputs(io: ModelIO, size_class: SizeClassSpec, rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype by the name under which the session is fed."""
    plans = io.plans(size_class)
    return {
        each.feed_name: ((rows, *plan.shape) if each.has_batch else plan.shape, plan.dtype)
        for each, plan in zip(io.inputs, plans, strict=True)
    }


def _skeleton(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph without the values of its large constants."""
    import onnx

    skeleton = onnx.ModelProto()
    skeleton.CopyFrom(proto)
    for tensor in skeleton.graph.initializer:
        if math.prod(tensor.dims) > _LARGEST_SHAPE_CONSTANT:
            for values in (
                "raw_data",
                "float_data",
                "int32_data",
                "int64_data",
                "double_data",
                "uint64_data",
            ):
                tensor.ClearField(values)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    # What the exporter noted holds for its own example.
    del skeleton.graph.value_info[:]
    return skeleton


def _value_bytes(skeleton: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the bytes of every value whose shape follows from those of the inputs."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(skeleton)
    for value in model.graph.input:
        if value.name in shapes:
            _set_shape(value, shapes[value.name])
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # noqa: BLE001 - a shape that can't be inferred is one that is not known
        return {}
    found: dict[str, int] = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        kind = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
        if kind.HasField("shape") and kind.elem_type and min(dims, default=0) >= 0:
            itemsize = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
            found[value.name] = math.prod(dims) * itemsize
    return found


def _set_shape(value: onnx.ValueInfoProto, shape: tuple[int, ...]) -> None:
    value.type.tensor_type.ClearField("shape")
    for length in shape:
        value.type.tensor_type.shape.dim.add().dim_value = length


def _peak(graph: onnx.GraphProto, sizes: dict[str, int]) -> int | None:
    """Return the most bytes of results that exist at once, None when half of them are unknown."""
    last_use = {name: number for number, node in enumerate(graph.node) for name in node.input}
    last_use |= {output.name: len(graph.node) for output in graph.output}
    alive: dict[str, int] = {}
    alive_bytes = peak_bytes = unknown = 0
    for number, node in enumerate(graph.node):
        unknown += not any(name in sizes for name in node.output)
        for name in node.output:
            alive[name] = sizes.get(name, 0)
            alive_bytes += alive[name]
        peak_bytes = max(peak_bytes, alive_bytes)
        for name in {*node.input, *node.output}:
            if last_use.get(name, number) == number:
                alive_bytes -= alive.pop(name, 0)
    return None if unknown * 2 > len(graph.node) else peak_bytes
