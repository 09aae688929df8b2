"""Every rule of a frame, in a lone message and in a bundle."""

from __future__ import annotations

import hr_wire
import msgpack
import pytest

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import (
    BadFrame,
    Batch,
    Color,
    Encoding,
    Frame,
    Frames,
    Keep,
    Limits,
    ShmRef,
    TensorSpec,
)

LIMITS = hr_wire.LIMITS
GOOD = {"stream": "cam-1", "seq": 1, "epoch": 2, "shape": [2, 3]}
DATA = b"\x01\x02\x03\x04\x05\x06"


def decode_lone(fields: dict, payload: bytes | None = DATA, limits: Limits = LIMITS):
    parts = [msgpack.packb({"v": 1, "type": "frame", **fields})]
    (frame,) = codec.decode(parts if payload is None else [*parts, payload], limits).frames
    return frame


def decode_bundle(entries: list, payloads: list[bytes], limits: Limits = LIMITS) -> tuple:
    parts = [msgpack.packb({"v": 1, "type": "frame", "frames": entries}), *payloads]
    return codec.decode(parts, limits).frames


#: id -> (fields that differ from GOOD, payload, code). None as a field's value leaves it out.
BAD: dict[str, tuple[dict, bytes, str]] = {
    "dtype unknown": ({"dtype": "complex64"}, DATA, "bad_dtype"),
    "dtype bool": ({"dtype": "bool"}, DATA, "bad_dtype"),
    "dtype object": ({"dtype": "object"}, DATA, "bad_dtype"),
    "dtype O": ({"dtype": "O"}, DATA, "bad_dtype"),
    "dtype big-endian": ({"dtype": ">u2"}, DATA, "bad_dtype"),
    "dtype structured": ({"dtype": [["a", "u4"]]}, DATA, "bad_dtype"),
    "dtype number": ({"dtype": 1}, DATA, "bad_dtype"),
    "shape missing": ({"shape": None}, DATA, "missing_field"),
    "shape zero-dim": ({"shape": []}, DATA, "bad_shape"),
    "shape zero axis": ({"shape": [6, 0]}, DATA, "bad_shape"),
    "shape negative": ({"shape": [-2, -3]}, DATA, "bad_shape"),
    "shape nine axes": ({"shape": [1] * 8 + [6]}, DATA, "bad_shape"),
    "shape bool": ({"shape": [True, 6]}, DATA, "bad_shape"),
    "shape float": ({"shape": [2.0, 3.0]}, DATA, "bad_shape"),
    "shape text": ({"shape": "2x3"}, DATA, "bad_shape"),
    "shape number": ({"shape": 6}, DATA, "bad_shape"),
    "shape overflow": ({"shape": [2**63, 2**63, 2]}, DATA, "bad_shape"),
    "shape lying": ({"shape": [2, 4]}, DATA, "size_mismatch"),
    "shape lying by dtype": ({"dtype": "float32"}, DATA, "size_mismatch"),
    "payload empty": ({}, b"", "empty_payload"),
    "payload too large": ({"shape": [101]}, bytes(101), "frame_too_large"),
    "encoding unknown": ({"encoding": "webp"}, DATA, "bad_encoding"),
    "encoding number": ({"encoding": 1}, DATA, "bad_encoding"),
    "color unknown": ({"color": "yuv"}, DATA, "bad_color"),
    "color number": ({"color": 3}, DATA, "bad_color"),
    "color gray of three channels": ({"color": "gray", "shape": [1, 2, 3]}, DATA, "bad_color"),
    "color gray of one axis": ({"color": "gray", "shape": [6]}, DATA, "bad_color"),
    "priority too high": ({"priority": 10}, DATA, "out_of_range"),
    "priority negative": ({"priority": -1}, DATA, "out_of_range"),
    "priority bool": ({"priority": True}, DATA, "bad_field"),
    "priority float": ({"priority": 1.0}, DATA, "bad_field"),
    "ttl zero": ({"ttl_ms": 0}, DATA, "out_of_range"),
    "ttl negative": ({"ttl_ms": -5}, DATA, "out_of_range"),
    "ttl above a day": ({"ttl_ms": 86_400_001}, DATA, "out_of_range"),
    "ttl NaN": ({"ttl_ms": float("nan")}, DATA, "bad_field"),
    "ttl bool": ({"ttl_ms": True}, DATA, "bad_field"),
    "seq negative": ({"seq": -1}, DATA, "out_of_range"),
    "seq text": ({"seq": "1"}, DATA, "bad_field"),
    "seq bool": ({"seq": False}, DATA, "bad_field"),
    "epoch negative": ({"epoch": -1}, DATA, "out_of_range"),
    "epoch float": ({"epoch": 2.5}, DATA, "bad_field"),
    "pts above 63 bits": ({"pts_ns": 2**63}, DATA, "out_of_range"),
    "pts float": ({"pts_ns": 0.5}, DATA, "bad_field"),
    "keep unknown": ({"keep": "newest"}, DATA, "bad_field"),
    "keep number": ({"keep": 1}, DATA, "bad_field"),
    "model number": ({"model": 1}, DATA, "bad_field"),
    "model too long": ({"model": "x" * 257}, DATA, "bad_field"),
    "meta no map": ({"meta": [1]}, DATA, "bad_field"),
    "meta bytes key": ({"meta": {b"a": 1}}, DATA, "bad_field"),
    "meta inner bytes key": ({"meta": {"a": [{"b": {b"c": 1}}]}}, DATA, "bad_field"),
    "meta too large": ({"meta": {"a": "x" * 4096}}, DATA, "meta_too_large"),
    "lane unknown": ({"lane": "rdma"}, DATA, "bad_field"),
    "lane number": ({"lane": 1}, DATA, "bad_field"),
    "image of another kind": ({"encoding": "jpeg"}, hr_wire.png_bytes(4, 4), "bad_encoding"),
    "image of no kind": ({"encoding": "jpeg"}, b"<html>", "bad_image"),
    "image cut in its header": ({"encoding": "png"}, hr_wire.png_bytes(4, 4)[:20], "bad_image"),
    "image too large": (
        {"encoding": "png", "shape": None},
        hr_wire.png_bytes(30_000, 30_000),
        "image_too_large",
    ),
    "image with lying shape": ({"encoding": "png", "shape": [4, 5, 3]}, hr_wire.png_bytes(4, 4), "bad_shape"),
    "image with one axis": ({"encoding": "png", "shape": [4]}, hr_wire.png_bytes(4, 4), "bad_shape"),
    "image with broken shape": ({"encoding": "png", "shape": 4}, hr_wire.png_bytes(4, 4), "bad_shape"),
    "image of float": ({"encoding": "png", "dtype": "float32"}, hr_wire.png_bytes(4, 4), "bad_dtype"),
    "image with inputs": ({"encoding": "png", "inputs": []}, hr_wire.png_bytes(4, 4), "bad_field"),
    "inputs empty": ({"inputs": []}, DATA, "bad_field"),
    "inputs no array": ({"inputs": {"x": 1}}, DATA, "bad_field"),
    "inputs too many": ({"inputs": [{"dtype": "uint8", "shape": [1]}] * 65}, DATA, "bad_field"),
    "input no map": ({"inputs": [1]}, DATA, "bad_field"),
    "input without shape": ({"inputs": [{"dtype": "uint8"}]}, DATA, "missing_field"),
    "input of bool": ({"inputs": [{"dtype": "bool", "shape": [6]}]}, DATA, "bad_dtype"),
    "input with zero axis": ({"inputs": [{"dtype": "uint8", "shape": [0]}]}, DATA, "bad_shape"),
    "inputs lying": ({"inputs": [{"dtype": "uint8", "shape": [5]}]}, DATA, "size_mismatch"),
}


