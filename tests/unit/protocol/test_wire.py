"""Limits before allocation, and the single-part form of a frame."""

from __future__ import annotations

import time
import tracemalloc

import hr_wire
import msgpack
import pytest

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec, wire
from headrace.protocol.messages import BadFrame, Frame, Frames, Limits

LIMITS = hr_wire.LIMITS


def code_of(parts, limits: Limits = LIMITS) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(parts, limits)
    return caught.value.code


def nested(depth: int, opener: bytes = b"\x91") -> bytes:
    return opener * depth + b"\xc0"


BOMBS = {
    "10,000 arrays": (nested(10_000), "too_deep"),
    "10,000 maps": (nested(10_000, b"\x81\xa1a"), "too_deep"),
    "one array too deep": (b"\x81\xa1a" + nested(16), "too_deep"),
    "array of 2^32-1 with 4 bytes": (b"\xdd\xff\xff\xff\xff\x01\x02\x03\x04", "bad_msgpack"),
    "map of 2^32-1 with 4 bytes": (b"\xdf\xff\xff\xff\xff\xa1a\x01\x02", "bad_msgpack"),
    "text of 2^32-1 with 4 bytes": (b"\xdb\xff\xff\xff\xffabcd", "bad_msgpack"),
    "bytes of 2^32-1 with 4 bytes": (b"\xc6\xff\xff\xff\xffabcd", "bad_msgpack"),
    "many nested big arrays": (b"\xdd\x00\x0f\x00\x00" * 200_000, "too_deep"),
    "15 big arrays": (b"\xdd\x00\x0f\x00\x00" * 15 + bytes(1_000_000), "bad_msgpack"),
    "big arrays as data": (b"\x81\xa4data" + b"\xdd\x00\x0f\x00\x00" * 15 + bytes(900_000), "bad_msgpack"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_quickly_and_without_memory(name):
    """SEC-05: nesting and lengths that a header only claims cost neither time nor memory."""
    bomb, expected = BOMBS[name]
    tracemalloc.start()
    started = time.thread_time()

    code = code_of([bomb])

    used_s = time.thread_time() - started  # of this thread: what else the machine does is not our cost
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == expected
    assert used_s < 0.05
    assert peak_bytes < 3 * len(bomb) + 200_000


def test_the_small_headers_that_are_not_walked_claim_little():
    """The claims of a header below the walk's threshold are bounded by the threshold itself."""
    bomb = b"\xdc\x01\xf0" * 16 + bytes(400)
    assert len(bomb) < 512
    tracemalloc.start()

    code_of([bomb])

    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200_000


def test_depth_is_counted_exactly():
    """max_depth levels are accepted, one more is not; the header's own map is the first."""
    deepest = {"v": 1, "type": "request", "id": 1, "method": "m", "params": {"a": None}}
    deepest["params"]["a"] = msgpack.unpackb(nested(14))
    assert codec.decode([msgpack.packb(deepest)], LIMITS).params == deepest["params"]

    deepest["params"]["a"] = msgpack.unpackb(nested(15))
    assert code_of([msgpack.packb(deepest)]) == "too_deep"


def test_many_shallow_containers_are_not_deep():
    """A bundle has hundreds of maps and arrays side by side: only nesting counts."""
    frames = Frames(tuple(hr_wire.raw_frame(seq=seq) for seq in range(256)))

    assert codec.decode(codec.encode(frames), LIMITS) == frames


def test_the_stack_of_the_unpacker_is_measured():
    """The walk leaves max_depth levels free whatever capacity the msgpack library was built with."""
    assert wire.stack_capacity(lambda depth: depth <= 1024, "msgpack._cmsgpack") == 1024
    assert wire.stack_capacity(lambda depth: depth <= 37, "msgpack._cmsgpack") == 37


def test_the_pure_python_msgpack_is_refused_at_import():
    """Its depth limit moves with the caller's stack: it can't be used to count."""
    with pytest.raises(ImportError, match="C extension"):
        wire.stack_capacity(lambda depth: True, "msgpack.fallback")


@pytest.mark.parametrize(
    ("limits", "parts", "expected"),
    [
        (Limits(max_message_bytes=100), [b"\x80", bytes(100)], "message_too_large"),
        (Limits(max_header_bytes=100), [b"\x81\xa1a\xd9\x64" + b"x" * 100], "message_too_large"),
        (Limits(max_header_bytes=5000), [b"\xc4" * 6000], "message_too_large"),
        (Limits(max_header_bytes=5000), [b"\x81\xa1a\xda\x17\x70" + b"x" * 6000], "message_too_large"),
    ],
    ids=["message", "header", "header without map", "long header"],
)
def test_sizes_are_checked_first(limits, parts, expected):
    """A message above a limit is refused before its header is looked into."""
    assert code_of(parts, limits) == expected


def test_a_message_of_exactly_the_limit_is_accepted():
    """Limits are inclusive."""
    parts = codec.encode(Frames((hr_wire.raw_frame(),)))
    size_bytes = sum(map(len, parts))

    assert codec.decode(parts, Limits(max_message_bytes=size_bytes, max_header_bytes=len(parts[0])))
    assert code_of(parts, Limits(max_message_bytes=size_bytes - 1)) == "message_too_large"
    assert code_of(parts, Limits(max_header_bytes=len(parts[0]) - 1)) == "message_too_large"


def test_a_view_of_several_axes_counts_its_bytes():
    """PAY-02: len() of such a view is its first axis; sizes are taken in bytes."""
    view = memoryview(bytes(480 * 640 * 3)).cast("B", (480, 640, 3))
    frame = Frame("cam-1", view, view.nbytes, (480, 640, 3))

    decoded = codec.decode(codec.encode(Frames((frame,))), LIMITS).frames[0]

    assert decoded.nbytes == 921_600
    assert code_of([b"\x80", view], Limits(max_message_bytes=900_000)) == "message_too_large"


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x93\x01\x02\x03",
        b"\x81\x01\x02",
        b"\x81\xc0\x02",
        b"\x81\x90\x02",
        b"\x81\xa1a\xc7\x00\x05",
        b"\x81\xa1a\xd4\x05x",
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
        b"\x81\xa1a\xc7\x00\xff",
        b"\x81\xa1a\xa1\xff",
        b"\x81\xa1\xff\x01",
        b"\x81\xa1a\xa3\xed\xa0\x80",
        b"\x91\xa1\xff",
        b"\x82\xa4data\xa1\xff\xa1a\xa1\xff",
    ],
    ids=[
        "empty", "never used byte", "nil", "array", "number as key", "nil as key", "array as key",
        "empty extension", "extension", "timestamp", "empty timestamp", "value not UTF-8", "key not UTF-8",
        "surrogate", "not a map", "only data may be bytes",
    ],
)  # fmt: skip
def test_what_is_no_header_is_refused(head):
    """Whatever is not one msgpack map with text keys has one code."""
    assert code_of([head]) == "bad_msgpack"


