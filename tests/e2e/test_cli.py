"""The commands as a person runs them: real processes, an emulated model, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import hr_cli
import hr_models
import numpy as np
import pytest

from headrace.exit_codes import ExitCode

CONFIG = """
[broker]
port = 0
http_port = 0
heartbeat_ms = 200
grace_ms = 3000
[supervisor]
backoff_ms = 50
[[models]]
name = "m"
[models.image]
[models.emulated]
base_ms = 5
per_frame_ms = 1
[[models.size_classes]]
height = 48
width = 64
max_batch_size = 4
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "test.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of twelve small images."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(12):
        cv2.imwrite(str(folder / f"{number}.png"), rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
    return folder


def ready_workers(address: str) -> int:
    done = hr_cli.run("status", "--connect", address, "--json")
    if done.returncode != ExitCode.OK:
        return 0
    return sum(worker["state"] == "ready" for worker in json.loads(done.stdout)["workers"])


def test_up_push_watch_status(config_path: Path, images: Path) -> None:
    """One command serves; others send, see each outcome once, and read an account that adds up."""
    with hr_cli.Process(
        "up", "--config", config_path, "--device", "emulated", "--workers", 2, "--json"
    ) as up:
        address = up.read_json()["endpoints"]["frames"]
        hr_cli.wait_until(lambda: ready_workers(address) == 2)

        pushed = hr_cli.run("push", images, "--stream", "cam-1", "--connect", address, "--fast", "--json")
        watched = hr_cli.run(
            "watch",
            "cam-1",
            "--connect",
            address,
            "--start",
            "earliest",
            "--count",
            12,
            "--seconds",
            10,
            "--json",
        )
        status = json.loads(hr_cli.run("status", "--connect", address, "--json").stdout)
        text = hr_cli.run("status", "--connect", address).stdout
        code = up.stop()

    assert pushed.returncode == ExitCode.OK, pushed.stderr
    summary = json.loads(pushed.stdout)
    assert (summary["sent"], summary["outcomes"], summary["unfinished"]) == (12, {"ok": 12}, 0)
    outcomes = [json.loads(line) for line in watched.stdout.splitlines()]
    assert [outcome["seq"] for outcome in outcomes] == list(range(12))
    assert {outcome["status"] for outcome in outcomes} == {"ok"}
    account = status["account"]
    assert account["accepted"] == account["ok"] == 12
    assert "12 accepted = 12 ok" in text
    assert code == ExitCode.OK
    assert "Traceback" not in up.stderr()


def test_up_brings_a_killed_worker_back(config_path: Path, images: Path) -> None:
    """kill -9 of the only worker: a new one serves the frames."""
    with hr_cli.Process("up", "--config", config_path, "--device", "emulated", "--json") as up:
        ready = up.read_json()
        address = ready["endpoints"]["frames"]
        hr_cli.wait_until(lambda: ready_workers(address) == 1)

        os.kill(ready["pids"]["worker-0"], signal.SIGKILL)
        pushed = hr_cli.run("push", images, "--connect", address, "--fast", "--json")

        assert json.loads(pushed.stdout)["outcomes"] == {"ok": 12}
        assert up.stop() == ExitCode.OK


def test_up_brings_a_killed_broker_back_where_it_was(config_path: Path, images: Path) -> None:
    """kill -9 of the broker: the same address answers again, with a new boot, and serves."""
    with hr_cli.Process("up", "--config", config_path, "--device", "emulated", "--json") as up:
        ready = up.read_json()
        address = ready["endpoints"]["frames"]
        hr_cli.wait_until(lambda: ready_workers(address) == 1)

        os.kill(ready["pids"]["broker"], signal.SIGKILL)
        hr_cli.wait_until(lambda: not hr_cli.is_alive(ready["pids"]["broker"]))
        pushed = hr_cli.run("push", images, "--connect", address, "--fast", "--json")

        assert json.loads(pushed.stdout)["outcomes"] == {"ok": 12}
        assert up.stop() == ExitCode.OK


def test_children_end_with_a_killed_up_and_the_ports_are_free(config_path: Path) -> None:
    """PRC-05: kill -9 of the parent; a new broker binds the same ports within 5 seconds."""
    with hr_cli.Process("up", "--config", config_path, "--device", "emulated", "--json") as up:
        ready = up.read_json()
        up.stop(signal.SIGKILL)
        killed_s = time.monotonic()

        hr_cli.wait_until(lambda: not any(map(hr_cli.is_alive, ready["pids"].values())), 5.0)

    text = "".join(
        f'{name} = "{ready["endpoints"][name]}"\n'
        for name in ("frames", "intake", "results", "workers", "control")
    )
    config_path.write_text(CONFIG.replace("port = 0\n", text, 1))
    with hr_cli.Process("broker", "--config", config_path, "--json") as broker:
        assert broker.read_json()["endpoints"]["frames"] == ready["endpoints"]["frames"]
        assert time.monotonic() - killed_s < 5.0
        broker.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["broker", "up", "watch", "worker"])
