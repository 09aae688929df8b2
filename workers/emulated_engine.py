"""The ``emulated`` engine: a device that takes T(b) = base_ms + per_frame_ms * b and computes nothing.

For studies without a GPU. Its name is in every profile, status and report, so that no figure of it can be
taken for a real one.

Theory of operation: the device runs one batch after another. ``submit`` returns at once, as a GPU's launch
does, and books the batch on an absolute schedule: it begins when the device is next free, or now, and ends
T(b) later. ``collect`` sleeps until then. Sleeping too long once therefore delays no later batch: batches
submitted back to back do not drift.

Outputs: ``fingerprint`` [count, 2, channels] float32, the first and the centre pixel of each staged row, so
that a test can tell rows apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import ModelError
from headrace.protocol.messages import ClassProfile, EmulatedCost, ModelProfile, ModelSpec, TensorSpec
from headrace.workers.engine import BatchOutputs, InputPlan, ModelKey, StagedBatch
from headrace.workers.engine_base import EngineBase, ServedClass
from headrace.workers.measure import buckets_up_to
from headrace.workers.onnx_model import DYNAMIC

#: Name of the one input and the one output of every emulated model.
INPUT_NAME = "frames"
OUTPUT_NAME = "fingerprint"


@dataclass(slots=True)
class _EmulatedModel:
    cost: EmulatedCost
    channels: int
    classes: dict[str, ServedClass]


@dataclass(frozen=True, slots=True)
class _Booked:
    """A batch on the device's schedule: ``outputs`` are ready, only time has to pass until ``done_ns``."""

    outputs: BatchOutputs
    done_ns: int


class EmulatedEngine(EngineBase[_EmulatedModel, _Booked]):
    """See the module.

    ``pads_to_bucket``: T of the bucket, as captured graphs cost on a GPU, instead of T of the real rows.
    ``clock`` and ``wait`` (seconds, returns True when the engine was closed) are replaced by tests.
    """

    name = "emulated"
    device = "emulated"

    def __init__(
        self,
        *,
        pads_to_bucket: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__()
        self._pads_to_bucket = pads_to_bucket
        self._clock = clock
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._free_at_ns = 0

    def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
        """Take a model with an emulated cost, an image input and size classes; its files are not read.

        Raises ModelError when one of the three is missing."""
        self._check_owner("load")
        label = f"{spec.name}:{spec.version}"
        if spec.emulated is None:
            raise ModelError(f"model {label}: the emulated engine needs emulated.base_ms and per_frame_ms")
        if spec.image is None or not spec.size_classes:
            raise ModelError(f"model {label}: an emulated model needs an image input and size classes")
        channels = spec.image.channels
        self._models[ModelKey(spec.name, spec.version)] = _EmulatedModel(
            spec.emulated,
            channels,
            {
                c.name: ServedClass(c, (InputPlan(INPUT_NAME, "uint8", (c.height, c.width, channels), True),))
                for c in spec.size_classes
            },
        )

    def profile(self, model: ModelKey) -> ModelProfile:
        """Return the cost formula's own figures; there is nothing to test or to warm up."""
        self._check_owner("profile")
        loaded = self._loaded(model)
        classes = []
        for served in loaded.classes.values():
            served.buckets = buckets_up_to(served.size_class.max_batch_size)
            costs = tuple((bucket, _cost_ns(loaded.cost, bucket) / 1e6) for bucket in served.buckets)
            classes.append(ClassProfile(replace(served.size_class), costs))
        inputs = (TensorSpec(INPUT_NAME, "uint8", (DYNAMIC, DYNAMIC, loaded.channels)),)
        note = f"emulated: {loaded.cost.base_ms} ms + {loaded.cost.per_frame_ms} ms a frame, no model runs"
        return ModelProfile(model.name, model.version, tuple(classes), inputs, (note,))

    def submit(self, batch: StagedBatch) -> None:
        """Book a staged batch on the schedule; returns at once."""
        self._check_owner("submit")
        self._check_batch(batch)
        loaded = self._loaded(batch.model)
        pixels = batch.inputs[0].array[: batch.count]
        centre = pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2]
        fingerprint = np.stack([pixels[:, 0, 0], centre], axis=1).astype(np.float32)
        cost_ns = _cost_ns(loaded.cost, batch.bucket if self._pads_to_bucket else batch.count)
        self._free_at_ns = max(self._free_at_ns, self._clock()) + cost_ns
        outputs = BatchOutputs(batch.batch, {OUTPUT_NAME: fingerprint}, cost_ns)
        self._finished.put(_Booked(outputs, self._free_at_ns))

    def has_result(self) -> bool:
        """Tell whether the time of all that was submitted has come."""
        return self._free_at_ns <= self._clock()

    def collect(self) -> BatchOutputs:
        """Return the oldest submitted batch once its time has come."""
        booked = self._next()
        while (left_ns := booked.done_ns - self._clock()) > 0:
            if self._wait(left_ns / 1e9):
                break  # closed: the result is there, waiting for it longer serves nobody
        return booked.outputs

    def close(self) -> None:
        """Release the models; a waiting ``collect`` ends. Idempotent, and allowed from any thread."""
        self._closing.set()
        super().close()


def _cost_ns(cost: EmulatedCost, rows: int) -> int:
    return round((cost.base_ms + cost.per_frame_ms * rows) * 1e6)
