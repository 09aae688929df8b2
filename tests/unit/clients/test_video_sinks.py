"""Sinks: MP4 files with real times, and outcomes drawn in the right place."""

from __future__ import annotations

import hr_video
import numpy as np
import pytest

from headrace.clients.video.sinks import BOX_COLOR, Mp4Writer, annotate, detections_of, fitted
from headrace.clients.video.sources import open_source
from headrace.protocol.messages import Outcome, Status

MS = hr_video.MS


def outcome(outputs=None, status=Status.OK, code=""):
    return Outcome("cam", 1, 0, 1, 0, status, code=code, outputs=outputs)


def flat(height, width, value):
    return np.full((height, width, 3), value, np.uint8)


@pytest.mark.parametrize("size", [(144, 176), (145, 177), (33, 31)])
def test_written_frames_have_their_times_and_pictures(tmp_path, size):
    """Odd sizes are made even by one repeated row or column; times come back to the tick, from 0."""
    pts_ms = [1000, 1033, 1500, 4500]
    with Mp4Writer(tmp_path / "sub" / "out.mp4") as writer:
        for pts, value in zip(pts_ms, (30, 90, 150, 210), strict=True):
            writer.write(flat(*size, value), pts * MS)

    frames = list(open_source(str(tmp_path / "sub" / "out.mp4")).frames())

    assert [round(f.pts_ns / MS) for f in frames] == [0, 33, 500, 3500]
    assert all(f.image.shape[:2] == (size[0] + size[0] % 2, size[1] + size[1] % 2) for f in frames)
    assert [int(f.image.mean()) for f in frames] == pytest.approx([30, 90, 150, 210], abs=4)


def test_a_time_that_does_not_rise_is_dropped_and_counted(tmp_path):
    with Mp4Writer(tmp_path / "out.mp4") as writer:
        for pts in (0, 40, 40, 20, 80):
            writer.write(flat(16, 16, 9), pts * MS)

    assert (writer.written_count, writer.dropped_count) == (3, 2)


def test_without_frames_there_is_no_file(tmp_path):
    with Mp4Writer(tmp_path / "out.mp4"):
        pass

    assert not (tmp_path / "out.mp4").exists()


def test_another_size_is_scaled_into_the_file(tmp_path):
    """VID-03: a stream that changes size still gives one file."""
    with Mp4Writer(tmp_path / "out.mp4") as writer:
        writer.write(flat(64, 96, 200), 0)
        writer.write(flat(200, 100, 200), 40 * MS)

    first, second = open_source(str(tmp_path / "out.mp4")).frames()

    assert first.image.shape == second.image.shape == (64, 96, 3)
    assert second.image[32, 48].min() > 180
    assert second.image[32, 5].max() < 40


def test_mpeg4_is_written_where_there_is_no_x264(tmp_path, monkeypatch):
    import av

    monkeypatch.setattr(av, "codecs_available", frozenset({"mpeg4"}))
    with Mp4Writer(tmp_path / "out.mp4") as writer:
        for pts in (0, 500, 1000):
            writer.write(flat(32, 32, 100), pts * MS)

    assert [round(f.pts_ns / MS) for f in open_source(str(tmp_path / "out.mp4")).frames()] == [0, 500, 1000]


def test_fitted_leaves_the_right_size_alone():
    image = hr_video.noise(8, 8)

    assert fitted(image, 8, 8) is image


def test_boxes_are_drawn_where_they_are():
    """The outline is on the box's edges and nowhere far from them; the input is left as it was."""
    image = flat(240, 320, 0)
    box = [[100, 80], [200, 80], [200, 140], [100, 140]]

    drawn = annotate(image, outcome({"boxes": [box], "scores": []}))

    coloured = np.argwhere((drawn == BOX_COLOR).all(axis=2))
    assert coloured.min(axis=0) == pytest.approx([80, 100], abs=1)
    assert coloured.max(axis=0) == pytest.approx([140, 200], abs=1)
    assert not drawn[85:135, 105:195].any()
    assert not image.any()


def test_labels_and_scores_are_written_at_the_box():
    image = flat(240, 320, 0)
    outputs = {"boxes": [[100, 80, 200, 140]], "scores": [0.87], "labels": ["car"]}

    drawn = annotate(image, outcome(outputs))

    assert drawn[68:80, 100:130].any()
    assert not drawn[:50].any()


@pytest.mark.parametrize("corner", [(-50.0, -50.0), (310.0, 230.0)])
def test_boxes_beyond_the_edge_are_drawn_as_far_as_they_go(corner):
    x, y = corner

    drawn = annotate(flat(240, 320, 0), outcome({"boxes": [[x, y, x + 90, y + 90]], "scores": [0.5]}))

    assert drawn.shape == (240, 320, 3)
    assert drawn.any()


def test_a_frame_without_a_result_shows_its_status():
    drawn = annotate(flat(100, 300, 0), outcome(status=Status.EXPIRED, code="deadline"))

    assert drawn[:30].any()


@pytest.mark.parametrize(
    "outputs",
    [None, [], "text", {"boxes": "no"}, {"boxes": [1, "a"]}, {"boxes": [[1, 2, 3]]}, {"boxes": [[[1], [2]]]}],
    ids=str,
)
def test_outputs_without_boxes_have_no_detections(outputs):
    assert detections_of(outputs) == []


def test_fewer_scores_than_boxes_is_no_error():
    found = detections_of({"boxes": [[0, 0, 1, 1], [2, 2, 3, 3]], "scores": [0.5], "labels": ["a"]})

    assert [(d.label, d.score) for d in found] == [("a", 0.5), ("", None)]
