"""The emulated engine's schedule, on a clock that the test moves."""

from __future__ import annotations

import hr_models
import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.protocol.messages import EmulatedCost, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.emulated_engine import INPUT_NAME, EmulatedEngine
from headrace.workers.engine import InputBuffer, ModelKey, StagedBatch

MODEL = ModelKey("m", "1")
MS = 1_000_000


class _Clock:
    """A clock that moves only when somebody waits, each time ``late_ns`` too long."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 50 * MS
        self.late_ns = late_ns

    def __call__(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> bool:
        self.now_ns += round(seconds * 1e9) + self.late_ns
        return False


def _engine(clock: _Clock, *, pads_to_bucket: bool = False) -> EmulatedEngine:
    engine = EmulatedEngine(pads_to_bucket=pads_to_bucket, clock=clock, wait=clock.wait)
    engine.load(hr_models.emulated_spec(base_ms=2.0, per_frame_ms=0.5), {})
    engine.profile(MODEL)
    return engine


def _batch(number: int, count: int, bucket: int) -> StagedBatch:
    array = np.zeros((bucket, 32, 48, 3), np.uint8)
    return StagedBatch(number, MODEL, "small", count, bucket, (InputBuffer(INPUT_NAME, array),))


def test_profile_is_the_formula() -> None:
    """The costs of the buckets are T(b) itself, not a measurement of it."""
    engine = _engine(_Clock())

    (measured,) = engine.profile(MODEL).classes

    assert measured.buckets == ((1, 2.5), (2, 3.0), (4, 4.0))


@pytest.mark.parametrize(("pads_to_bucket", "cost_ms"), [(False, 3.5), (True, 4.0)])
def test_a_batch_takes_its_cost(pads_to_bucket: bool, cost_ms: float) -> None:
    """Three frames cost T(3), or T(4) when the device is told to run whole buckets."""
    clock = _Clock()
    engine = _engine(clock, pads_to_bucket=pads_to_bucket)

    engine.submit(_batch(1, 3, 4))
    outputs = engine.collect()

    assert outputs.ran_ns == cost_ms * MS
    assert clock.now_ns == 50 * MS + cost_ms * MS


def test_batches_back_to_back_do_not_drift() -> None:
    """Waking up late delays no later batch: 100 batches submitted ahead take 100 x T and one lateness."""
    clock = _Clock(late_ns=300_000)
    engine = _engine(clock)
    engine.submit(_batch(0, 4, 4))

    for number in range(1, 100):
        engine.submit(_batch(number, 4, 4))
        engine.collect()
    engine.collect()

    assert clock.now_ns - 50 * MS <= 100 * 4 * MS + 300_000


def test_the_device_runs_one_batch_after_another() -> None:
    """A batch submitted while another runs begins when that one ends."""
    clock = _Clock()
    engine = _engine(clock)
    ends_ms = []

    for number in range(3):
        engine.submit(_batch(number, 4, 4))
    for _ in range(3):
        engine.collect()
        ends_ms.append(clock.now_ns / MS - 50)

    assert ends_ms == [4.0, 8.0, 12.0]


def test_an_idle_device_begins_at_once() -> None:
    """Idle time is not saved up: a batch after a pause begins when it is submitted."""
    clock = _Clock()
    engine = _engine(clock)
    clock.now_ns += 1000 * MS

    engine.submit(_batch(1, 1, 1))
    engine.collect()

    assert clock.now_ns == 1050 * MS + 2.5 * MS


def test_fingerprint_is_first_and_centre_pixel() -> None:
    """A test can tell rows apart by the pixels that stand in their buffer."""
    engine = _engine(_Clock())
    batch = _batch(1, 2, 2)
    pixels = np.arange(2 * 32 * 48 * 3, dtype=np.int64).reshape(2, 32, 48, 3) % 251
    np.copyto(batch.inputs[0].array, pixels, casting="unsafe")

    engine.submit(batch)
    fingerprint = engine.collect().outputs["fingerprint"]

    np.testing.assert_array_equal(fingerprint[:, 0], pixels[:, 0, 0])
    np.testing.assert_array_equal(fingerprint[:, 1], pixels[:, 16, 24])


def test_a_model_without_an_image_input_is_refused() -> None:
    """There is nothing to stage for it, and the error says what is missing."""
    spec = ModelSpec("m", "1", emulated=EmulatedCost(1.0, 1.0), size_classes=(SizeClassSpec("c", 8, 8),))

    with pytest.raises(ModelError, match="image input"):
        EmulatedEngine().load(spec, {})
    with pytest.raises(ModelError, match="size classes"):
        EmulatedEngine().load(ModelSpec("m", "1", emulated=EmulatedCost(1.0, 1.0), image=ImageInput()), {})
