"""Chooses what runs the models: the device that was asked for, or a reason why it is not there.

A worker never falls back in silence: ``auto`` that ends on the CPU says so, ``cuda`` without CUDA is an
error (microsoft/onnxruntime#23372: a session asked for CUDA quietly ran on the CPU).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from headrace.errors import ConfigError, DeviceError
from headrace.workers.engine import Engine

if TYPE_CHECKING:
    from headrace.workers.cuda.arena_pins import ArenaPins

log = structlog.get_logger()

#: Where the NVIDIA driver tells of itself, and the device by which Windows lends a GPU to its Linux.
_PROC = Path("/proc")
_WSL_GPU = Path("/dev/dxg")

DEVICES = ("auto", "cpu", "cuda", "emulated")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is there. ``engine`` and ``name`` are what status shows; ``make_engine`` may be called
    again whenever the models change. ``figures`` tells of the device, from any one thread (None: nothing to
    tell). ``pins`` lets it read producers' arenas by itself."""

    engine: str
    name: str
    make_engine: Callable[[], Engine]
    figures: Callable[[], dict[str, float]] | None = None
    pins: ArenaPins | None = None


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What only a GPU asks. ``slots``: batches in flight. ``memory_mb`` None: no bound of ours.
    ``cache_folder`` None: nothing is remembered from one process to the next."""

    slots: int = 2
    memory_mb: int | None = None
    cache_folder: Path | None = None


def choose_device(wanted: str, threads: int, gpu: GpuOptions | None = None) -> Device:
    """Return the device for ``--device``; ``threads`` is how many CPU threads one run may use.

    Raises ConfigError for an unknown word, DeviceError (with the reason) for a device that is not there.
    """
    match wanted:
        case "emulated":
            return Device("emulated", "emulated", _emulated)
        case "cpu":
            return _cpu(threads)
        case "cuda":
            reason = why_no_cuda()
            if reason:
                raise DeviceError(
                    f"device cuda: {reason}; use --device cpu, or --device auto to take what is there"
                )
            return _cuda(gpu or GpuOptions())
        case "auto":
            reason = why_no_cuda()
            if not reason:
                return _cuda(gpu or GpuOptions())
            log.warning("running on the CPU", reason=reason, threads=threads)
            return _cpu(threads)
        case _:
            raise ConfigError(f"device {wanted!r} is unknown; choose one of {', '.join(DEVICES)}")


def _cpu(threads: int) -> Device:
    if importlib.util.find_spec("onnxruntime") is None:
        raise DeviceError("device cpu: ONNX Runtime is not installed; pip install 'headrace[cpu]'")
    if _has_two_runtimes():
        log.warning(
            "two ONNX Runtime packages overwrite each other",
            installed="onnxruntime, onnxruntime-gpu",
            remedy="pip uninstall onnxruntime onnxruntime-gpu, then pip install 'headrace[cpu]'",
        )

    def make() -> Engine:
        from headrace.workers.cpu_engine import CpuEngine

        return CpuEngine(threads)

    return Device("cpu", "cpu", make)


def _emulated() -> Engine:
    from headrace.workers.emulated_engine import EmulatedEngine

    return EmulatedEngine()


def _cuda(options: GpuOptions) -> Device:
    """Return the GPU that this process sees. torch first: ONNX Runtime finds the CUDA libraries it loads."""
    from headrace.workers.cuda.arena_pins import ArenaPins
    from headrace.workers.cuda.engine import CudaEngine, CudaSettings
    from headrace.workers.cuda.gate import GATE
    from headrace.workers.cuda.nvml import open_nvml
    from headrace.workers.cuda.suspects import Suspects
    from headrace.workers.cuda.torch_device import TorchDevice

    device = TorchDevice()
    settings = CudaSettings(
        slots=max(2, options.slots),
        memory_limit_bytes=None if options.memory_mb is None else options.memory_mb * 1024 * 1024,
    )
    path = None
    if options.cache_folder is not None:
        visible = re.sub(r"[^\w-]", "_", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
        path = options.cache_folder / f"cuda-suspects-{visible}.json"

    engines: list[CudaEngine] = []  # the one that serves

    def make() -> Engine:
        engines[:] = [CudaEngine(device, settings, suspects=Suspects(path))]
        return engines[0]

    nvml = open_nvml(device.uuid)
    pins = ArenaPins(device)

    def figures() -> dict[str, float]:
        found: dict[str, float] = pins.figures()
        if nvml is not None:
            with GATE.use():  # not while a graph is captured
                found |= nvml.figures()
        for engine in engines:
            found |= engine.figures()
        return found

    return Device("cuda", device.name, make, figures, pins)


def why_no_cuda() -> str:
    """Return why CUDA can't be used here, with what would help; nothing when it can."""
    if importlib.util.find_spec("torch") is None:
        return "no CUDA: torch is not installed (pip install 'headrace[gpu]')"
    import torch

    if not torch.cuda.is_available():
        return _why_not_visible(torch)
    if importlib.util.find_spec("onnxruntime") is None:
        return "no CUDA: ONNX Runtime is not installed (pip install 'headrace[gpu]')"
    if _has_two_runtimes():
        return (
            "onnxruntime and onnxruntime-gpu are both installed (pip uninstall onnxruntime onnxruntime-gpu,"
            " then pip install 'headrace[gpu]')"
        )
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "no CUDA: this ONNX Runtime was built without it (pip install 'headrace[gpu]')"
    return ""


def _why_not_visible(torch: Any) -> str:
    """Return what keeps torch from a GPU, the outermost cause first."""
    if not (_PROC / "driver/nvidia/version").exists() and not _WSL_GPU.exists():
        return "no CUDA device is visible: no NVIDIA driver is loaded (in a container: docker run --gpus all)"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and (not chosen.strip() or chosen.strip().startswith("-")):
        return f"no CUDA device is visible: CUDA_VISIBLE_DEVICES={chosen!r} hides every GPU"
    if torch.version.cuda is None:
        return (
            f"no CUDA: torch {torch.__version__} was built without it (pip uninstall torch, then pip install"
            " 'headrace[gpu]')"
        )
    return (
        f"no CUDA device is visible: torch {torch.__version__} for CUDA {torch.version.cuda} can't use the"
        " driver or the GPU (headrace doctor says more)"
    )


def _has_two_runtimes() -> bool:
    """Tell whether both ONNX Runtime packages are there. They share one folder: whichever was installed last
    has overwritten the other, and CUDA may be gone."""
    return all(_is_installed(name) for name in ("onnxruntime", "onnxruntime-gpu"))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
