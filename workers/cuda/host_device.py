"""A device on host addresses: the engine's whole way of work with real results, on a machine without a GPU.

Operations run when they are enqueued, so every order is kept and nothing overlaps. ONNX Runtime is called as
on a GPU, by address and with a graph id (which the CPU provider ignores: a "replay" is a run).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from headrace.errors import DeviceError
from headrace.workers.cuda.device import (
    Block,
    Bytes,
    Event,
    HostBlock,
    Lane,
    MemoryInfo,
    SessionOptions,
    Stream,
)
from headrace.workers.cuda.layout import ALIGNMENT
from headrace.workers.cuda.ort_session import OrtSession, open_host_session
from headrace.workers.onnx_model import OnnxModel

#: What ``memory`` reports: no driver bounds this device.
TOTAL_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class HostStream:
    """A stream in name: what it is given has run when the call returns."""

    lane: Lane


@dataclass(slots=True)
class HostEvent:
    """The time at which the mark was put."""

    name: str
    at_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory:
    """Aligned bytes."""

    data: Bytes
    name: str = field(default="")

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def for_writing(self) -> Bytes:
        """Return the bytes."""
        return self.data

    def for_reading(self) -> Bytes:
        """Return the bytes."""
        return self.data


class HostDevice:
    """See the module. ``threads`` is how many cores a run may use."""

    name = "cpu addresses"

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._used_bytes = 0
        self._registered: set[int] = set()

    def attach_thread(self) -> None:
        """Do nothing: any thread may use host memory."""

    def stream(self, lane: Lane) -> Stream:
        """Return the stream of a lane."""
        return HostStream(lane)

    def event(self, name: str) -> Event:
        """Return an event that was not recorded yet."""
        return HostEvent(name)

    def device_block(self, nbytes: int) -> Block:
        """Return aligned memory, contents undefined."""
        return self._block(nbytes)

    def pinned_block(self, nbytes: int) -> HostBlock:
        """Return aligned memory, contents undefined."""
        return self._block(nbytes)

    def copy(
        self,
        target: Block,
        source: Block,
        nbytes: int,
        stream: Stream,
        target_offset: int = 0,
        source_offset: int = 0,
    ) -> None:
        """Copy at once."""
        into, out_of = cast("HostMemory", target).data, cast("HostMemory", source).data
        into[target_offset : target_offset + nbytes] = out_of[source_offset : source_offset + nbytes]

    def record(self, event: Event, stream: Stream) -> None:
        """Note the time."""
        assert isinstance(event, HostEvent)  # noqa: S101 - made by this class
        event.at_ns = time.perf_counter_ns()

    def wait(self, stream: Stream, event: Event) -> None:
        """Return: what came before has run."""

    def synchronize(self, event: Event) -> None:
        """Return: what came before has run."""

    def drain(self) -> None:
        """Return: what came before has run."""

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """Return the time between two recorded events."""
        assert isinstance(begin, HostEvent)  # noqa: S101 - made by this class
        assert isinstance(end, HostEvent)  # noqa: S101
        return end.at_ns - begin.at_ns

    def memory(self) -> MemoryInfo:
        """Return what this device has given out, of an arbitrary total."""
        return MemoryInfo(TOTAL_BYTES - self._used_bytes, TOTAL_BYTES)

    def register_host(self, memory: memoryview) -> HostBlock:
        """Note the address; fails where CUDA does: empty, or registered already."""
        if not memory.nbytes:
            raise DeviceError("empty memory can't be registered")
        block = HostMemory(np.frombuffer(memory, np.uint8))
        if block.address in self._registered:
            raise DeviceError(f"memory at {block.address:#x} is registered already")
        self._registered.add(block.address)
        return block

    def unregister_host(self, block: HostBlock) -> None:
        """Forget the address."""
        if block.address not in self._registered:
            raise DeviceError(f"memory at {block.address:#x} is not registered")
        self._registered.discard(block.address)

    def open_session(self, model: OnnxModel, options: SessionOptions) -> OrtSession:
        """Open a session of the CPU provider."""
        return open_host_session(model, has_graphs=options.has_graphs, threads=self._threads)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Do nothing: there is no timeline to show it in."""
        yield

    def _block(self, nbytes: int) -> HostMemory:
        raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        block = HostMemory(raw[offset : offset + max(1, nbytes)])
        self._used_bytes += block.nbytes
        return block
