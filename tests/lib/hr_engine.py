"""An engine whose runs the test lets go, fail or break, and a pipeline around any engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from headrace.errors import ClosedError, DeviceError
from headrace.protocol.messages import (
    Batch,
    ClassProfile,
    Done,
    Failed,
    ImageInput,
    Limits,
    ModelProfile,
    ModelSpec,
    SizeClassSpec,
)
from headrace.workers.engine import BatchOutputs, Engine, InputPlan, ModelKey, StagedBatch
from headrace.workers.pipeline import Pipeline
from headrace.workers.worker_events import BatchFinished, Event, ModelsLoaded

#: How long anything in a test may take before it counts as lost.
TIMEOUT_S = 20.0

SMALL = SizeClassSpec("small", 8, 8, max_batch_size=8)
SPEC = ModelSpec("m", "1", image=ImageInput(), size_classes=(SMALL,), adapter="tensors")


class GatedEngine:
    """Gives the first pixel's red of each row. ``gate`` is passed once per run: a test that sets
    ``is_gated`` decides when each run ends.

    ``fate`` maps a batch number to "error", "fatal", "raise" (DeviceError from submit) or "lost" (an
    exception that nobody expects).
    """

    name = "cpu"
    device = "cpu"
    loads_beside = True

    def __init__(self, *, is_gated: bool = False, fate: dict[int, str] | None = None) -> None:
        self.fate = fate or {}
        self.is_gated = is_gated
        self.gate = threading.Semaphore(0)
        self.submitted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.threads: dict[str, set[str]] = {}
        self._finished: queue.SimpleQueue[BatchOutputs | None] = queue.SimpleQueue()

    def _note(self, call: str) -> None:
        self.threads.setdefault(call, set()).add(threading.current_thread().name)

    def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
        self._note("load")

    def profile(self, model: ModelKey) -> ModelProfile:
        self._note("profile")
        buckets = ((1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0))
        return ModelProfile(model.name, model.version, (ClassProfile(SMALL, buckets),), ())

    def plan(self, model: ModelKey, size_class: str) -> tuple[InputPlan, ...]:
        return (InputPlan("x", "uint8", (8, 8, 3), is_image=True),)

    def bucket_for(self, model: ModelKey, size_class: str, count: int) -> int:
        return 8

    def staging_pool(self) -> None:
        return None

    def submit(self, batch: StagedBatch) -> None:
        self._note("submit")
        self.submitted.put(batch.batch)
        if self.is_gated:
            assert self.gate.acquire(timeout=TIMEOUT_S)
        fate = self.fate.get(batch.batch, "")
        if fate == "raise":
            raise DeviceError("device lost")
        if fate == "lost":
            raise RuntimeError("nobody expects this")
        red = batch.inputs[0].array[: batch.count, 0, 0, 0].astype(np.float32)
        outputs: dict[str, np.ndarray] = {} if fate else {"red": red}
        self._finished.put(BatchOutputs(batch.batch, outputs, 1_000, fate, is_fatal=fate == "fatal"))

    def collect(self) -> BatchOutputs:
        self._note("collect")
        outputs = self._finished.get()
        if outputs is None:
            raise ClosedError("closed")
        return outputs

    def has_result(self) -> bool:
        return False

    def unload(self, model: ModelKey) -> None:
        self._note("unload")

    def hand_over(self) -> None:
        self._note("hand_over")

    def close(self) -> None:
        self._finished.put(None)


class Running:
    """A pipeline with its models loaded; ``events`` holds what it tells. Leaving the block closes it."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *specs: ModelSpec,
        files: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.pipeline = Pipeline(make_engine, self.events.put, limits=limits)
        self.pipeline.load(specs or (SPEC,), files or {})
        self.loaded = self.events.get(timeout=TIMEOUT_S)

    def run(self, *batches: Batch) -> None:
        for each in batches:
            self.pipeline.run(each)

    def result(self) -> Done | Failed:
        event = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(event, BatchFinished), event
        return event.message

    def done(self) -> Done:
        message = self.result()
        assert isinstance(message, Done), message
        return message

    def __enter__(self) -> Self:
        assert isinstance(self.loaded, ModelsLoaded), self.loaded
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipeline.close(timeout_s=5.0)
