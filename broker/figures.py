"""What workers tell of their devices: the latest figures of each, for /metrics.

Figures are shown, never acted upon. They go when they are old: a worker that ended leaves no frozen gauge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.protocol.messages import Telemetry, Value

#: Figures are told every 2 s; older ones are of a worker that hangs or has gone.
KEPT_NS = 15_000_000_000

#: Workers whose figures are kept, as many as ``admission.max_workers`` is by default.
MAX_WORKERS = 1_024

#: How the names of figures on the comparison with FP32 begin.
DRIFT = "model_drift_"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")


class WorkerFigures:
    """Invariant: at most MAX_WORKERS entries; the oldest goes first."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, dict[str, float]]] = {}

    def note(self, told: Telemetry, now_ns: int) -> None:
        """Take the figures of a worker in place of its earlier ones."""
        self._latest.pop(told.worker, None)
        self._latest[told.worker] = (now_ns, told.figures)
        while len(self._latest) > MAX_WORKERS:
            del self._latest[next(iter(self._latest))]

    def current(self, now_ns: int) -> Iterator[tuple[str, str, str, float]]:
        """Yield worker, name, label ("" without one) and value of every figure that is not old.

        A name that no metric can have is left out: figures are a peer's words."""
        for worker, (at_ns, figures) in self._latest.items():
            if now_ns - at_ns > KEPT_NS:
                continue
            for key, value in figures.items():
                name, _, label = key.partition("/")
                if _NAME.fullmatch(name):
                    yield worker, name, label, value

    def drift(self, now_ns: int) -> list[Value]:
        """Return how far workers' answers differ from those of FP32, an entry per worker and model."""
        found: dict[tuple[str, str], dict[str, Value]] = {}
        for worker, name, label, value in self.current(now_ns):
            if name.startswith(DRIFT):
                entry = found.setdefault((worker, label), {"worker": worker, "model": label})
                entry[name.removeprefix(DRIFT)] = value
        return [*found.values()]
