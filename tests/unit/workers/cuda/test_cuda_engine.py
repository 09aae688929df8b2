"""What the cuda engine does when captures fail, memory runs out or the device is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_gpu import Faults, RecordingDevice
from hr_gpu_site import LARGE, MEAN, SMALL, GpuSite, colors, colors_of

from headrace.errors import DeviceError, ModelError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import SizeClassSpec
from headrace.workers.cuda.device import PLAIN, CudaFaultError, OutOfMemoryError, RunFailedError, classify
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.graphs import ESTIMATED_GRAPH_BYTES
from headrace.workers.cuda.staging_blocks import StagingBlocks
from headrace.workers.cuda.suspects import KEPT_S, Suspects
from headrace.workers.engine import EngineMisuseError, ModelKey


def site_with(folder: Path, faults: Faults, settings: CudaSettings | None = None, **how: object) -> GpuSite:
    return GpuSite(folder, RecordingDevice(faults), settings, **how)  # type: ignore[arg-type]


def answers_rightly(site: GpuSite) -> None:
    for count in (1, 2, 4, 3):
        np.testing.assert_allclose(site.ask(colors(count, count)), colors(count, count), atol=1e-3)


# -- captures -----------------------------------------------------------------------------------------------


def test_every_bucket_is_captured_largest_first_under_an_id_of_its_own(tmp_path: Path) -> None:
    """Ids begin at 1 and no two buckets share one."""
    site = GpuSite(tmp_path)

    profile = site.load()

    ids = [bucket.graph_id for bucket in site.engine._models[MEAN].buckets.values()]
    assert sorted(ids) == [1, 2, 3, 4, 5, 6]
    assert site.device.captures == [4, 2, 4, 1, 2, 1]  # large, large, small ...: by bytes
    assert profile.notes == ()
    assert all(bucket.graph_bytes == 1000 for bucket in site.engine._models[MEAN].buckets.values())


def test_a_bucket_whose_capture_fails_runs_plain(tmp_path: Path) -> None:
    """One note for it; the others keep their graphs, and the answers are right."""
    site = site_with(tmp_path, Faults(fail_capture={2}))

    profile = site.load(classes=[SMALL])

    assert [site.bucket(rows).graph_id == PLAIN for rows in (1, 2, 4)] == [False, True, False]
    (note,) = profile.notes
    assert "small x2 runs without a CUDA graph" in note
    assert "900" in note
    answers_rightly(site)
    assert site.bucket(2).usage.replays == 0


def test_a_graph_that_answers_with_the_first_result_is_not_used(tmp_path: Path) -> None:
    """ORT-03: captured on one input, replayed on another; the difference costs the graph, not the answers."""
    site = site_with(tmp_path, Faults(stale={1, 2, 4}))

    profile = site.load(classes=[SMALL])

    assert all(site.bucket(rows).graph_id == PLAIN for rows in (1, 2, 4))
    assert len(profile.notes) == 3
    assert "is not the plain run" in profile.notes[0]
    answers_rightly(site)


def test_a_model_that_can_not_be_captured_runs_without_graphs(tmp_path: Path) -> None:
    """ORT-04: ONNX Runtime refuses the session; the model is served, and says why it is slower."""
    reason = "This session cannot use the graph capture feature as requested by the user"
    site = site_with(tmp_path, Faults(refuses_graphs=reason))

    profile = site.load(classes=[SMALL])

    assert len(profile.notes) == 1
    assert reason in profile.notes[0]
    assert site.device.captures == []
    answers_rightly(site)


def test_a_budget_leaves_the_classes_with_less_traffic_plain(tmp_path: Path) -> None:
    """Chosen by share of traffic, captured largest first; what is left out is named."""
    one = ESTIMATED_GRAPH_BYTES + 100_000
    site = GpuSite(
        tmp_path,
        settings=CudaSettings(slots=3, memory_limit_bytes=3 * one),
    )

    profile = site.load(classes=[replace(SMALL, traffic_share=9.0), LARGE])

    assert [site.bucket(rows, "small").graph_id != PLAIN for rows in (1, 2, 4)] == [True, True, True]
    assert [site.bucket(rows, "large").graph_id != PLAIN for rows in (1, 2, 4)] == [False, False, False]
    assert len(profile.notes) == 3
    assert all("gpu_memory_mb" in note for note in profile.notes)
    answers_rightly(site)


def test_capturing_stops_when_graphs_turn_out_larger_than_thought(tmp_path: Path) -> None:
    """The budget counts what the device reports after each capture."""
    limit = 4 * ESTIMATED_GRAPH_BYTES
    site = site_with(
        tmp_path, Faults(graph_bytes=3 * ESTIMATED_GRAPH_BYTES), CudaSettings(3, memory_limit_bytes=limit)
    )

    profile = site.load(classes=[SMALL])

    assert [site.bucket(rows).graph_id != PLAIN for rows in (1, 2, 4)] == [False, True, True]
    assert "is spent" in profile.notes[0]
    answers_rightly(site)


def test_graphs_can_be_switched_off(tmp_path: Path) -> None:
    """Every run is plain and synchronised."""
    site = GpuSite(tmp_path, settings=CudaSettings(slots=3, has_graphs=False))

    site.load(classes=[SMALL])

    assert site.device.captures == []
    answers_rightly(site)


# -- memory -------------------------------------------------------------------------------------------------


def test_batches_that_find_no_memory_are_lowered_at_the_start(tmp_path: Path) -> None:
    """The profile promises only what runs."""
    site = site_with(tmp_path, Faults(memory_rows=2))

    profile = site.load(classes=[SMALL])

    (only,) = profile.classes
    assert only.size_class.max_batch_size == 2
    assert [bucket for bucket, _ in only.buckets] == [1, 2]
    assert any("no memory for batches of 4: the largest is 2" in note for note in profile.notes)
    with pytest.raises(EngineMisuseError):
        site.engine.bucket_for(MEAN, "small", 3)


def test_a_model_without_memory_for_one_row_is_refused(tmp_path: Path) -> None:
    """In words, and not as a fault of the model: another process may have the memory."""
    site = site_with(tmp_path, Faults(memory_rows=0))

    with pytest.raises(DeviceError, match="no memory"):
        site.load(classes=[SMALL])


def test_a_batch_that_finds_no_memory_fails_alone(tmp_path: Path) -> None:
    """ORT-05: it is an error of that batch, which the broker halves; the ones behind it are answered."""
    site = GpuSite(tmp_path)
    site.load(classes=[SMALL])
    site.device.faults.memory_rows = 2
    large = site.stage(colors(4))
    small = [site.stage(colors(1, seed)) for seed in (1, 2)]

    for batch in (large, *small):
        site.engine.submit(batch)
    outputs = [site.engine.collect() for _ in range(3)]

    assert "out of device memory" in outputs[0].error
    assert not outputs[0].is_fatal
    for seed, found in enumerate(outputs[1:], start=1):
        np.testing.assert_allclose(colors_of(found), colors(1, seed), atol=1e-3)


def test_memory_does_not_grow_after_the_start(tmp_path: Path) -> None:
    """ORT-06: small batches, a large one, small ones again: everything was allocated before the first."""
    site = GpuSite(tmp_path)
    site.load()
    site.device.is_sealed = True
    before = site.device.memory()

    for number in range(100):
        count, size_class = (4, "large") if number == 50 else (1, "small")
        site.ask(colors(count, number), size_class)

    assert site.device.memory() == before


def test_batches_are_staged_in_pinned_blocks_without_another_copy(tmp_path: Path) -> None:
    """The block that frames were written to is the source of the copy to the device."""
    site = GpuSite(tmp_path)
    site.load()
    pool = site.engine.staging_pool()
    assert isinstance(pool, StagingBlocks)

    batches = [site.stage(colors(1, number)) for number in range(5)]

    blocks = [pool.block_of(batch) for batch in batches]
    assert [block is not None for block in blocks] == [True, True, True, True, False]  # slots and one more
    assert pool.unpinned_count == 1
    site.engine.submit(batches[4])
    np.testing.assert_allclose(colors_of(site.engine.collect()), colors(1, 4), atol=1e-3)
    for batch in batches:
        site.give_back(batch)
    assert pool.block_of(site.stage(colors(1))) is not None


def test_a_batch_without_a_slot_is_refused(tmp_path: Path) -> None:
    """The worker holds no more batches than slots; one more is misuse, and harms nothing."""
    site = GpuSite(tmp_path, settings=CudaSettings(slots=2))
    site.load(classes=[SMALL])
    batches = [site.stage(colors(1, number)) for number in range(3)]
    for batch in batches[:2]:
        site.engine.submit(batch)

    with pytest.raises(EngineMisuseError, match="slots"):
        site.engine.submit(batches[2])

    for number in range(2):
        np.testing.assert_allclose(colors_of(site.engine.collect()), colors(1, number), atol=1e-3)


# -- a device that is lost ----------------------------------------------------------------------------------


def test_nothing_is_given_out_after_the_device_was_lost(tmp_path: Path) -> None:
    """Not even a batch that was done before: its bytes can't be told from what a lost device left."""
    site = GpuSite(tmp_path)
    site.load(classes=[SMALL])
    batches = [site.stage(colors(1, number)) for number in range(3)]
    site.engine.submit(batches[0])
    site.device.faults.dies_at_run = 0

    site.engine.submit(batches[1])
    outputs = [site.engine.collect() for _ in range(2)]

    assert [found.is_fatal for found in outputs] == [True, True]
    assert all(not found.outputs for found in outputs)
    assert "small x1" in outputs[0].error
    assert "700" in outputs[0].error
    with pytest.raises(DeviceError):
        site.engine.submit(batches[2])


