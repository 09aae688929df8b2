"""What the cuda engine tells of itself, on the device that records."""

from __future__ import annotations

from pathlib import Path

import pytest
from hr_gpu import Faults, RecordingDevice
from hr_gpu_site import LARGE, SMALL, GpuSite, colors


def figures_of(site: GpuSite, name: str) -> dict[str, float]:
    """Return one figure by what it is of."""
    found = site.engine.figures()
    return {key.removeprefix(f"{name}/"): found[key] for key in found if key.startswith(f"{name}/")}


def test_replays_and_plain_runs_are_told_apart(tmp_path: Path) -> None:
    """Beside those of the start: three replays of one bucket, two plain runs of the one without a graph."""
    site = GpuSite(tmp_path, RecordingDevice(Faults(fail_capture={2})))
    site.load(classes=[SMALL])
    before = site.engine.figures()

    for count in (4, 4, 4, 2, 2):
        site.ask(colors(count))

    after = site.engine.figures()
    grown = {
        key: after[key] - before[key] for key in after if key.startswith(("graph_replays", "plain_runs"))
    }
    assert {key: count for key, count in grown.items() if count} == {
        "graph_replays_total/mean:1 small x4": 3,
        "plain_runs_total/mean:1 small x2": 2,
    }


def test_how_full_buckets_are_is_told(tmp_path: Path) -> None:
    """Three frames in a bucket of four leave one row empty."""
    site = GpuSite(tmp_path)
    site.load(classes=[SMALL])
    before = site.engine.figures()

    for count in (3, 3, 4):
        site.ask(colors(count))

    after = site.engine.figures()
    bucket = "mean:1 small x4"
    assert after[f"bucket_rows_total/{bucket}"] - before[f"bucket_rows_total/{bucket}"] == 10
    assert after[f"bucket_padding_rows_total/{bucket}"] - before[f"bucket_padding_rows_total/{bucket}"] == 2


def test_each_lane_tells_its_time(tmp_path: Path) -> None:
    """By the events of the device, per bucket; launches by the clock of the host."""
    site = GpuSite(tmp_path)
    site.load(classes=[SMALL])
    before = site.engine.figures()

    site.ask(colors(4))

    after = site.engine.figures()
    for name in (
        "copy_in_seconds_total",
        "run_seconds_total",
        "copy_out_seconds_total",
        "launch_seconds_total",
    ):
        assert after[f"{name}/mean:1 small x4"] > before[f"{name}/mean:1 small x4"], name


def test_memory_is_told_by_who_took_it(tmp_path: Path) -> None:
    """The session with its arena, graphs, and torch with what it lost by fragmentation."""
    site = GpuSite(tmp_path, RecordingDevice(Faults(session_bytes=5_000_000, run_bytes=1000)))
    site.load(classes=[SMALL, LARGE])

    found = site.engine.figures()

    # Weights, and what plain runs of the self-test and of every bucket took since.
    assert 5_000_000 < found["session_bytes/mean:1"] < 5_100_000
    assert sum(figures_of(site, "graph_bytes").values()) == 6 * 1000
    assert found["torch_reserved_bytes"] == 2 * found["torch_allocated_bytes"] > 0
    assert found["torch_fragmentation_ratio"] == pytest.approx(0.5)
    assert found["device_memory_free_bytes"] == site.device.memory().free_bytes
    assert found["graph_budget_used_bytes"] > 6 * 1000
    assert found["unpinned_batches_total"] == 0


def test_a_batch_shows_in_a_timeline_by_its_four_steps(tmp_path: Path) -> None:
    """Ranges for a profiler, each with its bucket."""
    site = GpuSite(tmp_path)
    site.load(classes=[SMALL])
    assert [name for name in site.device.ranges if name.startswith("capture")] == [
        f"capture mean:1 small x{rows}" for rows in (4, 2, 1)
    ]
    site.device.ranges.clear()

    site.ask(colors(4))

    assert site.device.ranges == [
        f"{step} mean:1 small x4" for step in ("copy-in", "replay", "copy-out", "publish")
    ]
