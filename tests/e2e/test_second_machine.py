"""A worker on a bare machine: no model, no configuration, only the broker's address."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_processes import LIMIT_S, Processes, to_toml

import headrace
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Status

#: More than one chunk of a fetch (1 MiB), so that a file is really put together.
WEIGHTS_BYTES = 3_300_000


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model that gives the mean colour, with ballast that makes it larger than one chunk."""
    folder = tmp_path / "broker-machine"
    folder.mkdir()
    model = hr_models.mean_color(height=48, width=64)
    model.doc_string = "x" * WEIGHTS_BYTES
    return hr_models.write(folder, model, "mean.onnx")


def config_of(path: Path) -> str:
    return (
        to_toml({"broker": {"port": 0, "http": False, "heartbeat_ms": 200}})
        + f'\n[[models]]\nname = "mean"\npath = {json.dumps(str(path))}\n[models.image]\n'
    )


def test_a_bare_worker_fetches_its_model_and_serves(tmp_path: Path, model_path: Path) -> None:
    """Must-show 5: empty cache, other folder, no configuration: the file comes by its sha256. Nothing else is
    written, not even by ONNX Runtime, which would otherwise report its use and keep a device id."""
    sha256 = hashlib.sha256(model_path.read_bytes()).hexdigest()
    elsewhere, cache = tmp_path / "elsewhere", tmp_path / "cache"
    elsewhere.mkdir()
    with Processes(tmp_path) as processes:
        broker = processes.broker(config_of(model_path))
        worker = processes.start(
            "worker",
            "--connect",
            broker.address,
            cwd=elsewhere,
            env={"HEADRACE_CACHE": str(cache), "HOME": str(elsewhere)},
        )
        worker.read_log("ready")
        assert worker.read_log("fetching model file")["sha256"] == sha256
        image = np.full((48, 64, 3), 77, np.uint8)
        with headrace.Client(broker.address) as client:
            outcome = client.infer(image, timeout=LIMIT_S)
        assert worker.stop() == ExitCode.OK

    assert outcome.status is Status.OK
    np.testing.assert_allclose(headrace.tensors_of(outcome)["mean"], [77.0, 77.0, 77.0], rtol=1e-5)
    cached = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
    assert [path.name for path in cached] == [sha256]
    assert hashlib.sha256(cached[0].read_bytes()).hexdigest() == sha256
    assert list(elsewhere.iterdir()) == []  # the worker's home and working folder


def test_a_worker_that_has_the_file_fetches_nothing(tmp_path: Path, model_path: Path) -> None:
    """The second start on the same machine uses the cache; a damaged file in it is fetched again."""
    env = {"HEADRACE_CACHE": str(tmp_path / "cache")}
    with Processes(tmp_path) as processes:
        broker = processes.broker(config_of(model_path))
        logs = []
        for _ in range(3):
            worker = processes.start("worker", "--connect", broker.address, "--device", "cpu", env=env)
            worker.read_log("ready")
            worker.stop()
            logs.append(worker.stderr)
            if len(logs) == 2:
                (cached,) = (path for path in (tmp_path / "cache").rglob("*") if path.stat().st_size > 1e6)
                cached.write_bytes(cached.read_bytes()[:-1] + b"!")

    assert ["fetching model file" in log for log in logs] == [True, False, True]
    assert "cached model file is damaged" in logs[2]


def test_two_bare_workers_share_one_fetch(tmp_path: Path, model_path: Path) -> None:
    """Started at the same moment with the same empty cache, one fetches and both serve."""
    env = {"HEADRACE_CACHE": str(tmp_path / "cache")}
    with Processes(tmp_path) as processes:
        broker = processes.broker(config_of(model_path))
        workers = [
            processes.start("worker", "--connect", broker.address, "--device", "cpu", env=env)
            for _ in range(2)
        ]
        broker.wait_workers(2)

        assert sum("fetching model file" in worker.stderr for worker in workers) == 1


def test_a_worker_started_before_its_broker_serves_once_it_is_there(tmp_path: Path, model_path: Path) -> None:
    """The order in which machines are switched on does not matter."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(config_of(model_path))
        broker.running.stop()
        worker = processes.start(
            "worker", "--connect", broker.address, env={"HEADRACE_CACHE": str(tmp_path / "cache")}
        )
        worker.read_log("broker not reached")
        broker.restart()

        broker.wait_workers(1)
