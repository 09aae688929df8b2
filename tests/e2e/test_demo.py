"""The demo as a user runs it: real processes, the real model, real video, an account that adds up."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import hr_video
import pytest

from headrace.clients.video.sources import open_source

pytestmark = pytest.mark.timeout(400)

ACCEPTED = ("ok", "error", "expired", "superseded")


def run_demo(*arguments: str, cpus: int = 2) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    """Run the demo on so many CPUs at most and return how it ended and its JSON."""
    hr_video.clip("bikes")
    if importlib.util.find_spec("rapidocr") is None:
        pytest.skip("the text detector of rapidocr is not installed")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headrace", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=350,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus]),
    )
    assert done.stdout.strip(), done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def slow_demo(tmp_path_factory):
    """Five frames of each camera, which is less than one CPU can do: how it ended, its JSON, its folder."""
    folder = tmp_path_factory.mktemp("demo")
    return *run_demo("--seconds", "5", "--fps", "1", "--out", str(folder)), folder


def test_every_frame_of_three_cameras_is_accounted_for(slow_demo):
    """Must-show 1 and 2: exit 0, three size classes used, results for all, videos with their times."""
    done, report, _ = slow_demo

    assert done.returncode == 0, done.stderr
    assert report["problems"] == []
    assert report["frames_sent"] == 15
    assert sum(report["outcomes"][status] for status in ACCEPTED) == report["accepted"]
    assert all(stream["outcomes"]["ok"] >= 3 for stream in report["streams"].values())
    assert {name: row["batches"] > 0 for name, row in report["size_classes"].items()} == {
        "small": True,
        "wide": True,
        "large": True,
    }
    assert len(report["workers"]) == 2
    assert report["latency_ms"]["p50"] <= report["latency_ms"]["p99"]
    assert "cpu" in report["device"]
    assert len(done.stdout.splitlines()) == 1
    for path, size in zip(sorted(report["annotated"]), ((144, 176), (272, 640), (720, 1280)), strict=True):
        frames = list(open_source(path).frames())
        assert frames[0].image.shape[:2] == size
        times = [frame.pts_ns / 1e9 for frame in frames]
        assert times[-1] - times[0] == pytest.approx(round(times[-1] - times[0]), abs=0.3)
        assert max(times) < 5


def test_boxes_are_found_where_the_captions_are(slow_demo):
    """Each camera burns its name into the lower left corner: the boxes drawn are there."""
    _, report, folder = slow_demo

    for stream, counts in report["streams"].items():
        assert counts["boxes"] >= counts["outcomes"]["ok"]
        *_, last = open_source(str(folder / f"{stream}.mp4")).frames()
        height, width = last.image.shape[:2]
        red, green, blue = (last.image[..., channel].astype(int) for channel in range(3))
        is_box = (green > 140) & (green - red > 70) & (green - blue > 50)
        corner = is_box[int(height * 0.85) :, : int(width * 0.8)]
        assert corner.sum() > 30, stream


def test_overload_supersedes_and_still_adds_up(tmp_path):
    """Native rate is more than one CPU can do: the latest frames win, and nothing is unaccounted for."""
    done, report = run_demo("--seconds", "3", "--fps", "native", "--out", str(tmp_path), cpus=1)

    assert done.returncode == 0, done.stderr
    assert report["outcomes"]["superseded"] > 0
    assert report["frames_sent"] > 150
    assert report["accepted"] == sum(report["outcomes"][status] for status in ACCEPTED)
