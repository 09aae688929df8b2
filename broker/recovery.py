"""What becomes of the frames of a batch that did not end well: back in line, or to their end.

Not here: when a worker counts as lost (worker_life.py), in which order frames leave the line again
(queues.py).

If a lost worker's frames may have killed it they become suspects: each runs alone, and one that was lost
with ``max_attempts`` workers ends as an error, ``poison_frame`` when it was alone with the last of them. Its
content is then refused for a while (quarantine.py), and copies of it that wait end with it. A batch that
failed without killing its worker is halved until the frame at fault is alone.
"""

from __future__ import annotations

from headrace.broker.actions import Action
from headrace.broker.inflight import InFlightBatch, Ledger
from headrace.broker.model_table import ServedClass
from headrace.broker.outcomes import OutcomeLog
from headrace.broker.quarantine import Quarantine
from headrace.broker.records import End, FrameRecord, FrameState
from headrace.broker.stream_table import StreamTable
from headrace.broker.trace import Story
from headrace.errors import Code
from headrace.protocol.messages import Status


class Recovery:
    """Puts frames back or ends them. Every batch given to it has left the ledger."""

    def __init__(
        self,
        max_attempts: int,
        streams: StreamTable,
        outcomes: OutcomeLog,
        quarantine: Quarantine,
        ledger: Ledger,
        story: Story,
    ) -> None:
        self._max_attempts = max_attempts
        self._quarantine = quarantine
        self._streams = streams
        self._outcomes = outcomes
        self._ledger = ledger
        self._story = story
        self.requeued_count = 0

    def suspect(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        """The batch's worker was lost, perhaps by one of these frames."""
        worker_id = batch.worker.id
        for record in batch.records:
            record.lost_with += 1
            if self._end_known_poison(record, now_ns, actions):
                continue
            if record.lost_with < self._max_attempts:
                record.is_suspect = True
                record.frame = self._quarantine.with_payload(record.frame)
                self._requeue(record, now_ns, f"lost with {worker_id}")
                batch.served.suspects.push(record)
                continue
            code = Code.POISON_FRAME if batch.is_alone else Code.WORKER_LOST
            message = f"{record.lost_with} workers were lost while they had it, {worker_id} the last"
            end = End(Status.ERROR, code, message, worker_id, len(batch.records), version=batch.version)
            self._outcomes.finish(record, end, now_ns, actions)
            if code is Code.POISON_FRAME:
                self._quarantine.put(record, now_ns)
                self._end_copies(record, batch.served, now_ns, actions)

    def condemn(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        """A worker was lost with a suspect whose deadline had come before that was known: the frame has its
        outcome, and its content is guilty all the same."""
        for record in batch.records:
            record.lost_with += 1
            if record.lost_with >= self._max_attempts:
                self._quarantine.put(record, now_ns)
                self._end_copies(record, batch.served, now_ns, actions)

    def _end_copies(
        self, guilty: FrameRecord, served: ServedClass, now_ns: int, actions: list[Action]
    ) -> None:
        """End the waiting frames that hold the same bytes: each of them would take down workers too.

        One that a worker has can't be had back, but a batch with it gets no second copy."""
        copies = [copy for one in served.kin for copy in self._take_copies(guilty, one)]
        for record in sorted(copies, key=lambda record: record.number):
            message = (
                f"its content is that of seq {guilty.seq} of stream {guilty.frame.stream}, which took down"
                " workers"
            )
            self.end_waiting(record, End(Status.ERROR, Code.POISON_FRAME, message), now_ns, actions)
        payload = guilty.frame.payload
        for batch in self._ledger.batches.values():
            if batch.served in served.kin and not batch.holds_poison:
                batch.holds_poison = any(
                    self._quarantine.has_same_content(record.frame.payload, payload)
                    for record in batch.unfinished
                )

    def _take_copies(self, guilty: FrameRecord, served: ServedClass) -> list[FrameRecord]:
        payload = guilty.frame.payload
        copies: list[FrameRecord] = []
        for record in served.suspects.pop_all():
            if self._quarantine.has_same_content(record.frame.payload, payload):
                copies.append(record)
            else:
                served.suspects.push(record)
        for record in list(served.queue):
            if self._quarantine.has_same_content(record.frame.payload, payload):
                served.queue.remove(record)
                copies.append(record)
        return copies

    def _end_known_poison(self, record: FrameRecord, now_ns: int, actions: list[Action]) -> bool:
        """End a frame that comes back from a worker and whose content was found guilty meanwhile."""
        if self._quarantine.find(record.model, record.version, record.frame, now_ns) is None:
            return False
        message = "a frame with this content took down workers while this one was with another worker"
        self._outcomes.finish(record, End(Status.ERROR, Code.POISON_FRAME, message), now_ns, actions)
        return True

    def put_back(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        """The batch was handed back unrun, or never left: to the front, last frame first, so that it keeps
        its order."""
        for record in reversed(batch.records):
            if self._end_known_poison(record, now_ns, actions):
                continue
            self._requeue(record, now_ns, f"batch {batch.batch} handed back")
            if record.is_suspect:
                batch.served.suspects.push_front(record)
            else:
                batch.served.queue.push_front(record, now_ns)

    def halve(self, batch: InFlightBatch, code: str, now_ns: int, actions: list[Action]) -> None:
        """The batch failed as a whole and more than one frame was run: each half of what is left is tried
        again. One frame that is left alone (the others have expired meanwhile) is not the guilty one yet."""
        left = [one for one in batch.records if not self._end_known_poison(one, now_ns, actions)]
        half = (len(left) + 1) // 2
        for part in (left[:half], left[half:]):
            for record in part:
                self._requeue(record, now_ns, f"batch {batch.batch} failed: {code}")
            if part:
                batch.served.queue.push_exact(part)

    def end_waiting(self, record: FrameRecord, end: End, now_ns: int, actions: list[Action]) -> None:
        """End a frame that has just been taken out of its line."""
        stream = self._streams.by_name[record.frame.stream]
        if stream.latest is record:
            stream.latest = None
        self._outcomes.finish(record, end, now_ns, actions)

    def _requeue(self, record: FrameRecord, now_ns: int, why: str) -> None:
        record.state = FrameState.QUEUED
        self.requeued_count += 1
        self._story.note(now_ns, record, "requeued", why)
