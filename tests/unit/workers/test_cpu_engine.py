"""The cpu engine beyond the contract: models of every kind that the field has brought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hr_models
import numpy as np
import onnx
import pytest

from headrace.errors import DeviceError, ModelError
from headrace.protocol.messages import ImageInput, ModelProfile, ModelSpec, SizeClassSpec, TensorSpec
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.engine import BatchOutputs, InputBuffer, ModelKey, StagedBatch

MODEL = ModelKey("m", "1")
SMALL = SizeClassSpec("small", 32, 48, 8)


def _serve(loaded: tuple[ModelSpec, dict[str, str]]) -> tuple[CpuEngine, ModelProfile]:
    engine = CpuEngine()
    engine.load(*loaded)
    return engine, engine.profile(MODEL)


def _run(engine: CpuEngine, size_class: str, rows: dict[str, list[Any]], number: int = 1) -> BatchOutputs:
    """Stage ``rows`` (input name to one value or array per row) and run them."""
    count = len(next(iter(rows.values())))
    bucket = engine.bucket_for(MODEL, size_class, count)
    buffers = []
    for plan in engine.plan(MODEL, size_class):
        lengths = np.shape(rows[plan.name][0]) or plan.shape
        array = np.zeros((bucket, *lengths), plan.dtype)
        for index, value in enumerate(rows[plan.name]):
            array[index] = value
        buffers.append(InputBuffer(plan.name, array))
    engine.submit(StagedBatch(number, MODEL, size_class, count, bucket, tuple(buffers)))
    return engine.collect()


def _output(outputs: BatchOutputs) -> np.ndarray[Any, Any]:
    assert not outputs.error, outputs.error
    (array,) = outputs.outputs.values()
    return array


def _buckets(profile: ModelProfile) -> list[int]:
    return [bucket for bucket, _ in profile.classes[0].buckets]


@pytest.mark.parametrize(
    ("model", "largest", "buckets", "note"),
    [
        pytest.param(hr_models.mean_color(), 8, [1, 2, 4, 8], None, id="dynamic-batch"),
        pytest.param(hr_models.mean_color("n", 32, 48), 8, [1, 2, 4, 8], None, id="fixed-size"),
        pytest.param(hr_models.mean_color(1), 1, [1], "fixed batch of 1", id="ORT-07-fixed-batch-1"),
        pytest.param(hr_models.mean_color(4), 4, [4], "fixed batch of 4", id="ORT-07-fixed-batch-4"),
        pytest.param(hr_models.hidden_batch_of_one(), 1, [1], "batch of two failed", id="hidden-batch-1"),
        pytest.param(hr_models.built_in_nms(), 1, [1], "boxes can't be split", id="BAT-13-built-in-nms"),
        pytest.param(hr_models.scalar_output(), 1, [1], "mean can't be split", id="BAT-13-scalar"),
    ],
)
def test_batching_is_what_the_model_can_do(
    tmp_path: Path, model: onnx.ModelProto, largest: int, buckets: list[int], note: str | None
) -> None:
    """The profile has the batches that give right rows, and says why there are no others."""
    _, profile = _serve(hr_models.image_spec(tmp_path, model, SMALL))

    assert profile.classes[0].size_class.max_batch_size == largest
    assert _buckets(profile) == buckets
    assert (note is None and profile.notes == ()) or (note is not None and note in profile.notes[0])


@pytest.mark.parametrize("batch", [1, 4])
def test_eight_frames_through_a_fixed_batch_are_all_right(tmp_path: Path, batch: int) -> None:
    """ORT-07: a graph with a fixed batch of 1 or 4 answers each of 8 frames with its own result."""
    engine, profile = _serve(hr_models.image_spec(tmp_path, hr_models.mean_color(batch), SMALL))
    size = min(3, profile.classes[0].size_class.max_batch_size)

    answers: list[float] = []
    for first in range(0, 8, size):
        values = list(range(10 + first, 10 + min(first + size, 8)))
        answers += _output(_run(engine, "small", {"x": values}))[:, 0].tolist()

    np.testing.assert_allclose(answers, range(10, 18), atol=1e-3)


def test_a_batch_run_in_portions_has_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows in portions of four: each frame its own result, and the profile says how it is run."""
    monkeypatch.setattr("headrace.workers.cpu_engine.cheapest_portion", lambda _measured: 4)
    engine, profile = _serve(hr_models.image_spec(tmp_path, hr_models.mean_color(), SMALL))

    rows = _output(_run(engine, "small", {"x": list(range(10, 17))}))

    np.testing.assert_allclose(rows[:, 0], range(10, 17), atol=1e-3)
    assert profile.notes == ("size class small: larger batches run in portions of 4 rows",)
    assert dict(profile.classes[0].buckets)[8] == pytest.approx(2 * dict(profile.classes[0].buckets)[4])


