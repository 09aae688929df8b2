"""Runs a graph in FP32 and with FP16's rounding side by side, and measures every tensor as it passes.

Both are one graph, so that tensors are compared inside it and only three numbers of each come out: memory
stays that of two runs, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from headrace.workers.onnx_model import OnnxTensor
from headrace.workers.prepare.fp16_graph import rounded_copy
from headrace.workers.prepare.graph import load_proto, replace_nodes, save

if TYPE_CHECKING:
    import onnxruntime

#: Before the names of everything in the half with FP16's rounding.
_PREFIX = "fp16/"

Feed = Mapping[str, NDArray[np.generic]]


@dataclass(slots=True)
class TensorFigures:
    """One tensor over all frames seen. ``peak`` is its largest magnitude in FP32; ``error`` the root mean
    square of the difference over that of its values, inf where FP16 gives no finite value."""

    peak: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    @property
    def is_finite(self) -> bool:
        """Tell whether FP32 gives finite values; squares alone may be too large for the sum."""
        return bool(np.isfinite(self.peak)) and not np.isnan(self.signal)

    @property
    def error(self) -> float:
        if not np.isfinite(self.noise):
            return float("inf")
        return float((self.noise / max(self.signal, 1e-30)) ** 0.5)


def measure(
    master: Path,
    types: Mapping[str, OnnxTensor],
    kept: Collection[str],
    feeds: Iterable[Feed],
    work: Path,
    threads: int,
) -> dict[str, TensorFigures]:
    """Run the frames of ``feeds`` through ``master`` and its rounded twin; return figures by tensor.

    ``work`` is a folder for the joint graph, which is gone afterwards.
    """
    measured = [name for name, tensor in types.items() if tensor.dtype == "float32"]
    files = save(
        _joint(load_proto(master), rounded_copy(load_proto(master), types, kept), measured),
        work / "twin.onnx",
    )
    figures = {name: TensorFigures() for name in measured}
    try:
        session = _session(files[0], threads)
        for feed in feeds:
            values = [float(np.asarray(v)) for v in session.run(None, dict(feed))]
            for number, name in enumerate(measured):
                peak, signal, noise = values[3 * number : 3 * number + 3]
                each = figures[name]
                each.peak = _largest(each.peak, peak)
                each.signal += signal
                each.noise += noise
    finally:
        for file in files:
            file.unlink()
    return figures


def _largest(known: float, found: float) -> float:
    return known if found <= known else (found if found == found else float("inf"))


def _joint(full: onnx.ModelProto, half: onnx.ModelProto, measured: list[str]) -> onnx.ModelProto:
    """Put both graphs into ``full``; its outputs become peak, signal and noise of each measured tensor."""
    graph = full.graph
    inputs = {info.name for info in graph.input}
    own = {tensor.name for tensor in graph.initializer}
    for tensor in half.graph.initializer:
        if tensor.name not in own:  # those that the rounding added; the others are the same
            graph.initializer.append(tensor)
    shared = inputs | own | {tensor.name for tensor in half.graph.initializer}
    nodes = list(graph.node)
    for node in half.graph.node:
        node.name = _PREFIX + node.name
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name and name not in shared:
                    names[place] = _PREFIX + name
        nodes.append(node)
    del graph.output[:]
    del graph.value_info[:]
    for number, name in enumerate(measured):
        nodes += _figures(name, _PREFIX + name, f"figures/{number}")
        for figure in ("peak", "signal", "noise"):
            graph.output.append(
                helper.make_tensor_value_info(f"figures/{number}/{figure}", TensorProto.FLOAT, [])
            )
    replace_nodes(graph, nodes)
    return full


def _figures(name: str, other: str, to: str) -> list[onnx.NodeProto]:
    """Return nodes for the largest magnitude of one tensor, the sum of its squares and that of its error."""
    return [
        helper.make_node("Abs", [name], [f"{to}/abs"]),
        helper.make_node("ReduceMax", [f"{to}/abs"], [f"{to}/peak"], keepdims=0),
        helper.make_node("ReduceSumSquare", [name], [f"{to}/signal"], keepdims=0),
        helper.make_node("Sub", [name, other], [f"{to}/error"]),
        helper.make_node("ReduceSumSquare", [f"{to}/error"], [f"{to}/noise"], keepdims=0),
    ]


def _session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Node by node, as written: a fusion would compute in FP32 what is to be rounded in between.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
