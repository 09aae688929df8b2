"""kill -9 while payloads lie in shared memory: one end for each frame, its own pixels, and no file left over.

Each frame is painted with its number and the model tells what it saw: pixels of another frame would show.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import hr_clients
import hr_faults as hf
import hr_models
import numpy as np
import pytest
from hr_processes import LIMIT_S, BrokerProcess, Processes, Running, to_toml

import headrace
from headrace.clients.records import Missed

SIDE = 160
COUNT = 600

#: Pushes frames painted with their numbers until it is killed. Its waits for room are waits for outcomes.
SCRIPT = """
import sys, numpy, headrace
producer = headrace.Producer(sys.argv[1], lane="shm", shm_bytes=8 * 2**20, shm_folder=sys.argv[2])
number = 0
while True:
    with producer.slot((160, 160, 3), stream="s") as array:
        array[:] = (number % 251, number // 251 % 251, number * 7 % 251)
    number += 1
"""


def picture(number: int) -> np.ndarray:
    image = np.empty((SIDE, SIDE, 3), np.uint8)
    image[:] = colour(number)
    return image


def colour(number: int) -> tuple[int, int, int]:
    return number % 251, number // 251 % 251, number * 7 % 251


class Plant:
    """A broker, workers that compute, and a folder of shared memory of their own."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.processes = processes
        self.shm = folder / "shm"
        self.shm.mkdir()
        self._cache = folder / "cache"
        hr_models.write(folder, hr_models.mean_color())
        tables = {
            "broker": {"port": 0, "http": False, "heartbeat_ms": 300, "grace_ms": 5_000},
            "shm": {"folder": str(self.shm)},
        }
        self.broker: BrokerProcess = processes.broker(
            to_toml(tables) + '\n[[models]]\nname = "m"\npath = "model.onnx"\n[models.image]\n'
            f"[[models.size_classes]]\nheight = {SIDE}\nwidth = {SIDE}\nmax_batch_size = 4\n"
        )

    def start_worker(self) -> Running:
        return hf.start_worker(
            self.processes, self.broker, device="cpu", HEADRACE_CACHE=self._cache,
            HEADRACE_WORKER__THREADS=1, HEADRACE_SHM__FOLDER=self.shm,
        )  # fmt: skip

    def producer(self) -> headrace.Producer:
        made = headrace.Producer(
            self.broker.address, lane="shm", shm_bytes=8 * 2**20, shm_folder=self.shm,
            max_unfinished_frames=2 * COUNT,
        )  # fmt: skip
        made.wait_connected(LIMIT_S)
        return made

    def start_producer(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-P", "-c", SCRIPT, self.broker.address, str(self.shm)])

    def wait_ok(self, count: int) -> None:
        """Wait until so many frames are done, and others are under way."""
        self.broker.wait_status(
            lambda status: status["account"]["ok"] >= count and status["account"]["unfinished"] > 0
        )

    def arenas(self) -> list[str]:
        return sorted(path.name for path in self.shm.iterdir())


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    with Processes(tmp_path) as processes:
        yield Plant(processes, tmp_path)


def push(producer: headrace.Producer) -> None:
    for number in range(COUNT):
        producer.push(picture(number), stream="s", timeout=LIMIT_S)


def read(subscriber: headrace.Subscriber, last: int) -> list[headrace.Outcome | Missed]:
    """Read until the outcome of frame ``last``."""
    items: list[headrace.Outcome | Missed] = []
    while not items or not isinstance(items[-1], headrace.Outcome) or items[-1].seq < last:
        items.append(subscriber.get(timeout=LIMIT_S))
    return items


def check_pixels(items: Iterable[headrace.Outcome | Missed]) -> list[int]:
    """Check that each outcome is made of its own frame's pixels; return their seqs."""
    seqs = []
    for item in items:
        assert isinstance(item, headrace.Outcome), item
        assert item.status == "ok", (item.seq, item.code, item.message)
        np.testing.assert_allclose(headrace.tensors_of(item)["mean"], colour(item.seq), atol=0.01)
        seqs.append(item.seq)
    return seqs


def test_killing_a_worker_in_mid_batch(plant: Plant) -> None:
    """Another worker finds the payloads where they were."""
    doomed, _ = plant.start_worker(), plant.start_worker()
    plant.broker.wait_workers(2)
    with headrace.Subscriber(plant.broker.address, stream="s") as subscriber, plant.producer() as producer:
        push(producer)
        doomed.kill()
        account = producer.flush(LIMIT_S)
        assert check_pixels(read(subscriber, COUNT - 1)) == list(range(COUNT))

    assert account.by_status == {"ok": COUNT}
    assert account.by_lane == {"shm": COUNT}
    assert plant.arenas() == []


def test_killing_the_broker_in_mid_run(plant: Plant) -> None:
    """The next one opens the arena that is there, and unfinished frames are sent again from it."""
    plant.start_worker()
    plant.broker.wait_workers(1)
    with headrace.Subscriber(plant.broker.address, stream="s") as subscriber, plant.producer() as producer:
        push(producer)
        plant.broker.running.kill()
        assert len(plant.arenas()) == 1
        plant.broker.restart()
        account = producer.flush(LIMIT_S)
        items = read(subscriber, COUNT - 1)

    outcomes = [item for item in items if isinstance(item, headrace.Outcome)]
    seqs = check_pixels(outcomes)
    assert seqs == sorted(set(seqs))
    assert account.finished == COUNT
    assert account.resent > 0, "the kill met no unfinished frame: the test shows nothing"
    assert set(account.by_status) == {"ok"}
    assert plant.arenas() == []


def test_killing_a_producer_in_mid_run(plant: Plant) -> None:
    """What the broker has accepted is finished with its own pixels; then the file goes."""
    plant.start_worker()
    plant.broker.wait_workers(1)
    with headrace.Subscriber(plant.broker.address, stream="s") as subscriber:
        producer = plant.start_producer()
        try:
            plant.wait_ok(200)
        finally:
            producer.kill()
            producer.wait()
        status = plant.broker.wait_drained()
        accepted = status["account"]["accepted"]
        assert check_pixels(read(subscriber, accepted - 1)) == list(range(accepted))

    assert status["account"]["ok"] == accepted
    hr_clients.wait_for(lambda: plant.arenas() == [], LIMIT_S)


@pytest.mark.parametrize("next_one", ["broker", "worker"])
def test_after_killing_all_the_next_start_removes_the_arena(plant: Plant, next_one: str) -> None:
    """PRC-08: nobody was left to do it."""
    worker = plant.start_worker()
    producer = plant.start_producer()
    try:
        plant.wait_ok(100)
    finally:
        producer.kill()
        producer.wait()
    plant.broker.running.kill()
    worker.kill()
    assert len(plant.arenas()) == 1

    if next_one == "broker":
        plant.broker.restart()
    else:
        plant.start_worker().read_log("worker started")

    assert plant.arenas() == []
