"""Set up structlog for a process: stderr only, human or JSON lines, repeats counted.

Theory of operation: warnings and errors pass through :class:`RepeatFilter`. The first of a kind is
written at once; those that follow within the interval are counted. The count is written when
the interval is over, by the next log call of any kind or by :func:`flush`, so that an error a frame
costs two lines an interval, never a full disk. A kind is the level, the event and the values named in
SUBJECT_KEYS; its other values may differ.

No log call raises because of where its line goes: a process does its work with a full disk, and when the
reader of its pipe has left. Lines that could not be written are counted, and the count is written once that
is possible again.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias, cast

import structlog

#: Kinds remembered at once. Events are fixed words, so a process has some dozens; beyond this bound
#: further kinds are written unfiltered.
MAX_KINDS = 1_000

#: Values by which two calls of one event differ in kind. Not frames or streams: of those there is no end.
SUBJECT_KEYS = ("code", "process")

Subject: TypeAlias = "tuple[tuple[str, str], ...]"

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FILTERED_LEVELS = frozenset({"warning", "error", "critical"})


@dataclass(frozen=True, slots=True)
class Summary:
    """``count`` further log calls of one kind were left out during an interval."""

    level: str
    event: str
    subject: Subject
    count: int


class RepeatFilter:
    """Decides which repeated log calls are written. Pure: the time is handed in.

    Invariant: for each kind, calls seen = calls passed + counts in summaries + calls still pending.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._kinds: dict[tuple[str, str, Subject], list[int]] = {}  # kind -> [interval began, left out]

    def is_passed(self, level: str, event: str, subject: Subject, now_ns: int) -> bool:
        """Count one call; return whether it is to be written. Take due() first."""
        kind = (level, event, subject)
        state = self._kinds.get(kind)
        if state is None:
            if self._interval_ns > 0 and len(self._kinds) < MAX_KINDS:
                self._kinds[kind] = [now_ns, 0]
            return True
        state[1] += 1
        return False

    def due(self, now_ns: int, *, is_final: bool = False) -> list[Summary]:
        """Return the summaries whose interval is over (all with ``is_final``) and begin anew.

        A kind that kept repeating stays muted for another interval; one that fell silent is
        forgotten, so that its next call is written at once."""
        summaries = []
        for kind, (began_ns, left_out) in list(self._kinds.items()):
            if not is_final and now_ns - began_ns < self._interval_ns:
                continue
            if left_out:
                summaries.append(Summary(*kind, left_out))
                self._kinds[kind] = [now_ns, 0]
            else:
                del self._kinds[kind]
        return summaries


class _Sink:
    """A text stream that never raises. ``lost_count`` lines could not be written since it was last taken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost_count = 0
        self._is_broken = False

    def write(self, line: str) -> None:
        """Write one line and flush, or count it."""
        try:
            self._stream.write(line)
            self._stream.flush()
            self._is_broken = False
        except (OSError, ValueError) as error:  # ValueError: somebody closed the stream
            self._lost_count += 1
            self._is_broken = True
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                quiet(self._stream)

    def flush(self) -> None:
        """Do nothing: write() flushes."""

    def take_lost(self) -> int:
        """Return the lines lost so far and forget them, if telling of them has a chance; else 0."""
        if self._is_broken:
            return 0
        lost_count, self._lost_count = self._lost_count, 0
        return lost_count


def quiet(stream: TextIO) -> None:
    """Send what is written to a stream from now on to nowhere: the reader of its pipe has left for good.

    Otherwise Python would try once more to write what it has buffered when the process ends, and turn its
    exit code into 120.
    """
    with contextlib.suppress(OSError, ValueError):  # no descriptor: nothing to redirect
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


class _Repeats:
    """The structlog processor around RepeatFilter; writes summaries through the same chain."""

    def __init__(self, interval_ms: int, sink: _Sink) -> None:
        self._sink = sink
        self._filter = RepeatFilter(interval_ms * 1_000_000)
        self._interval_s = interval_ms / 1_000
        self._lock = threading.Lock()

    def __call__(
        self, logger: object, method: str, values: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if values.pop("_is_summary", False):
            return values
        self.flush(is_final=False)
        if method in _FILTERED_LEVELS:
            event = str(values.get("event", ""))
            subject = tuple((key, str(values[key])) for key in SUBJECT_KEYS if key in values)
            with self._lock:
                is_passed = self._filter.is_passed(method, event, subject, time.monotonic_ns())
            if not is_passed:
                raise structlog.DropEvent
        return values

    def flush(self, *, is_final: bool) -> None:
        with self._lock:
            lost_count = self._sink.take_lost()
            summaries = self._filter.due(time.monotonic_ns(), is_final=is_final)
        if lost_count:
            structlog.get_logger().warning("log lines lost", lines_count=lost_count, _is_summary=True)
        for summary in summaries:
            values: dict[str, object] = dict(summary.subject)
            values |= {
                "repeated_count": summary.count,
                "interval_s": self._interval_s,
                "_is_summary": True,
            }
            getattr(structlog.get_logger(), summary.level)(summary.event, **values)


_repeats: _Repeats | None = None


def configure(
    *, level: str = "info", style: str = "auto", summary_ms: int = 10_000, stream: TextIO | None = None
) -> None:
    """Send this process's logs to ``stream`` (stderr).

    ``level`` is debug, info, warning or error; ``style`` human, json or auto (human on a terminal);
    ``summary_ms`` the interval of repeated warnings and errors, 0 = write each.
    """
    global _repeats  # noqa: PLW0603 - logging is process-wide, and so is its filter
    target = stream or sys.stderr
    is_human = style == "human" or (style == "auto" and target.isatty())
    renderer: Any
    if is_human:
        renderer = structlog.dev.ConsoleRenderer(colors=target.isatty())
    else:
        renderer = structlog.processors.JSONRenderer(default=str)
    sink = _Sink(target)
    _repeats = _Repeats(summary_ms, sink)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _repeats,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info if not is_human else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", sink)),
        cache_logger_on_first_use=False,
    )
    atexit.unregister(flush)
    atexit.register(flush)


def flush() -> None:
    """Write the counts of all repeats that were left out so far; called at exit."""
    if _repeats is not None:
        _repeats.flush(is_final=True)


def _keep(_: object, __: str, values: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return values
