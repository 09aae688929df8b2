"""Tables: many rows in one header say exactly what the same rows would say one by one."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import hr_wire
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.columns import JOIN_BYTES
from headrace.protocol.messages import (
    BadFrame,
    Batch,
    Color,
    Done,
    Encoding,
    Frame,
    FrameResult,
    Frames,
    Keep,
    Outcome,
    Outcomes,
    ShmRef,
    Status,
    TensorSpec,
    Timing,
)

LIMITS = hr_wire.LIMITS
TABLES = ["frame table", "frame table shm", "batch table", "done", "done alike", "outcomes", "outcomes alike"]
LISTS = {"frame": "frames", "batch": "frames", "done": "results", "outcomes": "outcomes"}


def read(parts):
    """What the parts are decoded to, or the code by which they are refused."""
    try:
        return codec.decode(parts, LIMITS)
    except RemoteProtocolError as error:
        return error.code


def table_of(name: str) -> tuple[dict, list[bytes]]:
    header, *payloads = codec.encode(hr_wire.SAMPLES[name])
    return msgpack.unpackb(header), [bytes(payload) for payload in payloads]


def parts_of(header: dict, payloads: list[bytes]) -> list[bytes]:
    return [msgpack.packb(header), *payloads]


def as_list(header: dict, payloads: list[bytes]) -> list[bytes]:
    """The same rows as a list of maps with a part for each payload: the other way to write a message."""
    header = copy.deepcopy(header)
    count, shared, columns = (header.pop(name) for name in ("count", "shared", "columns"))
    sizes = header.pop("sizes", None)
    if sizes is not None:
        whole = payloads[0]
        sizes = [sizes] * (len(whole) // sizes) if isinstance(sizes, int) else sizes
        payloads = [whole[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    rows = []
    for index in range(count):
        row = shared | {name: column[index] for name, column in columns.items() if column[index] is not None}
        timing = {name: row.pop(name) for name in list(row) if name.endswith("_us")}
        rows.append(row | {"timing": timing} if timing else row)
    return parts_of(header | {LISTS[header["type"]]: rows}, payloads)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_the_list_of_its_rows_says(name):
    """Receivers take both, and both are the same message."""
    header, payloads = table_of(name)

    assert read(as_list(header, payloads)) == hr_wire.SAMPLES[name]
    assert read(parts_of(header, payloads)) == hr_wire.SAMPLES[name]


WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    "",
    "x" * 300,
    "a\0b",
    "bgr",
    "jpeg",
    b"\xff",
    [],
    [True],
    [[1]],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", TABLES)
def test_a_wrong_value_in_a_table_is_what_it_is_in_a_list(name, value):
    """Reading by columns refuses nothing and lets nothing pass that reading by rows does not."""
    header, payloads = table_of(name)
    fields = [("shared", key, None) for key in header["shared"] if key != "lane"]
    fields += [("columns", key, row) for key in header["columns"] for row in range(header["count"])]
    if header["type"] == "outcomes":
        fields = [field for field in fields if not field[1].endswith("_us")]

    for place, key, row in fields:
        changed = copy.deepcopy(header)
        if row is None:
            changed[place][key] = value
        else:
            changed[place][key][row] = value
        by_table, by_list = read(parts_of(changed, payloads)), read(as_list(changed, payloads))
        assert same(by_table, by_list), (place, key, row)


def same(one, other) -> bool:
    return repr(one) == repr(other)


frames = st.builds(
    lambda payload, **fields: Frame(payload=payload, nbytes=len(payload), shape=(len(payload),), **fields),
    payload=st.binary(min_size=1, max_size=6),
    stream=st.sampled_from(["a", "b", "é" * 20]),
    seq=st.none() | st.integers(0, 2**64 - 1),
    epoch=st.sampled_from([None, 0, 2**64 - 1]),
    model=st.sampled_from(["", "m:1"]),
    priority=st.integers(0, 9),
    ttl_ms=st.none() | st.integers(1, 86_400_000),
    keep=st.sampled_from(Keep),
    pts_ns=st.none() | st.integers(-(2**63), 2**63 - 1),
    meta=st.none() | st.dictionaries(st.sampled_from("ab"), st.sampled_from([0, 1, True, False, 1.0, None])),
)
specs = st.sampled_from(
    [(), (TensorSpec("x", "uint8", (2,)),), (TensorSpec("x", "bool", (0, 4)), TensorSpec("", "int8", ()))]
)
PAYLOADS = {0: (), 1: (b"ab",), 2: (b"", b"c")}
results = st.builds(
    lambda tensors, **fields: FrameResult(tensors=tensors, payloads=PAYLOADS[len(tensors)], **fields),
    tensors=specs,
    status=st.sampled_from([Status.OK, Status.ERROR]),
    code=st.sampled_from(["", "bad"]),
    message=st.sampled_from(["", "why"]),
    outputs=st.sampled_from([None, 0, 1, True, 1.0, [1, [True]], {"a": None}]),
    flags=st.sampled_from([(), ("image_truncated",)]),
)
outcomes = st.builds(
    lambda row, **fields: Outcome(
        "a", status=row.status, tensors=row.tensors, payloads=row.payloads, outputs=row.outputs, **fields
    ),
    row=results,
    epoch=st.integers(0, 2),
    seq=st.integers(0, 2**64 - 1),
    boot=st.just(3),
    pub_seq=st.integers(0, 9),
    code=st.sampled_from(["", "x"]),
    worker=st.sampled_from(["", "w"]),
    attempt=st.integers(0, 2),
    batch_size=st.integers(0, 2),
    shape=st.sampled_from([(), (1, 2), (3,)]),
    pts_ns=st.none() | st.integers(-1, 1),
    meta=st.sampled_from([None, {"a": 1}, {"a": True}]),
    retry_after_ms=st.sampled_from([None, 0, 5]),
    timing=st.builds(Timing, st.sampled_from([None, 0]), published_us=st.integers(0, 3)),
)  # fmt: skip


@given(st.lists(frames, min_size=1, max_size=6))
def test_any_frames_come_back_as_they_were(rows):
    """Whatever they have alike and whatever not: values and their types."""
    message, batch = Frames(tuple(rows)), Batch(1, "m", "1", "c", tuple(rows))

    assert same(read(codec.encode(message)), message)
    assert same(read(codec.encode(batch)), batch)


@given(st.lists(results, min_size=1, max_size=5), st.lists(outcomes, min_size=1, max_size=5))
def test_any_results_come_back_as_they_were(done, published):
    """Whatever they have alike and whatever not: values and their types."""
    for message in (Done(1, tuple(done), 5, 6), Outcomes(tuple(published))):
        assert same(read(codec.encode(message)), message)


def test_one_bad_frame_in_a_table_is_rejected_alone():
    """Its neighbours are admitted, as in a list."""
    header, payloads = table_of("frame table")
    header["columns"]["seq"][1] = -1

    first, bad, last = read(parts_of(header, payloads)).frames

    assert (first, last) == (
        hr_wire.SAMPLES["frame table"].frames[0],
        hr_wire.SAMPLES["frame table"].frames[2],
    )
    assert isinstance(bad, BadFrame)
    assert (bad.stream, bad.code) == ("cam-1", "out_of_range")


def test_small_payloads_travel_as_one_part_and_large_ones_each_on_its_own():
    """A part costs more than the copy of a small payload, and less than that of a large one."""
    small = [hr_wire.raw_frame(payload=bytes(JOIN_BYTES), nbytes=JOIN_BYTES, shape=(JOIN_BYTES,))] * 3
    large = hr_wire.raw_frame(payload=bytes(JOIN_BYTES + 1), nbytes=JOIN_BYTES + 1, shape=(JOIN_BYTES + 1,))

    assert len(codec.encode(Frames(tuple(small)))) == 2
    assert len(codec.encode(Frames((*small, large)))) == 5


def test_payloads_cut_out_of_a_part_do_not_keep_it_in_memory():
    """They are copies: one that is kept for replay must not hold on to all its neighbours."""
    header, *payloads = codec.encode(hr_wire.SAMPLES["frame table"])

    message = codec.decode([header, memoryview(payloads[0])], LIMITS)

    assert all(type(frame.payload) is bytes for frame in message.frames)


@pytest.mark.parametrize(
    "rows",
    [
        (hr_wire.raw_frame(), hr_wire.SHM_FRAME),
        (hr_wire.INPUTS_FRAME, hr_wire.INPUTS_FRAME),
    ],
    ids=["lanes", "inputs"],
)
def test_frames_of_several_kinds_go_as_a_list(rows):
    """A table has one lane and one input a row."""
    message = Frames(rows)

    assert "frames" in msgpack.unpackb(codec.encode(message)[0])
    assert read(codec.encode(message)) == message


def test_images_in_a_table_are_read_one_by_one():
    """Each brings its own size; gray and colour may stand side by side."""
    rows = (
        hr_wire.PNG_FRAME,
        hr_wire.JPEG_FRAME,
        hr_wire.raw_frame(color=Color.GRAY, shape=(6, 1), encoding=Encoding.RAW),
    )
    message = Frames(rows)

    assert "columns" in msgpack.unpackb(codec.encode(message)[0])
    assert read(codec.encode(message)) == message


def test_gray_is_checked_in_a_table_too():
    """Gray pixels have one channel."""
    good = Frames(tuple(hr_wire.raw_frame(seq=seq, shape=(6, 1), color=Color.GRAY) for seq in range(2)))
    assert read(codec.encode(good)) == good
    header, payloads = table_of("frame table shm")
    header["shared"] |= {"color": "gray"}

    assert [frame.code for frame in read(parts_of(header, payloads)).frames] == ["bad_color"] * 2


def broken(name: str, **changes: object) -> list[bytes]:
    header, payloads = table_of(name)
    for path, value in changes.items():
        place, _, key = path.partition("__")
        if value is ...:
            del header[place][key]
        elif key:
            header[place][key] = value
        else:
            header[place] = value
    return parts_of(header, payloads)


BROKEN = {
    "no count": (broken("frame table", count=None), "missing_field"),
    "count true": (broken("frame table", count=True), "bad_field"),
    "count 0": (broken("frame table", count=0), "out_of_range"),
    "too many": (broken("frame table", count=257), "out_of_range"),
    "shared no map": (broken("frame table", shared=[]), "bad_field"),
    "columns no map": (broken("frame table", columns=[]), "bad_field"),
    "short column": (broken("frame table", columns__seq=[1]), "bad_field"),
    "column no array": (broken("frame table", columns__seq=5), "bad_field"),
    "data": (broken("frame table", shared__data=b"x"), "bad_field"),
    "data column": (broken("frame table", columns__data=[b"x"] * 3), "bad_field"),
    "lane column": (broken("frame table", columns__lane=["shm"] * 3), "bad_field"),
    "sizes without a part": (broken("frame table shm", shared__lane="inline", sizes=4), "part_count"),
    "sizes text": (broken("frame table", sizes="4"), "bad_field"),
    "sizes true": (broken("frame table", sizes=[True, 7, 6]), "bad_field"),
    "sizes below 0": (broken("frame table", sizes=[-1, 9, 6]), "bad_field"),
    "sizes do not add up": (broken("frame table", sizes=[6, 2, 5]), "size_mismatch"),
    "size 0": (broken("frame table", sizes=0), "size_mismatch"),
    "size no divisor": (broken("frame table", sizes=4), "size_mismatch"),
    "more sizes than rows": (broken("frame table", sizes=1), "size_mismatch"),
    "fewer sizes than rows": (broken("frame table", sizes=7), "part_count"),
    "no parts": (broken("frame table", sizes=None)[:1], "part_count"),
    "parts on lane shm": ([*broken("frame table shm"), b"x"], "part_count"),
    "model of another kind": (broken("batch table", shared__model=5), "bad_field"),
    "lane of another kind": (broken("batch table", shared__lane="x"), "bad_field"),
    "tensor of another size": (broken("outcomes alike", shared__shape=[1], sizes=[2, 0]), "size_mismatch"),
    "result expired": (broken("done alike", shared__status="expired"), "bad_field"),
    "batch with a bad frame": (broken("batch table", columns__seq=[1, -1]), "out_of_range"),
    "batch without a model": (broken("batch table", model=None), "bad_field"),
    "tensors no array": (broken("outcomes alike", shared__tensors="x"), "bad_field"),
    "stream column": (broken("outcomes alike", columns__stream=["a", "b"]), "bad_field"),
    "no pub_seq": (broken("outcomes alike", columns__pub_seq=...), "bad_field"),
    "stage of another kind": (broken("outcomes alike", columns__published_us=["1", 2]), "bad_field"),
    "payloads left": (broken("outcomes alike", shared__tensors=...), "part_count"),
    "too many fields": (broken("frame table", shared={str(key): 0 for key in range(60)}), "out_of_range"),
    "much shared": (broken("frame table", shared__x=[0] * 70_000), "message_too_large"),
    "much shared by results": (broken("done alike", shared__outputs=[0] * 70_000), "message_too_large"),
    "sizes without end": (broken("frame table", sizes=[16, *[0] * 500_000]), "part_count"),
    "results without status": (broken("done alike", shared__status=...), "bad_field"),
}  # fmt: skip


def test_remarks_that_all_rows_share_are_read():
    """Flags are rare: such a table is read row by row."""
    done = codec.decode(broken("done alike", shared__flags=["image_truncated"]), LIMITS)
    outcomes = codec.decode(broken("outcomes alike", shared__flags=["image_truncated"]), LIMITS)

    assert {one.flags for one in done.results} == {("image_truncated",)}
    assert {one.flags for one in outcomes.outcomes} == {("image_truncated",)}


@pytest.mark.parametrize("name", BROKEN)
def test_a_table_that_does_not_add_up_is_refused_whole(name):
    """Which row a value or a payload belongs to is not guessed."""
    parts, code = BROKEN[name]

    assert read(parts) == code


@pytest.mark.parametrize(
    "shared",
    [
        {"meta": {"a": [0] * 60_000}},
        {"meta": {"a": [[[0] * 250] * 240]}},
        {"meta": {"a": "x" * 60_000}},
        {"stream": "é" * 30_000},
        {"shape": [1] * 60_000},
        {"inputs": [{}] * 60_000},
        {"keep": {"a": [0] * 60_000}},
        {f"unknown {key}": key for key in range(40)},
    ],
    ids=["meta", "nested meta", "meta text", "stream", "shape", "inputs", "keep", "unknown"],
)
@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_what_a_table_shares_is_not_paid_for_by_every_row(shared, encoding):
    """A small message that stands for a large one would hold up everybody's frames: one such took 14 s."""
    row = {"stream": "a", "shape": [1], "encoding": encoding}
    header = {"v": 1, "type": "frame", "count": 256, "shared": row | shared, "columns": {}, "sizes": 1}
    parts = parts_of(header, [bytes(256)])
    started = time.thread_time()
    codec.decode(parts, LIMITS)

    # The fault took 14 s; the limit leaves room for a slow machine that counts covered lines.
    assert time.thread_time() - started < 2.0


