"""Tensor descriptions on the wire: dtypes, shapes and their sizes in bytes."""

from __future__ import annotations

import math
from typing import Any, Final

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.fields import I64_MAX, bad_field, missing_field, name_text, shown
from headrace.protocol.messages import TensorSpec

#: dtypes a frame may have: numpy's names of the fixed-size numeric ones, little-endian on the wire.
ITEM_BYTES: Final[dict[Any, int]] = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
#: Output tensors may also be bool, one byte each: models compute masks.
OUTPUT_ITEM_BYTES: Final[dict[Any, int]] = {**ITEM_BYTES, "bool": 1}

MAX_AXES: Final = 8
#: Inputs of one model, outputs of one frame. Each output is a message part, so this bounds parts too.
MAX_TENSORS: Final = 64


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the size of a tensor; exact for any shape, Python's integers do not overflow."""
    return math.prod(shape) * OUTPUT_ITEM_BYTES[dtype]


def read_shape(value: object, name: str, min_axis: int = 1, min_axes: int = 1) -> tuple[int, ...]:
    """Read a shape. Raises RemoteProtocolError bad_shape for anything but a few axes of fitting size."""
    if type(value) is not list:
        raise RemoteProtocolError(Code.BAD_SHAPE, f"{name} must be an array of integers, got {shown(value)}")
    if not min_axes <= len(value) <= MAX_AXES:
        raise RemoteProtocolError(
            Code.BAD_SHAPE, f"{name} must have {min_axes} to {MAX_AXES} axes, it has {len(value)}"
        )
    for axis in value:
        if type(axis) is not int or axis < min_axis:
            raise RemoteProtocolError(
                Code.BAD_SHAPE,
                f"each axis of {name} must be an integer of at least {min_axis}, got {shown(axis)}",
            )
    if math.prod(value) > I64_MAX:
        raise RemoteProtocolError(Code.BAD_SHAPE, f"{name} has more elements than 63 bits can count")
    return tuple(value)


def write_spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape}


def read_input_spec(value: object, name: str) -> TensorSpec:
    """Read one input of a frame: every axis has a length."""
    return _read_spec(value, name, ITEM_BYTES, 1, 1)


def read_output_spec(value: object, name: str) -> TensorSpec:
    """Read one output: scalars and zero-length axes (nothing found) are fine."""
    return _read_spec(value, name, OUTPUT_ITEM_BYTES, 0, 0)


def read_graph_spec(value: object, name: str) -> TensorSpec:
    """Read one input of a model as its graph declares it: -1 is a dynamic axis, the dtype any ONNX has."""
    return _read_spec(value, name, None, -1, 0)


def _read_spec(
    value: object, name: str, dtypes: dict[Any, int] | None, min_axis: int, min_axes: int
) -> TensorSpec:
    if type(value) is not dict:
        raise bad_field(name, "a map of name, dtype and shape", value)
    dtype = value.get("dtype")
    if type(dtype) is not str or (dtypes is not None and dtype not in dtypes) or len(dtype) > 32:
        raise RemoteProtocolError(Code.BAD_DTYPE, f"dtype of {name} is not supported: {shown(dtype)}")
    if "shape" not in value:
        raise missing_field(f"shape of {name}")
    return TensorSpec(
        name=name_text(value.get("name", ""), f"name of {name}"),
        dtype=dtype,
        shape=read_shape(value["shape"], f"shape of {name}", min_axis, min_axes),
    )
