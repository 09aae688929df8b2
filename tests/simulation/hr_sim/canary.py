"""Bugs planted into the core, one at a time: a simulator that lets one through is not worth its time.

Each canary replaces one method of the production core by one that is wrong now and then, as a slip would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from headrace.broker.actions import RefusePeer, SendReject
from headrace.broker.admission import Admission
from headrace.broker.batch_ends import BatchEnds
from headrace.broker.core import BrokerCore
from headrace.broker.dispatch import Dispatcher
from headrace.broker.heartbeats import Heartbeats
from headrace.broker.hedging import Hedges
from headrace.broker.inflight import Ledger
from headrace.broker.model_table import ServedModel
from headrace.broker.outcomes import OutcomeLog
from headrace.broker.producer_registry import ProducerRegistry
from headrace.broker.queues import ClassQueue
from headrace.broker.records import End, FrameState, Refusal
from headrace.broker.recovery import Recovery
from headrace.broker.reloads import Reloads
from headrace.broker.room import Room
from headrace.broker.size_class import SizeClasses
from headrace.broker.stream_table import EpochHistory
from headrace.broker.worker_life import WorkerLife
from headrace.clients.producer_session import ProducerSession
from headrace.errors import Code
from headrace.protocol.messages import Status
from hr_sim.options import draw
from hr_sim.world import SimulationError, World

#: name -> (class, method, what replaces it: a function of the original).
CANARIES: dict[str, tuple[type, str, Callable[[Any], Any]]] = {}


#: Faults switched on, as often a second, in the seeds of a canary whose bug needs several of them at once.
RATES: dict[str, dict[str, float]] = {}


def _plant(
    owner: type, method: str, **rates: float
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CANARIES[make.__name__] = (owner, method, make)
        RATES[make.__name__] = rates
        return make

    return add


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant one bug for as long as the context lasts."""
    owner, method, make = CANARIES[name]
    original = owner.__dict__[method]
    setattr(owner, method, make(original))
    try:
        yield
    finally:
        setattr(owner, method, original)


def catch(name: str, seeds: int) -> tuple[int | None, str]:
    """Return how many seeds it took to see the bug (None: not seen), and what was seen.

    Only a promise that is broken counts, in a seed that passes without the bug."""
    for seed in range(seeds):
        drawn = draw(seed)
        options = replace(drawn, rates={**drawn.rates, **RATES[name]})
        with planted(name):
            try:
                World(options).run()
                continue
            except SimulationError as error:
                finding = str(error).partition("\n")[0]
                cause = error.__cause__
        World(options).run()
        if isinstance(cause, TypeError | AttributeError):
            # The core has changed under the canary: it must be written anew.
            raise cause
        if isinstance(cause, AssertionError):
            return seed + 1, finding
    return None, f"{seeds} seeds passed"


# -- frames ------------------------------------------------------------------------------------------


@_plant(Recovery, "suspect")
def dropped_requeue(original: Any) -> Any:
    def suspect(self: Any, batch: Any, *rest: Any) -> None:
        if len(batch.records) > 1:
            batch.records = batch.records[:-1]
        original(self, batch, *rest)

    return suspect


@_plant(OutcomeLog, "_publish")
def double_publish(original: Any) -> Any:
    def publish(self: Any, stream: Any, outcome: Any, actions: Any) -> None:
        original(self, stream, outcome, actions)
        if outcome.seq % 50 == 49:
            original(self, stream, replace(outcome, pub_seq=stream.next_pub_seq), actions)

    return publish


@_plant(OutcomeLog, "_publish")
def skipped_pub_seq(original: Any) -> Any:
    def publish(self: Any, stream: Any, outcome: Any, actions: Any) -> None:
        original(self, stream, outcome, actions)
        if outcome.seq % 100 == 99:
            stream.ring.clear()
            stream.next_pub_seq += 1

    return publish


