"""Which device is chosen, and the words for why a GPU is not."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import DeviceError
from headrace.workers import devices
from headrace.workers.devices import GpuOptions, choose_device, why_no_cuda

GPU_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


class Machine:
    """What is installed and visible. ``spec`` names modules that can't be found."""

    def __init__(
        self,
        *,
        missing: tuple[str, ...] = (),
        has_gpu: bool = True,
        installed: tuple[str, ...] = ("onnxruntime-gpu",),
        providers: tuple[str, ...] = tuple(GPU_PROVIDERS),
    ) -> None:
        self.missing = missing
        self.has_gpu = has_gpu
        self.installed = installed
        self.providers = providers

    def pretend(self, patch: pytest.MonkeyPatch) -> None:
        found = importlib.util.find_spec
        cuda = SimpleNamespace(is_available=lambda: self.has_gpu)
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        patch.setitem(
            sys.modules,
            "onnxruntime",
            SimpleNamespace(get_available_providers=lambda: list(self.providers)),
        )

        def find_spec(name: str) -> Any:
            if name in ("torch", "onnxruntime"):
                return None if name in self.missing else object()
            return found(name)

        def version(name: str) -> str:
            if name in self.installed:
                return "1"
            raise metadata.PackageNotFoundError(name)

        patch.setattr(importlib.util, "find_spec", find_spec)
        patch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        pytest.param(Machine(missing=("torch",)), "torch is not installed", id="no-torch"),
        pytest.param(Machine(has_gpu=False), "no CUDA device is visible", id="no-gpu"),
        pytest.param(Machine(missing=("onnxruntime",)), "ONNX Runtime is not installed", id="no-runtime"),
        pytest.param(
            Machine(installed=("onnxruntime", "onnxruntime-gpu")), "are both installed", id="two-runtimes"
        ),
        pytest.param(
            Machine(installed=("onnxruntime",), providers=("CPUExecutionProvider",)),
            "built without it",
            id="runtime-without-cuda",
        ),
    ],
)
def test_cuda_that_can_not_be_used_is_an_error_with_its_remedy(
    machine: Machine, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORT-01: in one line; auto takes the CPU, and says why."""
    machine.pretend(monkeypatch)

    assert words in why_no_cuda()
    with pytest.raises(DeviceError, match=words) as caught:
        choose_device("cuda", 1)
    assert "use --device cpu" in str(caught.value)
    if "onnxruntime" not in machine.missing:
        assert choose_device("auto", 1).engine == "cpu"


@pytest.mark.parametrize("wanted", ["cuda", "auto"])
def test_a_gpu_that_can_be_used_is_taken(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of the worker."""
    Machine().pretend(monkeypatch)
    asked: list[GpuOptions] = []

    def cuda(options: GpuOptions) -> str:
        asked.append(options)
        return "the gpu"

    monkeypatch.setattr(devices, "_cuda", cuda)
    options = GpuOptions(slots=4, memory_mb=1000)

    assert choose_device(wanted, 1, options) == "the gpu"
    assert asked == [options]
