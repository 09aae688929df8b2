"""Ask a process again to stop, in a way that is not taken for the first signal's echo."""

from __future__ import annotations

import contextlib
import subprocess
import time

from headrace.signals import SAME_REQUEST_NS


def insist(process: subprocess.Popen[str] | subprocess.Popen[bytes], number: int, timeout_s: float) -> int:
    """Send a signal again and again, as a person would who saw nothing happen, until the process has ended;
    return its exit code. Raises subprocess.TimeoutExpired after ``timeout_s``."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(SAME_REQUEST_NS / 1e9)
    return process.wait(0)
