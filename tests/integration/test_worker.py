"""A worker on real sockets and in real processes, with the broker's side played by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import hr_models
import numpy as np
import psutil
import pytest
from hr_engine import GatedEngine
from hr_fake_broker import TIMEOUT_S, FakeBroker
from hr_signals import insist
from hr_worker import batch_of, raw_frame

from headrace.errors import Code, ConfigError, DeviceError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Batch,
    Discover,
    Done,
    Goodbye,
    Limits,
    ModelSpec,
    Refused,
    Setup,
    SizeClassSpec,
    WorkerHello,
)
from headrace.workers.devices import Device, choose_device, why_no_cuda
from headrace.workers.process import WorkerSettings, make_shell

SMALL = SizeClassSpec("small", 8, 8, 8)


def emulated(base_ms: float = 0.1) -> ModelSpec:
    return hr_models.emulated_spec(SMALL, base_ms=base_ms, per_frame_ms=0.0)


def numbered(number: int, *values: int) -> Batch:
    return batch_of(*(raw_frame(np.full((8, 8, 3), value, np.uint8)) for value in values), number=number)


def firsts(done: Done) -> list[float]:
    return [float(np.frombuffer(result.payloads[0], "<f4")[0]) for result in done.results]


class WorkerThread:
    """A worker in a thread of the test. Leaving the block stops it and checks that it ended with 0."""

    def __init__(self, folder: Path, address: str, device: Device | None = None, **fields: object) -> None:
        settings = WorkerSettings(address, "emulated", cache_dir=str(folder / "cache"), **fields)  # type: ignore[arg-type]
        self.shell = make_shell(settings, device)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        self.code = self.shell.run()

    def join(self) -> int:
        self._thread.join(TIMEOUT_S)
        assert self.code is not None, "the worker did not end in time"
        return self.code

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shell.request_stop()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    with FakeBroker(tmp_path, emulated()) as broker:
        yield broker


# -- in a thread --------------------------------------------------------------------------------------


def test_it_finds_the_broker_gets_ready_and_serves(broker: FakeBroker, tmp_path: Path) -> None:
    with WorkerThread(tmp_path, broker.address, worker_id="w1", slots=3):
        ready = broker.welcome()
        done = broker.run(numbered(1, 10, 20))

    assert (ready.worker, ready.slots) == ("w1", 3)
    assert ready.models[0].notes[0].startswith("emulated")
    assert firsts(done) == [10, 20]


def test_models_come_from_the_broker_by_hash_once(tmp_path: Path) -> None:
    """A worker with no file and no configuration serves; the next one finds the file in the cache."""
    spec, paths = hr_models.image_spec(tmp_path, hr_models.mean_color(), SMALL)
    content = {spec.files[0].sha256: Path(paths[spec.files[0].path]).read_bytes()}
    device = choose_device("cpu", 1)
    with FakeBroker(tmp_path, spec, files=content) as broker:
        with WorkerThread(tmp_path, broker.address, device) as worker:
            broker.welcome()
            assert firsts(broker.run(numbered(1, 7))) == [pytest.approx(7, abs=0.01)]
            _see_off(broker, worker)
        first_count = broker.fetched_count
        with WorkerThread(tmp_path, broker.address, device) as worker:
            broker.welcome()
            assert broker.fetched_count == first_count > 0
            _see_off(broker, worker)


def _see_off(broker: FakeBroker, worker: WorkerThread) -> None:
    worker.shell.request_stop()
    broker.expect(Goodbye)
    _answer_barrier(broker)
    assert worker.join() == ExitCode.OK


def test_a_file_that_the_broker_does_not_have_is_asked_for_again(tmp_path: Path) -> None:
    """The connection starts over with a back-off, as the broker may know better later."""
    spec, _ = hr_models.image_spec(tmp_path, hr_models.mean_color(), SMALL)
    with FakeBroker(tmp_path, spec) as broker, WorkerThread(tmp_path, broker.address):
        broker.expect(WorkerHello)
        broker.send(Setup(1, 1_000, Limits(), broker.models, broker.endpoints))
        broker.expect(WorkerHello)

    assert broker.fetched_count >= 1


def test_it_comes_back_when_the_broker_was_restarted(tmp_path: Path) -> None:
    """The same instance, a new connection, no batch of the old boot answered."""
    engine = GatedEngine(is_gated=True)
    device = Device("cpu", "cpu", lambda: engine)
    first = FakeBroker(tmp_path, emulated())
    with WorkerThread(tmp_path, first.address, device):
        hello = first.expect(WorkerHello)
        first.send(Setup(1, 1_000, Limits(), first.models, first.endpoints))
        first.receive()
        first.send(numbered(1, 1))
        assert engine.submitted.get(timeout=TIMEOUT_S) == 1
        first.close()
        with FakeBroker(tmp_path, emulated(), boot=2) as second:
            again = second.expect(WorkerHello)
            assert again.instance == hello.instance
            second.send(Setup(2, 1_000, Limits(), second.models, second.endpoints))
            engine.gate.release()
            second.receive()  # READY, and not the DONE of boot 1
            engine.gate.release()
            assert firsts(second.run(numbered(1, 9))) == [9]


def test_a_silent_broker_is_left_and_found_again(tmp_path: Path) -> None:
    """Heartbeats go unanswered for three intervals: the worker introduces itself on a new connection."""
    with FakeBroker(tmp_path, emulated(), heartbeat_ms=100) as broker, WorkerThread(tmp_path, broker.address):
        broker.welcome()
        peer = broker.peer
        while broker.peer == peer:
            parts = broker.socket.recv_multipart() if broker.socket.poll(int(TIMEOUT_S * 1000)) else []
            assert parts, "the worker did not come back"
            if parts[0] != peer:
                broker.send(broker.endpoints, parts[0])
                broker.expect(WorkerHello)
                break


def test_an_id_that_is_in_use_ends_the_worker(broker: FakeBroker, tmp_path: Path) -> None:
    with WorkerThread(tmp_path, broker.address, worker_id="w1") as worker:
        broker.expect(WorkerHello)
        broker.send(Refused(Code.ID_IN_USE, "held by another process"))

        assert worker.join() == ExitCode.CONFIG


def test_prc_03_a_stop_finishes_what_is_inside(broker: FakeBroker, tmp_path: Path) -> None:
    """PRC-03: goodbye at once, DONE of the running and of the waiting batch, then the end with 0."""
    engine = GatedEngine(is_gated=True)
    with WorkerThread(tmp_path, broker.address, Device("cpu", "cpu", lambda: engine)) as worker:
        broker.welcome()
        broker.send(numbered(1, 1))
        broker.send(numbered(2, 2))
        assert engine.submitted.get(timeout=TIMEOUT_S) == 1

        worker.shell.request_stop()
        broker.expect(Goodbye)
        engine.gate.release(2)
        results = [broker.expect(Done).batch for _ in range(2)]
        _answer_barrier(broker)

        assert worker.join() == ExitCode.OK
    assert results == [1, 2]


def _answer_barrier(broker: FakeBroker) -> None:
    while True:
        assert broker.socket.poll(int(TIMEOUT_S * 1000))
        peer, *parts = broker.socket.recv_multipart()
        if Discover.__name__.lower().encode() in parts[0]:
            broker.send(broker.endpoints, peer)
            return


def test_prc_09_a_lost_device_ends_the_worker_without_a_word(broker: FakeBroker, tmp_path: Path) -> None:
    """PRC-09: the code is distinct, and no result follows."""
    device = Device("cpu", "cpu", lambda: GatedEngine(fate={1: "fatal"}))
    with WorkerThread(tmp_path, broker.address, device) as worker:
        broker.welcome()
        broker.send(numbered(1, 1))
        broker.send(numbered(2, 2))

        assert worker.join() == ExitCode.DEVICE_LOST
    assert not broker.socket.poll(0)


def test_prc_11_a_worker_without_a_broker_stops_at_once(tmp_path: Path) -> None:
    """PRC-11: while it looks for a broker that does not exist yet."""
    with WorkerThread(tmp_path, f"ipc://{tmp_path}/nobody") as worker:
        worker.shell.request_stop()

        assert worker.join() == ExitCode.OK


def test_garbage_from_the_broker_is_survived(broker: FakeBroker, tmp_path: Path) -> None:
    with WorkerThread(tmp_path, broker.address):
        broker.welcome()
        for garbage in (b"", b"\xc1", b"\x80", os.urandom(0) + b"\xff" * 100):
            broker.socket.send_multipart([broker.peer, garbage])

        assert firsts(broker.run(numbered(1, 3))) == [3]


# -- devices ------------------------------------------------------------------------------------------


without_gpu = pytest.mark.skipif(not why_no_cuda(), reason="this machine has a GPU")


@without_gpu
def test_ort_01_cuda_that_is_not_there_is_an_error_with_a_reason() -> None:
    """ORT-01: never a silent fallback."""
    with pytest.raises(DeviceError, match=r"device cuda: .*use --device cpu"):
        choose_device("cuda", 1)


@without_gpu
def test_ort_01_auto_says_what_it_took() -> None:
    device = choose_device("auto", 1)

    assert (device.engine, device.name) == ("cpu", "cpu")


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'tpu'.*auto, cpu, cuda, emulated"):
        choose_device("tpu", 1)


# -- as a process -------------------------------------------------------------------------------------

MAIN = """
import sys
from headrace.workers.process import WorkerSettings, run
parent = int(sys.argv[2]) or None
sys.exit(run(WorkerSettings(sys.argv[1], "emulated", cache_dir=sys.argv[3], parent_pid=parent)))
"""


class WorkerProcess:
    """A worker as a process of its own; killed at the latest when the block is left."""

    def __init__(self, folder: Path, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", MAIN, address, "0", str(folder / "cache")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


def test_prc_03_sigterm_drains_a_process_and_it_ends_with_0(tmp_path: Path) -> None:
    """PRC-03: the batch that runs when the signal comes is published."""
    with (
        FakeBroker(tmp_path, emulated(base_ms=300)) as broker,
        WorkerProcess(tmp_path, broker.address) as worker,
    ):
        broker.welcome()
        broker.send(numbered(1, 5))
        worker.send_signal(signal.SIGTERM)

        broker.expect(Goodbye)
        assert firsts(broker.expect(Done)) == [5]
        _answer_barrier(broker)
        assert worker.wait(TIMEOUT_S) == 0


def test_prc_03_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """PRC-03: a batch of a minute is not waited for."""
    with (
        FakeBroker(tmp_path, emulated(base_ms=60_000)) as broker,
        WorkerProcess(tmp_path, broker.address) as worker,
    ):
        broker.welcome()
        broker.send(numbered(1, 5))
        worker.send_signal(signal.SIGTERM)
        broker.expect(Goodbye)

        assert insist(worker, signal.SIGTERM, 5) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_prc_11_an_idle_process_ends_within_two_seconds(tmp_path: Path, number: int) -> None:
    """PRC-11: also when the broker says nothing to its goodbye."""
    with FakeBroker(tmp_path, emulated()) as broker, WorkerProcess(tmp_path, broker.address) as worker:
        broker.welcome()
        worker.send_signal(number)

        assert worker.wait(2) == 0


def test_prc_05_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """PRC-05: the parent is killed with kill -9; the worker is gone soon after."""
    parent_main = (
        "import subprocess, sys, os, time\n"
        "child = subprocess.Popen([sys.executable, '-P', '-c', sys.argv[1], sys.argv[2], str(os.getpid()),"
        " sys.argv[3]])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with FakeBroker(tmp_path, emulated()) as broker:
        parent = subprocess.Popen(
            [sys.executable, "-P", "-c", parent_main, MAIN, broker.address, str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        broker.welcome()

        parent.kill()
        parent.communicate(timeout=TIMEOUT_S)

        _, alive = psutil.wait_procs([worker], timeout=5)
        for process in alive:
            process.kill()
        assert not alive
