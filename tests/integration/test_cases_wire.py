"""Field cases of bytes on the wire, end to end: scripts with msgpack and ZeroMQ alone, a real worker behind.

The model ``tensor`` gives back four float32 numbers as it got them, ``pixels`` every pixel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hr_models
import hr_plant as hp
import msgpack
import numpy as np
import pytest
import zmq
from hr_broker import Peer
from hr_clients import image

import headrace
from headrace import Client, Producer, Subscriber
from headrace.errors import ConfigError, InvalidFrameError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Discover,
    Endpoints,
    Limits,
    Outcome,
    Refused,
    Reject,
    SizeClassSpec,
    Status,
)

LIMITS = Limits()


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hp.Plant]:
    folder: Path = tmp_path_factory.mktemp("wire")
    pixels = hp.onnx_model(
        folder, hr_models.pixels(), SizeClassSpec("small", 16, 16, 8), name="pixels", policy=hp.ADAPTIVE
    )
    tensor = hp.onnx_model(folder, hr_models.tensor_as_it_is(), name="tensor", image=None, policy=hp.ADAPTIVE)
    with hp.running_plant(folder, pixels, tensor) as running:
        yield running


@pytest.fixture
def script(plant: hp.Plant) -> Iterator[Peer]:
    with Peer(zmq.DEALER, plant.endpoints.frames) as peer:
        yield peer


def one_part(stream: str, seq: int, data: bytes, *, is_old: bool = False, **fields: Any) -> bytes:
    """A whole frame in one msgpack map, in the raw format of before 2013 or in today's."""
    entry = {"stream": stream, "seq": seq, "epoch": 1, **fields, "data": data}
    packed: bytes = msgpack.packb(entry, use_bin_type=not is_old)
    return packed


@pytest.mark.parametrize("is_old", [False, True], ids=["bin", "old-raw"])
def test_content_never_decides_whether_a_frame_can_be_read(
    plant: hp.Plant, script: Peer, is_old: bool
) -> None:
    """PAY-04: every byte value, and a float64 array of -0.0, in the old format and in the new."""
    stream = f"content-{is_old}"
    every_byte = bytes(range(256))
    zeros = np.full(4, -0.0)
    script.send_parts(one_part(stream, 0, every_byte, is_old=is_old, shape=[16, 16]))
    script.send_parts(
        one_part(stream, 1, zeros.tobytes(), is_old=is_old, shape=[4], dtype="float64", model="tensor")
    )

    pixels, tensor = plant.collect((stream, 0), (stream, 1))

    assert hp.tensor(pixels)[0].astype(np.uint8).tobytes() == every_byte
    assert np.signbit(hp.tensor(tensor)).all()


