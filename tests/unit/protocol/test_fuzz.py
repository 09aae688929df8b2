"""Any bytes give a message or RemoteProtocolError, and every message survives the wire.

The profile is derandomised: a run tries the same examples every time. Raise ``FUZZ_EXAMPLES`` to
look further.
"""

from __future__ import annotations

import math
import os

import hr_wire
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Color,
    Credit,
    Done,
    Frame,
    FrameResult,
    Frames,
    Keep,
    Limits,
    Outcome,
    Outcomes,
    Reject,
    Request,
    Status,
    TensorSpec,
    Timing,
)
from headrace.protocol.tensors import ITEM_BYTES

fuzz = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "300")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

LIMITS = Limits(
    max_frame_bytes=4096,
    max_message_bytes=16_384,
    max_header_bytes=8192,
    max_frames_per_message=8,
    max_pixels=10_000,
)
ENCODED = [codec.encode(message) for message in hr_wire.SAMPLES.values()]
CODES = frozenset(Code)
FIELD_NAMES = sorted(
    {"v", "type", "data", "lane", "arena", "offset", "nbytes", "generation", "frames", "results", "outcomes"}
    | {name for kind in codec.TYPE_NAMES for name in kind.__dataclass_fields__}
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=12)
    | st.sampled_from([*codec.TYPE_NAMES.values(), "raw", "png", "jpeg", "shm", "uint8", "cam-1", 1])
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELD_NAMES), inner, max_size=6)
    ),
    max_leaves=20,
)
finite = st.floats(allow_nan=False, width=64)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | finite
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
payloads = st.binary(max_size=40) | st.sampled_from([hr_wire.png_bytes(4, 4), hr_wire.jpeg_bytes(4, 4)])


def demand_message_or_refusal(parts) -> None:
    """The property itself; both entrances, with and without expectations."""
    for call in (
        lambda: codec.decode(parts, LIMITS),
        lambda: codec.decode(parts, LIMITS, codec.FROM_PRODUCER),
        lambda: codec.decode_published([b"cam-1\0", *parts], LIMITS),
    ):
        refusal = message = None
        try:
            message = call()
        except RemoteProtocolError as error:
            refusal = error
        if refusal is None:
            assert type(message) in codec.TYPE_NAMES
        else:
            assert refusal.code in CODES
            assert refusal.message


@fuzz
@given(st.lists(st.binary(max_size=200) | payloads, max_size=4))
def test_any_bytes(parts):
    """Random parts, the empty message included."""
    demand_message_or_refusal(parts)


@fuzz
@given(st.data())
def test_mutated_messages(data):
    """A real message with bytes changed, inserted and removed, and parts dropped, doubled and swapped."""
    parts = [bytearray(part) for part in data.draw(st.sampled_from(ENCODED))]
    for _ in range(data.draw(st.integers(1, 4))):
        part = parts[data.draw(st.integers(0, len(parts) - 1))]
        at = data.draw(st.integers(0, len(part)))
        match data.draw(st.sampled_from(["change", "insert", "remove", "drop", "double"])):
            case "change" if at < len(part):
                part[at] = data.draw(st.integers(0, 255))
            case "insert":
                part[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "remove":
                del part[at : at + data.draw(st.integers(1, 4))]
            case "drop" if len(parts) > 1:
                parts.pop()
            case "double":
                parts.append(part)
            case _:
                pass

    demand_message_or_refusal([bytes(part) for part in parts])


@fuzz
@given(trees, st.lists(payloads, max_size=3))
def test_msgpack_of_any_structure(header, parts):
    """Well-formed msgpack in which nothing is where it belongs."""
    demand_message_or_refusal([msgpack.packb(header), *parts])


@fuzz
@given(
    st.sampled_from(sorted(codec.TYPE_NAMES.values())),
    st.dictionaries(st.sampled_from(FIELD_NAMES), trees, max_size=10),
    st.lists(payloads, max_size=3),
)
def test_headers_of_each_type_with_any_fields(kind, fields, parts):
    """The right type with fields that exist and values that do not fit."""
    demand_message_or_refusal([msgpack.packb({"v": 1, "type": kind} | fields), *parts])


@fuzz
@given(st.data())
def test_real_headers_with_one_value_replaced(data):
    """One value anywhere in a real header replaced by anything."""
    parts = data.draw(st.sampled_from(ENCODED))
    header = holder = msgpack.unpackb(bytes(parts[0]))
    key = data.draw(st.sampled_from(sorted(header)))
    while isinstance(holder[key], dict | list) and holder[key] and data.draw(st.booleans()):
        holder = holder[key]
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key = data.draw(st.sampled_from(keys))
    holder[key] = data.draw(trees)

    demand_message_or_refusal([msgpack.packb(header), *parts[1:]])


# -- round trips -------------------------------------------------------------------------------------

u64s = st.integers(0, 2**64 - 1)
streams = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=32)
metas = st.none() | st.dictionaries(st.text(max_size=5), values, max_size=3)
names = st.text(max_size=20)


