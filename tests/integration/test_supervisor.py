"""The supervisor on real processes: small stand-ins for broker and worker, real signals and pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import config
from headrace.config import LoadedConfig
from headrace.exit_codes import ExitCode
from headrace.supervisor import Supervisor, SupervisorError

#: A process that notes what it was given and then lives until a signal. {ready} is printed by the broker.
STAND_IN = """
import json, os, signal, sys, time
name, folder, ready, code = sys.argv[1:5]
with open(f"{folder}/{name}.{os.getpid()}", "w") as file:
    json.dump({"config": json.loads(sys.stdin.read()), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
               "leaked": [key for key in os.environ if key.startswith("HEADRACE_BROKER")],
               "group": os.getpgrp() == os.getpid()}, file)
if code != "-":
    sys.exit(int(code))
def stop(number, frame):
    with open(f"{folder}/order", "a") as file:
        file.write(name + chr(10))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop if name != "worker-9" else signal.SIG_IGN)
if ready:
    print(ready, flush=True)
while True:
    signal.pause()
"""

ENDPOINTS = {
    "boot": 1,
    "frames": "tcp://0.0.0.0:1001",
    "intake": "tcp://0.0.0.0:1002",
    "results": "tcp://0.0.0.0:1003",
    "workers": "tcp://0.0.0.0:1004",
    "control": "tcp://0.0.0.0:1005",
    "http": "http://0.0.0.0:1006",
    "host_key": "h",
}
READY = json.dumps({"event": "ready", "pid": 1, "endpoints": ENDPOINTS})

TIME_LIMIT_S = 20.0


class StandIns(Supervisor):
    """A supervisor of stand-ins; ``codes`` maps a process to the exit code it ends with at once."""

    def __init__(
        self,
        loaded: LoadedConfig,
        folder: Path,
        *,
        ready: str = READY,
        codes: dict[str, str] | None = None,
        workers: int = 2,
    ) -> None:
        super().__init__(loaded, worker_count=workers)
        self.folder = folder
        self.ready = ready
        self.codes = codes or {}

    def _command(self, name: str) -> list[str]:
        ready = self.ready if name == "broker" else ""
        return [sys.executable, "-c", STAND_IN, name, str(self.folder), ready, self.codes.get(name, "-")]

    def notes(self, name: str) -> list[dict[str, object]]:
        """Return what each life of a process noted, oldest first."""
        paths = sorted(self.folder.glob(f"{name}.*"), key=lambda path: path.stat().st_mtime_ns)
        return [json.loads(path.read_text()) for path in paths if path.read_text()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.01)


@pytest.fixture
def loaded() -> LoadedConfig:
    text = """
    [broker]
    port = 0
    http_port = 0
    [supervisor]
    backoff_ms = 1
    backoff_max_ms = 2
    max_quick_failures = 3
    [[models]]
    name = "m"
    [models.emulated]
    base_ms = 1
    per_frame_ms = 1
    """
    return config.load("f.toml", text=text, environment={})


def test_broker_then_workers_and_the_same_in_reverse(loaded: LoadedConfig, tmp_path: Path) -> None:
    """Workers get the address of the ready broker; stopping drains the broker before the workers."""
    with StandIns(loaded, tmp_path) as supervisor:
        assert supervisor.endpoints.frames == "tcp://0.0.0.0:1001"
        wait_until(lambda: len(supervisor.notes("worker-0")) == 1 and len(supervisor.notes("worker-1")) == 1)
        worker = supervisor.notes("worker-0")[0]
        assert set(supervisor.pids) == {"broker", "worker-0", "worker-1"}
        _wait_for_handlers(supervisor)

    assert worker["config"] == {"worker": {"connect": "tcp://127.0.0.1:1004", "count": 2}}
    assert worker["group"] is True
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "broker"
    assert supervisor.pids == {}


def test_each_worker_sees_its_own_gpu_alone(
    loaded: LoadedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCL-07: a process for each GPU, and no other device is visible in it, so none can be touched."""
    monkeypatch.setattr("headrace.gpus.visible_gpus", lambda: ["2", "GPU-5af1", "7"])
    with StandIns(loaded, tmp_path, workers=3) as supervisor:
        names = [f"worker-{index}" for index in range(3)]
        wait_until(lambda: all(len(supervisor.notes(name)) == 1 for name in names))
        seen = [supervisor.notes(name)[0]["gpus"] for name in names]
        _wait_for_handlers(supervisor)

    assert seen == ["2", "GPU-5af1", "7"]


def _wait_for_handlers(supervisor: Supervisor) -> None:
    """Wait until every stand-in catches SIGTERM: what ends by it unprepared leaves no note."""
    for pid in supervisor.pids.values():
        wait_until(lambda pid=pid: _catches_sigterm(pid))


