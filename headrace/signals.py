"""Requests to stop a process by signal: the first ends it in good order, a second one at once.

Two requests at one moment are one: timeout(1) and some shells signal a process and then its group, and
nobody presses Ctrl-C twice that fast.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

#: What asks a process to stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: Two requests closer together than this are one.
SAME_REQUEST_NS = 300_000_000


class StopRequests:
    """Tells a second request from the first one's echo. Pure: the time is handed in."""

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def is_first(self, now_ns: int) -> bool:
        """Return whether nothing was asked before; if so, remember when it was."""
        if self._first_ns is not None:
            return False
        self._first_ns = now_ns
        return True

    def is_second(self, now_ns: int) -> bool:
        """Return whether this request, after the first, is one of its own."""
        return self._first_ns is not None and now_ns - self._first_ns >= SAME_REQUEST_NS


#: Set once this process was asked to stop.
_asked = threading.Event()


def ignore_echoes() -> None:
    """Ignore stop signals from here on if one was obeyed: for the last step of a process.

    A broker with nothing to do is through within milliseconds, and Python takes its handlers away before it
    ends: the echo of the request then killed what had ended in good order (exit code 143 instead of 0)."""
    if _asked.is_set() and threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stopped_by_signals(ask: Callable[[], None], insist: Callable[[int], None]) -> Iterator[None]:
    """While in the block, call ``ask`` at the first SIGTERM or SIGINT and ``insist`` with the signal's number
    at each later one. Both run in the main thread, between two bytecodes of whatever it does.

    Outside the main thread nothing is done: signals belong to the main thread, and whoever runs a role
    elsewhere stops it by a call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requests = StopRequests()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        now_ns = time.monotonic_ns()
        if requests.is_first(now_ns):
            _asked.set()
            ask()
        elif requests.is_second(now_ns):
            insist(number)

    previous = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
