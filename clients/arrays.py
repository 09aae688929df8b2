"""From what a user pushes to what a frame carries: arrays, encoded images, meta.

Everything that can't be sent faithfully is refused here, before anything leaves the process, with the
field and the value named. Whatever passes arrives as the same numbers in the same shape: views are
gathered in C order, other byte orders are swapped, numpy scalars in ``meta`` become Python's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import Code, InvalidFrameError
from headrace.protocol import wire
from headrace.protocol.messages import Buffer, Encoding, TensorSpec, Value

#: The dtypes of frames: fixed-size numbers. bool is left out since frameworks disagree on its size.
FRAME_DTYPES = frozenset(
    f"{kind}{bits}" for kind, sizes in (("uint", (8, 16, 32, 64)), ("int", (8, 16, 32, 64))) for bits in sizes
) | {"float16", "float32", "float64"}

MAX_AXES = 8
MAX_META_DEPTH = 12

_INT_MIN = -(2**63)
_INT_END = 2**64

_MAGICS = ((b"\xff\xd8\xff", Encoding.JPEG), (b"\x89PNG\r\n\x1a\n", Encoding.PNG))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A payload ready to be sent: ``data`` is contiguous bytes, in the user's own memory where that was
    contiguous already, so it must be copied before push() returns. ``shape`` is () for an encoded
    image (its own header says it)."""

    data: Buffer
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding
    inputs: tuple[TensorSpec, ...] = ()


def prepare(image: object, *, encoding: Encoding | str | None = None) -> Prepared:
    """Turn what a user pushes into a payload.

    Args:
        image: an array of any strides and byte order (dtype one of FRAME_DTYPES; at least one axis,
            none empty); an encoded JPEG or PNG as bytes; or, for a model with several inputs, a
            mapping of input name to array.
        encoding: "raw", "jpeg" or "png". None: bytes are recognised by their first bytes, everything
            else is raw.

    Raises InvalidFrameError.
    """
    wanted = None if encoding is None else _encoding(encoding)
    if isinstance(image, Mapping):
        return _prepare_inputs(image, wanted)
    if isinstance(image, bytes | bytearray) or (wanted is not None and wanted is not Encoding.RAW):
        return _prepare_encoded(image, wanted)
    array = as_frame_array(image)
    return Prepared(_bytes_of(array), array.nbytes, array.shape, array.dtype.name, Encoding.RAW)


