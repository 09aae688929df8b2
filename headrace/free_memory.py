"""How much memory this process may still take: what the machine has left, and what its cgroup allows.

Memory that a file in a shared-memory folder takes counts against both. Beyond them there is no error, but the
kernel's out-of-memory killer. Sources: ``MemAvailable`` of proc(5); ``memory.max``, ``memory.current`` and
``memory.stat`` of cgroup v2, ``memory.limit_in_bytes`` and its like of v1.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")

#: Limit, usage, and the line of memory.stat that says how much of the usage is files that can be dropped.
_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory_bytes(
    meminfo: Path = MEMINFO, root: Path = CGROUP_ROOT, membership: Path = CGROUP_OF_SELF
) -> int | None:
    """Return how many bytes are left to this process; None where nobody says."""
    found = [_line(meminfo, "MemAvailable:", 1024)]
    found += [_left(folder, *names) for folder in _folders(root, membership) for names in _VERSIONS]
    return min((each for each in found if each is not None), default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    """Return the folders that may hold a limit. Inside a container the own cgroup is often the root."""
    folders = [root, root / "memory"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers in ("", "memory"):
            top = root / controllers
            own = top / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if top in folder.parents]
    return folders


def _left(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        free = int((folder / limit).read_text()) - int((folder / usage).read_text())
    except (OSError, ValueError):  # "max" is no number, and no limit
        return None
    return max(0, free + (_line(folder / "memory.stat", droppable, 1) or 0))


def _line(path: Path, name: str, unit: int) -> int | None:
    """Return the number behind a name in a file of such lines."""
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1]) * unit
    except (OSError, ValueError, IndexError):
        pass
    return None
