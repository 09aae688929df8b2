"""Exit codes of every headrace process, in one table: people, scripts and the supervisor read them.

Codes from 64 up are those of sysexits.h, so that they mean the same to other tools.
"""

from __future__ import annotations

from enum import IntEnum

from headrace.errors import HeadraceError, RequestTimeoutError, UnreachableError


class ExitCode(IntEnum):
    """What a process ends with."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 65
    UNAVAILABLE = 69
    INTERNAL = 70
    DEVICE_LOST = 71
    CONFIG = 78
    INTERRUPTED = 130


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "done; stopped on request after draining",
    ExitCode.FAILED: "failed at run time: frames not delivered, an account that does not add up ...",
    ExitCode.USAGE: "the command line can't be understood",
    ExitCode.MODEL: "a model can't be served",
    ExitCode.UNAVAILABLE: "the broker did not answer, or the device asked for is not there",
    ExitCode.INTERNAL: "a bug in headrace; HEADRACE_DEBUG=1 shows where",
    ExitCode.DEVICE_LOST: "a worker's device failed, or hung with a batch, while it served; nothing was"
    " published after that",
    ExitCode.CONFIG: "a setting can't be used",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C) before it was done",
}

#: What a restart can't mend: the same file and the same command line fail the same way again.
NEVER_RESTARTED = frozenset({ExitCode.OK, ExitCode.USAGE, ExitCode.MODEL, ExitCode.CONFIG})


def exit_code_of(error: Exception) -> int:
    """Return the exit code that stands for an error: its own ``exit_code``, else by its class."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return int(own)
    if isinstance(error, UnreachableError | RequestTimeoutError):
        return int(ExitCode.UNAVAILABLE)
    return int(ExitCode.FAILED if isinstance(error, HeadraceError) else ExitCode.INTERNAL)