def test_duplicate_keys_take_the_last_value():
    """msgpack does not forbid them; they are harmless."""
    head = b"\x83\xa4type\xa9heartbeat\xa4type\xa6cancel\xa5batch\x07"

    assert codec.decode([head], LIMITS).batch == 7


# -- the single-part form ----------------------------------------------------------------------------


def single(data: object, old_format: bool = False, **fields: object) -> list[bytes]:
    """What a plain script sends: one map, the pixels in it, no version and no type."""
    header = {"stream": "cam-1", "shape": [len(data)]} | fields | {"data": data}
    return [msgpack.packb(header, use_bin_type=not old_format)]


def only_frame(parts, limits: Limits = LIMITS):
    (frame,) = codec.decode(parts, limits, codec.FROM_INTAKE).frames
    return frame


def test_a_map_with_stream_shape_and_data_is_a_frame():
    """Version and type have defaults, so that the smallest producer is one packb call."""
    assert only_frame(single(b"\x01\x02")) == Frame("cam-1", b"\x01\x02", 2, (2,))


@pytest.mark.parametrize("size", [1, 31, 255, 256, 5_000, 65_535, 65_536, 1_048_575, 1_048_576, 1_048_577])
@pytest.mark.parametrize("old_format", [False, True], ids=["bin", "old raw"])
def test_data_of_any_size_and_either_format_is_accepted(size, old_format):
    """PAY-07: no size just above some library's default is special."""
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    if old_format:
        parts = [msgpack.packb({"stream": "cam-1", "shape": [size], "data": data}, use_bin_type=False)]
    else:
        parts = single(data)

    frame = only_frame(parts)

    assert bytes(frame.payload) == data
    assert frame.nbytes == size


