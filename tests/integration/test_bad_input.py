"""The table of bad input in docs/protocol.md, row by row: a real broker and a real worker process.

Each row is sent by a bare DEALER and by a bare PUSH and, where our client finds it, given to the client.
Around it stand good frames of the same stream and of another one, in the same message and so in the same
batch where the message can be read. They must run; the worker must be the process that it was; the broker's
account must add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hr_models
import hr_plant as hp
import hr_repo
import hr_worker
import msgpack
import numpy as np
import pytest
import zmq
from hr_broker import Peer
from hr_clients import wait_for

from headrace import Producer, Subscriber
from headrace.errors import InvalidFrameError
from headrace.protocol.messages import Hello, Limits, Outcome, Refused, Reject, SizeClassSpec, Status, Welcome

LIMITS = Limits(max_frame_bytes=100_000, max_message_bytes=262_144, max_header_bytes=65_536)
CLASS = SizeClassSpec("small", 48, 64, max_batch_size=4)

#: The bad frame's seq; its good neighbours have the one before and the one after.
SEQ = 10

JPEG = hr_worker.jpeg(hr_worker.gradient(48, 64))
PNG = hr_worker.png(hr_worker.gradient(48, 64))
DAMAGED_PNG = PNG[: len(PNG) // 2] + bytes([PNG[len(PNG) // 2] ^ 0xFF]) + PNG[len(PNG) // 2 + 1 :]
LONG_STREAM = "é" * 64 + "x"  # 129 bytes in 65 characters

COUNTING = np.arange(48 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(48, 64, 3)
READ_ONLY = COUNTING.copy()
READ_ONLY.flags.writeable = False


@dataclass(frozen=True)
class BadFrame:
    """Header fields of a frame (over those of a good one; None leaves a field out) and its payload."""

    fields: dict[str, Any]
    payload: bytes

    def entry(self, stream: str) -> dict[str, Any]:
        entry = {"stream": stream, "seq": SEQ, "epoch": 1, "shape": [1, 1, 3], **self.fields}
        return {key: value for key, value in entry.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """A row of the table: its three cells, the bad frames or whole messages that show it to a raw peer,
    and what is given to our client with what the model must then see (None: the client refuses it)."""

    input: str
    found_by: str
    ends: str
    frames: tuple[BadFrame, ...] = ()
    messages: tuple[tuple[bytes, ...], ...] = ()
    pushes: tuple[dict[str, Any], ...] = ()
    seen: tuple[np.ndarray[Any, Any], ...] = ()

    @property
    def code(self) -> str:
        return "".join(re.findall(r"^`(\w+)`", self.ends))

    @property
    def status(self) -> str:
        return self.ends.rpartition(", ")[2]


def bad(payload: bytes = b"\x01\x02\x03", **fields: Any) -> BadFrame:
    return BadFrame(fields, payload)


def encoded(payload: bytes, encoding: str) -> BadFrame:
    return BadFrame({"encoding": encoding, "shape": None}, payload)


def lone(**fields: Any) -> tuple[bytes, bytes]:
    """A whole message of one frame that is well but for the given fields."""
    return msgpack.packb(
        {"stream": "lone", "seq": 1, "epoch": 1, "shape": [1, 1, 3], **fields}
    ), b"\x01\x02\x03"


ROWS = (
    Row("unknown model", "broker", "`unknown_model`, rejected", (bad(model="nobody"), bad(model="img:9"))),
    Row(
        "dtype that an image model does not take",
        "broker",
        "`wrong_dtype`, rejected",
        (bad(bytes(12), dtype="float32"), bad(bytes(6), dtype="uint16")),
    ),
    Row(
        "dtype that a tensor model does not take",
        "worker",
        "`wrong_dtype`, error",
        (bad(bytes(32), dtype="int64", shape=[4], model="vec"),),
    ),
    Row(
        "shape that is not the payload's length",
        "broker",
        "`size_mismatch`, rejected",
        (bad(bytes(47), shape=[4, 4, 3]), bad(bytes(49), shape=[4, 4, 3]), bad(shape=[2**31, 2**20, 3])),
    ),
    Row(
        "empty payload, array with an axis of length 0",
        "client, broker",
        "`empty_payload`, rejected",
        (bad(b""), bad(b"", shape=[0, 4, 3]), encoded(b"", "jpeg")),
        pushes=({"image": b""}, {"image": np.zeros((0, 4, 3), np.uint8)}),
    ),
    Row(
        "zero-dimensional array",
        "client, broker",
        "`bad_shape`, rejected",
        (bad(b"\x01", shape=[]),),
        pushes=({"image": np.uint8(7)}, {"image": np.array(7)}),
    ),
    Row(
        "more than 8 axes",
        "client, broker",
        "`bad_shape`, rejected",
        (bad(shape=[1] * 8 + [3]),),
        pushes=({"image": np.zeros((1,) * 9, np.uint8)},),
    ),
    Row(
        "shape with an axis of 0 over a payload, product above 63 bits",
        "broker",
        "`bad_shape`, rejected",
        (bad(shape=[0, 4, 3]), bad(shape=[2**40, 2**40, 3])),
    ),
    Row("truncated JPEG", "worker", "`damaged_image`, error", (encoded(JPEG[: len(JPEG) // 2], "jpeg"),)),
    Row(
        "JPEG lacking only its end marker",
        "worker",
        "ok, flag `image_truncated`",
        (encoded(JPEG[:-2], "jpeg"),),
    ),
    Row("damaged PNG", "worker", "`damaged_image`, error", (encoded(DAMAGED_PNG, "png"),)),
    Row(
        "PNG header of 30000x30000",
        "broker",
        "`image_too_large`, rejected",
        (encoded(hr_worker.png_header_only(30_000, 30_000), "png"),),
    ),
    Row(
        "text, an error page, one byte as image",
        "client, broker",
        "`bad_image`, rejected",
        (encoded(b"hello", "jpeg"), encoded(b"<html>404</html>", "png"), encoded(b"\x01", "png")),
        pushes=({"image": b"<html>404</html>"}, {"image": b"\x01"}, {"image": b"hello", "encoding": "jpeg"}),
    ),
    Row(
        "PNG declared as JPEG",
        "client, broker",
        "`bad_encoding`, rejected",
        (encoded(PNG, "jpeg"), encoded(JPEG, "png")),
        pushes=({"image": PNG, "encoding": "jpeg"}, {"image": JPEG, "encoding": "png"}),
    ),
    Row(
        "stream id above 128 bytes",
        "client, broker",
        "`bad_stream`, refused",
        messages=(lone(stream=LONG_STREAM),),
        pushes=({"image": COUNTING, "stream": LONG_STREAM},),
    ),
    Row(
        "empty stream id",
        "client, broker",
        "`bad_stream`, refused",
        messages=(lone(stream=""),),
        pushes=({"image": COUNTING, "stream": ""},),
    ),
    Row(
        "seq going backwards",
        "client, broker",
        "`seq_backwards`, rejected",
        (bad(seq=SEQ - 5),),
        pushes=({"image": COUNTING, "seq": 3},),  # the client's stream stands at 4
    ),
    Row("two producers on one stream", "broker", "`stream_owned`, rejected"),
    Row(
        "frame above `max_frame_bytes`",
        "client, broker",
        "`frame_too_large`, rejected",
        (bad(bytes(100_001), shape=[100_001]),),
        pushes=({"image": np.zeros(100_001, np.uint8)},),
    ),
    Row(
        "message above `max_message_bytes`",
        "broker",
        "`message_too_large`, refused",
        messages=(
            (msgpack.packb({"frames": [{"stream": "s", "shape": [90_000]}] * 3}), *[bytes(90_000)] * 3),
        ),
    ),
    Row(
        "msgpack 10,000 levels deep",
        "broker",
        "`too_deep`, refused",
        messages=(
            (b"\x81\xa4meta" + b"\x91" * 10_000 + b"\xc0", b"x"),
            (b"\x81\xa4meta" + b"\x81\xa1a" * 10_000 + b"\xc0", b"x"),
        ),
    ),
    Row(
        "array header that claims 2^32-1 items",
        "broker",
        "`bad_msgpack`, refused",
        messages=((b"\x81\xa4meta\xdd\xff\xff\xff\xff", b"x"),),
    ),
    Row(
        "trailing bytes behind the header",
        "broker",
        "`trailing_bytes`, refused",
        messages=((lone()[0] + b"abc", lone()[1]),),
    ),
    Row(
        "parts that don't match the header",
        "broker",
        "`part_count`, refused",
        messages=((*lone(), b"more"), (msgpack.packb({"frames": [{"stream": "s", "shape": [1]}] * 2}), b"x")),
    ),
    Row(
        "non-contiguous array",
        "client",
        "ok, the model sees the view's pixels",
        pushes=(
            {"image": COUNTING[:, ::-1]},
            {"image": COUNTING[::2, 3:]},
            {"image": np.asfortranarray(COUNTING)},
        ),
        seen=(COUNTING, COUNTING[::2, 3:], COUNTING),
    ),
    Row("read-only array", "client", "ok, sent as it is", pushes=({"image": READ_ONLY},), seen=(READ_ONLY,)),
    Row(
        "big-endian array",
        "client",
        "ok, swapped before it is sent",
        pushes=({"image": np.array([0, 1, 256, 65_535], ">f4"), "model": "vec"},),
        seen=(np.array([0, 1, 256, 65_535]),),
    ),
    Row(
        "big-endian dtype from a script",
        "broker",
        "`bad_dtype`, rejected",
        (bad(bytes(6), dtype=">u2"), bad(bytes(16), dtype=">f4", shape=[4], model="vec")),
    ),
    Row(
        "object, string or structured array",
        "client, broker",
        "`bad_dtype`, rejected",
        (bad(dtype="object"), bad(dtype="<U1"), bad(dtype="V3"), bad(dtype=7)),
        pushes=(
            {"image": np.array([object()])},
            {"image": np.array(["text"])},
            {"image": np.zeros(6, [("a", "u4"), ("b", "u4"), ("c", "S1")])},
        ),
    ),
    Row(
        "bool array",
        "client, broker",
        "`bad_dtype`, rejected",
        (bad(dtype="bool"),),
        pushes=({"image": np.zeros((4, 4, 3), bool)},),
    ),
    Row(
        "float16 array for a float32 model",
        "none",
        "ok, cast",
        (bad(np.array([1, 2, 3, 4], "<f2").tobytes(), dtype="float16", shape=[4], model="vec"),),
        pushes=({"image": np.array([1, 2, 3, 4], np.float16), "model": "vec"},),
        seen=(np.array([1, 2, 3, 4]),),
    ),
    Row(
        "float16 array for an image model",
        "broker",
        "`wrong_dtype`, rejected",
        (bad(bytes(6), dtype="float16"),),
    ),
    Row(
        "integer beyond 64 bits in `meta`",
        "client",
        "`out_of_range`, with the field's name",
        pushes=(
            {"image": COUNTING, "meta": {"id": 2**64}},
            {"image": COUNTING, "meta": {"id": -(2**63) - 1}},
        ),
    ),
)


@dataclass(frozen=True)
class Running:
    plant: hp.Plant
    worker: hp.ProcessWorker

    def assert_is_well(self) -> None:
        """The worker is the process that it was, and the broker's account adds up."""
        assert self.worker.is_alive
        assert [worker["pid"] for worker in self.plant.ready_workers()] == [self.worker.pid]
        assert self.plant.status()["workers_lost"] == 0
        self.plant.assert_account_adds_up()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("bad-input")
    models = (
        hp.onnx_model(folder, hr_models.mean_color(), CLASS, name="img"),
        hp.onnx_model(folder, hr_models.tensor_sum(4), name="vec", image=None),
    )
    with (
        hp.open_plant(*models, core={"limits": LIMITS}) as plant,
        hp.ProcessWorker(plant.endpoints, folder / "worker") as worker,
    ):
        plant.wait_for_workers()
        yield Running(plant, worker)


