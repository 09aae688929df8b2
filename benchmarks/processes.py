"""Real processes for the benchmarks: a broker with workers, and children that speak JSON lines.

A child of ours (``benchmarks.roles``) ends when its stdin closes, a headrace process when its parent is
gone, and a block kills what is left: nothing outlives a benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from headrace.clients.control import Control
from headrace.errors import HeadraceError

ROOT = Path(__file__).resolve().parents[1]

#: How long anything that should come soon may take.
LIMIT_S = 120.0


class Child:
    """One process. Its stdout is read as JSON lines, its stderr kept for a failure."""

    def __init__(self, arguments: list[str], name: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        self.usage = psutil.Process(self._popen.pid)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def read(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Return the next object on stdout; raise RuntimeError when none comes."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"{self.name}: silent for {timeout_s:g} s\n{self.stderr()}") from None
        if line is None:
            raise RuntimeError(f"{self.name}: ended with {self._popen.wait()}\n{self.stderr()}")
        value: dict[str, Any] = json.loads(line)
        return value

    def ask(self, question: object = None, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Write one line of JSON and return the answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(question) + "\n")
        self._popen.stdin.flush()
        return self.read(timeout_s)

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far, by user and kernel, all threads."""
        times = self.usage.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        return int(self.usage.memory_info().rss)

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-4_000:]

    def end(self) -> None:
        """Ask it to end by closing its stdin (ours) or with SIGTERM; kill it when it does not."""
        with contextlib.suppress(OSError):
            self._popen.stdin.close()  # type: ignore[union-attr]
        self._popen.terminate()
        try:
            self._popen.wait(5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()  # type: ignore[union-attr]
        self._stderr.close()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # closed while reading
            for line in self._popen.stdout or ():
                if line.startswith("{"):
                    self._lines.put(line)
        self._lines.put(None)


class Processes:
    """The processes of one round; none is left when its block ends."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-bench-")
        self.folder = Path(self._folder.name)

    def role(self, role: str, name: str = "", **arguments: object) -> Child:
        """Start a child of ``benchmarks.roles``."""
        return self._start(["-m", "benchmarks.roles", role, json.dumps(arguments)], name or role)

    def broker(self, config: str) -> str:
        """Start a broker with this TOML text; return its address once it is ready."""
        path = self.folder / "broker.toml"
        path.write_text(config)
        child = self._start(self._headrace("broker", "--config", str(path), "--json"), "broker")
        address: str = child.read()["endpoints"]["frames"]
        return address

    def sampled_broker(self, config: str, output: Path) -> str:
        """Start a broker that writes CPU samples of itself to ``output`` when it ends."""
        path = self.folder / "broker.toml"
        path.write_text(config)
        arguments = self._headrace("broker", "--config", str(path), "--json")[3:]
        child = self.role("sampled-broker", "broker", output=str(output), arguments=arguments)
        address: str = child.read()["endpoints"]["frames"]
        return address

    def workers(self, address: str, count: int, device: str, threads: int = 1) -> None:
        """Start workers and wait until the broker counts all as ready."""
        env = {"HEADRACE_CACHE": str(self.folder / "cache")}
        for number in range(count):
            name = "worker" if count == 1 else f"worker {number}"
            arguments = ("--connect", address, "--device", device, "--id", f"w{number}")
            command = self._headrace("worker", *arguments, "--threads", str(threads))
            self._start(command, name, env)
        self._wait_ready(address, count)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process so far."""
        return {name: child.cpu_s() for name, child in self.children.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for child in self.children.values():
                error.add_note(f"{child.name}: {child.stderr()}")
        for child in reversed(self.children.values()):
            child.end()
        self._folder.cleanup()

    def _headrace(self, *arguments: str) -> list[str]:
        flags = ("--parent-pid", str(os.getpid()), "--log-level", "warning")
        return ["-P", "-m", "headrace", *arguments, *flags]

    def _start(self, arguments: list[str], name: str, env: Mapping[str, str] | None = None) -> Child:
        child = Child(arguments, name, env)
        self.children[name] = child
        return child

    def _wait_ready(self, address: str, count: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        with Control(address) as control:
            while time.monotonic() < deadline_s:
                with contextlib.suppress(HeadraceError):
                    status: dict[str, Any] = dict(control.status(5.0))
                    if sum(worker["state"] == "ready" for worker in status["workers"]) >= count:
                        return
                time.sleep(0.05)
        raise RuntimeError(f"{count} workers were not ready within {LIMIT_S:g} s")