def as_frame_array(image: object, *, name: str = "") -> npt.NDArray[np.generic]:
    """Return the array in C order and little-endian, copied only when it was not so before.

    ``name`` is the model input it is meant for, for error messages. Raises InvalidFrameError.
    """
    what = f"input {name!r}: " if name else ""
    if not isinstance(image, np.ndarray | memoryview) and not hasattr(image, "__array__"):
        raise InvalidFrameError(
            Code.BAD_DTYPE,
            f"{what}{type(image).__name__} is not an array; give a numpy array or encoded bytes",
        )
    try:
        array: npt.NDArray[np.generic] = np.asarray(image)
    except (TypeError, ValueError) as error:
        raise InvalidFrameError(
            Code.BAD_DTYPE, f"{what}{type(image).__name__} is no array: {error}"
        ) from None
    if array.dtype.kind not in "uif" or array.dtype.name not in FRAME_DTYPES:
        raise InvalidFrameError(
            Code.BAD_DTYPE,
            f"{what}dtype {array.dtype} is not supported; use one of {', '.join(sorted(FRAME_DTYPES))}",
        )
    if array.ndim == 0 or array.ndim > MAX_AXES:
        raise InvalidFrameError(
            Code.BAD_SHAPE, f"{what}an array of {array.ndim} axes; 1 to {MAX_AXES} can be sent"
        )
    if array.size == 0:
        raise InvalidFrameError(Code.EMPTY_PAYLOAD, f"{what}an empty array of shape {array.shape}")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def frame_nbytes(shape: Sequence[int], dtype: npt.DTypeLike, max_bytes: int) -> int:
    """Return the bytes of a frame of this form, before anything of that size is made.

    Raises InvalidFrameError for what can't be sent, or is larger than ``max_bytes``.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise InvalidFrameError(Code.BAD_DTYPE, f"dtype {dtype!r} is not a numpy dtype") from None
    if kind.kind not in "uif" or kind.name not in FRAME_DTYPES:
        raise InvalidFrameError(
            Code.BAD_DTYPE, f"dtype {kind} is not supported; use one of {', '.join(sorted(FRAME_DTYPES))}"
        )
    axes = tuple(shape)
    if not 1 <= len(axes) <= MAX_AXES:
        raise InvalidFrameError(Code.BAD_SHAPE, f"an array of {len(axes)} axes; 1 to {MAX_AXES} can be sent")
    nbytes = kind.itemsize
    for axis in axes:
        nbytes *= checked_int(axis, "shape", 1, max_bytes)
    if nbytes > max_bytes:
        raise InvalidFrameError(Code.FRAME_TOO_LARGE, f"{nbytes} bytes; the broker's limit is {max_bytes}")
    return nbytes


def new_array(
    shape: Sequence[int], dtype: npt.DTypeLike, memory: memoryview | None
) -> npt.NDArray[np.generic]:
    """Return an array of a form that ``frame_nbytes`` has accepted, over ``memory`` if there is some."""
    kind = np.dtype(dtype).newbyteorder("<")
    if memory is None:
        return np.empty(tuple(shape), kind)
    return np.frombuffer(memory, kind).reshape(tuple(shape))


def plain_meta(meta: Mapping[str, object] | None, *, max_bytes: int) -> tuple[dict[str, Value] | None, int]:
    """Return meta made of what msgpack holds, and its packed size.

    numpy scalars and arrays of few elements become Python numbers and lists, tuples become lists.
    Raises InvalidFrameError, which names the field that can't be carried.
    """
    if meta is None:
        return None, 0
    if not isinstance(meta, Mapping):
        raise InvalidFrameError(Code.BAD_FIELD, f"meta: {type(meta).__name__} is not a mapping")
    converted = _plain_mapping(meta, "meta", 0)
    size = len(wire.pack(converted))
    if size > max_bytes:
        raise InvalidFrameError(Code.META_TOO_LARGE, f"meta is {size} bytes packed; the limit is {max_bytes}")
    return converted, size


def checked_int(value: object, field: str, lowest: int, highest: int) -> int:
    """Return an int (numpy's too) that lies in [lowest, highest]; raise InvalidFrameError else."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise InvalidFrameError(Code.BAD_FIELD, f"{field}: {value!r} is not a whole number")
    if not lowest <= value <= highest:
        raise InvalidFrameError(Code.OUT_OF_RANGE, f"{field}: {value} is outside {lowest} to {highest}")
    return int(value)


def tensors_of(
    specs: tuple[TensorSpec, ...], payloads: tuple[Buffer, ...]
) -> dict[str, npt.NDArray[np.generic]]:
    """Return output tensors as arrays by name: read-only views of the received bytes."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for spec, payload in zip(specs, payloads, strict=True):
        dtype = np.dtype(spec.dtype).newbyteorder("<")
        array = np.frombuffer(payload, dtype=dtype).reshape(spec.shape)
        array.flags.writeable = False
        arrays[spec.name] = array
    return arrays


def _encoding(text: Encoding | str) -> Encoding:
    try:
        return Encoding(text)
    except ValueError:
        names = ", ".join(Encoding)
        raise InvalidFrameError(Code.BAD_ENCODING, f"encoding {text!r} is not one of {names}") from None


def _prepare_encoded(image: object, wanted: Encoding | None) -> Prepared:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 1:
            raise InvalidFrameError(
                Code.BAD_ENCODING,
                f"encoding {wanted} with a {image.dtype} array of shape {image.shape}: give encoded bytes",
            )
        image = np.ascontiguousarray(image).data
    if not isinstance(image, bytes | bytearray | memoryview):
        raise InvalidFrameError(
            Code.BAD_ENCODING, f"{type(image).__name__} holds no encoded image; give bytes"
        )
    view = memoryview(image)
    if view.nbytes == 0:
        raise InvalidFrameError(Code.EMPTY_PAYLOAD, "no bytes at all")
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    view = view.cast("B")
    found = next((kind for magic, kind in _MAGICS if bytes(view[: len(magic)]) == magic), None)
    if found is None or (wanted is not None and found is not wanted):
        raise InvalidFrameError(
            Code.BAD_IMAGE if found is None else Code.BAD_ENCODING,
            f"the first bytes are those of {found or 'neither JPEG nor PNG'}, wanted is"
            f" {wanted or 'either'}; raw pixels go in a numpy array of their shape",
        )
    return Prepared(view, view.nbytes, (), "uint8", found)


def _prepare_inputs(inputs: Mapping[object, object], wanted: Encoding | None) -> Prepared:
    if wanted not in {None, Encoding.RAW}:
        raise InvalidFrameError(Code.BAD_ENCODING, f"several inputs can only be sent raw, not {wanted}")
    if not inputs:
        raise InvalidFrameError(Code.EMPTY_PAYLOAD, "a mapping of no inputs")
    specs = []
    chunks = []
    for name, image in inputs.items():
        if not isinstance(name, str) or not name:
            raise InvalidFrameError(Code.BAD_FIELD, f"input name {name!r} is not a non-empty string")
        array = as_frame_array(image, name=name)
        specs.append(TensorSpec(name, array.dtype.name, array.shape))
        chunks.append(_bytes_of(array))
    data = b"".join(chunks)
    return Prepared(data, len(data), specs[0].shape, specs[0].dtype, Encoding.RAW, tuple(specs))


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    # The detour over uint8 is needed since memoryview can't cast float16, and it costs no copy.
    return array.reshape(-1).view(np.uint8).data


def _plain(value: object, path: str, depth: int) -> Value:
    """Convert one meta value; ``path`` names it in errors."""
    if depth > MAX_META_DEPTH:
        raise InvalidFrameError(Code.TOO_DEEP, f"{path}: nested deeper than {MAX_META_DEPTH}")
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    match value:
        case None | bool() | float() | bytes():
            return value
        case str():
            return _encodable(value, path)
        case int():
            if not _INT_MIN <= value < _INT_END:
                raise InvalidFrameError(Code.OUT_OF_RANGE, f"{path}: {value} does not fit 64 bits")
            return int(value)
        case bytearray() | memoryview():
            return bytes(value)
        case list() | tuple():
            return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        case Mapping():
            return _plain_mapping(value, path, depth)
        case _:
            raise InvalidFrameError(Code.BAD_FIELD, f"{path}: {type(value).__name__} can't be carried")


def _plain_mapping(value: Mapping[Any, object], path: str, depth: int) -> dict[str, Value]:
    converted: dict[str, Value] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidFrameError(Code.BAD_FIELD, f"{path}: key {key!r} is not a string")
        converted[_encodable(key, path)] = _plain(item, f"{path}.{key}", depth + 1)
    return converted


def _encodable(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidFrameError(Code.BAD_FIELD, f"{path}: {text!r} can't be written as UTF-8") from None
    return str(text)
