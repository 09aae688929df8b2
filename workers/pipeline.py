"""Runs batches: a device thread, and a staging and a completion thread that help it while it is busy.

Not here: the connection to the broker (``process``), what is asked of the broker when (``worker_session``).

Theory of operation::

    run() -> stage: frames into a buffer -> engine.submit -> engine.collect -> adapters -> tell(BatchFinished)

While one batch runs on the device the staging thread stages the next: with two slots the device never waits
for a copy. A batch that finds nothing before it is staged by the device thread itself, and completed by it
when nothing waits behind: handing a batch from thread to thread costs more than what many batches need. The
device thread owns every call of the engine but ``collect`` and ``close``. A batch is in exactly one place
and ends in exactly one BatchFinished, in whatever way: Done, Failed, or Failed ``cancelled`` when it was
dropped before the device had it. The number of batches inside is bounded by the caller's slots, and
with it every queue.

When the engine says that its device can't be trusted (or a thread of the pipeline meets a bug), the pipeline
is dead: it tells EngineFailed once and nothing after, so that nothing computed by a failed device leaves.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.errors import ClosedError, Code, ConfigError, DeviceError, InvalidFrameError, ModelError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Batch,
    Compared,
    Done,
    Failed,
    FrameResult,
    Limits,
    ModelProfile,
    ModelSpec,
    Status,
)
from headrace.workers.adapters import Adapter
from headrace.workers.arenas import SWEEP_S, ArenaMappings
from headrace.workers.beside import Plans, Shadow, copy_for, load_beside, load_into, run_shadow
from headrace.workers.drift import DriftWatch
from headrace.workers.engine import BatchOutputs, Engine, EngineMisuseError, ModelKey
from headrace.workers.pipeline_tasks import Adopt, Job, LoadAll, LoadBeside, Place, Served, Task, Unload
from headrace.workers.results import fitted, in_batch_order
from headrace.workers.staging import BufferPool, Pins, Stager
from headrace.workers.worker_events import (
    BatchCompared,
    BatchFinished,
    BesideFailed,
    BesideLoaded,
    EngineFailed,
    Event,
    LoadFailed,
    ModelsLoaded,
)

log = structlog.get_logger()

#: How long the second run of a compared batch gives way to others.
SHADOW_PATIENCE_NS = 2_000_000_000

#: Batches that may be marked for comparison and not have come yet.
MAX_COMPARED = 64

_CANCELLED = "dropped before it was run, as the broker asked"


class Pipeline:
    """See the module. ``tell`` is called from any thread of the pipeline and must not block."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        tell: Callable[[Event], None],
        *,
        limits: Limits | None = None,
        arenas: ArenaMappings | None = None,
        pins: Pins | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._make_engine = make_engine
        self._tell = tell
        self._log = log.bind()  # bound once: the level is then checked without making a logger for each batch
        self._clock = clock
        self._pool = BufferPool()
        self._arenas = arenas or ArenaMappings()
        self._stager = Stager(self._pool, limits or Limits(), self._arenas, pins)
        self._served = Served()
        self._lock = threading.Lock()
        self._staging_lock = threading.Lock()  # stager and arenas have one owner at a time
        self._jobs: dict[int, Job] = {}
        self._ahead_count = 0  # batches that the device thread is not through with
        self._completing_count = 0  # batches that the completion thread is not through with
        self._is_dead = False
        self._compared_with: dict[int, str] = {}  # the versions that coming batches are to be run on too
        self._has_shadow = False  # the copy of a batch is about
        self.drift = DriftWatch(make_engine, lambda: not self._jobs)
        self._to_stage: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._to_device: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._to_complete: queue.SimpleQueue[tuple[Served, Job] | None] = queue.SimpleQueue()
        # Daemons: a run on a device can't be interrupted, and a process that was told to end must not wait.
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"headrace-{name}", daemon=True)
            for name, loop in (
                ("staging", self._stage_batches),
                ("device", self._drive_device),
                ("completion", self._complete_batches),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- called by the owner of the connection ---------------------------------------------------------

    def use_limits(self, limits: Limits) -> None:
        """Set the broker's limits; they hold for the batches that come after."""
        self._stager.limits = limits

    def load(self, models: tuple[ModelSpec, ...], files: dict[str, str]) -> None:
        """Replace what is loaded; ModelsLoaded or LoadFailed tells the end. No batch may be inside.

        ``files`` maps the sha256 of each model file to its verified local path."""
        self._to_device.put(LoadAll(models, files))

    def load_beside(self, spec: ModelSpec, files: dict[str, str]) -> None:
        """Load one more model while batches run; BesideLoaded or BesideFailed tells the end."""
        self._to_device.put(LoadBeside(spec, files))

    def unload(self, key: ModelKey) -> None:
        """Let go of a model that no batch inside needs."""
        self._to_device.put(Unload(key))

    def compare(self, batch: int, version: str) -> None:
        """Run a batch that is about to come on another version too; BatchCompared tells the end."""
        with self._lock:
            if len(self._compared_with) >= MAX_COMPARED:
                self._compared_with.clear()  # batches that never came: a connection was lost
            self._compared_with[batch] = version

    def run(self, batch: Batch) -> None:
        """Take a batch; exactly one BatchFinished tells its end."""
        job = Job(batch, self._clock())
        with self._lock:
            self._jobs[batch.batch] = job
            is_first = self._ahead_count == 0
            self._ahead_count += 1
        if is_first:
            self._to_device.put(job)
        else:
            self._to_stage.put(job)

    def drop(self, number: int) -> None:
        """Leave a batch out if the device does not have it yet."""
        with self._lock:
            job = self._jobs.get(number)
            if job is not None and job.place is Place.WAITING:
                job.place = Place.DROPPED

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads; batches inside are forgotten. Waits up to ``timeout_s`` for a running one."""
        with self._lock:
            self._is_dead = True
        self.drift.close()
        self._to_stage.put(None)
        self._to_device.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- staging thread --------------------------------------------------------------------------------

    def _stage_batches(self) -> None:
        while (job := self._next_to_stage()) is not None:
            if self._stage(job):
                self._to_device.put(job)
            else:
                self._leave_device()
        with self._staging_lock:
            self._arenas.close()

    def _next_to_stage(self) -> Job | None:
        """Wait for a batch; see to it meanwhile that no arena is kept after its producer."""
        while True:
            with self._staging_lock:
                self._arenas.sweep()
            with contextlib.suppress(queue.Empty):
                return self._to_stage.get(timeout=SWEEP_S)

    def _stage(self, job: Job) -> bool:
        """Stage a batch; tell whether it is to be submitted. If not, its end was told."""
        batch = job.batch
        if job.place is Place.DROPPED:
            self._fail(job, Code.CANCELLED, _CANCELLED)
            return False
        job.plan = self._served.plans.get((batch.model, batch.version, batch.size_class))
        if job.plan is None:
            name = f"{batch.model}:{batch.version} {batch.size_class}"
            self._fail(job, Code.UNKNOWN_MODEL, f"this worker does not serve {name}")
            return False
        try:
            with self._staging_lock:
                job.staging = self._stager.stage(batch, job.plan)
        except InvalidFrameError as error:
            self._fail(job, error.code, error.message)
            return False
        except Exception:  # whatever numpy or OpenCV raise for a batch is the fate of that batch
            log.exception("staging failed", batch=batch.batch, frames_count=len(batch.frames))
            self._fail(job, Code.BATCH_FAILED, "the worker could not stage this batch; its log says why")
            return False
        job.staged_ns = self._clock()
        if job.staging.batch is None:
            self._finish_done(job, (), 0)
            return False
        return True

    # -- device thread ---------------------------------------------------------------------------------

    def _drive_device(self) -> None:
        try:
            while (task := self._to_device.get()) is not None:
                match task:
                    case Job():
                        if task.staging is not None or self._stage(task):
                            self._submit(task)
                        self._leave_device()
                    case Shadow():
                        self._run_shadow(task)
                    case LoadAll():
                        self._load(task)
                    case _:
                        self._exchange(task)
        finally:
            self._to_complete.put(None)
            for engine in self._served.engines():
                engine.close()

    def _submit(self, job: Job) -> None:
        staging, engine = job.staging, self._served.engine_of(job.batch)
        assert staging is not None  # noqa: S101 - our own queues, no peer's input
        assert staging.batch is not None  # noqa: S101
        assert engine is not None  # noqa: S101
        with self._lock:
            is_dropped = job.place is Place.DROPPED
            if not is_dropped:
                job.place = Place.ON_DEVICE
        if is_dropped:
            self._release(job)
            self._fail(job, Code.CANCELLED, _CANCELLED)
            return
        version = self._compared_with.get(job.batch.batch)
        if version is not None and job.plan is not None and not self._has_shadow:
            job.shadow = copy_for(version, staging.batch, job.plan)
            if job.shadow is not None:
                self._has_shadow = True
                job.shadow.patient_until_ns = self._clock() + SHADOW_PATIENCE_NS
        if job.plan is not None:
            job.sample = self.drift.sample(staging.batch, job.plan)
        try:
            engine.submit(staging.batch)
        except EngineMisuseError:
            log.exception("batch refused by the engine", batch=job.batch.batch)
            self._release(job)
            self._fail(job, Code.BATCH_FAILED, "the engine refused this batch; the worker's log says why")
            return
        except DeviceError as error:
            self._die(ExitCode.DEVICE_LOST, str(error))
            return
        with self._lock:
            is_alone = self._completing_count == 0
        if is_alone and self._to_device.empty() and engine.has_result():
            self._collect(self._served, job)
            return
        with self._lock:
            self._completing_count += 1
        self._to_complete.put((self._served, job))

    def _leave_device(self) -> None:
        with self._lock:
            self._ahead_count -= 1

    def _load(self, task: LoadAll) -> None:
        try:
            profiles = self._load_all(task)
        except (ModelError, DeviceError, ConfigError) as error:
            self._say(LoadFailed(type(error).exit_code, str(error)))
        except Exception as error:
            log.exception("loading failed")
            self._say(LoadFailed(ExitCode.INTERNAL, f"loading the models failed: {type(error).__name__}"))
        else:
            self._say(ModelsLoaded(task.models, profiles))

    def _load_all(self, task: LoadAll) -> tuple[ModelProfile, ...]:
        for old in self._served.engines():
            old.close()
        self._served = Served()
        self._pool.clear()
        engine = self._make_engine()
        plans: Plans = {}
        adapters: dict[ModelKey, Adapter] = {}
        profiles = []
        for spec in task.models:
            loaded = load_into(engine, spec, task.files)
            adapters[loaded.key] = loaded.adapter
            plans |= loaded.plans
            profiles.append(loaded.profile)
        self._pool = engine.staging_pool() or BufferPool()
        self._stager.use_pool(self._pool)
        self._served = Served(engine, plans, adapters)
        return self.drift.watch(task.models, profiles, task.files, engine)

    def _exchange(self, task: LoadBeside | Adopt | Unload) -> None:
        served = self._served
        match task:
            case LoadBeside(spec, files):
                if served.engine is not None and not served.engine.loads_beside:
                    reason = f"the {served.engine.name} engine can't load a model while it serves: restart it"
                    self._say(BesideFailed(spec, Code.RELOAD_REFUSED, reason))
                    return
                name = "headrace-loading"
                arguments = (lambda: self._load_beside(spec, files),)
                threading.Thread(target=self._guard, args=arguments, name=name, daemon=True).start()
            case Adopt(loaded):
                adapters = served.adapters | {loaded.key: loaded.adapter}
                beside = served.beside | {loaded.key: loaded.engine}
                self._served = Served(served.engine, served.plans | loaded.plans, adapters, beside)
                self._say(BesideLoaded(loaded.spec, loaded.profile))
            case Unload(key):
                self._served = served.without(key)
                if key in served.beside:
                    served.beside[key].close()
                elif served.engine is not None:
                    served.engine.unload(key)

    def _load_beside(self, spec: ModelSpec, files: dict[str, str]) -> None:
        loaded = load_beside(self._make_engine, spec, files)
        if isinstance(loaded, str):
            self._say(BesideFailed(spec, Code.LOAD_FAILED, loaded))
        else:
            self._to_device.put(Adopt(loaded))

    def _run_shadow(self, shadow: Shadow) -> None:
        if not self._to_device.empty() and self._clock() < shadow.patient_until_ns:
            self._to_device.put(shadow)  # batches that somebody waits for go first
            return
        if shadow.inputs:
            self._has_shadow = False
        engine = self._served.beside.get(shadow.key)
        plan = self._served.plans.get((shadow.key.name, shadow.key.version, shadow.size_class))
        if engine is None or plan is None:
            self._say(BatchCompared(Compared(shadow.batch, shadow.key.version)))
            return
        try:
            compared = run_shadow(shadow, engine, plan)
        except (EngineMisuseError, DeviceError):
            log.exception("batch not compared", batch=shadow.batch)
            compared = Compared(
                shadow.batch, shadow.key.version, error="it was refused; see the worker's log"
            )
        self._say(BatchCompared(compared))

    # -- completion thread -----------------------------------------------------------------------------

    def _complete_batches(self) -> None:
        while (item := self._to_complete.get()) is not None:
            if not self._collect(*item):
                return
            with self._lock:
                self._completing_count -= 1

    # -- device or completion thread, one at a time ------------------------------------------------------

    def _collect(self, served: Served, job: Job) -> bool:
        """Collect and complete the oldest batch; False when nothing more can be collected."""
        engine = served.engine_of(job.batch)
        assert engine is not None  # noqa: S101 - our own queue
        try:
            outputs = engine.collect()
        except ClosedError:
            return False
        except DeviceError as error:
            self._die(ExitCode.DEVICE_LOST, str(error))
            return False
        self._complete(served, job, outputs)
        return True

    def _complete(self, served: Served, job: Job, outputs: BatchOutputs) -> None:
        staging = job.staging
        assert staging is not None  # noqa: S101 - it was submitted, so it was staged
        if outputs.is_fatal:
            self._die(ExitCode.DEVICE_LOST, outputs.error)
            return
        if outputs.batch != job.batch.batch:
            self._die(
                ExitCode.INTERNAL, f"batch {outputs.batch} came out of the engine, not {job.batch.batch}"
            )
            return
        if outputs.error:
            log.warning("batch failed", batch=job.batch.batch, reason=outputs.error)
            self._release(job)
            self._fail(job, Code.BATCH_FAILED, "the run of this batch failed; the worker's log says why")
            return
        adapter = served.adapters[ModelKey(job.batch.model, job.batch.version)]
        try:
            results = adapter.process(outputs.outputs, [row.placement for row in staging.rows])
        except Exception:  # an adapter promises not to raise; if it does, its frames have no result
            log.exception("adapter broke", adapter=adapter.name, batch=job.batch.batch)
            broken = f"adapter {adapter.name} failed; the worker's log says why"
            results = [FrameResult(Status.ERROR, Code.POST_PROCESS_FAILED, broken)] * len(staging.rows)
        if outputs.stale_rows:
            stale = FrameResult(Status.ERROR, Code.STALE_SLOT, "the slot was no longer that of this frame")
            results = [stale if n in outputs.stale_rows else result for n, result in enumerate(results)]
        self._release(job)
        if job.shadow is not None:
            job.shadow.expected = outputs.outputs
        self._finish_done(job, results, outputs.ran_ns)
        if job.sample is not None:
            self.drift.give(job.sample, outputs.outputs)

    # -- any thread ------------------------------------------------------------------------------------

    def _finish_done(self, job: Job, row_results: Sequence[FrameResult], ran_ns: int) -> None:
        staging, now_ns = job.staging, self._clock()
        assert staging is not None  # noqa: S101 - only staged batches get here
        done = Done(
            job.batch.batch,
            in_batch_order(len(job.batch.frames), staging.rows, row_results, staging.failures),
            staged_us=(job.staged_ns - job.received_ns) // 1000,
            ran_us=ran_ns // 1000,
            total_us=(now_ns - job.received_ns) // 1000,
        )
        self._log.debug(
            "batch done",
            batch=done.batch,
            model=f"{job.batch.model}:{job.batch.version}",
            size_class=job.batch.size_class,
            frames_count=len(done.results),
            failed_count=len(staging.failures),
            staged_us=done.staged_us,
            ran_us=done.ran_us,
            total_us=done.total_us,
        )
        self._finish(job, fitted(done, self._stager.limits))

    def _fail(self, job: Job, code: str, message: str) -> None:
        self._finish(job, Failed(job.batch.batch, str(code), message))

    def _finish(self, job: Job, message: Done | Failed) -> None:
        job.staging = None  # a loop may hold the job until its next: what it was staged from is free now
        with self._lock:
            # A number can come again (another broker) while the old batch is still inside.
            if self._jobs.get(job.batch.batch) is job:
                del self._jobs[job.batch.batch]
        self._say(BatchFinished(message))
        if self._compared_with and job.batch.batch in self._compared_with:
            version = self._compared_with.pop(job.batch.batch)
            key = ModelKey(job.batch.model, version)
            # Behind what has come meanwhile. Without a copy it tells that nothing was compared.
            self._to_device.put(job.shadow or Shadow(job.batch.batch, key, "", 0, (), ()))

    def _release(self, job: Job) -> None:
        if job.staging is not None and job.staging.batch is not None and job.staging.is_pooled:
            self._pool.give_back(job.staging.batch)

    def _say(self, event: Event) -> None:
        with self._lock:
            is_dead = self._is_dead
        if not is_dead:
            self._tell(event)

    def _die(self, exit_code: int, reason: str) -> None:
        with self._lock:
            was_dead, self._is_dead = self._is_dead, True
        if not was_dead:
            self._tell(EngineFailed(int(exit_code), reason))

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop. A bug in it must end the process, not leave it half alive."""
        try:
            loop()
        except Exception as error:
            log.exception("pipeline thread failed", thread=threading.current_thread().name)
            self._die(ExitCode.INTERNAL, f"{threading.current_thread().name}: {type(error).__name__}")
