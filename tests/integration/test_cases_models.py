"""Field cases of models and post-processing, end to end: a real broker and real CPU workers.

Each frame's pixels hold its own number, so that a row that went astray shows.
"""

from __future__ import annotations

import random
from pathlib import Path

import hr_models
import hr_plant as hp
import hr_worker
import numpy as np
import pytest
from hr_broker import broker_settings, running_broker
from onnx import TensorProto

import headrace
from headrace import Client
from headrace.broker.shell_settings import LocalModel
from headrace.errors import Code, ModelError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Frame, Outcome, SizeClassSpec, Status

FIVE = range(1, 6)
EIGHT = range(1, 9)


def numbered(numbers: range | list[int]) -> list[Frame]:
    return [hr_worker.raw_frame(hp.solid(number, number, number)) for number in numbers]


def codes(outcomes: list[Outcome]) -> list[str]:
    return [outcome.code for outcome in outcomes]


# -- post-processing -----------------------------------------------------------------------------------


def function(folder: Path, name: str, **options: int) -> hp.PlantModel:
    """The mean colour model with a user's post-process function."""
    adapter = {"adapter": f"hr_functions:{name}", "adapter_options": options}
    return hp.onnx_model(folder, hr_models.mean_color(), **adapter)


def test_a_post_process_that_fails_for_one_frame_fails_it_alone(tmp_path: Path) -> None:
    """BAT-01: a batch of eight whose number five raises: seven results, one error."""
    with hp.running_plant(tmp_path, function(tmp_path, "raises_for_five")) as plant:
        outcomes = plant.outcomes(*numbered(EIGHT))

    assert {outcome.batch_size for outcome in outcomes} == {8}
    assert codes(outcomes) == [Code.POST_PROCESS_FAILED if n == 5 else "" for n in EIGHT]
    assert [outcome.outputs for outcome in outcomes if outcome.status is Status.OK] == [
        {"red": float(number)} for number in EIGHT if number != 5
    ]