@pytest.mark.parametrize(
    "records",
    [
        np.zeros(6, [("frame", "u4"), ("row", "u4"), ("kind", "S1")]),
        np.zeros(2, [("outer", [("inner", "u4"), ("more", "f4", (2,))])]),
    ],
    ids=["flat", "nested"],
)
def test_records_are_refused_by_name(plant: hp.Plant, records: np.ndarray) -> None:
    """PAY-05: never sent as bytes that somebody would read as numbers."""
    with Client(plant.endpoints.frames) as client:
        with pytest.raises(InvalidFrameError, match=r"bad_dtype: dtype \[.*is not supported"):
            client.infer(records)
        assert client.infer(image(1)).status is Status.OK


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PUSH], ids=["DEALER", "PUSH"])
def test_every_cut_and_every_turned_bit_is_refused_and_counted(plant: hp.Plant, kind: int) -> None:
    """PAY-11: a frame cut after each byte, with three bytes more, and with each of its first bits turned."""
    stream = f"cut-{kind}"
    valid = one_part(stream, 2, bytes(16 * 16 * 3), shape=[16, 16, 3], meta={"note": "x" * 100})
    cuts = [valid[:length] for length in range(len(valid))] + [valid + b"abc"]
    turned = [
        bytes([*valid[: bit // 8], valid[bit // 8] ^ 1 << bit % 8, *valid[bit // 8 + 1 :]])
        for bit in range(64)
    ]
    before = plant.status()
    address = plant.endpoints.frames if kind == zmq.DEALER else plant.endpoints.intake

    with Peer(kind, address, SNDHWM=0, RCVHWM=0) as script:
        for message in (*cuts, *turned):
            script.send_parts(message)
        script.send_parts(one_part(stream, 3, bytes(16 * 16 * 3), shape=[16, 16, 3]))
        (after,) = plant.collect((stream, 3))
        status = plant.status()
        if kind == zmq.DEALER:
            script.send(Discover())
            answers = []
            while not isinstance(answers[-1] if answers else None, Endpoints):
                answers.append(script.receive())
            refused = [answer for answer in answers if isinstance(answer, Refused | Reject)]
            assert len(refused) >= len(cuts)

    assert after.status is Status.OK
    counted = sum(status["misbehaved_by_code"].values()) - sum(before["misbehaved_by_code"].values())
    rejected = status["account"]["rejected"] - before["account"]["rejected"]
    ran = status["account"]["accepted"] - before["account"]["accepted"] - 1
    again = status["account"]["duplicates"] - before["account"]["duplicates"]
    assert counted + rejected + ran + again == len(cuts) + len(turned)
    assert ran + again < len(turned), "no turned bit was noticed"
    assert status["workers_lost"] == 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_body_may_start_at_any_offset(plant: hp.Plant, script: Peer, dtype: str) -> None:
    """PAY-12: bodies behind headers of every length modulo 64 give the same numbers."""
    values = np.array([1.5, -2.25, 1e10, 3.0], dtype)
    stream = f"offset-{dtype}"
    offsets = set()
    for padding in range(96):  # more than 64: a text of 32 characters has a longer head
        message = one_part(
            stream,
            padding,
            values.tobytes(),
            meta={"p": "x" * padding},
            shape=[4],
            dtype=dtype,
            model="tensor",
        )
        offsets.add(message.index(values.tobytes()) % 64)
        script.send_parts(message)

    outcomes = plant.collect(*((stream, seq) for seq in range(96)))

    assert len(offsets) == 64
    for outcome in outcomes:
        assert np.array_equal(hp.tensor(outcome), values.astype(np.float32))


def test_numbers_of_64_bits_come_back_and_larger_ones_are_refused(plant: hp.Plant) -> None:
    """PAY-09: through the whole path, types included; the field that can't be carried is named."""
    with Client(plant.endpoints.frames) as client:
        meta = {"id": 2**63, "max": 2**64 - 1, "min": -(2**63), "ratio": 1.0, "one": 1, "yes": True}
        outcome = client.infer(image(1), meta=meta)

        assert outcome.meta == meta
        assert [type(value) for value in outcome.meta.values()] == [type(value) for value in meta.values()]
        for value in (2**64, -(2**63) - 1, 2**127 + 1):
            with pytest.raises(InvalidFrameError, match=r"meta\.id"):
                client.infer(image(1), meta={"id": value})


def test_frames_around_a_megabyte_run(tmp_path: Path) -> None:
    """PAY-07: 1,048,575 to 1,048,577 bytes, full HD and 4K, through one limit of all four parties."""
    model = hp.onnx_model(
        tmp_path, hr_models.mean_color(), SizeClassSpec("vast", 64, 64, 1), policy=hp.ADAPTIVE
    )
    sizes = [(25, 13_981, 3), (1024, 1024), (17, 61_681), (1080, 1920, 3), (2160, 3840, 3)]
    with hp.running_plant(tmp_path, model) as plant, Client(plant.endpoints.frames) as client:
        outcomes = [client.infer(np.full(size, 7, np.uint8), timeout=20) for size in sizes]

    assert [outcome.status for outcome in outcomes] == [Status.OK] * 5
    assert [tuple(outcome.shape)[:2] for outcome in outcomes] == [size[:2] for size in sizes]


def test_a_frame_above_the_limit_is_told_its_neighbours_run(tmp_path: Path) -> None:
    """PAY-08: small, too large, small, small on one connection: one refusal to the sender, three results."""
    limits = Limits(max_frame_bytes=1_000_000, max_message_bytes=4_000_000)
    with (
        hp.running_plant(
            tmp_path, hp.onnx_model(tmp_path, hr_models.mean_color()), core={"limits": limits}
        ) as plant,
        Peer(zmq.DEALER, plant.endpoints.frames) as script,
    ):
        for seq, side in enumerate((48, 600, 48, 48)):
            header = {"stream": "cam", "seq": seq, "epoch": 1, "shape": [side, side, 3]}
            script.send_parts(msgpack.packb(header), bytes([5]) * side * side * 3)
        outcomes = plant.collect(*(("cam", seq) for seq in range(4)))
        reject = script.expect(Reject)

    assert (reject.code, reject.seq) == ("frame_too_large", 1)
    assert [outcome.status.value for outcome in outcomes] == ["ok", "rejected", "ok", "ok"]


def test_one_client_serves_many_threads(plant: hp.Plant) -> None:
    """ZMQ-13: eight threads share a producer, a subscriber and a client: each message whole, each counted."""
    address = plant.endpoints.frames
    wrong: list[object] = []
    with (
        Subscriber(address, prefix="shared/", start="now") as subscriber,
        Producer(address) as producer,
        Client(address) as client,
    ):

        def use(thread: int) -> None:
            for number in range(40):
                producer.push(image(thread), stream=f"shared/{thread}", meta={"number": number})
                item = subscriber.get(20)
                value = int(item.stream.rpartition("/")[2])
                if not isinstance(item, Outcome) or hp.tensor(item)[0, 0, 0] != value:
                    wrong.append(item)
                answer = client.infer(image(thread), timeout=20)
                if hp.tensor(answer)[0, 0, 0] != thread:
                    wrong.append(answer)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        account = producer.flush(10)

    assert wrong == []
    assert account.by_status == {"ok": 320}


def test_an_empty_stream_name_is_refused_wherever_it_is_given(plant: hp.Plant, script: Peer) -> None:
    """ZMQ-19: it would subscribe to everything, and its outcomes would have no topic of their own."""
    with pytest.raises(ConfigError):
        Subscriber(plant.endpoints.frames, stream="")
    with Producer(plant.endpoints.frames) as producer, pytest.raises(InvalidFrameError, match="bad_stream"):
        producer.push(image(1), stream="")
    script.send_parts(one_part("", 0, bytes(3), shape=[1, 1, 3]))
    assert script.expect(Refused).code == "bad_stream"


def test_a_changed_array_does_not_change_its_frame(plant: hp.Plant) -> None:
    """ZMQ-20: the array is reused for every frame right after push; meta and pixels carry one number."""
    array = np.empty((16, 16, 3), np.uint8)
    address = plant.endpoints.frames
    with Subscriber(address, stream="reused", start="now") as subscriber:
        with Producer(address) as producer:
            for number in range(200):
                array[:] = number
                producer.push(array, stream="reused", meta={"number": number})
            array[:] = 255
        outcomes = [subscriber.get(10) for _ in range(200)]

    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Outcome)
        assert outcome.meta == {"number": number}
        values = headrace.tensors_of(outcome)["pixels"]
        assert values.min() == values.max() == number
        assert codec.topic_of(outcome.stream) == b"reused\0"
