"""Chooses what runs the models: the device that was asked for, or a reason why it is not there.

A worker never falls back in silence: ``auto`` that ends on the CPU says so, ``cuda`` without CUDA is an
error (microsoft/onnxruntime#23372: a session asked for CUDA quietly ran on the CPU).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from headrace.errors import ConfigError, DeviceError
from headrace.workers.engine import Engine

log = structlog.get_logger()

DEVICES = ("auto", "cpu", "cuda", "emulated")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is there. ``engine`` and ``name`` are what status shows; ``make_engine`` may be called
    again whenever the models change."""

    engine: str
    name: str
    make_engine: Callable[[], Engine]


def choose_device(wanted: str, threads: int) -> Device:
    """Return the device for ``--device``; ``threads`` is how many CPU threads one run may use.

    Raises ConfigError for an unknown word, DeviceError (with the reason) for a device that is not there.
    """
    match wanted:
        case "emulated":
            return Device("emulated", "emulated", _emulated)
        case "cpu":
            return _cpu(threads)
        case "cuda":
            raise DeviceError(
                f"device cuda: {_why_no_cuda()}; use --device cpu, or --device auto to take what is there"
            )
        case "auto":
            log.warning("running on the CPU", reason=_why_no_cuda(), threads=threads)
            return _cpu(threads)
        case _:
            raise ConfigError(f"device {wanted!r} is unknown; choose one of {', '.join(DEVICES)}")


def _cpu(threads: int) -> Device:
    if importlib.util.find_spec("onnxruntime") is None:
        raise DeviceError("device cpu: ONNX Runtime is not installed; pip install 'headrace[cpu]'")

    def make() -> Engine:
        from headrace.workers.cpu_engine import CpuEngine

        return CpuEngine(threads)

    return Device("cpu", "cpu", make)


def _emulated() -> Engine:
    from headrace.workers.emulated_engine import EmulatedEngine

    return EmulatedEngine()


def _why_no_cuda() -> str:
    """Return why CUDA can't be used here."""
    if importlib.util.find_spec("torch") is None:
        return "no CUDA: torch is not installed (pip install 'headrace[gpu]')"
    import torch  # type: ignore[import-not-found,unused-ignore]

    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return "this release has no cuda engine yet"
