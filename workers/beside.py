"""Loads a model beside those that serve, and runs single batches on it for comparison.

Not here: what is loaded at the start (pipeline.py), whether two versions are near enough (the broker).

Theory of operation. The new model gets an engine of its own, made, loaded, tested and measured by a thread
of its own while the device thread serves on; then the engine is handed over to the device thread. A batch
that is to be compared leaves a copy of its staged inputs behind. When its own answer has left, the device
thread runs the copy on the other version, and both outputs are compared. At most one such copy exists.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import structlog

from headrace.errors import ConfigError, DeviceError, ModelError
from headrace.protocol.messages import Compared, ModelProfile, ModelSpec
from headrace.workers.adapters import Adapter, load_adapter
from headrace.workers.compare import Array, compare
from headrace.workers.engine import Engine, InputBuffer, InputPlan, ModelKey, StagedBatch
from headrace.workers.staging import StagingPlan

log = structlog.get_logger()

#: Of the thread that tests and measures a model while others serve; it ends with that.
LOADING_NICENESS = 10

Plans = dict[tuple[str, str, str], StagingPlan]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One model in an engine, ready to be served."""

    spec: ModelSpec
    engine: Engine
    profile: ModelProfile
    plans: Plans
    adapter: Adapter

    @property
    def key(self) -> ModelKey:
        """Return what it is called in its engine."""
        return ModelKey(self.spec.name, self.spec.version)


def load_into(
    engine: Engine, spec: ModelSpec, files: Mapping[str, str], between: Callable[[], None] | None = None
) -> LoadedModel:
    """Load, test and measure one model. ``files`` maps sha256 to a verified local path.

    ``between`` is called once it is loaded. Raises ModelError, DeviceError or ConfigError as the engine and
    the adapter do."""
    key = ModelKey(spec.name, spec.version)
    adapter = load_adapter(spec.adapter, spec.adapter_options)
    engine.load(spec, {file.path: files[file.sha256] for file in spec.files})
    if between is not None:
        between()
    profile = engine.profile(key)
    plans: Plans = {}
    for each in profile.classes:
        name = each.size_class.name
        buckets = tuple(bucket for bucket, _ in each.buckets)
        plan = StagingPlan(key, spec, each.size_class, engine.plan(key, name), buckets)
        plans[key.name, key.version, name] = plan
    for note in profile.notes:
        log.info("model note", model=f"{key.name}:{key.version}", note=note)
    return LoadedModel(spec, engine, profile, plans, adapter)


def load_beside(
    make_engine: Callable[[], Engine], spec: ModelSpec, files: Mapping[str, str]
) -> LoadedModel | str:
    """Load a model into an engine of its own; return why it can't be served instead of raising."""
    engine: Engine | None = None
    label = f"{spec.name}:{spec.version}"
    try:
        engine = make_engine()
        loaded = load_into(engine, spec, files, _give_way)
    except (ModelError, DeviceError, ConfigError) as error:
        log.warning("model not loaded beside the others", model=label, reason=str(error))
        reason = str(error)
    except Exception as error:  # a library's: this model can't be served, the others go on
        log.exception("loading beside the others failed", model=label)
        reason = f"loading it failed: {type(error).__name__}"
    else:
        engine.hand_over()
        return loaded
    if engine is not None:
        engine.close()
    return reason


def _give_way() -> None:
    """Let the threads that serve go first. Not before the session is there: threads that it has made for its
    runs keep the priority of the one that made it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICENESS)


@dataclass(slots=True, eq=False)
class Shadow:
    """A batch that is to be run on another version too. ``expected`` is set once its own answer is there."""

    batch: int
    key: ModelKey
    size_class: str
    count: int
    inputs: tuple[InputBuffer, ...]
    plans: tuple[InputPlan, ...]
    expected: dict[str, Array] | None = None
    patient_until_ns: int = 0


def copy_for(version: str, staged: StagedBatch, plan: StagingPlan) -> Shadow | None:
    """Keep what a batch was staged from; None where a device reads it from elsewhere."""
    if staged.direct:
        return None
    inputs = tuple(replace(buffer, array=buffer.array[: staged.count].copy()) for buffer in staged.inputs)
    key = ModelKey(staged.model.name, version)
    return Shadow(staged.batch, key, staged.size_class, staged.count, inputs, plan.inputs)


def run_shadow(shadow: Shadow, engine: Engine, plan: StagingPlan) -> Compared:
    """Run a copy on its other version, in the device thread, and compare. Nothing else is in that engine."""
    number, version = shadow.batch, shadow.key.version
    if shadow.expected is None:
        return Compared(number, version)
    fault = _find_plan_fault(shadow.plans, plan.inputs)
    if fault:
        return Compared(number, version, error=fault)
    count = min(shadow.count, plan.buckets[-1])
    bucket = engine.bucket_for(shadow.key, shadow.size_class, count)
    buffers = tuple(
        InputBuffer(wanted.name, _padded(buffer.array[:count], bucket))
        for buffer, wanted in zip(shadow.inputs, plan.inputs, strict=True)
    )
    engine.submit(StagedBatch(number, shadow.key, shadow.size_class, count, bucket, buffers))
    outputs = engine.collect()
    if outputs.error:
        log.warning("compared batch failed", batch=number, version=version, reason=outputs.error)
        return Compared(number, version, error="its run failed; the worker's log says why")
    found = compare(shadow.expected, outputs.outputs, count)
    if found.error:
        return Compared(number, version, error=found.error)
    return Compared(number, version, count, found.agreed, found.max_abs, found.max_rel, found.non_finite)


def _find_plan_fault(first: tuple[InputPlan, ...], second: tuple[InputPlan, ...]) -> str:
    taken = [(plan.dtype, plan.shape) for plan in second]
    given = [(plan.dtype, plan.shape) for plan in first]
    return "" if taken == given else f"its inputs are {taken}, not {given}"


def _padded(rows: Array, bucket: int) -> Array:
    if len(rows) == bucket:
        return rows
    array = np.zeros((bucket, *rows.shape[1:]), dtype=rows.dtype)
    array[: len(rows)] = rows
    return array
