"""Recording traffic of a real broker: the control method, and the command with its file."""

from __future__ import annotations

import json
from pathlib import Path

import hr_broker as hb
import hr_cli
import pytest
import zmq

from headrace.planner.trace_file import read_trace

pytestmark = pytest.mark.timeout(60)


def test_what_arrives_is_told_to_whoever_asks() -> None:
    """From the first question on; rejected frames and plain scripts' frames are in it."""
    with (
        hb.running_broker() as broker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hb.Peer(zmq.PUSH, broker.endpoints.intake) as script,
        hb.Caller(broker.endpoints) as caller,
        hb.Listener(broker.endpoints, b"") as listener,
    ):
        producer.send(hb.frames(hb.frame("early", 0, model="unknown")))
        listener.outcomes(1)
        started = caller.call("record").result
        producer.send(hb.frames(hb.frame("cam", 0, model="unknown")))
        script.send(hb.frames(hb.frame("plain", 0, model="unknown")))
        listener.outcomes(2)
        recorded = caller.call("record", after=started["next"]).result
        refused = caller.call("record", after=-1)

    assert started["frames"] == []
    assert sorted(frame[1] for frame in recorded["frames"]) == ["cam", "plain"]  # type: ignore[union-attr,index,call-overload,misc]
    assert recorded["lost"] == 0
    assert refused.code == "bad_params"


@pytest.mark.parametrize("flags", [(), ("--hash-streams",)], ids=["names", "hashed"])
def test_the_command_writes_a_trace(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Until it is stopped; the account goes to stdout as JSON."""
    path = tmp_path / "trace.jsonl"
    with (
        hb.running_broker() as broker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hr_cli.Process(
            "record", "--connect", broker.endpoints.control, "--out", path, "--json", *flags
        ) as recording,
    ):
        hr_cli.wait_until(lambda: path.exists() and bool(path.read_text()))
        for seq in range(3):
            producer.send(hb.frames(hb.frame("cam-1", seq, model="unknown")))
        hr_cli.wait_until(lambda: len(path.read_text().splitlines()) == 4)
        code = recording.stop()
        account = json.loads(recording.popen.stdout.read())  # type: ignore[union-attr]

    frames = list(read_trace(path))
    assert code == 0
    assert (account["frames"], account["streams"], account["lost"]) == (3, 1, 0)
    assert len(frames) == 3
    assert frames[0].time_s == 0.0
    assert {frame.kind.model for frame in frames} == {"unknown"}
    assert ({frame.stream for frame in frames} == {"cam-1"}) == (not flags)


def test_a_recording_without_frames_says_so(tmp_path: Path) -> None:
    """Exit code 1, and a trace that holds none."""
    with hb.running_broker() as broker:
        done = hr_cli.run(
            "record", "--connect", broker.endpoints.control, "--out", tmp_path / "t", "--seconds", "0.1"
        )

    assert done.returncode == 1
    assert "0 frames of 0 streams" in done.stderr
