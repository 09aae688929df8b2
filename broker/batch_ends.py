"""What becomes of a batch when its worker answers, or takes much too long to.

Not here: how frames go back in line (recovery.py), which batches are overdue (hedging.py), lost workers
(worker_life.py).
"""

from __future__ import annotations

from headrace.broker.actions import Action, Report
from headrace.broker.dispatch import Dispatcher
from headrace.broker.hedging import Hedges
from headrace.broker.inflight import InFlightBatch, Ledger
from headrace.broker.outcomes import OutcomeLog
from headrace.broker.records import End
from headrace.broker.recovery import Recovery
from headrace.broker.worker_life import WorkerLife
from headrace.broker.worker_registry import Worker, WorkerRegistry
from headrace.errors import Code
from headrace.protocol.messages import Done, Failed, Status, Value

#: A new measurement of a batch's way counts one part in this many.
OVERHEAD_WEIGHT = 8


class BatchEnds:
    """Takes answers of workers. Invariant: an answer counts once, and only for a batch in the ledger that
    was not cancelled."""

    def __init__(
        self,
        workers: WorkerRegistry,
        life: WorkerLife,
        dispatcher: Dispatcher,
        hedges: Hedges,
        recovery: Recovery,
        outcomes: OutcomeLog,
        ledger: Ledger,
    ) -> None:
        self._workers = workers
        self._life = life
        self._dispatcher = dispatcher
        self._hedges = hedges
        self._recovery = recovery
        self._outcomes = outcomes
        self._ledger = ledger
        self.late_done_count = 0

    def _find_batch(
        self, peer: bytes, batch_id: int, now_ns: int, actions: list[Action]
    ) -> InFlightBatch | None:
        """Return the batch that a worker speaks of, None when its answer counts for nothing: the batch is no
        longer, or never was, its own, or another copy of it was done before."""
        worker = self._workers.by_peer.get(peer)
        if worker is None:
            self._life.refuse_unknown(peer, actions, is_worker=True)
        else:
            self._life.hear(worker, now_ns)
            batch = worker.in_flight.get(batch_id)
            if batch is not None and not batch.is_cancelled:
                return batch
            if batch is not None:
                self._hedges.suppressed_count += 1
                self._free_slot(batch, now_ns, actions)
                return None
        self.late_done_count += 1
        return None

    def _free_slot(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        """The worker has answered a batch that had lost."""
        self._ledger.close(batch)
        self._dispatcher.settle(batch, now_ns)
        self._life.forget_if_done(batch.worker, now_ns, actions)

    def done(self, peer: bytes, done: Done, now_ns: int, actions: list[Action]) -> None:
        batch = self._find_batch(peer, done.batch, now_ns, actions)
        if batch is None:
            return
        worker, served, count = batch.worker, batch.served, len(batch.records)
        if len(done.results) != count:
            self._on_wrong_count(batch, len(done.results), now_ns, actions)
            return
        self._hedges.win(batch, actions)
        # No batch runs longer than since its dispatch, whatever the worker's clock says.
        served.turnaround_ns = now_ns - batch.sent_ns
        ran_ns = min(done.ran_us * 1000, served.turnaround_ns)
        worker.ran_ns += ran_ns
        _learn_way(worker, done, served.turnaround_ns)
        self._dispatcher.learn(batch, count, ran_ns)
        self._dispatcher.settle(batch, now_ns)
        if served.policy.is_learning:
            latencies_ns = [now_ns - record.received_ns for record in batch.records]
            served.policy.observe(latencies_ns, ran_ns, found_idle=batch.found_idle)
        for record, result in zip(batch.records, done.results, strict=True):
            is_ok = result.status is Status.OK
            end = End(
                Status.OK if is_ok else Status.ERROR,
                "" if is_ok else result.code,
                result.message,
                worker.id,
                count,
                done.staged_us,
                done.ran_us,
                result,
                batch.version,
            )
            self._outcomes.finish(record, end, now_ns, actions)
        self._life.forget_if_done(worker, now_ns, actions)

    def _on_wrong_count(
        self, batch: InFlightBatch, results_count: int, now_ns: int, actions: list[Action]
    ) -> None:
        worker, count = batch.worker, len(batch.records)
        if self._hedges.give_up(batch, now_ns, actions):
            message = f"batch {batch.batch}: expected {count} results, got {results_count}"
            end = End(Status.ERROR, Code.RESULT_COUNT, message, worker.id, count, version=batch.version)
            for record in batch.records:
                self._outcomes.finish(record, end, now_ns, actions)
        actions.append(Report("wrong result count", {"worker": worker.id, "batch": batch.batch}))
        self._dispatcher.settle(batch, now_ns)
        self._life.forget_if_done(worker, now_ns, actions)

    def failed(self, peer: bytes, failed: Failed, now_ns: int, actions: list[Action]) -> None:
        batch = self._find_batch(peer, failed.batch, now_ns, actions)
        if batch is None:
            return
        worker, count = batch.worker, len(batch.records)
        has_left = self._hedges.give_up(batch, now_ns, actions)
        self._dispatcher.settle(batch, now_ns)
        if has_left:
            self._recover_failed(batch, failed, count, now_ns, actions)
        values: dict[str, Value] = {
            "worker": worker.id,
            "batch": batch.batch,
            "frames": count,
            "code": failed.code,
        }
        actions.append(Report("batch failed", values))
        self._life.forget_if_done(worker, now_ns, actions)

    def _recover_failed(
        self, batch: InFlightBatch, failed: Failed, count: int, now_ns: int, actions: list[Action]
    ) -> None:
        """``count`` frames were run together; those that have not ended yet are still in the batch."""
        records = batch.records
        if failed.code == Code.SHUTDOWN:
            # Handed back unrun by a worker that stops.
            self._recovery.put_back(batch, now_ns, actions)
        elif count == 1:
            message = f"the batch of this frame alone failed: {failed.message}"
            end = End(Status.ERROR, Code.BATCH_FAILED, message, batch.worker.id, 1, version=batch.version)
            self._outcomes.finish(records[0], end, now_ns, actions)
        else:
            self._recovery.halve(batch, failed.code, now_ns, actions)

    def care_for_overdue(self, overdue: list[InFlightBatch], now_ns: int, actions: list[Action]) -> None:
        """Tell stuck workers off, and end the frames that wait for an overdue one beyond their deadline."""
        for batch in self._hedges.stuck(now_ns):
            self._life.tell_off(batch, now_ns, actions)
        for batch in overdue:
            for record in batch.unfinished:
                if record.deadline_ns is None or now_ns < record.deadline_ns:
                    continue
                batch.served.expired_count += 1
                message = f"its time to live is over and batch {batch.batch} at {batch.worker.id} is overdue"
                end = End(Status.EXPIRED, Code.DEADLINE, message, batch.worker.id, version=batch.version)
                self._outcomes.finish(record, end, now_ns, actions)


def _learn_way(worker: Worker, done: Done, turnaround_ns: int) -> None:
    """Take in how long a batch and its results were under way or being staged. Both figures are a peer's."""
    inside_ns = min(done.total_us * 1000, turnaround_ns)
    way_ns = turnaround_ns - inside_ns + min(done.staged_us * 1000, inside_ns)
    known_ns = way_ns if worker.overhead_ns is None else worker.overhead_ns
    worker.overhead_ns = known_ns + (way_ns - known_ns) // OVERHEAD_WEIGHT