def test_the_bucket_that_lost_the_device_runs_plain_in_the_next_process(tmp_path: Path) -> None:
    """It is remembered in a file beside the cached models."""
    path = tmp_path / "suspects.json"
    first = GpuSite(tmp_path, suspects=Suspects(path))
    first.load(classes=[SMALL])
    batch = first.stage(colors(2))
    first.device.faults.dies_at_run = 0
    first.engine.submit(batch)
    assert first.engine.collect().is_fatal

    second = GpuSite(tmp_path, suspects=Suspects(path))
    profile = second.load(classes=[SMALL])

    assert [second.bucket(rows).graph_id == PLAIN for rows in (1, 2, 4)] == [False, True, False]
    assert any("small x2 runs without a CUDA graph: it failed earlier" in note for note in profile.notes)
    answers_rightly(second)


def test_a_capture_that_kills_the_device_is_not_tried_again(tmp_path: Path) -> None:
    """The first process ends with the code of a lost device; the second leaves that bucket plain."""
    path = tmp_path / "suspects.json"
    first = site_with(tmp_path, Faults(dies_in_capture={2}), suspects=Suspects(path))
    with pytest.raises(CudaFaultError) as caught:
        first.load(classes=[SMALL])
    assert caught.value.exit_code == ExitCode.DEVICE_LOST

    second = site_with(tmp_path, Faults(dies_in_capture={2}), suspects=Suspects(path))
    second.load(classes=[SMALL])

    assert second.device.captures == [4, 1]
    answers_rightly(second)


