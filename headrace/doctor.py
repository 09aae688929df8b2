"""What this machine offers headrace, finding by finding, in words and with the remedy for what is amiss.

Nothing is changed and nothing is allocated. Each check reads from a ``Host``, so that a test can show it a
machine that is not there. A ``warning`` costs speed or headroom; a ``stops`` is one that no worker here
gets past.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from headrace import descriptors
from headrace.arena import SHM_FOLDER
from headrace.build_kind import is_compiled

#: Docker's default size of /dev/shm: 10 frames of 1920 x 1080 RGB fill it.
SMALL_SHM_BYTES = 64 * 1024 * 1024

#: Descriptors a broker may need: ZeroMQ uses about three for a connection, and a broker serves hundreds.
WANTED_FILES = 4096

#: The socket buffer that keeps a 10 Gbit/s link of 2 ms round trip full (bandwidth x delay = 2.5 MB).
WANTED_SOCKET_BUFFER_BYTES = 2_500_000

#: CUDA 13 needs the driver series 580 (NVIDIA's table of CUDA compatibility).
OLDEST_DRIVER = 580

#: Clock sources that are read without a system call.
FAST_CLOCKS = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"})


class Verdict(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    STOPS = "stops"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. ``remedy`` is empty where there is nothing to do."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What torch says of the first visible GPU. ``cudnn`` as torch numbers it (91900), 0 without."""

    name: str
    cuda: str
    cudnn: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as the checks see it. ``gpu`` is None where CUDA can't be used; ``no_gpu`` says why."""

    root: Path
    shm: Path | None
    installed: Callable[[str], str | None]
    gpu: Gpu | None
    no_gpu: str
    cpus: int
    open_files: int
    shm_free_bytes: int
    is_compiled: bool = True

    def read(self, path: str) -> str | None:
        """Return the text of a file below the root, without blanks at its ends; None if there is none."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None


def this_host() -> Host:
    """Look at this machine. Loads torch where it is installed, which takes seconds."""
    from headrace.workers.devices import why_no_cuda
    from headrace.workers.threads import allowed_cpus

    reason = why_no_cuda()
    shm = SHM_FOLDER
    return Host(
        root=Path("/"),
        shm=shm,
        installed=_installed,
        gpu=None if reason else _first_gpu(),
        no_gpu=reason,
        cpus=allowed_cpus(),
        open_files=_open_files(),
        shm_free_bytes=_free_bytes(shm),
        is_compiled=is_compiled(),
    )


def examine(host: Host) -> list[Finding]:
    """Return the findings of all checks, always in the same order."""
    return [check(host) for check in _CHECKS]


def _build(host: Host) -> Finding:
    if host.is_compiled:
        return Finding("headrace", Verdict.OK, "headrace is compiled")
    return Finding(
        "headrace",
        Verdict.NOTE,
        "headrace is pure Python: a frame costs the broker half as much again as with the compiled one",
        "install it again, not as an editable installation, where a C compiler and Python.h are",
    )


def _runtime(host: Host) -> Finding:
    cpu, gpu = host.installed("onnxruntime"), host.installed("onnxruntime-gpu")
    if cpu and gpu:
        return Finding(
            "onnxruntime",
            Verdict.STOPS,
            f"onnxruntime {cpu} and onnxruntime-gpu {gpu} are both installed; they share one folder, and"
            " whichever came last has overwritten the other",
            "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'headrace[gpu]' or 'headrace[cpu]'",
        )
    if not cpu and not gpu:
        return Finding(
            "onnxruntime",
            Verdict.STOPS,
            "ONNX Runtime is not installed: no worker can run a model here",
            "pip install 'headrace[cpu]', or 'headrace[gpu]' for an NVIDIA GPU",
        )
    name = f"onnxruntime-gpu {gpu}" if gpu else f"onnxruntime {cpu}"
    return Finding("onnxruntime", Verdict.OK, f"{name} is the only ONNX Runtime installed")


def _driver(host: Host) -> Finding:
    text = host.read("proc/driver/nvidia/version")
    if text is None:
        return Finding("driver", Verdict.NOTE, "no NVIDIA driver is loaded: workers run on the CPU")
    found = re.search(r"\b(\d{3})\.\d+(\.\d+)?\b", text)
    if found is None:
        return Finding("driver", Verdict.WARNING, "the version of the NVIDIA driver can't be read")
    if int(found[1]) < OLDEST_DRIVER:
        return Finding(
            "driver",
            Verdict.WARNING,
            f"the NVIDIA driver is {found[0]}; CUDA 13 needs {OLDEST_DRIVER} or later",
            f"install a driver of series {OLDEST_DRIVER} or later",
        )
    return Finding("driver", Verdict.OK, f"NVIDIA driver {found[0]}")


def _cuda(host: Host) -> Finding:
    if host.gpu is None:
        has_driver = host.read("proc/driver/nvidia/version") is not None
        verdict = Verdict.WARNING if has_driver else Verdict.NOTE
        # The reason of a worker is one line: its remedy stands in brackets at the end.
        reason, _, remedy = host.no_gpu.removesuffix(")").partition(" (")
        return Finding("cuda", verdict, f"workers run on the CPU: {reason}", remedy)
    return Finding("cuda", Verdict.OK, f"{host.gpu.name} with CUDA {host.gpu.cuda}")


def _cudnn(host: Host) -> Finding:
    if host.gpu is None:
        return Finding("cudnn", Verdict.NOTE, "not looked for: there is no CUDA device to use it")
    if host.gpu.cudnn < 90000:
        return Finding(
            "cudnn",
            Verdict.WARNING,
            f"cuDNN {host.gpu.cudnn or 'is missing'}; ONNX Runtime needs cuDNN 9",
            "pip install 'onnxruntime-gpu[cuda,cudnn]'",
        )
    major, rest = divmod(host.gpu.cudnn, 10000)
    return Finding("cudnn", Verdict.OK, f"cuDNN {major}.{rest // 100}.{rest % 100}")


def _gpu_memory(host: Host) -> Finding:
    if host.gpu is None:
        return Finding("gpu memory", Verdict.NOTE, "no GPU: no graphs are captured")
    free, total = (size // 2**20 for size in (host.gpu.free_bytes, host.gpu.total_bytes))
    return Finding(
        "gpu memory",
        Verdict.OK if free * 2 >= total else Verdict.WARNING,
        f"{free} of {total} MiB are free for weights, captured graphs and staging together",
        "" if free * 2 >= total else "end what else uses the GPU, or bound it by worker.gpu_memory_mb",
    )


def _shm(host: Host) -> Finding:
    if host.shm is None:
        return Finding("shared memory", Verdict.NOTE, "there is no shared-memory folder: frames go by socket")
    free = f"{host.shm_free_bytes // 2**20} MiB are free in {host.shm}"
    if host.shm_free_bytes <= SMALL_SHM_BYTES:
        return Finding(
            "shared memory",
            Verdict.WARNING,
            f"{free}: producers find no room for an arena, and their frames go by socket",
            "docker run --shm-size 1g, or mount a larger tmpfs there",
        )
    return Finding("shared memory", Verdict.OK, free)


def _threads(host: Host) -> Finding:
    text = f"this process may use {host.cpus} CPUs, by its affinity and its cgroup"
    if host.cpus == 1:
        remedy = "allow 2 CPUs or more: a broker and a worker share one here"
        return Finding("threads", Verdict.WARNING, text, remedy)
    return Finding("threads", Verdict.OK, text)


def _files(host: Host) -> Finding:
    text = f"a broker or worker may have {host.open_files} files open at once"
    if host.open_files < WANTED_FILES:
        remedy = f"ulimit -n {WANTED_FILES}, or LimitNOFILE={WANTED_FILES} in the systemd unit"
        return Finding("open files", Verdict.WARNING, text, remedy)
    return Finding("open files", Verdict.OK, text)


def _sockets(host: Host) -> Finding:
    limits = {name: host.read(f"proc/sys/net/core/{name}") for name in ("rmem_max", "wmem_max")}
    known = {name: int(value) for name, value in limits.items() if value is not None and value.isdigit()}
    if not known:
        return Finding("socket buffers", Verdict.NOTE, "the kernel's limits can't be read here")
    text = ", ".join(f"net.core.{name} is {value} bytes" for name, value in known.items())
    small = [name for name, value in known.items() if value < WANTED_SOCKET_BUFFER_BYTES]
    if small:
        commands = "; ".join(f"sysctl -w net.core.{name}={WANTED_SOCKET_BUFFER_BYTES}" for name in small)
        # Only a socket that sets its buffer meets this limit, hence no warning: TCP tunes itself by tcp_rmem.
        return Finding("socket buffers", Verdict.NOTE, text, f"for fast links of long delay: {commands}")
    return Finding("socket buffers", Verdict.OK, text)


def _clock(host: Host) -> Finding:
    source = host.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is None:
        return Finding("clock", Verdict.NOTE, "the kernel does not say which clock it reads")
    if source in FAST_CLOCKS:
        return Finding("clock", Verdict.OK, f"the clock source is {source}: read without a system call")
    return Finding(
        "clock",
        Verdict.WARNING,
        f"the clock source is {source}: each of the many readings of the clock is a system call",
        "boot with clocksource=tsc where the processor has a constant one",
    )


_CHECKS = (
    _build, _runtime, _driver, _cuda, _cudnn, _gpu_memory, _shm, _threads, _files, _sockets, _clock,
)  # fmt: skip


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_gpu() -> Gpu:
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return Gpu(
        name=str(torch.cuda.get_device_name(0)),
        cuda=str(torch.version.cuda),
        cudnn=int(torch.backends.cudnn.version() or 0),
        free_bytes=int(free),
        total_bytes=int(total),
    )


def _open_files() -> int:
    soft, hard = descriptors.limits()
    return max(soft, min(hard, descriptors.WANTED_LIMIT))  # as broker and worker raise it when they start


def _free_bytes(folder: Path | None) -> int:
    if folder is None:
        return 0
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