def bad_entry(name: str) -> tuple[dict, bytes, str]:
    changes, payload, code = BAD[name]
    entry = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return entry, payload, code


@pytest.mark.parametrize("name", BAD)
def test_a_bad_frame_is_rejected_by_name(name):
    """A frame whose stream can be read comes back as BadFrame with its code, its names and its meta."""
    entry, payload, code = bad_entry(name)

    frame = decode_lone(entry, payload, Limits(max_frame_bytes=100))

    assert type(frame) is BadFrame
    assert frame.code == code
    assert frame.message
    assert frame.stream == "cam-1"
    assert frame.seq == (None if name.startswith("seq") else 1)
    assert frame.epoch == (None if name.startswith("epoch") else 2)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_frame_leaves_its_neighbours_in_a_bundle_alone(name):
    """The frames before and behind a bad one decode as if it were good."""
    entry, payload, code = bad_entry(name)

    first, bad, last = decode_bundle(
        [GOOD, entry, GOOD], [DATA, payload, DATA[::-1]], Limits(max_frame_bytes=100)
    )

    assert (first.payload, last.payload) == (DATA, DATA[::-1])
    assert type(bad) is BadFrame
    assert bad.code == code


@pytest.mark.parametrize("name", [name for name in BAD if name != "image with lying shape"])
def test_a_bad_frame_fails_a_batch(name):
    """The broker checked every frame: a bad one in a BATCH means that something worse is wrong."""
    entry, payload, code = bad_entry(name)
    header = {"v": 1, "type": "batch", "batch": 1, "model": "m", "version": "1", "size_class": "s"}
    parts = [msgpack.packb(header | {"frames": [entry]}), payload]

    if name.startswith("image") and code in {"bad_image", "bad_encoding"}:
        assert type(codec.decode(parts, LIMITS)) is Batch  # its bytes are the decoder's business
        return
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(parts, Limits(max_frame_bytes=100))
    assert caught.value.code == code


