"""The pipeline: each batch ends once, stages overlap, faults stay where they belong."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from types import ModuleType

import hr_engine
import hr_models
import numpy as np
import pytest
from hr_engine import SPEC, TIMEOUT_S, GatedEngine, Running
from hr_worker import batch_of, gradient, image_frame, jpeg, raw_frame

from headrace.errors import Code
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Batch,
    Done,
    Encoding,
    Failed,
    Frame,
    ImageInput,
    Limits,
    ModelSpec,
    SizeClassSpec,
    Status,
)
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.emulated_engine import EmulatedEngine
from headrace.workers.staging import Stager, StagingPlan, StagingResult
from headrace.workers.worker_events import EngineFailed, LoadFailed


def filled(value: int) -> Frame:
    return raw_frame(np.full((8, 8, 3), value, np.uint8))


def numbered(number: int, *values: int) -> Batch:
    return batch_of(*(filled(value) for value in values), number=number)


def reds(running: Running) -> list[float]:
    return [float(np.frombuffer(result.payloads[0], "<f4")[0]) for result in running.done().results]


def test_each_frame_gets_its_own_result_in_order() -> None:
    """Rows, frames and results never swap."""
    with Running(GatedEngine) as running:
        running.run(numbered(1, 10, 20, 30), numbered(2, 40))

        assert reds(running) == [10, 20, 30]
        assert reds(running) == [40]


def test_the_next_batch_is_staged_while_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds the second batch ready: nothing but its submit lies between two runs."""
    engine = GatedEngine(is_gated=True)
    staged: queue.SimpleQueue[int] = queue.SimpleQueue()
    stage = Stager.stage

    def noting(self: Stager, batch: Batch, plan: StagingPlan) -> StagingResult:
        result = stage(self, batch, plan)
        staged.put(batch.batch)
        return result

    monkeypatch.setattr(Stager, "stage", noting)
    with Running(lambda: engine) as running:
        running.run(numbered(1, 1), numbered(2, 2))
        assert engine.submitted.get(timeout=TIMEOUT_S) == 1
        assert {staged.get(timeout=TIMEOUT_S) for _ in range(2)} == {1, 2}
        assert engine.submitted.empty()

        engine.gate.release(2)

        assert running.done().batch == 1
        assert running.done().batch == 2


def test_one_thread_owns_every_call_of_the_engine_but_collect() -> None:
    engine = GatedEngine()
    with Running(lambda: engine) as running:
        running.run(numbered(1, 1))
        running.done()

    assert engine.threads.pop("collect") == {"headrace-completion"}
    assert set().union(*engine.threads.values()) == {"headrace-device"}


def test_timings_add_up() -> None:
    with Running(GatedEngine) as running:
        running.run(numbered(1, 1))
        done = running.done()

    assert done.ran_us == 1
    assert 0 <= done.staged_us <= done.total_us


# -- faults -------------------------------------------------------------------------------------------


def test_bat_01_a_damaged_image_is_the_error_of_its_frame_alone() -> None:
    """BAT-01: seven results, one error, each at its place."""
    frames = [filled(value) for value in range(8)]
    frames[5] = image_frame(jpeg(gradient(8, 8))[:200], Encoding.JPEG, 8, 8)

    with Running(GatedEngine) as running:
        running.run(batch_of(*frames))
        results = running.done().results

    assert [result.status for result in results] == [Status.OK] * 5 + [Status.ERROR] + [Status.OK] * 2
    assert results[5].code == Code.DAMAGED_IMAGE
    assert np.frombuffer(results[6].payloads[0], "<f4")[0] == 6


def test_a_flag_of_staging_reaches_the_result() -> None:
    frame = image_frame(jpeg(gradient(8, 8))[:-2], Encoding.JPEG, 8, 8)

    with Running(GatedEngine) as running:
        running.run(batch_of(frame, filled(1)))
        results = running.done().results

    assert [result.flags for result in results] == [("image_truncated",), ()]


def test_a_batch_without_a_good_frame_is_done_without_a_run() -> None:
    engine = GatedEngine()
    with Running(lambda: engine) as running:
        running.run(batch_of(Frame("s", b"", 0, (8, 8, 3))))
        done = running.done()

    assert [result.status for result in done.results] == [Status.ERROR]
    assert engine.submitted.empty()


