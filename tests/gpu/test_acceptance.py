"""The acceptance tests of a GPU: what a device that stands in for one can't show.

They skip, with the reason, on a machine without a GPU. Those that hold for any device also run on host
addresses, so that the tests themselves are known to work.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hr_models
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.protocol.messages import ImageInput, SizeClassSpec
from headrace.workers.cuda.device import PLAIN, Device, Lane
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.host_device import HostDevice
from headrace.workers.cuda.slots import Bucket
from headrace.workers.devices import why_no_cuda
from headrace.workers.engine import EngineMisuseError, InputBuffer, ModelKey, StagedBatch

pytestmark = pytest.mark.timeout(300)

WHY_NOT = why_no_cuda()
needs_gpu = pytest.mark.skipif(bool(WHY_NOT), reason=f"needs a GPU: {WHY_NOT}")
KEY = ModelKey("m", "1")
SIDE = 32 if WHY_NOT else 224  # FP16 on a CPU takes its time
SIZE_CLASS = SizeClassSpec("only", SIDE, SIDE, 8)
MIB = 1024 * 1024


def torch_device() -> Any:
    from headrace.workers.cuda.torch_device import TorchDevice

    return TorchDevice()


@pytest.fixture(params=[pytest.param("gpu", marks=needs_gpu), "host"])
def device(request: pytest.FixtureRequest) -> Device:
    return HostDevice() if request.param == "host" else torch_device()


@pytest.fixture
def gpu() -> Any:
    return torch_device()


def convolutions(depth: int = 4, channels: int = 32, kind: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """A chain of 3x3 convolutions in FP16 and the mean of each channel: enough work to be seen in time."""
    rng = np.random.default_rng(5)
    nodes, weights, value, width = [], [], "x", 3
    for number in range(depth):
        weight = rng.normal(0, (1 / (9 * width)) ** 0.5, (channels, width, 3, 3)).astype(np.float16)
        weights.append(numpy_helper.from_array(weight, f"w{number}"))
        nodes.append(
            helper.make_node("Conv", [value, f"w{number}"], [f"c{number}"], pads=[1] * 4, kernel_shape=[3, 3])
        )
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"]))
        value, width = f"r{number}", channels
    nodes.append(helper.make_node("ReduceMean", [value], ["mean"], axes=[2, 3], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "convolutions",
        [helper.make_tensor_value_info("x", kind, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("mean", kind, ["n", channels])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_engine(
    folder: Path, device: Device, settings: CudaSettings | None = None, gate: Gate | None = None
) -> CudaEngine:
    engine = CudaEngine(device, settings or CudaSettings(slots=3), gate=gate or Gate())
    spec, files = hr_models.save(
        folder, convolutions(), size_classes=(SIZE_CLASS,), image=ImageInput(scale=1 / 255)
    )
    engine.load(spec, files)
    engine.profile(KEY)
    return engine


def stage(number: int, rows: int, seed: int) -> StagedBatch:
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 256, (rows, SIDE, SIDE, 3), np.uint8)
    return StagedBatch(number, KEY, "only", rows, rows, (InputBuffer("x", array),))


def ask(engine: CudaEngine, rows: int, seed: int) -> bytes:
    engine.submit(stage(1, rows, seed))
    outputs = engine.collect()
    assert not outputs.error, outputs.error
    return outputs.outputs["mean"].tobytes()


def buckets_of(engine: CudaEngine) -> dict[int, Bucket]:
    return {rows: bucket for (_, rows), bucket in engine._models[KEY].buckets.items()}


@needs_gpu
def test_01_a_replay_returns_before_it_is_done(tmp_path: Path, gpu: Any) -> None:
    """Ten replays of the largest bucket are enqueued in less than half of the time that they take."""
    bucket = buckets_of(make_engine(tmp_path, gpu))[8]
    assert bucket.graph_id != PLAIN
    gpu.drain()

    begun = time.perf_counter()
    for _ in range(10):
        bucket.session.run(bucket.binding, bucket.graph_id, is_synchronised=False)
    returned = time.perf_counter()
    gpu.drain()
    done = time.perf_counter()

    assert returned - begun < (done - begun) / 2


def test_02_alternating_inputs_give_alternating_answers(tmp_path: Path, device: Device) -> None:
    """Two inputs in turns: they differ, and each is what a plain run answers."""
    engine = make_engine(tmp_path / "graphs", device)
    plain = make_engine(tmp_path / "plain", device, CudaSettings(slots=3, has_graphs=False))

    for rows in (1, 2, 4, 8):
        answers = [ask(engine, rows, seed) for seed in (1, 2, 1, 2)]
        expected = [np.frombuffer(ask(plain, rows, seed), np.float16) for seed in (1, 2)]

        assert answers[0] == answers[2] != answers[1] == answers[3]
        for answer, right in zip(answers, expected * 2, strict=True):
            np.testing.assert_allclose(np.frombuffer(answer, np.float16), right, rtol=2e-2, atol=1e-3)


def test_03_a_second_thread_is_refused(tmp_path: Path, device: Device) -> None:
    """It would capture again, in silence; the engine refuses it and goes on."""
    engine = make_engine(tmp_path, device)
    before = ask(engine, 2, 1)
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            engine.submit(stage(1, 2, 1))
        except EngineMisuseError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join(30)

    assert len(errors) == 1
    assert ask(engine, 2, 1) == before


@needs_gpu
def test_04_copies_overlap_replays(tmp_path: Path, gpu: Any) -> None:
    """The copy in of the second batch begins before the first is computed: seen in the events' times."""
    engine = make_engine(tmp_path, gpu)
    for number in range(2):
        engine.submit(stage(number, 8, number))
    gpu.drain()
    first, second = engine._slots._slots[:2]

    assert gpu.elapsed_ns(second.copy_in_begun, first.computed) > 0
    for _ in range(2):
        assert not engine.collect().error


