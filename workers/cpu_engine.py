"""The ``cpu`` engine: ONNX Runtime on the CPU, one session per model.

A run happens inside ``submit``, in the device thread; ``collect`` only waits for its turn. ONNX Runtime reads
a C-contiguous numpy input where it stands and gives outputs that own their memory, so plain ``run`` with
views of the staging buffer already copies nothing; an IOBinding would save nothing on this device.

On a CPU a padding row costs as much as a real one, so a batch smaller than its bucket is run with its real
rows only. Only a graph with a fixed batch size sees padding. A batch whose intermediate values leave the
cache is run in portions, of the size that was measured to cost least per row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import DeviceError, ModelError
from headrace.protocol.messages import ClassProfile, ModelProfile, ModelSpec
from headrace.workers.engine import BatchOutputs, ModelKey, StagedBatch
from headrace.workers.engine_base import EngineBase, ServedClass
from headrace.workers.measure import (
    buckets_up_to,
    cheapest_portion,
    cost_in_portions,
    measure_buckets,
)
from headrace.workers.model_io import ModelIO, describe
from headrace.workers.onnx_model import first_line, open_session, read_model
from headrace.workers.self_test import (
    OPEN_AXIS_LENGTHS,
    Array,
    Batching,
    Rows,
    Subject,
    examine,
    join_rows,
    probe_row,
)

if TYPE_CHECKING:
    import onnxruntime

#: Time that the measurements of one model may take at start-up, all size classes together.
PROFILE_BUDGET_MS = 3000

#: Input of the largest batch that is run for measuring. Any size class may name a batch of thousands; the
#: front end makes float32 of the rows, four times as much, and a 720p batch of 16 still fits.
MAX_PROBE_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class _CpuModel:
    """One loaded model. ``batching`` is None until ``profile`` has tested it."""

    label: str
    io: ModelIO
    session: onnxruntime.InferenceSession
    output_names: list[str]
    classes: dict[str, ServedClass]
    batching: Batching | None = field(default=None)

    def run(self, rows: Rows) -> list[Array]:
        """Run rows ([rows, ...] per input) and return the graph's outputs as they come."""
        # [0, ...] keeps an array where [0] of a row without axes would give a numpy scalar.
        feeds = {i.feed_name: rows[i.name] if i.has_batch else rows[i.name][0, ...] for i in self.io.inputs}
        outputs: list[Array] = self.session.run(self.output_names, feeds)
        return outputs


class CpuEngine(EngineBase[_CpuModel, BatchOutputs]):
    """See the module. ``threads`` is how many cores one run may use; the caller knows what is allowed."""

    name = "cpu"
    device = "cpu"

    def __init__(self, threads: int = 1, profile_budget_ms: int = PROFILE_BUDGET_MS) -> None:
        super().__init__()
        if threads < 1:
            raise DeviceError(f"threads = {threads}: the cpu engine needs at least 1")
        self._threads = threads
        self._profile_budget_ms = profile_budget_ms

    def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
        """Open a session on the graph of ``spec``. A model loaded before under that name is replaced.

        Raises ModelError naming what was found and what is supported."""
        self._check_owner("load")
        label = f"{spec.name}:{spec.version}"
        if not spec.files:
            raise ModelError(f"model {label}: has no file, so only the emulated engine can serve it")
        graph, *others = (file.path for file in spec.files)
        # The graph names its weights relative to its own folder, ModelFile.path relative to the model's.
        folder = graph.rpartition("/")[0]
        weights = {path: files[path] for path in others}
        weights |= {path.removeprefix(f"{folder}/"): files[path] for path in others if folder}
        model = read_model(files[graph], weights, label=f"{label} ({graph})")
        io = describe(spec, model)
        session = open_session(io.model, self._options(io))
        self._models[ModelKey(spec.name, spec.version)] = _CpuModel(
            label,
            io,
            session,
            [output.name for output in model.outputs],
            {c.name: ServedClass(c, io.plans(c)) for c in io.classes},
        )

    def profile(self, model: ModelKey) -> ModelProfile:
        """Self-test the model and measure its buckets, within ``profile_budget_ms`` after the self-test.

        Raises ModelError when a self-test fails, or a class's size can't be run."""
        self._check_owner("profile")
        loaded = self._loaded(model)
        smallest = min(loaded.classes.values(), key=lambda c: c.size_class.height * c.size_class.width)
        wanted = 1 if loaded.io.has_open_shape else max(c.max_batch_size for c in loaded.io.classes)
        open_length = self._open_length(loaded, smallest)
        batching = examine(
            Subject(
                loaded.label,
                loaded.io.batch,
                tuple((output.name, output.shape) for output in loaded.io.model.outputs),
                smallest.plans,
                open_length,
            ),
            lambda rows: _run_checked(loaded, smallest, rows),
            wanted,
        )
        loaded.batching = batching
        notes = list(batching.notes)
        if loaded.io.has_open_shape:
            notes.append("open input shape: served with batches of one")
        budget_ns = self._profile_budget_ms * 1_000_000 // len(loaded.classes)
        classes = tuple(
            _measure_class(loaded, served, batching, open_length, budget_ns, notes)
            for served in loaded.classes.values()
        )
        return ModelProfile(model.name, model.version, classes, loaded.io.described, tuple(notes))

    def submit(self, batch: StagedBatch) -> None:
        """Run a staged batch to its end; ``collect`` then has it."""
        self._check_owner("submit")
        served = self._check_batch(batch)
        loaded = self._loaded(batch.model)
        started_ns = time.perf_counter_ns()
        error, outputs = "", {}
        try:
            outputs = _run_batch(loaded, batch, served.portion)
        except Exception as failure:  # noqa: BLE001 - ONNX Runtime has no public root of its error classes
            error = f"model {loaded.label}: {type(failure).__name__}: {first_line(failure)}"
        ran_ns = time.perf_counter_ns() - started_ns
        self._finished.put(BatchOutputs(batch.batch, outputs, ran_ns, error))

    def has_result(self) -> bool:
        """Tell whether a run has ended: each does inside ``submit``."""
        return not self._finished.empty()

    def collect(self) -> BatchOutputs:
        """Return the oldest submitted batch that was not collected yet, waiting for it."""
        return self._next()

    def _options(self, io: ModelIO) -> onnxruntime.SessionOptions:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        # Several workers and the broker share the cores: a thread that spins takes them from those.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Every error is raised and told by us; ONNX Runtime's own copy on stderr would be the second.
        options.log_severity_level = 4
        # A memory plan is kept for every input shape ever seen: without bound where shapes are open.
        options.enable_mem_pattern = not io.has_open_shape
        return options

    def _open_length(self, loaded: _CpuModel, served: ServedClass) -> int:
        """Return a length of the open axes that the graph runs with, for the test inputs alone."""
        if not loaded.io.has_open_shape:
            return OPEN_AXIS_LENGTHS[0]
        for length in OPEN_AXIS_LENGTHS[:-1]:
            try:
                loaded.run(probe_row(served.plans, 0, length))
            except Exception:  # noqa: BLE001, S112 - another length may do; the last one's error is told
                continue
            return length
        return OPEN_AXIS_LENGTHS[-1]


