"""Changes to a headrace process that a test asks for by environment, before headrace is imported.

``HR_PROTOCOL_VERSION=2``     speak another protocol version
``HR_HOSTS_FILE=path``        look names up in this file of ``NAME ADDRESS`` lines, anew each time
``HR_ENGINE_MEMORY_PIXELS=n`` the emulated device runs out of memory when a batch holds more pixels
``HR_ENGINE_FATAL_RUN=n``     the emulated device fails for good in its n-th run and then answers nonsense

Put this folder on PYTHONPATH to have it read (``hr_faults.env``).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def _speak_version(number: int) -> None:
    import headrace.protocol.messages as messages

    messages.PROTOCOL_VERSION = number


def _look_up_in(path: Path) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        names = dict(line.split() for line in path.read_text().splitlines())
        return real(names.get(host, host), *arguments, **options)

    socket.getaddrinfo = getaddrinfo  # type: ignore[assignment]


def _limit_memory(pixels: int) -> None:
    from headrace.workers.emulated_engine import EmulatedEngine, _Booked
    from headrace.workers.engine import BatchOutputs

    real = EmulatedEngine.submit

    def submit(self: EmulatedEngine, batch: Any) -> None:
        held = batch.inputs[0].array[: batch.count].size // 3
        if held <= pixels:
            real(self, batch)
            return
        error = f"Failed to allocate memory for requested buffer of size {held * 12}"
        self._finished.put(_Booked(BatchOutputs(batch.batch, {}, 0, error), 0))

    EmulatedEngine.submit = submit  # type: ignore[method-assign]


def _fail_for_good(run: int) -> None:
    from headrace.workers.emulated_engine import EmulatedEngine, _Booked
    from headrace.workers.engine import BatchOutputs

    real = EmulatedEngine.submit
    runs = 0

    def submit(self: EmulatedEngine, batch: Any) -> None:
        nonlocal runs
        runs += 1
        if runs < run:
            real(self, batch)
        else:
            outputs = BatchOutputs(batch.batch, {}, 0, "CUDA error 700", is_fatal=runs == run)
            self._finished.put(_Booked(outputs, 0))

    EmulatedEngine.submit = submit  # type: ignore[method-assign]


if value := os.environ.get("HR_PROTOCOL_VERSION"):
    _speak_version(int(value))
if value := os.environ.get("HR_HOSTS_FILE"):
    _look_up_in(Path(value))
if value := os.environ.get("HR_ENGINE_MEMORY_PIXELS"):
    _limit_memory(int(value))
if value := os.environ.get("HR_ENGINE_FATAL_RUN"):
    _fail_for_good(int(value))
