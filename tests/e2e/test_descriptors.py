"""A broker that may open few files: it runs short of them, says so, and serves whom it has."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import hr_faults as hf
import numpy as np
import pytest
from hr_clients import wait_for
from hr_processes import LIMIT_S, Processes, check_account, emulated_config

import headrace
from headrace.errors import HeadraceError
from headrace.exit_codes import ExitCode

#: An idle broker has some 40 open.
LIMIT = 104

#: Of the smallest size that goes by shared memory.
FRAME = np.zeros((64, 64, 3), np.uint8)
SHM_BYTES = 256 * 1024


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def broker(tmp_path: Path, shm: Path) -> Iterator[subprocess.Popen[str]]:
    """A broker whose hard limit is LIMIT. Its journal is on: a commit must not need a descriptor either."""
    config = tmp_path / "short.toml"
    journal = str(tmp_path / "journal")
    config.write_text(
        emulated_config(size=64, base_ms=1, broker={"journal": journal}, shm={"folder": str(shm)})
    )
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(
            [
                *("sh", "-c", f'ulimit -Sn {LIMIT // 2} && ulimit -Hn {LIMIT} && exec "$@"', "sh"),
                *(sys.executable, "-P", "-m", "headrace", "broker", "--config", str(config), "--json"),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        yield process
        process.kill()


def test_a_broker_short_of_descriptors_serves_whom_it_has(
    broker: subprocess.Popen[str], tmp_path: Path, shm: Path
) -> None:
    """First arenas are refused, then producers; a flood of connections takes the last descriptor; then all is
    as before."""
    assert broker.stdout is not None
    endpoints = json.loads(broker.stdout.readline())["endpoints"]
    address = endpoints["frames"]
    assert resource.prlimit(broker.pid, resource.RLIMIT_NOFILE) == (LIMIT, LIMIT)
    with (
        Processes(tmp_path) as processes,
        headrace.Control(address) as control,
        headrace.Subscriber(address) as subscriber,
        contextlib.ExitStack() as clients,
    ):
        folder = {"HEADRACE_SHM__FOLDER": str(shm)}
        worker = processes.start("worker", "--connect", address, "--device", "emulated", env=folder)
        worker.read_log("ready")

        def producer() -> headrace.Producer:
            made = clients.enter_context(
                headrace.Producer(address, lane="auto", shm_bytes=SHM_BYTES, shm_folder=shm)
            )
            made.wait_connected(3.0)
            return made

        producers: list[headrace.Producer] = []
        refusal = ""
        while not refusal:
            try:
                producers.append(producer())
            except HeadraceError as error:
                refusal = str(error)
        assert "ulimit -n" in refusal
        assert len(producers) < LIMIT

        def push_by_all() -> int:
            for number, each in enumerate(producers):
                each.push(FRAME, stream=f"s{number}", timeout=LIMIT_S)
            for _ in producers:
                outcome = subscriber.get(LIMIT_S)
                assert isinstance(outcome, headrace.Outcome)
                assert outcome.status == "ok", outcome
            return sum(each.account.by_lane.get("inline", 0) > 0 for each in producers)

        inline_count = push_by_all()
        assert 0 < inline_count < len(producers)

        control.status(LIMIT_S)  # from here on its connection is there
        host, port = urlsplit(address).hostname, urlsplit(address).port
        flood = [clients.enter_context(socket.create_connection((host, port))) for _ in range(LIMIT)]
        wait_for(lambda: hf.descriptor_count(broker.pid) == LIMIT)
        assert control.status(LIMIT_S)["account"]["unfinished"] == 0
        push_by_all()
        for connection in flood:
            connection.close()
        clients.close()

        wait_for(lambda: hf.descriptor_count(broker.pid) < LIMIT // 2)
        with headrace.Client(address) as client:
            assert client.infer(FRAME, timeout=LIMIT_S).status == "ok"
        status = control.status(LIMIT_S)
        check_account(status)
        assert status["account"]["unfinished"] == 0
    broker.terminate()
    assert broker.wait(LIMIT_S) == ExitCode.OK
    written = (tmp_path / "stderr").read_text()
    assert "arena not usable" in written
    assert "producer refused" in written
    assert "Traceback" not in written
