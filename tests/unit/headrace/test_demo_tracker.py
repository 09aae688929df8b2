"""The tracker: frames meet their outcomes whichever comes first, each once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from headrace.clients.video.frames import VideoFrame
from headrace.demo.tracker import FrameTracker, percentile_ms
from headrace.protocol.messages import Outcome, Status

MS = 1_000_000
IMAGE = np.zeros((2, 2, 3), np.uint8)


def frame():
    return VideoFrame(lambda: IMAGE, pts_ns=0, index=0)


def outcome(seq=0, status=Status.OK, boxes=0, stream="a"):
    outputs = {"boxes": [[0, 0, 1, 1]] * boxes, "scores": [0.5] * boxes}
    return Outcome(stream, 1, seq, 1, seq, status, outputs=outputs)


@pytest.fixture
def tracker():
    return FrameTracker(["a"])


def test_a_frame_sent_first_is_given_with_its_outcome(tracker):
    sent = frame()
    tracker.add_sent(("a", 1, 0), sent, 100 * MS)

    analysed = tracker.add_outcome(outcome(boxes=2), 150 * MS)

    assert analysed.frame is sent
    assert tracker.latency_ms(0.5) == 50.0
    progress = tracker.progress(151 * MS)["a"]
    assert (progress.sent_count, progress.by_status, progress.box_count) == (1, {"ok": 1}, 2)
    assert list(progress.recent) == [(150 * MS, 50 * MS, 2)]


def test_an_outcome_seen_first_waits_for_its_frame(tracker):
    assert tracker.add_outcome(outcome(), 150 * MS) is None

    analysed = tracker.add_sent(("a", 1, 0), frame(), 100 * MS)

    assert analysed is not None
    assert tracker.latency_ms(1.0) == 50.0
    assert tracker.wait_complete(0)


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_frame_without_a_result_is_counted_and_not_drawn(tracker, status):
    tracker.add_sent(("a", 1, 0), frame(), 0)

    assert tracker.add_outcome(outcome(status=status), 1) is None
    assert tracker.progress(1)["a"].by_status == {status.value: 1}
    assert tracker.latency_ms(0.5) is None
    assert tracker.wait_complete(0)


def test_an_outcome_that_comes_twice_is_a_duplicate(tracker):
    tracker.add_sent(("a", 1, 0), frame(), 0)
    tracker.add_outcome(outcome(), 1)

    assert tracker.add_outcome(outcome(), 2) is None
    assert tracker.duplicate_count == 1
    assert tracker.progress(2)["a"].by_status == {"ok": 1}


def test_waiting_ends_with_the_last_outcome(tracker):
    for seq in range(2):
        tracker.add_sent(("a", 1, seq), frame(), 0)
    tracker.add_outcome(outcome(0), 1)
    assert not tracker.wait_complete(0.01)

    last = threading.Thread(target=tracker.add_outcome, args=(outcome(1), 2))
    last.start()

    assert tracker.wait_complete(10)
    last.join()


def test_recent_results_are_those_of_the_last_three_seconds(tracker):
    for seq, seen_ms in enumerate((0, 1000, 3500)):
        tracker.add_sent(("a", 1, seq), frame(), 0)
        tracker.add_outcome(outcome(seq), seen_ms * MS)

    assert [seen // MS for seen, _, _ in tracker.progress(3600 * MS)["a"].recent] == [1000, 3500]


def test_missed_outcomes_are_counted(tracker):
    tracker.add_missed(3)

    assert tracker.missed_count == 3


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 5.0), (0.99, 10.0), (0.0, 1.0), (1.0, 10.0), (0.11, 2.0)]
)
def test_percentiles_are_nearest_rank(share, expected):
    assert percentile_ms([n * MS for n in range(10, 0, -1)], share) == expected