@pytest.mark.parametrize("height_width", [(1080, 1920), (2160, 3840)], ids=["HD", "4K"])
def test_video_frames_pass_in_one_part_and_in_two(height_width):
    """PAY-07: 6.2 MB and 24.9 MB frames, whose header limit of 1 MiB does not count the pixels."""
    data = bytes(height_width[0] * height_width[1] * 3)
    shape = [*height_width, 3]

    one = only_frame(single(data, shape=shape))
    two = only_frame([msgpack.packb({"stream": "cam-1", "shape": shape}), data])

    assert one.nbytes == two.nbytes == len(data)
    assert type(one.payload) is memoryview  # a view of the message: no copy of the pixels


@pytest.mark.parametrize("old_format", [False, True], ids=["bin", "old raw"])
@pytest.mark.parametrize("in_bundle", [False, True], ids=["lone", "bundle"])
def test_decoding_never_depends_on_content(old_format, in_bundle):
    """PAY-04: every byte value and a lone -0.0, in the old raw format and in the bin format."""
    contents = [bytes([value]) * 8 for value in range(256)] + [b"\0" * 7 + b"\x80", "é€\0ab".encode()[:8]]
    for data in contents:
        entry = {"stream": "cam-é", "shape": [1], "dtype": "float64", "data": data}
        header = {"frames": [entry, entry]} if in_bundle else entry
        parts = [msgpack.packb(header, use_bin_type=not old_format)]

        frames = codec.decode(parts, LIMITS).frames

        assert [bytes(frame.payload) for frame in frames] == [data] * (2 if in_bundle else 1)


@pytest.mark.parametrize("field", ["model", "meta"])
def test_text_in_the_old_format_must_still_be_utf_8(field):
    """Only ``data`` holds bytes; elsewhere a text that is not UTF-8 is a mistake."""
    value = b"\xff" if field == "model" else {"a": b"\xff"}

    assert code_of(single(b"\xff", old_format=True, **{field: value})) == "bad_msgpack"


def test_of_two_data_fields_the_last_counts_at_any_size():
    """The same bytes mean the same below and above the size from which data is cut out of its header."""
    for size in (10, 10_000):
        pairs = [b"\xa6stream\xa1a", b"\xa5shape\x91\xcd" + size.to_bytes(2, "big")]
        pairs += [b"\xa4data" + msgpack.packb(b"\x01" * size), b"\xa4data" + msgpack.packb(b"\x02" * size)]

        frame = only_frame([b"\x84" + b"".join(pairs)])

        assert bytes(frame.payload) == b"\x02" * size


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, "bad_field"),
        (None, "bad_field"),
        ([1] * 9000, "bad_field"),
        ({"a": "x" * 9000}, "bad_field"),
        (b"", "empty_payload"),
        ("", "empty_payload"),
    ],
    ids=["number", "nil", "long array", "long map", "no bytes", "no text"],
)
def test_data_that_is_no_bytes_is_refused(value, expected):
    """Whatever its size, another type under data is named in the reject."""
    frame = only_frame([msgpack.packb({"stream": "cam-1", "shape": [1], "data": value})])

    assert type(frame) is BadFrame
    assert frame.code == expected


