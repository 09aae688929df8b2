"""What a GPU does with ResNet-50 and a text detector in FP16: plain runs, CUDA graphs, graphs that overlap,
and through headrace with emulated cameras.

Per bucket: images a second and the p50/p99 of a batch for plain runs, for replays one after another and for
three batches on the device at once; the rate of bare replays without any copy; what a launch costs the host;
device memory per graph. Through headrace: a broker, one worker and a producer that keeps frames waiting.

On a machine without a GPU the same code runs on host addresses, to see that it runs: the title says so, and
no budget is judged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from benchmarks import graphs
from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.processes import Processes
from benchmarks.report import Budget, Cell, Report, Table
from benchmarks.stats import percentile
from headrace.protocol.messages import ImageInput, ModelFile, ModelSpec, SizeClassSpec
from headrace.workers.cuda.device import PLAIN, Device
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.host_device import HostDevice
from headrace.workers.cuda.nvml import open_nvml
from headrace.workers.cuda.slots import Bucket
from headrace.workers.devices import why_no_cuda
from headrace.workers.engine import ModelKey, StagedBatch
from headrace.workers.staging import StagingPlan

#: Batches on the device at once, where they overlap.
DEPTH = 3

#: Targets: served images of bare replays, replay against plain runs up to GAIN_UP_TO, host time per batch.
SERVED_SHARE, REPLAY_GAIN, HOST_US = 0.95, 1.3, 300.0
GAIN_UP_TO = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """One model in one size class, square of ``side`` pixels."""

    name: str
    path: Path
    side: int
    max_batch_size: int

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, "1")

    def spec(self) -> ModelSpec:
        """Return it as an engine loads it; pixels are only scaled, since weights are not looked at."""
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        return ModelSpec(
            self.name,
            "1",
            (ModelFile(self.path.name, digest, self.path.stat().st_size),),
            ImageInput(scale=1 / 255),
            (SizeClassSpec("only", self.side, self.side, self.max_batch_size),),
        )


def run(*, quick: bool) -> Report:
    """Measure every bucket of both models in-process, then the largest through headrace."""
    is_gpu = not why_no_cuda()
    seconds = 0.2 if quick or not is_gpu else 2.0
    rounds: list[dict[str, float]] = []
    tables: list[Table] = []
    budgets: list[Budget] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for subject in _subjects(Path(folder), is_quick=quick or not is_gpu):
            device = _device(is_gpu)
            figures = _measure(subject, device, seconds)
            rounds += figures
            tables.append(_table(subject, figures, device.name if is_gpu else ""))
            if is_gpu:
                served = _through_headrace(subject, 3.0 if quick else 10.0)
                best = max(each["overlap images/s"] for each in figures)
                raw = max(each["replay only images/s"] for each in figures)
                rounds.append(
                    {"served images/s": served, "overlap images/s": best, "replay only images/s": raw}
                )
                # A detector's maps are what its pool carries, not what its GPU computes.
                is_classifier = subject.name == "resnet50"
                budgets += _budgets(subject, figures, served / raw if is_classifier else None)
    return Report("gpu", tuple(rounds), tuple(tables), tuple(budgets))


def _subjects(folder: Path, *, is_quick: bool) -> list[Subject]:
    resnet = _half(graphs.write_resnet50(folder))
    if is_quick:
        return [Subject("resnet50", resnet, 224, 2)]
    from importlib.util import find_spec

    subjects = [Subject("resnet50", resnet, 224, 32)]
    found = find_spec("rapidocr")
    if found is not None and found.submodule_search_locations:
        source = Path(found.submodule_search_locations[0]) / "models/PP-OCRv6_det_small.onnx"
        subjects.append(Subject("detector", _half(source, folder / "detector.onnx"), 640, 8))
    return subjects


def _half(path: Path, target: Path | None = None) -> Path:
    """Write a model in FP16, inputs and outputs too: the uint8 front end then goes straight to FP16."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    converted = convert_float_to_float16(onnx.load(str(path)), keep_io_types=False)
    target = target or path.with_name(f"{path.stem}-fp16.onnx")
    target.write_bytes(converted.SerializeToString())
    return target


