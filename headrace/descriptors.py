"""How many file descriptors this process may have open, and how many it has.

ZeroMQ takes one for each connection, an arena takes one, a log, a journal and a model file one each. A
process that has none left can't be reached by anybody new; nothing of what is open suffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

#: What the soft limit is raised to, where the hard one allows it: a thousand producers and their arenas take
#: a tenth of it. No more, as some programs that a process starts close all that may be open one by one.
WANTED_LIMIT = 65_536

#: Taken for the limit where there is none.
UNLIMITED = 1 << 30

#: A count is good for this long: counting takes 100 us at 1,000 descriptors, and peers arrive in crowds, some
#: ten in this time.
COUNT_AGE_S = 0.02

_OWN_DESCRIPTORS = Path("/proc/self/fd")


def limits() -> tuple[int, int]:
    """Return how many may be open now (the soft limit), and what that can be raised to (the hard one)."""
    if resource is None:
        return UNLIMITED, UNLIMITED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(UNLIMITED if one == resource.RLIM_INFINITY else one for one in (soft, hard))  # type: ignore[return-value]


def raise_limit(wanted: int = WANTED_LIMIT) -> int:
    """Raise the soft limit of this process to ``wanted`` or to the hard one; return what it is then."""
    soft, hard = limits()
    target = min(wanted, hard)
    if resource is None or soft >= target:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # a sandbox may forbid it
        return soft
    return target


def count_open() -> int:
    """Return how many descriptors this process has open; 0 where the system does not say."""
    try:
        return sum(1 for _ in _OWN_DESCRIPTORS.iterdir()) - 1  # one is that of the listing itself
    except OSError:
        return 0


class Descriptors:
    """The descriptors of this process, counted now and then."""

    def __init__(self, limit: int | None = None, count: Callable[[], int] = count_open) -> None:
        """``limit``: how many may be open; the soft limit by default."""
        self.limit = limits()[0] if limit is None else limit
        self._count = count
        self._counted = 0
        self._counted_s = float("-inf")

    def open_count(self) -> int:
        """Return how many are open, as of a moment ago."""
        now_s = time.monotonic()
        if now_s >= self._counted_s + COUNT_AGE_S:
            self._counted, self._counted_s = self._count(), now_s
        return self._counted

    def note_opened(self) -> None:
        """Count one in that was opened since."""
        self._counted += 1
