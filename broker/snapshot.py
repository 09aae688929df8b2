"""Hand the loop's figures to other threads without a lock in the loop.

Theory of operation. A reader asks for a snapshot and wakes the loop; the loop makes one at the end of its
turn and stores it; the reader is told by a condition that only readers and that rare moment touch. A loop
that does not turn leaves the reader with the last snapshot and its age. Nobody asks: nothing is made.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.broker.core import BrokerCore
from headrace.broker.counters import Counters
from headrace.protocol.messages import Value

#: A snapshot this young is handed out again: a crowd of scrapers costs the loop ten a second at most.
MIN_AGE_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The broker at one moment. Nobody writes to it after it was made."""

    taken_ns: int
    status: dict[str, Value]
    counters: Counters


class Snapshots:
    """The latest snapshot, for any thread; ``end_turn`` and ``close`` belong to the loop's thread."""

    def __init__(self, core: BrokerCore, counters: Counters, wake: Callable[[], None]) -> None:
        self._core = core
        self._counters = counters
        self._wake = wake
        self._condition = threading.Condition()
        self._is_wanted = False
        self._is_closed = False
        self._latest: Snapshot | None = None
        self.last_turn_ns = time.monotonic_ns()

    def end_turn(self, now_ns: int) -> None:
        """Note that the loop turned; make a snapshot if somebody waits for one."""
        self.last_turn_ns = now_ns
        if self._is_wanted:
            status = self._core.status(now_ns, max_streams=0)
            snapshot = Snapshot(now_ns, status, copy.deepcopy(self._counters))
            with self._condition:
                self._latest = snapshot
                self._is_wanted = False
                self._condition.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer: the loop has ended."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def get(self, timeout_s: float) -> Snapshot | None:
        """Return a snapshot taken now, or after ``timeout_s`` the last one; None if there never was one."""
        with self._condition:
            latest = self._latest
            if self._is_closed or (latest and time.monotonic_ns() - latest.taken_ns < MIN_AGE_NS):
                return latest
            self._is_wanted = True
            self._wake()
            self._condition.wait_for(lambda: self._is_closed or self._latest is not latest, timeout_s)
            return self._latest