def test_a_failed_run_fails_its_batch_and_the_next_one_runs() -> None:
    """The engine's own words stay in the worker's log."""
    with Running(lambda: GatedEngine(fate={1: "error"})) as running:
        running.run(numbered(1, 1), numbered(2, 2))

        failed = running.result()
        assert isinstance(failed, Failed)
        assert failed.code == Code.BATCH_FAILED
        assert "error" not in failed.message
        assert reds(running) == [2]


@pytest.mark.parametrize(
    ("fate", "code"),
    [
        ("fatal", ExitCode.DEVICE_LOST),
        ("raise", ExitCode.DEVICE_LOST),
        ("lost", ExitCode.INTERNAL),
    ],
)
def test_prc_09_nothing_leaves_after_the_device_is_lost(fate: str, code: ExitCode) -> None:
    """PRC-09: one EngineFailed with its exit code, and no result of a later batch."""
    with Running(lambda: GatedEngine(fate={1: fate})) as running:
        running.run(numbered(1, 1), numbered(2, 2))

        event = running.events.get(timeout=TIMEOUT_S)
        assert isinstance(event, EngineFailed)
        assert event.exit_code == code
    assert running.events.empty()


@pytest.mark.parametrize(
    "wrong",
    [
        Batch(1, "other", "1", "small", (filled(1),)),
        Batch(1, "m", "2", "small", (filled(1),)),
        Batch(1, "m", "1", "huge", (filled(1),)),
    ],
    ids=["model", "version", "size class"],
)
def test_a_batch_for_what_is_not_served_fails_by_name(wrong: Batch) -> None:
    with Running(GatedEngine) as running:
        running.run(wrong)
        failed = running.result()

    assert isinstance(failed, Failed)
    assert failed.code == Code.UNKNOWN_MODEL


def test_a_dropped_batch_is_not_run_and_a_running_one_is_done() -> None:
    """Cancel takes effect until the device has the batch, and is answered either way."""
    engine = GatedEngine(is_gated=True)
    with Running(lambda: engine) as running:
        running.run(numbered(1, 1), numbered(2, 2))
        assert engine.submitted.get(timeout=TIMEOUT_S) == 1

        running.pipeline.drop(1)
        running.pipeline.drop(2)
        running.pipeline.drop(99)
        engine.gate.release(2)

        results = {message.batch: message for message in (running.result(), running.result())}
    assert isinstance(results[1], Done)
    assert isinstance(results[2], Failed)
    assert results[2].code == Code.CANCELLED
    assert engine.submitted.empty()


# -- adapters -----------------------------------------------------------------------------------------


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("hr_user_adapter")
    monkeypatch.setitem(sys.modules, "hr_user_adapter", module)
    return module


def with_adapter(name: str) -> ModelSpec:
    return ModelSpec(
        "m", "1", image=ImageInput(), size_classes=(hr_engine.SMALL,), adapter=f"hr_user_adapter:{name}"
    )


def test_bat_01_post_processing_that_fails_for_one_frame_fails_it_alone(user_module: ModuleType) -> None:
    """BAT-01: the user's function raises for frame 2 of 3."""

    def picky(outputs: dict[str, np.ndarray], placements: list[object]) -> list[object]:
        if (outputs["red"] == 2).any():
            raise ValueError("no twos")
        return [float(red) for red in outputs["red"]]

    user_module.picky = picky  # type: ignore[attr-defined]
    with Running(GatedEngine, with_adapter("picky")) as running:
        running.run(numbered(1, 1, 2, 3))
        results = running.done().results

    assert [result.code for result in results] == ["", Code.POST_PROCESS_FAILED, ""]
    assert [result.outputs for result in results] == [1.0, None, 3.0]


@pytest.mark.parametrize("count", [1, 6])
def test_bat_04_a_wrong_number_of_results_is_matched_to_nobody(user_module: ModuleType, count: int) -> None:
    """BAT-04: all five get an error that names both counts; the worker goes on."""
    user_module.wrong = lambda outputs, placements: [0] * count  # type: ignore[attr-defined]
    with Running(GatedEngine, with_adapter("wrong")) as running:
        running.run(numbered(1, 1, 2, 3, 4, 5), numbered(2, 1))
        results = running.done().results
        after = running.result()

    assert [result.code for result in results] == [Code.RESULT_COUNT] * 5
    assert "5" in results[0].message
    assert str(count) in results[0].message
    assert not isinstance(after, Failed)