def good(stream: str, seq: int, value: int) -> tuple[dict[str, Any], bytes]:
    return {"stream": stream, "seq": seq, "epoch": 1, "shape": [48, 64, 3]}, bytes([value]) * (48 * 64 * 3)


def message(*frames: tuple[dict[str, Any], bytes]) -> tuple[bytes, ...]:
    entries = [entry for entry, _ in frames]
    return msgpack.packb({"v": 1, "type": "frame", "frames": entries}), *(payload for _, payload in frames)


def of(rows: tuple[Row, ...], attribute: str) -> list[Any]:
    """One case for each example that the rows have of this kind."""
    return [
        pytest.param(row, example, id=f"{row.input}-{index}")
        for row in rows
        for index, example in enumerate(getattr(row, attribute))
    ]


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PUSH], ids=["DEALER", "PUSH"])
@pytest.mark.parametrize(("row", "frame"), of(ROWS, "frames"))
def test_a_bad_frame_ends_alone(
    running: Running, row: Row, frame: BadFrame, kind: int, request: pytest.FixtureRequest
) -> None:
    """It has the table's code, on its topic and to its sender; the others of its message run as a batch."""
    plant, stream = running.plant, request.node.name[-120:].encode()[-120:].decode(errors="ignore")
    bundle = message(
        good(stream, SEQ - 1, 10),
        (frame.entry(stream), frame.payload),
        good(stream, SEQ + 1, 20),
        good(f"other/{stream}"[:100], 0, 30),
    )

    address = plant.endpoints.frames if kind == zmq.DEALER else plant.endpoints.intake
    with Peer(kind, address) as script:
        script.send_parts(*bundle)
        keys = [(stream, frame.entry(stream)["seq"]), (stream, SEQ - 1), (stream, SEQ + 1)]
        ended, *neighbours = plant.collect(*keys, (f"other/{stream}"[:100], 0))
        reject = script.expect(Reject) if kind == zmq.DEALER and row.status == "rejected" else None

    assert_ended(row, ended)
    if reject is not None:
        assert (reject.code, reject.stream, reject.seq) == (row.code, stream, ended.seq)
    assert [hp.mean(neighbour) for neighbour in neighbours] == [[10] * 3, [20] * 3, [30] * 3]
    shares = ended.status is not Status.REJECTED and "model" not in frame.fields
    assert {neighbour.batch_size for neighbour in neighbours} == {4 if shares else 3}
    running.assert_is_well()


