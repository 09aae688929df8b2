"""Makes the buckets of a loaded model: which shapes it runs in, what they need, what they cost.

Not here: capturing (``graphs``), serving (``engine``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.protocol.messages import ClassProfile
from headrace.workers.cuda.device import CudaFaultError, Device, OutOfMemoryError, RunFailedError, Session
from headrace.workers.cuda.graphs import Candidate, alternate
from headrace.workers.cuda.layout import Layout, Tensor, arrange
from headrace.workers.cuda.slots import Bucket, Slots, make_bucket
from headrace.workers.engine_base import ServedClass
from headrace.workers.measure import buckets_up_to, measure_buckets
from headrace.workers.model_io import ModelIO
from headrace.workers.onnx_model import supported_versions
from headrace.workers.self_test import (
    OPEN_AXIS_LENGTHS,
    Batching,
    Rows,
    Subject,
    examine,
    join_rows,
    probe_row,
)

#: Operators whose output's shape depends on the values: what is bound at a fixed address can't hold it.
DATA_DEPENDENT = frozenset({"NonZero", "NonMaxSuppression", "Unique", "Compress", "Loop", "If", "Scan"})

#: Time that the measurements of one model may take, all size classes together.
PROFILE_BUDGET_MS = 3000


@dataclass(slots=True)
class CudaModel:
    """One loaded model. ``buckets`` holds those with fixed addresses by (size class, rows); a model with open
    shapes has none and runs host arrays. ``open_length`` is one that such an axis runs with. ``batching`` is
    None until ``profile`` has tested it. ``session_bytes``: what the device lost while the session was opened
    and every bucket ran plainly: weights and ONNX Runtime's arena, which tells nothing of itself."""

    label: str
    file_hash: str
    io: ModelIO
    session: Session
    classes: dict[str, ServedClass]
    notes: list[str] = field(default_factory=list)
    batching: Batching | None = None
    buckets: dict[tuple[str, int], Bucket] = field(default_factory=dict)
    open_length: int = OPEN_AXIS_LENGTHS[0]
    loose_runs: int = 0
    session_bytes: int = 0

    @property
    def is_loose(self) -> bool:
        """True when outputs have no shape that is known before a run."""
        return self.io.has_open_shape or any(
            node.op_type in DATA_DEPENDENT for node in self.io.model.proto.graph.node
        )

    def feeds(self, rows: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return rows ([rows, ...] per input) as the session is fed."""
        return {i.feed_name: rows[i.name] if i.has_batch else rows[i.name][0, ...] for i in self.io.inputs}

    def run(self, rows: Rows) -> list[NDArray[np.generic]]:
        """Run host rows plainly and return the graph's outputs as they come."""
        return self.session.run_arrays(self.feeds(rows))

    def run_checked(self, served: ServedClass, rows: Rows) -> list[NDArray[np.generic]]:
        """Run test rows; a failure names the size class, whose size the graph may not take."""
        try:
            return self.run(rows)
        except RunFailedError as error:
            count = len(next(iter(rows.values())))
            size_class = served.size_class
            size = f" ({size_class.height}x{size_class.width})" if size_class.height else ""
            raise ModelError(
                f"model {self.label}: a test run of {count} rows in size class {size_class.name}{size}"
                f" failed: {error}"
            ) from error


def examine_batching(model: CudaModel) -> Batching:
    """Run the self-tests; raises ModelError when one fails or there is no memory for one row."""
    smallest = min(model.classes.values(), key=lambda c: c.size_class.height * c.size_class.width)
    wanted = 1 if model.io.has_open_shape else max(c.max_batch_size for c in model.io.classes)
    if model.io.has_open_shape:
        model.open_length = _open_length(model, smallest)
    subject = Subject(
        model.label,
        model.io.batch,
        tuple((output.name, output.shape) for output in model.io.model.outputs),
        smallest.plans,
        model.open_length,
    )

    def run(rows: Rows) -> list[NDArray[np.generic]]:
        try:
            return model.run_checked(smallest, rows)
        except OutOfMemoryError as error:
            raise ModelError(
                f"model {model.label}: no memory for a batch of {len(next(iter(rows.values())))}: {error}"
            ) from error

    batching = examine(subject, run, wanted)
    model.batching = batching
    model.notes += batching.notes
    return batching


@dataclass(frozen=True, slots=True)
class Shape:
    """A bucket to be made: the layouts of its inputs and outputs, two test rows and what a plain run answered
    to the two batches made of them by ``alternate``."""

    size_class: str
    rows: int
    layout_in: Layout
    layout_out: Layout
    singles: tuple[Rows, Rows]
    expected: tuple[list[NDArray[np.generic]], list[NDArray[np.generic]]]


def find_shapes(model: CudaModel, served: ServedClass, batching: Batching) -> list[Shape]:
    """Return the buckets of a size class, largest first; sets its largest batch.

    A bucket that the device has no memory for is left out, with a note, and with it every larger one.
    Raises ModelError when none is left."""
    name = served.size_class.name
    if model.io.batch > 1:
        wanted: tuple[int, ...] = (model.io.batch,)
    else:
        wanted = buckets_up_to(min(served.size_class.max_batch_size, batching.largest))
    shapes: list[Shape] = []
    for rows in reversed(wanted):
        try:
            shapes.append(_find_shape(model, served, rows))
        except OutOfMemoryError as error:
            if rows == wanted[0]:
                raise ModelError(
                    f"model {model.label}: size class {name}: the device has no memory for a batch of {rows}:"
                    f" {error}"
                ) from error
            model.notes.append(
                f"size class {name}: no memory for batches of {rows}: the largest is"
                f" {max(r for r in wanted if r < rows)}"
            )
    largest = shapes[0].rows
    served.size_class = replace(served.size_class, max_batch_size=largest)
    served.buckets = tuple(rows for rows in wanted if rows <= largest)
    return shapes


def make_buckets(device: Device, model: CudaModel, shapes: list[Shape], batching: Batching) -> list[Bucket]:
    """Allocate and bind the memory of every bucket. Raises OutOfMemoryError."""
    runtime = f"onnxruntime {supported_versions().runtime}"
    for shape in shapes:
        label = f"{model.label} {shape.size_class} x{shape.rows}"
        layouts = shape.layout_in, shape.layout_out
        bucket = make_bucket(device, model.session, label, shape.rows, layouts, batching.is_split)
        bucket.key = f"{model.file_hash[:16]} {label} {runtime}"
        model.buckets[shape.size_class, shape.rows] = bucket
    return [model.buckets[shape.size_class, shape.rows] for shape in shapes]


def candidates(model: CudaModel, shapes: list[Shape]) -> list[Candidate]:
    """Return the buckets as the capturer takes them."""
    return [
        Candidate(
            model.buckets[shape.size_class, shape.rows],
            model.classes[shape.size_class].size_class.traffic_share,
            shape.singles,
            shape.expected,
        )
        for shape in shapes
    ]


def measure(model: CudaModel, slots: Slots, shapes: list[Shape]) -> tuple[ClassProfile, ...]:
    """Measure what a batch of each bucket costs on the device, within a budget of time."""
    singles = {(shape.size_class, shape.rows): shape.singles for shape in shapes}
    profiles = []
    for name, served in model.classes.items():
        costs_ms: list[tuple[int, float]] = []
        budget_ns = PROFILE_BUDGET_MS * 1_000_000 // len(model.classes)
        run: Callable[[int], None]
        if model.buckets:
            times_ns: dict[int, list[int]] = {}

            def run(rows: int, name: str = name, times_ns: dict[int, list[int]] = times_ns) -> None:
                bucket = model.buckets[name, rows]
                done = slots.run_once(bucket, alternate(singles[name, rows], rows, 0), bucket.graph_id)
                times_ns.setdefault(rows, []).append(done.longest_ns)

            measured, _ = measure_buckets(run, served.buckets, budget_ns)
            # On the device, where there are such times: the host's waiting and copying overlaps.
            costs_ms = [
                (rows, median(times_ns[rows]) / 1e6 if rows in times_ns else cost) for rows, cost in measured
            ]
        else:
            row = probe_row(served.plans, 0, model.open_length)

            def run(rows: int, row: Rows = row) -> None:
                model.run(join_rows([row] * rows))

            measured, _ = measure_buckets(run, served.buckets, budget_ns)
            costs_ms = list(measured)
        profiles.append(ClassProfile(served.size_class, tuple(costs_ms)))
    return tuple(profiles)


def _find_shape(model: CudaModel, served: ServedClass, rows: int) -> Shape:
    singles = probe_row(served.plans, 0), probe_row(served.plans, 1)
    for_first, for_second = (model.run_checked(served, alternate(singles, rows, first)) for first in (0, 1))
    tensors = [
        Tensor(i.name, p.dtype, (rows, *p.shape), i.feed_name, (rows, *p.shape) if i.has_batch else p.shape)
        for i, p in zip(model.io.inputs, served.plans, strict=True)
    ]
    outputs = []
    for name, mine, theirs in zip(model.session.output_names, for_first, for_second, strict=True):
        if mine.shape != theirs.shape:
            raise ModelError(
                f"model {model.label}: output {name} has shape {list(mine.shape)} for one input and"
                f" {list(theirs.shape)} for another: it can't be bound at a fixed address"
            )
        outputs.append(Tensor(name, mine.dtype.name, mine.shape))
    return Shape(
        served.size_class.name, rows, arrange(tensors), arrange(outputs), singles, (for_first, for_second)
    )


def _open_length(model: CudaModel, served: ServedClass) -> int:
    for length in OPEN_AXIS_LENGTHS[:-1]:
        try:
            model.run(probe_row(served.plans, 0, length))
        except CudaFaultError:
            raise
        except (RunFailedError, OutOfMemoryError):
            continue
        return length
    return OPEN_AXIS_LENGTHS[-1]