def test_a_failing_portion_fails_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result of the other portions is told: the batch has one error."""
    monkeypatch.setattr("headrace.workers.cpu_engine.cheapest_portion", lambda _measured: 2)
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.failing_on_mark(), SMALL))

    failed = _run(engine, "small", {"x": [1, 2, 3, hr_models.MARK]})

    assert "m:1" in failed.error
    assert failed.outputs == {}


def test_four_distinct_frames_keep_their_rows_over_many_rounds(tmp_path: Path) -> None:
    """ORT-12: 1,000 rounds of four frames in random order, each row its own mean."""
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.mean_color(), SMALL))
    rng = np.random.default_rng(12)

    for number in range(1000):
        values = rng.permutation(250)[:4].tolist()
        rows = _output(_run(engine, "small", {"x": values}, number))
        np.testing.assert_allclose(rows, np.repeat(values, 3).reshape(4, 3), atol=1e-3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(hr_models.row_mixing(), "depends on the other frames", id="row-mixing"),
        pytest.param(hr_models.first_row_only(), "depends on the other frames", id="ORT-12-first-row-only"),
        pytest.param(hr_models.first_row_only(4), "depends on the other frames", id="first-row-fixed-4"),
        pytest.param(hr_models.constant_output(), "gave the same output", id="ORT-03-same-answer"),
        pytest.param(hr_models.multiples_of(20), r"size class small \(32x48\)", id="size-not-a-multiple"),
    ],
)
def test_a_bad_model_is_refused_before_it_serves(
    tmp_path: Path, model: onnx.ModelProto, message: str
) -> None:
    """What would silently give wrong results, or fail on every frame, stops the start with the reason."""
    engine = CpuEngine()
    engine.load(*hr_models.image_spec(tmp_path, model, SMALL))

    with pytest.raises(ModelError, match=message):
        engine.profile(MODEL)


def test_a_row_mixing_model_serves_one_by_one_when_told_to(tmp_path: Path) -> None:
    """The remedy that the refusal names works: max_batch_size = 1."""
    one = SizeClassSpec("small", 32, 48, 1)

    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.row_mixing(), one))

    np.testing.assert_allclose(_output(_run(engine, "small", {"x": [10]})), [[20, 20, 20]], atol=1e-3)


def test_a_list_of_boxes_belongs_to_its_frame(tmp_path: Path) -> None:
    """BAT-13: a frame without boxes gets an empty list, the next one its own twelve."""
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.built_in_nms(), SMALL))
    some = np.zeros((32, 48, 3), np.uint8)
    some[0, :4] = 9

    empty = _output(_run(engine, "small", {"x": [np.zeros((32, 48, 3), np.uint8)]}))
    twelve = _output(_run(engine, "small", {"x": [some]}))

    assert empty.shape == (1, 0, 4)
    assert twelve.shape == (1, 12, 4)


def test_a_scalar_for_the_batch_becomes_the_frame_s_own(tmp_path: Path) -> None:
    """BAT-13: one number per batch is served as the number of a batch of one."""
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.scalar_output(), SMALL))

    assert _output(_run(engine, "small", {"x": [7]})) == pytest.approx([7.0])


def test_a_failing_run_is_an_error_and_the_engine_lives(tmp_path: Path) -> None:
    """A batch with the marked frame fails as a whole, with the model named; the next batch is fine."""
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.failing_on_mark(), SMALL))

    failed = _run(engine, "small", {"x": [1, hr_models.MARK, 3]}, number=4)
    good = _run(engine, "small", {"x": [1, 2, 3]}, number=5)

    assert failed.batch == 4
    assert "m:1" in failed.error
    assert failed.outputs == {}
    assert not failed.is_fatal
    np.testing.assert_allclose(_output(good)[:, 0], [1, 2, 3], atol=1e-3)


def test_padding_rows_are_not_run_where_the_batch_is_open(tmp_path: Path) -> None:
    """A marked padding row would fail the run: on a CPU only real rows are run."""
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.failing_on_mark(), SMALL))
    (plan,) = engine.plan(MODEL, "small")
    array = np.full((4, *plan.shape), hr_models.MARK, np.uint8)
    array[:3] = 5

    engine.submit(StagedBatch(1, MODEL, "small", 3, 4, (InputBuffer("x", array),)))

    np.testing.assert_allclose(_output(engine.collect()), np.full((3, 3), 5), atol=1e-3)


@pytest.mark.parametrize(
    ("model", "rows", "expected"),
    [
        pytest.param(hr_models.tensor_sum(), {"x": [[1, 2, 3, 4], [0, 0, 0, 9]]}, [10, 9], id="fixed"),
        pytest.param(hr_models.tensor_sum("length"), {"x": [[1, 2, 3]]}, [6], id="open-length"),
        pytest.param(
            hr_models.several_inputs(),
            {"values": [[1, 2, 3, 4], [5, 6, 7, 8]], "scale": [[2], [3]], "size": [[1, 2], [3, 4]]},
            [[5, 7, 9, 11], [22, 25, 28, 31]],
            id="ORT-10-three-inputs",
        ),
    ],
)
def test_tensor_models_are_described_by_their_own_metadata(
    tmp_path: Path, model: onnx.ModelProto, rows: dict[str, list[Any]], expected: list[Any]
) -> None:
    """Any number of inputs is served in the one class "tensor"."""
    engine, profile = _serve(hr_models.save(tmp_path, model))

    assert [c.size_class.name for c in profile.classes] == ["tensor"]
    assert [spec.name for spec in profile.inputs] == list(rows)
    np.testing.assert_allclose(_output(_run(engine, "tensor", rows)), expected)


def test_open_lengths_are_served_one_by_one_and_said_so(tmp_path: Path) -> None:
    """Rows of different lengths make no batch: the profile says so, and the lengths may change."""
    engine, profile = _serve(hr_models.save(tmp_path, hr_models.tensor_sum("length")))

    assert _buckets(profile) == [1]
    assert any("open input shape" in note for note in profile.notes)
    assert profile.inputs == (TensorSpec("x", "float32", (-1,)),)
    for length in (1, 7, 300):
        assert _output(_run(engine, "tensor", {"x": [[1] * length]})) == pytest.approx([length])


def test_inputs_without_a_batch_axis_are_fed_whole(tmp_path: Path) -> None:
    """A model that knows no batches takes one frame at a time, and its output is that frame's."""
    engine, profile = _serve(hr_models.save(tmp_path, hr_models.without_batch()))

    answer = _output(_run(engine, "tensor", {"vector": [[1, 2, 3]], "factor": [4]}))

    assert profile.inputs == (TensorSpec("vector", "float32", (3,)), TensorSpec("factor", "float32", ()))
    np.testing.assert_array_equal(answer, [[4, 8, 12]])