def test_idle_processes_end_within_two_seconds(config_path: Path, role: str, number: signal.Signals) -> None:
    """PRC-11: nothing to do is no reason to hang at Ctrl-C or SIGTERM."""
    with hr_cli.Process("broker", "--config", config_path, "--json") as broker:
        address = broker.read_json()["endpoints"]["frames"]
        arguments = {
            "broker": ["broker", "--config", config_path, "--json"],
            "up": ["up", "--config", config_path, "--device", "emulated", "--json"],
            "watch": ["watch", "--connect", address, "--json"],
            "worker": ["worker", "--connect", address, "--device", "emulated"],
        }[role]
        with hr_cli.Process(*arguments) as process:
            if role in {"broker", "up"}:
                process.read_json()
            elif role == "worker":
                hr_cli.wait_until(lambda: ready_workers(address) == 1)
            else:
                hr_cli.wait_until(lambda: "watching all streams" in process.stderr())
            began_s = time.monotonic()
            code = process.stop(number)
            took_s = time.monotonic() - began_s

            assert took_s < 2.0
            assert code == 0 or (role == "watch" and number is signal.SIGTERM and code == -signal.SIGTERM)
        assert broker.stop() == ExitCode.OK


@pytest.fixture
def no_broker() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, never listening: nobody else gets this port
        yield f"tcp://127.0.0.1:{unused.getsockname()[1]}"


def test_no_broker_is_said_in_one_line(images: Path, no_broker: str) -> None:
    """ZMQ-09: where nothing answers, each command ends with 69 and names the address. Each asks for the
    default time of some seconds: all at once."""
    roles = {"push": ["push", images], "watch": ["watch"], "status": ["status"], "bench": ["bench"]}
    with ThreadPoolExecutor(len(roles)) as pool:
        runs = {
            role: pool.submit(hr_cli.run, *arguments, "--connect", no_broker)
            for role, arguments in roles.items()
        }

    for role, run in runs.items():
        done = run.result()
        assert done.returncode == ExitCode.UNAVAILABLE, role
        assert done.stdout == "", role
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("headrace: error: "), role
        assert no_broker in line
        assert "`headrace up`" in line


def test_a_worker_without_a_broker_goes_on_trying(no_broker: str) -> None:
    """Until it is told to end."""
    with hr_cli.Process("worker", "--connect", no_broker, "--device", "emulated") as worker:
        hr_cli.wait_until(lambda: "worker started" in worker.stderr())
        assert worker.stop(signal.SIGINT, 2.0) == ExitCode.OK


def test_a_broker_listens_on_loopback_only(config_path: Path) -> None:
    """SEC-02: with defaults no socket is reachable from elsewhere; wider needs --insecure and warns."""
    with hr_cli.Process("broker", "--config", config_path, "--json") as broker:
        endpoints = broker.read_json()["endpoints"]
        hosts = {urlsplit(value).hostname for value in endpoints.values() if "://" in str(value)}
        assert hosts == {"127.0.0.1"}
        broker.stop()

    refused = hr_cli.run("broker", "--config", config_path, "--host", "0.0.0.0")
    assert refused.returncode == ExitCode.CONFIG
    assert "--insecure" in refused.stderr

    with hr_cli.Process(
        "broker", "--config", config_path, "--host", "0.0.0.0", "--insecure", "--json"
    ) as broker:
        broker.read_json()
        assert "without authentication" in broker.stderr()
        broker.stop()


