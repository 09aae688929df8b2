"""What can be pushed, and what is refused before anything is sent."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable

import numpy as np
import pytest

from headrace.clients import arrays
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Encoding, TensorSpec

FRAME = np.arange(128 * 128 * 3, dtype=np.uint32).astype(np.uint8).reshape(128, 128, 3)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
JPEG = b"\xff\xd8\xff\xe0" + bytes(20)


def as_array(prepared: arrays.Prepared) -> np.ndarray:
    return np.frombuffer(prepared.data, dtype=np.dtype(prepared.dtype).newbyteorder("<")).reshape(
        prepared.shape
    )


def readonly() -> np.ndarray:
    array = FRAME.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "view",
    [
        FRAME,
        FRAME[10:100, 10:100],
        FRAME[:, ::-1],
        FRAME.transpose(2, 0, 1),
        np.asfortranarray(FRAME),
        FRAME[::2],
        readonly(),
        np.broadcast_to(FRAME[:1], (4, 128, 3)),
    ],
    ids=["plain", "crop", "mirrored", "transposed", "fortran", "strided", "read-only", "broadcast"],
)
def test_any_view_arrives_as_its_own_pixels(view: np.ndarray) -> None:
    """PAY-01: what the model gets equals the view, whatever its strides."""
    prepared = arrays.prepare(view)

    assert np.array_equal(as_array(prepared), view)
    assert prepared.nbytes == view.nbytes
    assert prepared.encoding is Encoding.RAW


@pytest.mark.parametrize("make", [memoryview, lambda frame: frame.data], ids=["memoryview", "array.data"])
def test_a_memoryview_of_several_dimensions_is_sent_whole(make: Callable[[np.ndarray], memoryview]) -> None:
    """PAY-02: 921,600 bytes, not the 480 of the first axis."""
    frame = np.arange(480 * 640 * 3, dtype=np.uint32).astype(np.uint8).reshape(480, 640, 3)

    prepared = arrays.prepare(make(frame))

    assert prepared.nbytes == 921_600
    assert memoryview(prepared.data).nbytes == 921_600
    assert np.array_equal(as_array(prepared), frame)


@pytest.mark.parametrize("dtype", [">u2", ">f4", ">i8", "=f8", "<u4"])
def test_byte_order_is_swapped_not_ignored(dtype: str) -> None:
    """PAY-06: 0, 1, 256, 65535 stay what they are."""
    values = np.array([0, 1, 256, 65535], dtype=dtype)

    prepared = arrays.prepare(values)

    assert as_array(prepared).tolist() == [0, 1, 256, 65535]
    assert prepared.dtype == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", sorted(arrays.FRAME_DTYPES))
def test_every_supported_dtype_keeps_its_values(dtype: str) -> None:
    """Each number type, float16 included, also as a view that has to be gathered."""
    values = np.arange(24).astype(dtype).reshape(2, 3, 4)[:, ::-1]

    assert np.array_equal(as_array(arrays.prepare(values)), values)


def test_a_payload_at_any_offset_is_read_the_same() -> None:
    """PAY-12: bytes that are not aligned for their type give the same numbers."""
    values = np.linspace(-1, 1, 16)
    for offset in range(64):
        block = bytes(offset) + values.tobytes()
        view = memoryview(block)[offset:]

        tensors = arrays.tensors_of((TensorSpec("t", "float64", (4, 4)),), (view,))

        assert np.array_equal(tensors["t"], values.reshape(4, 4))
        assert not tensors["t"].flags.writeable


@pytest.mark.parametrize(
    ("value", "code", "named"),
    [
        (np.zeros(6, [("a", "u4"), ("b", "u4"), ("c", "S1")]), Code.BAD_DTYPE, "'a'"),
        (np.zeros(2, [("a", [("b", "u4")])]), Code.BAD_DTYPE, "'b'"),
        (np.array([object()]), Code.BAD_DTYPE, "object"),
        (np.array(["text"]), Code.BAD_DTYPE, "U4"),
        (np.array([b"text"]), Code.BAD_DTYPE, "S4"),
        (np.array([True]), Code.BAD_DTYPE, "bool"),
        (np.array([1j]), Code.BAD_DTYPE, "complex128"),
        (np.array(["2020-01-01"], "M8[D]"), Code.BAD_DTYPE, "datetime64"),
        (np.zeros(2, np.longdouble), Code.BAD_DTYPE, "float128"),
        (np.uint8(7), Code.BAD_SHAPE, "0 axes"),
        (np.array(7), Code.BAD_SHAPE, "0 axes"),
        (np.zeros((1,) * 9, np.uint8), Code.BAD_SHAPE, "9 axes"),
        (np.zeros((0, 3), np.uint8), Code.EMPTY_PAYLOAD, "(0, 3)"),
        (b"", Code.EMPTY_PAYLOAD, "no bytes"),
        ([1, 2, 3], Code.BAD_DTYPE, "list"),
        ("path.png", Code.BAD_DTYPE, "str"),
        (None, Code.BAD_DTYPE, "NoneType"),
        (b"BM raw bytes", Code.BAD_IMAGE, "neither JPEG nor PNG"),
        (b"\x01", Code.BAD_IMAGE, "neither JPEG nor PNG"),
        ({}, Code.EMPTY_PAYLOAD, "no inputs"),
        ({"a": np.zeros(0)}, Code.EMPTY_PAYLOAD, "'a'"),
        ({"a": np.array([True])}, Code.BAD_DTYPE, "'a'"),
        ({"": np.zeros(1)}, Code.BAD_FIELD, "''"),
    ],
)
def test_what_can_not_be_sent_is_refused_by_name(value: object, code: Code, named: str) -> None:
    """PAY-05 and its like: the dtype, shape or type is named, nothing is sent."""
    with pytest.raises(InvalidFrameError) as caught:
        arrays.prepare(value)

    assert caught.value.code == code
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("data", "encoding", "expected"),
    [
        (JPEG, None, Encoding.JPEG),
        (PNG, None, Encoding.PNG),
        (bytearray(PNG), None, Encoding.PNG),
        (PNG, "png", Encoding.PNG),
        (memoryview(JPEG), "jpeg", Encoding.JPEG),
        (np.frombuffer(JPEG, np.uint8), Encoding.JPEG, Encoding.JPEG),
        (memoryview(bytes(2) + PNG)[2:], "png", Encoding.PNG),
    ],
)
def test_an_encoded_image_is_known_by_its_first_bytes(
    data: object, encoding: str | None, expected: Encoding
) -> None:
    """Bytes need no encoding; what looks like an array does."""
    prepared = arrays.prepare(data, encoding=encoding)

    assert prepared.encoding is expected
    assert prepared.shape == ()


@pytest.mark.parametrize(
    ("data", "encoding", "named"),
    [
        (JPEG, "png", "jpeg"),
        (PNG, "webp", "webp"),
        (FRAME, "png", "uint8"),
        (3, "jpeg", "int"),
        ({"a": FRAME}, "png", "several inputs"),
    ],
)
def test_a_wrong_encoding_is_refused(data: object, encoding: str, named: str) -> None:
    """A label that contradicts the bytes would only fail at the worker."""
    with pytest.raises(InvalidFrameError) as caught:
        arrays.prepare(data, encoding=encoding)

    assert caught.value.code == Code.BAD_ENCODING
    assert named in str(caught.value)


def test_bytes_of_no_image_are_not_taken_for_one() -> None:
    """IMG-03: the code is the broker's own for them."""
    with pytest.raises(InvalidFrameError, match="neither JPEG nor PNG") as caught:
        arrays.prepare(b"GIF89a", encoding="png")

    assert caught.value.code == Code.BAD_IMAGE


