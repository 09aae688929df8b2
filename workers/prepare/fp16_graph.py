"""A graph in FP16, and the same graph in FP32 with FP16's rounding written into it.

The file for the GPU comes from ONNX Runtime's own converter (onnxruntime.transformers.float16), inputs and
outputs left in FP32, so that a client sees the same types whichever worker answers. Two things it leaves are
mended here: between two nodes kept in FP32 it casts to FP16 and back, which overflows all the same; and a
weight that is read by both kinds of node is rounded for both.

A CPU can't show what that file does: ONNX Runtime has no FP16 kernels there, computes in FP32 and takes out
the casts between neighbours, so that a value of 100 000 passes unharmed (seen with 1.32). ``rounded_copy``
therefore writes the rounding as explicit casts, which it keeps: to FP16 and back after every node that is not
kept in FP32. Sums inside a node stay in FP32, as they do on tensor cores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace.workers.onnx_model import OnnxTensor
from headrace.workers.prepare.graph import consumers, replace_nodes, rounded, sort_nodes

#: Largest finite FP16 value.
FP16_MAX = 65504.0

#: Smallest positive value that the converter lets a weight have; what lies below is lifted to it.
FP16_TINY = 5.96e-08

_INPUT_CAST, _OUTPUT_CAST = "graph_input_cast", "_cast_to_fp16_node"


@dataclass(frozen=True, slots=True)
class Clamped:
    """Weights of one initializer that FP16 can't hold as they are: ``large`` many would be cut to 65504,
    ``tiny`` many are lifted to 5.96e-8. ``peak`` is the largest magnitude."""

    name: str
    large: int
    tiny: int
    peak: float


def clamped_weights(proto: onnx.ModelProto) -> tuple[Clamped, ...]:
    """Return the float32 initializers with values beyond what FP16 holds, and how many."""
    found = []
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            size = np.abs(numpy_helper.to_array(tensor))
            large = int(np.count_nonzero(size > FP16_MAX))
            tiny = int(np.count_nonzero((size > 0) & (size < FP16_TINY)))
            if large or tiny:
                found.append(Clamped(tensor.name, large, tiny, float(size.max())))
    return tuple(found)


def is_always_fp32(node: onnx.NodeProto) -> bool:
    """Tell whether the converter never converts a node of this kind."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    return node.op_type in DEFAULT_OP_BLOCK_LIST


def convert(
    proto: onnx.ModelProto, types: Mapping[str, OnnxTensor], kept: Collection[str]
) -> onnx.ModelProto:
    """Return ``proto``, which is used up, in FP16, but for the nodes named in ``kept``.

    ``types`` are those of ``tensor_types``: the converter puts casts only where it knows the type.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    _split_shared_weights(proto.graph, kept)
    del proto.graph.value_info[:]
    outputs = {info.name for info in proto.graph.output}
    for tensor in types.values():
        if tensor.dtype == "float32" and tensor.name not in outputs:
            proto.graph.value_info.append(
                helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.shape)
            )
    made: onnx.ModelProto = convert_float_to_float16(
        proto, keep_io_types=True, disable_shape_infer=True, node_block_list=list(kept)
    )
    _remove_round_trips(made.graph)
    sort_nodes(made.graph)
    del made.graph.value_info[:]
    return made


def rounded_copy(
    proto: onnx.ModelProto, types: Mapping[str, OnnxTensor], kept: Collection[str]
) -> onnx.ModelProto:
    """Return ``proto``, which is used up, in FP32 with the rounding that ``convert`` would give it."""
    graph = proto.graph
    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    floats = {t.name for t in types.values() if t.dtype == "float32"}
    floats |= {i.name for i in graph.input if i.type.tensor_type.elem_type == TensorProto.FLOAT}
    nodes: list[onnx.NodeProto] = []
    done: dict[str, str] = {}

    def in_fp16(name: str) -> str:
        if name in weights:
            if name not in done:
                done[name] = f"{name}_in_fp16"
                graph.initializer.append(numpy_helper.from_array(rounded(weights[name]), done[name]))
        elif name in floats and name not in done:
            done[name] = f"{name}_in_fp16"
            nodes.extend(_round(name, done[name]))
        return done.get(name, name)

    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if node.name in kept or is_always_fp32(node):
            nodes.append(copy)
            continue
        always = _always_fp32_inputs(node)
        for place, name in enumerate(node.input):
            if place not in always:
                copy.input[place] = in_fp16(name)
        nodes.append(copy)
        for place, name in enumerate(node.output):
            if name in floats:
                # The rounded value takes the name: whoever reads it, kept or not, reads FP16.
                copy.output[place] = f"{name}_before_fp16"
                nodes.extend(_round(copy.output[place], name))
                done[name] = name
    replace_nodes(graph, nodes)
    return proto


def _round(source: str, target: str) -> list[onnx.NodeProto]:
    half = f"{target}_half"
    return [
        helper.make_node("Cast", [source], [half], f"{target}_to_half", to=TensorProto.FLOAT16),
        helper.make_node("Cast", [half], [target], f"{target}_from_half", to=TensorProto.FLOAT),
    ]


def _always_fp32_inputs(node: onnx.NodeProto) -> list[int]:
    from onnxruntime.transformers.float16 import ALWAYS_FLOAT_INPUTS

    found: list[int] = ALWAYS_FLOAT_INPUTS.get(node.op_type, [])
    if node.op_type == "Resize" and len(node.input) == 2:
        return [1]  # opset 10: [X, scales]
    return found


def _split_shared_weights(graph: onnx.GraphProto, kept: Collection[str]) -> None:
    """Give the nodes that stay in FP32 weights of their own where others read them, too."""
    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    for name, readers in consumers(graph.node).items():
        if name not in weights:
            continue
        stay = [node for node in readers if node.name in kept or is_always_fp32(node)]
        if stay and len(stay) < len(readers):
            copy = graph.initializer.add()
            copy.CopyFrom(weights[name])
            copy.name = f"{name}_in_fp32"
            for node in stay:
                for place, each in enumerate(node.input):
                    if each == name:
                        node.input[place] = copy.name


def _remove_round_trips(graph: onnx.GraphProto) -> None:
    """Let a node kept in FP32 read what another one gave, without FP16 in between."""
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {info.name for info in graph.output}
    renamed: dict[str, str] = {}
    dropped: set[str] = set()
    for back in graph.node:
        if back.op_type != "Cast" or helper.get_attribute_value(back.attribute[0]) != TensorProto.FLOAT:
            continue
        half = makers.get(back.input[0])
        if half is None or half.op_type != "Cast" or not _is_converters_own(half):
            continue
        if back.output[0] in outputs:
            if half.input[0] not in makers:
                continue  # an input that is an output as well: nothing computes it
            renamed[half.input[0]] = back.output[0]
        else:
            renamed[back.output[0]] = half.input[0]
        dropped.add(back.name)
    for node in graph.node:
        for names in (node.input, node.output):
            for place, old in enumerate(names):
                name = old
                while name in renamed:
                    name = renamed[name]
                names[place] = name
    nodes = [node for node in graph.node if node.name not in dropped]
    read = {name for node in nodes for name in node.input} | outputs
    replace_nodes(graph, [n for n in nodes if not (_is_converters_own(n) and n.output[0] not in read)])


def _is_converters_own(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and (node.name.startswith(_INPUT_CAST) or node.name.endswith(_OUTPUT_CAST))
