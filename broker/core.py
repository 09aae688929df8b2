"""The broker's core: past facts in, imperatives out. Composes the modules beside it and owns no policy.

Not here: sockets, time, logging (shell.py); the rules themselves (each in the module that it names).

Theory of operation. ``handle`` takes one event and the time and returns what is to be done, in order. No
event but ``Tick`` dispatches: the shell hands over all input of a turn first and then one Tick, in which
the core expires, closes batches and dispatches once, with everything known. Frames wait in their class's
queue, are with a worker (the ledger), or are finished and wait for their turn in their stream (the outcome
log); each ends exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from headrace.broker import events
from headrace.broker.actions import (
    Action,
    CancelBatch,
    RefusePeer,
    Report,
    SendHeartbeat,
    WelcomeProducer,
)
from headrace.broker.admission import Admission
from headrace.broker.batch_ends import BatchEnds
from headrace.broker.costs import CostTable
from headrace.broker.dispatch import Dispatcher
from headrace.broker.forecast import Forecast
from headrace.broker.heartbeats import Heartbeats, Pulse
from headrace.broker.hedging import Hedges
from headrace.broker.inflight import Ledger
from headrace.broker.model_table import ModelTable, ServedClass
from headrace.broker.outcomes import Account, OutcomeLog
from headrace.broker.producer_registry import ProducerRegistry, ProducerSession
from headrace.broker.quarantine import Quarantine, ReadSlot, no_slots
from headrace.broker.records import End, FrameRecord, FrameState
from headrace.broker.recovery import Recovery
from headrace.broker.reloads import Reloads
from headrace.broker.restored import RestoredStream
from headrace.broker.room import Room
from headrace.broker.settings import CoreSettings
from headrace.broker.staleness import Staleness
from headrace.broker.status import MAX_STREAMS_PER_PAGE, status_of
from headrace.broker.stream_table import StreamTable
from headrace.broker.trace import Story
from headrace.broker.traffic import Traffic
from headrace.broker.worker_life import WorkerLife
from headrace.broker.worker_registry import WorkerRegistry
from headrace.errors import Code
from headrace.protocol.messages import (
    Outcome,
    ShmRef,
    Status,
    Value,
)

_NS_PER_MS = 1_000_000


class BrokerCore:
    """The state of one broker. Invariants: see check_invariants, which every test calls."""

    def __init__(self, settings: CoreSettings, boot: int, read_slot: ReadSlot = no_slots) -> None:
        """Make an empty broker.

        Args:
            settings: every bound and rate.
            boot: random u64 that names this run of the broker.
            read_slot: returns the bytes of a payload in shared memory, None when they are gone.
        """
        self.settings = settings
        self.boot = boot
        self.is_draining = False
        self.misbehaved_by_code: dict[str, int] = {}
        self._next_tick_ns: int | None = None
        story = self._story = Story()
        beats = self.beats = Heartbeats(settings.heartbeat_ms * _NS_PER_MS, settings.heartbeats_missed)
        models = self.models = ModelTable(settings)
        streams = self.streams = StreamTable(
            settings.max_streams, settings.stream_idle_ms * _NS_PER_MS, beats.silence_ns
        )
        self.staleness = Staleness(settings.stream_stale_ms * _NS_PER_MS, streams)
        producers = self.producers = ProducerRegistry()
        workers = self.workers = WorkerRegistry()
        ledger = self.ledger = Ledger()
        hedges = self.hedges = Hedges(settings, ledger)
        costs = self.costs = CostTable()
        traffic = Traffic(settings.limits.priority_levels)
        outcomes = self.outcomes = OutcomeLog(boot, settings, streams, producers, story)
        self.quarantine = Quarantine(settings.quarantine_ms, settings.quarantine_frames, read_slot)
        recovery = self.recovery = Recovery(
            settings.max_attempts, streams, outcomes, self.quarantine, ledger, story
        )
        dispatcher = self.dispatcher = Dispatcher(
            settings, models, costs, ledger, hedges, streams, recovery, traffic, story
        )
        room = Room(settings, outcomes, self.quarantine, Forecast(models, dispatcher.pools, costs))
        self.admission = Admission(
            boot, settings, models, streams, producers, outcomes, room, traffic, self.staleness, story
        )
        self.life = WorkerLife(
            settings.max_workers, models, workers, beats, costs, hedges, dispatcher, recovery
        )
        self.reloads = Reloads(models, workers, ledger, self.life, costs)
        self.batch_ends = BatchEnds(workers, self.life, dispatcher, hedges, recovery, outcomes, ledger)

    def restore(self, streams: Sequence[RestoredStream], now_ns: int) -> None:
        """Take in what earlier boots finished, before the first event: such frames, sent again, are counted
        as finished and not run again. Beyond max_streams the streams that come first are left out."""
        for restored in streams[-self.settings.max_streams :]:
            self.streams.restore(restored, self.settings.credits_per_producer, now_ns)

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
            case events.FramesArrived(peer, frames):
                for frame in frames:
                    self.admission.admit(peer, frame, now_ns, actions)
                return actions
            case events.ProducerArrived():
                self._on_producer_arrived(event, now_ns, actions)
            case events.ArenaClosed(arena):
                self.producers.arenas.pop(arena, None)
            case events.ProducerLeft(peer):
                session = self.producers.by_peer.get(peer)
                if session is not None:
                    for name in session.streams:
                        self.streams.by_name[name].has_ended = True
                    self._close_session(session)
            case events.PeerHeard():
                self._on_heard(event, now_ns, actions)
            case events.PeerUnreachable():
                self._on_unreachable(event, now_ns, actions)
            case events.PeerMisbehaved(peer, code, kind):
                self.misbehaved_by_code[code] = self.misbehaved_by_code.get(code, 0) + 1
                if peer is not None:
                    self._on_heard(events.PeerHeard(peer), now_ns, actions)
                    self.life.misread(peer, code, kind, now_ns, actions)
            case events.WorkerArrived(peer, hello):
                self.life.arrive(peer, hello, now_ns, actions)
            case events.WorkerReady(peer, ready):
                self.life.ready(peer, ready, now_ns, actions)
            case events.WorkerLeft(peer):
                self.life.leave(peer, now_ns, actions)
            case events.BatchDone(peer, done):
                self.batch_ends.done(peer, done, now_ns, actions)
            case events.BatchFailed(peer, failed):
                self.batch_ends.failed(peer, failed, now_ns, actions)
            case events.DrainRequested():
                self._on_drain_requested(actions)
            case events.GraceEnded():
                self._on_grace_ended(now_ns, actions)
            case events.Tick():
                self._on_tick(now_ns, actions)
            case _:
                self.reloads.handle(event, now_ns, actions)
        self.producers.flush(actions)
        return actions

    # -- time ---------------------------------------------------------------------------------------

    def _on_tick(self, now_ns: int, actions: list[Action]) -> None:
        owed, silent = self.beats.pop_due(now_ns)
        for pulse in silent:
            self._on_silent(pulse, now_ns, actions)
        actions += [SendHeartbeat(pulse.peer, pulse.is_worker) for pulse in owed]
        self.life.lose_unanswering(now_ns, actions)
        overdue = self.hedges.overdue(now_ns)
        if overdue:
            self.batch_ends.care_for_overdue(overdue, now_ns, actions)
        # After everything that puts frames back in line: their deadline may have come meanwhile.
        self._expire(now_ns, actions)
        for stale in self.staleness.pop_stale(now_ns):
            quiet_ms = (now_ns - stale.last_frame_ns) // _NS_PER_MS
            actions.append(Report("stream stale", {"stream": stale.name, "quiet_ms": quiet_ms}))
        while (stream := self.streams.pop_idle(now_ns)) is not None:
            self.admission.forget(stream)
        self.reloads.run(now_ns, actions)
        self.dispatcher.run(now_ns, actions)
        self._next_tick_ns = self._find_next_tick()

    def _expire(self, now_ns: int, actions: list[Action]) -> None:
        for served in self.models.classes:
            expired = served.suspects.pop_expired(now_ns) + served.queue.pop_expired(now_ns)
            if not expired:
                continue
            served.expired_count += len(expired)
            for record in expired:
                waited_ms = (now_ns - record.received_ns) // _NS_PER_MS
                message = f"it waited {waited_ms} ms and its time to live is over"
                self.recovery.end_waiting(
                    record, End(Status.EXPIRED, Code.DEADLINE, message), now_ns, actions
                )

    def _find_next_tick(self) -> int | None:
        times: list[int | None] = [
            self.beats.next_ns(),
            self.life.next_ns(),
            self.streams.next_idle_ns(),
            self.staleness.next_ns(),
            self.hedges.next_ns(),
            self.reloads.next_ns(),
            self.dispatcher.look_again_ns,
        ]
        for served in self.models.classes:
            if served.queue:
                times.append(served.queue.next_expiry_ns())
            if served.suspects:
                times.append(served.suspects.next_expiry_ns())
        return min([time for time in times if time is not None], default=None)

    def next_wakeup_ns(self) -> int | None:
        """Return when a Tick is due, None when only an event can bring work. After any event but a Tick
        that is at once: the turn is not over."""
        return self._next_tick_ns

    # -- producers ----------------------------------------------------------------------------------

    def _on_producer_arrived(self, event: events.ProducerArrived, now_ns: int, actions: list[Action]) -> None:
        peer, hello = event.peer, event.hello
        session = self.producers.by_peer.get(peer)
        if session is not None and session.epoch == hello.epoch:
            # A repeated Hello (its Welcome was slow) must not begin the count again.
            session.pulse.last_heard_ns = now_ns
            self.producers.use_arena(session, hello.arena, event.arena_bytes)
            self._welcome(session, actions)
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
        self._welcome(self.producers.open(peer, hello, pulse, event.arena_bytes), actions)

    def _welcome(self, session: ProducerSession, actions: list[Action]) -> None:
        credits_count, specs = self.settings.credits_per_producer, self.models.specs()
        actions.append(WelcomeProducer(session.peer, credits_count, specs, bool(session.arena)))

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
            self.life.hear(worker, now_ns)
            if event.probe is not None:
                self.life.take_answer(worker, event.probe, actions)
        if session is not None:
            session.pulse.last_heard_ns = now_ns
        is_claiming = any(claim.peer == peer for claim in self.workers.claims.values())
        if worker is None and session is None and event.is_heartbeat and not is_claiming:
            self.life.refuse_unknown(peer, actions, is_worker=event.is_worker)

    def _on_unreachable(self, event: events.PeerUnreachable, now_ns: int, actions: list[Action]) -> None:
        self.workers.pop_claim_of(event.peer)
        worker = self.workers.by_peer.get(event.peer)
        session = self.producers.by_peer.get(event.peer)
        if worker is not None:
            for batch_id in event.undelivered:
                batch = worker.in_flight.get(batch_id)
                if batch is not None and self.hedges.give_up(batch, now_ns, actions):
                    self.recovery.put_back(batch, now_ns, actions)
            self.life.lose(worker, "unreachable", now_ns, actions)
        if session is not None:
            self._lose_producer(session, "unreachable", actions)

    def _on_silent(self, pulse: Pulse, now_ns: int, actions: list[Action]) -> None:
        if pulse.is_worker:
            self.life.lose(self.workers.by_peer[pulse.peer], "silent", now_ns, actions)
        else:
            self._lose_producer(self.producers.by_peer[pulse.peer], "silent", actions)

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
            self.dispatcher.settle(batch, now_ns)
            if not batch.is_cancelled:
                actions.append(CancelBatch(batch.worker.peer, batch.batch))
            records += batch.unfinished
        # A frame of two copies is there twice.
        by_number = {record.number: record for record in records}
        for _, record in sorted(by_number.items()):
            end = End(Status.ERROR, Code.SHUTDOWN, "the broker stopped before it was finished")
            self.recovery.end_waiting(record, end, now_ns, actions)

    # -- questions ----------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        """Return the account of all frames so far (a copy)."""
        return replace(self.outcomes.account)

    @property
    def late_done_count(self) -> int:
        """Return how many answers came for batches that were no longer with their worker."""
        return self.batch_ends.late_done_count

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

    def arenas_in_use(self, arenas: Collection[str]) -> dict[str, None]:
        """Return those of the arenas that a connected producer or an unfinished frame needs.

        Looks through all unfinished frames, but only for arenas whose producers are gone."""
        known = {session.arena for session in self.producers.by_peer.values()}
        used = {name: None for name in arenas if name in known}
        if len(used) < len(arenas):
            for stream in self.streams.by_name.values():
                for record in stream.order:
                    payload = record.frame.payload
                    if isinstance(payload, ShmRef) and payload.arena in arenas:
                        used[payload.arena] = None
        return used

    def story(self, stream: str, epoch: int, seq: int) -> list[str]:
        """Return what is remembered of a frame's way, one line a transition."""
        return self._story.of(stream, epoch, seq)

    def status(
        self, now_ns: int, *, streams_after: str = "", max_streams: int = MAX_STREAMS_PER_PAGE
    ) -> dict[str, Value]:
        """Return what `headrace status` and the metrics show; msgpack can hold it. With ``max_streams`` 0 it
        is cheap however many streams there are."""
        return status_of(self, now_ns, streams_after, max_streams)

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself: always a bug of ours."""
        self.outcomes.check_invariants()
        self.streams.check_invariants()
        self.producers.check_invariants(self.settings.credits_per_producer)
        self.workers.check_invariants()
        self.ledger.check_invariants()
        self.reloads.check_invariants()
        places: dict[int, int] = {}
        for served in self.models.classes:
            served.queue.check_invariants()
            for record in (*served.queue, *served.suspects):
                places[record.number] = places.get(record.number, 0) + 1
        for batch in self.ledger.batches.values():
            # The frames of a batch with a hedge are in one place, however many workers have them.
            for record in batch.unfinished if not (batch.is_hedge and batch.twin) else ():
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
