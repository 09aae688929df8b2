"""What tests of faults on real processes share: marked frames, changed processes, reading to the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import hr_fault_hooks
import numpy as np
from hr_processes import LIMIT_S, BrokerProcess, Processes, Running, emulated_config
from numpy.typing import NDArray

import headrace
from headrace import Outcome

HERE = Path(__file__).resolve().parent

Image = NDArray[np.uint8]


def config(**options: object) -> str:
    """``emulated_config`` with the adapter that obeys marked frames."""
    text = emulated_config(**options)  # type: ignore[arg-type]
    return text.replace('name = "m"\n', 'name = "m"\nadapter = "hr_fault_hooks:answer"\n')


def env(**settings: object) -> dict[str, str]:
    """Return the environment of a process that finds our hooks. ``settings``: see hr_site/sitecustomize."""
    paths = [str(HERE), str(HERE / "hr_site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} | {name: str(value) for name, value in settings.items()}


def start_worker(
    processes: Processes,
    broker: BrokerProcess,
    *arguments: object,
    device: str = "emulated",
    **settings: object,
) -> Running:
    """Start a worker with our hooks; it is not waited for."""
    return processes.start(
        "worker", "--connect", broker.address, "--device", device, *arguments, env=env(**settings)
    )


def start_workers(
    processes: Processes, broker: BrokerProcess, count: int, *arguments: object, **settings: object
) -> list[Running]:
    """Start workers w0, w1 ... with our hooks and wait until they serve."""
    started = [
        start_worker(processes, broker, "--id", f"w{number}", *arguments, **settings)
        for number in range(count)
    ]
    broker.wait_workers(count)
    return started


def image(value: int = 0, size: int = 32, mark: str = "") -> Image:
    """Return an image [size, size, 3] of one value, marked or not."""
    pixels = np.full((size, size, 3), value % 200, np.uint8)
    return hr_fault_hooks.mark(pixels, mark) if mark else pixels


def read(subscriber: headrace.Subscriber, count: int, timeout_s: float = LIMIT_S) -> list[Outcome]:
    """Return the next ``count`` outcomes; a missed range fails the test."""
    found: list[Outcome] = []
    deadline_s = time.monotonic() + timeout_s
    while len(found) < count:
        item = subscriber.get(max(0.01, deadline_s - time.monotonic()))
        assert isinstance(item, Outcome), item
        found.append(item)
    return found


def ends(outcomes: Iterable[Outcome]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return status and code by stream and seq; a frame that ended twice fails the test."""
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for outcome in outcomes:
        name = (outcome.stream, outcome.seq)
        assert name not in found, f"{name} ended twice: {found[name]}, {outcome}"
        found[name] = (str(outcome.status), outcome.code)
    return found


def memory_bytes(pid: int, key: str = "VmRSS") -> int:
    """Return the resident size of a process; ``VmHWM``: the largest it ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {key} of process {pid}")


def descriptor_count(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
