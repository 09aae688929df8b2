"""Puts another file in the place of a model's while frames are served, and takes it back.

Not here: reading the files (reload_desk.py), loading and comparing (workers), where frames wait.

Theory of operation. The workers load the new version beside the old one, one worker of a host at a time. When
all that are READY have it, a few batches are run on both, and the old one's answers are published. If the
figures allow it, all size classes of the model switch in one step: what is dispatched from then on goes with
the new version, what is in flight ends on the old one. The old one stays loaded for a rollback, which is the
same step back, until the next reload or a commit; a version that nothing needs any more is unloaded when its
last batch is done.

Until the switch anything that goes wrong ends the reload and leaves the old version serving: a worker that
can't load it or is lost once it was asked to, figures beyond the tolerance, the time. A worker that joins
loads what serves and what is kept; during a reload it is asked for the new one like the others, and after a
switch it gets no batch before it has it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TypeAlias, assert_never

from headrace.broker import events
from headrace.broker.actions import Action, Report, SendToWorker
from headrace.broker.costs import CostTable
from headrace.broker.inflight import Ledger
from headrace.broker.model_table import ModelTable, ServedModel
from headrace.broker.reload_state import Phase, Reload, ReloadOrder
from headrace.broker.worker_life import WorkerLife
from headrace.broker.worker_registry import Worker, WorkerRegistry, WorkerState, find_successor_fault
from headrace.errors import Code
from headrace.protocol.messages import Load, ModelFile, ModelSpec, Unload, Value

ReloadEvent: TypeAlias = (
    events.ReloadAsked
    | events.ModelFilesRead
    | events.ModelFilesUnreadable
    | events.RollbackAsked
    | events.CommitAsked
    | events.ModelLoaded
    | events.ModelNotLoaded
    | events.BatchCompared
)

#: Digits of the files' hash that a version made from it ends with.
_LABEL_DIGITS = 8


class Reloads:
    """All reloads. Invariants: a model has at most one that is active; a batch is only ever sent with the
    live version of its class; a version is unloaded only when no batch in flight has it."""

    def __init__(
        self,
        models: ModelTable,
        workers: WorkerRegistry,
        ledger: Ledger,
        life: WorkerLife,
        costs: CostTable,
    ) -> None:
        self._models = models
        self._workers = workers
        self._ledger = ledger
        self._life = life
        self._costs = costs
        self._watched: dict[str, ServedModel] = {}  # those that were ever reloaded, by key
        self._is_changed = False
        self._seen_count = 0  # of the changes of workers
        self.ends_by_phase: dict[str, int] = {}

    # -- questions ----------------------------------------------------------------------------------

    def find_refusal(self, event: ReloadEvent) -> tuple[Code, str] | None:
        """Return why an order can't be carried out, None if it can."""
        match event:
            case events.ReloadAsked(order):
                model = self._models.find(order.model)
                if model is not None and model.reload is not None and model.reload.is_active:
                    phase = model.reload.phase
                    return Code.RELOAD_BUSY, f"model {model.key} is being reloaded already ({phase})"
            case events.RollbackAsked(reference) | events.CommitAsked(reference):
                model = self._models.find(reference)
                is_active = model is not None and model.reload is not None and model.reload.is_active
                if model is not None and isinstance(event, events.CommitAsked) and is_active:
                    return Code.RELOAD_BUSY, f"model {model.key} is still being reloaded"
                if model is not None and model.kept is None and not is_active:
                    return Code.NOT_FOUND, f"model {model.key} has no earlier version in memory"
            case _:
                return None
        if model is None:
            return Code.NOT_FOUND, f"there is no such model here ({self._models.references()})"
        return None

    def next_ns(self) -> int | None:
        """Return when a reload runs out of time."""
        if not self._watched:
            return None
        reloads = [model.reload for model in self._watched.values() if model.reload is not None]
        return min((one.deadline_ns for one in reloads if one.is_active), default=None)

    # -- events -------------------------------------------------------------------------------------

    def handle(self, event: ReloadEvent, now_ns: int, actions: list[Action]) -> None:
        """Take one fact in; what follows from it is done at the Tick."""
        self._is_changed = True
        match event:
            case events.ReloadAsked(order):
                self._begin(order, event, now_ns, actions)
            case events.ModelFilesRead():
                self._take_files(event, now_ns, actions)
            case events.ModelFilesUnreadable(number, message):
                model = self._active(number)
                if model is not None:
                    self._fail(model, Code.RELOAD_REFUSED, message, now_ns, actions)
            case events.RollbackAsked(reference):
                self._roll_back(reference, event, now_ns, actions)
            case events.CommitAsked(reference):
                self._commit(reference, event, now_ns, actions)
            case events.ModelLoaded() | events.ModelNotLoaded() | events.BatchCompared():
                self._take_answer(event, now_ns, actions)
            case _:  # pragma: no cover - mypy proves that there is no other event
                assert_never(event)

    def _begin(
        self, order: ReloadOrder, event: events.ReloadAsked, now_ns: int, actions: list[Action]
    ) -> None:
        model = self._models.find(order.model)
        if model is None or self.find_refusal(event) is not None:
            return
        if model.kept is not None:
            model.retired.append(model.kept)
            model.kept = None
        model.reload = Reload(order, now_ns, model.live.version)
        self._watched[model.key] = model
        actions.append(Report("reload started", {"model": model.key, "path": order.path}))

    def _take_files(self, event: events.ModelFilesRead, now_ns: int, actions: list[Action]) -> None:
        model = self._active(event.number)
        if model is None or model.reload is None or model.reload.phase is not Phase.READING:
            return
        reload = model.reload
        version = reload.order.version or _label(model.spec.version, (*event.files, *event.gpu_files))
        if any(spec.version == version for spec in model.retired):
            message = f"version {version} still has batches in flight from before: try again"
            self._fail(model, Code.RELOAD_BUSY, message, now_ns, actions)
        elif version == model.live.version or self._models.is_configured(model.spec.name, version):
            message = f"version {version} is served already"
            self._fail(model, Code.RELOAD_REFUSED, message, now_ns, actions)
        else:
            reload.spec = replace(
                model.live,
                version=version,
                files=event.files,
                gpu_files=event.gpu_files,
                fp32_files=(),
                size_classes=model.spec.size_classes,
            )
            self._models.name_version(model, version)
            for worker in self._workers.by_peer.values():
                if worker.loads.get((model.spec.name, version)) is False:
                    del worker.loads[model.spec.name, version]  # another try
            reload.phase = Phase.LOADING

    def _take_answer(
        self,
        event: events.ModelLoaded | events.ModelNotLoaded | events.BatchCompared,
        now_ns: int,
        actions: list[Action],
    ) -> None:
        worker = self._workers.by_peer.get(event.peer)
        if worker is None:
            self._life.refuse_unknown(event.peer, actions, is_worker=True)
            return
        self._life.hear(worker, now_ns)
        match event:
            case events.ModelLoaded(_, loaded):
                self._take_loaded(worker, loaded.profile.name, loaded.profile.version, event, now_ns, actions)
            case events.ModelNotLoaded(_, answer):
                key = (answer.name, answer.version)
                if worker.loads.get(key):
                    worker.loads[key] = False
                    reason = f"worker {worker.id} could not load it ({answer.code}): {answer.message}"
                    self._give_up(key, Code.LOAD_FAILED, reason, now_ns, actions)
            case _:
                compared = event.compared
                model = self._candidate_model(compared.version)
                if model is not None and model.reload is not None and model.reload.phase is Phase.COMPARING:
                    key = (model.spec.name, compared.version)
                    if compared.error:
                        reason = f"worker {worker.id} could not run a batch on it: {compared.error}"
                        self._give_up(key, Code.LOAD_FAILED, reason, now_ns, actions)
                    elif compared.frames:
                        model.reload.tally.add(compared)

    def _take_loaded(
        self,
        worker: Worker,
        name: str,
        version: str,
        event: events.ModelLoaded,
        now_ns: int,
        actions: list[Action],
    ) -> None:
        key = (name, version)
        worker.loads.pop(key, None)
        if key in worker.profiles:
            return
        model = self._models.get(name, version)
        if model is None or version not in self._wanted(model):
            # Asked for by a reload that was given up, or of which nobody here knows any more.
            actions.append(SendToWorker(worker.peer, Unload(name, version)))
            return
        fault = find_successor_fault(event.loaded.profile, worker, model)
        if fault is not None:
            worker.loads[key] = False
            actions.append(SendToWorker(worker.peer, Unload(name, version)))
            self._give_up(key, Code.RELOAD_REFUSED, fault, now_ns, actions)
            return
        self._life.add_profile(worker, event.loaded.profile)

    def _give_up(
        self, key: tuple[str, str], code: Code, why: str, now_ns: int, actions: list[Action]
    ) -> None:
        """A worker is in the way of a version: its reload fails, if it is not live already."""
        model = self._candidate_model(key[1])
        if model is not None and model.spec.name == key[0]:
            self._fail(model, code, why, now_ns, actions)
        else:
            actions.append(Report("version not served by a worker", {"model": ":".join(key), "reason": why}))

    # -- the end of a turn --------------------------------------------------------------------------

    def run(self, now_ns: int, actions: list[Action]) -> None:
        """Do what has become possible. Comes before the dispatch of the same Tick."""
        if not self._watched:
            return
        is_changed = self._is_changed or self._seen_count != self._life.changes_count
        self._is_changed = False
        self._seen_count = self._life.changes_count
        for model in self._watched.values():
            reload = model.reload
            if reload is not None and reload.is_active and (is_changed or now_ns >= reload.deadline_ns):
                self._advance(model, reload, now_ns, actions)
            if reload is not None and reload.phase is Phase.SWITCHING:
                self._see_whether_switched(model, reload, now_ns, actions)
            if model.retired:
                self._unload_retired(model, actions)
            if is_changed:
                self._tend_workers(model, actions)

    def _advance(self, model: ServedModel, reload: Reload, now_ns: int, actions: list[Action]) -> None:
        if now_ns >= reload.deadline_ns:
            self._fail(model, Code.RELOAD_TIMEOUT, self._what_is_missing(reload), now_ns, actions)
            return
        for index, worker in list(reload.holders.items()):
            if self._workers.by_peer.get(worker.peer) is worker:
                continue
            del reload.holders[index]
            if worker.was_lost:
                reason = f"worker {worker.id} was lost after it was asked to load it"
                self._fail(model, Code.WORKER_LOST, reason, now_ns, actions)
                return
        spec = reload.spec
        if spec is None or not self._all_have(spec):
            return
        if reload.phase is Phase.LOADING and reload.order.frames_count:
            reload.phase = Phase.COMPARING
            for served in model.classes.values():
                served.sampled_by = reload
        elif reload.tally.frames_count >= reload.order.frames_count:
            reason = reload.find_difference()
            if reason:
                self._fail(model, Code.RELOAD_DIFFERS, reason, now_ns, actions)
            else:
                self._switch(model, reload, spec, actions)

    def _what_is_missing(self, reload: Reload) -> str:
        took_s = reload.order.timeout_ms / 1000
        if reload.phase is Phase.COMPARING:
            tally = reload.tally
            return f"{tally.frames_count} of {reload.order.frames_count} frames were compared in {took_s:g} s"
        if reload.spec is None:
            return f"the files were not read in {took_s:g} s"
        key = (reload.spec.name, reload.spec.version)
        ready = self._ready_workers()
        count = sum(key in worker.profiles for worker in ready)
        return f"{count} of {len(ready)} workers had loaded it in {took_s:g} s"

    def _all_have(self, spec: ModelSpec) -> bool:
        ready = self._ready_workers()
        key = (spec.name, spec.version)
        return bool(ready) and all(key in worker.profiles for worker in ready)

    def _ready_workers(self) -> list[Worker]:
        return [one for one in self._workers.by_peer.values() if one.state is WorkerState.READY]

    def _switch(self, model: ServedModel, reload: Reload, spec: ModelSpec, actions: list[Action]) -> None:
        model.kept = model.live
        reload.phase = Phase.SWITCHING
        self._go_live(model, spec)
        values: dict[str, Value] = {"model": model.key, "version": spec.version, "old": model.kept.version}
        actions.append(Report("model switched", values))

    def _go_live(self, model: ServedModel, spec: ModelSpec) -> None:
        model.go_live(spec)
        for served in model.classes.values():
            served.sampled_by = None
        for worker in self._ready_workers():
            self._life.serve(worker)
        self._is_changed = True

    def _see_whether_switched(
        self, model: ServedModel, reload: Reload, now_ns: int, actions: list[Action]
    ) -> None:
        if not self._has_in_flight(model, reload.old_version):
            self._end(model, reload, Phase.LIVE, now_ns, actions)

    def _has_in_flight(self, model: ServedModel, version: str) -> bool:
        return any(
            batch.version == version and batch.served.model == model.spec.name
            for batch in self._ledger.batches.values()
        )

    def _unload_retired(self, model: ServedModel, actions: list[Action]) -> None:
        for spec in [one for one in model.retired if not self._has_in_flight(model, one.version)]:
            model.retired.remove(spec)
            for worker in self._workers.by_peer.values():
                self._unload(worker, (spec.name, spec.version), actions)

    def _unload(self, worker: Worker, key: tuple[str, str], actions: list[Action]) -> None:
        if worker.profiles.pop(key, None) is not None:
            self._costs.forget_version(worker.id, *key)
            actions.append(SendToWorker(worker.peer, Unload(*key)))

    def _tend_workers(self, model: ServedModel, actions: list[Action]) -> None:
        """Have every worker load what it lacks, one of a host at a time, and unload what nobody wants."""
        reload, wanted = model.reload, self._wanted(model)
        name = model.spec.name
        spec = reload.spec if reload is not None and reload.is_active else model.live
        ready = self._ready_workers()
        busy = {one.hello.host_key: None for one in ready if any(one.loads.values())}
        for worker in ready:
            for key in [key for key in worker.profiles if key[0] == name and key[1] not in wanted]:
                if self._models.get(*key) is model:
                    self._unload(worker, key, actions)
            key = (name, "" if spec is None else spec.version)
            if spec is None or key in worker.profiles or key in worker.loads:
                continue
            if worker.hello.host_key in busy:
                continue
            busy[worker.hello.host_key] = None
            worker.loads[key] = True
            if reload is not None and reload.is_active:
                reload.holders[worker.index] = worker
            actions.append(SendToWorker(worker.peer, Load(spec)))

    def _wanted(self, model: ServedModel) -> list[str]:
        """Return the versions that a worker may hold."""
        specs = [model.live, model.kept, *model.retired]
        if model.reload is not None and model.reload.is_active:
            specs.append(model.reload.spec)
        return [spec.version for spec in specs if spec is not None]

    # -- ways back ----------------------------------------------------------------------------------

    def _roll_back(
        self, reference: str, event: events.RollbackAsked, now_ns: int, actions: list[Action]
    ) -> None:
        model = self._models.find(reference)
        if model is None or model.reload is None or self.find_refusal(event) is not None:
            return
        if model.reload.is_active:
            self._fail(model, Code.RELOAD_REFUSED, "it was given up, as asked", now_ns, actions)
            return
        assert model.kept is not None  # noqa: S101 - find_refusal has looked
        model.retired.append(model.live)
        kept, model.kept = model.kept, None
        self._go_live(model, kept)
        self._end(model, model.reload, Phase.ROLLED_BACK, now_ns, actions)

    def _commit(self, reference: str, event: events.CommitAsked, now_ns: int, actions: list[Action]) -> None:
        model = self._models.find(reference)
        if model is None or model.reload is None or self.find_refusal(event) is not None:
            return
        assert model.kept is not None  # noqa: S101 - find_refusal has looked
        model.retired.append(model.kept)
        model.kept = None
        self._end(model, model.reload, Phase.COMMITTED, now_ns, actions)

    def _fail(self, model: ServedModel, code: Code, message: str, now_ns: int, actions: list[Action]) -> None:
        reload = model.reload
        assert reload is not None  # noqa: S101 - every caller has found it active
        if reload.spec is not None:
            model.retired.append(reload.spec)
        for served in model.classes.values():
            served.sampled_by = None
        self._is_changed = True
        self._end(model, reload, Phase.FAILED, now_ns, actions, code, message)

    def _end(
        self,
        model: ServedModel,
        reload: Reload,
        phase: Phase,
        now_ns: int,
        actions: list[Action],
        code: str = "",
        message: str = "",
    ) -> None:
        reload.end(phase, now_ns, code, message)
        reload.holders.clear()
        self.ends_by_phase[phase.value] = self.ends_by_phase.get(phase.value, 0) + 1
        values: dict[str, Value] = {
            "model": model.key,
            "phase": phase.value,
            "serving": model.live.version,
            "code": code,
            "reason": message,
        }
        actions.append(Report("reload ended", values))

    def _active(self, number: int) -> ServedModel | None:
        for model in self._watched.values():
            reload = model.reload
            if reload is not None and reload.order.number == number and reload.is_active:
                return model
        return None

    def _candidate_model(self, version: str) -> ServedModel | None:
        for model in self._watched.values():
            reload = model.reload
            if reload is not None and reload.is_active and reload.spec and reload.spec.version == version:
                return model
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError when a model and its reload disagree (a bug of ours)."""
        for model in self._models.all():
            versions = [served.live_version for served in model.classes.values()]
            if any(version != model.live.version for version in versions):
                raise AssertionError(f"{model.key}: classes at {versions}, live is {model.live.version}")
            is_comparing = model.reload is not None and model.reload.phase is Phase.COMPARING
            if any((served.sampled_by is not None) != is_comparing for served in model.classes.values()):
                raise AssertionError(f"{model.key}: samples are taken outside a comparison, or not in it")
            held = [one.version for one in (model.live, model.kept, *model.retired) if one is not None]
            if len(dict.fromkeys(held)) != len(held):
                raise AssertionError(f"{model.key}: a version has two places in {held}")
        for worker in self._workers.by_peer.values():
            for batch in worker.in_flight.values():
                if (batch.served.model, batch.version) not in worker.profiles:
                    raise AssertionError(f"{worker.id}: batch {batch.batch} on an unloaded {batch.version}")


def _label(base: str, files: tuple[ModelFile, ...]) -> str:
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    return f"{base}-{digest[:_LABEL_DIGITS]}"
