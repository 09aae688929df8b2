"""What every engine promises behind the Engine seam, whatever the device.

Each engine serves the same two models: "mean" with the classes "small" (32x48, batches to 4) and "large"
(64x64, batches to 6), and "other" with "small" alone. The answer to a frame tells its colour, so rows can be
told apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_gpu import RecordingDevice
from numpy.typing import NDArray

from headrace.errors import ClosedError, ModelError
from headrace.protocol.messages import EmulatedCost, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.cuda.device import Device
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.host_device import HostDevice
from headrace.workers.emulated_engine import EmulatedEngine
from headrace.workers.engine import (
    BatchOutputs,
    Engine,
    EngineMisuseError,
    InputBuffer,
    ModelKey,
    StagedBatch,
)

MEAN = ModelKey("mean", "1")
OTHER = ModelKey("other", "2")
SMALL = SizeClassSpec("small", 32, 48, 4)
LARGE = SizeClassSpec("large", 64, 64, 6)

#: A colour per row of a batch; padding rows are MARKED, which the failing model can't bear.
COLORS = ((10, 20, 30), (40, 50, 60), (70, 80, 90), (15, 25, 35), (45, 55, 65), (75, 85, 95))


def _cuda(device: Device) -> Engine:
    # As many slots as a test submits before it collects.
    return CudaEngine(device, CudaSettings(slots=4), gate=Gate())


ENGINES: dict[str, Callable[[], Engine]] = {
    "cpu": CpuEngine,
    "emulated": EmulatedEngine,
    "cuda-recorded": lambda: _cuda(RecordingDevice()),
    "cuda-on-host": lambda: _cuda(HostDevice()),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine with both models loaded and profiled by the thread of the test."""
    engine = ENGINES[request.param]()
    for key, classes in ((MEAN, (SMALL, LARGE)), (OTHER, (SMALL,))):
        spec, files = hr_models.image_spec(
            tmp_path / key.name,
            hr_models.mean_color(),
            *classes,
            name=key.name,
            version=key.version,
            emulated=EmulatedCost(1.0, 0.1),
        )
        engine.load(spec, files)
        engine.profile(key)
    yield engine
    engine.close()


def _stage(
    engine: Engine,
    number: int,
    colors: tuple[tuple[int, int, int], ...],
    model: ModelKey = MEAN,
    size_class: str = "small",
    padding: int = 0,
) -> StagedBatch:
    bucket = engine.bucket_for(model, size_class, len(colors))
    (plan,) = engine.plan(model, size_class)
    array: NDArray[np.generic] = np.full((bucket, *plan.shape), padding, plan.dtype)
    for row, color in enumerate(colors):
        array[row] = color
    return StagedBatch(number, model, size_class, len(colors), bucket, (InputBuffer(plan.name, array),))


def _colors(outputs: BatchOutputs) -> NDArray[np.float32]:
    """Return the colour of each row [count, 3] from either engine's answer."""
    assert not outputs.error, outputs.error
    (array,) = outputs.outputs.values()
    rows = np.asarray(array, np.float32)
    return rows[:, 0] if rows.ndim == 3 else rows


def test_profile_lists_every_bucket_of_every_class(tmp_path: Path) -> None:
    """A profile names its model, keeps the classes' order and gives each bucket a cost, ascending."""
    spec, files = hr_models.image_spec(
        tmp_path, hr_models.mean_color(), SMALL, LARGE, emulated=EmulatedCost(1.0, 0.5)
    )
    for make in ENGINES.values():
        engine = make()
        engine.load(spec, files)

        profile = engine.profile(ModelKey("m", "1"))

        assert (profile.name, profile.version) == ("m", "1")
        assert [c.size_class for c in profile.classes] == [SMALL, LARGE]
        assert [[bucket for bucket, _ in c.buckets] for c in profile.classes] == [[1, 2, 4], [1, 2, 4, 6]]
        assert all(cost_ms > 0 for c in profile.classes for _, cost_ms in c.buckets)
        assert [
            spec.shape[-1] if engine.name == "emulated" else spec.shape[0] for spec in profile.inputs
        ] == [3]
        engine.close()


