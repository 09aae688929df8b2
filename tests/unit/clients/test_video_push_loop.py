"""The push loop: what is sent, when, with which options, and the wait for outcomes at the end."""

from __future__ import annotations

import threading

import cv2
import hr_video
import numpy as np
import pytest

from headrace.clients.video.push_loop import PushOptions, push_source
from headrace.clients.video.sources import open_source
from headrace.errors import NotDeliveredError
from headrace.protocol.messages import Encoding, Keep

MS = hr_video.MS


@pytest.fixture
def uneven(tmp_path):
    """VID-05: a short clip with a varying frame rate, 150 ms long."""
    images = [hr_video.noise(16, 24, n) for n in range(6)]
    return hr_video.write_lossless(tmp_path / "v.mkv", images, [0, 3, 6, 50, 53, 150])


def test_a_file_is_sent_whole_with_its_own_times_and_then_waited_for(uneven):
    """VID-05 and VID-07: pts as in the file; the loop ends only when every outcome is known."""
    producer = hr_video.FakeProducer(unfinished=2)
    options = PushOptions("cam", model="m", priority=3, ttl_ms=9, is_fast=True)
    waiting = []

    report = push_source(
        open_source(str(uneven)),
        producer,
        options,
        on_progress=lambda report: waiting.append(report.unfinished_count),
    )

    assert [p["pts_ns"] for p in producer.pushed] == [t * MS for t in (0, 3, 6, 50, 53, 150)]
    assert np.array_equal(producer.pushed[5]["image"], hr_video.noise(16, 24, 5))
    first = producer.pushed[0]
    assert (first["stream"], first["model"], first["priority"], first["ttl_ms"]) == ("cam", "m", 3, 9)
    assert first["keep"] == "all"
    assert producer.flush_count == 3
    assert waiting[-3:] == [1, 0, 0]
    assert (report.sent_count, report.last_pts_ns) == (6, 150 * MS)


def test_pace_follows_the_timestamps(uneven):
    """The intended times keep the source's distances, and no frame is sent before its time."""
    sent = []

    report = push_source(
        open_source(str(uneven)), hr_video.FakeProducer(), PushOptions("cam"), on_sent=sent.append
    )

    assert [s.intended_ns - sent[0].intended_ns for s in sent] == [t * MS for t in (0, 3, 6, 50, 53, 150)]
    assert report.elapsed_s >= 0.15


def test_fps_thins_by_time_and_counts_what_it_left_out(uneven):
    producer = hr_video.FakeProducer()

    report = push_source(open_source(str(uneven)), producer, PushOptions("cam", is_fast=True, fps=20))

    assert [p["pts_ns"] for p in producer.pushed] == [0, 50 * MS, 150 * MS]
    assert (report.sent_count, report.unwanted_count) == (3, 3)


def test_a_loop_goes_on_rising(uneven):
    producer = hr_video.FakeProducer()

    push_source(
        open_source(str(uneven)), producer, PushOptions("cam", is_fast=True, is_looping=True, max_frames=15)
    )

    times = [p["pts_ns"] for p in producer.pushed]
    steps = np.diff(np.array(times)) // MS
    assert len(times) == 15
    assert (steps > 0).all()
    assert list(steps[:5]) == list(steps[6:11]) == [3, 3, 44, 3, 97]


