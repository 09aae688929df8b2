"""The uint8 front end: frames go in as they stand in the staging buffer, the graph does the arithmetic.

An image model gets four nodes before its own: Transpose (NHWC to NCHW, where the graph wants it), Cast to
the model's dtype, one Mul and one Add per channel. Transpose comes first because it then moves one byte per
value instead of four. ``(pixel * scale - mean) / std`` is folded into ``pixel * factor + offset`` in float64
before it is rounded once to the model's dtype. A model that takes uint8 NHWC already gets no front end.

Not here: colour order and padding, which staging does while it copies the frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.protocol.messages import ImageInput
from headrace.workers.onnx_model import DYNAMIC, OnnxModel, OnnxTensor

if TYPE_CHECKING:
    import onnx

_FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model whose image input is uint8 [batch, height, width, channels].

    ``source`` is the graph's own image input; ``feed_name`` is what the session calls the uint8 input now.
    ``height`` and ``width`` are the graph's fixed size, or DYNAMIC.
    """

    model: OnnxModel
    source: OnnxTensor
    feed_name: str
    batch: int
    height: int
    width: int


def add_front_end(model: OnnxModel, image: ImageInput) -> ImageModel:
    """Return ``model`` with the front end that ``image`` describes.

    Raises ModelError when the graph has no input that images of ``image.channels`` could go to, or when
    the arithmetic can't be folded into an integer input.
    """
    source, shape, is_nchw = _find_image_input(model, image.channels)
    batch, height, width = (shape[0], shape[2], shape[3]) if is_nchw else shape[:3]
    factor, offset = _folded(model.label, image)
    is_identity = bool(np.all(factor == 1.0) and np.all(offset == 0.0))
    if source.dtype not in _FLOATS and not is_identity:
        raise ModelError(
            f"model {model.label}: input {source.name} is {source.dtype}, so scale, mean and std can't be"
            " applied before it: leave them out, the graph must do its own arithmetic"
        )
    if source.dtype == "uint8" and not is_nchw:
        return ImageModel(model, source, source.name, batch, height, width)
    feed_name = _unused_name(model, f"{source.name}_uint8_nhwc")
    proto = _prepend(model, source, feed_name, is_nchw, None if is_identity else (factor, offset))
    fed = OnnxTensor(feed_name, "uint8", (batch, height, width, image.channels))
    inputs = tuple(fed if tensor is source else tensor for tensor in model.inputs)
    return ImageModel(replace(model, proto=proto, inputs=inputs), source, feed_name, batch, height, width)


def _find_image_input(model: OnnxModel, channels: int) -> tuple[OnnxTensor, tuple[int, int, int, int], bool]:
    """Return the image input, its four axes and whether it is NCHW.

    The axis that has ``channels`` entries decides; a file that leaves it open is taken for NCHW.
    """
    candidates: list[tuple[OnnxTensor, tuple[int, int, int, int], bool]] = []
    for tensor in model.inputs:
        if tensor.shape is None or len(tensor.shape) != 4:
            continue
        first, second, third, fourth = tensor.shape
        if channels in (second, fourth) or second == DYNAMIC:
            is_nchw = second == channels or fourth != channels
            candidates.append((tensor, (first, second, third, fourth), is_nchw))
    if len(candidates) != 1:
        found = "; ".join(f"{t.name} {t.dtype} {list(t.shape or ())}" for t in model.inputs)
        raise ModelError(
            f"model {model.label}: {len(candidates)} of its inputs can take images of {channels} channels"
            f" ([batch, {channels}, height, width] or [batch, height, width, {channels}]), exactly one is"
            f" needed; it has {found}"
        )
    return candidates[0]


def _folded(label: str, image: ImageInput) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    mean = _per_channel(label, "mean", image.mean, image.channels, 0.0)
    std = _per_channel(label, "std", image.std, image.channels, 1.0)
    if np.any(std == 0.0):
        raise ModelError(f"model {label}: image.std holds a zero: {list(image.std)}")
    return image.scale / std, -mean / std


def _per_channel(
    label: str, key: str, values: tuple[float, ...], channels: int, default: float
) -> NDArray[np.float64]:
    if len(values) not in (0, 1, channels):
        raise ModelError(
            f"model {label}: image.{key} has {len(values)} values: give one, or one for each of the"
            f" {channels} channels"
        )
    return np.broadcast_to(np.asarray(values or (default,), dtype=np.float64), (channels,))


def _prepend(
    model: OnnxModel,
    source: OnnxTensor,
    feed_name: str,
    is_nchw: bool,
    arithmetic: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
) -> onnx.ModelProto:
    import onnx
    from onnx import helper

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    dtype = np.dtype(source.dtype)
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if is_nchw:
        steps.append(("Transpose", [], {"perm": [0, 3, 1, 2]}))
    if source.dtype != "uint8":
        steps.append(("Cast", [], {"to": int(helper.np_dtype_to_tensor_dtype(dtype))}))
    if arithmetic is not None:
        axes = (1, -1, 1, 1) if is_nchw else (1, 1, 1, -1)
        for op, values in zip(("Mul", "Add"), arithmetic, strict=True):
            name = _unused_name(model, f"{feed_name}_{op.lower()}")
            tensor = onnx.numpy_helper.from_array(values.astype(dtype).reshape(axes), name)
            proto.graph.initializer.append(tensor)
            steps.append((op, [name], {}))
    nodes, current = [], feed_name
    for number, (op, constants, attributes) in enumerate(steps):
        # The last node gives the name that the graph's own nodes read.
        last = number == len(steps) - 1
        following = source.name if last else _unused_name(model, f"{feed_name}_{number}")
        node = helper.make_node(
            op, [current, *constants], [following], name=f"{feed_name}_front_end_{number}", **attributes
        )
        nodes.append(node)
        current = following
    own_nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, *own_nodes])
    _replace_input(proto, source.name, feed_name, is_nchw)
    return proto


def _replace_input(proto: onnx.ModelProto, old_name: str, feed_name: str, is_nchw: bool) -> None:
    import onnx

    graph_input = next(i for i in proto.graph.input if i.name == old_name)
    graph_input.name = feed_name
    graph_input.type.tensor_type.elem_type = onnx.TensorProto.UINT8
    if is_nchw:
        dimensions = graph_input.type.tensor_type.shape.dim
        batch, channels, height, width = (onnx.TensorShapeProto.Dimension() for _ in range(4))
        for copy, original in zip((batch, channels, height, width), dimensions, strict=True):
            copy.CopyFrom(original)
        del dimensions[:]
        dimensions.extend([batch, height, width, channels])


def _unused_name(model: OnnxModel, wanted: str) -> str:
    graph = model.proto.graph
    used = {tensor.name for tensor in graph.initializer}
    used.update(info.name for info in graph.input)
    for node in graph.node:
        used.update(node.output)
    while wanted in used:
        wanted += "_"
    return wanted
