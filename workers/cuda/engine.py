"""The ``cuda`` engine: one GPU, three streams, one session per model, one CUDA graph per bucket.

Theory of operation. ``load`` opens a session on the compute stream; a model that can't be captured gets one
without graphs, and a warning. ``profile`` tests the model, gives every bucket its fixed addresses, captures
them largest first while every other thread is kept off the device, compares each graph with a plain run and
measures it. ``submit`` rounds a batch up to its bucket and enqueues copy, replay and copy without waiting
(``slots``); ``collect``, in the completion thread, sleeps until the outputs have left the device.

Replay checks nothing: not the shape, not the address, not whether inputs were bound. What is bound is fixed
when a bucket is made and compared before every replay, and a batch that does not fit its plan is refused.

A batch whose shape has no graph runs plainly, synchronised, and is counted. A run that finds no memory is an
error of that batch, which the broker halves. Any other error of the device is the end of the process: nothing
computed after it is published, and the bucket is remembered as one to run plain (``suspects``).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from headrace.errors import DeviceError, ModelError
from headrace.protocol.messages import ModelProfile, ModelSpec
from headrace.workers.cuda.device import (
    PLAIN,
    CudaFaultError,
    Device,
    HostBlock,
    OutOfMemoryError,
    RunFailedError,
    Session,
    SessionOptions,
)
from headrace.workers.cuda.gate import GATE, Gate
from headrace.workers.cuda.graphs import Budget, Candidate, Capturer, alternate
from headrace.workers.cuda.served import (
    CudaModel,
    Shape,
    candidates,
    examine_batching,
    find_shapes,
    make_buckets,
    measure,
)
from headrace.workers.cuda.slots import Bucket, Slot, Slots, host_time_ns
from headrace.workers.cuda.staging_blocks import StagingBlocks
from headrace.workers.cuda.suspects import Suspects
from headrace.workers.engine import BatchOutputs, EngineMisuseError, ModelKey, StagedBatch
from headrace.workers.engine_base import EngineBase, ServedClass
from headrace.workers.measure import buckets_up_to
from headrace.workers.model_io import ModelIO, describe
from headrace.workers.onnx_model import read_model
from headrace.workers.self_test import Batching
from headrace.workers.staging import BufferPool

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """``slots``: batches in flight, 2 or more for an overlap. ``memory_limit_bytes`` (None: no bound) holds
    for graphs with their inputs and outputs, and for the arena of each session."""

    slots: int = 3
    memory_limit_bytes: int | None = None
    has_graphs: bool = True
    conv_search: str = "HEURISTIC"
    prefers_nhwc: bool = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A submitted batch: in a slot of the device, or ended already with ``outputs``."""

    batch: StagedBatch
    slot: Slot | None
    bucket: Bucket | None
    outputs: BatchOutputs | None = None


