"""Judges batches: what is in them, who gets them, and in which order frames leave.

The stated bounds. A frame that has not aged is never taken while one of a higher priority waits in its size
class. An aged frame is passed by at most ceil((older frames + 1) * (1 - share) / share) younger frames of
higher priorities of its class, and one batch more. Older ones go before it by right: ADR 3 counts them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.broker import events
from headrace.errors import Code
from headrace.protocol.messages import Batch, Done, Failed, Frame, Ready, Status
from hr_sim.book import Result, Seen, Violation
from hr_sim.models import may_ride

if TYPE_CHECKING:
    from hr_sim.referee import Referee

MS = 1_000_000


@dataclass(slots=True, eq=False)
class Holder:
    """One worker's connection as seen here."""

    peer: bytes
    id: str
    heard_ns: int
    probe: int | None = None  # asked and not answered
    probed_ns: int = 0
    slots: int = 0
    limits: dict[tuple[str, str], int] = field(default_factory=dict)
    batches: dict[int, list[Seen]] = field(default_factory=dict)
    is_alone: bool = False  # what it holds must be alone with it
    is_gone: bool = False
    is_leaving: bool = False


class DispatchChecks:
    """The part of a referee's book that is about workers and batches."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        settings = referee.settings
        self._max_attempts = settings.max_attempts
        self._ageing_ns = settings.ageing_ms * MS
        self._pass_factor = (1.0 - settings.ageing_share) / settings.ageing_share
        self._silence_ns = settings.heartbeat_ms * settings.heartbeats_missed * MS
        self._probe_ns = settings.heartbeat_ms * MS
        self._holders: dict[bytes, Holder] = {}
        self._by_id: dict[str, Holder] = {}
        self._last_batch = 0
        self._poisoned: dict[int, int] = {}
        # Frames that were never dispatched and must still be in the queue, by class, and counts by priority.
        self._waiting: dict[tuple[str, str], dict[int, Seen]] = {}
        self._by_priority: dict[tuple[str, str], list[int]] = {}
        self._requeued_count: dict[tuple[str, str], int] = {}
        self._claimed: dict[bytes, tuple[str, int]] = {}
        self._now_ns = 0
        # Frames of a worker just lost that another worker still has: is that copy given up, too?
        self._undecided: list[Seen] = []
        self._dispatched_count = 0
        self._hedged_count = 0
        self._largest_hedge = 0

    def begin(self, now_ns: int) -> None:
        """Another event is judged."""
        self._now_ns = now_ns
        self._undecided = []

    def name_of(self, peer: bytes) -> str:
        """Return the id of the worker on a connection."""
        return self._holders[peer].id

    # -- waiting ------------------------------------------------------------------------------------

    def wait(self, seen: Seen) -> None:
        """A frame was admitted."""
        if seen.deadline_ns is not None and self._referee.settings.check_deadlines:
            # It may be ended early, as one that would be too late, and wait for its turn to be published.
            return
        levels = self._referee.settings.limits.priority_levels
        self._waiting.setdefault(seen.class_key, {})[seen.id] = seen
        counts = self._by_priority.setdefault(seen.class_key, [0] * levels)
        counts[seen.priority] += 1

    def leave(self, seen: Seen) -> bool:
        """A frame waits no more. False when it did not."""
        if self._waiting.get(seen.class_key, {}).pop(seen.id, None) is None:
            return False
        self._by_priority[seen.class_key][seen.priority] -= 1
        return True

    # -- batches out --------------------------------------------------------------------------------

    def send(self, peer: bytes, batch: Batch, now_ns: int) -> None:
        """Judge a batch that is sent."""
        frames = [self._referee.frames[frame.pts_ns or 0] for frame in batch.frames]
        first = frames[0]
        self._referee.frame_event_count += len(frames)
        holder = self._holders.get(peer)
        where = f"batch {batch.batch} of {len(frames)} {batch.model} {batch.size_class} at {peer!r}"
        if holder is None or holder.is_gone or holder.is_leaving or not holder.slots:
            raise self._wrong(f"{where}, which is not ready", first)
        if batch.batch <= self._last_batch:
            raise self._wrong(f"{where} after batch {self._last_batch}", first)
        self._last_batch = batch.batch
        if len(holder.batches) >= holder.slots:
            raise self._wrong(f"{where}, whose {holder.slots} slots are taken", first)
        if len(frames) > holder.limits.get((batch.model, batch.size_class), 0):
            raise self._wrong(f"{where}, whose limits are {holder.limits}", first)
        if len(frames) > self._referee.settings.limits.max_frames_per_message:
            raise self._wrong(f"{where}: more frames than a message may carry", first)
        has_suspect = any(seen.lost_count for seen in frames)
        if holder.is_alone or (has_suspect and (holder.batches or len(frames) > 1)):
            raise self._wrong(f"{where}: a frame that a worker was lost with is not alone", first)
        if any(seen.in_flight for seen in frames):
            self._judge_hedge(frames, holder, where)
        else:
            self._dispatched_count += len(frames)
        self._judge_riders(frames, batch, where)
        for seen, sent in zip(frames, batch.frames, strict=True):
            self._judge_frame(seen, sent, batch, where, now_ns)
        self._judge_priorities(frames, where, now_ns)
        holder.is_alone = has_suspect
        holder.batches[batch.batch] = frames
        for seen in frames:
            if not seen.in_flight:
                seen.sent_ns = now_ns
            seen.in_flight[batch.batch] = peer
            seen.dispatched_count += 1

    def _judge_hedge(self, frames: list[Seen], holder: Holder, where: str) -> None:
        """Judge the second copy of a batch: all of it from one batch, elsewhere, and within the budget."""
        settings = self._referee.settings
        first = frames[0]
        others = {tuple(seen.in_flight.items()) for seen in frames}
        if len(others) != 1 or len(first.in_flight) != 1:
            raise self._wrong(f"{where} holds frames of several batches: {sorted(others)}", first)
        if holder.peer in first.in_flight.values() or any(seen.lost_count for seen in frames):
            raise self._wrong(f"{where} is a second copy where there may be none", first)
        held_ms = (self._now_ns - first.sent_ns) // MS
        if held_ms < settings.overdue_min_ms:
            raise self._wrong(f"{where} is a second copy after {held_ms} ms", first)
        for seen in frames:
            seen.was_hedged = True
        self._hedged_count += len(frames)
        self._largest_hedge = max(self._largest_hedge, len(frames))
        budget = settings.hedge_share * self._dispatched_count
        budget += max(settings.hedge_burst_frames, self._largest_hedge)
        if self._hedged_count > budget + 1e-6:
            raise self._wrong(f"{where}: {self._hedged_count} frames hedged, {budget:.1f} may be", first)

    def _judge_riders(self, frames: list[Seen], batch: Batch, where: str) -> None:
        """Judge frames of smaller classes of the same model in this batch; they now belong to its class.

        Whoever rides leaves nobody behind: no frame of its own class that has waited is left."""
        key = (batch.model, batch.size_class)
        riders = [seen for seen in frames if seen.class_key != key]
        left = list(dict.fromkeys(seen.class_key for seen in riders))
        for seen in riders:
            if not may_ride(self._referee.settings, seen.class_key, key):
                raise self._wrong(f"{where} holds a frame of {seen.class_key}", seen)
            self.leave(seen)
            seen.class_key = key
        for old_key in left:
            if any(self._by_priority.get(old_key, ())):
                raise self._wrong(f"{where} took some of {old_key}, not all", riders[0])

    def _judge_frame(self, seen: Seen, sent: Frame, batch: Batch, where: str, now_ns: int) -> None:
        if seen.class_key != (batch.model, batch.size_class):
            raise self._wrong(f"{where} holds a frame of {seen.class_key}", seen)
        if (sent.stream, sent.epoch) != (seen.stream, seen.epoch) or seen.seq not in {None, sent.seq}:
            raise self._wrong(f"{where} holds it under another name", seen)
        if seen.status is not None or seen.result is not None:
            raise self._wrong(f"{where} holds a frame that has ended: {seen.status} {seen.result}", seen)
        if self._referee.is_poisoned(seen):
            raise self._wrong(f"{where} holds content that is known to kill workers", seen)
        if seen.is_superseded:
            raise self._wrong(f"{where} holds a superseded frame", seen)
        if seen.deadline_ns is not None and now_ns >= seen.deadline_ns:
            late_ms = (now_ns - seen.deadline_ns) / MS
            raise self._wrong(f"{where} holds a frame whose deadline was {late_ms:.3f} ms ago", seen)
        if seen.lost_count >= self._max_attempts:
            raise self._wrong(f"{where} holds a frame that {seen.lost_count} workers were lost with", seen)

    def _judge_priorities(self, frames: list[Seen], where: str, now_ns: int) -> None:
        key = frames[0].class_key
        fresh = [seen for seen in frames if not seen.dispatched_count]
        for seen in frames:
            self.leave(seen)
        counts = self._by_priority.get(key)
        if counts is None:
            return
        for seen in fresh:
            is_young = now_ns < seen.waits_from_ns + self._ageing_ns
            above = sum(counts[seen.priority + 1 :])
            if is_young and above:
                raise self._wrong(f"{where}: priority {seen.priority} leaves before {above} above it", seen)
        highest = max((seen.priority for seen in fresh), default=0)
        if highest:
            self._count_passes(key, fresh, now_ns)

    def _count_passes(self, key: tuple[str, str], taken: list[Seen], now_ns: int) -> None:
        """Count the frames that an aged frame sees go before it."""
        requeued_count = self._requeued_count.get(key, 0)
        for seen in self._waiting[key].values():
            if now_ns < seen.waits_from_ns + self._ageing_ns:
                continue
            passed_count = sum(
                other.priority > seen.priority and other.waits_from_ns > seen.waits_from_ns for other in taken
            )
            if not passed_count:
                continue
            if seen.passed_count is None:
                seen.passed_count = 0
                # All that has no outcome yet: whether it still waits is not known of each of them.
                older_count = sum(
                    other.class_key == key and other.waits_from_ns <= seen.waits_from_ns
                    for order in self._referee.order.values()
                    for other in order
                )
                largest = max(h.limits.get(key, 0) for h in self._holders.values())
                limit = math.ceil((older_count + 1) * self._pass_factor) + largest + 1
                seen.passed_limit = limit - math.floor(requeued_count * self._pass_factor)
            seen.passed_count += passed_count
            limit = seen.passed_limit + math.ceil(requeued_count * self._pass_factor)
            if seen.passed_count > limit:
                raise self._wrong(
                    f"aged frame of priority {seen.priority} was passed by {seen.passed_count} frames,"
                    f" at most {limit} may",
                    seen,
                )

    # -- batches back -------------------------------------------------------------------------------

    def note(self, event: events.Event, now_ns: int) -> None:
        """Take note of what a worker said, or of what became of it."""
        peer = getattr(event, "peer", None)
        holder = self._holders.get(peer) if peer is not None else None
        if holder is not None and not isinstance(event, events.PeerUnreachable):
            holder.heard_ns = now_ns
        match event:
            case events.WorkerArrived(peer, hello):
                if holder is not None and holder.id != hello.worker:
                    holder.is_gone = True
                self._claimed[peer] = (hello.worker, now_ns)
            case events.WorkerReady(peer, ready):
                if holder is not None and not holder.is_gone:
                    self._grant(holder, ready)
            case events.WorkerLeft(peer):
                self._claimed.pop(peer, None)
                if holder is not None:
                    holder.is_leaving = True
            case events.BatchDone(peer, done):
                if holder is not None and not holder.is_gone:
                    self._take_done(holder, done)
            case events.BatchFailed(peer, failed):
                if holder is not None and not holder.is_gone:
                    self._take_failed(holder, failed)
            case events.PeerUnreachable(peer):
                self._claimed.pop(peer, None)
                if holder is not None:
                    for number in event.undelivered:
                        self._hand_back(holder, number)
            case _:
                pass

    def set_up(self, peer: bytes) -> None:
        """The broker takes a worker in."""
        claimed = self._claimed.get(peer)
        if claimed is None:
            raise AssertionError(f"a set-up for {peer!r}, which did not ask")
        name, now_ns = claimed
        known = self._holders.get(peer)
        if known is not None and known.id == name and not known.is_gone:
            return
        holder = Holder(peer, name, now_ns)
        self._holders[peer] = holder
        before = self._by_id.get(name)
        if before is not None and before.batches:
            raise AssertionError(f"{name} is taken in anew while it has {list(before.batches)}")
        if before is not None and before is not holder:
            before.is_gone = True
        self._by_id[name] = holder

    def _grant(self, holder: Holder, ready: Ready) -> None:
        holder.slots = ready.slots
        holder.limits = {}
        settings = self._referee.settings
        configured = {
            (model.spec.name, size_class.name): size_class.max_batch_size
            for model in settings.models
            for size_class in model.spec.size_classes
        }
        for profile in ready.models:
            for described in profile.classes:
                key = (profile.name, described.size_class.name)
                largest = described.buckets[-1][0] if described.buckets else configured[key]
                holder.limits[key] = min(configured[key], largest, described.size_class.max_batch_size)

    def _close(self, holder: Holder, number: int) -> list[Seen]:
        frames = holder.batches.pop(number, [])
        holder.is_alone = holder.is_alone and bool(holder.batches)
        for seen in frames:
            seen.in_flight.pop(number, None)
            seen.back_ns = self._now_ns
        return frames

    def _hand_back(self, holder: Holder, number: int) -> None:
        for seen in self._close(holder, number):
            self._requeued_count[seen.class_key] = self._requeued_count.get(seen.class_key, 0) + 1

    def _take_done(self, holder: Holder, done: Done) -> None:
        frames = self._close(holder, done.batch)
        size = len(frames)
        self._referee.frame_event_count += size
        if len(done.results) != size:
            for seen in frames:
                self._end(seen, Result(Status.ERROR, Code.RESULT_COUNT, None, holder.id, size))
            return
        for seen, result in zip(frames, done.results, strict=True):
            code = "" if result.status is Status.OK else result.code
            if seen.result is None and seen.status is None:
                seen.result = Result(result.status, code, result.outputs, holder.id, size)

    def _take_failed(self, holder: Holder, failed: Failed) -> None:
        if failed.code == Code.SHUTDOWN or len(holder.batches.get(failed.batch, ())) != 1:
            self._hand_back(holder, failed.batch)
            return
        (seen,) = self._close(holder, failed.batch)
        self._end(seen, Result(Status.ERROR, Code.BATCH_FAILED, None, holder.id, 1))

    def _end(self, seen: Seen, result: Result) -> None:
        """One copy of a frame ended without a result of its own."""
        if seen.result is None and seen.status is None:
            if seen.in_flight:
                seen.tentative.append(result)
            else:
                seen.result = result

    def cancel(self, peer: bytes, number: int) -> None:
        """The broker wants a batch no more: its slot is free when the worker has answered."""
        holder = self._holders.get(peer)
        if holder is None or number not in holder.batches:
            raise AssertionError(f"batch {number} is cancelled, which {peer!r} does not hold")
        for seen in self._close(holder, number):
            if seen in self._undecided:
                seen.lost_count += 1
        holder.batches[number] = []

    def ask(self, peer: bytes, probe: int, now_ns: int) -> None:
        """The broker asks a worker whether it lives."""
        holder = self._holders[peer]
        holder.probe, holder.probed_ns = probe, now_ns

    def answer(self, peer: bytes, probe: int | None) -> bool:
        """Tell whether a heartbeat answers what its worker was asked last."""
        holder = self._holders.get(peer)
        is_answer = holder is not None and probe is not None and holder.probe == probe
        if holder is not None and is_answer:
            holder.probe = None
        return is_answer

    def judge_misread(self, peer: bytes | None, kind: type | None) -> None:
        """What may have been the answer to a batch could not be read: nobody may wait for that batch."""
        holder = None if peer is None else self._holders.get(peer)
        if holder is not None and not holder.is_gone and holder.batches and kind in {None, Done, Failed}:
            raise AssertionError(f"{holder.id} can't be read, and keeps batches {list(holder.batches)}")

    def lose(self, worker: str, reason: str, now_ns: int) -> None:
        """The broker says that it has lost a worker."""
        holder = self._by_id.pop(worker, None)
        if holder is None:
            return
        holder.is_gone = True
        silent_ns = now_ns - holder.heard_ns
        if reason == "silent" and silent_ns < self._silence_ns:
            raise AssertionError(f"{worker} is lost as {reason!r} {silent_ns / MS} ms after it was heard")
        if reason == "silent when probed" and (
            holder.probe is None or now_ns - holder.probed_ns < self._probe_ns
        ):
            raise AssertionError(f"{worker} is lost as {reason!r}, asked {holder.probe}, {holder.probed_ns}")
        for number in tuple(holder.batches):
            frames = self._close(holder, number)
            for seen in frames:
                self._requeued_count[seen.class_key] = self._requeued_count.get(seen.class_key, 0) + 1
                if reason == "reconnected":
                    continue
                if seen.in_flight:
                    self._undecided.append(seen)
                else:
                    seen.lost_count += 1
                    if seen.lost_count >= self._max_attempts and len(frames) == 1:
                        self._end_copies(seen)

    def _end_copies(self, guilty: Seen) -> None:
        """A frame was alone with the last worker that was lost with it: its content is refused from now on,
        and what waits of it ends, too."""
        self._referee.poison(guilty)
        for waiting in self._waiting.values():
            for seen in tuple(waiting.values()):
                if self._referee.is_poisoned(seen):
                    self.leave(seen)

    def note_poisoned(self, seen: Seen, peer: bytes, number: int) -> None:
        """A frame has killed the worker that ran it: so often, and no more."""
        holder = self._holders.get(peer)
        if holder is None or holder.is_gone or number not in holder.batches:
            return
        count = self._poisoned[seen.id] = self._poisoned.get(seen.id, 0) + 1
        # A copy that was hedged may have killed its worker before the other one did.
        if count > self._max_attempts + seen.was_hedged:
            raise self._wrong(f"it has killed {count} workers, {self._max_attempts} are allowed", seen)

    @staticmethod
    def _wrong(text: str, seen: Seen) -> AssertionError:
        return Violation(text, seen.key)