def test_emulated_says_so_everywhere(tmp_path: Path) -> None:
    """No figure of the emulated engine can be taken for a real one."""
    engine = EmulatedEngine()
    engine.load(hr_models.emulated_spec(SMALL), {})

    profile = engine.profile(ModelKey("m", "1"))

    assert engine.name == engine.device == "emulated"
    assert any("emulated" in note for note in profile.notes)


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_bucket_for_is_the_smallest_that_holds(engine: Engine, count: int, bucket: int) -> None:
    """A batch goes into the smallest bucket that has room for it."""
    assert engine.bucket_for(MEAN, "large", count) == bucket


@pytest.mark.parametrize("count", [0, -1, 7, 1_000_000])
def test_bucket_for_refuses_counts_without_a_bucket(engine: Engine, count: int) -> None:
    """A count beyond the largest batch, or none at all, is misuse."""
    with pytest.raises(EngineMisuseError, match="fit no bucket"):
        engine.bucket_for(MEAN, "large", count)


def test_plan_is_a_uint8_image_row(engine: Engine) -> None:
    """Frames of an image model are staged as uint8 [height, width, channels]."""
    (plan,) = engine.plan(MEAN, "large")

    assert (plan.dtype, plan.shape, plan.is_image) == ("uint8", (64, 64, 3), True)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_row_gets_its_own_answer(engine: Engine, count: int) -> None:
    """ORT-12: row i of the output belongs to row i of the input, at every batch size."""
    engine.submit(_stage(engine, 7, COLORS[:count]))

    outputs = engine.collect()

    assert outputs.batch == 7
    assert outputs.ran_ns > 0
    np.testing.assert_allclose(_colors(outputs), COLORS[:count], atol=1e-3)


def test_padding_rows_never_leak(engine: Engine) -> None:
    """Whatever stands in the padding rows, the answer has ``count`` rows and they are the same."""
    for number, padding in enumerate((0, 255, hr_models.MARK)):
        engine.submit(_stage(engine, number, COLORS[:3], padding=padding))

        colors = _colors(engine.collect())

        assert colors.shape == (3, 3)
        np.testing.assert_allclose(colors, COLORS[:3], atol=1e-3)


def test_batches_come_back_first_in_first_out(engine: Engine) -> None:
    """Batches of several models and classes, submitted before any is collected, keep their order."""
    jobs = [(MEAN, "large", 5), (OTHER, "small", 1), (MEAN, "small", 2), (MEAN, "large", 1)]
    for number, (model, size_class, count) in enumerate(jobs):
        engine.submit(_stage(engine, number, COLORS[:count], model, size_class))

    collected = [engine.collect() for _ in jobs]

    assert [outputs.batch for outputs in collected] == [0, 1, 2, 3]
    assert [len(_colors(outputs)) for outputs in collected] == [5, 1, 2, 1]


def test_outputs_outlive_the_staging_buffer(engine: Engine) -> None:
    """After collect the buffer is the worker's again: writing into it changes no answer."""
    batch = _stage(engine, 1, COLORS[:2])
    engine.submit(batch)
    outputs = engine.collect()

    np.copyto(batch.inputs[0].array, 255, casting="unsafe")
    engine.submit(_stage(engine, 2, COLORS[2:4]))
    engine.collect()

    np.testing.assert_allclose(_colors(outputs), COLORS[:2], atol=1e-3)


def test_collect_waits_for_a_submit_of_another_thread(engine: Engine) -> None:
    """The completion thread waits in collect until the device thread has submitted."""
    collected: list[BatchOutputs] = []
    thread = threading.Thread(target=lambda: collected.append(engine.collect()))
    thread.start()

    engine.submit(_stage(engine, 9, COLORS[:1]))
    thread.join(10)

    assert [outputs.batch for outputs in collected] == [9]


def _call_in_thread(call: Callable[[], object]) -> BaseException | None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return errors[0] if errors else None


