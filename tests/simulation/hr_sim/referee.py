"""Judges one boot of the broker by what goes in and comes out of its core, and shares nothing with it.

Theory of operation. ``observe`` sees each event with the actions that answered it. It keeps a book of its
own: every frame that arrived, where it must be by now, and how it may end; every session's count; every batch
that a worker holds. Whatever the core does must fit the book, or the seed fails with the frame's story.
What is judged about batches is in ``dispatch_checks``.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Protocol

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.settings import CoreSettings
from headrace.errors import Code
from headrace.protocol.messages import BadFrame, Frame, Keep, Outcome, Reject, ShmRef, Status
from hr_sim.book import Result, Seen, Session, Violation
from hr_sim.dispatch_checks import DispatchChecks
from hr_sim.models import expected_class
from hr_sim.reload_checks import ReloadChecks

if TYPE_CHECKING:
    from headrace.broker.outcomes import Account

MS = 1_000_000

#: Codes that tell a sender to come again: they must say when.
_RETRY_CODES = frozenset({Code.QUEUE_FULL, Code.STREAM_QUEUE_FULL, Code.BYTES_FULL, Code.STREAM_OWNED})

_CODES = frozenset(code.value for code in Code)

#: A Tick may come this much later than it was asked for, beside pauses and the length of a turn.
_LATE_NS = 5 * MS


class Clock(Protocol):
    """What a referee asks of the world around it."""

    def published(self, boot: int, outcome: Outcome, frame_id: int | None) -> None:
        """Take note of an outcome."""

    def allowed_lateness_ns(self, due_ns: int) -> int:
        """Return how late a Tick due then may be now."""


class Referee:
    """The book of one boot."""

    def __init__(self, settings: CoreSettings, boot: int, clock: Clock) -> None:
        self.settings = settings
        self.boot = boot
        self.clock = clock
        self.is_over = False
        self.is_draining = False
        self.frames: dict[int, Seen] = {}
        self.order: dict[str, list[Seen]] = {}  # admitted and unpublished, by arrival
        self.next_pub_seq: dict[str, int] = {}
        self.by_key: dict[tuple[str, int, int], Seen] = {}
        self.sessions: dict[bytes, Session] = {}
        self.counts = dict.fromkeys(Status, 0)
        self.received_count = self.duplicate_count = self.accepted_count = 0
        self.pending_bytes = 0
        self.frame_event_count = 0
        self.dispatch = DispatchChecks(self)
        self.reloads = ReloadChecks(settings)
        self._latest: dict[str, Seen] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._specs = {spec.spec.name: spec.spec for spec in settings.models}
        self._arriving: Seen | None = None
        self._poisons: set[tuple[str, bytes]] = set()

    # -- the seam -----------------------------------------------------------------------------------

    def observe(self, event: events.Event, actions: list[act.Action], now_ns: int) -> None:
        """Judge what the core did about one event."""
        arriving: Seen | None = None
        due: list[Seen] = []
        self.dispatch.begin(now_ns)
        if isinstance(event, events.FrameArrived):
            arriving = self._arrive(event.peer, event.frame, now_ns)
        elif isinstance(event, events.Tick):
            due = self._pop_due(now_ns)
        else:
            self._note(event, now_ns)
        self._arriving = arriving
        rejects: list[Reject] = []
        is_answer = isinstance(event, events.PeerHeard) and self.dispatch.answer(event.peer, event.probe)
        for action in actions:
            match action:
                case act.PublishOutcome(outcome):
                    self._take_outcome(outcome, now_ns)
                case act.SendBatch(peer, batch):
                    if not isinstance(event, events.Tick):
                        raise Violation(f"a batch is sent by {type(event).__name__}: only a Tick dispatches")
                    self.dispatch.send(peer, batch, now_ns)
                    self.reloads.send(batch, self.dispatch.name_of(peer))
                case act.GrantCredit(peer, credit):
                    self._take_credit(peer, credit)
                case act.SendReject(_, reject):
                    rejects.append(reject)
                case act.Report(name, values):
                    self.reloads.report(name, values)
                    if name == "worker lost":
                        self.dispatch.lose(str(values["worker"]), str(values["reason"]), now_ns)
                case act.SetUpWorker(peer):
                    self.dispatch.set_up(peer)
                case act.SendHeartbeat(peer, _, int(probe)):
                    self.dispatch.ask(peer, probe, now_ns)
                case act.RefusePeer(_, Code.ID_IN_USE, _) if not is_answer:
                    raise Violation("an id is refused for good, and its holder has not answered the probe")
                case act.CancelBatch(peer, number):
                    self.dispatch.cancel(peer, number)
                case _:
                    pass
        if isinstance(event, events.FrameArrived):
            self._judge_arrival(event, arriving, rejects, now_ns)
        elif rejects:
            raise Violation(f"{type(event).__name__} rejects {rejects[0]}")
        if isinstance(event, events.PeerMisbehaved):
            self.dispatch.judge_misread(event.peer, event.kind)
        for seen in due:
            self._judge_due(seen, now_ns)

    def end(self, *, is_crash: bool) -> None:
        """The broker's process is over."""
        self.is_over = True
        if not is_crash:
            self.demand_finished()

    def demand_finished(self) -> None:
        """Fail if anything that was admitted has no outcome."""
        for order in self.order.values():
            for seen in order:
                raise Violation(f"frame {seen.id} has no outcome", seen.key)

    def compare(self, account: Account) -> None:
        """Compare the core's account with the book."""
        counts = self.counts
        ours = (
            self.received_count,
            self.accepted_count,
            *(counts[status] for status in Status),
            self.duplicate_count,
        )
        theirs = (
            account.received,
            account.accepted,
            account.ok,
            account.error,
            account.expired,
            account.superseded,
            account.rejected,
            account.duplicates,
        )
        if ours != theirs:
            raise Violation(f"account {account}; seen: received, accepted, by status, duplicates {ours}")
        pending_count = sum(len(order) for order in self.order.values())
        if account.accepted - sum(theirs[2:6]) != pending_count:
            raise Violation(f"account {account} does not add up to {pending_count} unfinished")

    # -- arrivals -----------------------------------------------------------------------------------

    def _arrive(self, peer: bytes | None, frame: Frame | BadFrame, now_ns: int) -> Seen | None:
        """Enter a frame. None for one that was seen before or that has no name."""
        self.received_count += 1
        self.frame_event_count += 1
        session = None if peer is None else self.sessions.get(peer)
        if session is not None:
            session.received_count += 1
        if not frame.stream or frame.pts_ns is None:
            self.counts[Status.REJECTED] += 1
            if session is not None:
                session.concluded_count += 1
            return None
        frame_id = frame.pts_ns
        seen = self.frames.get(frame_id)
        if seen is not None:
            self._arrive_again(seen, session)
            return None
        epoch = frame.epoch
        if epoch is None:
            epoch = self.boot if session is None else session.epoch
        ttl_ms = None if isinstance(frame, BadFrame) else frame.ttl_ms
        if ttl_ms is None and isinstance(frame, Frame):
            ttl_ms = self.settings.default_timeout_ms
        deadline_ns = None if ttl_ms is None else now_ns + ttl_ms * MS
        seen = Seen(frame_id, frame, frame.stream, epoch, now_ns, deadline_ns, session, frame.seq, now_ns)
        self.frames[frame_id] = seen
        self.order.setdefault(seen.stream, []).append(seen)
        return seen

    def _arrive_again(self, seen: Seen, session: Session | None) -> None:
        self.duplicate_count += 1
        if session is None:
            return
        if seen.status is not None or seen.session is session:
            session.concluded_count += 1
        else:
            seen.session = session

    def _judge_arrival(
        self, event: events.FrameArrived, arriving: Seen | None, rejects: list[Reject], now_ns: int
    ) -> None:
        frame = event.frame
        for reject in rejects:
            if event.peer is None:
                raise Violation("a reject for the intake socket, which can't be answered")
            self._judge_reject(frame, reject)
        if arriving is None:
            return
        if arriving.status is Status.REJECTED:
            if event.peer is not None and not rejects:
                raise Violation("a rejected frame's sender is not told", arriving.key)
            return
        if rejects:
            raise Violation(f"rejected as {rejects[0].code}, but not published as that", arriving.key)
        self._admit(arriving, now_ns)

    def _judge_reject(self, frame: Frame | BadFrame, reject: Reject) -> None:
        key = (frame.stream or "", frame.epoch or 0, frame.seq or 0)
        if not reject.code or reject.code not in _CODES:
            raise Violation(f"a reject without a known code: {reject}", key)
        if reject.code in _RETRY_CODES and not reject.retry_after_ms:
            raise Violation(f"{reject.code} without retry_after_ms", key)
        if frame.seq is not None and (reject.stream, reject.seq) != (frame.stream, frame.seq):
            raise Violation(f"a reject for another frame: {reject}", key)
        if reject.code == Code.CREDIT_EXCEEDED:
            raise Violation("a producer that keeps to its credits is told that it exceeds them", key)
        seen = None if frame.pts_ns is None else self.frames.get(frame.pts_ns)
        if seen is not None and seen.status is not Status.REJECTED:
            raise Violation(f"rejected as {reject.code}, but it is {seen.status}", key)

    def _admit(self, seen: Seen, now_ns: int) -> None:
        frame = seen.frame
        if isinstance(frame, BadFrame):
            raise Violation("a frame that can't be read is admitted", seen.key)
        if self.is_draining:
            raise Violation("a frame is admitted during a drain", seen.key)
        spec = self._specs.get(frame.model.partition(":")[0] or self.settings.models[0].spec.name)
        name = None if spec is None or len(frame.shape) != 3 else expected_class(spec, *frame.shape[:2])
        if spec is None or name is None:
            raise Violation(f"admitted with model {frame.model!r} and shape {frame.shape}", seen.key)
        seen.class_key = (spec.name, name)
        self.accepted_count += 1
        self.pending_bytes += frame.nbytes
        if self.pending_bytes > self.settings.max_bytes:
            raise Violation(f"{self.pending_bytes} bytes unfinished of {self.settings.max_bytes}", seen.key)
        if len(self.order[seen.stream]) > self.settings.max_unfinished_per_stream:
            raise Violation(f"{len(self.order[seen.stream])} frames of a stream unfinished", seen.key)
        if seen.seq is not None:
            self.by_key[seen.key] = seen
        self.dispatch.wait(seen)
        if seen.deadline_ns is not None:
            heapq.heappush(self._deadlines, (seen.deadline_ns, seen.id))
        if frame.keep is Keep.LATEST:
            self._supersede(seen)

    def _supersede(self, seen: Seen) -> None:
        old = self._latest.get(seen.stream)
        self._latest[seen.stream] = seen
        if old is None or old.dispatched_count or old.is_superseded:
            return
        # Its outcome may be out already, or wait for those of the frames before it.
        if old.status in {None, Status.SUPERSEDED}:
            self.dispatch.leave(old)
            old.is_superseded = True
            if old.class_key == seen.class_key and old.priority == seen.priority:
                seen.waits_from_ns = old.waits_from_ns
                seen.passed_count, seen.passed_limit = old.passed_count, old.passed_limit

    # -- outcomes -----------------------------------------------------------------------------------

    def _take_outcome(self, outcome: Outcome, now_ns: int) -> None:
        self.frame_event_count += 1
        key = (outcome.stream, outcome.epoch, outcome.seq)
        if outcome.boot != self.boot:
            raise Violation(f"boot {outcome.boot}, not {self.boot}", key)
        expected = self.next_pub_seq.get(outcome.stream, 0)
        if outcome.pub_seq != expected:
            raise Violation(f"pub_seq {outcome.pub_seq} follows {expected - 1}", key)
        self.next_pub_seq[outcome.stream] = expected + 1
        seen = None if outcome.pts_ns is None else self.frames.get(outcome.pts_ns)
        if seen is None:
            raise Violation("an outcome for a frame that never arrived", key)
        if outcome.meta != seen.frame.meta:
            raise Violation(f"the outcome's meta is {outcome.meta}", key)
        if outcome.code == Code.STALE_SLOT:
            raise Violation("its slot was freed before its outcome was out", key)
        if seen.status is not None:
            raise Violation(f"a second outcome, {outcome.status}, after {seen.status}", key)
        if (seen.stream, seen.epoch) != key[:2] or seen.seq not in {None, outcome.seq}:
            raise Violation(f"the outcome of frame {seen.id} goes by another name than {seen.key}", key)
        seen.seq = outcome.seq
        self._judge_order(seen, outcome)
        self._judge_end(seen, outcome, now_ns)
        self.reloads.judge(seen, outcome)
        seen.status = outcome.status
        self.counts[outcome.status] += 1
        if seen.session is not None:
            seen.session.concluded_count += 1
        if outcome.status is not Status.REJECTED and isinstance(seen.frame, Frame):
            self.pending_bytes -= seen.frame.nbytes
            self.dispatch.leave(seen)
        self.clock.published(self.boot, outcome, seen.id)

    def _judge_order(self, seen: Seen, outcome: Outcome) -> None:
        order = self.order[seen.stream]
        is_rejected = outcome.status is Status.REJECTED
        if is_rejected and (seen is not self._arriving or order[-1] is not seen):
            raise Violation("rejected after it was admitted", seen.key)
        if not is_rejected and order[0] is not seen:
            first = order[0]
            raise Violation(f"published before {first.key}, which was admitted earlier", seen.key)
        order.pop(-1 if is_rejected else 0)

    def _judge_end(self, seen: Seen, outcome: Outcome, now_ns: int) -> None:
        status, code = outcome.status, outcome.code
        results = [seen.result] if seen.result is not None else []
        if not seen.in_flight:
            results += seen.tentative
        if status is Status.OK or (status is Status.ERROR and results):
            self._judge_result(seen, outcome, results)
        elif status is Status.ERROR:
            self._judge_error(seen, code)
        elif status is Status.EXPIRED:
            is_early = seen.deadline_ns is None or now_ns < seen.deadline_ns
            if is_early and (seen.deadline_ns is None or not self._may_end_early(seen)):
                raise Violation(f"expired at {now_ns}, deadline {seen.deadline_ns}", seen.key)
            # A frame of an overdue batch ends at its deadline, and may then wait for its turn to be published
            # until long after the worker has answered.
            until_ns = now_ns if seen.in_flight or seen.result is None else seen.back_ns
            held_ms = (until_ns - seen.sent_ns) // MS
            is_late = seen.deadline_ns is not None and until_ns >= seen.deadline_ns
            is_overdue = is_late and held_ms >= self.settings.overdue_min_ms
            if (seen.result is not None or seen.in_flight) and not is_overdue:
                raise Violation(f"expired while a worker had it, for {held_ms} ms", seen.key)
        elif status is Status.SUPERSEDED:
            if not seen.is_superseded and not self._is_superseded_now(seen):
                raise Violation("superseded, but nothing newer came while it waited", seen.key)
        elif not code or code not in _CODES:
            raise Violation(f"rejected without a known code: {code!r}", seen.key)
        if status is not Status.REJECTED and outcome.attempt != seen.dispatched_count:
            raise Violation(f"attempt {outcome.attempt}: {seen.dispatched_count} batches held it", seen.key)

    def _judge_result(self, seen: Seen, outcome: Outcome, results: list[Result]) -> None:
        told = (outcome.status, outcome.code, outcome.worker, outcome.batch_size)
        found = [result for result in results if told == result[:2] + result[3:]]
        if not found:
            raise Violation(f"{told}, but no worker it was with said so: {results}", seen.key)
        if outcome.status is Status.OK and outcome.outputs != seen.id:
            raise Violation(f"the result of frame {outcome.outputs}", seen.key)

    def _may_end_early(self, seen: Seen) -> bool:
        """Tell whether a frame may end because it would be too late: a waiting one, and only if asked for."""
        return self.settings.check_deadlines and not seen.in_flight and seen.result is None

    def poison(self, seen: Seen) -> None:
        """A frame's content kills workers."""
        self._poisons.add(_content_of(seen))

    def is_poisoned(self, seen: Seen) -> bool:
        """Tell whether a frame's content has been found to kill workers of its model."""
        return isinstance(seen.frame, Frame) and _content_of(seen) in self._poisons

    def _is_superseded_now(self, seen: Seen) -> bool:
        """Tell whether the frame that is just arriving may supersede this one."""
        arriving = self._arriving
        return (
            arriving is not None
            and arriving.stream == seen.stream
            and isinstance(arriving.frame, Frame)
            and arriving.frame.keep is Keep.LATEST
            and self._latest.get(seen.stream) is seen
            and not seen.dispatched_count
        )

    def _judge_error(self, seen: Seen, code: str) -> None:
        if code in {Code.WORKER_LOST, Code.POISON_FRAME}:
            is_copy = code == Code.POISON_FRAME and self.is_poisoned(seen)
            if seen.lost_count < self.settings.max_attempts and not is_copy:
                raise Violation(f"{code} after {seen.lost_count} lost workers", seen.key)
        elif code == Code.SHUTDOWN:
            if not self.is_draining:
                raise Violation("shut down, but nobody asked for that", seen.key)
        else:
            raise Violation(f"error {code}, but no worker said so", seen.key)

    # -- deadlines ----------------------------------------------------------------------------------

    def _pop_due(self, now_ns: int) -> list[Seen]:
        due = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, frame_id = heapq.heappop(self._deadlines)
            seen = self.frames[frame_id]
            if seen.status is not None:
                continue
            self.dispatch.leave(seen)
            due.append(seen)
            is_waiting = not seen.in_flight and seen.result is None and not seen.is_superseded
            if self.settings.check_deadlines and self.order[seen.stream][0] is not seen:
                # It may have ended early, and wait for those before it to be published.
                is_waiting = False
            due_ns = max(deadline_ns, seen.back_ns)
            if is_waiting and now_ns - due_ns > self.clock.allowed_lateness_ns(due_ns) + _LATE_NS:
                raise Violation(f"its deadline was {(now_ns - due_ns) / MS:.3f} ms ago", seen.key)
        return due

    def _judge_due(self, seen: Seen, now_ns: int) -> None:
        is_first = seen.status is None and self.order[seen.stream][0] is seen
        if is_first and not seen.in_flight and seen.result is None:
            raise Violation("it waits behind nothing, its deadline has come, and it did not expire", seen.key)

    # -- sessions and workers -----------------------------------------------------------------------

    def _note(self, event: events.Event, now_ns: int) -> None:
        match event:
            case events.ProducerArrived(peer, hello):
                session = self.sessions.get(peer)
                if session is None or session.epoch != hello.epoch:
                    for other in tuple(self.sessions.values()):
                        if hello.epoch == other.epoch:
                            del self.sessions[other.peer]
                    self.sessions[peer] = Session(peer, hello.epoch)
            case events.ProducerLeft(peer) | events.PeerUnreachable(peer):
                self.sessions.pop(peer, None)
                self.dispatch.note(event, now_ns)
            case events.DrainRequested() | events.GraceEnded():
                self.is_draining = True
            case _:
                self.dispatch.note(event, now_ns)

    def _take_credit(self, peer: bytes, credit: Any) -> None:
        session = self.sessions.get(peer)
        if session is None:
            raise Violation(f"credit for {peer!r}, which has no session")
        if credit.finished != session.concluded_count:
            raise Violation(
                f"credit says {credit.finished} of epoch {session.epoch} are finished,"
                f" {session.concluded_count} of {session.received_count} are"
            )
        if credit.finished < session.told_count:
            raise Violation(f"credit went back from {session.told_count} to {credit.finished}")
        session.told_count = credit.finished
        for stream, watermark in credit.streams.items():
            for seen in self.order.get(stream, ()):
                if seen.epoch == session.epoch and seen.seq is not None and seen.seq <= watermark:
                    raise Violation(f"credit up to {watermark} of {stream}, but it is unfinished", seen.key)

    def note_poisoned(self, link: Any, number: int, frame_id: int) -> None:
        """A frame has killed the worker that ran it."""
        seen = self.frames.get(frame_id)
        if seen is not None and link is not None:
            self.dispatch.note_poisoned(seen, link.peer, number)


def _content_of(seen: Seen) -> tuple[str, bytes]:
    payload = seen.frame.payload if isinstance(seen.frame, Frame) else b""
    assert not isinstance(payload, ShmRef)
    return seen.class_key[0], bytes(payload)
