"""Batches that take much too long: which they are, and the second copy that each of them may get.

Not here: which worker a copy goes to (dispatch.py), the frames of a worker that is told off (worker_life.py).

Theory of operation. A batch is overdue when its predicted end passed by ``overdue_factor`` times its
predicted run, and at least by ``overdue_min_ms``. Its worker gets nothing more until it has answered (the
pools pass it over), and the batch may be sent once more, to another worker: a hedge. The first of the two
that is done wins; the other is cancelled and whatever comes of it is suppressed. A batch that runs can't be
interrupted, so the loser keeps its slot until its worker answers. Frames of an overdue batch whose deadline
comes are ended as expired, because they would wait for a worker that may hang for ever.

Hedges are extra load exactly when the system is slow, so a token bucket in frames caps them: each dispatched
frame earns ``hedge_share``, each hedged one costs 1, at most ``hedge_burst_frames`` are saved, and a
fresh broker starts with all of them. A batch larger than the bucket may take it below zero. So at any time
hedged frames <= hedge_share * dispatched frames + the larger of the burst and one batch.

A copy that fails, or whose worker is lost, says nothing about its frames as long as the other copy is on
time: that one decides. If the other is overdue too, it is cancelled and the frames are recovered.
"""

from __future__ import annotations

from headrace.broker.actions import Action, CancelBatch
from headrace.broker.inflight import InFlightBatch, Ledger
from headrace.broker.settings import CoreSettings

_NS_PER_MS = 1_000_000


class Hedges:
    """Watches the ledger. Invariants: ``_next_due_ns`` is at or before the time at which the next batch
    becomes overdue; a batch is hedged at most once, never if its frame runs alone as a suspect."""

    def __init__(self, settings: CoreSettings, ledger: Ledger) -> None:
        self._factor = settings.overdue_factor
        self._min_ns = settings.overdue_min_ms * _NS_PER_MS
        self._share = settings.hedge_share
        self._burst_frames = settings.hedge_burst_frames
        self._stuck_ns = settings.stuck_ms * _NS_PER_MS
        self._ledger = ledger
        self._overdue: list[InFlightBatch] = []
        self._next_due_ns: int | None = None
        self.budget_frames = float(settings.hedge_burst_frames)
        self.batches_count = 0
        self.frames_count = 0
        self.won_count = 0  # hedges that were done first
        self.suppressed_count = 0  # results of batches that had lost

    # -- time ---------------------------------------------------------------------------------------

    def patience_ns(self, predicted_ns: int) -> int:
        """Return how long after its predicted end a batch becomes overdue."""
        return max(int(self._factor * predicted_ns), self._min_ns)

    def watch(self, batch: InFlightBatch) -> None:
        """A batch was sent, or its ``due_ns`` was set anew."""
        if self._next_due_ns is None or batch.due_ns < self._next_due_ns:
            self._next_due_ns = batch.due_ns

    def overdue(self, now_ns: int) -> list[InFlightBatch]:
        """Return the batches that are overdue, in the order of dispatch, cancelled ones included.

        All batches are looked at only when one may have become overdue: at most once per
        ``overdue_min_ms``, however many are in flight."""
        if self._next_due_ns is not None and now_ns >= self._next_due_ns:
            self._overdue = [batch for batch in self._ledger.batches.values() if batch.due_ns <= now_ns]
            later = [batch.due_ns for batch in self._ledger.batches.values() if batch.due_ns > now_ns]
            self._next_due_ns = min(later, default=None)
        elif self._overdue:
            self._overdue = [batch for batch in self._overdue if self._is_overdue(batch, now_ns)]
        return self._overdue

    def _is_overdue(self, batch: InFlightBatch, now_ns: int) -> bool:
        return batch.due_ns <= now_ns and batch.batch in self._ledger.batches

    def stuck(self, now_ns: int) -> list[InFlightBatch]:
        """Return the overdue batches for which their worker is to be told off, one per worker."""
        found: dict[int, InFlightBatch] = {}
        for batch in self._overdue:
            if batch.due_ns + self._stuck_ns <= now_ns:
                found.setdefault(batch.worker.index, batch)
        return list(found.values())

    def next_ns(self) -> int | None:
        """Return when overdue() or stuck() may have news, or a frame of an overdue batch expires."""
        times = [] if self._next_due_ns is None else [self._next_due_ns]
        for batch in self._overdue:
            if batch.batch not in self._ledger.batches:
                continue
            times.append(batch.due_ns + self._stuck_ns)
            times += [record.deadline_ns for record in batch.unfinished if record.deadline_ns is not None]
        return min(times, default=None)

    # -- budget -------------------------------------------------------------------------------------

    def earn(self, count: int) -> None:
        """``count`` frames were dispatched, other than as a hedge."""
        self.budget_frames = min(self.budget_frames + self._share * count, self._burst_frames)

    def candidates(self) -> list[InFlightBatch]:
        """Return the overdue batches that may be hedged now, as overdue() has last found them."""
        if not self._overdue or self._share == 0.0:
            return []
        return [batch for batch in self._overdue if self._may_hedge(batch)]

    def _may_hedge(self, batch: InFlightBatch) -> bool:
        is_barred = batch.was_hedged or batch.is_alone or batch.is_cancelled or batch.holds_poison
        return not is_barred and bool(batch.unfinished)

    def can_afford(self, count: int) -> bool:
        """True when the budget holds ``count`` frames, or is full."""
        return self.budget_frames >= min(count, self._burst_frames)

    def pair(self, batch: InFlightBatch, hedge: InFlightBatch) -> None:
        """``hedge`` was sent as the second copy of ``batch``: pay for it."""
        self._ledger.pair(batch, hedge)
        count = len(hedge.records)
        self.budget_frames -= count
        self.batches_count += 1
        self.frames_count += count

    # -- ends ---------------------------------------------------------------------------------------

    def win(self, batch: InFlightBatch, actions: list[Action]) -> None:
        """A batch is done: strike it out, cancel the other copy."""
        twin = batch.twin
        self._ledger.close(batch)
        if batch.is_hedge:
            self.won_count += 1
        if twin is not None:
            self._cancel(twin, actions)
            for record in batch.records:
                record.batched_ns = batch.sent_ns

    def give_up(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> bool:
        """A batch ended without results: strike it out, and leave in it the frames to recover.

        Returns False if there are none, because the other copy goes on with them or they have ended."""
        twin = batch.twin
        self._ledger.close(batch)
        if twin is not None:
            if now_ns < twin.due_ns:
                batch.records = []
                return False
            self._cancel(twin, actions)
        batch.records = batch.unfinished
        return bool(batch.records)

    def _cancel(self, batch: InFlightBatch, actions: list[Action]) -> None:
        self._ledger.cancel(batch)
        actions.append(CancelBatch(batch.worker.peer, batch.batch))