def test_an_empty_loop_ends(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")

    report = push_source(
        open_source(str(tmp_path)), hr_video.FakeProducer(), PushOptions("s", is_fast=True, is_looping=True)
    )

    assert (report.sent_count, report.damaged_count) == (0, 1)


def test_seconds_end_the_loop_by_intended_time(uneven):
    producer = hr_video.FakeProducer()

    push_source(open_source(str(uneven)), producer, PushOptions("cam", max_seconds=0.052))

    assert [p["pts_ns"] // MS for p in producer.pushed] == [0, 3, 6, 50]


def test_a_full_producer_holds_a_file_up_and_loses_nothing(uneven):
    producer = hr_video.FakeProducer(refuse_count=3)

    report = push_source(open_source(str(uneven)), producer, PushOptions("cam", is_fast=True))

    assert (report.sent_count, report.missed_count) == (6, 0)


def test_a_full_producer_makes_a_latest_stream_skip_and_count(uneven):
    producer = hr_video.FakeProducer(refuse_count=2)

    report = push_source(
        open_source(str(uneven)), producer, PushOptions("cam", is_fast=True, keep=Keep.LATEST)
    )

    assert (report.sent_count, report.missed_count) == (4, 2)
    assert producer.pushed[0]["keep"] == "latest"


def test_stop_ends_the_wait_for_a_frame_and_still_waits_for_outcomes(tmp_path):
    """A frame due in an hour is not waited for once stop is set."""
    path = hr_video.write_lossless(tmp_path / "v.mkv", [hr_video.noise(8, 8)] * 2, [0, 3_600_000])
    producer = hr_video.FakeProducer()
    stop = threading.Event()

    push_source(open_source(str(path)), producer, PushOptions("cam"), on_sent=lambda _: stop.set(), stop=stop)

    assert len(producer.pushed) == 1
    assert producer.flush_count == 1


@pytest.mark.parametrize("limit", [{"stall_limit_s": 0}, {"flush_timeout_s": 0.01}], ids=str)
def test_outcomes_that_never_come_are_not_waited_for_without_end(uneven, limit):
    producer = hr_video.FakeProducer(unfinished=2, is_stuck=True)

    with pytest.raises(NotDeliveredError, match="2 frames have no outcome") as caught:
        push_source(open_source(str(uneven)), producer, PushOptions("cam", is_fast=True, **limit))

    assert (caught.value.unfinished, caught.value.delivered) == (2, 4)


@pytest.mark.parametrize(("encoding", "tolerance"), [(Encoding.PNG, 0), (Encoding.JPEG, 12)])
def test_frames_can_be_sent_encoded(tmp_path, encoding, tolerance):
    """The encoded image decodes to the same colours, in the right order."""
    image = np.zeros((16, 16, 3), np.uint8)
    image[..., 0], image[..., 2] = 200, 40
    cv2.imwrite(str(tmp_path / "a.png"), image[..., ::-1])
    producer = hr_video.FakeProducer()

    push_source(open_source(str(tmp_path)), producer, PushOptions("cam", is_fast=True, encoding=encoding))

    payload = producer.pushed[0]["image"]
    assert isinstance(payload, bytes)
    decoded = cv2.imdecode(np.frombuffer(payload, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert np.abs(decoded.astype(int) - image).max() <= tolerance


def test_progress_is_told_after_every_frame(uneven):
    seen = []

    push_source(
        open_source(str(uneven)),
        hr_video.FakeProducer(),
        PushOptions("cam", is_fast=True, fps=20),
        on_progress=lambda report: seen.append((report.sent_count, report.unwanted_count)),
    )

    assert seen[0] == (1, 0)
    assert seen[-1] == (3, 3)
    assert len(seen) == 7


class _LiveSource:
    """A camera that gives as many frames as it likes, whatever the taker does."""

    name, is_live = "camera", True

    def __init__(self, path):
        self._inner = open_source(str(path))
        self.counts = self._inner.counts

    def frames(self):
        return self._inner.frames()

    def close(self):
        self._inner.close()


def test_a_live_source_keeps_the_latest_unless_told_otherwise(uneven):
    """Every frame is either sent or counted as missed, and the last one is always sent."""
    producer = hr_video.FakeProducer()

    report = push_source(_LiveSource(uneven), producer, PushOptions("cam"))

    assert producer.pushed[0]["keep"] == "latest"
    assert report.sent_count + report.missed_count == 6
    assert producer.pushed[-1]["pts_ns"] == 150 * MS


def test_a_live_source_can_be_sent_whole(uneven):
    producer = hr_video.FakeProducer()

    push_source(_LiveSource(uneven), producer, PushOptions("cam", keep=Keep.ALL))

    assert len(producer.pushed) == 6