@st.composite
def frames(draw):
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    is_gray_possible = len(shape) == 2 or (len(shape) == 3 and shape[2] == 1)
    return Frame(
        stream=draw(streams),
        payload=bytes([draw(st.integers(0, 255))]) * size,
        nbytes=size,
        shape=shape,
        dtype=dtype,
        color=draw(st.sampled_from(Color if is_gray_possible else [Color.RGB, Color.BGR])),
        seq=draw(st.none() | u64s),
        epoch=draw(st.none() | u64s),
        model=draw(names),
        priority=draw(st.integers(0, 9)),
        ttl_ms=draw(st.none() | st.integers(1, 86_400_000)),
        keep=draw(st.sampled_from(Keep)),
        pts_ns=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        meta=draw(metas),
    )


@st.composite
def tensors(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3))
    specs = tuple(TensorSpec(draw(names), "float32", tuple(shape)) for shape in shapes)
    return {"tensors": specs, "payloads": tuple(b"\x01" * (4 * math.prod(spec.shape)) for spec in specs)}


@st.composite
def results(draw):
    return FrameResult(
        status=draw(st.sampled_from([Status.OK, Status.ERROR])),
        code=draw(names),
        message=draw(st.text(max_size=40)),
        outputs=draw(values),
        flags=tuple(draw(st.lists(names, max_size=3))),
        **draw(tensors()),
    )


@st.composite
def outcomes(draw, stream: str):
    times = draw(st.lists(st.none() | st.integers(0, 2**40), min_size=5, max_size=5))
    return Outcome(
        stream=stream,
        epoch=draw(u64s),
        seq=draw(u64s),
        boot=draw(u64s),
        pub_seq=draw(u64s),
        status=draw(st.sampled_from(Status)),
        code=draw(names),
        message=draw(names),
        model=draw(names),
        version=draw(names),
        size_class=draw(names),
        worker=draw(names),
        attempt=draw(st.integers(0, 3)),
        batch_size=draw(st.integers(0, 32)),
        shape=tuple(draw(st.lists(st.integers(1, 5), max_size=3))),
        pts_ns=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        meta=draw(metas),
        retry_after_ms=draw(st.none() | st.integers(0, 1000)),
        timing=Timing(*times),
        outputs=draw(values),
        flags=tuple(draw(st.lists(names, max_size=2))),
        **draw(tensors()),
    )


any_message = st.one_of(
    st.lists(frames(), min_size=1, max_size=4).map(lambda items: Frames(tuple(items))),
    st.lists(frames(), min_size=1, max_size=4).map(lambda items: Batch(3, "m", "1", "s", tuple(items))),
    st.builds(Done, u64s, st.lists(results(), min_size=1, max_size=4).map(tuple), u64s, u64s, u64s),
    streams.flatmap(lambda stream: st.lists(outcomes(stream), min_size=1, max_size=3)).map(
        lambda items: Outcomes(tuple(items))
    ),
    st.builds(
        Credit,
        u64s,
        st.dictionaries(streams, u64s, max_size=4),
        st.dictionaries(st.sampled_from(Status), u64s),
    ),
    st.builds(Reject, st.just("queue_full"), names, st.none() | streams, st.none() | u64s, st.none() | u64s),
    st.builds(Request, u64s, st.just("status"), st.dictionaries(names, values, max_size=3)),
)


@fuzz
@given(any_message)
def test_every_message_survives_the_wire(message):
    """What was encoded decodes to an equal message, and encodes to the same bytes again."""
    parts = codec.encode(message)

    decoded = codec.decode(parts, hr_wire.LIMITS)

    assert decoded == message
    assert codec.encode(decoded) == parts


def test_the_property_can_fail():
    """The fuzz property notices an error of another kind."""
    with pytest.raises(TypeError):
        demand_message_or_refusal([5])
