"""A GPU: torch for streams, events and memory, ONNX Runtime for sessions.

torch is imported before ONNX Runtime, whose CUDA provider then finds the CUDA libraries that torch loaded.
One process sees one GPU (CUDA_VISIBLE_DEVICES), and it is device 0 here.

Not measured on a GPU: the calls are those of the torch and ONNX Runtime documentation, the torch ones that
need no GPU are tested with torch's CPU build.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from headrace.errors import DeviceError
from headrace.workers.cuda.device import (
    Block,
    Bytes,
    CudaFaultError,
    Event,
    HostBlock,
    Lane,
    MemoryInfo,
    OutOfMemoryError,
    RunFailedError,
    SessionOptions,
    Stream,
    classify,
)
from headrace.workers.cuda.ort_session import OrtSession, open_cuda_session
from headrace.workers.onnx_model import OnnxModel, first_line

#: Flags of cudaHostRegister in the order in which they are tried: read-only, as arenas are mapped, which not
#: every device takes; then none, for memory that could be written.
REGISTER_FLAGS = (8, 0)


@dataclass(frozen=True, slots=True)
class TorchStream:
    """A torch stream. It lives as long as the device: ONNX Runtime holds its address."""

    lane: Lane
    stream: Any


@dataclass(frozen=True, slots=True)
class TorchEvent:
    """A torch event that takes the time and lets a waiting thread sleep."""

    name: str
    event: Any


@dataclass(frozen=True, slots=True, eq=False)
class TorchBlock:
    """Bytes of a torch tensor, on the device or pinned."""

    tensor: Any

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel())

    def for_writing(self) -> Bytes:
        """Return the bytes of a pinned block."""
        return cast("Bytes", self.tensor.numpy())

    def for_reading(self) -> Bytes:
        """Return the bytes of a pinned block."""
        return cast("Bytes", self.tensor.numpy())


class TorchDevice:
    """See the module. Raises DeviceError without a GPU that torch can use."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError("device cuda: torch sees no CUDA device")
        self._torch: Any = torch
        self.attach_thread()
        self.name = f"cuda:0 {torch.cuda.get_device_name(0)}"
        self.uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # as NVML writes it
        # torch hands its streams out in rounds of 32: made once, they are nobody else's.
        self._streams = {lane: TorchStream(lane, torch.cuda.Stream()) for lane in Lane}

    def attach_thread(self) -> None:
        """Set the device of the calling thread: ONNX Runtime no longer does."""
        self._torch.cuda.set_device(0)

    def stream(self, lane: Lane) -> Stream:
        """Return the stream of a lane."""
        return self._streams[lane]

    def event(self, name: str) -> Event:
        """Return an event that takes the time and lets a waiting thread sleep."""
        return TorchEvent(name, self._torch.cuda.Event(enable_timing=True, blocking=True))

    def device_block(self, nbytes: int) -> Block:
        """Return device memory, contents undefined. Raises OutOfMemoryError."""
        return self._empty(nbytes, {"device": "cuda"})

    def pinned_block(self, nbytes: int) -> HostBlock:
        """Return pinned host memory, contents undefined. Raises OutOfMemoryError."""
        return self._empty(nbytes, {"pin_memory": True})

    def copy(
        self,
        target: Block,
        source: Block,
        nbytes: int,
        stream: Stream,
        target_offset: int = 0,
        source_offset: int = 0,
    ) -> None:
        """Enqueue a copy; pinned memory makes it asynchronous."""
        into = cast("TorchBlock", target).tensor[target_offset : target_offset + nbytes]
        out_of = cast("TorchBlock", source).tensor[source_offset : source_offset + nbytes]
        with self._torch.cuda.stream(cast("TorchStream", stream).stream):
            self._call(lambda: into.copy_(out_of, non_blocking=True))

    def record(self, event: Event, stream: Stream) -> None:
        """Put the mark behind what the stream was given."""
        self._call(lambda: cast("TorchEvent", event).event.record(cast("TorchStream", stream).stream))

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold the stream until the event."""
        self._call(lambda: cast("TorchStream", stream).stream.wait_event(cast("TorchEvent", event).event))

    def synchronize(self, event: Event) -> None:
        """Sleep until the event."""
        self._call(cast("TorchEvent", event).event.synchronize)

    def drain(self) -> None:
        """Wait for the whole device."""
        self._call(self._torch.cuda.synchronize)

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """Return the time between two events that were both reached."""
        begun, ended = cast("TorchEvent", begin).event, cast("TorchEvent", end).event
        return round(float(self._call(lambda: begun.elapsed_time(ended))) * 1e6)

    def memory(self) -> MemoryInfo:
        """Return what the driver says."""
        cuda = self._torch.cuda
        free, total = self._call(cuda.mem_get_info)
        return MemoryInfo(int(free), int(total), int(cuda.memory_reserved()), int(cuda.memory_allocated()))

    def register_host(self, memory: memoryview) -> HostBlock:
        """Pin foreign memory. Raises DeviceError with CUDA's words."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the memory is read-only is meant
            tensor = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        block = TorchBlock(tensor)
        runtime = self._torch.cuda.cudart()
        words = ""
        for flags in REGISTER_FLAGS:
            result = runtime.cudaHostRegister(block.address, block.nbytes, flags)
            if int(result) == 0:
                if not tensor.is_pinned():  # copies from it would wait, one after another
                    self.unregister_host(block)
                    raise DeviceError("torch does not see registered memory as pinned")
                return block
            self._forget_last_error()
            words = f"{runtime.cudaGetErrorString(result)} ({int(result)})"
        raise DeviceError(f"{block.nbytes} bytes at {block.address:#x} can't be pinned: {words}")

    def unregister_host(self, block: HostBlock) -> None:
        """Unpin foreign memory."""
        result = self._torch.cuda.cudart().cudaHostUnregister(block.address)
        if int(result) != 0:
            self._forget_last_error()
            raise DeviceError(f"memory at {block.address:#x} can't be unpinned: CUDA error {int(result)}")

    def open_session(self, model: OnnxModel, options: SessionOptions) -> OrtSession:
        """Open a session on the compute stream."""
        return open_cuda_session(model, options, int(self._streams[Lane.COMPUTE].stream.cuda_stream))

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Show as a range in Nsight's timeline."""
        self._torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            self._torch.cuda.nvtx.range_pop()

    def _empty(self, nbytes: int, where: dict[str, Any]) -> TorchBlock:
        torch = self._torch
        return TorchBlock(self._call(lambda: torch.empty(max(1, nbytes), dtype=torch.uint8, **where)))

    def _forget_last_error(self) -> None:
        # A failed runtime call leaves its error for the next check to find. torch binds no cudaGetLastError,
        # but it calls it after every kernel: a small one takes the error away.
        try:
            self._torch.zeros(1, device="cuda")
        except RuntimeError:
            return

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (OutOfMemoryError, RunFailedError, CudaFaultError):
            raise
        except (
            RuntimeError
        ) as error:  # torch's own classes derive from it: OutOfMemoryError, AcceleratorError
            kind = classify(str(error))
            if kind is RunFailedError:
                kind = (
                    CudaFaultError  # no model runs here: a copy or an event that fails is the device's fault
                )
            raise kind(first_line(error)) from error
