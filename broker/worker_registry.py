"""The workers that introduced themselves: who they are, what they can run, what they hold.

Not here: which of them gets a batch (dispatch.py), what becomes of the frames of a lost one (core.py).

An id belongs to one process. When another process claims an id that is taken, the holder is probed with a
numbered heartbeat (the claim waits meanwhile): it repeats the number, the claim is refused; unreachable or
silent, the holder is lost and the claim stands. Only the number counts: any other message of the holder may
have been under way since before it was killed. So a worker that was killed and started again under its id is
served within one heartbeat, and a second worker with a copied configuration never disturbs the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headrace.broker.heartbeats import Pulse
from headrace.broker.inflight import InFlightBatch
from headrace.broker.model_table import ModelTable, ServedClass, ServedModel
from headrace.protocol.messages import ModelProfile, Ready, WorkerHello

#: Most slots a worker may grant. More than a few batches ahead of a device only add latency; the bound
#: keeps one worker's READY from taking the whole queue.
MAX_SLOTS = 64

#: Longest plausible run of one batch in a profile, in milliseconds: an hour.
_MAX_PROFILE_MS = 3_600_000.0


class WorkerState(Enum):
    """PREPARING (loads models) -> READY -> LEAVING (said goodbye, finishes what it holds)."""

    PREPARING = "preparing"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True)
class Service:
    """What a worker can run of one size class. ``cost_ns`` is the predicted time of a full batch;
    ``is_measured``: by a profile, not by our guess."""

    served: ServedClass
    max_batch_size: int
    cost_ns: int
    is_measured: bool


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process on one connection. Invariants: at most ``slots`` batches in flight; a batch that
    runs alone is the only one. ``stamp`` changes whenever dispatch must look at the worker anew."""

    index: int
    peer: bytes
    hello: WorkerHello
    pulse: Pulse
    state: WorkerState = WorkerState.PREPARING
    slots: int = 0
    services: dict[int, Service] = field(default_factory=dict)  # by index of the class
    profiles: dict[tuple[str, str], ModelProfile] = field(default_factory=dict)  # by name and version: loaded
    loads: dict[tuple[str, str], bool] = field(default_factory=dict)  # asked to load; False = it could not
    was_lost: bool = False  # it died with the broker's trust: one of its frames or models may have killed it
    in_flight: dict[int, InFlightBatch] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stamp: int = 0
    is_alone: bool = False  # it holds a batch that must be alone with it
    reserved_for: ServedClass | None = None  # falls idle for that class's suspects
    busy_until_ns: int = 0
    overdue_ns: int = 0  # when a batch of it is so late that it is not trusted with more
    overhead_ns: int | None = None  # measured way of a batch until it can run, and of its results back
    batches_count: int = 0
    frames_count: int = 0
    ran_ns: int = 0
    ready_ns: int | None = None

    @property
    def id(self) -> str:
        """Return the worker's id."""
        return self.hello.worker


@dataclass(slots=True)
class Claim:
    """A process that wants an id which another one holds, until the holder has answered ``probe`` or not."""

    peer: bytes
    hello: WorkerHello
    probe: int
    until_ns: int


