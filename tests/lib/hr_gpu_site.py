"""An engine on a recording device, a model in it and batches for it: what tests of the cuda engine share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hr_models
import numpy as np
import onnx
from hr_gpu import RecordingDevice
from numpy.typing import NDArray

from headrace.protocol.messages import ModelProfile, ModelSpec, SizeClassSpec
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.slots import Bucket
from headrace.workers.cuda.suspects import Suspects
from headrace.workers.engine import BatchOutputs, InputBuffer, ModelKey, StagedBatch
from headrace.workers.staging import StagingPlan

MEAN = ModelKey("mean", "1")
SMALL = SizeClassSpec("small", 32, 48, 4)
LARGE = SizeClassSpec("large", 64, 64, 4)


class GpuSite:
    """One engine, one model "mean" with two size classes, each with buckets 1, 2 and 4."""

    def __init__(
        self,
        folder: Path,
        device: RecordingDevice | None = None,
        settings: CudaSettings | None = None,
        *,
        gate: Gate | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self.folder = folder
        self.device = device or RecordingDevice()
        self.gate = gate or Gate()
        self.engine = CudaEngine(
            self.device, settings or CudaSettings(slots=3), gate=self.gate, suspects=suspects
        )
        self.specs: dict[ModelKey, ModelSpec] = {}
        self._numbers = 0

    def load(
        self,
        model: onnx.ModelProto | None = None,
        classes: Sequence[SizeClassSpec] = (SMALL, LARGE),
        key: ModelKey = MEAN,
    ) -> ModelProfile:
        spec, files = hr_models.image_spec(
            self.folder / key.name,
            model or hr_models.mean_color(),
            *classes,
            name=key.name,
            version=key.version,
        )
        self.specs[key] = spec
        self.engine.load(spec, files)
        return self.engine.profile(key)

    def bucket(self, rows: int, size_class: str = "small", key: ModelKey = MEAN) -> Bucket:
        return self.engine._models[key].buckets[size_class, rows]

    def stage(
        self, colors: Sequence[Sequence[int]], size_class: str = "small", key: ModelKey = MEAN
    ) -> StagedBatch:
        """Stage frames of one colour each, in the engine's own pool."""
        rows = self.engine.bucket_for(key, size_class, len(colors))
        spec = self.specs[key]
        plan = StagingPlan(
            key,
            spec,
            next(each for each in spec.size_classes if each.name == size_class),
            self.engine.plan(key, size_class),
            (rows,),
        )
        pool = self.engine.staging_pool()
        buffers = pool.take(plan, rows) if pool is not None else _plain(plan, rows)
        for buffer in buffers:
            buffer.array[...] = 0
            for row, color in enumerate(colors):
                buffer.array[row] = color
        self._numbers += 1
        return StagedBatch(self._numbers, key, size_class, len(colors), rows, buffers)

    def give_back(self, batch: StagedBatch) -> None:
        pool = self.engine.staging_pool()
        if pool is not None:
            pool.give_back(batch)

    def ask(self, colors: Sequence[Sequence[int]], size_class: str = "small") -> NDArray[np.float32]:
        """Run one batch to its end; return the colour found in each row."""
        batch = self.stage(colors, size_class)
        self.engine.submit(batch)
        outputs = self.engine.collect()
        self.give_back(batch)
        return colors_of(outputs)


def colors_of(outputs: BatchOutputs) -> NDArray[np.float32]:
    assert not outputs.error, outputs.error
    (array,) = outputs.outputs.values()
    return np.asarray(array, np.float32)


def colors(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    return [tuple(map(int, rng.integers(0, 256, 3))) for _ in range(count)]  # type: ignore[misc]


def _plain(plan: StagingPlan, rows: int) -> tuple[InputBuffer, ...]:
    return tuple(
        InputBuffer(each.name, np.zeros((rows, *each.shape), np.dtype(each.dtype))) for each in plan.inputs
    )