def assert_ended(row: Row, outcome: Outcome) -> None:
    if row.code:
        assert (outcome.code, outcome.status) == (row.code, row.status), outcome.message
        assert outcome.message
    else:
        assert outcome.status is Status.OK, (outcome.code, outcome.message)
        assert list(outcome.flags) == re.findall(r"flag `(\w+)`", row.ends)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PUSH], ids=["DEALER", "PUSH"])
@pytest.mark.parametrize(("row", "parts"), of(ROWS, "messages"))
def test_an_unreadable_message_is_refused_alone(
    running: Running, row: Row, parts: tuple[bytes, ...], kind: int, request: pytest.FixtureRequest
) -> None:
    """Its sender is told the code, and it is counted; the messages before and after it run."""
    plant, stream = running.plant, request.node.name[-100:]
    counted_before = plant.status()["misbehaved_by_code"].get(row.code, 0)
    address = plant.endpoints.frames if kind == zmq.DEALER else plant.endpoints.intake

    with Peer(kind, address) as script:
        script.send_parts(*message(good(stream, 0, 10), good(f"other/{stream}", 0, 20)))
        script.send_parts(*parts)
        script.send_parts(*message(good(stream, 1, 30), good(f"other/{stream}", 1, 40)))
        neighbours = plant.collect((stream, 0), (f"other/{stream}", 0), (stream, 1), (f"other/{stream}", 1))
        refused = script.expect(Refused) if kind == zmq.DEALER else None

    if refused is not None:
        assert refused.code == row.code
        assert refused.message
    assert plant.status()["misbehaved_by_code"][row.code] == counted_before + 1
    assert [hp.mean(neighbour)[0] for neighbour in neighbours] == [10, 20, 30, 40]
    running.assert_is_well()