def test_a_damaged_file_fails_alone_in_a_batch_of_eight(tmp_path: Path) -> None:
    """BAT-01: number five is half a JPEG."""
    files = [hr_worker.jpeg(hp.solid(number, number, number)) for number in EIGHT]
    whole = hr_worker.jpeg(hr_worker.gradient(48, 64))
    files[4] = whole[: len(whole) // 2]
    with hp.running_plant(tmp_path, hp.onnx_model(tmp_path, hr_models.mean_color())) as plant:
        frames = [hr_worker.image_frame(data, hr_worker.Encoding.JPEG, 48, 64) for data in files]
        outcomes = plant.outcomes(*frames)

    assert codes(outcomes) == [Code.DAMAGED_IMAGE if n == 5 else "" for n in EIGHT]
    assert [hp.mean(o)[0] for o in outcomes if o.status is Status.OK] == [n for n in EIGHT if n != 5]


@pytest.mark.parametrize("count", [1, 6])
def test_a_wrong_number_of_results_is_matched_to_nobody(tmp_path: Path, count: int) -> None:
    """BAT-04: one or six results for five frames: an error for each that names both; the worker goes on."""
    with hp.running_plant(tmp_path, function(tmp_path, "one_too_few_or_many", count=count)) as plant:
        outcomes = plant.outcomes(*numbered(FIVE))
        right = plant.outcomes(*numbered(range(1, count + 1)))

    assert codes(outcomes) == [Code.RESULT_COUNT] * 5
    assert {"expected 5 results" in o.message and f"got {count}" in o.message for o in outcomes} == {True}
    assert [outcome.outputs for outcome in right] == list(range(count))


def test_a_function_may_write_into_what_it_gets(tmp_path: Path) -> None:
    """PAY-03: its arrays are its own: twice over the same frames, and no frame changes another."""
    with hp.running_plant(tmp_path, function(tmp_path, "writes_into_its_arrays")) as plant:
        for _ in range(2):
            outcomes = plant.outcomes(*numbered(FIVE))

            assert [outcome.outputs for outcome in outcomes] == [{"doubled": 2.0 * n} for n in FIVE]


def test_numpy_scalars_of_a_function_become_plain_values(tmp_path: Path) -> None:
    """PAY-10: a result does not die in the encoder after the work is done."""
    with hp.running_plant(tmp_path, function(tmp_path, "numpy_scalars")) as plant:
        (outcome,) = plant.outcomes(*numbered([7]))

    assert outcome.outputs == {"index": 7, "score": 0.5, "flag": True, "size": [3, 4], "box": [1.5, 2.5]}
    assert isinstance(outcome.outputs, dict)
    assert [type(value) for value in outcome.outputs.values()] == [int, float, bool, list, list]


# -- rows of a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_a_fixed_first_axis_bounds_the_batch_and_is_said_aloud(tmp_path: Path, batch: int) -> None:
    """ORT-07: eight jobs for a graph made for 1 or 4 rows: all right, none with rows of noise."""
    graph = hr_models.mean_color(batch, 48, 64)
    with hp.running_plant(tmp_path, hp.onnx_model(tmp_path, graph)) as plant:
        (worker,) = plant.ready_workers()
        whole = plant.outcomes(*numbered(EIGHT))
        rest = plant.outcomes(*numbered(range(20, 23)))

    assert any(f"fixed batch of {batch}" in note for note in worker["notes"]), worker["notes"]
    assert [hp.mean(outcome) for outcome in whole] == [[n] * 3 for n in EIGHT]
    assert [hp.mean(outcome) for outcome in rest] == [[n] * 3 for n in range(20, 23)]
    assert max(outcome.batch_size for outcome in whole + rest) == batch


def test_each_row_of_many_batches_is_right(tmp_path: Path) -> None:
    """ORT-12: batches of four distinct frames in random order, 60 rounds."""
    rng = random.Random(12)
    with hp.running_plant(tmp_path, hp.onnx_model(tmp_path, hr_models.mean_color())) as plant:
        for _ in range(60):
            numbers = rng.sample(range(256), 4)
            outcomes = plant.outcomes(*numbered(numbers))

            assert [hp.mean(outcome)[0] for outcome in outcomes] == numbers
            assert {outcome.batch_size for outcome in outcomes} == {4}


def test_a_model_that_mixes_the_rows_of_a_batch_never_serves(tmp_path: Path) -> None:
    """ORT-12: the start-up self-test compares a batch against single runs."""
    with hp.open_plant(hp.onnx_model(tmp_path, hr_models.row_mixing())) as plant:
        worker = hp.ThreadWorker(plant.endpoints, tmp_path)

        assert worker.run_to_its_end() == ExitCode.MODEL


# -- model files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (hr_models.mean_color(ir_version=99).SerializeToString(), "IR version 99"),
        (hr_models.mean_color(opset=99).SerializeToString(), "opset 99"),
        (b"this is no model\n", "not an ONNX model"),
    ],
    ids=["ir-99", "opset-99", "text"],
)
def test_a_model_that_can_not_be_read_ends_the_worker_with_its_own_code(
    tmp_path: Path, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ORT-08: what was found is named, and supervisors do not start it again for ever."""
    model = hp.onnx_model(tmp_path, hr_models.mean_color())
    assert model.local is not None
    model.local.path.write_bytes(content)
    with hp.open_plant(model) as plant:
        code = hp.ThreadWorker(plant.endpoints, tmp_path).run_to_its_end()

    assert code == ExitCode.MODEL
    output = capsys.readouterr()
    assert said in output.out + output.err


def test_a_broker_does_not_start_with_an_empty_model_file(tmp_path: Path) -> None:
    """ORT-08: it would be nobody's model."""
    model = hp.onnx_model(tmp_path, hr_models.mean_color())
    assert model.local is not None
    model.local.path.write_bytes(b"")

    with pytest.raises(ModelError, match="is empty"), hp.open_plant(model):
        pass


def test_weights_beside_the_graph_are_found_wherever_a_worker_stands(tmp_path: Path) -> None:
    """ORT-09: weights in a sub-folder, workers started from three working directories."""
    path = hr_models.write_with_weights(tmp_path / "model", hr_models.matrix_multiply(8))
    weights = path.parent / "data" / "weights.bin"
    model = hp.onnx_model(tmp_path, hr_models.matrix_multiply(8), image=None)
    model = hp.PlantModel(model.settings, LocalModel("m", "1", path, (weights,)))
    vector = np.array([1, 2, 3], np.float32)
    expected = vector @ np.arange(24, dtype=np.float32).reshape(3, 8)
    with hp.open_plant(model) as plant, Client(plant.endpoints.frames) as client:
        for number, folder in enumerate((Path("/"), tmp_path, path.parent)):
            with hp.ProcessWorker(plant.endpoints, tmp_path / f"w{number}", cwd=folder):
                plant.wait_for_workers()
                outcome = headrace.raise_for_status(client.infer(vector))
                assert np.allclose(headrace.tensors_of(outcome)["y"], expected)
            plant.wait_for_workers(0)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """ORT-09: the broker does not start without a file of its model."""
    path = hr_models.write_with_weights(tmp_path, hr_models.matrix_multiply(8))
    weights = path.parent / "data" / "weights.bin"
    weights.unlink()
    settings = broker_settings(
        hp.onnx_model(tmp_path, hr_models.matrix_multiply(8), image=None).settings,
        local_models=(LocalModel("m", "1", path, (weights,)),),
    )

    with pytest.raises(ModelError, match=r"weights\.bin"), running_broker(settings):
        pass


# -- dtypes and inputs ---------------------------------------------------------------------------------


def test_dtypes_are_cast_by_the_models_own_metadata(tmp_path: Path) -> None:
    """ORT-10, PAY-06: what is cast without loss, or narrowed between floats, is taken; the rest is named."""
    values = np.array([0, 1, 256, 65_535])
    to_float = hp.onnx_model(tmp_path, hr_models.tensor_as_it_is(), name="float", image=None)
    to_uint8 = hp.onnx_model(
        tmp_path, hr_models.tensor_as_it_is(4, TensorProto.UINT8), name="uint8", image=None
    )
    with (
        hp.running_plant(tmp_path, to_float, to_uint8) as plant,
        Client(plant.endpoints.frames) as client,
    ):
        for dtype in ("uint16", "float32", "float64", ">u2", ">f4"):
            outcome = client.infer(values.astype(dtype), model="float")
            assert np.array_equal(headrace.tensors_of(outcome)["same"], values), dtype
        small = np.array([0, 1, 2, 255], np.uint8)
        outcome = client.infer(small, model="uint8")
        assert np.array_equal(headrace.tensors_of(outcome)["same"], small)
        for dtype in ("float32", "float64", "int64"):
            refused = client.infer(small.astype(dtype), model="uint8")
            assert refused.code == Code.WRONG_DTYPE
            assert "uint8" in refused.message
        assert client.infer(values.astype(np.int64), model="float").code == Code.WRONG_DTYPE


def test_inputs_are_matched_by_name(tmp_path: Path) -> None:
    """ORT-10: three inputs; with one missing, renamed or extra the names, dtypes and shapes are listed."""
    model = hp.onnx_model(tmp_path, hr_models.several_inputs(), image=None)
    right = {
        "values": np.array([1, 2, 3, 4], np.float32),
        "scale": np.array([10], np.float64),
        "size": np.array([5, 6], np.int64),
    }
    missing = {name: right[name] for name in ("values", "scale")}
    renamed = {**missing, "extent": right["size"]}
    extra = {**right, "more": right["size"]}
    shuffled = {name: right[name] for name in ("size", "values", "scale")}
    with hp.running_plant(tmp_path, model) as plant, Client(plant.endpoints.frames) as client:
        results = [headrace.tensors_of(client.infer(given))["result"] for given in (right, shuffled)]
        refused = [client.infer(given) for given in (missing, renamed, extra)]

    assert [list(result) for result in results] == [[21, 31, 41, 51]] * 2
    for outcome in refused:
        assert outcome.code == Code.WRONG_INPUTS
        assert "size int64" in outcome.message.replace(":", " ").replace("  ", " "), outcome.message


# -- size classes --------------------------------------------------------------------------------------


def test_shapes_that_come_mixed_are_batched_by_class_and_none_starves(tmp_path: Path) -> None:
    """BAT-12: three sizes, one with ten times the traffic: right results, nobody waits for the crowd."""
    classes = (
        SizeClassSpec("narrow", 48, 64, max_batch_size=8),
        SizeClassSpec("tall", 64, 64, max_batch_size=8),
        SizeClassSpec("wide", 72, 128, max_batch_size=8),
    )
    sizes = [(48, 64)] * 10 + [(64, 64), (72, 128)]
    rounds = 12
    model = hp.onnx_model(tmp_path, hr_models.mean_color(), *classes, policy=hp.ADAPTIVE)
    with hp.running_plant(tmp_path, model) as plant:
        frames = [
            hr_worker.raw_frame(np.full((*size, 3), (number * 12 + index) % 256, np.uint8))
            for number in range(rounds)
            for index, size in enumerate(sizes)
        ]
        outcomes = plant.outcomes(*frames, bundle=1)

    assert [hp.mean(outcome)[0] for outcome in outcomes] == [index % 256 for index in range(len(frames))]
    names = {(48, 64): "narrow", (64, 64): "tall", (72, 128): "wide"}
    assert [outcome.size_class for outcome in outcomes] == [names[size] for size in sizes] * rounds
    # A stream's outcomes are published in order; when a batch ran tells who waited.
    ran_us = {
        name: [o.timing.ran_us or 0 for o in outcomes if o.size_class == name] for name in names.values()
    }
    assert min(ran_us["tall"]) < max(ran_us["narrow"])
    assert min(ran_us["wide"]) < max(ran_us["narrow"])
