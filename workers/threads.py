"""How many threads a worker may use: what the process is allowed, not what the host has.

A container with a limit of 2 CPUs on a host of 64 would otherwise get 64 threads that throttle each
other (the CFS quota stops them all once two are used up). Sources: sched_getaffinity(2), and cgroups:
``cpu.max`` of v2, ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of v1.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")


def allowed_cpus(root: Path = CGROUP_ROOT, membership: Path = CGROUP_OF_SELF) -> int:
    """Return how many CPUs this process may use: affinity and cgroup quota, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        count = os.cpu_count() or 1
    quota = _quota(root, membership)
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def threads_per_worker(workers_on_host: int, cpus: int | None = None) -> int:
    """Return the default number of threads of one of ``workers_on_host`` workers (at least 1)."""
    available = allowed_cpus() if cpus is None else cpus
    return max(1, available // max(1, workers_on_host))


def _quota(root: Path, membership: Path) -> float | None:
    """Return the smallest CPU quota on the way from this process's cgroup up to the root."""
    quotas = [
        quota
        for folder in _folders(root, membership)
        if (quota := _quota_v2(folder) or _quota_v1(folder)) is not None
    ]
    return min(quotas, default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    """Return the folders that may hold a limit. Inside a container the own cgroup is often the root."""
    folders = [root, root / "cpu", root / "cpu,cpuacct"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = root / controllers / path.lstrip("/") if controllers else root / path.lstrip("/")
        if controllers and "cpu" not in controllers.split(","):
            continue
        while own not in {root, root / controllers} and root in own.parents:
            folders.append(own)
            own = own.parent
    return folders


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
