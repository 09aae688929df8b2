"""Field cases of GPU workers, end to end: a real broker, and the cuda engine on a device that stands in.

The device computes on the host and checks what a GPU would not tell: see hr_gpu.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import hr_models
import hr_plant as hp
import hr_worker
import numpy as np
import onnx
import pytest
from hr_gpu import Faults, RecordingDevice
from onnx import TensorProto, helper, numpy_helper

from headrace.errors import Code
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Frame, Frames, Outcome, SizeClassSpec, Status
from headrace.workers import process, telemetry
from headrace.workers.cuda.device import PLAIN
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.suspects import Suspects
from headrace.workers.devices import Device

EIGHT = range(1, 9)


class Gpu:
    """A device for a worker, and the engines that were made on it."""

    def __init__(self, faults: Faults | None = None, suspects: Path | None = None) -> None:
        self.recording = RecordingDevice(faults)
        self.engines: list[CudaEngine] = []
        self._suspects = suspects
        self.device = Device("cuda", "cuda:0 stand-in", self._make)

    def _make(self) -> CudaEngine:
        engine = CudaEngine(
            self.recording, CudaSettings(slots=3), gate=Gate(), suspects=Suspects(self._suspects)
        )
        self.engines.append(engine)
        return engine

    def counts(self) -> tuple[int, int]:
        """Return replays and plain runs of all buckets."""
        usages = [
            bucket.usage for loaded in self.engines[-1]._models.values() for bucket in loaded.buckets.values()
        ]
        return sum(usage.replays for usage in usages), sum(usage.plain_runs for usage in usages)


def serving(
    folder: Path, gpu: Gpu, graph: onnx.ModelProto | None = None, *classes: SizeClassSpec
) -> AbstractContextManager[hp.Plant]:
    """Run a broker and a worker on this device, which is ready; the mean colour model unless one is given."""
    model = hp.onnx_model(folder, graph or hr_models.mean_color(), *classes)
    return hp.running_plant(folder, model, device=gpu.device)


def numbered(numbers: range | list[int]) -> list[Frame]:
    return [hr_worker.raw_frame(hp.solid(number, number, number)) for number in numbers]


def overflowing() -> onnx.ModelProto:
    """Mean colour in float16, times 300: above 65,504, and so infinite, for pixels from 219 on."""
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Mul", ["x", "factor"], ["large"]),
                helper.make_node("ReduceMean", ["large"], ["mean"], axes=[2, 3], keepdims=0),
            ],
            "overflowing",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 3, "h", "w"])],
            [helper.make_tensor_value_info("mean", TensorProto.FLOAT16, ["n", 3])],
            [numpy_helper.from_array(np.array([300], np.float16), "factor")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


def endings(outcomes: list[Outcome]) -> list[str]:
    return [outcome.code or str(outcome.status) for outcome in outcomes]


def test_frames_are_served_by_replays(tmp_path: Path) -> None:
    """ORT-03: a hundred different frames in batches of mixed sizes: each gets its own answer, by replay."""
    gpu, rng = Gpu(), random.Random(3)
    with serving(tmp_path, gpu) as plant:
        _, plain_before = gpu.counts()
        gpu.recording.is_sealed = True
        (worker,) = plant.ready_workers()
        left = list(range(100))
        while left:
            count = min(len(left), rng.randint(1, 8))
            numbers, left = left[:count], left[count:]
            assert [hp.mean(outcome)[0] for outcome in plant.outcomes(*numbered(numbers))] == numbers
        replays, plain = gpu.counts()

    assert (worker["engine"], worker["device"]) == ("cuda", "cuda:0 stand-in")
    assert replays >= 13
    assert plain == plain_before


def test_graphs_that_give_old_results_are_found_before_serving(tmp_path: Path) -> None:
    """ORT-03: each replay answers its first input: the start finds it, the worker serves without graphs."""
    gpu = Gpu(Faults(stale={1, 2, 4, 8}))
    with serving(tmp_path, gpu) as plant:
        (worker,) = plant.ready_workers()
        outcomes = plant.outcomes(*numbered(EIGHT))

    assert [hp.mean(outcome)[0] for outcome in outcomes] == list(EIGHT)
    assert sum("is not the plain run" in note for note in worker["notes"]) == 4


def test_a_model_that_refuses_graphs_is_served_all_the_same(tmp_path: Path) -> None:
    """ORT-04: plain runs and one note; the worker neither dies nor loops."""
    reason = "graph capture: the model has control flow nodes"
    gpu = Gpu(Faults(refuses_graphs=reason))
    with serving(tmp_path, gpu) as plant:
        (worker,) = plant.ready_workers()
        outcomes = plant.outcomes(*numbered(EIGHT))

    assert [hp.mean(outcome)[0] for outcome in outcomes] == list(EIGHT)
    assert sum(reason in note for note in worker["notes"]) == 1
    assert gpu.recording.captures == []


def test_a_model_with_nodes_that_can_not_be_captured_is_served(tmp_path: Path) -> None:
    """ORT-04: NonZero, whose output is as long as the data say: plain runs from host memory, a frame each."""
    gpu = Gpu(Faults(refuses_graphs="graph capture: not all nodes are on CUDA"))
    with serving(tmp_path, gpu, hr_models.built_in_nms()) as plant:
        (worker,) = plant.ready_workers()
        outcomes = plant.outcomes(*numbered(EIGHT), *numbered([0]))

    assert {outcome.status for outcome in outcomes} == {Status.OK}
    assert {outcome.batch_size for outcome in outcomes} == {1}
    assert any("served without CUDA graphs" in note for note in worker["notes"])
    assert gpu.recording.captures == []
    # Image index and place of each value above 0; a black frame has none.
    assert hp.tensor(outcomes[-1]).size == 0
    assert hp.tensor(outcomes[0]).size > 0


def test_non_finite_outputs_are_an_error_of_that_frame(tmp_path: Path) -> None:
    """ORT-02: a bright frame overflows float16, twenty times in a row; its neighbours have results."""
    gpu = Gpu()
    with serving(tmp_path, gpu, overflowing()) as plant:
        for _ in range(20):
            outcomes = plant.outcomes(*numbered([10, 250, 20]))

            assert endings(outcomes) == ["ok", Code.NON_FINITE, "ok"]
            assert [hp.mean(outcomes[index])[0] for index in (0, 2)] == [3000, 6000]
        assert plant.status()["error_by_code"] == {Code.NON_FINITE: 20}
        assert plant.status()["error_by_model"] == {"m": {Code.NON_FINITE: 20}}


def test_a_batch_without_memory_is_halved_and_the_worker_goes_on(tmp_path: Path) -> None:
    """ORT-05: memory for two rows is left: eight frames come through in smaller batches, then 100 more."""
    gpu = Gpu()
    with serving(tmp_path, gpu) as plant:
        gpu.recording.faults.memory_rows = 2
        first = plant.outcomes(*numbered(EIGHT))
        rest = [plant.outcomes(*numbered([number]))[0] for number in range(100)]
        plant.assert_account_adds_up()

    assert [hp.mean(outcome)[0] for outcome in first] == list(EIGHT)
    assert [hp.mean(outcome)[0] for outcome in rest] == list(range(100))


def test_memory_stays_what_it_was_at_the_start(tmp_path: Path) -> None:
    """ORT-06: small frames, one batch of large ones, small frames: nothing is allocated after the start."""
    gpu = Gpu()
    classes = (SizeClassSpec("small", 48, 64, 4), SizeClassSpec("large", 512, 512, 4))
    with serving(tmp_path, gpu, None, *classes) as plant:
        gpu.recording.is_sealed = True
        before = gpu.recording.memory()
        large = [hr_worker.raw_frame(hp.solid(9, 9, 9, 500, 500)) for _ in range(4)]
        for frames in (numbered(range(50)), large, numbered(range(50))):
            assert {outcome.status for outcome in plant.outcomes(*frames)} == {Status.OK}

        assert gpu.recording.memory() == before


def test_a_fixed_batch_is_padded_on_a_gpu_too(tmp_path: Path) -> None:
    """ORT-07: a graph made for four rows: eight frames, all right."""
    gpu = Gpu()
    graph = hr_models.mean_color(4, 48, 64)
    with serving(tmp_path, gpu, graph) as plant:
        outcomes = plant.outcomes(*numbered(EIGHT)) + plant.outcomes(*numbered([100]))

    assert [hp.mean(outcome)[0] for outcome in outcomes] == [*EIGHT, 100]


def test_each_row_of_a_replayed_batch_is_right(tmp_path: Path) -> None:
    """ORT-12: batches of four distinct frames in random order, 60 rounds."""
    gpu, rng = Gpu(), random.Random(12)
    with serving(tmp_path, gpu) as plant:
        for _ in range(60):
            numbers = rng.sample(range(256), 4)

            assert [hp.mean(outcome)[0] for outcome in plant.outcomes(*numbered(numbers))] == numbers


def test_a_lost_device_ends_the_worker_and_its_bucket_runs_plain_afterwards(tmp_path: Path) -> None:
    """Nothing it computed is published; the next process runs its frames, and leaves that bucket plain."""
    suspects = tmp_path / "suspects.json"
    first = Gpu(Faults(dies_when_serving=True), suspects)
    second = Gpu(suspects=suspects)
    with hp.open_plant(hp.onnx_model(tmp_path, hr_models.mean_color())) as plant:
        frames = [dataclasses.replace(f, stream="s", seq=i, epoch=1) for i, f in enumerate(numbered(EIGHT))]
        plant.producer.send(Frames(tuple(frames)))

        assert hp.ThreadWorker(plant.endpoints, tmp_path, first.device).run_to_its_end() == 71

        with hp.ThreadWorker(plant.endpoints, tmp_path, second.device):
            outcomes = plant.collect(*(("s", seq) for seq in range(8)))
            bucket = next(iter(second.engines[-1]._models.values())).buckets["small", 8]
            plant.assert_account_adds_up()

    assert [hp.mean(outcome)[0] for outcome in outcomes] == list(EIGHT)
    assert bucket.graph_id == PLAIN
    assert "700" in bucket.why_plain


def test_what_the_gpu_does_is_shown_by_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays and their times per bucket, in /metrics, for as long as the worker lives."""
    monkeypatch.setattr(
        process, "Poller", lambda figures, tell: telemetry.Poller(figures, tell, interval_s=0.02)
    )
    gpu = Gpu()

    def figures() -> dict[str, float]:
        return gpu.engines[-1].figures() if gpu.engines else {}

    gpu.device = dataclasses.replace(gpu.device, figures=figures)
    name = 'headrace_worker_graph_replays_total{of="m:1 small x8",worker="w"}'
    text = ""

    def is_shown() -> bool:
        nonlocal text
        with urllib.request.urlopen(f"{plant.endpoints.http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return name in text

    with (
        hp.open_plant(hp.onnx_model(tmp_path, hr_models.mean_color()), http_port=0) as plant,
        hp.ThreadWorker(plant.endpoints, tmp_path, gpu.device, worker_id="w"),
    ):
        plant.wait_for_workers()
        plant.outcomes(*numbered(EIGHT))
        hp.wait_for(is_shown)

    assert "headrace_worker_run_seconds_total" in text
    assert 'headrace_worker_device_memory_free_bytes{of="",worker="w"}' in text


#: A machine with a GPU shows none to a process that is told so.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_cuda_that_is_not_there_ends_the_worker_with_a_reason() -> None:
    """ORT-01: no silent run on the CPU: one line with reason and remedy, and a code of its own."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "headrace",
        "worker",
        "--connect",
        "127.0.0.1:1",
        "--device",
        "cuda",
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **NO_GPU})

    assert (done.returncode, done.stdout) == (ExitCode.UNAVAILABLE, "")
    (line,) = done.stderr.strip().splitlines()
    assert "device cuda: no CUDA" in line
    assert "use --device cpu" in line


def test_auto_without_a_gpu_serves_on_the_cpu_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORT-01: aloud in the worker's log with the reason, and in status with the engine that runs."""
    for name, value in NO_GPU.items():
        monkeypatch.setenv(name, value)
    with (
        hp.open_plant(hp.onnx_model(tmp_path, hr_models.mean_color())) as plant,
        hp.ProcessWorker(plant.endpoints, tmp_path, "--device", "auto") as worker,
    ):
        plant.wait_for_workers()
        (shown,) = plant.ready_workers()
        outcomes = plant.outcomes(*numbered(EIGHT))
        log = worker.stderr()

    assert [hp.mean(outcome)[0] for outcome in outcomes] == list(EIGHT)
    assert (shown["engine"], shown["device"]) == ("cpu", "cpu")
    (said,) = [line for line in log.splitlines() if "running on the CPU" in line]
    assert "no CUDA" in said


def test_threads_follow_what_the_process_may_use() -> None:
    """ORT-11: on one CPU of this machine, as one of four workers, a worker takes one thread."""
    cpu = min(os.sched_getaffinity(0))
    script = (
        f"import os, sys; os.sched_setaffinity(0, {{{cpu}}});"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'headrace', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", script, "worker", "--connect", "127.0.0.1:1", "--device", "cpu"]
    environment = {**os.environ, "HEADRACE_WORKER__COUNT": "4", "HEADRACE_WORKER__GIVE_UP_MS": "1"}

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stderr is not None
        line = next((line for line in worker.stderr if "worker started" in line), "")
        worker.kill()

    assert "threads_count" in line
    assert line.partition("threads_count")[2].strip('"=: ').startswith("1"), line
