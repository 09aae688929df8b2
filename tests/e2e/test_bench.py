"""``headrace bench`` as a person runs it: a pool of real processes, files, Ctrl-C."""

from __future__ import annotations

import json
import signal
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import hr_cli
import pytest

from headrace.exit_codes import ExitCode

CONFIG = """
[broker]
port = 0
http_port = 0
[[models]]
name = "m"
[models.image]
[models.emulated]
base_ms = 2
per_frame_ms = 0.2
[[models.size_classes]]
height = 96
width = 96
max_batch_size = 8
[[models.size_classes]]
height = 192
width = 192
max_batch_size = 8
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker and one emulated worker, ready."""
    path = tmp_path_factory.mktemp("pool") / "pool.toml"
    path.write_text(CONFIG)
    with hr_cli.Process("up", "--config", path, "--device", "emulated", "--json") as up:
        address = up.read_json()["endpoints"]["frames"]

        def is_ready() -> bool:
            status = hr_cli.run("status", "--connect", address, "--json")
            return '"state": "ready"' in status.stdout

        hr_cli.wait_until(is_ready)
        yield address
        assert up.stop() == ExitCode.OK


def test_a_ramp_with_files(address: str, tmp_path: Path) -> None:
    """Tables, a line for each step, one JSON object, a page that parses; the broker counts the same."""
    before = account(address)
    done = hr_cli.run(
        "bench", "--connect", address, "--ramp", "40:120:40", "--seconds", 0.6, "--warm-up", 0.2,
        "--pattern", "poisson", "--sizes", "96x96:0.7,192x192:0.3", "--priorities", "0:0.8,5:0.2",
        "--ttl-ms", 5_000, "--seed", 7, "--json", tmp_path / "run.json", "--plot", tmp_path / "run.html",
        timeout_s=60,
    )  # fmt: skip

    assert done.returncode == ExitCode.OK, done.stderr + done.stdout
    assert "the account adds up" in done.stdout
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines() if "ended ok" in line] == [
        "40/s",
        "80/s",
        "120/s",
    ]
    value = json.loads((tmp_path / "run.json").read_text())
    assert [step["rate_per_s"] for step in value["steps"]] == [40.0, 80.0, 120.0]
    sent = sum(step["account"]["sent"] for step in value["steps"])
    assert sent == sum(step["account"]["ok"] for step in value["steps"]) > 100
    assert account(address)["ok"] - before["ok"] == sent
    assert ET.parse(tmp_path / "run.html").getroot().tag.endswith("html")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_the_middle_gives_the_report_of_the_part_that_ran(
    address: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Frames under way are waited for; the exit code says that it was not the whole run."""
    before = account(address)["accepted"]
    path = tmp_path / "run.json"
    with hr_cli.Process(
        "bench", "--connect", address, "--rates", "50,60", "--seconds", 60, "--json", path
    ) as bench:
        hr_cli.wait_until(lambda: account(address)["accepted"] >= before + 20)

        assert bench.stop(number) == ExitCode.INTERRUPTED

        assert bench.popen.stdout is not None
        shown = bench.popen.stdout.read()
        assert "waiting for the last outcomes" in bench.stderr()
    value = json.loads(path.read_text())
    assert value["is_interrupted"]
    assert len(value["steps"]) == 1
    counts = value["steps"][0]["account"]
    assert counts["sent"] == counts["ok"] >= 20
    assert value["problems"] == []
    assert "interrupted: the figures are of the part that ran" in shown


def account(address: str) -> dict[str, int]:
    value: dict[str, int] = json.loads(hr_cli.run("status", "--connect", address, "--json").stdout)["account"]
    return value
