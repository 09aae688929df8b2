"""Run ``headrace`` commands as real processes that end with the test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TIME_LIMIT_S = 30.0


def command(*arguments: object) -> list[str]:
    """Return the command line of the installed headrace."""
    return [sys.executable, "-P", "-m", "headrace", *map(str, arguments)]


def run(*arguments: object, timeout_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout_s)


class Process:
    """One running command. A context manager: it is killed at the latest when the block ends."""

    def __init__(self, *arguments: object) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._stderr_text: str | None = None
        self.popen = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=self._stderr, text=True, process_group=0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        if error is not None:
            error.add_note(f"stderr of {self.popen.args}:\n{self.stderr()}")
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self._stderr_text = self.stderr()
        self._stderr.close()

    def read_json(self) -> dict[str, Any]:
        """Return the next line of stdout as an object; fails when the process ends instead."""
        lines: list[str] = []
        assert self.popen.stdout is not None
        reader = threading.Thread(target=lambda: lines.append(self.popen.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        reader.join(TIME_LIMIT_S)
        assert lines, f"no line on stdout within {TIME_LIMIT_S} s: {self.stderr()}"
        assert lines[0], f"ended with {self.popen.wait()}: {self.stderr()}"
        value = json.loads(lines[0])
        assert isinstance(value, dict)
        return value

    def stderr(self) -> str:
        """Return what it wrote to stderr so far."""
        if self._stderr_text is not None:
            return self._stderr_text
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = TIME_LIMIT_S) -> int:
        """Send a signal; return the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float = TIME_LIMIT_S) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition did not come true within {timeout_s} s"
        pause.wait(0.05)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