def _catches_sigterm(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def test_a_killed_worker_comes_back(loaded: LoadedConfig, tmp_path: Path) -> None:
    """kill -9 of one process starts another life of it and of no other."""
    with StandIns(loaded, tmp_path) as supervisor:
        wait_until(lambda: len(supervisor.notes("worker-0")) == 1 and len(supervisor.notes("worker-1")) == 1)

        os.kill(supervisor.pids["worker-1"], signal.SIGKILL)

        wait_until(lambda: len(supervisor.notes("worker-1")) == 2)
        assert len(supervisor.notes("worker-0")) == 1
        assert len(supervisor.notes("broker")) == 1


def test_a_killed_broker_comes_back_at_the_same_addresses(loaded: LoadedConfig, tmp_path: Path) -> None:
    """Ports that were free ports the first time are kept, so that peers find the new one."""
    with StandIns(loaded, tmp_path) as supervisor:
        os.kill(supervisor.pids["broker"], signal.SIGKILL)

        wait_until(lambda: len(supervisor.notes("broker")) == 2)
        first, second = supervisor.notes("broker")

    assert isinstance(first["config"], dict)
    assert isinstance(second["config"], dict)
    assert "frames" not in first["config"]["broker"]
    assert second["config"]["broker"]["frames"] == "tcp://0.0.0.0:1001"
    assert second["config"]["broker"]["http_port"] == 1006


def test_a_broker_that_refuses_its_configuration_ends_the_start(loaded: LoadedConfig, tmp_path: Path) -> None:
    """start() raises with the broker's own exit code and nothing is left running."""
    supervisor = StandIns(loaded, tmp_path, codes={"broker": "78"})

    with pytest.raises(SupervisorError, match="78") as caught:
        supervisor.start()

    assert caught.value.exit_code == ExitCode.CONFIG
    assert supervisor.pids == {}


def test_workers_that_cannot_serve_the_model_end_everything(loaded: LoadedConfig, tmp_path: Path) -> None:
    """PRC-10: exit code 65 is not tried again; with no worker left the whole ends with that code."""
    supervisor = StandIns(loaded, tmp_path, codes={"worker-0": "65", "worker-1": "65"})
    supervisor.start()

    assert supervisor.wait(TIME_LIMIT_S) == ExitCode.MODEL
    assert "65" in supervisor.reason
    assert len(supervisor.notes("worker-0")) == 1


def test_a_worker_that_fails_at_once_is_given_up_after_the_stated_number(
    loaded: LoadedConfig, tmp_path: Path
) -> None:
    """PRC-10: three quick failures, three lives, no more."""
    supervisor = StandIns(loaded, tmp_path, codes={"worker-0": "1"}, workers=1)
    supervisor.start()

    assert supervisor.wait(TIME_LIMIT_S) == ExitCode.FAILED
    assert len(supervisor.notes("worker-0")) == 3


def test_kill_ends_what_ignores_a_request_to_stop(loaded: LoadedConfig, tmp_path: Path) -> None:
    """A worker that ignores SIGTERM does not hold up the end."""
    supervisor = StandIns(loaded, tmp_path, workers=10)
    supervisor.start()
    wait_until(lambda: len(supervisor.notes("worker-9")) == 1)

    supervisor.request_stop()
    supervisor.kill()

    assert supervisor.wait(TIME_LIMIT_S) == ExitCode.FAILED
    assert supervisor.pids == {}


def test_noise_on_the_brokers_stdout_is_no_ready_line(loaded: LoadedConfig, tmp_path: Path) -> None:
    """Only the ready object counts; what else is printed is skipped."""
    noise = "hello\n[1]\n{}\n" + json.dumps({"event": "ready", "endpoints": {"x": 1}}) + "\n" + READY

    with StandIns(loaded, tmp_path, ready=noise) as supervisor:
        assert supervisor.endpoints.control == "tcp://0.0.0.0:1005"


def test_overrides_in_the_environment_are_not_applied_twice(
    loaded: LoadedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the configuration handed over is the truth; a variable would undo the kept ports."""
    monkeypatch.setenv("HEADRACE_BROKER__PORT", "0")

    with StandIns(loaded, tmp_path) as supervisor:
        wait_until(lambda: len(supervisor.notes("broker")) == 1)
        assert supervisor.notes("broker")[0]["leaked"] == []


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """PRC-05: kill -9 of the parent; a child made with end_with_parent is gone within 5 seconds."""
    child = (
        "import os, sys, signal\n"
        "from headrace.orphans import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"  # the worst case: SIGTERM alone does not end it
        "print(os.getpid(), flush=True)\n"
        "while True: signal.pause()\n"
    )
    parent = (
        "import os, subprocess, sys, signal\n"
        "subprocess.Popen([sys.executable, '-P', '-c', sys.argv[1], str(os.getpid())])\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())

    process.kill()
    process.wait()

    with process.stdout:
        process.stdout.read()  # ends when the last process that holds the pipe is gone
    wait_until(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