@pytest.mark.parametrize("old_format", [False, True], ids=["bin", "old raw"])
def test_little_data_in_a_large_header_is_found(old_format):
    """The search looks at the size of the message, not of the data."""
    fields = {"stream": "a", "shape": [3], "note": "x" * 5_000, "data": b"\xff\x00a"}

    assert bytes(only_frame([msgpack.packb(fields, use_bin_type=not old_format)]).payload) == b"\xff\x00a"


def test_data_is_found_behind_a_long_spelling_of_its_key():
    """str8 is a legal way to write a four-byte key."""
    data = bytes(10_000)
    parts = [b"\x83\xa6stream\xa1a\xa5shape\x91\xcd\x27\x10\xd9\x04data" + msgpack.packb(data)]

    assert only_frame(parts).nbytes == 10_000


def test_data_behind_too_many_fields_falls_under_the_header_limit():
    """The search for data ends after 64 fields, so that a map of millions costs nothing."""
    limits = Limits(max_header_bytes=8_000)
    fields = {f"x{index}": index for index in range(64)} | {
        "stream": "a",
        "shape": [9_000],
        "data": bytes(9_000),
    }

    assert code_of([msgpack.packb(fields)], limits) == "message_too_large"
    assert only_frame([msgpack.packb(fields)]).nbytes == 9_000


def test_a_large_header_beside_data_is_refused():
    """Cutting the pixels out does not let the rest of the header past its limit."""
    header = {"stream": "a", "shape": [5_000], "note": "x" * 9_000, "data": bytes(5_000)}

    assert code_of([msgpack.packb(header)], Limits(max_header_bytes=8_000)) == "message_too_large"


def test_a_view_with_gaps_is_read():
    """No transport hands one over; a caller might."""
    (packed,) = single(bytes(5_000))
    gaps = bytearray(2 * len(packed))
    gaps[::2] = packed

    assert only_frame([memoryview(gaps)[::2]]).nbytes == 5_000


def test_data_and_a_payload_part_together_are_refused():
    """There is one payload: which of two was meant is not guessed."""
    assert code_of([*single(b"\x01"), b"\x02"]) == "part_count"


# -- damaged messages --------------------------------------------------------------------------------


def one_kilobyte_job() -> bytes:
    return single(bytes(range(250)) * 4, shape=[1000])[0]


def outcome_of(part: bytes) -> str | None:
    try:
        (frame,) = codec.decode([part], LIMITS).frames
    except RemoteProtocolError as error:
        return error.code
    return frame.code if type(frame) is BadFrame else None


def test_a_job_cut_after_each_byte_or_lengthened_is_refused():
    """PAY-11: a valid one-kilobyte job, cut at each byte, and with three bytes appended."""
    job = one_kilobyte_job()

    assert {outcome_of(job[:length]) for length in range(len(job))} == {"bad_msgpack"}
    assert outcome_of(job + b"abc") == "trailing_bytes"
    assert outcome_of(job) is None


def test_a_job_with_a_flipped_bit_is_refused_or_another_frame():
    """PAY-11: each of the first 64 bits flipped gives a refusal, or a frame that really says so."""
    job = one_kilobyte_job()
    for bit in range(64):
        damaged = bytearray(job)
        damaged[bit // 8] ^= 1 << (bit % 8)

        outcome_of(bytes(damaged))  # must not raise anything else

    assert outcome_of(job) is None


def test_a_message_that_is_too_large_hides_none_behind_it():
    """PAY-08: small, too large, small, small: one is refused, three are frames."""
    limits = Limits(max_message_bytes=100_000)
    messages = [single(b"\x01"), single(bytes(110_000)), single(b"\x02"), single(b"\x03")]

    results = []
    for parts in messages:
        try:
            results.append(bytes(only_frame(parts, limits).payload))
        except RemoteProtocolError as error:
            results.append(error.code)

    assert results == [b"\x01", "message_too_large", b"\x02", b"\x03"]