def test_a_vector_is_one_frame_not_a_batch_of_numbers(tmp_path: Path) -> None:
    """A single fixed axis is the frame's own length."""
    _, profile = _serve(hr_models.save(tmp_path, hr_models.vector_scaled(5)))

    assert profile.inputs == (TensorSpec("x", "float32", (5,)),)
    assert _buckets(profile) == [1]


def test_open_lengths_that_do_not_all_run_are_probed(tmp_path: Path) -> None:
    """The self-test looks for a length that the graph takes; frames of another length fail alone."""
    engine, _ = _serve(hr_models.save(tmp_path, hr_models.open_length_in_steps(16)))

    assert _output(_run(engine, "tensor", {"x": [[1] * 48]})) == pytest.approx([48])
    assert "m:1" in _run(engine, "tensor", {"x": [[1] * 7]}).error


def test_no_length_that_runs_is_told(tmp_path: Path) -> None:
    """A graph that takes none of the lengths tried is refused with the runtime's reason."""
    engine = CpuEngine()
    engine.load(*hr_models.save(tmp_path, hr_models.open_length_in_steps(7)))

    with pytest.raises(ModelError, match="size class tensor"):
        engine.profile(MODEL)


@pytest.mark.parametrize("scale_batch", ["n", 1])
def test_an_image_with_a_second_input(tmp_path: Path, scale_batch: int | str) -> None:
    """An image model may have plain inputs beside it; without a batch axis on one, batches are of one."""
    engine, profile = _serve(hr_models.image_spec(tmp_path, hr_models.image_and_scale(scale_batch), SMALL))

    scale = [[2.0]] if scale_batch == "n" else [[[2.0]]]
    answer = _output(_run(engine, "small", {"image": [10], "scale": scale}))

    assert profile.classes[0].size_class.max_batch_size == (8 if scale_batch == "n" else 1)
    np.testing.assert_allclose(answer, [[20, 20, 20]], atol=1e-3)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        pytest.param(
            hr_models.mean_color("n", 64, 64),
            {},
            "small is 32x48, the graph takes only 64x64",
            id="fixed-size",
        ),
        pytest.param(hr_models.without_inputs(), {"image": None}, "no inputs", id="no-inputs"),
        pytest.param(hr_models.unknown_rank(), {"image": None}, "number of axes", id="unknown-rank"),
        pytest.param(
            hr_models.image_and_scale(1, 4),
            {},
            "inputs without that axis: scale",
            id="fixed-batch-of-one-input",
        ),
        pytest.param(hr_models.mean_color(), {"size_classes": ()}, "must be configured", id="no-classes"),
        pytest.param(hr_models.tensor_sum(), {}, "0 of its inputs can take images", id="no-image-input"),
        pytest.param(
            hr_models.tensor_sum(),
            {"image": None, "size_classes": (SMALL, SMALL)},
            "one size class",
            id="tensor",
        ),
        pytest.param(
            hr_models.mean_color_uint8(), {"image": ImageInput(scale=1 / 255)}, "uint8", id="uint8-scaled"
        ),
        pytest.param(
            hr_models.mean_color(), {"image": ImageInput(mean=(1, 2))}, "image.mean", id="mean-count"
        ),
        pytest.param(hr_models.mean_color(), {"image": ImageInput(std=(1, 0, 1))}, "zero", id="std-zero"),
    ],
)
def test_a_specification_that_does_not_fit_the_graph_is_refused(
    tmp_path: Path, model: onnx.ModelProto, fields: dict[str, Any], message: str
) -> None:
    """The error names the model, what was asked and what the graph takes."""
    fields = {"image": ImageInput(), "size_classes": (SMALL,), **fields}

    with pytest.raises(ModelError, match=message):
        CpuEngine().load(*hr_models.save(tmp_path, model, **fields))


def test_size_classes_are_found_in_a_fixed_graph(tmp_path: Path) -> None:
    """Without configured classes, the graph's own height and width are the one class."""
    _, profile = _serve(hr_models.save(tmp_path, hr_models.mean_color("n", 24, 40), image=ImageInput()))

    (found,) = profile.classes
    assert (found.size_class.name, found.size_class.height, found.size_class.width) == ("24x40", 24, 40)


def test_a_model_loaded_again_is_replaced(tmp_path: Path) -> None:
    """Loading the same name and version again serves the newer file, after its own profile."""
    engine, _ = _serve(hr_models.image_spec(tmp_path, hr_models.mean_color(), SMALL))

    engine.load(*hr_models.image_spec(tmp_path, hr_models.row_mixing(), SizeClassSpec("small", 32, 48, 1)))
    engine.profile(MODEL)

    np.testing.assert_allclose(_output(_run(engine, "small", {"x": [10]})), [[20, 20, 20]], atol=1e-3)


def test_no_threads_is_refused() -> None:
    """Zero would mean "all cores of the host" to ONNX Runtime."""
    with pytest.raises(DeviceError, match="threads = 0"):
        CpuEngine(threads=0)