def test_a_device_lost_while_it_is_measured_is_remembered_too(tmp_path: Path) -> None:
    """Or the next process would run into it again, and the one after that."""
    path = tmp_path / "suspects.json"
    site = site_with(tmp_path, Faults(dies_at_run=40), suspects=Suspects(path))  # 40: behind the captures

    with pytest.raises(CudaFaultError):
        site.load(classes=[SMALL])

    assert len(site.device.captures) == 3
    assert "small x" in path.read_text()


def test_suspects_are_forgotten_after_a_day_and_by_another_model(tmp_path: Path) -> None:
    """A fault may have had another cause."""
    now = [1000.0]
    suspects = Suspects(tmp_path / "s.json", clock=lambda: now[0])
    suspects.add("a", "why")

    assert (suspects.reason("a"), suspects.reason("b")) == ("why", "")
    now[0] += KEPT_S
    assert suspects.reason("a") == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 3}', b"\xff\xfe"])
def test_a_damaged_list_of_suspects_is_an_empty_one(content: bytes, tmp_path: Path) -> None:
    """It costs the memory, not the worker."""
    path = tmp_path / "s.json"
    path.write_bytes(content)
    suspects = Suspects(path)

    assert suspects.reason("a") == ""
    suspects.add("a", "why")
    assert suspects.reason("a") == "why"


def test_a_folder_that_can_not_be_written_costs_the_memory_alone(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    suspects = Suspects(tmp_path / "file" / "s.json")

    suspects.add("a", "why")

    assert suspects.reason("a") == ""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=/x.cc", OutOfMemoryError),
        ("Failed to allocate memory for requested buffer of size 3221225472", OutOfMemoryError),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", OutOfMemoryError),
        ("Available memory of 5 is smaller than requested bytes of 9", OutOfMemoryError),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", CudaFaultError),
        ("CUDA error: misaligned address", CudaFaultError),
        ("CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED", CudaFaultError),
        ("CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR", CudaFaultError),
        ("Non-zero status code returned while running Gather node: idx=1000 out of bounds", RunFailedError),
        ("Got invalid dimensions for output: mean", RunFailedError),
    ],
)
def test_failures_are_told_apart_by_their_words(text: str, kind: type[Exception]) -> None:
    """Only a fault ends the process."""
    assert classify(text) is kind


# -- models -------------------------------------------------------------------------------------------------


