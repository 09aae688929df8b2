"""Another model file in the place of one that serves, with everything running: nothing is lost, nothing is
late for long, and one command takes it back."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hr_models
import numpy as np
from hr_processes import LIMIT_S, BrokerProcess, Processes

import headrace
from headrace.clients.records import Missed
from headrace.errors import RequestTimeoutError

IMAGE = np.full((32, 32, 3), 100, np.uint8)

CONFIG = """
[broker]
port = 0
http = false
heartbeat_ms = 200
grace_ms = 5000

[[models]]
name = "mean"
path = "{path}"

[models.image]

[[models.size_classes]]
name = "small"
height = 32
width = 32
max_batch_size = 8
"""


def reload(processes: Processes, broker: BrokerProcess, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and what it printed."""
    running = processes.start("reload", "--connect", broker.address, "--json", *arguments)
    code = running.wait(LIMIT_S)
    return code, json.loads("".join(running.stdout) or "{}")


class Stream:
    """Frames at a steady rate from a thread, and every outcome of them."""

    def __init__(self, address: str) -> None:
        self.outcomes: list[headrace.Outcome] = []
        self.missed: list[Missed] = []
        self.pushed_count = 0
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._push), threading.Thread(target=self._read)]
        self._is_flushed = threading.Event()
        self._subscribed = threading.Event()

    def _push(self) -> None:
        self._subscribed.wait(LIMIT_S)
        with headrace.Producer(self._address, max_unfinished_frames=1_000) as producer:
            while not self._stop.wait(0.005):
                producer.push(IMAGE, stream="cam", timeout=LIMIT_S)
                self.pushed_count += 1
            producer.flush(LIMIT_S)
        self._is_flushed.set()

    def _read(self) -> None:
        with headrace.Subscriber(self._address, streams=["cam"]) as subscriber:
            self._subscribed.set()
            while not (self._is_flushed.is_set() and len(self.outcomes) >= self.pushed_count):
                with contextlib.suppress(RequestTimeoutError):
                    item = subscriber.get(timeout=0.2)
                    (self.missed if isinstance(item, Missed) else self.outcomes).append(item)
                if self.missed:
                    return

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    @contextmanager
    def running(self) -> Iterator[Stream]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop()

    def versions(self) -> list[str]:
        """The versions in the order in which they answered, each once in a row."""
        found: list[str] = []
        for outcome in self.outcomes:
            if not found or found[-1] != outcome.version:
                found.append(outcome.version)
        return found


def test_a_model_is_exchanged_and_taken_back_under_load(tmp_path: Path) -> None:
    """No frame is lost or answered twice, the new version answers after the switch, the old one again after
    the rollback; a worker that joins in between serves what the others do."""
    old = hr_models.write(tmp_path, hr_models.mean_color(), "old.onnx")
    new = hr_models.write(tmp_path, hr_models.mean_color_plus(0.25), "new.onnx")
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG.format(path=old))
        processes.worker(broker, "--id", "w0", device="cpu")
        with Stream(broker.address).running() as stream:
            code, refused = reload(processes, broker, "--path", new, "--tolerance", "0.1", "--frames", "8")
            assert (code, refused["reload"]["phase"]) == (1, "failed")
            assert refused["reload"]["code"] == "reload_differs"
            assert refused["live_version"] == "1"

            code, done = reload(processes, broker, "--path", new, "--tolerance", "0.5", "--frames", "8")
            assert (code, done["reload"]["phase"]) == (0, "live")
            assert done["reload"]["frames"] >= 8
            assert abs(done["reload"]["max_abs"] - 0.25) < 1e-3
            assert done["kept_version"] == "1"
            new_version = done["live_version"]

            processes.worker(broker, "--id", "w1", device="cpu")
            broker.wait_status(lambda status: status["models"][0]["workers"] == 2)
            code, back = reload(processes, broker, "--rollback")
            assert (code, back["serving"]) == (0, "1")
        status = broker.wait_drained()

    assert [outcome.seq for outcome in stream.outcomes] == list(range(stream.pushed_count))
    assert not stream.missed
    assert {outcome.status for outcome in stream.outcomes} == {"ok"}
    # Nobody waits for a model to be loaded; `python -m benchmarks reload` has the figures.
    assert max(outcome.timing.published_us or 0 for outcome in stream.outcomes) < 3_000_000
    assert stream.versions()[0] == stream.versions()[-1] == "1"
    assert {outcome.version for outcome in stream.outcomes} == {"1", new_version}
    assert status["account"]["accepted"] == status["account"]["ok"] == stream.pushed_count


def test_a_worker_killed_by_the_new_version_ends_the_reload(tmp_path: Path) -> None:
    """kill -9 while it loads: the old version serves on, its reason is told, and no frame is lost."""
    old = hr_models.write(tmp_path, hr_models.mean_color(), "old.onnx")
    new = hr_models.write(tmp_path, hr_models.mean_color_plus(0.25), "new.onnx")
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG.format(path=old))
        doomed = processes.worker(broker, "--id", "w0", device="cpu")
        processes.worker(broker, "--id", "w1", device="cpu")
        with Stream(broker.address).running() as stream:
            command = processes.start(
                "reload", "--connect", broker.address, "--json", "--path", new, "--frames", "100000"
            )
            broker.wait_status(
                lambda status: (status["models"][0]["reload"] or {}).get("phase") == "comparing"
            )
            doomed.kill()
            code = command.wait(LIMIT_S)
        status = broker.wait_drained()

    ended = json.loads("".join(command.stdout))
    assert (code, ended["reload"]["phase"], ended["reload"]["code"]) == (1, "failed", "worker_lost")
    assert "worker w0 was lost after it was asked to load it" in ended["reload"]["message"]
    assert [outcome.seq for outcome in stream.outcomes] == list(range(stream.pushed_count))
    assert stream.versions() == ["1"]
    assert status["account"]["ok"] == stream.pushed_count


def test_a_restarted_broker_serves_its_configuration(tmp_path: Path) -> None:
    """What was reloaded is forgotten; the worker that has both versions serves the configured one at once."""
    old = hr_models.write(tmp_path, hr_models.mean_color(), "old.onnx")
    new = hr_models.write(tmp_path, hr_models.mean_color_plus(0.25), "new.onnx")
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG.format(path=old))
        processes.worker(broker, "--id", "w0", device="cpu")
        code, _ = reload(processes, broker, "--path", new, "--frames", "0")
        broker.running.kill()
        broker.restart()
        broker.wait_workers(1)
        with headrace.Client(broker.address) as client:
            outcome = client.infer(IMAGE, timeout=LIMIT_S)
        _, shown = reload(processes, broker, "--status")

    assert code == 0
    assert outcome.version == "1"
    assert shown == {"models": []}
