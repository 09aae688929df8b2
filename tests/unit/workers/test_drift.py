"""The comparison with FP32: what is sampled, what is found, and that batches never wait for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_clients import wait_for
from hr_engine import SPEC, TIMEOUT_S, GatedEngine, Running
from hr_worker import batch_of, raw_frame

from headrace.protocol.messages import Batch, Done, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.drift import is_sampled


def spec_of(folder: Path, model: object, version: str, **fields: object) -> tuple[ModelSpec, dict[str, str]]:
    (folder / version).mkdir()
    fields = {"image": ImageInput(), "size_classes": (SizeClassSpec("small", 8, 8, 4),), **fields}
    spec, files = hr_models.save(folder / version, model, version=version, **fields)
    return spec, dict.fromkeys([spec.files[0].sha256], *files.values())


def numbered(number: int, *values: int) -> Batch:
    frames = batch_of(*(raw_frame(np.full((8, 8, 3), value, np.uint8)) for value in values)).frames
    return Batch(number, "m", "1", "small", frames)


def reds(message: Done) -> list[float]:
    return [float(np.frombuffer(result.payloads[0], "<f4")[0]) for result in message.results]


def watched(folder: Path, bias: float, *, adapter: str = "tensors") -> tuple[ModelSpec, dict[str, str]]:
    served, files = spec_of(folder, hr_models.mean_color_plus(bias), "1", adapter=adapter)
    full, others = spec_of(folder, hr_models.mean_color(), "fp32")
    return replace(served, fp32_files=full.files, fp32_sample_share=1.0), files | others


def wait_for_rows(running: Running, count: int) -> dict[str, float]:
    found: dict[str, float] = {}

    def are_counted() -> bool:
        found.update(running.pipeline.drift.figures())
        return found["model_drift_rows_total/m:1"] + found["model_drift_skipped_rows_total/m:1"] >= count

    wait_for(are_counted, TIMEOUT_S)
    return found


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_the_difference_to_the_fp32_file_is_found(tmp_path: Path, bias: float) -> None:
    """Absolute, and relative to the largest value that was served."""
    spec, files = watched(tmp_path, bias)
    with Running(lambda: CpuEngine(profile_budget_ms=50), spec, files=files) as running:
        running.run(numbered(1, 10, 20))
        assert reds(running.done()) == [10 + bias, 20 + bias]
        found = wait_for_rows(running, 2)

    assert found == {
        "model_drift_max_abs/m:1": bias,
        "model_drift_max_rel/m:1": pytest.approx(bias / (20 + bias)),
        "model_drift_rows_total/m:1": 2,
        "model_drift_skipped_rows_total/m:1": 0,
    }
    assert any("compared with FP32" in note for note in running.loaded.profiles[0].notes)


def test_classes_that_change_are_counted_for_classify(tmp_path: Path) -> None:
    """A bias moves no class."""
    spec, files = watched(tmp_path, 0.5, adapter="classify")
    with Running(lambda: CpuEngine(profile_budget_ms=50), spec, files=files) as running:
        running.run(numbered(1, 10))
        running.done()
        found = wait_for_rows(running, 1)

    assert found["model_drift_class_changes_ratio/m:1"] == 0


def test_a_file_that_cant_be_loaded_is_skipped(tmp_path: Path) -> None:
    """The model is served all the same."""
    spec, files = watched(tmp_path, 0.5)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no graph")
    files[spec.fp32_files[0].sha256] = str(broken)
    with Running(lambda: CpuEngine(profile_budget_ms=50), spec, files=files) as running:
        running.run(numbered(1, 10))
        running.done()
        found = wait_for_rows(running, 1)

    assert found["model_drift_skipped_rows_total/m:1"] == 1


def test_an_engine_that_loads_nothing_beside_says_so() -> None:
    """As the one for GPUs."""

    class Alone(GatedEngine):
        loads_beside = False

    spec = replace(SPEC, fp32_files=(hr_models.ModelFile("f.onnx", "0a" * 32, 1),), fp32_sample_share=1.0)
    with Running(Alone, spec) as running:
        running.run(numbered(1, 10))
        running.done()

        assert running.pipeline.drift.figures() == {}
    assert "comparison with FP32 is off" in running.loaded.profiles[0].notes[0]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_share_of_batches_is_sampled(share: float) -> None:
    """By their numbers, evenly spread."""
    numbers = range(1_000_000, 1_010_000)

    assert sum(is_sampled(number, share) for number in numbers) == pytest.approx(10_000 * share, abs=2)