def test_a_port_in_use_is_named(config_path: Path) -> None:
    """The error names the port; the exit code keeps a supervisor from trying again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        config_path.write_text(CONFIG.replace("port = 0", f'frames = "tcp://127.0.0.1:{port}"', 1))
        done = hr_cli.run("up", "--config", config_path, "--device", "emulated")

    assert done.returncode == ExitCode.CONFIG
    assert str(port) in done.stderr


def test_a_limit_that_cuts_the_handshake_is_refused(config_path: Path) -> None:
    """ZMQ-14: 100 bytes are refused at start with the minimum named."""
    config_path.write_text(CONFIG + "[limits]\nmax_message_bytes = 100\nmax_frame_bytes = 50\n")

    done = hr_cli.run("broker", "--config", config_path)

    assert done.returncode == ExitCode.CONFIG
    assert "limits.max_message_bytes = 100: must be at least 65536" in done.stderr


def test_the_ready_file_holds_the_addresses(config_path: Path, tmp_path: Path) -> None:
    """Scripts without a pipe to stdout read the ports from a file that is whole when it is there."""
    path = tmp_path / "ready.json"
    with hr_cli.Process("broker", "--config", config_path, "--ready-file", path) as broker:
        hr_cli.wait_until(path.exists)
        ready = json.loads(path.read_text())
        assert ready["pid"] == broker.popen.pid
        assert ready["endpoints"]["frames"].startswith("tcp://127.0.0.1:")
        broker.stop()


def test_rejected_frames_are_counted_and_said(config_path: Path, images: Path) -> None:
    """A model that nobody serves: exit code 1, the code and its message once."""
    with hr_cli.Process("up", "--config", config_path, "--device", "emulated", "--json") as up:
        address = up.read_json()["endpoints"]["frames"]
        hr_cli.wait_until(lambda: ready_workers(address) == 1)

        done = hr_cli.run("push", images, "--connect", address, "--fast", "--model", "none", "--json")
        up.stop()

    assert done.returncode == ExitCode.FAILED
    assert json.loads(done.stdout)["rejected"] == {"unknown_model": 12}
    assert "rejected: unknown_model: " in done.stderr


def test_a_closed_pipe_ends_watch_quietly(config_path: Path, images: Path) -> None:
    """`headrace watch | head -1` leaves no traceback."""
    with hr_cli.Process("up", "--config", config_path, "--device", "emulated", "--json") as up:
        address = up.read_json()["endpoints"]["frames"]
        hr_cli.wait_until(lambda: ready_workers(address) == 1)
        hr_cli.run("push", images, "--connect", address, "--fast")

        with hr_cli.Process("watch", "--connect", address, "--start", "earliest", "--json") as watch:
            watch.read_json()
            assert watch.popen.stdout is not None
            watch.popen.stdout.close()
            hr_cli.run("push", images, "--connect", address, "--fast", "--stream", "again")
            assert watch.popen.wait(10) == ExitCode.FAILED
            assert len(watch.stderr().splitlines()) == 1, watch.stderr()
        up.stop()


def test_a_model_file_alone_is_enough(tmp_path: Path, images: Path) -> None:
    """`headrace up --model FILE`: the graph says what it takes; results are the model's own."""
    path = hr_models.write(tmp_path, hr_models.mean_color(height=48, width=64), "mean.onnx")
    arguments = ["--port", 0, "--http-port", 0, "--device", "cpu", "--json"]
    with hr_cli.Process("up", "--model", path, *arguments) as up:
        address = up.read_json()["endpoints"]["frames"]
        hr_cli.wait_until(lambda: ready_workers(address) == 1)

        pushed = hr_cli.run("push", images, "--connect", address, "--fast", "--json")
        watched = hr_cli.run(
            "watch", "--connect", address, "--start", "earliest", "--count", 1, "--seconds", 10, "--json"
        )
        assert up.stop() == ExitCode.OK

    assert json.loads(pushed.stdout)["outcomes"] == {"ok": 12}
    outcome = json.loads(watched.stdout)
    assert (outcome["model"], outcome["size_class"]) == ("mean", "48x64")
    assert outcome["tensors"] == [{"name": "mean", "dtype": "float32", "shape": [3]}]


def test_a_corrupt_model_ends_everything_with_its_own_code(config_path: Path, tmp_path: Path) -> None:
    """PRC-10: no endless restarts; 65 and a line that names the model, and nothing is left running."""
    (tmp_path / "m.onnx").write_bytes(b"no model at all")
    config_path.write_text(CONFIG.replace('name = "m"', 'name = "m"\npath = "m.onnx"'))

    done = hr_cli.run("up", "--config", config_path, "--device", "cpu", "--workers", 2)

    assert done.returncode == ExitCode.MODEL
    assert "not an ONNX model" in done.stderr
    assert "no worker is left" in done.stderr.strip().splitlines()[-1]


def test_up_as_process_one_ends_on_sigterm(config_path: Path) -> None:
    """PRC-04: as process 1 of a container, where unhandled signals are ignored, SIGTERM still drains."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no process namespace")
    command = hr_cli.command("up", "--config", config_path, "--device", "emulated", "--json")
    with subprocess.Popen([*unshare, *command], stdout=subprocess.PIPE, text=True) as outer:
        try:
            assert outer.stdout is not None
            assert json.loads(outer.stdout.readline())["pid"] == 1
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()

            os.kill(int(children[0]), signal.SIGTERM)

            assert outer.wait(10) == ExitCode.OK
        finally:
            outer.kill()


@pytest.mark.parametrize("lines_count", [0, 1, 2])
def test_a_broker_outlives_the_reader_of_its_output(config_path: Path, lines_count: int) -> None:
    """`headrace broker 2>&1 | head -1`: it goes on serving, stops when asked to, and ends with 0."""
    ready_file = config_path.with_name("ready.json")
    broker = subprocess.Popen(
        hr_cli.command("broker", "--config", config_path, "--ready-file", ready_file, "--log-level", "debug"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert broker.stdout is not None
        for _ in range(lines_count):
            assert broker.stdout.readline()
        broker.stdout.close()
        hr_cli.wait_until(ready_file.exists)
        address = json.loads(ready_file.read_text())["endpoints"]["frames"]

        assert ready_workers(address) == 0
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(10) == ExitCode.OK
    finally:
        broker.kill()
        broker.wait()