@_plant(OutcomeLog, "finish")
def order_bypassed(original: Any) -> Any:
    def finish(self: Any, record: Any, end: Any, now_ns: int, actions: Any) -> None:
        stream = self._streams.by_name[record.frame.stream]
        if end.status is Status.OK and record.state is not FrameState.FINISHED and record in stream.order:
            # Released as soon as it is done, whatever is before it.
            stream.order.remove(record)
            stream.order.appendleft(record)
        original(self, record, end, now_ns, actions)

    return finish


@_plant(OutcomeLog, "_release")
def byte_budget_leak(original: Any) -> Any:
    def release(self: Any, stream: Any, record: Any, end: Any, *rest: Any) -> None:
        original(self, stream, record, end, *rest)
        if end.status is Status.EXPIRED:
            self.unfinished_bytes += record.nbytes

    return release


@_plant(Room, "_check_bytes")
def byte_budget_ignored(_original: Any) -> Any:
    return lambda _self, _stream, _frame, _old: None


@_plant(OutcomeLog, "_release")
def miscounted_end(original: Any) -> Any:
    def release(self: Any, stream: Any, record: Any, end: Any, *rest: Any) -> None:
        original(self, stream, record, end, *rest)
        if end.status is Status.ERROR:
            self.account.error -= 1
            self.account.ok += 1

    return release


@_plant(EpochHistory, "has_seen")
def duplicate_unknown(original: Any) -> Any:
    def has_seen(self: Any, seq: int) -> bool:
        return original(self, seq) and seq != self.last_seq

    return has_seen


@_plant(Admission, "_push_latest")
def latest_supersedes_in_flight(original: Any) -> Any:
    last: dict[str, Any] = {}

    def push_latest(self: Any, stream: Any, record: Any, served: Any, now_ns: int, actions: Any) -> None:
        old = last.get(stream.name)
        last[stream.name] = record
        original(self, stream, record, served, now_ns, actions)
        if old is not None and old.state is FrameState.IN_FLIGHT and stream.order[0] is old:
            self._outcomes.finish(old, End(Status.SUPERSEDED, Code.NEWER_FRAME, ""), now_ns, actions)

    return push_latest


@_plant(Admission, "_refuse")
def reject_untold(original: Any) -> Any:
    def refuse(self: Any, *rest: Any) -> None:
        actions = rest[-1]
        original(self, *rest)
        actions[:] = [action for action in actions if not isinstance(action, SendReject)]

    return refuse


# -- credit ------------------------------------------------------------------------------------------


@_plant(ProducerRegistry, "conclude")
def credit_off_by_one(original: Any) -> Any:
    def conclude(self: Any, session: Any, status: Any) -> None:
        original(self, session, status)
        if session.finished == 40:
            session.finished += 1

    return conclude


@_plant(ProducerRegistry, "conclude_record")
def watermark_too_high(original: Any) -> Any:
    def conclude_record(self: Any, record: Any, status: Any) -> None:
        original(self, record, status)
        session = self.by_peer.get(record.peer)
        if session is not None and record.frame.stream in session.moved:
            session.moved[record.frame.stream] += 1

    return conclude_record


# -- batches -----------------------------------------------------------------------------------------


@_plant(ClassQueue, "pop_expired")
def expired_dispatched(original: Any) -> Any:
    def pop_expired(self: Any, now_ns: int) -> list[Any]:
        # Off by a moment: those whose deadline is just now are left in.
        return list(original(self, now_ns - 5_000_000))

    return pop_expired


@_plant(ClassQueue, "next_expiry_ns")
def expiry_not_woken_for(_original: Any) -> Any:
    return lambda _self: None


@_plant(Hedges, "overdue")
def ended_before_overdue(_original: Any) -> Any:
    # Every batch counts as overdue from the start: its frames end at their deadline, whoever has them.
    return lambda self, _now_ns: list(self._ledger.batches.values())


@_plant(ClassQueue, "_age")
def ageing_switched_off(_original: Any) -> Any:
    return lambda _self, _now_ns: None


@_plant(ClassQueue, "_best")
def priority_ignored(original: Any) -> Any:
    def best(self: Any) -> Any:
        for queue in self._queues:
            top = queue.index.peek()
            if top is not None:
                return self._live[top[1]]
        return original(self)

    return best


