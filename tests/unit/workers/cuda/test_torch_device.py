"""What of the real device can be tried without a GPU: torch's CPU build, and ONNX Runtime without CUDA."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hr_models
import pytest

from headrace.errors import DeviceError, ModelError
from headrace.workers.cuda import ort_session
from headrace.workers.cuda.device import CudaFaultError, OutOfMemoryError, SessionOptions
from headrace.workers.cuda.ort_session import CPU_PROVIDER, CUDA_PROVIDER, open_cuda_session, strays_of
from headrace.workers.devices import why_no_cuda
from headrace.workers.onnx_model import open_session, read_model


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_is_not_on_the_gpu_is_refused(tmp_path: Path) -> None:
    """ORT-01: ONNX Runtime falls back to the CPU without a word; the session's own list tells."""
    if not why_no_cuda():
        pytest.skip("this machine has a GPU")
    model = read_model(str(hr_models.write(tmp_path, hr_models.mean_color())))

    with pytest.raises((DeviceError, ModelError), match="CUDA"):
        open_cuda_session(model, SessionOptions(), compute_stream=1)


def test_what_bounds_a_session_is_asked_of_the_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORT-06: its arena grows by what is asked for, up to gpu_memory_mb and no further."""
    asked: list[Any] = []

    def opened(_model: object, options: Any, providers: Any) -> Any:
        asked.extend([options, *providers])
        return SimpleNamespace(
            get_providers=lambda: [CUDA_PROVIDER, CPU_PROVIDER],
            get_outputs=list,
            get_provider_graph_assignment_info=list,
        )

    monkeypatch.setattr(ort_session, "open_session", opened)
    model = read_model(str(hr_models.write(tmp_path, hr_models.mean_color())))

    session = open_cuda_session(model, SessionOptions(memory_limit_bytes=2**30), compute_stream=77)

    _, (name, provider) = asked
    assert (name, session.has_graphs) == (CUDA_PROVIDER, True)
    assert provider == {
        "device_id": "0",
        "enable_cuda_graph": "1",
        "user_compute_stream": "77",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "fuse_conv_bias": "0",
        "prefer_nhwc": "0",
        "gpu_mem_limit": str(2**30),
    }


def test_the_default_stream_can_not_be_the_compute_stream(tmp_path: Path) -> None:
    """ONNX Runtime takes 0 for "not set" and would make a stream of its own, which nothing waits for."""
    model = read_model(str(hr_models.write(tmp_path, hr_models.mean_color())))

    with pytest.raises(DeviceError, match="default stream"):
        open_cuda_session(model, SessionOptions(), compute_stream=0)


def test_operators_beside_the_device_are_counted(tmp_path: Path) -> None:
    """On the CPU all of them are, seen from CUDA, and none, seen from the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(read_model(str(hr_models.write(tmp_path, hr_models.row_mixing()))), options)

    assert strays_of(session) == ("Add x1", "ReduceMean x2")
    assert strays_of(session, CPU_PROVIDER) == ()


def test_torch_errors_are_told_apart() -> None:
    """Out of memory harms nothing; whatever else a copy or an event raises is the device's fault."""
    torch: Any = pytest.importorskip("torch")
    from headrace.workers.cuda.torch_device import TorchDevice

    device = object.__new__(TorchDevice)

    def fail(error: Exception) -> None:
        def call() -> None:
            raise error

        device._call(call)

    with pytest.raises(OutOfMemoryError):
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"))
    with pytest.raises(CudaFaultError):
        fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(CudaFaultError):
        fail(RuntimeError("something else"))


def test_a_block_is_a_tensor_at_an_address() -> None:
    """Host and tensor see the same bytes."""
    torch: Any = pytest.importorskip("torch")
    from headrace.workers.cuda.torch_device import TorchBlock

    block = TorchBlock(torch.zeros(64, dtype=torch.uint8))
    block.for_writing()[3] = 7

    assert (block.nbytes, int(block.tensor[3]), int(block.for_reading()[3])) == (64, 7, 7)
    assert block.for_reading().ctypes.data == block.address


def test_torch_without_a_gpu_is_refused() -> None:
    """With its reason."""
    torch: Any = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from headrace.workers.cuda.torch_device import TorchDevice

    with pytest.raises(DeviceError, match="no CUDA device"):
        TorchDevice()