def test_several_inputs_become_one_payload() -> None:
    """Their bytes follow one another in the order of the mapping."""
    first, second = np.arange(6, dtype=">i4").reshape(2, 3), np.array([0.5], np.float16)

    prepared = arrays.prepare({"first": first, "second": second})

    assert prepared.inputs == (TensorSpec("first", "int32", (2, 3)), TensorSpec("second", "float16", (1,)))
    assert prepared.data == first.astype("<i4").tobytes() + second.tobytes()


class Kind(enum.IntEnum):
    DAY = 1


def test_numpy_values_in_meta_become_plain_ones() -> None:
    """PAY-10: every numpy scalar type is converted, tuples become lists."""
    meta = {
        "pts": np.int64(-5),
        "score": np.float32(0.5),
        "flag": np.bool_(True),
        "size": (np.int32(3), np.int32(4)),
        "name": np.str_("cam"),
        "raw": np.bytes_(b"x"),
        "box": np.array([[1, 2], [3, 4]]),
        "kind": Kind.DAY,
        "nested": {"list": [np.uint64(2**64 - 1), None]},
        "buffer": bytearray(b"ab"),
    }

    plain, size = arrays.plain_meta(meta, max_bytes=4096)

    assert plain == {
        "pts": -5,
        "score": 0.5,
        "flag": True,
        "size": [3, 4],
        "name": "cam",
        "raw": b"x",
        "box": [[1, 2], [3, 4]],
        "kind": 1,
        "nested": {"list": [2**64 - 1, None]},
        "buffer": b"ab",
    }
    assert plain is not None
    assert type(plain["flag"]) is bool
    assert type(plain["kind"]) is int
    assert 0 < size < 4096


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -(2**63), 0])
def test_integers_of_64_bits_are_carried(value: int) -> None:
    """PAY-09: the first two of the case round-trip."""
    assert arrays.plain_meta({"id": value}, max_bytes=100)[0] == {"id": value}