BAD_STREAMS = {
    "missing": (None, "missing_field"),
    "empty": ("", "bad_stream"),
    "too long": ("x" * 129, "bad_stream"),
    "too long in UTF-8": ("é" * 65, "bad_stream"),
    "NUL": ("cam\0", "bad_stream"),
    "number": (7, "bad_stream"),
    "bytes": (b"cam", "bad_stream"),
    "list": (["cam"], "bad_stream"),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_frame_without_readable_stream_can_not_be_named(name):
    """Alone it is refused as a message; in a bundle it keeps its place without a stream."""
    stream, code = BAD_STREAMS[name]
    entry = GOOD | {"stream": stream}

    with pytest.raises(RemoteProtocolError) as caught:
        decode_lone(entry)
    good, bad = decode_bundle([GOOD, entry], [DATA, DATA])

    assert caught.value.code == bad.code == code
    assert type(good) is Frame
    assert (bad.stream, bad.seq) == (None, 1)


@pytest.mark.parametrize("stream", ["a", "x" * 128, "é" * 64, "site-a/cam 1", "x" * 33], ids=len)
def test_a_stream_of_1_to_128_bytes_is_accepted(stream):
    """The bound is in bytes of UTF-8 and inclusive."""
    assert decode_lone(GOOD | {"stream": stream}).stream == stream


def test_a_bad_frame_keeps_what_can_be_read():
    """pts_ns and meta are carried to the rejected outcome; what is broken itself is left out."""
    both = decode_lone(GOOD | {"dtype": "no", "pts_ns": 5, "meta": {"a": 1}})
    neither = decode_lone(GOOD | {"dtype": "no", "pts_ns": "5", "meta": 1})

    assert (both.pts_ns, both.meta) == (5, {"a": 1})
    assert (neither.pts_ns, neither.meta) == (None, None)


def test_what_is_no_map_takes_its_place_and_its_part():
    """An entry that can't be read at all still stands for one payload part."""
    first, bad, last = decode_bundle([GOOD, 17, GOOD], [DATA, b"x", DATA[::-1]])

    assert (first.payload, last.payload) == (DATA, DATA[::-1])
    assert bad == BadFrame("bad_field", "a frame must be a map, got 17")


@pytest.mark.parametrize(
    ("entries", "payload_count", "code"),
    [
        (5, 0, "bad_field"),
        ([], 0, "out_of_range"),
        ([GOOD] * 257, 257, "out_of_range"),
        ([GOOD, GOOD], 1, "part_count"),
        ([GOOD, GOOD], 3, "part_count"),
        ([GOOD | {"data": DATA}], 1, "part_count"),
    ],
    ids=["no array", "empty", "too many", "part too few", "part too many", "part beside data"],
)
def test_a_bundle_that_does_not_add_up_is_refused_whole(entries, payload_count, code):
    """When parts and entries don't match, no payload can be given to any frame."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_bundle(entries, [DATA] * payload_count)
    assert caught.value.code == code


def test_a_bundle_mixes_lanes_and_data():
    """Frames whose payload is elsewhere take no part; the others take theirs in order."""
    shm = {
        "stream": "b",
        "shape": [6],
        "lane": "shm",
        "arena": "a",
        "offset": 0,
        "nbytes": 6,
        "generation": 1,
    }
    held = {"stream": "c", "shape": [6], "data": b"abcdef"}
    inline = GOOD | {"lane": "inline"}

    frames = decode_bundle([shm, GOOD, held, inline], [DATA, DATA[::-1]])

    assert [frame.payload for frame in frames] == [ShmRef("a", 0, 6, 1), DATA, b"abcdef", DATA[::-1]]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"arena": None}, "bad_field"),
        ({"arena": ""}, "out_of_range"),
        ({"offset": -1}, "out_of_range"),
        ({"nbytes": None}, "bad_field"),
        ({"nbytes": 0}, "empty_payload"),
        ({"nbytes": 2**40}, "frame_too_large"),
        ({"nbytes": 5}, "size_mismatch"),
        ({"generation": "1"}, "bad_field"),
        ({"data": DATA}, "bad_field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_reference_to_shared_memory_is_rejected(changes, code):
    """Lane shm is checked as far as it can be without the arena."""
    shm = {"lane": "shm", "arena": "a", "offset": 0, "nbytes": 6, "generation": 1}

    frame = decode_lone(GOOD | shm | changes, payload=None)

    assert frame.code == code


def test_an_image_in_shared_memory_must_bring_its_shape():
    """Its bytes are not here to be read."""
    shm = {"lane": "shm", "arena": "a", "offset": 0, "nbytes": 6, "generation": 1, "encoding": "png"}

    missing = decode_lone({"stream": "a"} | shm, payload=None)
    present = decode_lone({"stream": "a", "shape": [2, 3, 3]} | shm, payload=None)

    assert missing.code == "missing_field"
    assert (present.shape, present.encoding) == ((2, 3, 3), Encoding.PNG)


def test_nil_means_left_out():
    """Producers in other languages often write a key with no value."""
    optional = ("seq", "epoch", "ttl_ms", "pts_ns", "meta", "keep", "color", "encoding", "priority", "model")
    nothing = dict.fromkeys((*optional, "dtype", "lane", "inputs"))

    raw = decode_lone({"stream": "a", "shape": [6]} | nothing)
    image = decode_lone(
        {"stream": "a", "shape": None} | nothing | {"encoding": "png"}, hr_wire.png_bytes(2, 3)
    )

    assert raw == Frame("a", DATA, 6, (6,))
    assert image.shape == (2, 3, 3)


def test_a_frame_without_payload_is_rejected_by_name():
    """A script that forgot the pixels is told so on its stream."""
    frame = decode_lone(GOOD, payload=None)

    assert (frame.code, frame.stream) == ("empty_payload", "cam-1")


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [
        ("uint8", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8), ("int8", 1), ("int16", 2), ("int32", 4),
        ("int64", 8), ("float16", 2), ("float32", 4), ("float64", 8),
    ],
)  # fmt: skip
def test_all_numeric_dtypes_are_accepted(dtype, item_bytes):
    """The little-endian fixed-size numeric ones, float16 included."""
    frame = decode_lone({"stream": "a", "shape": [3, 2], "dtype": dtype}, bytes(6 * item_bytes))

    assert (frame.dtype, frame.nbytes) == (dtype, 6 * item_bytes)


def test_gray_may_have_two_axes_or_one_channel():
    """Both spellings of a gray image are in use."""
    for shape in ([2, 3], [2, 3, 1]):
        assert decode_lone(GOOD | {"shape": shape, "color": "gray"}).color is Color.GRAY
    image = decode_lone({"stream": "a", "encoding": "png", "color": "gray"}, hr_wire.png_bytes(2, 3))
    assert image.shape == (2, 3, 3)


def test_the_shape_of_an_image_is_read_from_its_header():
    """The producer need not know it; when it says it, height and width must be right, channels need not."""
    image = hr_wire.jpeg_bytes(480, 640, before=hr_wire.exif_segment(6))

    unsaid = decode_lone({"stream": "a", "encoding": "jpeg"}, image)
    said = decode_lone({"stream": "a", "encoding": "jpeg", "shape": [640, 480]}, image)

    assert unsaid.shape == said.shape == (640, 480, 3)


def test_an_image_is_sent_without_a_shape_that_is_not_known():
    """A client hands an encoded image over as it is; the broker finds its shape."""
    image = hr_wire.png_bytes(4, 5)
    frame = Frame("a", image, len(image), (), encoding=Encoding.PNG)

    decoded = codec.decode(codec.encode(Frames((frame,))), LIMITS).frames[0]

    assert decoded.shape == (4, 5, 3)


def test_a_batch_takes_the_shape_that_the_broker_read():
    """The worker's decoder compares again; the header of the image is not read twice."""
    header = {"v": 1, "type": "batch", "batch": 1, "model": "m", "version": "1", "size_class": "s"}
    entries = [{"stream": "a", "encoding": "png", "shape": [7, 8, 3]}, {"stream": "a", "encoding": "png"}]
    image = hr_wire.png_bytes(4, 5)

    batch = codec.decode([msgpack.packb(header | {"frames": entries}), image, image], LIMITS)

    assert [frame.shape for frame in batch.frames] == [(7, 8, 3), (4, 5, 3)]


def test_a_batch_needs_frames():
    """A batch is never empty."""
    header = {"v": 1, "type": "batch", "batch": 1, "model": "m", "version": "1", "size_class": "s"}

    with pytest.raises(RemoteProtocolError, match="frames is missing"):
        codec.decode([msgpack.packb(header)], LIMITS)


def test_integers_of_64_bits_round_trip_in_meta():
    """PAY-09: 2^63 and 2^64-1 come back as they were; larger ones can't be packed at all."""
    meta = {"a": 2**63, "b": 2**64 - 1, "c": -(2**63), "d": True, "e": 1.0}
    frames = Frames((hr_wire.raw_frame(meta=meta),))

    decoded = codec.decode(codec.encode(frames), LIMITS).frames[0].meta

    assert decoded == meta
    assert [type(value) for value in decoded.values()] == [type(value) for value in meta.values()]
    with pytest.raises(OverflowError):
        codec.encode(Frames((hr_wire.raw_frame(meta={"a": 2**64}),)))


def test_meta_of_exactly_the_limit_is_accepted():
    """The limit counts the bytes of meta as msgpack, inclusively."""
    meta = {"a": "x" * (100 - 5)}
    assert len(msgpack.packb(meta)) == 100

    assert decode_lone(GOOD | {"meta": meta}, limits=Limits(max_meta_bytes=100)).meta == meta
    assert decode_lone(GOOD | {"meta": meta}, limits=Limits(max_meta_bytes=99)).code == "meta_too_large"


def test_inputs_describe_the_parts_of_one_payload():
    """Several inputs lie one after another; shape and dtype of the frame are those of the first."""
    inputs = [
        {"name": "x", "dtype": "uint16", "shape": [2]},
        {"name": "n", "dtype": "uint8", "shape": [1, 2]},
    ]

    frame = decode_lone({"stream": "a", "inputs": inputs})

    assert frame.inputs == (TensorSpec("x", "uint16", (2,)), TensorSpec("n", "uint8", (1, 2)))
    assert (frame.shape, frame.dtype, frame.keep) == ((2,), "uint16", Keep.ALL)
