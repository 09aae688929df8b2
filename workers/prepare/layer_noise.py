"""Which layers of an INT8 graph add the noise: activations matched against FP32, node by node.

The noise of an activation, sum (r - c)^2 / sum r^2, grows along the graph, so the worst activation is mostly
the last and tells nothing. What a node adds is what its output has more than the worst of its inputs: noise
powers of independent errors add up, and a layer passes on the ratio that it is given. The ``SQNR`` of a node
is that addition in dB; the node with the lowest is the first to be left in FP32.

Leaving out that node alone would change little. A tensor stays in FP32 only when every node that writes or
reads it does, and rounding what a node reads is mostly what harms it: one large channel takes the steps from
all others, while weights have a scale per channel. So the nodes around its inputs are left out with it, and
those around its output where rounding that makes most of the addition.

Activations are got and matched by ONNX Runtime's quantization/qdq_loss_debug.py, one frame at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.workers.prepare.calibration import Feeds
from headrace.workers.prepare.graph import consumers, load_proto
from headrace.workers.prepare.metrics import sqnr_db
from headrace.workers.prepare.ranges import RowReader, quiet

if TYPE_CHECKING:
    import onnx

#: Activations that the quantiser joins to the node before them: the node's own output is gone then.
_JOINED = frozenset({"Relu", "Clip"})


@dataclass(frozen=True, slots=True)
class NodeNoise:
    """A quantised node and the noise that it adds, in dB below its output: lower is worse. ``neighbours``
    are the nodes that are left out with it."""

    name: str
    op_type: str
    sqnr_db: float
    neighbours: tuple[str, ...] = ()


def measure_nodes(
    model: Path,
    quantised: Path,
    feeds: Feeds,
    op_types: Iterable[str],
    excluded: Iterable[str],
    frame_count: int,
) -> list[NodeNoise]:
    """Return the nodes of ``model`` that are INT8 in ``quantised``, worst first, on the first few frames."""
    noise, rounding = _activation_noise(model, quantised, feeds, frame_count)
    graph = load_proto(model).graph
    left_out, known = set(excluded), set(op_types)
    around = _Around(graph)
    found = []
    for node in graph.node:
        if node.op_type not in known or node.name in left_out or node.op_type in _JOINED:
            continue
        output = around.joined_output(node)
        if output not in noise:
            continue
        added = noise[output] - max((noise.get(name, 0.0) for name in node.input), default=0.0)
        tensors = [*node.input]
        if rounding.get(output, 0.0) > added / 2:
            tensors.append(output)
        touching = {name for tensor in tensors for name in around.touching(tensor)}
        neighbours = tuple(sorted(touching - left_out - {node.name}))
        found.append(NodeNoise(node.name, node.op_type, sqnr_db(1.0, added), neighbours))
    return sorted(found, key=lambda each: each.sqnr_db)


class _Around:
    """Who writes and reads each tensor of a graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._readers = consumers(graph.node)
        self._writers = {name: node for node in graph.node for name in node.output}

    def joined_output(self, node: onnx.NodeProto) -> str:
        """Return where the values of a node come out: behind an activation that is joined to it."""
        following = self._readers.get(node.output[0], [])
        if len(following) == 1 and following[0].op_type in _JOINED:
            return str(following[0].output[0])
        return str(node.output[0])

    def touching(self, tensor: str) -> list[str]:
        """Return the names of the nodes that would have a tensor rounded; none of a weight."""
        writer = self._writers.get(tensor)
        if writer is None:
            return []
        found = [each.name for each in self._readers.get(tensor, [])]
        while writer is not None:
            found.append(writer.name)
            writer = self._writers.get(writer.input[0]) if writer.op_type in _JOINED else None
        return found


def _activation_noise(
    model: Path, quantised: Path, feeds: Feeds, frame_count: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return noise over signal of every activation that both graphs have: all of it, and the part that
    rounding this very activation to INT8 makes."""
    from onnxruntime.quantization.qdq_loss_debug import (
        collect_activations,
        create_activation_matching,
        modify_model_output_intermediate_tensors,
    )

    taps = [path.with_name(f"tapped_{number}.onnx") for number, path in enumerate((model, quantised))]
    sums: dict[str, NDArray[np.float64]] = {}
    with quiet():
        for path, tap in zip((model, quantised), taps, strict=True):
            modify_model_output_intermediate_tensors(str(path), str(tap))
        for feed in islice(feeds(), frame_count):
            exact, rough = (collect_activations(str(tap), RowReader(feed)) for tap in taps)
            matched = create_activation_matching(rough, exact)
            for name, values in exact.items():
                pair = matched.get(name, {})
                # What is rounded to INT8 is compared as the next layer reads it.
                before = pair.get("pre_qdq") or rough.get(name)
                after = pair.get("post_qdq") or before
                if before is None or after is None or after[0].shape != values[0].shape:
                    continue
                r, b, a = (np.asarray(each[0], np.float64) for each in (values, before, after))
                added = np.array([r @ r, (r - a) @ (r - a), (b - a) @ (b - a)])
                sums[name] = sums.get(name, np.zeros(3)) + added
    known = {name: each for name, each in sums.items() if each[0] > 0}
    return (
        {name: float(each[1] / each[0]) for name, each in known.items()},
        {name: float(each[2] / each[0]) for name, each in known.items()},
    )