class WorkerRegistry:
    """All workers. Invariant: one worker per connection and per id; a claim only on an id that is held."""

    def __init__(self) -> None:
        self.by_peer: dict[bytes, Worker] = {}
        self.by_id: dict[str, Worker] = {}
        self.claims: dict[str, Claim] = {}
        self._last_index = 0

    def __len__(self) -> int:
        return len(self.by_peer)

    def add(self, peer: bytes, hello: WorkerHello, pulse: Pulse) -> Worker:
        """Enter a worker; its connection and id must be free."""
        self._last_index += 1
        worker = Worker(self._last_index, peer, hello, pulse)
        self.by_peer[peer] = worker
        self.by_id[worker.id] = worker
        return worker

    def remove(self, worker: Worker) -> Claim | None:
        """Strike a worker out; return the claim on its id that was waiting for that."""
        del self.by_peer[worker.peer]
        del self.by_id[worker.id]
        return self.claims.pop(worker.id, None)

    def pop_claim_of(self, peer: bytes) -> Claim | None:
        """Take out the claim that a connection has made. Claims are few and short-lived."""
        for worker_id, claim in self.claims.items():
            if claim.peer == peer:
                return self.claims.pop(worker_id)
        return None

    def next_claim_ns(self) -> int | None:
        """Return when the next claim's probe runs out."""
        return min((claim.until_ns for claim in self.claims.values()), default=None)

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables disagree (a bug of ours)."""
        if list(self.by_peer.values()) != list(self.by_id.values()):
            raise AssertionError("workers by peer and by id differ")
        for worker in self.by_peer.values():
            if len(worker.in_flight) > worker.slots:
                raise AssertionError(f"{worker.id}: {len(worker.in_flight)} batches, {worker.slots} slots")
            if worker.is_alone != any(batch.is_alone for batch in worker.in_flight.values()):
                raise AssertionError(f"{worker.id}: alone is {worker.is_alone}, its batches say otherwise")
            if worker.is_alone and len(worker.in_flight) != 1:
                raise AssertionError(f"{worker.id}: a suspect has {len(worker.in_flight) - 1} neighbours")
        if any(worker_id not in self.by_id for worker_id in self.claims):
            raise AssertionError("a claim on an id that nobody holds")


def find_ready_fault(ready: Ready, worker: Worker, models: ModelTable) -> str | None:
    """Return what is wrong with a READY, None if nothing is. Every value comes from a peer."""
    hello = worker.hello
    if (ready.worker, ready.instance) != (hello.worker, hello.instance):
        return f"this connection is worker {hello.worker}, not {ready.worker}"
    if not 1 <= ready.slots <= MAX_SLOTS:
        return f"slots is {ready.slots}: expected 1 to {MAX_SLOTS}"
    if ready.slots < len(worker.in_flight):
        return f"slots is {ready.slots} while {len(worker.in_flight)} batches are in flight here"
    keys = [(profile.name, profile.version) for profile in ready.models]
    if not keys or len(dict.fromkeys(keys)) != len(keys):
        return f"READY names {len(keys)} models: expected at least one, each once"
    for profile in ready.models:
        model = models.get(profile.name, profile.version)
        if model is None:
            return f"model {profile.name}:{profile.version} is not served here ({models.references()})"
        fault = _find_profile_fault(profile, model)
        if fault is not None:
            return fault
    return None


def find_successor_fault(profile: ModelProfile, worker: Worker, model: ServedModel) -> str | None:
    """Return why a version can't take the place of the live one, None if it can: every class of the model
    must run on it, and what a frame of tensors brings must be what it takes."""
    fault = _find_profile_fault(profile, model)
    if fault is not None:
        return fault
    described = [one.size_class.name for one in profile.classes]
    missing = [name for name in model.classes if name not in described]
    if missing:
        return f"{model.key}: version {profile.version} does not run size class {missing[0]}"
    live = worker.profiles.get((model.spec.name, model.live.version))
    if model.spec.image is None and live is not None and live.inputs != profile.inputs:
        taken, wanted = _shown(profile), _shown(live)
        return f"{model.key}: version {profile.version} takes other inputs: {taken}, not {wanted}"
    return None


def _shown(profile: ModelProfile) -> str:
    return ", ".join(f"{one.name} {one.dtype} {list(one.shape)}" for one in profile.inputs) or "none"


def _find_profile_fault(profile: ModelProfile, model: ServedModel) -> str | None:
    names = [described.size_class.name for described in profile.classes]
    if not names or len(dict.fromkeys(names)) != len(names):
        return f"{model.key}: {len(names)} size classes described: expected at least one, each once"
    for described in profile.classes:
        spec = described.size_class
        where = f"{model.key} {spec.name}"
        if model.placer is not None:
            served = model.classes.get(spec.name)
            if served is None:
                return f"{where}: unknown size class; served: {', '.join(model.placer.names)}"
            known = served.spec
            if (spec.height, spec.width, spec.fit) != (known.height, known.width, known.fit):
                return (
                    f"{where}: {spec.height}x{spec.width} {spec.fit} described,"
                    f" {known.height}x{known.width} {known.fit} configured"
                )
        elif model.spec.image is not None and min(spec.height, spec.width) < 1:
            return f"{where}: an image of {spec.height}x{spec.width} has no pixels"
        if spec.max_batch_size < 1:
            return f"{where}: max_batch_size is {spec.max_batch_size}: expected at least 1"
        sizes = [size for size, _ in described.buckets]
        if any(size < 1 for size in sizes) or sizes != sorted(dict.fromkeys(sizes)):
            return f"{where}: buckets {sizes} are not ascending positive batch sizes"
        if not all(0.0 <= ms <= _MAX_PROFILE_MS for _, ms in described.buckets):
            return f"{where}: a bucket's milliseconds are not between 0 and {_MAX_PROFILE_MS:.0f}"
    return None