def test_a_frame_without_a_slot_is_rejected():
    """On lane shm each row names offset and generation."""
    frames_read = read(broken("frame table shm", columns__generation=...)).frames

    assert [frame.code for frame in frames_read] == ["bad_field"] * 2


def test_a_long_explanation_is_cut_in_every_row():
    """The outcome of a frame is not lost because its error text was long."""
    long = FrameResult(Status.ERROR, "x", "y" * 5_000)
    alike, other = Done(1, (long, long)), Done(1, (long, replace(long, message="z")))

    for done in (alike, other):
        assert len(read(codec.encode(done)).results[0].message) == 2_048


def test_tensors_and_payloads_of_a_row_must_pair_up_when_sent():
    """A worker that mixes them up fails at once, on its own side."""
    row = FrameResult(Status.OK, tensors=(TensorSpec("y", "uint8", (3,)),))

    with pytest.raises(ValueError, match="1 tensors are described, 0 are there"):
        codec.encode(Done(1, (row, row)))


def test_dtypes_may_differ():
    """Frames of two models in one bundle."""
    message = Frames(
        (hr_wire.raw_frame(), hr_wire.raw_frame(dtype="int8"), hr_wire.raw_frame(dtype="uint16", shape=(3,)))
    )

    assert read(codec.encode(message)) == message


def test_outcomes_without_a_timeline():
    """All stages left out."""
    outcome = replace(hr_wire.SAMPLES["outcomes alike"].outcomes[0], timing=Timing())
    message = Outcomes((outcome, outcome))

    assert read(codec.encode(message)) == message


def test_a_slot_of_its_own_for_every_frame():
    """Frames in shared memory come back with their arenas, offsets and generations."""
    message = hr_wire.SAMPLES["frame table shm"]

    slots = [frame.payload for frame in read(codec.encode(message)).frames]

    assert slots == [ShmRef("arena-1", 4096, 12, 3), ShmRef("arena-1", 8192, 12, 7)]
