"""Which device is chosen, and the words for why a GPU is not."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

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
        has_driver: bool = True,
        visible: str | None = None,
        torch_cuda: str | None = "13.0",
    ) -> None:
        self.missing = missing
        self.has_gpu = has_gpu
        self.installed = installed
        self.providers = providers
        self.has_driver = has_driver
        self.visible = visible
        self.torch_cuda = torch_cuda
        self.proc = Path("/nowhere")

    def pretend(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        if self.has_driver:
            (folder / "driver/nvidia").mkdir(parents=True)
            (folder / "driver/nvidia/version").write_text("580")
            self.proc = folder
        found = importlib.util.find_spec
        torch = SimpleNamespace(
            cuda=SimpleNamespace(is_available=lambda: self.has_gpu),
            version=SimpleNamespace(cuda=self.torch_cuda),
            __version__="2.13.0",
        )
        patch.setitem(sys.modules, "torch", torch)
        patch.setattr(devices, "_PROC", self.proc)
        patch.setattr(devices, "_WSL_GPU", Path("/nowhere"))
        if self.visible is None:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            patch.setenv("CUDA_VISIBLE_DEVICES", self.visible)
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
        pytest.param(
            Machine(has_gpu=False, has_driver=False),
            "no NVIDIA driver is loaded .*--gpus all",
            id="no-driver",
        ),
        pytest.param(
            Machine(has_gpu=False, visible=""), "CUDA_VISIBLE_DEVICES='' hides every GPU", id="none-visible"
        ),
        pytest.param(
            Machine(has_gpu=False, visible="-1"), "CUDA_VISIBLE_DEVICES='-1' hides every GPU", id="hidden"
        ),
        pytest.param(
            Machine(has_gpu=False, torch_cuda=None), "torch 2.13.0 was built without it", id="torch-for-cpu"
        ),
        pytest.param(
            Machine(has_gpu=False, visible="1"),
            "no CUDA device is visible: torch 2.13.0 for CUDA 13.0 can't use the driver",
            id="no-gpu",
        ),
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
    machine: Machine, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ORT-01: in one line; auto takes the CPU, and says why."""
    machine.pretend(monkeypatch, tmp_path)

    assert re.search(words, why_no_cuda())
    with pytest.raises(DeviceError, match=words) as caught:
        choose_device("cuda", 1)
    assert "use --device cpu" in str(caught.value)
    if "onnxruntime" not in machine.missing:
        assert choose_device("auto", 1).engine == "cpu"


@pytest.mark.parametrize("wanted", ["cuda", "auto"])
def test_a_gpu_that_can_be_used_is_taken(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the options of the worker."""
    Machine().pretend(monkeypatch, tmp_path)
    asked: list[GpuOptions] = []

    def cuda(options: GpuOptions) -> str:
        asked.append(options)
        return "the gpu"

    monkeypatch.setattr(devices, "_cuda", cuda)
    options = GpuOptions(slots=4, memory_mb=1000)

    assert choose_device(wanted, 1, options) == "the gpu"
    assert asked == [options]


@pytest.mark.parametrize(
    ("installed", "count"), [(("onnxruntime", "onnxruntime-gpu"), 1), (("onnxruntime",), 0)]
)
def test_two_runtimes_are_told_on_the_cpu_too(
    installed: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The CPU still works, with the package that came last: the worker serves, and says what is amiss."""
    Machine(installed=installed).pretend(monkeypatch, tmp_path)

    with capture_logs() as logs:
        assert choose_device("cpu", 1).engine == "cpu"

    found = [entry for entry in logs if "overwrite each other" in entry["event"]]
    assert len(found) == count
    assert all("pip uninstall onnxruntime onnxruntime-gpu" in entry["remedy"] for entry in found)