class CudaEngine(EngineBase[CudaModel, _InFlight]):
    """See the module. Invariants: the device thread makes every run; a slot is free only after its outputs
    were copied out; once ``fault`` is set no outputs are given any more."""

    name = "cuda"
    #: A graph is captured only while every other thread keeps off the device.
    loads_beside = False

    def __init__(
        self,
        device: Device,
        settings: CudaSettings | None = None,
        *,
        suspects: Suspects | None = None,
        gate: Gate = GATE,
    ) -> None:
        super().__init__()
        self.device = device.name
        self.fault = ""
        self._settings = settings or CudaSettings()
        if self._settings.slots < 1:
            raise DeviceError(f"slots = {self._settings.slots}: the cuda engine needs at least 1")
        self._device = device
        self._gate = gate
        self._suspects = suspects or Suspects(None)
        self._slots = Slots(device, self._settings.slots, gate)
        self._capturer = Capturer(
            device,
            self._slots,
            gate,
            Budget(self._settings.memory_limit_bytes),
            note_attempt=lambda key: self._suspects.add(key, "the process ended while this was captured"),
            forget_attempt=self._suspects.remove,
        )
        self._staging: StagingBlocks | None = None
        self._is_attached = False

    # -- device thread, before serving -----------------------------------------------------------------

    def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
        """Open a session on the graph of ``spec``, with CUDA graphs if the model allows them.

        Raises ModelError naming what was found and what is supported, DeviceError when the session would run
        elsewhere."""
        self._check_owner("load")
        self._attach()
        label = f"{spec.name}:{spec.version}"
        if not spec.files:
            raise ModelError(f"model {label}: has no file, so only the emulated engine can serve it")
        graph, *others = (file.path for file in spec.files)
        # The graph names its weights relative to its own folder, ModelFile.path relative to the model's.
        folder = graph.rpartition("/")[0]
        weights = {path: files[path] for path in others}
        weights |= {path.removeprefix(f"{folder}/"): files[path] for path in others if folder}
        io = describe(spec, read_model(files[graph], weights, label=f"{label} ({graph})"))
        notes: list[str] = []
        free_bytes = self._device.memory().free_bytes
        session = self._open(label, io, notes)
        session_bytes = free_bytes - self._device.memory().free_bytes
        if session.strays:
            notes.append(f"runs partly on the CPU, which is slow: {', '.join(session.strays)}")
            log.warning("model runs partly on the CPU", model=label, operators=list(session.strays))
        classes = {c.name: ServedClass(c, io.plans(c)) for c in io.classes}
        self._models[ModelKey(spec.name, spec.version)] = CudaModel(
            label, spec.files[0].sha256, io, session, classes, notes, session_bytes=max(0, session_bytes)
        )

    def profile(self, model: ModelKey) -> ModelProfile:
        """Self-test the model, capture its buckets and measure them.

        Raises ModelError when a self-test fails, DeviceError when the device does or has no memory for it."""
        self._check_owner("profile")
        loaded = self._loaded(model)
        free_bytes = self._device.memory().free_bytes
        try:
            batching = examine_batching(loaded)
            shapes: list[Shape] = []
            for served in loaded.classes.values():
                if loaded.is_loose:
                    largest = min(served.size_class.max_batch_size, batching.largest)
                    served.size_class = replace(served.size_class, max_batch_size=largest)
                    served.buckets = buckets_up_to(largest)
                else:
                    shapes += find_shapes(loaded, served, batching)
            # Before anything of ours is allocated: what is gone now, the session's arena has taken.
            loaded.session_bytes += max(0, free_bytes - self._device.memory().free_bytes)
            if loaded.is_loose:
                loaded.notes.append("shapes known only after a run: served without CUDA graphs")
            else:
                self._capture(loaded, shapes, batching)
            self._pin_staging()
            classes = measure(loaded, self._slots, shapes)
        except OutOfMemoryError as error:
            raise DeviceError(f"model {loaded.label}: the device has no memory for it: {error}") from error
        except ModelError as error:
            if isinstance(error.__cause__, OutOfMemoryError):
                # Another process may have the memory: no fault of the model, and worth another try.
                raise DeviceError(str(error)) from error
            raise
        except CudaFaultError as failure:
            self._note_fault(self._slots.last_launched, failure)
            raise
        return ModelProfile(model.name, model.version, classes, loaded.io.described, tuple(loaded.notes))

    def staging_pool(self) -> BufferPool | None:
        """Return the pinned blocks that frames should be staged into; known once a model was profiled."""
        return self._staging

    # -- device thread, serving ------------------------------------------------------------------------

    def submit(self, batch: StagedBatch) -> None:
        """Enqueue a staged batch; returns while it runs, unless it has no graph.

        Raises EngineMisuseError as every engine, and when all slots are taken; DeviceError after a fault."""
        self._check_owner("submit")
        self._check_batch(batch)
        self._check_direct(batch)
        if self.fault:
            raise DeviceError(self.fault)
        loaded = self._loaded(batch.model)
        bucket = loaded.buckets.get((batch.size_class, batch.bucket))
        if bucket is None:
            self._finished.put(_InFlight(batch, None, None, self._run_loose(loaded, batch)))
            return
        slot = self._slots.take(bucket)
        begun_ns = host_time_ns()
        error = ""
        try:
            staged = self._staged_block(batch, slot, bucket)
            is_replay = bucket.graph_id != PLAIN
            self._slots.launch(
                slot,
                staged,
                graph_id=bucket.graph_id,
                is_synchronised=not is_replay,
                direct=batch.direct,
            )
        except (OutOfMemoryError, RunFailedError) as failure:
            error = f"model {loaded.label}: {_words(failure)}"
        except CudaFaultError as failure:
            self._note_fault(bucket, failure)
        if self.fault:
            self._finished.put(_InFlight(batch, None, None, _fatal(batch, self.fault)))
        elif error:
            self._recover(slot, bucket)
            self._finished.put(_InFlight(batch, None, None, BatchOutputs(batch.batch, {}, 0, error)))
        else:
            bucket.usage.host_ns += host_time_ns() - begun_ns
            self._finished.put(_InFlight(batch, slot, bucket))

    def close(self) -> None:
        """Release the models once nothing of them is on the device; see EngineBase."""
        if not self._is_closed:
            # A graph that is destroyed while it runs takes the process with it.
            with self._gate.use(), contextlib.suppress(CudaFaultError):
                self._device.drain()
        super().close()

    # -- completion thread -----------------------------------------------------------------------------

    def collect(self) -> BatchOutputs:
        """Return the oldest submitted batch, sleeping until its outputs have left the device."""
        item = self._next()
        if self.fault:
            return _fatal(item.batch, self.fault)
        if item.outputs is not None:
            return item.outputs
        assert item.slot is not None  # noqa: S101 - what has no outputs is in a slot
        assert item.bucket is not None  # noqa: S101
        try:
            with self._device.range(f"publish {item.bucket.label}"):
                finished = self._slots.finish(item.slot, item.batch.count)
        except CudaFaultError as failure:
            self._note_fault(item.bucket, failure)
        if self.fault:  # also when another batch has met it meanwhile
            return _fatal(item.batch, self.fault)
        outputs = {
            place.name: array
            for place, array in zip(item.bucket.layout_out.places, finished.outputs, strict=True)
        }
        loaded = self._models.get(item.batch.model)
        if loaded is not None and loaded.batching is not None:
            for name, is_split in zip(outputs, loaded.batching.is_split, strict=True):
                if not is_split:
                    outputs[name] = outputs[name][np.newaxis]
        stale = tuple(row.row for row in item.batch.direct if not row.is_valid())
        return BatchOutputs(item.batch.batch, outputs, finished.longest_ns, stale_rows=stale)

    def figures(self) -> dict[str, float]:
        """Return what each bucket has done and costs, and the device's memory; from any one thread."""
        found: dict[str, float] = {}
        with self._gate.use():
            memory = self._device.memory()
        found["device_memory_free_bytes"] = memory.free_bytes
        # What torch took from the driver and what of it is in use: the rest is lost to others.
        found["torch_reserved_bytes"] = memory.torch_reserved_bytes
        found["torch_allocated_bytes"] = memory.torch_allocated_bytes
        if memory.torch_reserved_bytes:
            used_ratio = memory.torch_allocated_bytes / memory.torch_reserved_bytes
            found["torch_fragmentation_ratio"] = 1 - used_ratio
        found["graph_budget_used_bytes"] = self._capturer.budget.used_bytes
        if self._staging is not None:
            found["unpinned_batches_total"] = self._staging.unpinned_count
        for loaded in list(self._models.values()):
            found[f"loose_runs_total/{loaded.label}"] = loaded.loose_runs
            found[f"session_bytes/{loaded.label}"] = loaded.session_bytes
            for bucket in list(loaded.buckets.values()):
                found |= bucket.figures()
        return found

    # -- helpers ---------------------------------------------------------------------------------------

    def _attach(self) -> None:
        if not self._is_attached:
            self._device.attach_thread()
            self._is_attached = True

    def _open(self, label: str, io: ModelIO, notes: list[str]) -> Session:
        settings = self._settings
        options = SessionOptions(
            settings.has_graphs, settings.memory_limit_bytes, settings.conv_search, settings.prefers_nhwc
        )
        if settings.has_graphs:
            try:
                return self._device.open_session(io.model, options)
            except ModelError as error:
                # Control flow, or a node that CUDA does not have: ONNX Runtime refuses capture for the whole
                # session. Whether the model itself is at fault shows without graphs.
                session = self._device.open_session(io.model, replace(options, has_graphs=False))
                log.warning("model runs without CUDA graphs", model=label, reason=str(error))
                notes.append(f"runs without CUDA graphs: {str(error)[:200]}")
                return session
        notes.append("runs without CUDA graphs: they are switched off")
        return self._device.open_session(io.model, options)

    def _capture(self, loaded: CudaModel, shapes: list[Shape], batching: Batching) -> None:
        """Give every bucket its memory, then capture what may be captured."""
        self._slots.reserve(
            max(shape.layout_in.nbytes for shape in shapes), max(shape.layout_out.nbytes for shape in shapes)
        )
        buckets = make_buckets(self._device, loaded, shapes, batching)
        for bucket, shape in zip(buckets, shapes, strict=True):
            # Once plainly at its own addresses: what is wrong with a binding shows here and not in a graph.
            self._slots.run_once(bucket, alternate(shape.singles, bucket.rows, 0), PLAIN)
        if not loaded.session.has_graphs:
            for bucket in buckets:
                bucket.why_plain = "the session has no graphs"
            return
        wanted: list[Candidate] = []
        for each in candidates(loaded, shapes):
            reason = self._suspects.reason(each.bucket.key)
            if reason:
                each.bucket.why_plain = f"failed earlier: {reason}"
                loaded.notes.append(
                    f"{each.bucket.label} runs without a CUDA graph: it failed earlier: {reason}"
                )
                log.warning("bucket runs without a CUDA graph", bucket=each.bucket.label, reason=reason)
            else:
                wanted.append(each)
        loaded.notes += self._capturer.capture_all(wanted)
        log.info(
            "CUDA graphs captured",
            model=loaded.label,
            graphs_count=sum(bucket.graph_id != PLAIN for bucket in buckets),
            plain_count=sum(bucket.graph_id == PLAIN for bucket in buckets),
            graphs_bytes=sum(bucket.graph_bytes for bucket in buckets),
        )

    def _pin_staging(self) -> None:
        """Replace the staging blocks by ones large enough for every model profiled so far."""
        layouts = {
            (key, name, rows): bucket.layout_in
            for key, loaded in self._models.items()
            for (name, rows), bucket in loaded.buckets.items()
        }
        if not layouts:
            self._staging = None
            return
        nbytes = max(layout.nbytes for layout in layouts.values())
        # One more than slots: the next batch is staged while all of them are on the device.
        blocks = [self._device.pinned_block(nbytes) for _ in range(self._settings.slots + 1)]
        self._staging = StagingBlocks(blocks, layouts)

    def _staged_block(self, batch: StagedBatch, slot: Slot, bucket: Bucket) -> HostBlock:
        """Return pinned memory that holds the batch: where it was staged, or else the slot's own."""
        block = self._staging.block_of(batch) if self._staging is not None else None
        if block is not None:
            return block
        data = slot.pinned_in.for_writing()
        arrays = {buffer.name: buffer.array for buffer in batch.inputs}
        for place in bucket.layout_in.places:
            place.view(data)[...] = arrays[place.name]
        return slot.pinned_in

    def _check_direct(self, batch: StagedBatch) -> None:
        """Raise EngineMisuseError unless direct rows are ascending rows of the one input, in their memory."""
        if not batch.direct:
            return
        array = batch.inputs[0].array
        row_bytes = array.nbytes // batch.bucket
        numbers = [each.row for each in batch.direct]
        is_fitting = all(
            each.nbytes == row_bytes and 0 <= each.offset <= each.source.nbytes - row_bytes
            for each in batch.direct
        )
        has_bucket = (batch.size_class, batch.bucket) in self._loaded(batch.model).buckets
        is_ascending = numbers == sorted(set(numbers)) and numbers[0] >= 0 and numbers[-1] < batch.count
        if not (has_bucket and len(batch.inputs) == 1 and is_fitting and is_ascending):
            raise EngineMisuseError(f"batch {batch.batch}: rows {numbers} can't be read by the device itself")

    def _run_loose(self, loaded: CudaModel, batch: StagedBatch) -> BatchOutputs:
        """Run host arrays plainly. The streams are drained first: what ONNX Runtime allocates for this run
        may be where an earlier one still works."""
        begun_ns = host_time_ns()
        rows = batch.bucket if loaded.io.batch > 1 else batch.count
        loaded.loose_runs += 1
        try:
            self._device.drain()
            outputs = loaded.run({buffer.name: buffer.array[:rows] for buffer in batch.inputs})
            split = _split(loaded, outputs, rows, batch.count)
        except (OutOfMemoryError, RunFailedError, ModelError) as failure:
            return BatchOutputs(batch.batch, {}, 0, f"model {loaded.label}: {_words(failure)}")
        except CudaFaultError as failure:
            self._note_fault(None, failure)
            return _fatal(batch, self.fault)
        return BatchOutputs(batch.batch, split, host_time_ns() - begun_ns)

    def _recover(self, slot: Slot, bucket: Bucket) -> None:
        """Free the slot of a batch that failed half way: nothing of it may be under way any more."""
        try:
            self._device.drain()
        except CudaFaultError as failure:
            self._note_fault(bucket, failure)
        self._slots.free(slot)

    def _note_fault(self, bucket: Bucket | None, failure: CudaFaultError) -> None:
        where = "" if bucket is None else f" with {bucket.label}"
        self.fault = self.fault or f"device {self.device} failed{where}: {failure}"
        log.error("device failed", device=self.device, reason=self.fault)
        if bucket is not None and bucket.graph_id != PLAIN:
            self._suspects.add(bucket.key, str(failure))


def _split(
    loaded: CudaModel, outputs: list[NDArray[np.generic]], rows: int, count: int
) -> dict[str, NDArray[np.generic]]:
    assert loaded.batching is not None  # noqa: S101 - buckets exist only after the self-test
    split: dict[str, NDArray[np.generic]] = {}
    names, is_split_by_name = loaded.session.output_names, loaded.batching.is_split
    for name, output, is_split in zip(names, outputs, is_split_by_name, strict=True):
        if not is_split:
            split[name] = output[np.newaxis]
        elif output.shape[:1] == (rows,):
            split[name] = output[:count]
        else:
            raise ModelError(f"output {name} has shape {list(output.shape)} for a batch of {rows}")
    return split


def _words(failure: Exception) -> str:
    kind = "out of device memory: " if isinstance(failure, OutOfMemoryError) else ""
    return f"{kind}{failure}"


def _fatal(batch: StagedBatch, reason: str) -> BatchOutputs:
    return BatchOutputs(batch.batch, {}, 0, reason, is_fatal=True)