@pytest.mark.parametrize(
    ("meta", "code", "named"),
    [
        ({"id": 2**64}, Code.OUT_OF_RANGE, "meta.id"),
        ({"id": -(2**63) - 1}, Code.OUT_OF_RANGE, "meta.id"),
        ({"a": {"ids": [0, uuid.UUID(int=2**127).int]}}, Code.OUT_OF_RANGE, "meta.a.ids[1]"),
        ({"when": np.datetime64("2020-01-01")}, Code.BAD_FIELD, "meta.when"),
        ({"z": 1j}, Code.BAD_FIELD, "meta.z"),
        ({"s": {1, 2}}, Code.BAD_FIELD, "meta.s"),
        ({1: "x"}, Code.BAD_FIELD, "1"),
        ({"t": "\ud800"}, Code.BAD_FIELD, "meta.t"),
        ({"\ud800": 1}, Code.BAD_FIELD, "UTF-8"),
        ([1], Code.BAD_FIELD, "list"),
        ({"big": bytes(5000)}, Code.META_TOO_LARGE, "4096"),
    ],
)
def test_meta_that_can_not_be_carried_is_refused_by_field(meta: object, code: Code, named: str) -> None:
    """PAY-09: the field is named."""
    with pytest.raises(InvalidFrameError) as caught:
        arrays.plain_meta(meta, max_bytes=4096)  # type: ignore[arg-type]

    assert caught.value.code == code
    assert named in str(caught.value)


def test_meta_nested_without_end_is_refused() -> None:
    """A structure that contains itself ends in an error, not in a RecursionError."""
    endless: dict[str, object] = {}
    endless["self"] = endless

    with pytest.raises(InvalidFrameError, match="too_deep"):
        arrays.plain_meta(endless, max_bytes=4096)


@pytest.mark.parametrize("value", [True, np.bool_(False), 1.0, "1", None])
def test_a_whole_number_is_asked_for_as_one(value: object) -> None:
    """A bool is no priority."""
    with pytest.raises(InvalidFrameError, match="priority"):
        arrays.checked_int(value, "priority", 0, 9)


def test_a_numpy_integer_is_a_whole_number() -> None:
    """What comes out of an array may go into a field."""
    assert arrays.checked_int(np.int8(5), "priority", 0, 9) == 5
