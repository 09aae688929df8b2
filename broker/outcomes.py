"""The ends of frames: each published exactly once, in the order of its stream, and kept for replay.

Not here: what a frame's end is (core.py decides), who subscribes (the shell).

Theory of operation. A frame that ends gets its End. While the first frame of its stream has one, that frame
is released: numbered, published, put into the stream's retention ring, credited, and its bytes given back.
A frame that ends before its predecessors waits in the stream's order, so that outcomes leave in the order
of admission and no stream waits for another. Refused frames were never admitted: they are published at
once, in between, with a number of their own.

Retention is bounded twice: outcomes per stream, and estimated bytes of all. Beyond the bytes the oldest
outcome of all streams goes first; the order of publication is one deque of (stream, number) whose entries
die when their outcome went earlier by the stream's own bound, and which is swept when most of it is dead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from headrace.broker.actions import Action, PublishOutcome
from headrace.broker.producer_registry import ProducerRegistry
from headrace.broker.records import End, FrameRecord, FrameState, Refusal
from headrace.broker.settings import CoreSettings
from headrace.broker.stream_table import Stream, StreamTable
from headrace.broker.trace import Story
from headrace.protocol.messages import BadFrame, Frame, FrameResult, Outcome, Status, Timing, Value
from headrace.protocol.wire import part_bytes

#: What an outcome costs beside its payloads: the objects and the ring's entry, measured with
#: tracemalloc on CPython 3.11 and rounded up.
OUTCOME_OVERHEAD_BYTES = 1024

#: What is published of a frame that no worker has finished.
_NO_RESULT = FrameResult(Status.ERROR)

#: Ranges end here at the latest: they cross the wire as u64.
_MAX_U64 = 2**64 - 1

#: The publication order is swept when it holds more entries than this and over half are dead.
_SWEEP_ABOVE = 256


@dataclass(slots=True)
class Account:
    """All frames that ever arrived. Invariants: received = accepted + rejected + duplicates;
    accepted = ok + error + expired + superseded + unfinished."""

    received: int = 0
    accepted: int = 0
    ok: int = 0
    error: int = 0
    expired: int = 0
    superseded: int = 0
    rejected: int = 0
    duplicates: int = 0

    @property
    def unfinished(self) -> int:
        """Return how many admitted frames have no published outcome yet."""
        return self.accepted - self.ok - self.error - self.expired - self.superseded

    def count_end(self, status: Status) -> None:
        """Count the published outcome of an admitted frame."""
        if status is Status.OK:
            self.ok += 1
        elif status is Status.ERROR:
            self.error += 1
        elif status is Status.EXPIRED:
            self.expired += 1
        else:  # refused frames are counted apart
            self.superseded += 1


@dataclass(frozen=True, slots=True)
class RefusedFrame:
    """A frame that is not admitted, the name it goes by, and why."""

    frame: Frame | BadFrame
    epoch: int
    seq: int
    refusal: Refusal


class OutcomeLog:
    """Everything that was or will be published.

    Invariants: an admitted frame is released once; ``unfinished_bytes`` is the sum over unreleased frames;
    ``retained_bytes`` the sum over all rings, at most the configured bound.
    """

    def __init__(
        self,
        boot: int,
        settings: CoreSettings,
        streams: StreamTable,
        producers: ProducerRegistry,
        story: Story,
    ) -> None:
        self._boot = boot
        self._max_frames = settings.retention_frames
        self._max_bytes = settings.retention_bytes
        self._streams = streams
        self._producers = producers
        self._story = story
        self._published: deque[tuple[Stream, int]] = deque()
        self.account = Account()
        self.rejected_by_code: dict[str, int] = {}
        self.error_by_code: dict[str, int] = {}
        #: By model, then by code: a model that begins to answer NaN must show among those that don't.
        self.error_by_model: dict[str, dict[str, int]] = {}
        self.unfinished_bytes = 0
        self.retained_count = 0
        self.retained_bytes = 0

    # -- admitted frames ----------------------------------------------------------------------------

    def begin(self, stream: Stream, record: FrameRecord) -> None:
        """Take charge of a frame that was just admitted."""
        if not stream.order:
            self._streams.mark_busy(stream)
        stream.order.append(record)
        stream.unfinished[record.epoch, record.seq] = record
        stream.epochs[record.epoch].unfinished_count += 1
        self.account.accepted += 1
        self.unfinished_bytes += record.nbytes

    def finish(self, record: FrameRecord, end: End, now_ns: int, actions: list[Action]) -> None:
        """End a frame, and publish every outcome of its stream that can be published now.

        A frame that has ended already is left alone: the first end wins."""
        if record.state is FrameState.FINISHED:
            return
        record.state = FrameState.FINISHED
        record.end = end
        self._story.note(now_ns, record, end.status, end.code)
        stream = self._streams.by_name[record.frame.stream]
        order = stream.order
        while order and (first_end := order[0].end) is not None:
            self._release(stream, order.popleft(), first_end, now_ns, actions)
        if not order:
            self._streams.mark_idle(stream, now_ns)

    def _release(
        self, stream: Stream, record: FrameRecord, end: End, now_ns: int, actions: list[Action]
    ) -> None:
        del stream.unfinished[record.epoch, record.seq]
        history = stream.epochs[record.epoch]
        history.unfinished_count -= 1
        history.released_seq = record.seq
        self.unfinished_bytes -= record.nbytes
        self.account.count_end(end.status)
        if end.status is Status.ERROR:
            self.error_by_code[end.code] = self.error_by_code.get(end.code, 0) + 1
            of_model = self.error_by_model.setdefault(record.model, {})
            of_model[end.code] = of_model.get(end.code, 0) + 1
        pub_seq = stream.next_pub_seq
        self._publish(stream, self._outcome_of(pub_seq, record, end, now_ns), actions)
        self._producers.conclude_record(record, end.status)
        self._story.note(now_ns, record, "published", pub_seq)

    def _outcome_of(self, pub_seq: int, record: FrameRecord, end: End, now_ns: int) -> Outcome:
        frame = record.frame
        result = end.result or _NO_RESULT
        return Outcome(
            frame.stream, record.epoch, record.seq, self._boot, pub_seq,
            end.status, end.code, end.message,
            record.model, end.version or record.version, record.size_class,
            end.worker, record.attempt, end.batch_size,
            frame.shape, frame.pts_ns, frame.meta,
            None,
            _timing(record, end, now_ns),
            result.outputs, result.tensors, result.payloads, result.flags,
        )  # fmt: skip  # by position, as keywords cost half a microsecond a frame

    # -- refused frames -----------------------------------------------------------------------------

    def count_reject(self, code: str) -> None:
        """Count a refused frame that names no stream to publish on."""
        self.account.rejected += 1
        self.rejected_by_code[code] = self.rejected_by_code.get(code, 0) + 1

    def publish_reject(
        self, name: str, stream: Stream | None, refused: RefusedFrame, now_ns: int, actions: list[Action]
    ) -> None:
        """Count and publish a refused frame. ``stream`` is None when the table has no place for it: then
        the outcome is numbered and published but can't be replayed."""
        code = refused.refusal.code
        self.count_reject(code)
        self._story.note_id(now_ns, name, refused.epoch, refused.seq, "rejected", code)
        pub_seq = self._streams.take_stray_pub_seq(name) if stream is None else stream.next_pub_seq
        frame = refused.frame
        outcome = Outcome(
            stream=name,
            epoch=refused.epoch,
            seq=refused.seq,
            boot=self._boot,
            pub_seq=pub_seq,
            status=Status.REJECTED,
            code=code,
            message=refused.refusal.message,
            shape=frame.shape if isinstance(frame, Frame) else (),
            pts_ns=frame.pts_ns,
            meta=frame.meta,
            retry_after_ms=refused.refusal.retry_after_ms,
            timing=Timing(queued_us=0, published_us=0),
        )
        if stream is None:
            actions.append(PublishOutcome(outcome))
        else:
            self._publish(stream, outcome, actions)

    # -- retention ----------------------------------------------------------------------------------

    def _publish(self, stream: Stream, outcome: Outcome, actions: list[Action]) -> None:
        actions.append(PublishOutcome(outcome))
        stream.next_pub_seq += 1
        stream.counts[outcome.status] = stream.counts.get(outcome.status, 0) + 1
        nbytes = outcome_nbytes(outcome)
        stream.ring.append((outcome, nbytes))
        self._published.append((stream, outcome.pub_seq))
        self.retained_count += 1
        self.retained_bytes += nbytes
        if len(stream.ring) > self._max_frames:
            self._drop_oldest(stream)
        while self.retained_bytes > self._max_bytes:
            self._drop_oldest_of_all()
        if len(self._published) > _SWEEP_ABOVE and len(self._published) > 2 * self.retained_count:
            self._published = deque(entry for entry in self._published if _is_retained(*entry))

    def _drop_oldest(self, stream: Stream) -> None:
        _, nbytes = stream.ring.popleft()
        self.retained_count -= 1
        self.retained_bytes -= nbytes

    def _drop_oldest_of_all(self) -> None:
        stream, pub_seq = self._published.popleft()
        if _is_retained(stream, pub_seq):
            self._drop_oldest(stream)

    def forget(self, stream: Stream) -> None:
        """Drop the ring of a stream that left the table."""
        while stream.ring:
            self._drop_oldest(stream)

    def replay(
        self, name: str, boot: int, first: int, last: int, max_bytes: int
    ) -> tuple[list[Outcome], list[tuple[int, int]], bool]:
        """Return retained outcomes with ``first <= pub_seq <= last``, what of the range is lost, and if
        there is more.

        Args:
            name: the stream.
            boot: the boot that the numbers belong to; those of another boot are all lost.
            first: first pub_seq wanted.
            last: last pub_seq wanted, inclusive; numbers not yet published are neither sent nor lost.
            max_bytes: cut the answer here (estimated); at least one outcome is returned.

        Returns:
            Outcomes ascending; half-open ranges [start, stop) that are lost; True if the answer was cut.
        """
        if boot != self._boot:
            return [], [(first, min(last + 1, _MAX_U64))], False
        stop = min(last + 1, self._streams.next_pub_seq(name) or 0)
        if first >= stop:
            return [], [], False
        stream = self._streams.by_name.get(name)
        ring: deque[tuple[Outcome, int]] = deque() if stream is None else stream.ring
        oldest = ring[0][0].pub_seq if ring else stop
        missed = [(first, min(oldest, stop))] if first < oldest else []
        outcomes: list[Outcome] = []
        left_bytes = max_bytes
        for outcome, nbytes in islice(ring, max(first - oldest, 0), max(stop - oldest, 0)):
            left_bytes -= nbytes
            if left_bytes < 0 and outcomes:
                return outcomes, missed, True
            outcomes.append(outcome)
        return outcomes, missed, False

    def positions(self, topics: list[str]) -> dict[str, list[int]]:
        """Return [oldest retained pub_seq, next pub_seq] of every stream that the topics cover.

        A topic that ends in NUL names one stream, any other is a prefix, "" covers all."""
        found: dict[str, list[int]] = {}
        for topic in topics:
            if topic.endswith("\0"):
                names = [topic[:-1]] if self._streams.next_pub_seq(topic[:-1]) is not None else []
            else:
                names = [name for name in self._streams.by_name if name.startswith(topic)]
            for name in names:
                stream = self._streams.by_name.get(name)
                next_pub_seq = self._streams.next_pub_seq(name) or 0
                ring = None if stream is None else stream.ring
                found[name] = [ring[0][0].pub_seq if ring else next_pub_seq, next_pub_seq]
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError when the numbers disagree (a bug of ours)."""
        account = self.account
        if account.received != account.accepted + account.rejected + account.duplicates:
            raise AssertionError(f"frames do not add up: {account}")
        streams = self._streams.by_name.values()
        unfinished = [record for stream in streams for record in stream.order]
        if account.unfinished != len(unfinished):
            raise AssertionError(f"{account.unfinished} unfinished by account, {len(unfinished)} in order")
        if self.unfinished_bytes != sum(record.nbytes for record in unfinished):
            raise AssertionError(f"{self.unfinished_bytes} unfinished bytes counted")
        if any(stream.order and stream.order[0].end is not None for stream in streams):
            raise AssertionError("a finished frame is first in its stream and was not released")
        retained = [nbytes for stream in streams for _, nbytes in stream.ring]
        if (self.retained_count, self.retained_bytes) != (len(retained), sum(retained)):
            raise AssertionError(f"{self.retained_count} outcomes of {self.retained_bytes} bytes counted")
        if self.retained_bytes > self._max_bytes:
            raise AssertionError(f"{self.retained_bytes} bytes retained, limit {self._max_bytes}")
        if any(len(stream.ring) > self._max_frames for stream in streams):
            raise AssertionError(f"a ring holds more than {self._max_frames} outcomes")


def outcome_nbytes(outcome: Outcome) -> int:
    """Return about how much memory an outcome holds."""
    nbytes = OUTCOME_OVERHEAD_BYTES
    for payload in outcome.payloads:
        nbytes += part_bytes(payload)
    if outcome.outputs is not None:
        nbytes += _value_nbytes(outcome.outputs)
    return nbytes if outcome.meta is None else nbytes + _value_nbytes(outcome.meta)


def _value_nbytes(value: Value) -> int:
    # Lists are taken to hold items alike (boxes, labels): walking each would cost more than the outcome.
    match value:
        case None | bool():
            return 0
        case int() | float():
            return 32
        case str() | bytes():
            return 56 + len(value)
        case list():
            return 64 + len(value) * (8 + _value_nbytes(value[0])) if value else 64
        case _:
            return 64 + sum(100 + len(key) + _value_nbytes(item) for key, item in value.items())


def _is_retained(stream: Stream, pub_seq: int) -> bool:
    return bool(stream.ring) and stream.ring[0][0].pub_seq <= pub_seq


def _timing(record: FrameRecord, end: End, now_ns: int) -> Timing:
    received_ns, batched_ns = record.received_ns, record.batched_ns
    published_us = (now_ns - received_ns) // 1000
    if batched_ns is None:
        return Timing(0, None, None, None, published_us)
    batched_us = (batched_ns - received_ns) // 1000
    if end.result is None:
        return Timing(0, batched_us, None, None, published_us)
    # The worker's clock is another one: its durations are laid behind the dispatch, and a worker that
    # measures nonsense can't place a stage behind the publication.
    staged_us = batched_us + end.staged_us
    if staged_us > published_us:
        staged_us = published_us
    ran_us = staged_us + end.ran_us
    if ran_us > published_us:
        ran_us = published_us
    return Timing(0, batched_us, staged_us, ran_us, published_us)
