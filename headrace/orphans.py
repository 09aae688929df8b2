"""End this process when the one that started it is gone, so that no broker is left holding its ports.

Two ways at once: the kernel sends SIGTERM at the parent's death (Linux, at once, even while Python is
busy), and a thread looks whether the parent is still the same. A process that has not ended within a
grace after that is ended the hard way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

#: Option number of prctl(2): signal to get when the parent dies.
_PR_SET_PDEATHSIG = 1

#: How often the thread looks. With ORPHAN_GRACE_S below 5 s in all, the time in which a new broker must
#: be able to bind the same ports.
CHECK_S = 0.5
ORPHAN_GRACE_S = 3.0


def end_with_parent(parent_pid: int) -> None:
    """See the module. Call it first thing in the child, from its main thread; ``parent_pid`` is the pid that
    started it. A parent that has died already ends this process at once."""
    is_signalled = sys.platform == "linux" and _signal_at_parent_death()
    if os.getppid() != parent_pid:
        raise SystemExit(128 + signal.SIGTERM)
    threading.Thread(
        target=_watch, args=(parent_pid, is_signalled), name="headrace-parent", daemon=True
    ).start()


def _signal_at_parent_death() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == 0)


def _watch(parent_pid: int, is_signalled: bool) -> None:
    pause = threading.Event()  # never set: only waited on
    while os.getppid() == parent_pid:
        pause.wait(CHECK_S)
    if not is_signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    pause.wait(ORPHAN_GRACE_S)
    os._exit(128 + signal.SIGTERM)