def test_05_a_thousand_replays_of_all_graphs_are_bit_stable(tmp_path: Path, device: Device) -> None:
    """Ids in random order: the same input gives the same bytes, whatever ran before it."""
    engine = make_engine(tmp_path, device)
    inputs = [(rows, seed) for rows in (1, 2, 4, 8) for seed in (1, 2)]
    expected = {each: ask(engine, *each) for each in inputs}
    rng = np.random.default_rng(5)

    for index in rng.integers(0, len(inputs), 20 if isinstance(device, HostDevice) else 1000):
        each = inputs[int(index)]
        assert ask(engine, *each) == expected[each]


def test_06_memory_does_not_grow_after_the_start(tmp_path: Path, device: Device) -> None:
    """Two hundred batches of all sizes: the device has as much left as before."""
    engine = make_engine(tmp_path, device)
    for rows in (1, 2, 4, 8):
        ask(engine, rows, 1)
    before = device.memory().free_bytes

    for number in range(8 if isinstance(device, HostDevice) else 200):
        ask(engine, (1, 2, 4, 8)[number % 4], number)

    assert before - device.memory().free_bytes <= 0


@needs_gpu
def test_07_a_capture_beside_a_busy_thread_fails_cleanly(tmp_path: Path, gpu: Any) -> None:
    """A thread that passes no gate allocates and waits all the time: buckets may lose their graphs, with a
    reason; answers are right and the device lives."""
    import torch

    is_over = threading.Event()

    def disturb() -> None:
        kept = []
        while not is_over.is_set():
            with contextlib.suppress(RuntimeError):
                kept = [
                    *kept[-4:],
                    torch.empty(64 * MIB + len(kept) * 4096, dtype=torch.uint8, device="cuda"),
                ]
                torch.cuda.Event().query()
                torch.cuda.empty_cache()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        engine = make_engine(tmp_path / "busy", gpu)
    finally:
        is_over.set()
        thread.join(30)
    quiet = make_engine(tmp_path / "quiet", gpu)

    for rows, bucket in buckets_of(engine).items():
        assert bucket.graph_id != PLAIN or bucket.why_plain
        found, right = (np.frombuffer(ask(each, rows, 3), np.float16) for each in (engine, quiet))
        np.testing.assert_allclose(found, right, rtol=2e-2, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("search", ["HEURISTIC", "EXHAUSTIVE"])
@pytest.mark.parametrize("prefers_nhwc", [False, True])
def test_08_convolution_settings_agree(
    search: str, prefers_nhwc: bool, tmp_path: Path, gpu: Any, record_property: Callable[[str, object], None]
) -> None:
    """Each setting gives the answers of the default; its time is noted in the report."""
    base = make_engine(tmp_path / "base", gpu)
    settings = CudaSettings(slots=3, conv_search=search, prefers_nhwc=prefers_nhwc)
    engine = make_engine(tmp_path / "other", gpu, settings)

    found, right = (np.frombuffer(ask(each, 8, 4), np.float16) for each in (engine, base))

    np.testing.assert_allclose(found, right, rtol=2e-2, atol=1e-3)
    usage = buckets_of(engine)[8].usage
    record_property("run_us", usage.run_ns / max(1, usage.replays + usage.plain_runs) / 1e3)


@needs_gpu
def test_09_registered_shared_memory_is_as_fast_as_pinned(gpu: Any) -> None:
    """A mapping that another process could have made reaches 80 % of the rate of pinned memory."""
    nbytes = 256 * MIB
    with mapping(nbytes) as memory:
        registered = gpu.register_host(memoryview(memory))
        target, pinned = gpu.device_block(nbytes), gpu.pinned_block(nbytes)

        rates = [_rate(gpu, target, source, nbytes) for source in (pinned, registered)]

        gpu.drain()
        gpu.unregister_host(registered)
        del registered
    assert rates[1] >= 0.8 * rates[0], rates


@needs_gpu
def test_10_a_killed_worker_leaves_nothing_behind(tmp_path: Path, gpu: Any) -> None:
    """A process that holds device memory and a registered mapping is killed: the memory comes back, and the
    same file can be mapped and registered again."""
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    before = gpu.memory().free_bytes
    path = Path("/dev/shm") / f"headrace-test-{os.getpid()}"
    try:
        for _ in range(2):
            holder = subprocess.Popen(
                [sys.executable, "-P", str(script), str(path)], stdout=subprocess.PIPE, text=True
            )
            assert holder.stdout is not None
            assert holder.stdout.readline().strip() == "holding"
            assert before - gpu.memory().free_bytes > 900 * MIB
            holder.send_signal(signal.SIGKILL)
            holder.wait(30)
            holder.stdout.close()
            end = time.monotonic() + 30
            while before - gpu.memory().free_bytes > 64 * MIB:
                assert time.monotonic() < end, "the driver did not take the memory back"
    finally:
        path.unlink(missing_ok=True)


HOLDER = """
import mmap, sys, time
from headrace.workers.cuda.torch_device import TorchDevice
device = TorchDevice()
size = 256 * 1024 * 1024
with open(sys.argv[1], "w+b") as file:
    file.truncate(size)
    memory = mmap.mmap(file.fileno(), size)
registered = device.register_host(memoryview(memory))
block = device.device_block(1024 * 1024 * 1024)
print("holding", flush=True)
sys.stdin.read()
time.sleep(600)
"""


@contextlib.contextmanager
def mapping(nbytes: int) -> Iterator[mmap.mmap]:
    path = Path("/dev/shm") / f"headrace-test-{os.getpid()}"
    try:
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        yield memory
    finally:
        path.unlink(missing_ok=True)


def _rate(gpu: Any, target: Any, source: Any, nbytes: int) -> float:
    stream = gpu.stream(Lane.COPY_IN)
    gpu.copy(target, source, nbytes, stream)
    gpu.drain()
    begun = time.perf_counter()
    for _ in range(10):
        gpu.copy(target, source, nbytes, stream)
    gpu.drain()
    return 10 * nbytes / (time.perf_counter() - begun)
