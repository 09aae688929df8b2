"""Several sessions in one worker process: the broker shares batches out among them, they end as one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hr_processes import LIMIT_S, Processes, emulated_config

import headrace
from headrace.exit_codes import ExitCode
from headrace.workers.process import replicas_of, run_all
from headrace.workers.worker_settings import WorkerSettings

IMAGE = np.zeros((32, 32, 3), np.uint8)


def test_sessions_of_one_process_work_side_by_side(tmp_path: Path) -> None:
    """Two batches of 100 ms each at a time: both sessions serve, and one SIGTERM ends both in good order."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(emulated_config(base_ms=100, per_frame_ms=0, max_batch_size=1))
        worker = processes.start(
            "worker", "--connect", broker.address, "--device", "emulated", "--id", "w", "--replicas", "2"
        )
        found = broker.wait_workers(2)
        with (
            headrace.Subscriber(broker.address, streams=["a"]) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            for _ in range(6):
                producer.push(IMAGE, stream="a", timeout=LIMIT_S)
            outcomes = [subscriber.get(timeout=LIMIT_S) for _ in range(6)]
        code = worker.stop()

    assert sorted(one["id"] for one in found) == ["w-1", "w-2"]
    assert [one["pid"] for one in found] == [worker.pid] * 2
    assert {one.worker for one in outcomes if isinstance(one, headrace.Outcome)} == {"w-1", "w-2"}
    assert code == ExitCode.OK


def test_each_session_has_its_share_of_the_machine() -> None:
    """Threads that nobody named, and the GPU's memory, are shared out; slots are each one's own."""
    first, second = replicas_of(
        WorkerSettings(worker_id="w", replicas=2, slots=3, workers_on_host=2, gpu_memory_mb=1_000)
    )

    assert (first.worker_id, second.worker_id) == ("w-1", "w-2")
    assert (first.replicas, first.slots, first.workers_on_host, first.gpu_memory_mb) == (1, 3, 4, 500)
    assert replicas_of(WorkerSettings()) == [WorkerSettings()]


class Session:
    """Stands for a session: ends with a code, or when it is asked to."""

    def __init__(self, code: int | None = None) -> None:
        self._code = code
        self._is_stopping = threading.Event()

    def run(self) -> int:
        if self._code is None:
            assert self._is_stopping.wait(LIMIT_S)
            return 0
        if self._code < 0:
            raise KeyError("a bug")
        return self._code

    def request_stop(self) -> None:
        self._is_stopping.set()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("code", "expected"), [(71, 71), (-1, ExitCode.INTERNAL), (0, 0)])
def test_one_that_ends_takes_the_others_with_it(order: int, code: int, expected: int) -> None:
    """A process with half of its sessions would look whole to whoever supervises it."""
    sessions = [Session(), Session(code)][::order]

    assert run_all(sessions) == expected  # type: ignore[arg-type]