def test_results_that_do_not_fit_one_message_are_errors_and_the_others_leave(user_module: ModuleType) -> None:
    """A DONE above the limits would be cut off by the broker, with the worker's connection."""
    user_module.big = lambda outputs, placements: [b"x" * 800 for _ in placements]  # type: ignore[attr-defined]
    limits = Limits(max_header_bytes=5_500)
    with Running(GatedEngine, with_adapter("big"), limits=limits) as running:
        running.run(numbered(1, 1, 2, 3, 4, 5, 6, 7, 8))
        running.run(numbered(2, 1))
        results = running.done().results
        assert running.done().results[0].status is Status.OK

    codes = [result.code for result in results]
    assert codes == [""] + [Code.MESSAGE_TOO_LARGE] * 7


# -- loading, with the real engines ---------------------------------------------------------------------


def test_a_model_that_cannot_be_served_tells_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("this is no model")
    file = hr_models.model_file(path)
    spec = ModelSpec("m", "1", files=(file,), image=ImageInput(), size_classes=(hr_engine.SMALL,))

    running = Running(CpuEngine, spec, files={file.sha256: str(path)})
    running.pipeline.close()

    assert isinstance(running.loaded, LoadFailed)
    assert running.loaded.exit_code == ExitCode.MODEL


def test_an_unknown_adapter_tells_its_exit_code() -> None:
    running = Running(GatedEngine, ModelSpec("m", "1", adapter="nonsense"))
    running.pipeline.close()

    assert isinstance(running.loaded, LoadFailed)
    assert running.loaded.exit_code == ExitCode.CONFIG


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_real_engines_give_each_frame_its_own_pixels(tmp_path: Path, engine: str) -> None:
    """Frames of several sizes, sent in any order: each result is that frame's own mean or first pixel."""
    size_class = SizeClassSpec("small", 8, 8, 4)
    files: dict[str, str] = {}
    if engine == "cpu":
        spec, paths = hr_models.image_spec(tmp_path, hr_models.mean_color(), size_class)
        files = {spec.files[0].sha256: paths[spec.files[0].path]}
    else:
        spec = hr_models.emulated_spec(size_class, base_ms=0.1, per_frame_ms=0.0)

    with Running(CpuEngine if engine == "cpu" else EmulatedEngine, spec, files=files) as running:
        for number in range(20):
            values = [(number * 4 + index) % 250 for index in range(1 + number % 4)]
            running.run(numbered(number, *values))
            got = [float(np.frombuffer(r.payloads[0], "<f4")[0]) for r in running.done().results]
            assert got == pytest.approx(values, abs=0.01)


def test_loading_again_replaces_the_models() -> None:
    engines = []

    def make() -> GatedEngine:
        engines.append(GatedEngine())
        return engines[-1]

    with Running(make) as running:
        running.pipeline.load((SPEC,), {})
        running.events.get(timeout=TIMEOUT_S)
        running.run(numbered(1, 5))
        assert reds(running) == [5]

    assert len(engines) == 2
    assert engines[0].submitted.empty()


class PromptEngine(GatedEngine):
    """Has a result as soon as a run ended, and says so."""

    def has_result(self) -> bool:
        return not self._finished.empty()


def test_a_lone_batch_stays_in_the_device_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is before it and nothing behind: it is staged, run and collected without a hand-over."""
    engine = PromptEngine()
    stage = Stager.stage

    def noting(self: Stager, batch: Batch, plan: StagingPlan) -> StagingResult:
        engine._note("stage")
        return stage(self, batch, plan)

    monkeypatch.setattr(Stager, "stage", noting)
    with Running(lambda: engine) as running:
        for number in range(3):
            running.run(numbered(number, number))
            assert reds(running) == [number]

    assert set().union(*engine.threads.values()) == {"headrace-device"}


def test_batches_that_come_faster_than_they_run_each_end_once() -> None:
    """Whichever threads they pass through: results stay with their batches, none is lost."""
    with Running(PromptEngine) as running:
        for number in range(200):
            running.run(numbered(number, number % 250, 7))
        got = [running.done() for _ in range(200)]

    by_batch = {done.batch: np.frombuffer(done.results[0].payloads[0], "<f4")[0] for done in got}
    assert by_batch == {number: number % 250 for number in range(200)}
