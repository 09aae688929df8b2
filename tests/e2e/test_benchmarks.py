"""The benchmarks run, and what they write is what scripts rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_benchmark_writes_its_budgets_as_json(tmp_path: Path) -> None:
    """The report says for each budget whether it holds, and the exit code says whether all do."""
    written = tmp_path / "core.json"

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "core", "--quick", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    report = json.loads(written.read_text())
    assert set(report) == {"name", "commit", "machine", "rounds", "tables", "budgets"}, done.stderr
    assert report["budgets"], done.stderr
    for budget in report["budgets"]:
        is_within = (
            budget["value"] >= budget["limit"]
            if budget["kind"] == "min"
            else budget["value"] <= budget["limit"]
        )
        assert budget["holds"] == is_within
    assert done.returncode == (0 if all(budget["holds"] for budget in report["budgets"]) else 1)


def test_throughput_counts_frames_and_cpu_of_every_process(tmp_path: Path) -> None:
    """The profile runs real processes of ours and of the forwarder and names what each costs."""
    written = tmp_path / "profile.json"

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "profile", "--quick", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(written.read_text())["rounds"][0]
    stages = [figures[name] for name in figures if name.startswith("1 KiB inline: ") and "all" not in name]
    assert sum(stages) > 0.99 * figures["1 KiB inline: all"]
    assert figures["1 KiB forwarder: all"] > 0