@_plant(WorkerLife, "ready")
def slot_exceeded(original: Any) -> Any:
    def ready(self: Any, peer: bytes, message: Any, *rest: Any) -> None:
        original(self, peer, replace(message, slots=message.slots + 1), *rest)

    return ready


@_plant(Dispatcher, "_take")
def batch_mixes_classes(original: Any) -> Any:
    def take(self: Any, served: Any, count: int, now_ns: int, *rest: Any) -> Any:
        records = original(self, served, count, now_ns, *rest)
        for other in self._models.classes:
            if other is not served and len(records) > 1 and len(other.queue) and not other.queue.has_exact:
                served.queue.push_front(records.pop(), now_ns)
                records += other.queue.take(1, now_ns)
                break
        return records

    return take


@_plant(Dispatcher, "_take")
def batch_too_large(original: Any) -> Any:
    return lambda self, served, count, *rest: original(self, served, count + 1, *rest)


@_plant(SizeClasses, "place")
def nearest_class(original: Any) -> Any:
    def place(self: Any, frame: Any) -> Any:
        placed = original(self, frame)
        names = self.names
        if getattr(placed, "name", None) in names[1:] and frame.seq is not None and frame.seq % 20 == 19:
            return self.get(names[0])
        return placed

    return place


# -- workers -----------------------------------------------------------------------------------------


@_plant(BatchEnds, "done")
def late_done_published(original: Any) -> Any:
    held: dict[int, Any] = {}

    def done(self: Any, peer: bytes, message: Any, now_ns: int, actions: Any) -> None:
        for batch in self._ledger.batches.values():
            held[batch.batch] = list(batch.records)
        is_known = message.batch in self._ledger.batches
        original(self, peer, message, now_ns, actions)
        if not is_known:
            for record in held.get(message.batch, ()):
                if self._outcomes._streams.by_name.get(record.frame.stream) is not None:
                    self._outcomes.finish(
                        record, End(Status.OK, worker="late", batch_size=1), now_ns, actions
                    )

    return done


@_plant(BatchEnds, "_recover_failed")
def neighbours_blamed(original: Any) -> Any:
    def recover_failed(self: Any, batch: Any, failed: Any, count: int, now_ns: int, actions: Any) -> None:
        if failed.code == Code.SHUTDOWN:
            original(self, batch, failed, count, now_ns, actions)
            return
        for record in batch.records:
            end = End(Status.ERROR, Code.BATCH_FAILED, "", batch.worker.id, len(batch.records))
            self._outcomes.finish(record, end, now_ns, actions)

    return recover_failed


@_plant(WorkerLife, "_claim_id", worker_crash=4.0, broker_pause=1.0, partition=2.0)
def stale_claim_kept(original: Any) -> Any:
    """As it was until seed 50: a worker killed twice within one probe was refused for good."""

    def claim_id(self: Any, peer: bytes, hello: Any, holder: Any, now_ns: int, actions: Any) -> None:
        claim = self._workers.claims.get(holder.id)
        if claim is not None and claim.hello.instance != hello.instance:
            actions.append(RefusePeer(peer, Code.ID_IN_USE, "", is_worker=True))
        else:
            original(self, peer, hello, holder, now_ns, actions)

    return claim_id


@_plant(BrokerCore, "_on_heard", worker_crash=2.0, worker_twin=1.0)
def any_heartbeat_answers_the_probe(original: Any) -> Any:
    """As it was until seed 1796070767099: a message of the holder from before its death refused its successor
    for good."""

    def on_heard(self: Any, event: Any, now_ns: int, actions: Any) -> None:
        worker = self.workers.by_peer.get(event.peer)
        claim = None if worker is None else self.workers.claims.get(worker.id)
        original(self, event if claim is None else replace(event, probe=claim.probe), now_ns, actions)

    return on_heard


@_plant(WorkerLife, "misread", garbage=4.0)
def unreadable_answer_waited_for(_original: Any) -> Any:
    """As it was once: the batch stayed in flight until its worker was taken for stuck."""
    return lambda *_: None


