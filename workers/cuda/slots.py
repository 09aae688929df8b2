"""The way of one batch through the device: copy in, compute, copy out, on three streams and in one order.

Theory of operation. A slot is the memory of one batch in flight. ``launch`` enqueues, without waiting::

    copy_in   stage_in <- staged                        mark copied_in
    compute   wait copied_in; bound_in <- stage_in; run; stage_out <- bound_out; mark computed
    copy_out  wait computed; pinned_out <- stage_out    mark copied_out

and ``finish``, in the completion thread, sleeps until copied_out. A captured graph reads and writes the fixed
addresses of its bucket; the two copies inside the device keep those apart from the transfers, so that the
next batch comes in and the last one goes out while a graph runs.

What is written again, and why that is safe: ``bound_in`` and ``bound_out`` of a bucket are used by the
compute stream alone, in its order. Everything of a slot is used again only after its copied_out was waited
for, behind which nothing of the earlier batch is left; two slots or more make the overlap. The staged block
is the worker's again after ``finish`` for the same reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import LocalError
from headrace.workers.cuda.device import (
    PLAIN,
    Binding,
    Block,
    BoundTensor,
    Device,
    Event,
    HostBlock,
    Lane,
    Session,
)
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.layout import Layout
from headrace.workers.engine import DirectRow, EngineMisuseError


class BrokenOrderError(LocalError):
    """A bucket's binding is not what its graph was captured with: replay would look at neither."""


@dataclass(slots=True)
class Usage:
    """What a bucket has done; written by the completion thread, ``host_ns`` by the device thread."""

    replays: int = 0
    plain_runs: int = 0
    rows: int = 0
    padding_rows: int = 0
    copy_in_ns: int = 0
    run_ns: int = 0
    copy_out_ns: int = 0
    host_ns: int = 0


@dataclass(slots=True, eq=False)
class Bucket:
    """One batch shape of one model at fixed addresses. Invariant: ``bound_in``, ``bound_out`` and ``binding``
    never change; ``graph_id`` is PLAIN until it is captured. ``is_split`` tells of each output whether it has
    one row per frame; ``key`` names the bucket in another process too."""

    label: str
    rows: int
    session: Session
    layout_in: Layout
    layout_out: Layout
    bound_in: Block
    bound_out: Block
    binding: Binding
    bound: tuple[BoundTensor, ...]
    is_split: tuple[bool, ...]
    key: str = ""
    graph_id: int = PLAIN
    captured: tuple[BoundTensor, ...] = ()
    graph_bytes: int = 0
    capture_ns: int = 0
    why_plain: str = ""
    usage: Usage = field(default_factory=Usage)

    @property
    def io_bytes(self) -> int:
        return self.layout_in.nbytes + self.layout_out.nbytes

    def figures(self) -> dict[str, float]:
        """Return what telemetry shows of this bucket; sums, so that a rate and a mean can be made of them."""
        usage = self.usage
        return {
            f"{name}/{self.label}": value
            for name, value in (
                ("graph_replays_total", usage.replays),
                ("plain_runs_total", usage.plain_runs),
                ("bucket_rows_total", usage.rows),
                ("bucket_padding_rows_total", usage.padding_rows),
                ("copy_in_seconds_total", usage.copy_in_ns / 1e9),
                ("run_seconds_total", usage.run_ns / 1e9),
                ("copy_out_seconds_total", usage.copy_out_ns / 1e9),
                ("launch_seconds_total", usage.host_ns / 1e9),
                ("graph_bytes", self.graph_bytes),
                ("capture_seconds", self.capture_ns / 1e9),
            )
        }


def make_bucket(
    device: Device,
    session: Session,
    label: str,
    rows: int,
    layouts: tuple[Layout, Layout],
    is_split: tuple[bool, ...],
) -> Bucket:
    """Allocate a bucket's memory (``layouts``: inputs, outputs) and bind it, for the life of the session."""
    layout_in, layout_out = layouts
    bound_in, bound_out = device.device_block(layout_in.nbytes), device.device_block(layout_out.nbytes)
    inputs, outputs = layout_in.bound(bound_in.address), layout_out.bound(bound_out.address)
    binding = session.bind(inputs, outputs)
    bound = (*inputs, *outputs)
    return Bucket(label, rows, session, layout_in, layout_out, bound_in, bound_out, binding, bound, is_split)


