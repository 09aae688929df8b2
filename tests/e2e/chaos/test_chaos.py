"""A short chaos run, as part of every test run; ``make chaos`` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).resolve().parents[2]
SECONDS = 8.0
#: Its plan kills every role within that time, and has a pause and three kinds of bad links.
SEED = 7


@pytest.mark.timeout(240)
def test_a_short_run_adds_up(tmp_path: Path) -> None:
    """Kills of all roles, pauses and bad links; then one account, no duplicate, no silent hole."""
    paths = os.pathsep.join(map(str, (TESTS / "e2e", TESTS / "lib")))
    arguments = ["--seconds", str(SECONDS), "--seed", str(SEED), "--keep", str(tmp_path / "run")]

    done = subprocess.run(
        [sys.executable, "-P", "-m", "chaos", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=220,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failures"] == []
    assert report["kills"] >= 5
    assert set(report["kills_by_role"]) == {"broker", "worker", "producer", "subscriber"}
    assert report["account"]["ok"] > 100
    assert report["outcomes_seen"] > 1000
    assert not [process for process in psutil.process_iter(["cmdline"]) if _is_of(process, tmp_path)]


def _is_of(process: psutil.Process, folder: Path) -> bool:
    return any(str(folder) in word for word in process.info["cmdline"] or ())
