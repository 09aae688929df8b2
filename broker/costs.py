"""What a batch costs: milliseconds per (worker, model, size class, bucket), learned as we go.

Seeded by the profile in a worker's READY, then a running mean of what its batches really took, and a
bounded window for the 99th percentile. Not here: any decision; dispatch and policies read this table.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from headrace.protocol.messages import ClassProfile

#: Weight of a new observation in the running mean: half the weight lies in the last 6 batches, so that a
#: throttled or shared device is noticed within a few batches and one outlier does not move the plan.
_WEIGHT = 1 / 8

#: Observations kept for the 99th percentile of one cell; 128 keep it stable and cost 1 KiB.
_WINDOW = 128

#: Prediction for a worker without a profile (tests, workers that skip profiling): one short batch.
UNKNOWN_COST_NS = 10_000_000


@dataclass(slots=True)
class _Cell:
    """Cost of one bucket. Invariant: ``ordered`` holds exactly the values of ``recent``, ascending."""

    mean_ns: float
    recent: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def observe(self, ran_ns: int) -> None:
        self.mean_ns += (ran_ns - self.mean_ns) * _WEIGHT
        if len(self.recent) == _WINDOW:
            oldest = self.recent.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
        self.recent.append(ran_ns)
        insort(self.ordered, ran_ns)

    def p99_ns(self) -> int:
        if not self.ordered:
            return int(self.mean_ns)
        return self.ordered[(len(self.ordered) * 99 - 1) // 100]


_ClassKey = tuple[str, str, str]


class CostTable:
    """Predicted and observed run times. Keys are worker ids, model names and versions, class names."""

    def __init__(self) -> None:
        # Buckets of a key are ascending, with one cell each at the same index.
        self._buckets: dict[str, dict[_ClassKey, tuple[tuple[int, ...], list[_Cell]]]] = {}

    def seed(self, worker: str, profile: ClassProfile, model: str, version: str) -> None:
        """Take the measured buckets of one size class of one worker; replaces an earlier profile."""
        sizes = tuple(size for size, _ in profile.buckets)
        cells = [_Cell(mean_ns=ms * 1e6) for _, ms in profile.buckets]
        self._buckets.setdefault(worker, {})[model, version, profile.size_class.name] = (sizes, cells)

    def observe(
        self, worker: str, model: str, version: str, size_class: str, count: int, ran_ns: int
    ) -> None:
        """Learn that a batch of ``count`` frames ran for ``ran_ns`` on this worker."""
        cell = self._cell(worker, model, version, size_class, count)
        if cell is not None and ran_ns > 0:
            cell.observe(ran_ns)

    def predict_ns(self, worker: str, model: str, version: str, size_class: str, count: int) -> int:
        """Return the expected run time of a batch of ``count`` frames, in nanoseconds."""
        cell = self._cell(worker, model, version, size_class, count)
        return UNKNOWN_COST_NS if cell is None else int(cell.mean_ns)

    def p99_ns(self, worker: str, model: str, version: str, size_class: str, count: int) -> int:
        """Return the 99th percentile of recent run times (the mean as long as there is none)."""
        cell = self._cell(worker, model, version, size_class, count)
        return UNKNOWN_COST_NS if cell is None else cell.p99_ns()

    def table(self, worker: str, model: str, version: str, size_class: str) -> list[tuple[int, float]]:
        """Return (bucket, milliseconds) as they are known now, ascending; none without a profile."""
        sizes, cells = self._buckets.get(worker, {}).get((model, version, size_class), ((), []))
        return [(size, cell.mean_ns / 1e6) for size, cell in zip(sizes, cells, strict=True)]

    def forget_version(self, worker: str, model: str, version: str) -> None:
        """Drop what is known about a worker with one version of a model. Idempotent."""
        known = self._buckets.get(worker, {})
        for key in [key for key in known if key[:2] == (model, version)]:
            del known[key]

    def forget(self, worker: str) -> None:
        """Drop everything known about a worker. Idempotent."""
        self._buckets.pop(worker, None)

    def _cell(self, worker: str, model: str, version: str, size_class: str, count: int) -> _Cell | None:
        entry = self._buckets.get(worker, {}).get((model, version, size_class))
        if entry is None or not entry[0]:
            return None
        sizes, cells = entry
        # A batch is padded up to the smallest bucket that holds it.
        return cells[min(bisect_left(sizes, count), len(sizes) - 1)]
