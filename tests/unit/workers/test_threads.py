"""Threads follow what the process may use, not what the host has (ORT-11)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.workers import threads

AFFINITY = len(os.sched_getaffinity(0))


def cgroup(tmp_path: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    root = tmp_path / "cgroup"
    root.mkdir()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "self"
    own.write_text(membership)
    return root, own


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", AFFINITY),
        ({"cpu.max": "max 100000\n"}, "0::/\n", AFFINITY),
        ({"cpu.max": "100000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 1),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, "0::/a/b\n", 1),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/\n", 1),
        ({"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, "3:cpu:/x\n", AFFINITY),
        ({"cpu.max": "rubbish"}, "rubbish", AFFINITY),
    ],
    ids=["none", "v2 max", "v2 one", "v2 half", "v2 parent", "v1 one", "v1 unlimited", "unreadable"],
)
def test_ort_11_the_quota_bounds_the_cpus(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int
) -> None:
    """ORT-11: affinity and every cgroup on the way up count, the smallest wins."""
    assert threads.allowed_cpus(*cgroup(tmp_path, files, membership)) == expected


def test_a_missing_membership_file_is_no_fault(tmp_path: Path) -> None:
    assert threads.allowed_cpus(tmp_path, tmp_path / "absent") == AFFINITY


@pytest.mark.parametrize(("workers", "cpus", "expected"), [(1, 8, 8), (4, 8, 2), (4, 2, 1), (0, 3, 3)])
def test_ort_11_workers_share_the_cpus(workers: int, cpus: int, expected: int) -> None:
    """ORT-11: four workers on two CPUs get one thread each."""
    assert threads.threads_per_worker(workers, cpus) == expected
