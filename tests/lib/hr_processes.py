"""Start brokers, workers and other ``headrace`` commands as real processes that never outlive their test.

``Processes`` is the one owner: it starts them, and when its block ends it kills and reaps what is left, with
all their children; when the test failed it attaches what each of them logged. Waiting is done by reading: a
line on stdout, a line of the log, or the broker's own status.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from hr_signals import insist

from headrace import Control
from headrace.errors import HeadraceError

#: How long anything may take before it counts as hanging.
LIMIT_S = 30.0

#: Sockets of a broker, as its configuration names them.
SOCKETS = ("frames", "intake", "results", "workers", "control")

Status = dict[str, Any]


class Running:
    """One running command. Its output is read by threads, so that it never waits for its reader."""

    def __init__(
        self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.arguments = tuple(map(str, arguments))
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._open = set(self._lines)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=cwd,
            env=_environment(env or {}),
            process_group=0,
        )
        self._threads = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._lines
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def stdout(self) -> list[str]:
        """Lines so far."""
        with self._changed:
            return list(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        """Text so far."""
        with self._changed:
            return "\n".join(self._lines["stderr"])

    def read_line(
        self, is_wanted: Callable[[str], bool], stream: str = "stdout", timeout_s: float = LIMIT_S
    ) -> str:
        """Wait for a line and return it; fail when the process ends without it."""

        def found() -> str | None:
            return next(filter(is_wanted, self._lines[stream]), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or stream not in self._open, timeout_s)
            line = found()
        assert line is not None, f"{self.name}: no such line on {stream} within {timeout_s} s: {self.text()}"
        return line

    def read_json(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Return the first object on stdout."""
        value = json.loads(self.read_line(lambda line: line.startswith("{"), timeout_s=timeout_s))
        assert isinstance(value, dict)
        return value

    def read_log(self, event: str, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for a log line of this event and return its values."""
        line = self.read_line(lambda line: f'"event": "{event}"' in line, "stderr", timeout_s)
        value = json.loads(line)
        assert isinstance(value, dict)
        return value

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Wait for the end; return the exit code."""
        code = self.popen.wait(timeout_s)
        for thread in self._threads:
            thread.join(timeout_s)
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = LIMIT_S) -> int:
        """Send a signal and wait for the end; return the exit code."""
        self.popen.send_signal(number)
        return self.wait(timeout_s)

    def insist(self, number: signal.Signals, timeout_s: float = LIMIT_S) -> int:
        """Signal again until it ends (two signals at one moment are one); return the exit code."""
        insist(self.popen, number, timeout_s)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """kill -9, and reap."""
        self.stop(signal.SIGKILL)

    def end(self) -> None:
        """Kill it and its children, whatever state they are in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True) if self.popen.poll() is None else []
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for thread in self._threads:
            thread.join(LIMIT_S)
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()

    @property
    def name(self) -> str:
        return f"{self.arguments[0]} (pid {self.pid})"

    def text(self, last_count: int = 60) -> str:
        """Return how it stands and what it wrote last."""
        code = self.popen.poll()
        state = "running" if code is None else f"ended with {code}"
        with self._changed:
            written = [
                f"  {name}: {line[:500]}"
                for name, lines in self._lines.items()
                for line in lines[-last_count:]
            ]
        return "\n".join([f"headrace {' '.join(self.arguments)} (pid {self.pid}): {state}", *written])

    def _read(self, name: str) -> None:
        for line in getattr(self.popen, name):
            with self._changed:
                self._lines[name].append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._open.discard(name)
            self._changed.notify_all()


class BrokerProcess:
    """A broker that can be killed and started again on the same addresses."""

    def __init__(self, processes: Processes, config: Path) -> None:
        self._processes = processes
        self._config = config
        self.running = processes.start("broker", "--config", config, "--json")
        self.endpoints: dict[str, str] = self.running.read_json()["endpoints"]

    @property
    def address(self) -> str:
        return self.endpoints["frames"]

    @property
    def pid(self) -> int:
        return self.running.pid

    def restart(self) -> None:
        """Start it again where it was, after it ended."""
        env = {f"HEADRACE_BROKER__{name.upper()}": self.endpoints[name] for name in SOCKETS}
        self.running = self._processes.start("broker", "--config", self._config, "--json", env=env)
        again = self.running.read_json()["endpoints"]
        assert [again[name] for name in SOCKETS] == [self.endpoints[name] for name in SOCKETS]

    def status(self) -> Status:
        """Return the broker's status."""
        with Control(self.address) as control:
            return control.status(LIMIT_S)

    def wait_status(self, condition: Callable[[Status], bool], timeout_s: float = LIMIT_S) -> Status:
        """Ask until the condition holds; return the status that it holds for."""
        deadline_s = time.monotonic() + timeout_s
        status: Status = {}
        pause = threading.Event()
        with Control(self.address) as control:
            while time.monotonic() < deadline_s:
                with contextlib.suppress(HeadraceError):  # it may just be restarting
                    status = control.status(max(0.1, deadline_s - time.monotonic()))
                    if condition(status):
                        return status
                pause.wait(0.02)
        raise AssertionError(f"the status did not become right within {timeout_s} s: {status}")

    def wait_workers(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many workers are ready; return their entries."""

        def ready(status: Status) -> list[dict[str, Any]]:
            return [worker for worker in status["workers"] if worker["state"] == "ready"]

        return ready(self.wait_status(lambda status: len(ready(status)) == count))

    def wait_drained(self) -> Status:
        """Wait until no frame is unfinished; return that status, whose account adds up."""
        status = self.wait_status(lambda status: status["account"]["unfinished"] == 0)
        check_account(status)
        return status


class Processes:
    """Starts processes; none is left when its block ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[Running] = []

    def start(
        self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Running:
        """Start ``headrace ARGUMENTS``. ``env`` is added to the environment."""
        running = Running(*arguments, cwd=cwd, env=env)
        self._running.append(running)
        return running

    def broker(self, config: str) -> BrokerProcess:
        """Start a broker with this TOML text and wait until it is ready."""
        path = self.folder / "broker.toml"
        path.write_text(config)
        return BrokerProcess(self, path)

    def worker(self, broker: BrokerProcess, *arguments: object, device: str = "emulated") -> Running:
        """Start a worker and wait until it serves."""
        running = self.start("worker", "--connect", broker.address, "--device", device, *arguments)
        running.read_log("ready")
        return running

    def workers(self, broker: BrokerProcess, count: int) -> list[Running]:
        """Start workers w0, w1 ... and wait until the broker counts them as ready."""
        begun = [
            self.start("worker", "--connect", broker.address, "--device", "emulated", "--id", f"w{number}")
            for number in range(count)
        ]
        broker.wait_workers(count)
        return begun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for running in self._running:
                error.add_note(running.text())
        for running in reversed(self._running):
            running.end()


def check_account(status: Status) -> None:
    """Check that every accepted frame has exactly one end or is still unfinished."""
    account = status["account"]
    ends = sum(account[name] for name in ("ok", "error", "expired", "superseded", "unfinished"))
    assert account["accepted"] == ends, account


def emulated_config(
    *,
    base_ms: float = 5.0,
    per_frame_ms: float = 1.0,
    max_batch_size: int = 4,
    size: int = 32,
    broker: Mapping[str, object] | None = None,
    **sections: Mapping[str, object],
) -> str:
    """Return a configuration of one emulated model with short heartbeats and free ports."""
    tables: dict[str, Mapping[str, object]] = {
        "broker": {"port": 0, "http": False, "heartbeat_ms": 200, "grace_ms": 5_000, **(broker or {})},
        **sections,
    }
    return to_toml(tables) + (
        '\n[[models]]\nname = "m"\n[models.image]\n'
        f"[models.emulated]\nbase_ms = {base_ms}\nper_frame_ms = {per_frame_ms}\n"
        f'[[models.size_classes]]\nname = "small"\nheight = {size}\nwidth = {size}\n'
        f"max_batch_size = {max_batch_size}\n"
    )


def to_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return tables of plain values as TOML (whose strings, numbers and booleans are JSON's)."""
    return "\n".join(
        f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        for name, table in tables.items()
    )


def children_of(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run (a zombie does not)."""

    def is_running(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if is_running(process)]


def elapsed() -> Callable[[], float]:
    """Return a stopwatch that runs from now, in seconds."""
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


@contextlib.contextmanager
def no_broker() -> Iterator[str]:
    """Give an address at which nothing listens and nobody else will."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{unused.getsockname()[1]}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return ours without settings of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    if "HEADRACE_CACHE" in os.environ:
        kept["HEADRACE_CACHE"] = os.environ["HEADRACE_CACHE"]
    return kept | dict(extra)
