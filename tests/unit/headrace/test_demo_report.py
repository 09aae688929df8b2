"""The demo's report: the JSON keys that scripts read, and the lines that people read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from headrace.clients.video.frames import VideoFrame
from headrace.demo.account import DemoAccount
from headrace.demo.report import DemoReport
from headrace.demo.tracker import FrameTracker
from headrace.protocol.messages import Outcome, Status

BROKER = {"accepted": 1, "ok": 1}
STATUS = {
    "classes": [{"size_class": "small", "batches": 1, "mean_batch": 1.0, "padding_waste": 0.17}],
    "workers": [{"id": "w", "device": "cpu", "frames": 1, "busy_share": 0.5}],
}


def report(broker=BROKER, problems=()):
    tracker = FrameTracker(["a"])
    tracker.add_sent(("a", 1, 0), VideoFrame(lambda: np.zeros((1, 1, 3), np.uint8), pts_ns=0, index=0), 0)
    tracker.add_outcome(Outcome("a", 1, 0, 1, 0, Status.OK, outputs={"boxes": [[0, 0, 1, 1]]}), 25_000_000)
    account = DemoAccount({"a": 1}, {"a": {"ok": 1}}, broker)
    return DemoReport.of(account, problems, STATUS, tracker, [Path("out/a.mp4")], 25_000_000)


def test_the_json_has_the_keys_that_scripts_read():
    values = json.loads(json.dumps(report().as_json()))

    assert values["ok"] is True
    assert values["frames_sent"] == values["accepted"] == 1
    assert values["outcomes"] == {"ok": 1, "error": 0, "expired": 0, "superseded": 0, "rejected": 0}
    assert values["streams"] == {"a": {"sent": 1, "outcomes": {"ok": 1}, "boxes": 1}}
    assert values["size_classes"] == {"small": {"batches": 1, "mean_batch": 1.0, "padding_waste": 0.17}}
    assert values["workers"] == [{"worker": "w", "device": "cpu", "frames": 1, "load": 0.5}]
    assert values["latency_ms"] == {"p50": 25.0, "p99": 25.0}
    assert values["device"] == "cpu"
    assert values["annotated"] == ["out/a.mp4"]


def test_people_read_the_account_and_that_it_adds_up():
    lines = report().lines()

    assert lines[0] == "annotated video: out/a.mp4"
    assert "1 frames sent = 1 accepted (1 ok + 0 error + 0 expired + 0 superseded) + 0 rejected" in lines
    assert lines[-1].startswith("every frame is accounted for")


def test_problems_of_the_account_and_others_are_told():
    bad = report(broker=None, problems=["camera-1: no clip"])

    assert bad.as_json()["ok"] is False
    assert bad.lines()[-2:] == [
        "problem: camera-1: no clip",
        "problem: the broker's own account could not be read",
    ]
