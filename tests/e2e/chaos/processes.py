"""The processes of a chaos run: started, killed, paused, started again; none outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


class Member:
    """One member of the system through all its lives.

    Invariant: at most one process at a time. ``deaths`` are the ends that nobody ordered.
    """

    def __init__(self, role: str, number: int, folder: Path) -> None:
        self.role = role
        self.number = number
        self.name = f"{role}-{number}"
        self.lives = 0
        self.is_paused = False
        self.deaths: list[int] = []
        self._folder = folder
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def is_up(self) -> bool:
        return self._popen is not None

    @property
    def pid(self) -> int:
        assert self._popen is not None, f"{self.name} is not running"
        return self._popen.pid

    @property
    def log(self) -> Path:
        """File of what this life does."""
        return self.log_of(self.lives)

    def log_of(self, life: int) -> Path:
        return self._folder / f"{self.name}.{life}.log"

    @property
    def errors(self) -> Path:
        """File of the stderr of all lives."""
        return self._folder / f"{self.name}.stderr"

    def start(self, arguments: Sequence[object]) -> None:
        """Begin a life: ``python -P -m ARGUMENTS``."""
        assert self._popen is None, f"{self.name} runs already"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        paths = [str(TESTS / "e2e"), str(TESTS / "lib"), *filter(None, [kept.get("PYTHONPATH")])]
        ours = {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with self.errors.open("ab") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=kept | ours,
                cwd=self._folder,
                process_group=0,
            )

    def kill(self) -> None:
        """kill -9, and reap."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                self._popen.kill()
            self._popen.wait()
        self._popen = None
        self.is_paused = False

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        if self._popen is not None and self.is_paused:
            os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    def ask_to_stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end of a stop that was asked for; None when it did not come in time."""
        assert self._popen is not None
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._popen = None
        return code

    def has_died(self) -> bool:
        """Notice an end that nobody ordered."""
        if self._popen is None or self._popen.poll() is None:
            return False
        self.deaths.append(self._popen.returncode)
        self._popen = None
        self.is_paused = False
        return True

    def memory_bytes(self) -> int:
        """Return the largest resident size of this life so far (0 if it is gone)."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    def descriptor_count(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
