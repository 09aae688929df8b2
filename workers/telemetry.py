"""Polls a device's figures, off the hot path, and tells them to the worker's session.

A figure is a number under a name, optionally for one thing: ``gpu_busy_ratio``, or
``graph_replays_total/mean:1 small x4``. The broker shows them in /metrics and status as they come, so that a
new figure needs no new message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from headrace.protocol.messages import MAX_FIGURES
from headrace.workers.worker_events import Event, FiguresTaken

#: NVML's own window is up to a second; asking more often tells nothing more.
POLL_S = 2.0

log = structlog.get_logger()


def most_wanted(figures: dict[str, float]) -> dict[str, float]:
    """Return at most MAX_FIGURES: those of the whole device before those of one bucket or model, by name."""
    ordered = sorted(figures.items(), key=lambda item: ("/" in item[0], item[0]))
    return dict(ordered[:MAX_FIGURES])


class Poller:
    """A thread that asks ``figures`` every ``interval_s`` and tells them, until closed.

    An error in ``figures`` is logged and ends the polling: telemetry never ends a worker."""

    def __init__(
        self,
        figures: Callable[[], dict[str, float]],
        tell: Callable[[Event], None],
        interval_s: float = POLL_S,
    ) -> None:
        self._figures = figures
        self._tell = tell
        self._interval_s = interval_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-telemetry", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            try:
                figures = self._figures()
            except Exception:
                log.exception("telemetry ended")
                return
            if figures:
                self._tell(FiguresTaken(most_wanted(figures)))
