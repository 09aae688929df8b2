"""The broker's core: past facts in, imperatives out. Composes the modules beside it and owns no policy.

Not here: sockets, time, logging (shell.py); the rules themselves (each in the module that it names).

Theory of operation. ``handle`` takes one event and the time and returns what is to be done, in order. No
event but ``Tick`` dispatches: the shell hands over all input of a turn first and then one Tick, in which
the core expires, closes batches and dispatches once, with everything known. Frames wait in their class's
queue, are with a worker (the ledger), or are finished and wait for their turn in their stream (the outcome
log); each ends exactly once.

When a worker is lost, its frames are put back. If it may have been their fault they become suspects: each
runs alone, and one that is lost with ``max_attempts`` workers ends as an error. A batch that fails without
killing its worker is halved until the frame at fault is alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from headrace.broker import events
from headrace.broker.actions import (
    Action,
    CancelBatch,
    RefusePeer,
    Report,
    SendHeartbeat,
    SetUpWorker,
    WelcomeProducer,
)
from headrace.broker.admission import Admission
from headrace.broker.costs import CostTable
from headrace.broker.dispatch import Dispatcher
from headrace.broker.heartbeats import Heartbeats
from headrace.broker.inflight import InFlightBatch, Ledger
from headrace.broker.model_table import ModelTable, ServedClass
from headrace.broker.outcomes import Account, OutcomeLog
from headrace.broker.producer_registry import ProducerRegistry, ProducerSession
from headrace.broker.records import End, FrameRecord, FrameState
from headrace.broker.settings import CoreSettings
from headrace.broker.status import status_of
from headrace.broker.stream_table import StreamTable
from headrace.broker.trace import Story
from headrace.broker.worker_registry import (
    Claim,
    Service,
    Worker,
    WorkerRegistry,
    WorkerState,
    find_ready_fault,
)
from headrace.errors import Code
from headrace.protocol.messages import (
    Done,
    Failed,
    Hello,
    Outcome,
    Ready,
    Status,
    Value,
    WorkerHello,
)

_NS_PER_MS = 1_000_000

#: How long a worker's id is probed, in heartbeat intervals: one, and a quarter for the way there and back.
_PROBE_INTERVALS = 1.25


class BrokerCore:
    """The state of one broker. Invariants: see check_invariants, which every test calls."""

    def __init__(self, settings: CoreSettings, boot: int) -> None:
        """Make an empty broker.

        Args:
            settings: every bound and rate.
            boot: random u64 that names this run of the broker.
        """
        self.settings = settings
        self.boot = boot
        self.is_draining = False
        self.late_done_count = 0
        self.misbehaved_by_code: dict[str, int] = {}
        self.lost_workers_count = 0
        self.requeued_count = 0
        self._next_tick_ns: int | None = None
        heartbeat_ns = settings.heartbeat_ms * _NS_PER_MS
        self._story = Story()
        self.beats = Heartbeats(heartbeat_ns, settings.heartbeats_missed)
        self.models = ModelTable(settings)
        self.streams = StreamTable(
            settings.max_streams, settings.stream_idle_ms * _NS_PER_MS, self.beats.silence_ns
        )
        self.producers = ProducerRegistry()
        self.workers = WorkerRegistry()
        self.ledger = Ledger()
        self.costs = CostTable()
        self.outcomes = OutcomeLog(boot, settings, self.streams, self.producers, self._story)
        self.admission = Admission(
            boot, settings, self.models, self.streams, self.producers, self.outcomes, self._story
        )
        self.dispatcher = Dispatcher(self.models, self.costs, self.ledger, self.streams, self._story)

    # -- the one mutator ----------------------------------------------------------------------------

    def handle(self, event: events.Event, now_ns: int) -> list[Action]:  # noqa: C901 - one case per event
        """Take in one event and return what is to be done about it, in this order.

        Args:
            event: what has happened.
            now_ns: monotonic time; never less than that of the event before.
        """
        actions: list[Action] = []
        self._next_tick_ns = now_ns
        match event:
            case events.FrameArrived(peer, frame):
                # The one event that comes per frame: what it earns in credit is told at the Tick.
                self.admission.admit(peer, frame, now_ns, actions)
                return actions
            case events.ProducerArrived(peer, hello):
                self._on_producer_arrived(peer, hello, now_ns, actions)
            case events.ProducerLeft(peer):
                session = self.producers.by_peer.get(peer)
                if session is not None:
                    self._close_session(session)
            case events.PeerHeard():
                self._on_heard(event, now_ns, actions)
            case events.PeerUnreachable(peer):
                self._on_unreachable(peer, now_ns, actions)
            case events.PeerMisbehaved(_, code):
                self.misbehaved_by_code[code] = self.misbehaved_by_code.get(code, 0) + 1
            case events.WorkerArrived(peer, hello):
                self._on_worker_arrived(peer, hello, now_ns, actions)
            case events.WorkerReady(peer, ready):
                self._on_worker_ready(peer, ready, now_ns, actions)
            case events.WorkerLeft(peer):
                self._on_worker_left(peer, now_ns, actions)
            case events.BatchDone(peer, done):
                self._on_batch_done(peer, done, now_ns, actions)
            case events.BatchFailed(peer, failed):
                self._on_batch_failed(peer, failed, now_ns, actions)
            case events.DrainRequested():
                self._on_drain_requested(actions)
            case events.GraceEnded():
                self._on_grace_ended(now_ns, actions)
            case events.Tick():
                self._on_tick(now_ns, actions)
            case _:
                assert_never(event)
        self.producers.flush(actions)
        return actions

    # -- time ---------------------------------------------------------------------------------------

    def _on_tick(self, now_ns: int, actions: list[Action]) -> None:
        owed, silent = self.beats.pop_due(now_ns)
        for pulse in silent:
            self._on_silent(pulse.peer, pulse.is_worker, now_ns, actions)
        actions += [SendHeartbeat(pulse.peer, pulse.is_worker) for pulse in owed]
        claims = [claim for claim in self.workers.claims.values() if claim.until_ns <= now_ns]
        for claim in claims:
            self._lose(self.workers.by_id[claim.hello.worker], "silent when probed", now_ns, actions)
        self._expire(now_ns, actions)
        while (stream := self.streams.pop_idle(now_ns)) is not None:
            self.admission.forget(stream)
        self.dispatcher.run(now_ns, actions)
        self._next_tick_ns = self._find_next_tick()

    def _expire(self, now_ns: int, actions: list[Action]) -> None:
        for served in self.models.classes:
            if not served.waiting_count:
                continue
            expired = served.suspects.pop_expired(now_ns) + served.queue.pop_expired(now_ns)
            served.expired_count += len(expired)
            for record in expired:
                waited_ms = (now_ns - record.received_ns) // _NS_PER_MS
                message = f"it waited {waited_ms} ms and its time to live is over"
                self._finish(record, End(Status.EXPIRED, Code.DEADLINE, message), now_ns, actions)

    def _find_next_tick(self) -> int | None:
        times = [
            self.beats.next_ns(),
            self.workers.next_claim_ns(),
            self.streams.next_idle_ns(),
            self.dispatcher.look_again_ns,
        ]
        for served in self.models.classes:
            if served.waiting_count:
                times += (served.queue.next_expiry_ns(), served.suspects.next_expiry_ns())
        return min((time for time in times if time is not None), default=None)

    def next_wakeup_ns(self) -> int | None:
        """Return when a Tick is due, None when only an event can bring work. After any event but a Tick
        that is at once: the turn is not over."""
        return self._next_tick_ns

    # -- producers ----------------------------------------------------------------------------------

    def _on_producer_arrived(self, peer: bytes, hello: Hello, now_ns: int, actions: list[Action]) -> None:
        session = self.producers.by_peer.get(peer)
        if session is not None and session.epoch == hello.epoch:
            # A repeated Hello (its Welcome was slow) must not begin the count again.
            session.pulse.last_heard_ns = now_ns
            self._welcome(peer, actions)
            return
        if session is not None:
            self._close_session(session)
        earlier = self.producers.by_epoch.get(hello.epoch)
        if earlier is not None:
            # The same producer on a new connection.
            self._close_session(earlier)
        if len(self.producers) >= self.settings.max_producers:
            message = f"{len(self.producers)} producers are connected, the limit (max_producers)"
            actions.append(RefusePeer(peer, Code.TOO_MANY_PRODUCERS, message))
            return
        pulse = self.beats.start(peer, is_worker=False, now_ns=now_ns)
        self.producers.open(peer, hello.epoch, hello.name, pulse)
        self._welcome(peer, actions)

    def _welcome(self, peer: bytes, actions: list[Action]) -> None:
        credits_count = self.settings.credits_per_producer
        actions.append(WelcomeProducer(peer, credits_count, self.models.specs()))

    def _close_session(self, session: ProducerSession) -> None:
        for name in session.streams:
            self.streams.by_name[name].release_owner()
        self.beats.stop(session.pulse)
        self.producers.close(session)

    def _lose_producer(self, session: ProducerSession, reason: str, actions: list[Action]) -> None:
        values: dict[str, Value] = {
            "producer": session.name,
            "reason": reason,
            "streams": list(session.streams),
        }
        self._close_session(session)
        actions.append(Report("producer lost", values))

    # -- life signs ---------------------------------------------------------------------------------

    def _on_heard(self, event: events.PeerHeard, now_ns: int, actions: list[Action]) -> None:
        peer = event.peer
        worker = self.workers.by_peer.get(peer)
        session = self.producers.by_peer.get(peer)
        if worker is not None:
            self._heard_from(worker, now_ns, actions)
        if session is not None:
            session.pulse.last_heard_ns = now_ns
        is_claiming = any(claim.peer == peer for claim in self.workers.claims.values())
        if worker is None and session is None and event.is_heartbeat and not is_claiming:
            self._refuse_unknown(peer, actions, is_worker=event.is_worker)

    def _heard_from(self, worker: Worker, now_ns: int, actions: list[Action]) -> None:
        worker.pulse.last_heard_ns = now_ns
        claim = self.workers.claims.pop(worker.id, None)
        if claim is not None:
            self._refuse_id(claim.peer, worker, actions)

    def _refuse_id(self, peer: bytes, holder: Worker, actions: list[Action]) -> None:
        message = (
            f"worker id {holder.id} is in use by another process (pid {holder.hello.pid},"
            f" {holder.hello.device}): give this one an id of its own"
        )
        actions.append(RefusePeer(peer, Code.ID_IN_USE, message, is_worker=True))

    def _refuse_unknown(self, peer: bytes, actions: list[Action], *, is_worker: bool) -> None:
        message = "this connection has not introduced itself, or was taken for dead: say hello again"
        actions.append(RefusePeer(peer, Code.UNKNOWN_PEER, message, is_worker=is_worker))

    def _on_unreachable(self, peer: bytes, now_ns: int, actions: list[Action]) -> None:
        self.workers.pop_claim_of(peer)
        self._on_gone(peer, "unreachable", now_ns, actions)

    def _on_silent(self, peer: bytes, is_worker: bool, now_ns: int, actions: list[Action]) -> None:
        worker = self.workers.by_peer.get(peer) if is_worker else None
        session = None if is_worker else self.producers.by_peer.get(peer)
        if worker is not None:
            self._lose(worker, "silent", now_ns, actions)
        if session is not None:
            self._lose_producer(session, "silent", actions)

    def _on_gone(self, peer: bytes, reason: str, now_ns: int, actions: list[Action]) -> None:
        worker = self.workers.by_peer.get(peer)
        session = self.producers.by_peer.get(peer)
        if worker is not None:
            self._lose(worker, reason, now_ns, actions)
        if session is not None:
            self._lose_producer(session, reason, actions)

    # -- workers ------------------------------------------------------------------------------------

    def _on_worker_arrived(self, peer: bytes, hello: WorkerHello, now_ns: int, actions: list[Action]) -> None:
        known = self.workers.by_peer.get(peer)
        if known is not None:
            if (known.id, known.hello.instance) == (hello.worker, hello.instance):
                self._heard_from(known, now_ns, actions)
                actions.append(SetUpWorker(peer, self.models.specs()))
                return
            self._lose(known, "another worker spoke on its connection", now_ns, actions)
        self.workers.pop_claim_of(peer)
        holder = self.workers.by_id.get(hello.worker)
        if holder is None:
            self._add_worker(peer, hello, now_ns, actions)
        elif holder.hello.instance == hello.instance:
            # The same process on a new connection: it lives, so none of its frames has killed it.
            self._lose(holder, "reconnected", now_ns, actions, is_suspicious=False)
            self._add_worker(peer, hello, now_ns, actions)
        else:
            self._claim_id(peer, hello, holder, now_ns, actions)

    def _claim_id(
        self, peer: bytes, hello: WorkerHello, holder: Worker, now_ns: int, actions: list[Action]
    ) -> None:
        claim = self.workers.claims.get(holder.id)
        if claim is not None and claim.hello.instance != hello.instance:
            self._refuse_id(peer, holder, actions)
            return
        until_ns = now_ns + int(self.beats.interval_ns * _PROBE_INTERVALS)
        self.workers.claims[holder.id] = Claim(peer, hello, until_ns)
        if claim is None:
            actions.append(SendHeartbeat(holder.peer, is_worker=True))

    def _add_worker(self, peer: bytes, hello: WorkerHello, now_ns: int, actions: list[Action]) -> None:
        if len(self.workers) >= self.settings.max_workers:
            message = f"{len(self.workers)} workers are connected, the limit (max_workers)"
            actions.append(RefusePeer(peer, Code.TOO_MANY_WORKERS, message, is_worker=True))
            return
        self.workers.add(peer, hello, self.beats.start(peer, is_worker=True, now_ns=now_ns))
        actions.append(SetUpWorker(peer, self.models.specs()))
        actions.append(
            Report("worker arrived", {"worker": hello.worker, "device": hello.device, "pid": hello.pid})
        )

    def _on_worker_ready(self, peer: bytes, ready: Ready, now_ns: int, actions: list[Action]) -> None:
        worker = self.workers.by_peer.get(peer)
        if worker is None:
            self._refuse_unknown(peer, actions, is_worker=True)
            return
        self._heard_from(worker, now_ns, actions)
        fault = find_ready_fault(ready, worker, self.models)
        if fault is not None:
            actions.append(RefusePeer(peer, Code.BAD_READY, fault, is_worker=True))
            actions.append(Report("worker refused", {"worker": worker.id, "reason": fault}))
            return
        self.dispatcher.pools.leave(worker)
        self.costs.forget(worker.id)
        worker.state = WorkerState.READY
        worker.slots = ready.slots
        worker.ready_ns = now_ns
        worker.notes = tuple(note for profile in ready.models for note in profile.notes)
        worker.services = self._services_of(worker, ready)
        self.dispatcher.pools.join(worker)
        names: list[Value] = [f"{profile.name}:{profile.version}" for profile in ready.models]
        actions.append(Report("worker ready", {"worker": worker.id, "slots": worker.slots, "models": names}))

    def _services_of(self, worker: Worker, ready: Ready) -> dict[int, Service]:
        services: dict[int, Service] = {}
        for profile in ready.models:
            self.models.learn(profile)
            model = self.models.get(profile.name, profile.version)
            if model is None:
                continue
            for described in profile.classes:
                served = model.classes[described.size_class.name]
                self.costs.seed(worker.id, described, profile.name, profile.version)
                limits = [served.spec.max_batch_size, described.size_class.max_batch_size]
                limits += [size for size, _ in described.buckets[-1:]]
                cost_ns = self.costs.predict_ns(
                    worker.id, profile.name, profile.version, served.spec.name, min(limits)
                )
                services[served.index] = Service(served, min(limits), cost_ns)
        return services

    def _on_worker_left(self, peer: bytes, now_ns: int, actions: list[Action]) -> None:
        worker = self.workers.by_peer.get(peer)
        if worker is None:
            self.workers.pop_claim_of(peer)
            return
        self._heard_from(worker, now_ns, actions)
        self.dispatcher.pools.leave(worker)
        worker.state = WorkerState.LEAVING
        actions.append(Report("worker leaving", {"worker": worker.id, "batches": len(worker.in_flight)}))
        self._forget_if_done(worker, now_ns, actions)

    def _forget_if_done(self, worker: Worker, now_ns: int, actions: list[Action]) -> None:
        if worker.state is WorkerState.LEAVING and not worker.in_flight:
            self._remove(worker, now_ns, actions)

    def _lose(
        self,
        worker: Worker,
        reason: str,
        now_ns: int,
        actions: list[Action],
        *,
        is_suspicious: bool = True,
    ) -> None:
        """A worker is gone: put its frames back. ``is_suspicious`` when one of them may have killed it."""
        batches = list(worker.in_flight.values())
        for batch in batches:
            self.ledger.close(batch)
        values: dict[str, Value] = {
            "worker": worker.id,
            "reason": reason,
            "batches": len(batches),
            "frames": sum(len(batch.records) for batch in batches),
        }
        actions.append(Report("worker lost", values))
        if is_suspicious:
            self.lost_workers_count += 1
            for batch in batches:
                self._suspect(batch, worker, now_ns, actions)
        else:
            for batch in reversed(batches):
                self._put_back(batch, now_ns)
        self._remove(worker, now_ns, actions)

    def _remove(self, worker: Worker, now_ns: int, actions: list[Action]) -> None:
        self.dispatcher.pools.leave(worker)
        self.beats.stop(worker.pulse)
        self.costs.forget(worker.id)
        claim = self.workers.remove(worker)
        if claim is not None:
            self._add_worker(claim.peer, claim.hello, now_ns, actions)

    # -- batches ------------------------------------------------------------------------------------

    def _suspect(self, batch: InFlightBatch, worker: Worker, now_ns: int, actions: list[Action]) -> None:
        for record in batch.records:
            record.lost_with += 1
            if record.lost_with < self.settings.max_attempts:
                record.is_suspect = True
                self._requeue(record, now_ns, f"lost with {worker.id}")
                batch.served.suspects.push(record)
                continue
            code = Code.POISON_FRAME if batch.is_alone else Code.WORKER_LOST
            message = f"{record.lost_with} workers were lost while they had it, {worker.id} the last"
            end = End(Status.ERROR, code, message, worker.id, len(batch.records))
            self._finish(record, end, now_ns, actions)

    def _put_back(self, batch: InFlightBatch, now_ns: int) -> None:
        """Back to the front of the queue, last frame first, so that the batch keeps its order."""
        for record in reversed(batch.records):
            self._requeue(record, now_ns, f"batch {batch.batch} handed back")
            if record.is_suspect:
                batch.served.suspects.push(record)
            else:
                batch.served.queue.push_front(record, now_ns)

    def _requeue(self, record: FrameRecord, now_ns: int, why: str) -> None:
        record.state = FrameState.QUEUED
        self.requeued_count += 1
        self._story.note(now_ns, record, "requeued", why)

    def _find_batch(
        self, peer: bytes, batch_id: int, now_ns: int, actions: list[Action]
    ) -> InFlightBatch | None:
        """Return the batch that a worker speaks of, None when that is no longer, or never was, its own."""
        worker = self.workers.by_peer.get(peer)
        if worker is None:
            self._refuse_unknown(peer, actions, is_worker=True)
        else:
            self._heard_from(worker, now_ns, actions)
            batch = worker.in_flight.get(batch_id)
            if batch is not None:
                return batch
        self.late_done_count += 1
        return None

    def _on_batch_done(self, peer: bytes, done: Done, now_ns: int, actions: list[Action]) -> None:
        batch = self._find_batch(peer, done.batch, now_ns, actions)
        if batch is None:
            return
        worker, served, count = batch.worker, batch.served, len(batch.records)
        self.ledger.close(batch)
        # No batch runs longer than since its dispatch, whatever the worker's clock says.
        served.turnaround_ns = now_ns - batch.sent_ns
        ran_ns = min(done.ran_us * 1000, served.turnaround_ns)
        worker.ran_ns += ran_ns
        self.dispatcher.learn(worker, served, count, ran_ns)
        self.dispatcher.settle(worker, now_ns)
        if len(done.results) == count:
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
                )
                self.outcomes.finish(record, end, now_ns, actions)
        else:
            message = f"batch {batch.batch}: expected {count} results, got {len(done.results)}"
            end = End(Status.ERROR, Code.RESULT_COUNT, message, worker.id, count)
            for record in batch.records:
                self.outcomes.finish(record, end, now_ns, actions)
            actions.append(Report("wrong result count", {"worker": worker.id, "batch": batch.batch}))
        self._forget_if_done(worker, now_ns, actions)

    def _on_batch_failed(self, peer: bytes, failed: Failed, now_ns: int, actions: list[Action]) -> None:
        batch = self._find_batch(peer, failed.batch, now_ns, actions)
        if batch is None:
            return
        worker, records = batch.worker, batch.records
        self.ledger.close(batch)
        self.dispatcher.settle(worker, now_ns)
        if failed.code == Code.SHUTDOWN:
            # Handed back unrun by a worker that stops.
            self._put_back(batch, now_ns)
        elif len(records) == 1:
            message = f"the batch of this frame alone failed: {failed.message}"
            end = End(Status.ERROR, Code.BATCH_FAILED, message, worker.id, 1)
            self.outcomes.finish(records[0], end, now_ns, actions)
        else:
            half = (len(records) + 1) // 2
            for part in (records[:half], records[half:]):
                for record in part:
                    self._requeue(record, now_ns, f"batch {batch.batch} failed: {failed.code}")
                batch.served.queue.push_exact(part)
        values: dict[str, Value] = {
            "worker": worker.id,
            "batch": batch.batch,
            "frames": len(records),
            "code": failed.code,
        }
        actions.append(Report("batch failed", values))
        self._forget_if_done(worker, now_ns, actions)

    def _finish(self, record: FrameRecord, end: End, now_ns: int, actions: list[Action]) -> None:
        """End a frame that waited."""
        stream = self.streams.by_name[record.frame.stream]
        if stream.latest is record:
            stream.latest = None
        self.outcomes.finish(record, end, now_ns, actions)

    # -- drain --------------------------------------------------------------------------------------

    def _on_drain_requested(self, actions: list[Action]) -> None:
        if not self.is_draining:
            self.is_draining = True
            self.admission.is_draining = True
            actions.append(Report("drain started", {"unfinished": self.outcomes.account.unfinished}))

    def _on_grace_ended(self, now_ns: int, actions: list[Action]) -> None:
        self._on_drain_requested(actions)
        records: list[FrameRecord] = []
        for served in self.models.classes:
            records += served.suspects.pop_all()
            records += _pop_all(served)
        for batch in list(self.ledger.batches.values()):
            self.ledger.close(batch)
            self.dispatcher.settle(batch.worker, now_ns)
            actions.append(CancelBatch(batch.worker.peer, batch.batch))
            records += batch.records
        records.sort(key=lambda record: record.number)
        for record in records:
            end = End(Status.ERROR, Code.SHUTDOWN, "the broker stopped before it was finished")
            self._finish(record, end, now_ns, actions)

    # -- questions ----------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        """Return the account of all frames so far (a copy)."""
        return replace(self.outcomes.account)

    @property
    def is_drained(self) -> bool:
        """True when a drain was asked for and every admitted frame has its outcome."""
        return self.is_draining and self.outcomes.account.unfinished == 0

    def positions(self, topics: list[str]) -> dict[str, Value]:
        """Return {"boot", "streams": {stream: [oldest retained pub_seq, next pub_seq]}} for the streams
        that the topics cover ("cam-1" + NUL exactly, any other text as a prefix)."""
        streams: dict[str, Value] = {
            name: list(position) for name, position in self.outcomes.positions(topics).items()
        }
        return {"boot": self.boot, "streams": streams}

    def replay(
        self, stream: str, boot: int, first: int, last: int, max_bytes: int
    ) -> tuple[list[Outcome], list[tuple[int, int]], bool]:
        """See OutcomeLog.replay: retained outcomes first to last (inclusive), lost ranges [start, stop),
        and whether there is more."""
        return self.outcomes.replay(stream, boot, first, last, max_bytes)

    def story(self, stream: str, epoch: int, seq: int) -> list[str]:
        """Return what is remembered of a frame's way, one line a transition."""
        return self._story.of(stream, epoch, seq)

    def status(self, now_ns: int) -> dict[str, Value]:
        """Return what `headrace status` and the metrics show; msgpack can hold it."""
        return status_of(self, now_ns)

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself: always a bug of ours."""
        self.outcomes.check_invariants()
        self.streams.check_invariants()
        self.producers.check_invariants(self.settings.credits_per_producer)
        self.workers.check_invariants()
        self.ledger.check_invariants()
        places: dict[int, int] = {}
        for served in self.models.classes:
            served.queue.check_invariants()
            for record in (*served.queue, *served.suspects):
                places[record.number] = places.get(record.number, 0) + 1
        for batch in self.ledger.batches.values():
            for record in batch.records:
                places[record.number] = places.get(record.number, 0) + 1
        if self.outcomes.unfinished_bytes > self.settings.max_bytes:
            raise AssertionError(f"{self.outcomes.unfinished_bytes} bytes, limit {self.settings.max_bytes}")
        for stream in self.streams.by_name.values():
            for record in stream.order:
                expected = 0 if record.state is FrameState.FINISHED else 1
                if places.pop(record.number, 0) != expected:
                    lines = self.story(stream.name, record.epoch, record.seq)
                    raise AssertionError(f"frame {record.number} is {record.state}: {lines}")
        if places:
            raise AssertionError(f"frames {list(places)} are held but belong to no stream")


def _pop_all(served: ServedClass) -> list[FrameRecord]:
    records = list(served.queue)
    for record in records:
        served.queue.remove(record)
    return records
