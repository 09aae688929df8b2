"""Which machine this is, for deciding whether two processes can share memory."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from headrace.arena import SHM_FOLDER


@functools.cache
def host_key(folder: Path | None = SHM_FOLDER) -> str:
    """Return a key that is equal in two processes exactly when they can share memory.

    Made of the kernel's boot id, the shared-memory folder, its mount and the user: two containers of one
    machine have the first in common, not the third, and an arena is its user's alone. "" without a folder,
    or when something can't be read; it is equal to nobody's key.
    """
    if folder is None:
        return ""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        device = folder.stat().st_dev
    except OSError:
        return ""
    return hashlib.sha256(f"{boot_id}:{folder}:{device}:{os.geteuid()}".encode()).hexdigest()[:32]
