"""A real broker and a real worker on real sockets: what a frame becomes between the two."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import hr_models
import hr_worker
import numpy as np
import pytest
import zmq
from hr_broker import TIMEOUT_S, BrokerThread, Listener, Peer, broker_settings, running_broker

from headrace.broker.settings import ClassPolicy, ModelSettings
from headrace.broker.shell_settings import LocalModel
from headrace.errors import Code
from headrace.protocol.messages import (
    Color,
    Encoding,
    Frame,
    Frames,
    Hello,
    ImageInput,
    ModelSpec,
    Outcome,
    SizeClassSpec,
    Status,
    Welcome,
)
from headrace.workers.devices import choose_device
from headrace.workers.process import WorkerSettings, make_shell

#: One class, so that all frames of a test can share a batch; letterboxed frames keep their mean.
CLASS = SizeClassSpec("small", 48, 64, max_batch_size=8)


@dataclass
class Plant:
    """A broker with the mean-colour model, one CPU worker that had no file of it, a producer's socket and
    a subscriber to everything."""

    broker: BrokerThread
    producer: Peer
    listener: Listener

    def outcomes(self, *frames: Frame) -> list[Outcome]:
        """Send frames as one bundle; return their outcomes in the order of the frames."""
        numbered = [replace(frame, stream="cam", seq=seq, epoch=5) for seq, frame in enumerate(frames)]
        self.producer.send(Frames(tuple(numbered)))
        found = self.listener.outcomes(len(frames))
        return sorted(found, key=lambda outcome: outcome.seq)


def mean(outcome: Outcome) -> list[float]:
    """Return the mean of each channel that the model saw, RGB."""
    assert outcome.status is Status.OK, (outcome.code, outcome.message)
    return [round(float(value)) for value in np.frombuffer(outcome.payloads[0], "<f4")]


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    path = hr_models.write(tmp_path, hr_models.mean_color())
    spec = ModelSpec("m", "1", image=ImageInput(), size_classes=(CLASS,))
    settings = broker_settings(
        ModelSettings(spec, {"": ClassPolicy("window", 20.0)}), local_models=(LocalModel("m", "1", path),)
    )
    with running_broker(settings) as broker:
        worker = make_shell(
            WorkerSettings(broker.endpoints.frames, "cpu", cache_dir=str(tmp_path / "cache")),
            choose_device("cpu", 1),
        )
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        with Listener(broker.endpoints) as listener, Peer(zmq.DEALER, broker.endpoints.frames) as producer:
            producer.send(Hello(5))
            producer.expect(Welcome)
            yield Plant(broker, producer, listener)
        worker.request_stop()
        thread.join(TIMEOUT_S)


def solid(red: int, green: int, blue: int) -> hr_worker.Pixels:
    return np.full((48, 64, 3), (red, green, blue), np.uint8)


def test_img_07_red_is_red_however_it_is_sent(plant: Plant) -> None:
    """IMG-07: array or file, declared RGB or BGR: the model sees the same."""
    red = solid(254, 0, 0)

    outcomes = plant.outcomes(
        hr_worker.raw_frame(red),
        hr_worker.raw_frame(red[:, :, ::-1], Color.BGR),
        hr_worker.image_frame(hr_worker.png(red), Encoding.PNG, 48, 64),
        hr_worker.image_frame(hr_worker.jpeg(red), Encoding.JPEG, 48, 64),
    )

    assert [mean(outcome) for outcome in outcomes] == [[254, 0, 0]] * 4


def test_img_05_gray_and_alpha_run_beside_a_frame_of_odd_channels(plant: Plant) -> None:
    """IMG-05: one odd picture is refused with what is expected; its neighbours run."""
    gray, odd = np.full((48, 64), 9, np.uint8), np.zeros((3, 48, 64), np.uint8)
    rgba = np.dstack([solid(1, 2, 3), gray])

    outcomes = plant.outcomes(
        hr_worker.raw_frame(gray, Color.GRAY), hr_worker.raw_frame(rgba), hr_worker.raw_frame(odd)
    )

    assert [mean(outcome) for outcome in outcomes[:2]] == [[9, 9, 9], [1, 2, 3]]
    assert outcomes[2].status in {Status.ERROR, Status.REJECTED}
    assert outcomes[2].code == Code.WRONG_CHANNELS


def test_bat_01_a_damaged_image_is_the_error_of_its_frame_alone(plant: Plant) -> None:
    """BAT-01, IMG-02: cut at half and at its last two bytes, among frames that run."""
    whole = hr_worker.jpeg(hr_worker.gradient(48, 64))
    files = [whole, whole[: len(whole) // 2], whole[:-2], whole]

    outcomes = plant.outcomes(*(hr_worker.image_frame(f, Encoding.JPEG, 48, 64) for f in files))

    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.ERROR, Status.OK, Status.OK]
    assert outcomes[1].code == Code.DAMAGED_IMAGE
    assert outcomes[2].flags == ("image_truncated",)
    assert mean(outcomes[0]) == mean(outcomes[2]) == mean(outcomes[3])


def test_img_04_the_size_in_the_outcome_is_the_turned_one(plant: Plant) -> None:
    """IMG-04: broker and worker read the same EXIF tag by the same rule, for each of its eight values."""
    stored = np.zeros((40, 60, 3), np.uint8)
    stored[:, :, 0] = 250
    sizes = [(40, 60)] * 4 + [(60, 40)] * 4
    frames = [
        hr_worker.image_frame(hr_worker.jpeg_with_orientation(stored, orientation), Encoding.JPEG, *size)
        for orientation, size in enumerate(sizes, start=1)
    ]

    outcomes = plant.outcomes(*frames)

    assert [outcome.status for outcome in outcomes] == [Status.OK] * 8
    assert [outcome.shape[:2] for outcome in outcomes] == sizes
