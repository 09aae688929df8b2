"""The life of a worker, from its hello to its end, and what that means for ids, pools and frames.

Not here: what a worker is (worker_registry.py), batches that are done (core.py).
"""

from __future__ import annotations

from headrace.broker.actions import Action, RefusePeer, Report, SendHeartbeat, SetUpWorker
from headrace.broker.costs import CostTable
from headrace.broker.dispatch import Dispatcher
from headrace.broker.heartbeats import Heartbeats
from headrace.broker.hedging import Hedges
from headrace.broker.inflight import InFlightBatch
from headrace.broker.model_table import ModelTable
from headrace.broker.recovery import Recovery
from headrace.broker.worker_registry import (
    Claim,
    Service,
    Worker,
    WorkerRegistry,
    WorkerState,
    find_ready_fault,
)
from headrace.errors import Code
from headrace.protocol.messages import Done, Failed, ModelProfile, Ready, Value, WorkerHello

#: How long a worker's id is probed, in heartbeat intervals: one, and a quarter for the way there and back.
PROBE_INTERVALS = 1.25

#: What an unreadable message may have been, if it was the answer to a batch.
_MAY_ANSWER = frozenset({None, Done, Failed})


class WorkerLife:
    """Changes the worker registry and everything that hangs on it. Invariant: a worker that leaves the
    registry leaves pools, costs, heartbeats and ledger with it."""

    def __init__(
        self,
        max_workers: int,
        models: ModelTable,
        workers: WorkerRegistry,
        beats: Heartbeats,
        costs: CostTable,
        hedges: Hedges,
        dispatcher: Dispatcher,
        recovery: Recovery,
    ) -> None:
        self._max_workers = max_workers
        self._models = models
        self._workers = workers
        self._beats = beats
        self._costs = costs
        self._hedges = hedges
        self._dispatcher = dispatcher
        self._recovery = recovery
        self._last_probe = 0
        self.lost_count = 0
        self.changes_count = 0  # grows whenever a worker becomes READY, leaves, or has loaded a model

    # -- coming -------------------------------------------------------------------------------------

    def arrive(self, peer: bytes, hello: WorkerHello, now_ns: int, actions: list[Action]) -> None:
        known = self._workers.by_peer.get(peer)
        if known is not None:
            if (known.id, known.hello.instance) == (hello.worker, hello.instance):
                self.hear(known, now_ns)
                actions.append(SetUpWorker(peer, self._models.worker_specs(), hello.host_key))
                return
            self.lose(known, "another worker spoke on its connection", now_ns, actions)
        self._workers.pop_claim_of(peer)
        holder = self._workers.by_id.get(hello.worker)
        if holder is None:
            self._add_worker(peer, hello, now_ns, actions)
        elif holder.hello.instance == hello.instance:
            # The same process on a new connection: it has outlived the old one, so none of its frames has
            # killed it. Whether it lives now is asked anew, there, if another process claims its id.
            claim = self._workers.claims.pop(holder.id, None)
            self.lose(holder, "reconnected", now_ns, actions, is_suspicious=False)
            self._add_worker(peer, hello, now_ns, actions)
            if claim is not None:
                self._probe(claim.peer, claim.hello, now_ns, actions)
        else:
            self._claim_id(peer, hello, holder, now_ns, actions)

    def _claim_id(
        self, peer: bytes, hello: WorkerHello, holder: Worker, now_ns: int, actions: list[Action]
    ) -> None:
        claim = self._workers.claims.get(holder.id)
        if claim is not None and claim.hello.instance == hello.instance:
            claim.peer = peer  # the same process on a new connection: the probe is under way
            return
        if claim is not None:
            # The newest claim stands: a worker that was killed twice in a row has left one behind. Which of
            # the two is the living one can't be told, messages of two connections may overtake each other:
            # so the earlier one is not refused for good.
            message = f"another process claims worker id {holder.id} too: try again"
            actions.append(RefusePeer(claim.peer, Code.ID_CLAIMED, message, is_worker=True))
        self._probe(peer, hello, now_ns, actions)

    def _probe(self, peer: bytes, hello: WorkerHello, now_ns: int, actions: list[Action]) -> None:
        """Enter a claim and ask the holder whether it lives. Each claim has its own number and time: however
        many come, a dead holder is lost by its silence at the latest."""
        self._last_probe += 1
        until_ns = now_ns + int(self._beats.interval_ns * PROBE_INTERVALS)
        self._workers.claims[hello.worker] = Claim(peer, hello, self._last_probe, until_ns)
        holder = self._workers.by_id[hello.worker]
        actions.append(SendHeartbeat(holder.peer, is_worker=True, probe=self._last_probe))

    def _add_worker(self, peer: bytes, hello: WorkerHello, now_ns: int, actions: list[Action]) -> None:
        if len(self._workers) >= self._max_workers:
            message = f"{len(self._workers)} workers are connected, the limit (max_workers)"
            actions.append(RefusePeer(peer, Code.TOO_MANY_WORKERS, message, is_worker=True))
            return
        self._workers.add(peer, hello, self._beats.start(peer, is_worker=True, now_ns=now_ns))
        actions.append(SetUpWorker(peer, self._models.worker_specs(), hello.host_key))
        actions.append(
            Report("worker arrived", {"worker": hello.worker, "device": hello.device, "pid": hello.pid})
        )

    def ready(self, peer: bytes, ready: Ready, now_ns: int, actions: list[Action]) -> None:
        worker = self._workers.by_peer.get(peer)
        if worker is None:
            self.refuse_unknown(peer, actions, is_worker=True)
            return
        self.hear(worker, now_ns)
        fault = find_ready_fault(ready, worker, self._models)
        if fault is not None:
            actions.append(RefusePeer(peer, Code.BAD_READY, fault, is_worker=True))
            actions.append(Report("worker refused", {"worker": worker.id, "reason": fault}))
            return
        self._dispatcher.pools.leave(worker)
        self._costs.forget(worker.id)
        worker.state = WorkerState.READY
        worker.slots = ready.slots
        worker.ready_ns = now_ns
        worker.notes = tuple(note for profile in ready.models for note in profile.notes)
        worker.profiles = {}
        for profile in ready.models:
            self._learn(worker, profile)
        worker.services = self._services_of(worker)
        self._dispatcher.pools.join(worker)
        self.changes_count += 1
        names: list[Value] = [f"{profile.name}:{profile.version}" for profile in ready.models]
        actions.append(Report("worker ready", {"worker": worker.id, "slots": worker.slots, "models": names}))

    def _learn(self, worker: Worker, profile: ModelProfile) -> None:
        worker.profiles[profile.name, profile.version] = profile
        self._models.learn(profile)
        for described in profile.classes:
            self._costs.seed(worker.id, described, profile.name, profile.version)

    def add_profile(self, worker: Worker, profile: ModelProfile) -> None:
        """A worker has loaded one more version of a model."""
        self._learn(worker, profile)
        self.serve(worker)

    def serve(self, worker: Worker) -> None:
        """The live version of a model, or what a worker has of it, has changed: see anew what it can run."""
        self.changes_count += 1
        if worker.state is WorkerState.READY:
            self._dispatcher.pools.leave(worker)
            worker.services = self._services_of(worker)
            self._dispatcher.pools.join(worker)

    def _services_of(self, worker: Worker) -> dict[int, Service]:
        """Return what a worker can run of the live version of each model that it has loaded."""
        services: dict[int, Service] = {}
        for model in self._models.all():
            profile = worker.profiles.get((model.spec.name, model.live.version))
            for described in () if profile is None else profile.classes:
                served = model.classes[described.size_class.name]
                limits = [served.spec.max_batch_size, described.size_class.max_batch_size]
                limits += [size for size, _ in described.buckets[-1:]]
                cost_ns = self._costs.predict_ns(
                    worker.id, model.spec.name, model.live.version, served.spec.name, min(limits)
                )
                services[served.index] = Service(served, min(limits), cost_ns, bool(described.buckets))
        return services

    def leave(self, peer: bytes, now_ns: int, actions: list[Action]) -> None:
        worker = self._workers.by_peer.get(peer)
        if worker is None:
            self._workers.pop_claim_of(peer)
            return
        self.hear(worker, now_ns)
        self._dispatcher.pools.leave(worker)
        worker.state = WorkerState.LEAVING
        self.changes_count += 1
        actions.append(Report("worker leaving", {"worker": worker.id, "batches": len(worker.in_flight)}))
        self.forget_if_done(worker, now_ns, actions)

    def forget_if_done(self, worker: Worker, now_ns: int, actions: list[Action]) -> None:
        if worker.state is WorkerState.LEAVING and not worker.in_flight:
            self._remove(worker, now_ns, actions)

    def lose(
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
        values: dict[str, Value] = {
            "worker": worker.id,
            "reason": reason,
            "batches": len(batches),
            "frames": sum(len(batch.unfinished) for batch in batches),
        }
        actions.append(Report("worker lost", values))
        worker.was_lost = is_suspicious
        for batch in batches:
            if is_suspicious and batch.is_alone and not batch.unfinished:
                self._recovery.condemn(batch, now_ns, actions)
        left = [batch for batch in batches if self._hedges.give_up(batch, now_ns, actions)]
        if is_suspicious:
            self.lost_count += 1
            for batch in left:
                self._recovery.suspect(batch, now_ns, actions)
        else:
            for batch in reversed(left):
                self._recovery.put_back(batch, now_ns, actions)
        self._remove(worker, now_ns, actions)

    def tell_off(self, batch: InFlightBatch, now_ns: int, actions: list[Action]) -> None:
        """A worker still sends heartbeats but has hung with a batch for too long: it is lost, and told to
        end, so that whoever supervises it starts another one."""
        worker = batch.worker
        held_ms = (now_ns - batch.sent_ns) // 1_000_000
        reason = f"stuck: batch {batch.batch} has taken {held_ms} ms"
        self.lose(worker, reason, now_ns, actions)
        expected_ms = batch.predicted_ns // 1_000_000
        message = f"batch {batch.batch} was expected to take {expected_ms} ms and has taken {held_ms} ms"
        actions.append(RefusePeer(worker.peer, Code.WORKER_STUCK, message, is_worker=True))

    def misread(self, peer: bytes, code: str, kind: type | None, now_ns: int, actions: list[Action]) -> None:
        """A peer said what can't be read; why, it has been told. A worker's may have been the answer to a
        batch, which it believes to be over: it is lost, and its frames are tried elsewhere, each alone, so
        that one whose result nobody can read is named. Or it was its READY, and it would wait for ever."""
        worker = self._workers.by_peer.get(peer)
        if worker is None:
            return
        if kind is Ready or (kind is None and worker.state is WorkerState.PREPARING):
            message = f"what it said can't be read ({code})"
            actions.append(RefusePeer(peer, Code.BAD_READY, message, is_worker=True))
            actions.append(Report("worker refused", {"worker": worker.id, "reason": message}))
        elif worker.in_flight and kind in _MAY_ANSWER:
            self.lose(worker, f"unreadable with batches in flight: {code}", now_ns, actions)
            message = "what it said can't be read while it had batches, which others get now: say hello again"
            actions.append(RefusePeer(peer, Code.UNKNOWN_PEER, message, is_worker=True))

    def _remove(self, worker: Worker, now_ns: int, actions: list[Action]) -> None:
        self._dispatcher.pools.leave(worker)
        self._beats.stop(worker.pulse)
        self._costs.forget(worker.id)
        self.changes_count += 1
        claim = self._workers.remove(worker)
        if claim is not None:
            self._add_worker(claim.peer, claim.hello, now_ns, actions)

    # -- life signs ---------------------------------------------------------------------------------

    def hear(self, worker: Worker, now_ns: int) -> None:
        """Any message of a worker: it is not silent. When it was sent nobody knows."""
        worker.pulse.last_heard_ns = now_ns

    def take_answer(self, worker: Worker, probe: int, actions: list[Action]) -> None:
        """A worker has repeated the number of a probe: it lived when the claim had come already."""
        claim = self._workers.claims.get(worker.id)
        if claim is None or claim.probe != probe:
            return
        del self._workers.claims[worker.id]
        message = (
            f"worker id {worker.id} is in use by another process (pid {worker.hello.pid},"
            f" {worker.hello.device}): give this one an id of its own"
        )
        actions.append(RefusePeer(claim.peer, Code.ID_IN_USE, message, is_worker=True))

    def lose_unanswering(self, now_ns: int, actions: list[Action]) -> None:
        """Give the ids of those that have not answered their probe in time to who claims them."""
        if now_ns < self._beats.grace_until_ns:
            return
        for claim in [claim for claim in self._workers.claims.values() if claim.until_ns <= now_ns]:
            self.lose(self._workers.by_id[claim.hello.worker], "silent when probed", now_ns, actions)

    def next_ns(self) -> int | None:
        """Return when lose_unanswering() has something to do, None when no id is claimed."""
        until_ns = self._workers.next_claim_ns()
        return None if until_ns is None else max(until_ns, self._beats.grace_until_ns)

    def refuse_unknown(self, peer: bytes, actions: list[Action], *, is_worker: bool) -> None:
        message = "this connection has not introduced itself, or was taken for dead: say hello again"
        actions.append(RefusePeer(peer, Code.UNKNOWN_PEER, message, is_worker=is_worker))
