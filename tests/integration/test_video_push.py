"""Video through a real broker and an emulated worker: times, sizes and the last frames all arrive."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import hr_broker
import hr_video
import pytest

from headrace.clients.producer import Producer
from headrace.clients.subscriber import Subscriber
from headrace.clients.video.push_loop import PushOptions, push_source
from headrace.clients.video.sources import open_source
from headrace.protocol.messages import Encoding, SizeClassSpec, Status

MS = hr_video.MS
CLASSES = (
    SizeClassSpec("small", 160, 192, max_batch_size=4),
    SizeClassSpec("wide", 288, 640, max_batch_size=4),
    SizeClassSpec("large", 384, 640, max_batch_size=4),
)


@pytest.fixture
def address():
    """A broker with one emulated worker of about 0.2 ms a batch."""
    settings = hr_broker.broker_settings(hr_broker.emulated_model("m", *CLASSES))
    with hr_broker.running_broker(settings) as broker, contextlib.ExitStack() as stack:
        address = broker.endpoints.frames
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", "worker", "--device", "emulated", "--connect", address]
        )
        stack.callback(worker.wait, 20)
        stack.callback(worker.terminate)
        yield address


def push(address, source, stream, **options):
    """Push a source whole and return the report and all its outcomes in the order of publication."""
    with Subscriber(address, stream=stream) as subscriber:
        with Producer(address) as producer:
            report = push_source(source, producer, PushOptions(stream, is_fast=True, **options))
        items = [subscriber.get(timeout=20) for _ in range(report.sent_count)]
    return report, items


def test_the_times_of_the_source_come_back_exactly(address, tmp_path):
    """VID-05: outcomes carry the times of a source with a varying rate."""
    pts_ms = [0, 33, 66, 500, 533, 10_000]
    path = hr_video.write_lossless(tmp_path / "v.mkv", [hr_video.noise(32, 48, n) for n in range(6)], pts_ms)

    _, outcomes = push(address, open_source(str(path)), "uneven")

    assert [outcome.pts_ns for outcome in outcomes] == [pts * MS for pts in pts_ms]


def test_each_frame_runs_in_the_class_of_its_own_size(address, tmp_path):
    """VID-03: a stream whose size changes goes on, and its outcomes carry each frame's size."""
    import cv2

    sizes = [(144, 176), (272, 640), (720, 1280), (144, 176)]
    for number, size in enumerate(sizes):
        cv2.imwrite(str(tmp_path / f"{number}.png"), hr_video.noise(*size))

    _, outcomes = push(address, open_source(str(tmp_path)), "changing")

    assert [outcome.status for outcome in outcomes] == [Status.OK] * 4
    assert [outcome.shape[:2] for outcome in outcomes] == sizes
    assert [outcome.size_class for outcome in outcomes] == ["small", "wide", "large", "small"]


@pytest.mark.parametrize("encoding", list(Encoding))
def test_the_last_frames_of_a_file_are_not_lost(address, encoding):
    """VID-07: a clip sent as fast as it goes has an outcome for every frame when the push returns."""
    clip = open_source(str(hr_video.clip("carphone_pristine")))

    report, outcomes = push(address, clip, f"clip-{encoding}", encoding=encoding)

    assert report.sent_count == 120
    assert report.unfinished_count == 0
    assert [outcome.seq for outcome in outcomes] == list(range(120))
    assert {outcome.status for outcome in outcomes} == {Status.OK}
