"""Payloads and meta all the way: client, broker, worker and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hr_broker import broker_settings, emulated_model, running_broker
from hr_clients import AutoWorker, echo

import headrace
from headrace import Client, Status
from headrace.protocol.messages import SizeClassSpec

FRAME = np.random.default_rng(7).integers(0, 256, (128, 128, 3), np.uint8)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings = broker_settings(emulated_model("m", SizeClassSpec("wide", 2160, 65_536, 4)))
    with (
        running_broker(settings) as broker,
        AutoWorker(broker.endpoints, answer=echo),
        Client(broker.endpoints.frames) as made,
    ):
        yield made


@pytest.mark.parametrize(
    "view",
    [
        FRAME[10:100, 10:100],
        FRAME[:, ::-1],
        FRAME.transpose(1, 0, 2),
        np.asfortranarray(FRAME),
        FRAME[::2],
        FRAME[..., 0],
    ],
    ids=["crop", "mirrored", "transposed", "fortran", "strided", "one-channel"],
)
def test_the_worker_gets_the_pixels_of_the_view(client: Client, view: np.ndarray) -> None:
    """PAY-01: also from a read-only array, whose flag is nobody's business."""
    view = view.view()
    view.flags.writeable = False

    outcome = headrace.raise_for_status(client.infer(view))

    assert np.array_equal(headrace.tensors_of(outcome)["echo"], view)


@pytest.mark.parametrize("make", [memoryview, lambda frame: frame.data], ids=["memoryview", "array.data"])
def test_a_memoryview_arrives_whole(client: Client, make: object) -> None:
    """PAY-02: 921,600 bytes."""
    frame = np.arange(480 * 640 * 3, dtype=np.uint32).astype(np.uint8).reshape(480, 640, 3)

    outcome = headrace.raise_for_status(client.infer(make(frame)))  # type: ignore[operator]

    assert np.array_equal(headrace.tensors_of(outcome)["echo"], frame)


@pytest.mark.parametrize(
    "size",
    [(25, 13_981, 3), (1024, 1024), (17, 61_681), (1080, 1920, 3), (2160, 3840, 3)],
    ids=["1048575-bytes", "1048576-bytes", "1048577-bytes", "full-hd", "4k"],
)
def test_frames_around_and_above_a_megabyte_pass(client: Client, size: tuple[int, ...]) -> None:
    """PAY-07: one limit for all of producer, broker, worker and client, 64 MiB by default."""
    frame = np.full(size, 3, np.uint8)
    frame[-1, -1] = 9

    outcome = headrace.raise_for_status(client.infer(frame))

    assert np.array_equal(headrace.tensors_of(outcome)["echo"], frame)


def test_meta_comes_back_as_it_was_sent(client: Client) -> None:
    """PAY-09, PAY-10: 64-bit integers, floats, bytes, text, nesting; types included."""
    meta = {
        "big": 2**64 - 1,
        "small": -(2**63),
        "pts": np.int64(-5),
        "score": np.float32(0.5),
        "flag": np.bool_(False),
        "size": (np.int32(3), np.int32(4)),
        "raw": bytes(range(256)),
        "text": "cam\u00e9ra \U0001f4f7",
        "zero": -0.0,
        "none": None,
        "nested": {"list": [1, [2, {"three": 3.0}]]},
    }

    outcome = client.infer(FRAME, meta=meta)

    assert outcome.status is Status.OK
    assert outcome.meta == meta | {"size": [3, 4]}
    assert outcome.meta is not None
    assert type(outcome.meta["flag"]) is bool
    assert type(outcome.meta["pts"]) is int
    assert type(outcome.meta["score"]) is float
    assert str(outcome.meta["zero"]) == "-0.0"


def test_every_byte_value_passes(client: Client) -> None:
    """PAY-04: decoding never depends on content."""
    frame = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)

    outcome = headrace.raise_for_status(client.infer(frame))

    assert np.array_equal(headrace.tensors_of(outcome)["echo"], frame)


def test_a_wrong_dtype_is_the_models_answer_not_a_crash(client: Client) -> None:
    """A float image for an image model of uint8: rejected with its code; the next frame passes."""
    outcome = client.infer(FRAME.astype(np.float16))

    assert (outcome.status, outcome.code) == (Status.REJECTED, "wrong_dtype")
    assert client.infer(FRAME).status is Status.OK
