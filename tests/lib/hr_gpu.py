"""A device that records who touches what, and fails where only luck would keep the order.

It computes with host memory (HostDevice), at once, so results are real; what it adds is the question whether
the order was asked for. Theory: each stream and the host have a clock; an operation takes the clock of its
stream and of the host at the time it is enqueued, an event carries its stream's clock to whoever waits for it
(a stream, or the host). Two operations on overlapping bytes, one of them writing, must be ordered by those
clocks; if they are not, a real device may run them in either order or together: OrderError.

Also refused, as a GPU would not: a session used by two threads; a replay whose binding is not the captured
one (CUDA would read the old addresses); a smaller graph captured after which a larger one follows; any call
of another thread while a graph is captured; an event waited for that was never recorded; a plain run
that is not synchronised; time asked of events that were not waited for; allocation once ``is_sealed`` is set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DeviceError, ModelError
from headrace.workers.cuda.device import (
    PLAIN,
    Binding,
    Block,
    BoundTensor,
    Bytes,
    CudaFaultError,
    Event,
    HostBlock,
    Lane,
    MemoryInfo,
    OutOfMemoryError,
    SessionOptions,
    Stream,
)
from headrace.workers.cuda.host_device import HostDevice, HostMemory, HostStream
from headrace.workers.cuda.ort_session import OrtBinding, OrtSession
from headrace.workers.onnx_model import OnnxModel

HOST = "host"
Clock = dict[str, int]


class OrderError(AssertionError):
    """An order that nothing enforces, or a use that a GPU would answer with wrong numbers."""


@dataclass(frozen=True)
class Access:
    who: str  # a lane, or HOST
    tick: int
    begin: int
    end: int
    is_write: bool
    what: str


@dataclass
class RecordedEvent:
    name: str
    clock: Clock | None = None
    at_ns: int = 0


@dataclass(eq=False)
class RecordedBlock:
    """Pinned memory that tells the device of each use by the host."""

    memory: HostMemory
    device: RecordingDevice

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def for_writing(self) -> Bytes:
        self.device.touch_by_host(self, is_write=True)
        return self.memory.data

    def for_reading(self) -> Bytes:
        self.device.touch_by_host(self, is_write=False)
        return self.memory.data


@dataclass
class Faults:
    """What the device is to do wrong. ``on_capture`` runs inside each capture; ``fail_capture`` and ``stale``
    hold rows of buckets whose capture fails, or whose replay answers the first input for ever;
    ``session_bytes`` and ``run_bytes`` are taken by each session and each run with host arrays;
    ``memory_rows`` is the largest batch that finds memory; ``dies_at_run`` counts runs until the device is
    lost, ``dies_when_serving`` loses it at the first run that is not waited for."""

    on_capture: Callable[[], None] | None = None
    fail_capture: set[int] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    memory_rows: int | None = None
    refuses_graphs: str = ""
    dies_at_run: int | None = None
    dies_when_serving: bool = False
    dies_in_capture: set[int] = field(default_factory=set)
    graph_bytes: int = 1000
    session_bytes: int = 0
    run_bytes: int = 0
    refuses_memory: str = ""
    time_ns: Callable[[str], int] = lambda name: 1000


class RecordingDevice:
    """See the module. ``log`` lists what was enqueued, as "lane: what"."""

    name = "recorded"

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.log: list[str] = []
        self.ranges: list[str] = []
        self.captures: list[int] = []
        self.sessions: list[RecordingSession] = []
        self.registered: dict[int, int] = {}
        self.unregistered: set[int] = set()
        self.is_sealed = False
        self.is_lost = False
        self._inner = HostDevice()
        self._clocks: dict[str, Clock] = {name: {} for name in (HOST, *Lane)}
        self._accesses: list[Access] = []
        self._lock = threading.RLock()
        self._capturing: int | None = None
        self._used_bytes = 0
        self._allocated_bytes = 0
        self._runs = 0

    # -- Device ----------------------------------------------------------------------------------------

    def attach_thread(self) -> None:
        self._check_call("attach_thread")

    def stream(self, lane: Lane) -> Stream:
        return self._inner.stream(lane)

    def event(self, name: str) -> Event:
        return RecordedEvent(name)

    def device_block(self, nbytes: int) -> Block:
        self._allocate(nbytes)
        return self._inner.device_block(nbytes)

    def pinned_block(self, nbytes: int) -> HostBlock:
        self._allocate(nbytes)
        return RecordedBlock(cast("HostMemory", self._inner.pinned_block(nbytes)), self)

    def copy(
        self,
        target: Block,
        source: Block,
        nbytes: int,
        stream: Stream,
        target_offset: int = 0,
        source_offset: int = 0,
    ) -> None:
        lane = _lane(stream)
        with self._lock:
            self._check_call(f"copy on {lane}")
            tick = self._enqueue(lane)
            if source.address in self.unregistered:
                raise OrderError("copy from memory that is no longer registered")
            self._touch(lane, tick, source.address + source_offset, nbytes, False, f"copy on {lane}")
            self._touch(lane, tick, target.address + target_offset, nbytes, True, f"copy on {lane}")
            self.log.append(f"{lane}: copy {nbytes}")
            self._inner.copy(_memory(target), _memory(source), nbytes, stream, target_offset, source_offset)

    def record(self, event: Event, stream: Stream) -> None:
        with self._lock:
            self._check_call(f"record {event.name}")
            self._enqueue(_lane(stream))
            _recorded(event).clock = dict(self._clocks[_lane(stream)])
            self.log.append(f"{_lane(stream)}: record {event.name}")

    def wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self._check_call(f"wait for {event.name}")
            clock = _recorded(event).clock
            if clock is None:
                raise OrderError(f"{_lane(stream)} waits for {event.name}, which was never recorded")
            _join(self._clocks[_lane(stream)], clock)
            self.log.append(f"{_lane(stream)}: wait {event.name}")

    def synchronize(self, event: Event) -> None:
        with self._lock:
            self._check_call(f"synchronize {event.name}")
            clock = _recorded(event).clock
            if clock is None:
                raise OrderError(f"the host waits for {event.name}, which was never recorded")
            _join(self._clocks[HOST], clock)

    def drain(self) -> None:
        with self._lock:
            self._check_call("drain")
            for lane in Lane:
                _join(self._clocks[HOST], self._clocks[lane])

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        with self._lock:
            self._check_call("elapsed")
            host = self._clocks[HOST]
            for event in (begin, end):
                clock = _recorded(event).clock
                if clock is None or any(host.get(who, 0) < tick for who, tick in clock.items()):
                    raise OrderError(f"time of {event.name} asked before it was waited for")
            return self.faults.time_ns(end.name)

    def memory(self) -> MemoryInfo:
        self._check_call("memory")
        # torch takes twice what it is asked for: half of that is fragmentation.
        allocated = self._allocated_bytes
        return MemoryInfo(2**40 - self._used_bytes, 2**40, 2 * allocated, allocated)

    def register_host(self, memory: memoryview) -> HostBlock:
        self._check_call("register_host")
        if self.faults.refuses_memory:
            raise DeviceError(self.faults.refuses_memory)
        block = self._inner.register_host(memory)
        self.registered[block.address] = block.nbytes
        self.unregistered.discard(block.address)
        return block

    def unregister_host(self, block: HostBlock) -> None:
        self._check_call("unregister_host")
        with self._lock:
            host = self._clocks[HOST]
            for access in self._overlapping(block.address, block.nbytes):
                if host.get(access.who, 0) < access.tick:
                    raise OrderError(f"memory unregistered while {access.what} may still use it")
        self._inner.unregister_host(block)
        del self.registered[block.address]
        self.unregistered.add(block.address)

    def open_session(self, model: OnnxModel, options: SessionOptions) -> RecordingSession:
        self._check_call("open_session")
        if options.has_graphs and self.faults.refuses_graphs:
            raise ModelError(f"model {model.label}: {self.faults.refuses_graphs}")
        self.use_memory(self.faults.session_bytes)
        session = RecordingSession(self, self._inner.open_session(model, options))
        self.sessions.append(session)
        return session

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.ranges.append(name)
        yield

    # -- the record ------------------------------------------------------------------------------------

    def touch_by_host(self, block: Block, *, is_write: bool) -> None:
        with self._lock:
            if self.is_lost:
                return  # the host's memory is there all the same
            self._check_call("memory of the host")
            tick = self._enqueue(HOST)
            self._touch(HOST, tick, block.address, block.nbytes, is_write, f"host {_verb(is_write)}")

    def run_bound(
        self, bound: Sequence[tuple[BoundTensor, bool]], what: str, *, is_synchronised: bool
    ) -> None:
        """Note that a run on the compute stream reads and writes bound tensors."""
        with self._lock:
            tick = self._enqueue(Lane.COMPUTE)
            for tensor, is_write in bound:
                nbytes = int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
                self._touch(Lane.COMPUTE, tick, tensor.address, nbytes, is_write, what)
            self.log.append(f"{Lane.COMPUTE}: {what}")
            if is_synchronised:
                _join(self._clocks[HOST], self._clocks[Lane.COMPUTE])

    def count_run(self) -> None:
        self._runs += 1
        if self.faults.dies_at_run is not None and self._runs >= self.faults.dies_at_run:
            self.is_lost = True
        if self.is_lost:
            raise CudaFaultError("CUDA failure 700: an illegal memory access was encountered")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._lock:
            self._capturing = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._capturing = None

    def use_memory(self, nbytes: int) -> None:
        self._used_bytes += nbytes

    def _allocate(self, nbytes: int) -> None:
        self._check_call("allocate")
        if self.is_sealed:
            raise OrderError(f"{nbytes} bytes allocated while frames are served")
        self._used_bytes += nbytes
        self._allocated_bytes += nbytes

    def _check_call(self, what: str) -> None:
        if self._capturing not in (None, threading.get_ident()):
            raise OrderError(f"{what} by another thread while a graph is captured")
        if self.is_lost:
            raise CudaFaultError("CUDA error: an illegal memory access was encountered")

    def _enqueue(self, who: str) -> int:
        clock = self._clocks[who]
        _join(clock, self._clocks[HOST])
        clock[who] = clock.get(who, 0) + 1
        return clock[who]

    def _touch(self, who: str, tick: int, address: int, nbytes: int, is_write: bool, what: str) -> None:
        clock = self._clocks[who]
        kept: list[Access] = []
        for access in self._accesses:
            is_overlapping = access.begin < address + nbytes and address < access.end
            if not is_overlapping:
                kept.append(access)
                continue
            is_ordered = clock.get(access.who, 0) >= access.tick
            if (is_write or access.is_write) and not is_ordered:
                raise OrderError(
                    f"{what} {_verb(is_write)} bytes that {access.what} {_verb(access.is_write)}: nothing"
                    f" orders the two"
                )
            # What was ordered before a write is covered by it.
            if not (is_write and is_ordered and address <= access.begin and access.end <= address + nbytes):
                kept.append(access)
        kept.append(Access(who, tick, address, address + nbytes, is_write, what))
        self._accesses = kept

    def _overlapping(self, address: int, nbytes: int) -> list[Access]:
        return [a for a in self._accesses if a.begin < address + nbytes and address < a.end]


class RecordingSession:
    """A session with graphs: what is captured is replayed at its own addresses, whatever is bound later."""

    def __init__(self, device: RecordingDevice, inner: OrtSession) -> None:
        self._device = device
        self._inner = inner
        self._owner: int | None = None
        self._graphs: dict[int, OrtBinding] = {}
        self._first: dict[int, list[bytes]] = {}
        self._smallest_captured: int | None = None
        self.has_graphs = inner.has_graphs
        self.output_names = inner.output_names
        self.strays = inner.strays

    def bind(self, inputs: Sequence[BoundTensor], outputs: Sequence[BoundTensor]) -> Binding:
        return self._inner.bind(inputs, outputs)

    def run(self, binding: Binding, graph_id: int, *, is_synchronised: bool) -> None:
        self._check_owner()
        bound = cast("OrtBinding", binding)
        if self._device.faults.dies_when_serving and not is_synchronised:
            self._device.is_lost = True
        self._device.count_run()
        captured = self._graphs.get(graph_id)
        if captured is None and not is_synchronised:
            raise OrderError("a plain run or a capture without synchronisation")
        if graph_id == 0 or graph_id < PLAIN:
            raise OrderError(f"graph id {graph_id}")
        if captured is not None and (captured.inputs, captured.outputs) != (bound.inputs, bound.outputs):
            raise OrderError(f"graph {graph_id} replayed with another binding than it was captured with")
        self._check_memory(max((t.shape[0] for t in bound.inputs if t.shape), default=1))
        what = f"replay {graph_id}" if captured else f"run {graph_id}"
        tensors = [(t, False) for t in bound.inputs] + [(t, True) for t in bound.outputs]
        self._device.run_bound(tensors, what, is_synchronised=is_synchronised)
        if graph_id != PLAIN and captured is None:
            self._capture(bound, graph_id)
        self._inner.run(bound, PLAIN, is_synchronised=True)
        self._answer_stale(bound, graph_id)

    def run_arrays(self, feeds: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        self._check_owner()
        self._device._check_call("run")
        self._device.count_run()
        self._device.use_memory(self._device.faults.run_bytes)
        self._check_memory(max((a.shape[0] for a in feeds.values() if a.shape), default=1))
        return self._inner.run_arrays(feeds)

    def _capture(self, bound: OrtBinding, graph_id: int) -> None:
        faults, rows = self._device.faults, bound.inputs[0].shape[0]
        nbytes = sum(int(np.prod(t.shape)) for t in bound.inputs)
        if self._smallest_captured is not None and nbytes > self._smallest_captured:
            raise OrderError("a larger graph captured after a smaller one")
        with self._device.capturing():
            if faults.on_capture is not None:
                faults.on_capture()
            if rows in faults.dies_in_capture:
                self._device.is_lost = True
            if rows in faults.fail_capture or rows in faults.dies_in_capture:
                raise CudaFaultError("CUDA failure 900: operation not permitted when stream is capturing")
        self._device.use_memory(faults.graph_bytes)
        self._device.captures.append(rows)
        self._smallest_captured = nbytes
        self._graphs[graph_id] = bound

    def _answer_stale(self, bound: OrtBinding, graph_id: int) -> None:
        if graph_id == PLAIN or bound.inputs[0].shape[0] not in self._device.faults.stale:
            return
        blocks = [_bytes_at(t) for t in bound.outputs]
        first = self._first.setdefault(graph_id, [bytes(block) for block in blocks])
        for block, content in zip(blocks, first, strict=True):
            block[:] = np.frombuffer(content, np.uint8)

    def _check_owner(self) -> None:
        thread = threading.get_ident()
        self._owner = self._owner or thread
        if self._owner != thread:
            raise OrderError("a session used by a second thread")

    def _check_memory(self, rows: int) -> None:
        limit = self._device.faults.memory_rows
        if limit is not None and rows > limit:
            raise OutOfMemoryError(f"Failed to allocate memory for {rows} rows")


def _bytes_at(tensor: BoundTensor) -> Bytes:
    import ctypes

    nbytes = int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(tensor.address), np.uint8)


def _lane(stream: Stream) -> str:
    return cast("HostStream", stream).lane


def _memory(block: Block) -> HostMemory:
    return block.memory if isinstance(block, RecordedBlock) else cast("HostMemory", block)


def _recorded(event: Event) -> RecordedEvent:
    return cast("RecordedEvent", event)


def _join(clock: Clock, other: Clock) -> None:
    for who, tick in other.items():
        clock[who] = max(clock.get(who, 0), tick)


def _verb(is_write: bool) -> str:
    return "writes" if is_write else "reads"
