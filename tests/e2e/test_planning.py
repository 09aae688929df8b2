"""Record, plan and simulate, as an operator would: from a running pool to the number of workers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hr_cli
import numpy as np
import pytest

import headrace

CONFIG = """
[broker]
port = 0
http_port = 0
[[models]]
name = "m"
[models.image]
[models.emulated]
base_ms = 2.0
per_frame_ms = 0.5
[[models.size_classes]]
height = 64
width = 64
max_batch_size = 4
"""


def stdout_of(*arguments: object) -> str:
    """Return what a command that succeeds prints."""
    done = hr_cli.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_a_recorded_pool_is_planned(tmp_path: Path) -> None:
    """A trace and a status are all that the planner needs; the pool's own run times are used."""
    config, trace, status = tmp_path / "pool.toml", tmp_path / "trace.jsonl", tmp_path / "status.json"
    config.write_text(CONFIG)
    parent = ("--parent-pid", os.getpid())
    with hr_cli.Process("broker", "--config", config, "--json", *parent) as broker:
        address = broker.read_json()["endpoints"]["frames"]
        with (
            hr_cli.Process("worker", "--connect", address, "--device", "emulated", *parent),
            headrace.Producer(address) as producer,
            hr_cli.Process("record", "--connect", address, "--out", trace, "--json") as recording,
        ):
            hr_cli.wait_until(lambda: trace.exists() and bool(trace.read_text()))
            for number in range(20):
                producer.push(np.zeros((48, 60, 3), np.uint8), stream=f"cam-{number % 2}")
                if number == 9:
                    producer.flush(timeout=30)  # frames of one message have one time: two at least
            producer.flush(timeout=30)
            assert recording.stop() == 0
            account = recording.read_json()
            status.write_text(stdout_of("status", "--connect", address, "--json"))
    planned = json.loads(stdout_of("plan-classes", trace, "-k", 1, "--multiple", 4, "--json"))
    told = json.loads(
        stdout_of(
            *("simulate", "--config", config, "--trace", trace, "--profile", status),
            *("--objective-ms", 500, "--json"),
        )
    )

    assert (account["frames"], account["streams"], account["lost"]) == (20, 2, 0)
    assert planned["classes"] == [{"height": 48, "width": 60}]
    assert dict(json.loads(status.read_text())["classes"][0]["run_ms"]).keys() == {1, 2, 4}
    assert told["cheapest"]["workers"] == 1
    assert told["cheapest"]["by_status"]["ok"] == told["cheapest"]["offered"]