def _run_batch(loaded: _CpuModel, batch: StagedBatch, portion: int) -> dict[str, Array]:
    batching = loaded.batching
    if batching is None:
        raise ModelError("not profiled")
    rows = batch.bucket if loaded.io.batch > 1 else batch.count
    if 0 < portion < rows:
        outputs = _run_portions(loaded, batch, rows, portion)
    else:
        outputs = loaded.run({buffer.name: buffer.array[:rows] for buffer in batch.inputs})
    split: dict[str, Array] = {}
    for name, output, is_split in zip(loaded.output_names, outputs, batching.is_split, strict=True):
        if not is_split:
            split[name] = output[np.newaxis]
        elif output.shape[:1] == (rows,):
            split[name] = output[: batch.count]
        else:
            raise ModelError(f"output {name} has shape {list(output.shape)} for a batch of {rows}")
    return split


def _run_portions(loaded: _CpuModel, batch: StagedBatch, rows: int, portion: int) -> list[Array]:
    ran = [
        loaded.run({buffer.name: buffer.array[start : min(start + portion, rows)] for buffer in batch.inputs})
        for start in range(0, rows, portion)
    ]
    return [np.concatenate(parts) for parts in zip(*ran, strict=True)]


def _measure_class(
    loaded: _CpuModel,
    served: ServedClass,
    batching: Batching,
    open_length: int,
    budget_ns: int,
    notes: list[str],
) -> ClassProfile:
    fixed = loaded.io.batch > 1
    largest = min(served.size_class.max_batch_size, batching.largest)
    buckets = (loaded.io.batch,) if fixed else buckets_up_to(largest)
    row = probe_row(served.plans, 0, open_length)
    row_bytes = sum(array.nbytes for array in row.values())
    joined: dict[int, Rows] = {}

    def run(bucket: int) -> None:
        if bucket not in joined:
            joined.clear()
            joined[bucket] = join_rows([row] * bucket)
        _run_checked(loaded, served, joined[bucket])

    measured, estimated = measure_buckets(
        run, buckets, budget_ns, largest_run=max(1, MAX_PROBE_BYTES // row_bytes)
    )
    if estimated:
        listed = ", ".join(str(bucket) for bucket in estimated)
        notes.append(
            f"size class {served.size_class.name}: cost of bucket {listed} estimated from smaller ones"
        )
    served.size_class = replace(served.size_class, max_batch_size=largest)
    served.buckets = buckets
    served.portion = cheapest_portion(measured)
    if served.portion < largest:
        measured = cost_in_portions(measured, served.portion)
        notes.append(
            f"size class {served.size_class.name}: larger batches run in portions of {served.portion} rows"
        )
    return ClassProfile(served.size_class, measured)


def _run_checked(loaded: _CpuModel, served: ServedClass, rows: Rows) -> list[Array]:
    """Run test rows; a failure names the size class, whose size the graph may not take."""
    try:
        return loaded.run(rows)
    except Exception as error:
        count = len(next(iter(rows.values())))
        size_class = served.size_class
        size = f" ({size_class.height}x{size_class.width})" if size_class.height else ""
        raise ModelError(
            f"model {loaded.label}: a test run of {count} rows in size class {size_class.name}{size} failed:"
            f" {first_line(error, 160)}"
        ) from error