@dataclass(slots=True, eq=False)
class Slot:
    """The memory and marks of one batch in flight. ``bucket`` is None while the slot is free."""

    index: int
    stage_in: Block
    stage_out: Block
    pinned_in: HostBlock
    pinned_out: HostBlock
    copy_in_begun: Event
    copied_in: Event
    run_begun: Event
    computed: Event
    copy_out_begun: Event
    copied_out: Event
    bucket: Bucket | None = None
    is_replay: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that left the device: ``outputs`` in the order of the layout, and the time in each lane."""

    outputs: list[NDArray[np.generic]]
    copy_in_ns: int
    run_ns: int
    copy_out_ns: int

    @property
    def longest_ns(self) -> int:
        """Return the time that a batch costs when its neighbours overlap it: that of its slowest lane."""
        return max(self.copy_in_ns, self.run_ns, self.copy_out_ns)


class Slots:
    """See the module. ``take`` and ``launch`` belong to the device thread, ``finish`` to any one thread."""

    def __init__(self, device: Device, count: int, gate: Gate) -> None:
        self._device = device
        self._gate = gate
        self._count = count
        self._lock = threading.Lock()
        self._streams = {lane: device.stream(lane) for lane in Lane}
        self._slots: list[Slot] = []
        self._in_bytes = self._out_bytes = 0
        self.last_launched: Bucket | None = None

    def reserve(self, in_bytes: int, out_bytes: int) -> None:
        """Make every slot large enough, while none is taken. Slots are bound to no graph: they may move.

        Raises OutOfMemoryError."""
        if in_bytes <= self._in_bytes and out_bytes <= self._out_bytes:
            return
        if any(slot.bucket is not None for slot in self._slots):
            raise EngineMisuseError("slots can't grow while a batch is on the device")
        self._in_bytes = max(in_bytes, self._in_bytes)
        self._out_bytes = max(out_bytes, self._out_bytes)
        self._slots = []  # before the new ones are asked for: both at once may not fit
        self._slots = [self._make(index) for index in range(self._count)]

    def take(self, bucket: Bucket) -> Slot:
        """Return a free slot, now taken for ``bucket``. Raises EngineMisuseError when there is none."""
        with self._lock:
            for slot in self._slots:
                if slot.bucket is None:
                    slot.bucket = bucket
                    return slot
        raise EngineMisuseError(f"all {self._count} slots are on the device: collect a batch first")

    def launch(
        self,
        slot: Slot,
        staged: HostBlock,
        *,
        graph_id: int,
        is_synchronised: bool,
        direct: Sequence[DirectRow] = (),
    ) -> None:
        """Enqueue a batch whose inputs stand in ``staged``, but for the ``direct`` rows of its one input.
        Only a replay may go unsynchronised.

        Raises BrokenOrderError when replay would use other memory than the bucket's; else as Session.run."""
        device, bucket = self._device, slot.bucket
        assert bucket is not None  # noqa: S101 - taken by this thread
        self.last_launched = bucket
        if bucket.captured and graph_id != PLAIN:
            _check_binding(bucket, graph_id)
        slot.is_replay = graph_id != PLAIN
        copy_in, compute, copy_out = (self._streams[lane] for lane in Lane)
        in_bytes, out_bytes = bucket.layout_in.nbytes, bucket.layout_out.nbytes
        with device.range(f"copy-in {bucket.label}"):
            device.record(slot.copy_in_begun, copy_in)
            if direct:
                self._copy_rows(slot, staged, direct)
            else:
                device.copy(slot.stage_in, staged, in_bytes, copy_in)
            device.record(slot.copied_in, copy_in)
        with device.range(f"{'replay' if slot.is_replay else 'run'} {bucket.label}"):
            device.wait(compute, slot.copied_in)
            device.record(slot.run_begun, compute)
            device.copy(bucket.bound_in, slot.stage_in, in_bytes, compute)
            bucket.session.run(bucket.binding, graph_id, is_synchronised=is_synchronised)
            device.copy(slot.stage_out, bucket.bound_out, out_bytes, compute)
            device.record(slot.computed, compute)
        with device.range(f"copy-out {bucket.label}"):
            device.wait(copy_out, slot.computed)
            device.record(slot.copy_out_begun, copy_out)
            device.copy(slot.pinned_out, slot.stage_out, out_bytes, copy_out)
            device.record(slot.copied_out, copy_out)

    def _copy_rows(self, slot: Slot, staged: HostBlock, direct: Sequence[DirectRow]) -> None:
        """Enqueue the copy in of a batch some rows of which stand elsewhere."""
        device, bucket, stream = self._device, slot.bucket, self._streams[Lane.COPY_IN]
        assert bucket is not None  # noqa: S101 - taken by this thread
        row_bytes = bucket.layout_in.places[0].nbytes // bucket.rows
        next_row = 0
        for each in (*direct, None):
            end = bucket.rows if each is None else each.row
            if end > next_row:
                offset = next_row * row_bytes
                device.copy(slot.stage_in, staged, (end - next_row) * row_bytes, stream, offset, offset)
            if each is not None:
                device.copy(slot.stage_in, each.source, row_bytes, stream, each.row * row_bytes, each.offset)
                next_row = each.row + 1

    def finish(self, slot: Slot, count: int) -> Finished:
        """Sleep until the batch has left the device; copy its first ``count`` rows and free the slot.

        Raises CudaFaultError; the slot then stays taken."""
        with self._gate.use():
            return self._finish(slot, count)

    def _finish(self, slot: Slot, count: int) -> Finished:
        device, bucket = self._device, slot.bucket
        assert bucket is not None  # noqa: S101 - launched, so taken
        device.synchronize(slot.copied_out)
        copy_in_ns = device.elapsed_ns(slot.copy_in_begun, slot.copied_in)
        run_ns = device.elapsed_ns(slot.run_begun, slot.computed)
        copy_out_ns = device.elapsed_ns(slot.copy_out_begun, slot.copied_out)
        data = slot.pinned_out.for_reading()
        views = [place.view(data) for place in bucket.layout_out.places]
        outputs = [
            (view[:count] if is_split else view).copy()
            for view, is_split in zip(views, bucket.is_split, strict=True)
        ]
        usage = bucket.usage
        if slot.is_replay:
            usage.replays += 1
        else:
            usage.plain_runs += 1
        usage.rows += count
        usage.padding_rows += bucket.rows - count
        usage.copy_in_ns += copy_in_ns
        usage.run_ns += run_ns
        usage.copy_out_ns += copy_out_ns
        self.free(slot)
        return Finished(outputs, copy_in_ns, run_ns, copy_out_ns)

    def free(self, slot: Slot) -> None:
        """Give a slot back whose batch is off the device."""
        with self._lock:
            slot.bucket = None

    def run_once(self, bucket: Bucket, rows: dict[str, NDArray[np.generic]], graph_id: int) -> Finished:
        """Run test rows ([rows, ...] per input) alone on the device, synchronised; for the device thread,
        with no batch on the device. Passes no gate: captures come this way."""
        slot = self.take(bucket)
        try:
            self._device.drain()
            data = slot.pinned_in.for_writing()
            for place in bucket.layout_in.places:
                place.view(data)[...] = rows[place.name]
            self.launch(slot, slot.pinned_in, graph_id=graph_id, is_synchronised=True)
        except BaseException:
            self.free(slot)
            raise
        return self._finish(slot, bucket.rows)

    def _make(self, index: int) -> Slot:
        device = self._device

        def mark(name: str) -> Event:
            return device.event(f"{name} of slot {index}")

        return Slot(
            index,
            device.device_block(self._in_bytes),
            device.device_block(self._out_bytes),
            device.pinned_block(self._in_bytes),
            device.pinned_block(self._out_bytes),
            mark("copy_in_begun"),
            mark("copied_in"),
            mark("run_begun"),
            mark("computed"),
            mark("copy_out_begun"),
            mark("copied_out"),
        )


def host_time_ns() -> int:
    """Return the clock of ``Usage.host_ns``: what a launch costs the device thread."""
    return time.perf_counter_ns()


def _check_binding(bucket: Bucket, graph_id: int) -> None:
    if graph_id != bucket.graph_id or bucket.bound != bucket.captured:
        raise BrokenOrderError(
            f"{bucket.label}: graph {graph_id} was captured as {bucket.graph_id} with {bucket.captured}, the"
            f" binding holds {bucket.bound}"
        )
