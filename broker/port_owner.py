"""Who listens on a TCP port of this machine, as far as /proc tells. For error messages only."""

from __future__ import annotations

from pathlib import Path

_LISTEN = "0A"  # TCP_LISTEN of the kernel's include/net/tcp_states.h, as /proc/net/tcp prints it


def describe_listener(port: int, proc: Path = Path("/proc")) -> str:
    """Return "process 123 (python3)", or "" when it can't be known (another user's process, not Linux)."""
    inodes = _listening_inodes(port, proc)
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if any(str(descriptor.readlink()) in wanted for descriptor in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue  # the process ended or is not ours to look into
    return ""


def _listening_inodes(port: int, proc: Path) -> list[str]:
    inodes = []
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            # sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode; see proc_net_tcp.txt
            columns = line.split()
            local_port = int(columns[1].rpartition(":")[2], 16)
            if local_port == port and columns[3] == _LISTEN:
                inodes.append(columns[9])
    return inodes
