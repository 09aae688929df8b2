"""The ledger of batches that workers hold, and the line of frames that must run alone.

Not here: what becomes of a frame whose worker is lost (core.py), where a batch goes (dispatch.py).

A batch is in the ledger from its dispatch until its DONE or FAILED, the loss of its worker, or the end of
the drain's grace. Whatever arrives for a batch that is not in the ledger comes too late and is suppressed.

A hedge (hedging.py) is a second entry over the same frames; the two are each other's twin. When one of them
wins, the other is cancelled: it keeps its slot, because a running batch can't be interrupted, but its frames
are no longer its own. It leaves the ledger when its worker answers or is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.broker.records import FrameRecord, FrameState
from headrace.protocol.messages import Batch

if TYPE_CHECKING:
    from headrace.broker.model_table import ServedClass
    from headrace.broker.worker_registry import Worker


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """One dispatched batch. ``is_alone``: nothing else may be with its worker as long as it runs.

    ``done_ns`` is when it is predicted to be done, ``due_ns`` from when on it is overdue. Once overdue, some
    of its records may be finished (their deadline came); a cancelled batch has none."""

    batch: int
    worker: Worker
    served: ServedClass
    version: str  # of the model, when it was dispatched
    records: list[FrameRecord]
    sent_ns: int
    predicted_ns: int
    is_alone: bool
    found_idle: bool = False  # its worker had nothing to do when it was sent
    done_ns: int = 0
    due_ns: int = 0
    is_hedge: bool = False
    was_probed: bool = False
    was_hedged: bool = False
    holds_poison: bool = False  # content that was found guilty meanwhile: no second copy of it is sent
    is_cancelled: bool = False
    twin: InFlightBatch | None = None

    @property
    def unfinished(self) -> list[FrameRecord]:
        """Return the frames that still wait for this batch."""
        return [record for record in self.records if record.state is FrameState.IN_FLIGHT]

    def message(self) -> Batch:
        """Return it as it goes to its worker.

        ``meta`` is the producer's own and no worker reads it: 4 KiB a frame would make a full batch's header
        larger than the worker takes."""
        served = self.served
        frames = tuple(
            frame if frame.meta is None else replace(frame, meta=None)
            for frame in (record.frame for record in self.records)
        )
        return Batch(self.batch, served.model, self.version, served.spec.name, frames)


class Ledger:
    """All batches in flight. Invariants: ids ascend; each batch is in exactly its worker's table too; twins
    are both here, with different workers, and the hedge holds frames of the other."""

    def __init__(self) -> None:
        self.batches: dict[int, InFlightBatch] = {}
        self._last_id = 0

    def open(
        self,
        worker: Worker,
        served: ServedClass,
        records: list[FrameRecord],
        now_ns: int,
        predicted_ns: int,
        *,
        is_alone: bool,
    ) -> InFlightBatch:
        """Enter a batch that is being dispatched."""
        self._last_id += 1
        found_idle = not worker.in_flight
        batch = InFlightBatch(
            self._last_id,
            worker,
            served,
            served.live_version,
            records,
            now_ns,
            predicted_ns,
            is_alone,
            found_idle,
        )
        self.batches[batch.batch] = batch
        worker.in_flight[batch.batch] = batch
        served.in_flight_count += len(records)
        return batch

    def close(self, batch: InFlightBatch) -> None:
        """Strike a batch out, whatever the reason; a twin goes on alone."""
        del self.batches[batch.batch]
        del batch.worker.in_flight[batch.batch]
        batch.served.in_flight_count -= len(batch.records)
        self._part(batch)

    def pair(self, batch: InFlightBatch, hedge: InFlightBatch) -> None:
        """Make ``hedge`` the second copy of ``batch``."""
        batch.twin, hedge.twin = hedge, batch
        batch.was_hedged = hedge.was_hedged = hedge.is_hedge = True

    def cancel(self, batch: InFlightBatch) -> None:
        """Take a batch its frames; its slot stays taken until its worker has answered."""
        batch.served.in_flight_count -= len(batch.records)
        batch.records = []
        batch.is_cancelled = True
        self._part(batch)

    def _part(self, batch: InFlightBatch) -> None:
        if batch.twin is not None:
            batch.twin.twin = None
            batch.twin = None

    def check_invariants(self) -> None:
        """Raise AssertionError when ledger and records disagree (a bug of ours)."""
        for batch in self.batches.values():
            if batch.worker.in_flight.get(batch.batch) is not batch:
                raise AssertionError(f"batch {batch.batch} is not with worker {batch.worker.id}")
            for record in batch.records:
                if record.state is FrameState.QUEUED or record.is_queued:
                    raise AssertionError(f"frame {record.number} of batch {batch.batch} is {record.state}")
            twin = batch.twin
            if twin is None:
                continue
            if self.batches.get(twin.batch) is not twin or twin.twin is not batch:
                raise AssertionError(f"batch {batch.batch} has a twin {twin.batch} that is not in flight")
            if twin.worker is batch.worker:
                raise AssertionError(f"batches {batch.batch} and {twin.batch} are with the same worker")
            if batch.is_hedge and not {r.number for r in batch.records} <= {r.number for r in twin.records}:
                raise AssertionError(f"hedge {batch.batch} holds frames that batch {twin.batch} does not")


class SuspectLine:
    """Frames that were with a worker when it was lost, in the order in which they will run alone."""

    def __init__(self) -> None:
        self._line: deque[FrameRecord] = deque()
        self._next_expiry_ns: int | None = None

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[FrameRecord]:
        return iter(self._line)

    def push(self, record: FrameRecord) -> None:
        """Add a frame behind the others."""
        self._line.append(record)
        self._note_expiry(record)

    def push_front(self, record: FrameRecord) -> None:
        """Put back a frame that was taken but not run."""
        self._line.appendleft(record)
        self._note_expiry(record)

    def pop(self) -> FrameRecord:
        """Take the first frame. Requires one."""
        return self._line.popleft()

    def pop_expired(self, now_ns: int) -> list[FrameRecord]:
        """Take out every frame whose deadline has come. Scans the line only when one may have."""
        if self._next_expiry_ns is None or now_ns < self._next_expiry_ns:
            return []
        expired = [r for r in self._line if r.deadline_ns is not None and r.deadline_ns <= now_ns]
        self._line = deque(r for r in self._line if r.deadline_ns is None or r.deadline_ns > now_ns)
        self._next_expiry_ns = None
        for record in self._line:
            self._note_expiry(record)
        return expired

    def pop_all(self) -> list[FrameRecord]:
        """Take out every frame."""
        records = list(self._line)
        self._line.clear()
        self._next_expiry_ns = None
        return records

    def next_expiry_ns(self) -> int | None:
        """Return a time at or before the earliest deadline in the line, None if there is none."""
        return self._next_expiry_ns

    def _note_expiry(self, record: FrameRecord) -> None:
        deadline_ns = record.deadline_ns
        if deadline_ns is not None and (self._next_expiry_ns is None or deadline_ns < self._next_expiry_ns):
            self._next_expiry_ns = deadline_ns
