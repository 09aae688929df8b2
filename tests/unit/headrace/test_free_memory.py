"""What is left of the machine's memory, and of what the cgroup allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.free_memory import free_memory_bytes

MEMINFO = "MemTotal:       2000 kB\nMemFree:        100 kB\nMemAvailable:   1000 kB\n"


@pytest.mark.parametrize(
    ("membership", "files", "free"),
    [
        pytest.param("", {}, 1_024_000, id="no cgroup"),
        pytest.param("0::/\n", {"memory.max": "max", "memory.current": "5"}, 1_024_000, id="no limit"),
        pytest.param("0::/\n", {"memory.max": "900", "memory.current": "800"}, 100, id="container"),
        pytest.param(
            "0::/a/b\n",
            {
                "a/memory.max": "900",
                "a/memory.current": "800",
                "a/memory.stat": "anon 5\ninactive_file 50\n",
                "a/b/memory.max": "max",
                "a/b/memory.current": "700",
            },
            150,
            id="the parent's limit, files dropped",
        ),
        pytest.param(
            "3:cpu:/x\n4:memory:/y\n",
            {
                "cpu/x/memory.max": "1",
                "cpu/x/memory.current": "1",
                "memory/y/memory.limit_in_bytes": "500",
                "memory/y/memory.usage_in_bytes": "600",
                "memory/y/memory.stat": "total_inactive_file 30\nodd\n",
            },
            0,
            id="version 1, beyond it",
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], free: int) -> None:
    """Memory that holds files only is as good as free."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert free_memory_bytes(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "membership") == free


def test_where_nobody_says_nothing_is_known(tmp_path: Path) -> None:
    """No Linux, or a file of another form."""
    (tmp_path / "meminfo").write_text("MemAvailable: much kB\n")

    for meminfo in (tmp_path / "none", tmp_path / "meminfo"):
        assert free_memory_bytes(meminfo, tmp_path / "none", tmp_path / "none") is None
    assert free_memory_bytes() is None or free_memory_bytes() > 0