def test_submit_from_another_thread_is_refused(engine: Engine) -> None:
    """The device has one owner; a second thread gets an error and the engine goes on."""
    batch = _stage(engine, 1, COLORS[:1])

    error = _call_in_thread(lambda: engine.submit(batch))

    assert isinstance(error, EngineMisuseError)
    assert "thread" in str(error)
    engine.submit(batch)
    assert engine.collect().batch == 1


def _with(batch: StagedBatch, **changes: object) -> StagedBatch:
    fields = {name: getattr(batch, name) for name in StagedBatch.__slots__}
    return StagedBatch(**{**fields, **changes})


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda b: _with(b, model=ModelKey("no", "1")), id="unknown-model"),
        pytest.param(lambda b: _with(b, size_class="huge"), id="unknown-class"),
        pytest.param(lambda b: _with(b, count=5), id="count-over-bucket"),
        pytest.param(lambda b: _with(b, count=0), id="no-rows"),
        pytest.param(lambda b: _with(b, bucket=3), id="not-a-bucket"),
        pytest.param(lambda b: _with(b, inputs=()), id="input-missing"),
        pytest.param(lambda b: _with(b, inputs=b.inputs * 2), id="input-twice"),
        pytest.param(lambda b: _with(b, inputs=(InputBuffer("y", b.inputs[0].array),)), id="input-renamed"),
        pytest.param(
            lambda b: _with(b, inputs=(InputBuffer(b.inputs[0].name, b.inputs[0].array[:1]),)),
            id="rows-missing",
        ),
        pytest.param(
            lambda b: _with(b, inputs=(InputBuffer(b.inputs[0].name, b.inputs[0].array.astype(np.float32)),)),
            id="wrong-dtype",
        ),
        pytest.param(
            lambda b: _with(b, inputs=(InputBuffer(b.inputs[0].name, b.inputs[0].array[:, ::-1]),)),
            id="not-contiguous",
        ),
    ],
)
def test_a_batch_that_breaks_the_plan_is_refused(
    engine: Engine, spoil: Callable[[StagedBatch], StagedBatch]
) -> None:
    """A device may check nothing itself, so the engine refuses such a batch and serves the next one."""
    batch = _stage(engine, 1, COLORS[:4])

    with pytest.raises(EngineMisuseError):
        engine.submit(spoil(batch))

    engine.submit(batch)
    np.testing.assert_allclose(_colors(engine.collect()), COLORS[:4], atol=1e-3)


def test_a_model_that_was_not_profiled_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Nothing runs before the self-tests did."""
    spec, files = hr_models.image_spec(
        tmp_path, hr_models.mean_color(), name="late", emulated=EmulatedCost(1.0, 0.1)
    )
    engine.load(spec, files)

    with pytest.raises(EngineMisuseError, match="fit no bucket"):
        engine.bucket_for(ModelKey("late", "1"), "small", 1)


def test_close_is_idempotent_and_ends_everything(engine: Engine) -> None:
    """After close, what was submitted is still there; after that, every call says closed."""
    batch = _stage(engine, 1, COLORS[:1])
    engine.submit(batch)

    engine.close()
    engine.close()

    assert engine.collect().batch == 1
    for _ in range(2):
        with pytest.raises(ClosedError):
            engine.collect()
    with pytest.raises(ClosedError):
        engine.submit(batch)


def test_close_ends_a_waiting_collect(engine: Engine) -> None:
    """A completion thread that waits for work ends when the engine is closed by another thread."""
    errors: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: errors.append(_call_in_thread(engine.collect)))
    thread.start()

    engine.close()
    thread.join(10)

    assert len(errors) == 1
    assert isinstance(errors[0], ClosedError)


def test_a_model_without_what_the_engine_needs_is_refused() -> None:
    """No file for the cpu engine, no cost for the emulated one: ModelError, and each names the model."""
    for make in (ENGINES[name] for name in ENGINES if name != "emulated"):
        with pytest.raises(ModelError, match="m:1"):
            make().load(hr_models.emulated_spec(SMALL), {})
    with pytest.raises(ModelError, match="m:1"):
        EmulatedEngine().load(ModelSpec("m", "1", image=ImageInput(), size_classes=(SMALL,)), {})