REFUSED_PUSHES = tuple(row for row in ROWS if not row.seen)
ACCEPTED_PUSHES = tuple(row for row in ROWS if row.seen)


@pytest.mark.parametrize(("row", "push"), of(REFUSED_PUSHES, "pushes"))
def test_the_client_refuses_it_before_anything_is_sent(
    running: Running, row: Row, push: dict[str, Any]
) -> None:
    """With the table's code; the pushes before and after it on the stream run."""
    with Producer(running.plant.endpoints.frames) as producer:
        producer.wait_connected(10)  # from here on the client knows the broker's own limits
        producer.push(hp.solid(1, 2, 3), stream="client", seq=4)

        with pytest.raises(InvalidFrameError) as caught:
            producer.push(**{"stream": "client", **push})
        producer.push(hp.solid(1, 2, 3), stream="client")
        account = producer.flush(10)

    assert caught.value.code == row.code
    if "field's name" in row.ends:
        assert "meta.id" in caught.value.message
    assert account.by_status == {"ok": 2}
    running.assert_is_well()


@pytest.mark.parametrize(
    ("row", "index"),
    [pytest.param(r, i, id=f"{r.input}-{i}") for r in ACCEPTED_PUSHES for i in range(len(r.pushes))],
)
def test_the_client_makes_good_of_it(running: Running, row: Row, index: int) -> None:
    """What looks bad and is not arrives as the same numbers."""
    push, seen = row.pushes[index], row.seen[index]
    address = running.plant.endpoints.frames
    with Subscriber(address, prefix="made-good/", start="now") as subscriber, Producer(address) as producer:
        producer.push(**{"stream": f"made-good/{row.input}/{index}", **push})
        outcome = subscriber.get(10)

    assert isinstance(outcome, Outcome)
    if push.get("model") == "vec":
        assert float(hp.tensor(outcome)) == seen.sum()
    else:
        padded = np.zeros((48, 64, 3))
        padded[: seen.shape[0], : seen.shape[1]] = seen
        assert np.allclose(hp.tensor(outcome), padded.mean(axis=(0, 1)), atol=0.01)
    running.assert_is_well()