def _device(is_gpu: bool) -> Device:
    if not is_gpu:
        return HostDevice(threads=len(os.sched_getaffinity(0)))
    from headrace.workers.cuda.torch_device import TorchDevice

    return TorchDevice()


# -- in-process -------------------------------------------------------------------------------------------


def _measure(subject: Subject, device: Device, seconds: float) -> list[dict[str, float]]:
    """Return one row of figures per bucket, largest last."""
    files = {subject.path.name: str(subject.path)}
    plain = CudaEngine(device, CudaSettings(slots=DEPTH, has_graphs=False))
    plain.load(subject.spec(), files)
    plain.profile(subject.key)
    graph = CudaEngine(device, CudaSettings(slots=DEPTH))
    graph.load(subject.spec(), files)
    graph.profile(subject.key)
    figures = []
    for rows in sorted(rows for _, rows in graph._models[subject.key].buckets):  # noqa: SLF001
        bucket = graph._models[subject.key].buckets["only", rows]  # noqa: SLF001
        row: dict[str, float] = {"bucket": rows, "has graph": float(bucket.graph_id != PLAIN)}
        for name, engine, depth in (("plain", plain, 1), ("graph", graph, 1), ("overlap", graph, DEPTH)):
            busy = _Busy(device)
            rate, p50_ms, p99_ms = _rate(engine, subject, rows, depth, seconds)
            row |= {f"{name} images/s": rate, f"{name} p50 ms": p50_ms, f"{name} p99 ms": p99_ms}
            row |= {f"{name} {key}": value for key, value in busy.end().items()}
        row["replay only images/s"] = _replays_only(device, bucket, seconds)
        usage = bucket.usage
        batches = usage.replays + usage.plain_runs
        row |= {
            "host us": usage.host_ns / batches / 1e3,
            "copy-in us": usage.copy_in_ns / batches / 1e3,
            "run us": usage.run_ns / batches / 1e3,
            "copy-out us": usage.copy_out_ns / batches / 1e3,
            "graph MiB": bucket.graph_bytes / 2**20,
        }
        figures.append(row)
    plain.close()
    graph.close()
    return figures


def _rate(
    engine: CudaEngine, subject: Subject, rows: int, depth: int, seconds: float
) -> tuple[float, float, float]:
    """Return images a second and p50, p99 milliseconds of a batch, with ``depth`` batches on the device."""
    batches = deque(_stage(engine, subject, rows, number) for number in range(depth))
    on_device: deque[tuple[StagedBatch, float]] = deque()
    times_ms: list[float] = []
    begun = end = time.perf_counter()
    for phase_s in (seconds / 4, seconds):  # warm-up, then what counts
        times_ms, begun = [], time.perf_counter()
        while (end := time.perf_counter()) - begun < phase_s or not times_ms:
            while batches:
                batch = batches.popleft()
                on_device.append((batch, time.perf_counter()))
                engine.submit(batch)
            batch, at = on_device.popleft()
            outputs = engine.collect()
            assert not outputs.error, outputs.error
            times_ms.append((time.perf_counter() - at) * 1e3)
            batches.append(batch)
    while on_device:
        engine.collect()
        batches.append(on_device.popleft()[0])
    pool = engine.staging_pool()
    if pool is not None:
        for batch in batches:
            pool.give_back(batch)
    return len(times_ms) * rows / (end - begun), percentile(times_ms, 50), percentile(times_ms, 99)


def _stage(engine: CudaEngine, subject: Subject, rows: int, number: int) -> StagedBatch:
    size_class = dataclasses.replace(subject.spec().size_classes[0])
    inputs = engine.plan(subject.key, "only")
    pool = engine.staging_pool()
    assert pool is not None
    buffers = pool.take(StagingPlan(subject.key, subject.spec(), size_class, inputs, (rows,)), rows)
    rng = np.random.default_rng(number)
    for buffer in buffers:
        buffer.array[...] = rng.integers(0, 256, buffer.array.shape, np.uint8)
    return StagedBatch(number, subject.key, "only", rows, rows, buffers)


