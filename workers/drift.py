"""Runs a share of the batches on the FP32 file of their model too, and keeps how far the answers differ.

Not here: comparing versions before a reload (``pipeline``), what differences mean (the metrics' reader).

Theory of operation. A worker that serves FP16 or INT8 keeps a copy of what a sampled batch was staged from,
and what came out. A thread of its own, of the lowest priority, loads the FP32 file into an engine of its
own at the first sample, waits for a moment without batches, runs the copy and compares. At most one is about;
sampled batches that find another, or a worker that is never idle, are counted as skipped. Which batches are
sampled follows from their numbers alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from headrace.errors import HeadraceError
from headrace.protocol.messages import ModelProfile, ModelSpec
from headrace.workers.beside import LoadedModel, Shadow, copy_for, load_into, run_shadow
from headrace.workers.compare import Array
from headrace.workers.engine import Engine, ModelKey, StagedBatch
from headrace.workers.staging import StagingPlan

log = structlog.get_logger()

#: Of the thread that loads and runs FP32 files.
NICENESS = 19

#: How long a sample waits for a moment without batches, and how often it looks.
PATIENCE_S = 10.0
LOOK_S = 0.005

#: Multiples of it (2**64 by the golden ratio) are spread evenly over 0 to 2**64, however many are taken.
_SPREAD = 0x9E3779B97F4A7C15
_RANGE = 1 << 64


def is_sampled(number: int, share: float) -> bool:
    """Tell whether the batch of this number is compared, for a share from 0 to 1."""
    return (number * _SPREAD) % _RANGE < share * _RANGE


@dataclass(slots=True)
class Drift:
    """Of one model since it was loaded: rows compared, skipped, with another largest value, and the largest
    differences."""

    counts_classes: bool
    rows: int = 0
    skipped: int = 0
    changed: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


class DriftWatch:
    """See the module. ``is_idle`` tells that no batch is in the worker. Any thread may call."""

    def __init__(self, make_engine: Callable[[], Engine], is_idle: Callable[[], bool]) -> None:
        self._make_engine = make_engine
        self._is_idle = is_idle
        self._changed = threading.Condition()
        self._files: Mapping[str, str] = {}
        self._watched: dict[ModelKey, tuple[ModelSpec, Drift]] = {}
        self._sample: Shadow | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._round = 0  # counts what was loaded: engines of an earlier round are of no use

    def watch(
        self,
        models: tuple[ModelSpec, ...],
        profiles: list[ModelProfile],
        files: Mapping[str, str],
        engine: Engine,
    ) -> tuple[ModelProfile, ...]:
        """Sample these models from now on, those that ask for it; return their profiles with notes on it."""
        noted = []
        watched = {}
        for spec, profile in zip(models, profiles, strict=True):
            note = ""
            if spec.fp32_files and spec.fp32_sample_share > 0:
                if engine.loads_beside:
                    drift = Drift(counts_classes=spec.adapter == "classify")
                    watched[ModelKey(spec.name, spec.version)] = (spec, drift)
                    note = f"a share of {spec.fp32_sample_share:g} of the batches is compared with FP32"
                else:
                    note = (
                        "comparison with FP32 is off: the"
                        f" {engine.name} engine can't load a model beside those it serves"
                    )
            noted.append(replace(profile, notes=(*profile.notes, note)) if note else profile)
        with self._changed:
            self._watched, self._files, self._sample = watched, files, None
            self._round += 1
            self._changed.notify()
        return tuple(noted)

    def sample(self, staged: StagedBatch, plan: StagingPlan) -> Shadow | None:
        """Keep a copy of a batch that is about to run, if it is sampled and can be."""
        spec = plan.spec
        if not spec.fp32_files or not is_sampled(staged.batch, spec.fp32_sample_share):
            return None
        with self._changed:
            if staged.model not in self._watched:
                return None
            is_free = self._sample is None
        copy = copy_for(spec.version, staged, plan) if is_free else None
        if copy is None:
            self._skip(staged.model, staged.count)
        return copy

    def give(self, sample: Shadow, outputs: dict[str, Array]) -> None:
        """Take a copy whose batch was answered."""
        sample.expected = outputs
        with self._changed:
            if self._sample is None and not self._is_closed and sample.key in self._watched:
                self._sample = sample
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="headrace-drift", daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        self._skip(sample.key, sample.count)

    def figures(self) -> dict[str, float]:
        """Return what was found, by name and model."""
        found: dict[str, float] = {}
        with self._changed:
            for key, (_, drift) in self._watched.items():
                label = f"{key.name}:{key.version}"
                found[f"model_drift_max_abs/{label}"] = drift.max_abs
                found[f"model_drift_max_rel/{label}"] = drift.max_rel
                found[f"model_drift_rows_total/{label}"] = drift.rows
                found[f"model_drift_skipped_rows_total/{label}"] = drift.skipped
                if drift.counts_classes:
                    share = drift.changed / drift.rows if drift.rows else 0.0
                    found[f"model_drift_class_changes_ratio/{label}"] = share
        return found

    def close(self) -> None:
        """End the thread, which may be in a run: it is not waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _skip(self, key: ModelKey, count: int) -> None:
        with self._changed:
            if key in self._watched:
                self._watched[key][1].skipped += count

    # -- its thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        # Before a session is made: the threads that one makes for its runs inherit it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        engines: dict[ModelKey, LoadedModel | None] = {}
        of_round = 0
        while True:
            with self._changed:
                while not self._is_closed and self._sample is None and self._round == of_round:
                    self._changed.wait()
                is_closed, sample, files = self._is_closed, self._sample, self._files
                has_others, of_round = self._round != of_round, self._round
            if has_others or is_closed:
                for loaded in engines.values():
                    if loaded is not None:
                        loaded.engine.close()
                engines.clear()
            if is_closed:
                return
            if sample is not None:
                self._look_at(sample, engines, files, of_round)

    def _look_at(
        self,
        sample: Shadow,
        engines: dict[ModelKey, LoadedModel | None],
        files: Mapping[str, str],
        of_round: int,
    ) -> None:
        if sample.key not in engines:
            engines[sample.key] = self._load(sample.key, files)
        loaded = engines[sample.key]
        compared = None
        if loaded is not None and self._wait_for_idle(of_round):
            plan = loaded.plans.get((sample.key.name, sample.key.version, sample.size_class))
            try:
                compared = run_shadow(sample, loaded.engine, plan) if plan is not None else None
            except Exception:
                log.exception("batch not compared with FP32", batch=sample.batch)
        with self._changed:
            if self._round != of_round:
                return
            self._sample = None
            drift = self._watched[sample.key][1]
            if compared is None or compared.error or not compared.frames:
                drift.skipped += sample.count
                return
            drift.rows += compared.frames
            drift.skipped += sample.count - compared.frames
            drift.changed += compared.frames - compared.agreed
            drift.max_abs = max(drift.max_abs, compared.max_abs)
            drift.max_rel = max(drift.max_rel, compared.max_rel)

    def _load(self, key: ModelKey, files: Mapping[str, str]) -> LoadedModel | None:
        with self._changed:
            if key not in self._watched:
                return None
            spec = self._watched[key][0]
        engine: Engine | None = None
        try:
            engine = self._make_engine()
            return load_into(engine, replace(spec, files=spec.fp32_files, fp32_files=()), files)
        except HeadraceError as error:
            log.warning("FP32 file not loaded: nothing is compared", model=key.name, reason=str(error))
        except Exception:  # a library's: the model is served all the same
            log.exception("FP32 file not loaded: nothing is compared", model=key.name)
        if engine is not None:
            engine.close()
        return None

    def _wait_for_idle(self, of_round: int) -> bool:
        end = time.monotonic() + PATIENCE_S
        while not self._is_idle():
            if time.monotonic() > end or self._is_closed or self._round != of_round:
                return False
            time.sleep(LOOK_S)
        return True