def test_two_producers_on_one_stream(running: Running) -> None:
    """The second one is told so and when to try again; its other stream runs, and so does the first one's."""
    (row,) = [row for row in ROWS if row.input == "two producers on one stream"]
    plant = running.plant
    with (
        Peer(zmq.DEALER, plant.endpoints.frames) as first,
        Peer(zmq.DEALER, plant.endpoints.frames) as second,
    ):
        for epoch, producer in enumerate((first, second), start=1):
            producer.send(Hello(epoch))
            producer.expect(Welcome)
        first.send_parts(*message(good("owned", 0, 10)))
        (before,) = plant.collect(("owned", 0))
        intruder, payload = good("owned", 1, 99)
        neighbour, neighbour_payload = good("free", 0, 20)
        second.send_parts(
            *message(({**intruder, "epoch": 2}, payload), ({**neighbour, "epoch": 2}, neighbour_payload))
        )
        reject = second.expect(Reject)
        rejected, free = plant.collect(("owned", 1), ("free", 0), epoch=2)
        first.send_parts(*message(good("owned", 2, 30)))
        (after,) = plant.collect(("owned", 2))

    assert (reject.code, reject.stream, reject.epoch) == (row.code, "owned", 2)
    assert reject.retry_after_ms is not None
    assert_ended(row, rejected)
    assert [hp.mean(outcome)[0] for outcome in (before, free, after)] == [10, 20, 30]
    running.assert_is_well()


def test_a_worker_of_another_process_would_be_seen(running: Running, tmp_path: Path) -> None:
    """The check of this module can fail."""
    with hp.ThreadWorker(running.plant.endpoints, tmp_path):
        running.plant.wait_for_workers(2)

        with pytest.raises(AssertionError):
            running.assert_is_well()
    wait_for(lambda: len(running.plant.ready_workers()) == 1)


def test_the_table_in_the_document_has_these_rows() -> None:
    """Input, finder and end of every row, in order; each row has an example for everyone it names."""
    text = (hr_repo.ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = text.split("\n## Bad input\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]

    documented = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]

    assert documented == [(row.input, row.found_by, row.ends) for row in ROWS]
    for row in ROWS:
        assert bool(row.pushes) == ("client" in row.found_by or bool(row.seen)), row.input
        is_raw = bool(row.frames or row.messages) or row.input == "two producers on one stream"
        assert is_raw == (row.found_by != "client"), row.input
