"""Start a broker and its workers as processes of this machine and look after them: ``headrace up``.

What to do is decided by ``supervision``; here processes are started, watched and signalled. Children get
the whole configuration on their stdin (``--config -``), so that flags, environment and relative paths
mean the same to all of them. They run in process groups of their own: Ctrl-C reaches the supervisor
alone, which then stops them in the right order; they end by themselves when the supervisor is gone.

Threads: one owns all decisions and starts all processes (the kernel ties a child's parent-death signal to
the thread that started it, so that thread must live as long as they do); one per process waits for its
end; one reads the broker's stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self, assert_never
from urllib.parse import urlsplit

import structlog

from headrace import config, gpus, supervision
from headrace.addresses import reachable
from headrace.config import LoadedConfig
from headrace.config_models import Section
from headrace.config_schema import Config
from headrace.errors import HeadraceError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Endpoints
from headrace.supervision import BROKER, Supervision

log = structlog.get_logger()


class SupervisorError(HeadraceError):
    """The processes could not be started, or did not end well; ``exit_code`` is the one to end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the broker's stdout, from the process with this pid."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class _Exit:
    """The process with this pid has ended."""

    name: str
    pid: int
    code: int


class Supervisor:
    """A broker and N workers. ``start`` returns when the broker is ready; ``stop`` when all have ended.

    Usable from any thread. As a context manager it starts on entry and stops on exit.
    """

    def __init__(
        self, loaded: LoadedConfig, *, worker_count: int | None = None, log_to: Path | None = None
    ) -> None:
        """Plan the processes. ``worker_count`` overrides worker.count (None: one per visible GPU, or one);
        ``log_to`` is a file that gets the children's stderr instead of ours.

        Raises ConfigError when a model file is missing."""
        original = loaded.with_absolute_paths()
        self._gpus = gpus.visible_gpus() if original.worker.device in {"auto", "cuda"} else []
        count = worker_count or original.worker.count or len(self._gpus) or 1
        self._config = _changed(original, "worker", count=count)
        self._rules = supervision.Rules.from_config(self._config, count)
        self._supervision = Supervision(self._rules)
        self._log_to = log_to
        self._events: queue.SimpleQueue[supervision.Event | _Line | _Exit] = queue.SimpleQueue()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._endpoints: Endpoints | None = None
        self._is_settled = threading.Event()  # ready for the first time, or finished before that
        self._finish: supervision.Finish | None = None
        self._is_stop_asked = False
        self._thread = threading.Thread(target=self._run, name="headrace-supervisor", daemon=True)

    @property
    def worker_count(self) -> int:
        return self._rules.worker_count

    @property
    def endpoints(self) -> Endpoints:
        """The broker's addresses. Raises SupervisorError before it was ready."""
        if self._endpoints is None:
            raise SupervisorError("the broker is not ready", ExitCode.FAILED)
        return self._endpoints

    @property
    def pids(self) -> dict[str, int]:
        """Name ("broker", "worker-0" ...) to pid of what runs now."""
        return {name: process.pid for name, process in list(self._processes.items())}

    @property
    def reason(self) -> str:
        """Why everything ended, when that was not asked for; else empty."""
        return self._finish.reason if self._finish else ""

    def start(self) -> Endpoints:
        """Start everything; return the broker's addresses once it is ready. Workers may still be loading.

        Raises SupervisorError with the broker's exit code when it ended instead."""
        self._thread.start()
        try:
            self._is_settled.wait()
        except BaseException:
            self.kill()  # interrupted: nobody will be there to stop what has been started
            raise
        if self._endpoints is None:
            self.wait()
            raise SupervisorError(self.reason or "stopped before the broker was ready", self._exit_code())
        return self._endpoints

    def request_stop(self) -> None:
        """Ask for the end without waiting for it; the second time, kill. Safe in a signal handler."""
        self._is_stop_asked = True
        self._events.put(supervision.StopAsked())

    def kill(self) -> None:
        """End everything at once, without waiting for it. Safe in a signal handler."""
        self._events.put(supervision.KillAsked())

    def stop(self) -> int:
        """Drain and end everything; return the exit code. Idempotent."""
        if not self._is_stop_asked:
            self.request_stop()
        self.wait()
        return self._exit_code()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until everything has ended; return the exit code, None when the time was over first."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return None if self._thread.is_alive() else self._exit_code()

    def _exit_code(self) -> int:
        return self._finish.code if self._finish else int(ExitCode.INTERNAL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finish:
            self.stop()

    # -- the supervisor's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._tell(supervision.Begun())
            while self._finish is None:
                self._take(self._next_event())
        except Exception:
            # A bug of ours must not leave children behind that nobody looks after.
            log.critical("supervisor failed", exc_info=True)
            for process in self._processes.values():
                process.kill()
        finally:
            self._is_settled.set()

    def _next_event(self) -> supervision.Event | _Line | _Exit:
        wake_ns = self._supervision.next_wakeup_ns()
        timeout_s = None if wake_ns is None else max(0.0, (wake_ns - time.monotonic_ns()) / 1e9)
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return supervision.TimePassed()

    def _take(self, event: supervision.Event | _Line | _Exit) -> None:
        match event:
            case _Line():
                self._read_line(event)
            case _Exit():
                process = self._processes.get(event.name)
                if process is not None and process.pid == event.pid:
                    del self._processes[event.name]
                    self._tell(supervision.Ended(event.name, event.code))
            case _:
                self._tell(event)

    def _tell(self, event: supervision.Event) -> None:
        for action in self._supervision.handle(event, time.monotonic_ns()):
            match action:
                case supervision.Start():
                    self._start_process(action.name)
                case supervision.Terminate():
                    self._signal(action.name, signal.SIGTERM)
                case supervision.Kill():
                    self._signal(action.name, signal.SIGKILL)
                case supervision.Say():
                    getattr(log, action.level)(action.event, process=action.name, **action.values)
                case supervision.Finish():
                    self._finish = action
                case _:
                    assert_never(action)

    def _read_line(self, line: _Line) -> None:
        broker = self._processes.get(BROKER)
        endpoints = _endpoints_of(line.text)
        if endpoints is None or broker is None or broker.pid != line.pid:
            return
        if self._endpoints is None:
            # A broker started again must be found where the first one was.
            self._config = _pinned(self._config, endpoints)
        self._endpoints = endpoints
        self._tell(supervision.BrokerReady())
        self._is_settled.set()

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None:
            process.send_signal(number)

    # -- processes ---------------------------------------------------------------------------------

    def _start_process(self, name: str) -> None:
        is_broker = name == BROKER
        with _opened(self._log_to) as stderr:
            process = subprocess.Popen(
                self._command(name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_broker else subprocess.DEVNULL,
                stderr=stderr,
                env=self._environment(name),
                process_group=0,
            )
        self._processes[name] = process
        log.info("process started", process=name, pid=process.pid)
        _hand_over(process.stdin, config.dump(self._config_for(name)))
        if process.stdout is not None:
            self._watch(f"{name}-stdout", lambda: self._read_stdout(process))
        self._watch(f"{name}-end", lambda: self._events.put(_Exit(name, process.pid, process.wait())))

    def _command(self, name: str) -> list[str]:
        # -P: a folder named headrace in the current one must not stand in for the installed package.
        command = [sys.executable, "-P", "-m", "headrace", "broker" if name == BROKER else "worker"]
        command += ["--config", "-", "--parent-pid", str(os.getpid())]
        return [*command, "--json"] if name == BROKER else command

    def _config_for(self, name: str) -> Config:
        if name == BROKER:
            return self._config
        address = reachable(self.endpoints.workers, "127.0.0.1")
        # Models and limits come from the broker.
        worker = self._config.worker.model_copy(update={"connect": address})
        return Config(worker=worker, log=self._config.log)

    def _environment(self, name: str) -> dict[str, str]:
        """Return ours without the overrides that are in the configuration already."""
        keep = set(config.OTHER_VARIABLES) - {"HEADRACE_CONFIG"}
        environment = {
            variable: value
            for variable, value in os.environ.items()
            if not variable.startswith(config.ENVIRONMENT_PREFIX) or variable in keep
        }
        if name != BROKER and self._gpus:
            index = int(name.rpartition("-")[2])
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[index % len(self._gpus)]
        return environment

    def _watch(self, name: str, body: Callable[[], None]) -> None:
        threading.Thread(target=body, name=f"headrace-{name}", daemon=True).start()

    def _read_stdout(self, process: subprocess.Popen[bytes]) -> None:
        with process.stdout or io.BytesIO() as lines:
            for line in lines:
                self._events.put(_Line(process.pid, line.decode(errors="replace")))


def _endpoints_of(line: str) -> Endpoints | None:
    """Read the broker's ready line; None for any other."""
    try:
        value = json.loads(line)
        return Endpoints(**value["endpoints"]) if value.get("event") == "ready" else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _changed(whole: Config, section: str, **values: object) -> Config:
    table: Section = getattr(whole, section)
    return whole.model_copy(update={section: table.model_copy(update=values)})


def _pinned(whole: Config, endpoints: Endpoints) -> Config:
    names = ("frames", "intake", "results", "workers", "control")
    addresses: dict[str, object] = {name: getattr(endpoints, name) for name in names}
    if endpoints.http:
        addresses["http_port"] = urlsplit(endpoints.http).port
    return _changed(whole, "broker", **addresses)


def _hand_over(stdin: IO[bytes] | None, text: str) -> None:
    # A child that died before it read is reported by its exit code.
    with contextlib.suppress(BrokenPipeError), stdin or io.BytesIO() as pipe:
        pipe.write(text.encode())


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes] | None]:
    if path is None:
        yield None
    else:
        with path.open("ab") as file:
            yield file
