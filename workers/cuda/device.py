"""The seam between the cuda engine and whatever has streams, events, memory and sessions.

Everything that the engine asks of torch, CUDA and ONNX Runtime stands here, and nothing else does, so that
the engine runs unchanged on three devices: ``TorchDevice`` (a GPU), ``HostDevice`` (the same ONNX Runtime
calls on host addresses: real results, no overlap) and the recording device of the tests, which fails when an
order that only luck would keep is asked for.

Memory is plain bytes: a block has an address that never changes for its life. What stands in it (which
tensor, at which offset) is for ``layout`` to say. A stream runs its operations in order; operations of
two streams, or of a stream and the host, are ordered by an event and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DeviceError, LocalError
from headrace.exit_codes import ExitCode
from headrace.workers.onnx_model import OnnxModel

#: Graph id of a run that is neither captured nor replayed. ONNX Runtime takes 0, its internal default, when
#: the option is missing, and then captures with buffers that are gone a moment later: it is always passed.
PLAIN = -1

Bytes: TypeAlias = NDArray[np.uint8]


class OutOfMemoryError(LocalError):
    """The device has no memory for this; it goes on working. The batch or bucket is too large."""


class RunFailedError(LocalError):
    """A run failed in the model (a shape, an index): the device and the session are unharmed."""


class CudaFaultError(DeviceError):
    """The device failed. Its context is lost: nothing that it computed since can be trusted."""

    exit_code: ClassVar[int] = ExitCode.DEVICE_LOST


class Lane(StrEnum):
    """The three streams of a worker: copies in, runs and copies out of neighbouring batches overlap."""

    COPY_IN = "copy_in"
    COMPUTE = "compute"
    COPY_OUT = "copy_out"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of the device: free and in all, as the driver sees them (every process counts); what torch has
    reserved from it, and what of that is in use."""

    free_bytes: int
    total_bytes: int
    torch_reserved_bytes: int = 0
    torch_allocated_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """``has_graphs``: capture is possible. ``memory_limit_bytes`` bounds the session's own arena (None: no
    bound). ``conv_search``: HEURISTIC or EXHAUSTIVE, never DEFAULT, which was 50 times slower (gpu.md 1)."""

    has_graphs: bool = True
    memory_limit_bytes: int | None = None
    conv_search: str = "HEURISTIC"
    prefers_nhwc: bool = False


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A tensor that stands at an address of the device. ``dtype`` is a numpy name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int


class Stream(Protocol):
    """A queue of operations on the device, run in order."""

    @property
    def lane(self) -> Lane: ...


class Event(Protocol):
    """A mark in a stream. ``name`` is for people."""

    @property
    def name(self) -> str: ...


class Block(Protocol):
    """Memory of the device."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class HostBlock(Block, Protocol):
    """Pinned memory of the host. The host says what it is about to do, since a device may be using it."""

    def for_writing(self) -> Bytes:
        """Return the bytes, to be written: no operation may still read or write them."""
        ...

    def for_reading(self) -> Bytes:
        """Return the bytes, to be read: every operation that writes them must have been waited for."""
        ...


class Binding(Protocol):
    """Inputs and outputs of a session at fixed addresses."""


class Session(Protocol):
    """One model on the device. Owned by one thread: a CUDA graph belongs to the thread that captured it."""

    @property
    def has_graphs(self) -> bool: ...
    @property
    def output_names(self) -> Sequence[str]: ...
    @property
    def strays(self) -> tuple[str, ...]:
        """Return the operators that do not run on the device, each with its number of nodes."""
        ...

    def bind(self, inputs: Sequence[BoundTensor], outputs: Sequence[BoundTensor]) -> Binding:
        """Bind addresses; whoever owns the memory keeps it for as long as the binding is used."""
        ...

    def run(self, binding: Binding, graph_id: int, *, is_synchronised: bool) -> None:
        """Run on the compute stream. The first run of a graph id >= 1 captures (and executes the model three
        times), later ones replay what was captured *whatever is bound*; PLAIN only runs.

        A run that is not synchronised returns before it is done, and only a replay may be.
        Raises OutOfMemoryError, RunFailedError, CudaFaultError."""
        ...

    def run_arrays(self, feeds: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        """Run host arrays plainly and return host arrays; synchronised. Errors as ``run``."""
        ...


class Device(Protocol):
    """See the module. Calls that enqueue return at once; operations run in the order of their stream."""

    @property
    def name(self) -> str:
        """Return what status shows, for instance "cuda:0 NVIDIA H200"."""
        ...

    def attach_thread(self) -> None:
        """Make the calling thread one that may use the device."""
        ...

    def stream(self, lane: Lane) -> Stream: ...
    def event(self, name: str) -> Event: ...
    def device_block(self, nbytes: int) -> Block: ...
    def pinned_block(self, nbytes: int) -> HostBlock: ...

    def copy(
        self,
        target: Block,
        source: Block,
        nbytes: int,
        stream: Stream,
        target_offset: int = 0,
        source_offset: int = 0,
    ) -> None:
        """Enqueue a copy of ``nbytes`` bytes."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Put the mark behind everything that the stream was given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what the stream is given from now on begin only when ``event`` was reached."""
        ...

    def synchronize(self, event: Event) -> None:
        """Let the calling thread sleep until ``event`` was reached. Raises CudaFaultError."""
        ...

    def drain(self) -> None:
        """Wait for everything. Raises CudaFaultError."""
        ...

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """Return the time between two events that were both reached."""
        ...

    def memory(self) -> MemoryInfo: ...

    def register_host(self, memory: memoryview) -> HostBlock:
        """Pin memory that another process made (a whole mapping, from its page-aligned base) and return it as
        a block, which keeps it mapped.

        Raises DeviceError; a failed call leaves no error behind for the next one to stumble over."""
        ...

    def unregister_host(self, block: HostBlock) -> None:
        """Undo ``register_host``, before the memory is unmapped and when nothing reads it any more."""
        ...

    def open_session(self, model: OnnxModel, options: SessionOptions) -> Session:
        """Open a session whose runs go to the compute stream.

        Raises ModelError when ONNX Runtime refuses the model, DeviceError when it runs elsewhere."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """Return a context that shows as a range in a profiler's timeline (NVTX)."""
        ...


def classify(text: str) -> type[OutOfMemoryError] | type[CudaFaultError] | type[RunFailedError]:
    """Return what kind of failure an exception's text tells of; ONNX Runtime and torch have no classes for
    it.

    Out of memory comes first: ``CUDA failure 2: out of memory`` is the one CUDA error that harms nothing.
    """
    lowered = text.lower()
    if any(mark in lowered for mark in _MEMORY_MARKS):
        return OutOfMemoryError
    if any(mark in lowered for mark in _FAULT_MARKS):
        return CudaFaultError
    return RunFailedError


_MEMORY_MARKS = (
    "out of memory",
    "failed to allocate memory",
    "cudaerrormemoryallocation",
    "available memory of",
    "bfcarena",
)
_FAULT_MARKS = (
    "cuda failure",
    "cuda error",
    "cudaerror",
    "cudnn failure",
    "cudnn_status",
    "cublas failure",
    "cublas_status",
    "curand failure",
)