@_plant(Recovery, "suspect")
def poison_never_ends(original: Any) -> Any:
    def suspect(self: Any, batch: Any, *rest: Any) -> None:
        for record in batch.records:
            record.lost_with = 0
        original(self, batch, *rest)

    return suspect


@_plant(Recovery, "suspect")
def suspects_in_company(_original: Any) -> Any:
    def suspect(self: Any, batch: Any, *rest: Any) -> None:
        self.put_back(batch, *rest)

    return suspect


@_plant(Heartbeats, "pop_due")
def impatient_heartbeats(original: Any) -> Any:
    def pop_due(self: Any, now_ns: int) -> Any:
        self.silence_ns = self.interval_ns
        return original(self, now_ns)

    return pop_due


@_plant(Ledger, "close")
def batch_left_in_pool(original: Any) -> Any:
    def close(self: Any, batch: Any) -> None:
        original(self, batch)
        if batch.batch % 40 == 39:
            # Its slot is never given back.
            batch.worker.slots -= 1

    return close


@_plant(Hedges, "can_afford")
def hedge_budget_ignored(_original: Any) -> Any:
    return lambda _self, _count: True


@_plant(Hedges, "_cancel")
def hedge_loser_counts(_original: Any) -> Any:
    return lambda _self, _batch, _actions: None


# -- reloads -----------------------------------------------------------------------------------------


@_plant(Reloads, "_has_in_flight", reload=4.0, way_back=2.0)
def unloaded_in_flight(_original: Any) -> Any:
    return lambda _self, _model, _version: False


@_plant(ServedModel, "go_live", reload=4.0, way_back=2.0)
def a_class_is_left_behind(original: Any) -> Any:
    def go_live(self: Any, spec: Any) -> None:
        original(self, spec)
        next(iter(self.classes.values())).live_version = self.spec.version

    return go_live


@_plant(OutcomeLog, "_outcome_of", reload=4.0)
def outcome_names_the_configuration(original: Any) -> Any:
    def outcome_of(self: Any, pub_seq: int, record: Any, end: Any, now_ns: int) -> Any:
        return replace(original(self, pub_seq, record, end, now_ns), version=record.version)

    return outcome_of


# -- shared memory -----------------------------------------------------------------------------------


@_plant(BrokerCore, "arenas_in_use", producer_crash=2.0)
def arena_let_go_with_its_producer(_original: Any) -> Any:
    def arenas_in_use(self: Any, arenas: Any) -> Any:
        known = {session.arena for session in self.producers.by_peer.values()}
        return {name: None for name in arenas if name in known}

    return arenas_in_use


@_plant(Admission, "_check_slot", producer_pause=2.0)
def lane_of_sessions_alone(original: Any) -> Any:
    def check_slot(self: Any, arrival: Any, ref: Any) -> Any:
        if arrival.session is None:
            return Refusal(Code.LANE_UNAVAILABLE, "no session")
        return original(self, arrival, ref)

    return check_slot


@_plant(ProducerSession, "_take_credit", cut=4.0)
def slot_freed_when_sent_again(original: Any) -> Any:
    def take_credit(self: Any, credit: Any) -> Any:
        ended = original(self, credit)
        later = next(iter(self._kept.values()), None)
        if later is None:
            return ended
        return [
            replace(one, frame=replace(one.frame, payload=later.frame.payload))
            if one.frame.seq % 50 == 49
            else one
            for one in ended
        ]

    return take_credit


# -- outcomes ----------------------------------------------------------------------------------------


@_plant(OutcomeLog, "replay")
def replay_leaves_out(original: Any) -> Any:
    def replay(self: Any, *rest: Any) -> Any:
        outcomes, missed, has_more = original(self, *rest)
        return (outcomes[1:] if len(outcomes) > 2 else outcomes), missed, has_more

    return replay


@_plant(OutcomeLog, "replay")
def missed_too_much(original: Any) -> Any:
    def replay(self: Any, *rest: Any) -> Any:
        outcomes, missed, has_more = original(self, *rest)
        if len(outcomes) > 1:
            first = outcomes[0].pub_seq
            return outcomes[1:], [*missed, (first, first + 1)], has_more
        return outcomes, missed, has_more

    return replay