def test_a_failed_run_of_the_model_is_that_batch_alone(tmp_path: Path) -> None:
    """An index out of range in the model harms neither device nor session."""
    site = GpuSite(tmp_path)
    site.load(hr_models.failing_on_mark(), classes=[SMALL])
    bad, good = site.stage([(hr_models.MARK, 0, 0)]), site.stage([(1, 2, 3)])

    for batch in (bad, good):
        site.engine.submit(batch)
    first, second = site.engine.collect(), site.engine.collect()

    assert first.error
    assert not first.is_fatal
    np.testing.assert_allclose(colors_of(second), [(1, 2, 3)], atol=1e-3)


def test_an_output_whose_shape_depends_on_values_is_served_without_graphs(tmp_path: Path) -> None:
    """A list for the whole batch: batches of one, from host memory, each with its own length."""
    site = GpuSite(tmp_path)

    profile = site.load(hr_models.built_in_nms(), classes=[SizeClassSpec("tiny", 2, 2, 4)])

    assert any("known only after a run" in note for note in profile.notes)
    for color, found in (((1, 1, 1), 12), ((1, 0, 0), 4), ((0, 0, 0), 0)):
        batch = site.stage([color], "tiny")
        site.engine.submit(batch)
        (boxes,) = site.engine.collect().outputs.values()
        assert boxes.shape == (1, found, 4)


def test_an_output_for_the_whole_batch_belongs_to_the_one_frame(tmp_path: Path) -> None:
    """A scalar output means batches of one; it comes back with a first axis of one."""
    site = GpuSite(tmp_path)

    profile = site.load(hr_models.scalar_output(), classes=[SMALL])
    batch = site.stage([(6, 6, 6)])
    site.engine.submit(batch)

    assert profile.classes[0].size_class.max_batch_size == 1
    (mean,) = site.engine.collect().outputs.values()
    assert mean.tolist() == [6.0]


def test_a_fixed_batch_is_always_filled(tmp_path: Path) -> None:
    """ORT-07: a model exported with a batch of four runs four rows, three of them real."""
    site = GpuSite(tmp_path)
    site.load(hr_models.mean_color(batch=4), classes=[SMALL])

    np.testing.assert_allclose(site.ask(colors(3)), colors(3), atol=1e-3)

    assert list(site.engine._models[MEAN].buckets) == [("small", 4)]


def test_rows_that_are_mixed_up_are_found_at_the_start(tmp_path: Path) -> None:
    """ORT-12: the self-test compares a batch with single runs on this engine too."""
    with pytest.raises(ModelError, match="depends on the other frames"):
        GpuSite(tmp_path).load(hr_models.row_mixing(), classes=[SMALL])


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        pytest.param(
            hr_models.several_inputs,
            {"values": [[1.0, 2, 3, 4]], "scale": [[2.0]], "size": [[3, 4]]},
            [[9.0, 11, 13, 15]],
            id="three-inputs",
        ),
        pytest.param(
            hr_models.without_batch,
            {"vector": [[1.0, 2, 3]], "factor": [3.0]},
            [[3.0, 6, 9]],
            id="no-batch-axis",
        ),
        pytest.param(hr_models.open_length_in_steps, {"x": [[1.0] * 32]}, [32.0], id="open-length"),
    ],
)
def test_plain_tensor_models(
    model: object, inputs: dict[str, list[object]], expected: list[object], tmp_path: Path
) -> None:
    """Several inputs in one block, inputs without a batch axis, and shapes that are not known beforehand."""
    from headrace.workers.engine import InputBuffer, StagedBatch

    device = RecordingDevice()
    engine = CudaEngine(device)
    spec, files = hr_models.save(tmp_path, model())  # type: ignore[operator]
    engine.load(spec, files)
    key = ModelKey("m", "1")
    engine.profile(key)
    plans = {plan.name: plan for plan in engine.plan(key, "tensor")}

    buffers = tuple(
        InputBuffer(name, np.ascontiguousarray(value, dtype=plans[name].dtype))
        for name, value in inputs.items()
    )
    engine.submit(StagedBatch(1, key, "tensor", 1, 1, buffers))
    outputs = engine.collect()

    assert not outputs.error, outputs.error
    (found,) = outputs.outputs.values()
    np.testing.assert_allclose(found, expected)


def test_a_second_model_may_be_larger_than_the_first(tmp_path: Path) -> None:
    """The slots grow before anything of it is captured; both answer."""
    site = GpuSite(tmp_path)
    site.load(classes=[SMALL])
    second = ModelKey("second", "1")

    site.load(classes=[LARGE], key=second)

    answers_rightly(site)
    batch = site.stage(colors(4), "large", second)
    site.engine.submit(batch)
    np.testing.assert_allclose(colors_of(site.engine.collect()), colors(4), atol=1e-3)