def _replays_only(device: Device, bucket: Bucket, seconds: float) -> float:
    """Return images a second of replays alone, nothing copied: what serving is measured against."""
    is_async = bucket.graph_id != PLAIN
    device.drain()
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(10):
            bucket.session.run(bucket.binding, bucket.graph_id, is_synchronised=not is_async)
        device.drain()
        count += 10
    return count * bucket.rows / (time.perf_counter() - begun)


class _Busy:
    """The driver's figures over a measurement, asked by a thread of its own; nothing without a GPU."""

    def __init__(self, device: Device) -> None:
        uuid = getattr(device, "uuid", "")
        self._nvml = open_nvml(uuid) if uuid else None
        self._is_over = threading.Event()
        self._found: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while self._nvml is not None and not self._is_over.wait(0.5):
            self._found.append(self._nvml.figures())

    def end(self) -> dict[str, float]:
        """Return the median of each share."""
        self._is_over.set()
        self._thread.join()
        names = {name for figures in self._found for name in figures if name.endswith("_ratio")}
        return {
            name: float(np.median([figures[name] for figures in self._found if name in figures]))
            for name in sorted(names)
        }


# -- through headrace -------------------------------------------------------------------------------------


def _through_headrace(subject: Subject, seconds: float) -> float:
    """Return images a second with a broker, one worker on the GPU and cameras that keep frames waiting."""
    os.environ.setdefault("HEADRACE_WORKER__SLOTS", str(DEPTH + 1))
    size_class = SquareClass(subject.side, subject.max_batch_size)
    in_flight = subject.max_batch_size * (DEPTH + 1) * 3
    config = broker_config(Model((size_class,), path=subject.path), credits_count=in_flight)
    with Processes() as processes:
        address = processes.broker(config)
        processes.workers(address, 1, "cuda", threads=4)
        subscriber = processes.role("subscriber", address=address)
        subscriber.read()
        shape = (subject.side, subject.side, 3)
        for number in range(2):
            processes.role(
                "producer", f"cameras {number}", address=address, shape=shape, in_flight=in_flight,
                streams=200, bundle="auto", lane="auto",
            ).read()  # fmt: skip
        time.sleep(seconds / 4)
        first = subscriber.ask()
        time.sleep(seconds)
        last = subscriber.ask()
    return float((last["count"] - first["count"]) / (last["at_s"] - first["at_s"]))


# -- what is printed --------------------------------------------------------------------------------------

_COLUMNS = (
    "plain images/s",
    "graph images/s",
    "overlap images/s",
    "replay only images/s",
    "graph p50 ms",
    "graph p99 ms",
    "host us",
    "copy-in us",
    "run us",
    "copy-out us",
    "graph MiB",
    "overlap gpu_busy_ratio",
)


def _table(subject: Subject, figures: list[dict[str, float]], gpu: str) -> Table:
    where = f"FP16 on {gpu}" if gpu else "FP16 on host addresses: NOT A GPU, figures mean nothing"
    columns = [name for name in _COLUMNS if name in figures[0]]
    rows: list[tuple[Cell, ...]] = [
        (int(each["bucket"]), *(each[name] for name in columns)) for each in figures
    ]
    return Table(f"{subject.name} {subject.side}x{subject.side} {where}", ("batch", *columns), tuple(rows))


def _budgets(subject: Subject, figures: list[dict[str, float]], served_share: float | None) -> list[Budget]:
    gains = [
        each["graph images/s"] / each["plain images/s"] for each in figures if each["bucket"] <= GAIN_UP_TO
    ]
    hidden = max(each["overlap images/s"] / each["replay only images/s"] for each in figures)
    served = (
        []
        if served_share is None
        else [Budget.at_least(f"{subject.name}: served, of bare replays", served_share, SERVED_SHARE)]
    )
    return [
        *served,
        Budget.at_least(f"{subject.name}: replay against plain runs up to 8", min(gains), REPLAY_GAIN),
        Budget.at_least(f"{subject.name}: copies hidden, best bucket", hidden, SERVED_SHARE),
        Budget.at_most(
            f"{subject.name}: host us per batch", max(each["host us"] for each in figures), HOST_US
        ),
    ]
