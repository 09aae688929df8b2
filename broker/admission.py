"""Whether a frame is admitted, and what is said about it when it is not.

Not here: what happens to an admitted frame (queues.py, dispatch.py, outcomes.py).

Theory of operation. Every frame that arrives is first named: a frame without epoch gets that of its
sender's session or the broker's own boot id, one without seq the next number of its stream and epoch. A
name that is known is a frame sent again: it changes nothing but who is told of its end. Then one table of
checks, cheapest and most final first; the first that fails refuses the frame with a code and a sentence
that holds value and limit. A refused frame is finished: it is published, told to its sender, remembered,
and changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.broker.actions import Action, Report, SendReject
from headrace.broker.forecast import MIN_RETRY_MS, UNKNOWN_RETRY_MS
from headrace.broker.model_table import ModelTable, ServedClass
from headrace.broker.outcomes import OutcomeLog, RefusedFrame
from headrace.broker.producer_registry import ProducerRegistry, ProducerSession
from headrace.broker.records import End, FrameRecord, Refusal
from headrace.broker.room import Room
from headrace.broker.settings import CoreSettings
from headrace.broker.staleness import Staleness
from headrace.broker.stream_table import EpochHistory, Stream, StreamTable
from headrace.broker.trace import Story
from headrace.broker.traffic import Traffic
from headrace.errors import Code
from headrace.protocol.messages import BadFrame, Frame, Keep, Reject, ShmRef, Status

#: Refused frames of streams without a place in the table that are remembered (about 400 bytes each).
MAX_STRAYS = 10_000

#: Highest seq on the wire (u64).
_MAX_SEQ = 2**64 - 1


@dataclass(slots=True, eq=False)
class _Arrival:
    """Who sent a frame, and the name it goes by."""

    peer: bytes | None
    session: ProducerSession | None
    stream: Stream
    epoch: int
    seq: int
    now_ns: int


class Admission:
    """The way in. Invariant: after admit(), the frame is admitted, refused or known, and counted as that."""

    def __init__(
        self,
        boot: int,
        settings: CoreSettings,
        models: ModelTable,
        streams: StreamTable,
        producers: ProducerRegistry,
        outcomes: OutcomeLog,
        room: Room,
        traffic: Traffic,
        staleness: Staleness,
        story: Story,
    ) -> None:
        self._boot = boot
        self._settings = settings
        self._silence_ns = settings.heartbeat_ms * settings.heartbeats_missed * 1_000_000
        self._models = models
        self._streams = streams
        self._producers = producers
        self._outcomes = outcomes
        self._room = room
        self._traffic = traffic
        self._staleness = staleness
        self._story = story
        self._last_number = 0
        self._strays: dict[tuple[str, int, int | None], Refusal] = {}
        self.is_draining = False

    def admit(self, peer: bytes | None, frame: Frame | BadFrame, now_ns: int, actions: list[Action]) -> None:
        """Take one frame in, or refuse it."""
        self._outcomes.account.received += 1
        session = None if peer is None else self._producers.by_peer.get(peer)
        if session is not None:
            session.received += 1
            session.pulse.last_heard_ns = now_ns
        name = frame.stream
        if not name:
            self._refuse_unnamed(peer, session, frame, actions)
            return
        epoch = frame.epoch
        if epoch is None:
            epoch = self._boot if session is None else session.epoch
        if self._strays and self._is_stray(peer, session, (name, epoch, frame.seq), actions):
            return
        stream, evicted = self._streams.open(name, now_ns)
        if evicted is not None:
            self.forget(evicted)
        if stream is None:
            refusal = Refusal(
                Code.TOO_MANY_STREAMS,
                f"{len(self._streams)} streams are in use: the limit (max_streams) is reached",
                self._settings.heartbeat_ms,
            )
            if frame.seq is not None:
                self._strays[name, epoch, frame.seq] = refusal
                if len(self._strays) > MAX_STRAYS:
                    del self._strays[next(iter(self._strays))]
            refused = RefusedFrame(frame, epoch, frame.seq or 0, refusal)
            self._refuse(peer, session, name, None, refused, now_ns, actions)
            return
        history = stream.history(epoch)
        seq = frame.seq
        if seq is None:
            seq = min(history.next_seq(), _MAX_SEQ)
        arrival = _Arrival(peer, session, stream, epoch, seq, now_ns)
        may_be_known = seq <= history.last_seq or history.was_finished_earlier(seq)
        if may_be_known and frame.seq is not None and self._is_known(arrival, history, actions):
            return
        if isinstance(frame, BadFrame):
            refusal = Refusal(frame.code, frame.message)
        else:
            verdict = self._judge(arrival, frame, history)
            if type(verdict) is ServedClass:
                history.note(seq, self._settings.duplicate_window)
                self._enter(arrival, frame, verdict, actions)
                return
            refusal = verdict  # type: ignore[assignment]  # what is no ServedClass
        self._remember_refusal(arrival, history, refusal)
        refused = RefusedFrame(frame, epoch, seq, refusal)
        self._refuse(peer, session, name, stream, refused, now_ns, actions)

    def forget(self, stream: Stream) -> None:
        """Drop what the other tables hold of a stream that left the stream table."""
        self._outcomes.forget(stream)
        owner = None if stream.owner_peer is None else self._producers.by_peer.get(stream.owner_peer)
        if owner is not None:
            owner.streams.pop(stream.name, None)

    # -- frames sent again --------------------------------------------------------------------------

    def _is_known(self, arrival: _Arrival, history: EpochHistory, actions: list[Action]) -> bool:
        """Deal with a frame that was sent before. False when it is new (its seq goes backwards)."""
        stream, session, seq = arrival.stream, arrival.session, arrival.seq
        record = stream.unfinished.get((arrival.epoch, seq))
        refusal = history.rejects.get(seq)
        if record is not None:
            self._take_over(record, arrival)
        elif refusal is not None:
            reject = _reject_of(stream.name, arrival.epoch, seq, refusal)
            self._say_again(arrival.peer, session, reject, actions)
        elif history.was_finished_earlier(seq):
            if session is not None:
                # Outcomes leave in the order of admission, so that what was admitted before it is finished
                # as well; only a reject whose reason is forgotten can be ahead of an unfinished frame.
                if all(other > seq for epoch, other in stream.unfinished if epoch == arrival.epoch):
                    self._tell_up_to(session, stream.name, seq)
                self._producers.conclude(session, None)
        elif not history.has_seen(seq):
            return False
        elif session is not None:
            self._tell_up_to(session, stream.name, seq)
            self._producers.conclude(session, None)
        self._outcomes.account.duplicates += 1
        return True

    @staticmethod
    def _tell_up_to(session: ProducerSession, name: str, seq: int) -> None:
        # Not up to the last released seq: between the two may be a rejected frame that this session has not
        # sent again yet, and its reject would come after a credit that says it has an outcome.
        session.moved[name] = max(session.moved.get(name, -1), seq)

    def _is_stray(
        self,
        peer: bytes | None,
        session: ProducerSession | None,
        key: tuple[str, int, int | None],
        actions: list[Action],
    ) -> bool:
        """Deal with a frame that was refused for want of a place for its stream. False for any other."""
        name, epoch, seq = key
        refusal = self._strays.get(key)
        if refusal is None or seq is None:
            return False
        self._say_again(peer, session, _reject_of(name, epoch, seq, refusal), actions)
        self._outcomes.account.duplicates += 1
        return True

    def _say_again(
        self, peer: bytes | None, session: ProducerSession | None, reject: Reject, actions: list[Action]
    ) -> None:
        if peer is not None:
            actions.append(SendReject(peer, reject))
        if session is not None:
            self._producers.conclude(session, None)

    def _take_over(self, record: FrameRecord, arrival: _Arrival) -> None:
        """An unfinished frame was sent again: its end is told to the new session."""
        session = arrival.session
        if session is None:
            return
        if record.session == session.number:
            # Twice in one session: the copy is concluded, the frame itself will be.
            self._producers.conclude(session, None)
            return
        record.peer = session.peer
        record.session = session.number
        session.taken_over_count += 1
        if arrival.stream.owner_epoch in (None, arrival.epoch):
            self._own(arrival)

    # -- refusals -----------------------------------------------------------------------------------

    def _refuse_unnamed(
        self,
        peer: bytes | None,
        session: ProducerSession | None,
        frame: BadFrame | Frame,
        actions: list[Action],
    ) -> None:
        bad = frame if isinstance(frame, BadFrame) else BadFrame(Code.BAD_STREAM, "the stream id is empty")
        self._outcomes.count_reject(bad.code)
        if peer is not None:
            reject = Reject(str(bad.code), bad.message, None, frame.epoch, frame.seq)
            actions.append(SendReject(peer, reject))
        if session is not None:
            self._producers.conclude(session, Status.REJECTED)

    def _remember_refusal(self, arrival: _Arrival, history: EpochHistory, refusal: Refusal) -> None:
        # A producer never sends more again than it may have unfinished: that many are remembered.
        history.note_reject(arrival.seq, refusal, self._settings.credits_per_producer)
        if arrival.seq > history.last_seq:
            history.note(arrival.seq, self._settings.duplicate_window)
        if not arrival.stream.order:
            self._streams.mark_idle(arrival.stream, arrival.now_ns)

    def _refuse(
        self,
        peer: bytes | None,
        session: ProducerSession | None,
        name: str,
        stream: Stream | None,
        refused: RefusedFrame,
        now_ns: int,
        actions: list[Action],
    ) -> None:
        self._outcomes.publish_reject(name, stream, refused, now_ns, actions)
        if peer is not None:
            reject = _reject_of(name, refused.epoch, refused.seq, refused.refusal)
            actions.append(SendReject(peer, reject))
        if session is not None:
            self._producers.conclude(session, Status.REJECTED)

    # -- checks -------------------------------------------------------------------------------------

    def _judge(self, arrival: _Arrival, frame: Frame, history: EpochHistory) -> ServedClass | Refusal:
        if self.is_draining:
            return Refusal(Code.DRAINING, "the broker is stopping: it admits nothing more")
        refusal = self._check_sender(arrival, frame, history)
        if refusal is None and isinstance(frame.payload, ShmRef):
            refusal = self._check_slot(arrival, frame.payload)
        if refusal is not None:
            return refusal
        place = self._find_place(frame)
        if isinstance(place, Refusal):
            return place
        return self._room.find_fault(arrival.stream, frame, place, arrival.now_ns) or place

    def _check_sender(self, arrival: _Arrival, frame: Frame, history: EpochHistory) -> Refusal | None:
        session, stream = arrival.session, arrival.stream
        if session is not None:
            unfinished = session.received - session.finished
            if unfinished > self._settings.credits_per_producer:
                place = self._find_place(frame)
                wait_ms = MIN_RETRY_MS
                if isinstance(place, ServedClass):
                    wait_ms = self._room.retry_ms(place, arrival.now_ns)
                return Refusal(
                    Code.CREDIT_EXCEEDED,
                    f"{unfinished} frames of this producer are unfinished:"
                    f" it has {self._settings.credits_per_producer} credits",
                    wait_ms,
                )
        if stream.owner_epoch is not None and stream.owner_epoch != arrival.epoch:
            retry_ms = self._owned_for_ms(stream, arrival.now_ns)
            if retry_ms is not None:
                return Refusal(
                    Code.STREAM_OWNED,
                    f"stream {stream.name} belongs to the producer of epoch {stream.owner_epoch},"
                    f" not to epoch {arrival.epoch}",
                    retry_ms,
                )
        if arrival.seq <= history.last_seq:
            return Refusal(
                Code.SEQ_BACKWARDS,
                f"seq {arrival.seq} of stream {stream.name} after seq {history.last_seq}",
            )
        return None

    def _check_slot(self, arrival: _Arrival, ref: ShmRef) -> Refusal | None:
        """Check that a payload lies in the sender's own arena. Whether the slot is still the frame's is seen
        by whoever copies it: until then it may be freed at any time."""
        arena = self._producers.arenas.get(ref.arena)
        if arena is None or arena.epoch != arrival.epoch:
            return Refusal(
                Code.LANE_UNAVAILABLE,
                f"arena {ref.arena} is not one that this producer named in HELLO and that can be read here:"
                " send inline",
            )
        if ref.offset + ref.nbytes > arena.nbytes:
            return Refusal(
                Code.OUT_OF_RANGE,
                f"offset {ref.offset} and nbytes {ref.nbytes} end outside of the arena, which has"
                f" {arena.nbytes} bytes",
            )
        return None

    def _owned_for_ms(self, stream: Stream, now_ns: int) -> int | None:
        """Return for how long at least the owner keeps the stream, None when it has lost it."""
        if stream.owner_peer is not None and stream.owner_peer in self._producers.by_peer:
            return self._silence_ns // 1_000_000
        left_ns = stream.last_frame_ns + self._silence_ns - now_ns
        return -(-left_ns // 1_000_000) if left_ns > 0 else None

    def _find_place(self, frame: Frame) -> ServedClass | Refusal:
        limits = self._settings.limits
        if not 0 <= frame.priority < limits.priority_levels:
            return Refusal(
                Code.OUT_OF_RANGE,
                f"priority is {frame.priority}: expected 0 to {limits.priority_levels - 1}",
            )
        if frame.nbytes > limits.max_frame_bytes or frame.nbytes > self._room.max_bytes(frame.priority):
            largest = min(limits.max_frame_bytes, self._room.max_bytes(frame.priority))
            return Refusal(Code.FRAME_TOO_LARGE, f"{frame.nbytes} bytes: the limit is {largest}")
        model = self._models.find(frame.model)
        if model is None:
            return Refusal(
                Code.UNKNOWN_MODEL,
                f"model {frame.model or '(default)'} is not served here ({self._models.references()})",
            )
        if model.placer is None:
            return Refusal(
                Code.UNKNOWN_MODEL,
                f"model {model.key}: no worker has described it yet",
                UNKNOWN_RETRY_MS,
            )
        place = model.placer.place(frame)
        return place if isinstance(place, Refusal) else model.classes[place.name]

    # -- in -----------------------------------------------------------------------------------------

    def _enter(self, arrival: _Arrival, frame: Frame, served: ServedClass, actions: list[Action]) -> None:
        stream, now_ns = arrival.stream, arrival.now_ns
        epoch, seq = arrival.epoch, arrival.seq
        if frame.seq is None or frame.epoch is None:
            frame = _numbered(frame, seq, epoch)
        self._last_number += 1
        record = FrameRecord(
            self._last_number, frame, arrival.peer, served.model, served.version, served.spec.name,
            frame.priority, now_ns, self._room.deadline_ns(frame, now_ns), frame.nbytes,
        )  # fmt: skip  # by position: see Frame in the protocol
        record.epoch = epoch
        record.seq = seq
        record.key = (frame.stream, epoch, seq)
        if arrival.session is not None:
            record.session = arrival.session.number
        if stream.owner_peer != arrival.peer or stream.owner_epoch != epoch:
            self._own(arrival)
        stream.last_frame_ns = now_ns
        self._traffic.seen_ns[frame.priority] = now_ns
        if not stream.is_watched or stream.has_ended:
            self._note_alive(stream, actions)
        self._outcomes.begin(stream, record)
        self._story.note(now_ns, record, "queued", served.spec.name)
        if frame.keep is Keep.LATEST:
            self._push_latest(stream, record, served, now_ns, actions)
        else:
            served.queue.push(record, now_ns)

    def _note_alive(self, stream: Stream, actions: list[Action]) -> None:
        if stream.is_stale:
            actions.append(Report("stream resumed", {"stream": stream.name}))
        if stream.is_watched:
            stream.has_ended = False
        else:
            self._staleness.watch(stream)

    def _push_latest(
        self,
        stream: Stream,
        record: FrameRecord,
        served: ServedClass,
        now_ns: int,
        actions: list[Action],
    ) -> None:
        old = stream.latest
        stream.latest = record
        if old is None:
            served.queue.push(record, now_ns)
            return
        if served.holds(old) and old.priority == record.priority:
            served.queue.replace(old, record, now_ns)
            waited_in = served
        else:
            waited_in = self._models.class_of(old)
            waited_in.queue.remove(old)
            served.queue.push(record, now_ns)
        waited_in.superseded_count += 1
        message = f"seq {record.seq} of the same stream came while it waited"
        end = End(Status.SUPERSEDED, Code.NEWER_FRAME, message)
        self._outcomes.finish(old, end, now_ns, actions)

    def _own(self, arrival: _Arrival) -> None:
        stream, session = arrival.stream, arrival.session
        if stream.owner_peer == arrival.peer and stream.owner_epoch == arrival.epoch:
            return
        if stream.owner_peer is not None:
            before = self._producers.by_peer.get(stream.owner_peer)
            if before is not None:
                before.streams.pop(stream.name, None)
        stream.owner_peer = arrival.peer
        stream.owner_epoch = arrival.epoch
        if session is not None:
            session.streams[stream.name] = None


def _numbered(frame: Frame, seq: int, epoch: int) -> Frame:
    """Return a frame with the name that it goes by. dataclasses.replace() would take twice as long."""
    return Frame(
        frame.stream, frame.payload, frame.nbytes, frame.shape, frame.dtype, frame.encoding, frame.color,
        seq, epoch, frame.model, frame.priority, frame.ttl_ms, frame.keep, frame.pts_ns, frame.meta,
        frame.inputs,
    )  # fmt: skip


def _reject_of(name: str, epoch: int, seq: int, refusal: Refusal) -> Reject:
    return Reject(str(refusal.code), refusal.message, name, epoch, seq, refusal.retry_after_ms)
