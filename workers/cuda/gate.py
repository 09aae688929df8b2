"""Keeps every other thread off the device while a graph is captured.

A capture is global: any call of another thread that allocates, waits or asks meanwhile fails, or spoils the
capture (gpu.md 1). Threads other than the device thread wrap their calls in ``use``; the device thread wraps
a capture in ``quiet``, which waits for the calls under way and lets none begin. The device thread's own calls
need no ``use``: it can't call while it captures.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Shared for ``use``, exclusive for ``quiet``. A waiting ``quiet`` goes before new ``use``s."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._users_count = 0
        self._quiet_count = 0  # threads that hold or wait for quiet
        self._is_quiet = False

    @contextmanager
    def use(self) -> Iterator[None]:
        """Call the device from a thread that is not the device thread; waits while a capture runs."""
        with self._condition:
            self._condition.wait_for(lambda: self._quiet_count == 0)
            self._users_count += 1
        try:
            yield
        finally:
            with self._condition:
                self._users_count -= 1
                self._condition.notify_all()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Be alone on the device."""
        with self._condition:
            self._quiet_count += 1
            self._condition.wait_for(lambda: self._users_count == 0 and not self._is_quiet)
            self._is_quiet = True
        try:
            yield
        finally:
            with self._condition:
                self._is_quiet = False
                self._quiet_count -= 1
                self._condition.notify_all()


#: CUDA's capture mode is a matter of the whole process, and so is the gate.
GATE = Gate()
