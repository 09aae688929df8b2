"""Frames that hurt: they kill their worker, fail their batch, or need more memory than there is."""

from __future__ import annotations

import math
from pathlib import Path

import hr_faults as hf
import hr_models
import numpy as np
import pytest
from hr_processes import LIMIT_S, BrokerProcess, Processes, to_toml

import headrace
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Reject

BATCH = 32
GUILTY = 13


def push_batch(producer: headrace.Producer, mark: str) -> None:
    """Push one full batch of four streams; the frame GUILTY of them is marked."""
    for number in range(BATCH):
        pixels = hf.image(number, mark=mark if number == GUILTY else "")
        producer.push(pixels, stream=f"s{number % 4}", seq=number // 4)


def queued(broker: BrokerProcess, count: int) -> None:
    """Wait until so many frames wait."""
    broker.wait_status(lambda status: sum(entry["waiting"] for entry in status["classes"]) == count)


def guilty_of(found: dict[tuple[str, int], tuple[str, str]]) -> tuple[str, str]:
    """Return the end of the marked frame, after checking that all others are ok."""
    guilty = found.pop((f"s{GUILTY % 4}", GUILTY // 4))
    assert set(found.values()) == {("ok", "")}
    assert len(found) == BATCH - 1
    return guilty


@pytest.mark.parametrize("mark", ["abort", "exit"])
def test_a_frame_that_kills_workers_ends_alone(tmp_path: Path, mark: str) -> None:
    """Must-show 4, PRC-02: 31 neighbours get results, the guilty one `error poison_frame`, two workers are
    lost at most; sent again it is refused and loses none."""
    rejects: list[Reject] = []
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(max_batch_size=BATCH))
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address, on_reject=rejects.append) as producer,
        ):
            push_batch(producer, mark)
            queued(broker, BATCH)
            for number in range(4):
                hf.start_worker(processes, broker, "--id", f"w{number}")
            found = hf.ends(hf.read(subscriber, BATCH))
            lost = broker.wait_workers(2) and broker.status()["workers_lost"]

            assert guilty_of(found) == ("error", "poison_frame")
            assert lost == 2

            producer.push(hf.image(GUILTY, mark=mark), stream="again")
            producer.push(hf.image(1), stream="good")
            after = hf.ends(hf.read(subscriber, 2))
            producer.flush(LIMIT_S)
            status = broker.status()

    assert after == {("again", 0): ("rejected", "poison_frame"), ("good", 0): ("ok", "")}
    assert [reject.code for reject in rejects] == ["poison_frame"]
    assert rejects[0].retry_after_ms
    assert status["workers_lost"] == 2
    assert len(status["workers"]) == 2


def test_good_frames_around_a_killing_one_all_finish(tmp_path: Path) -> None:
    """PRC-02: four workers under load, one frame that makes each exit with 137: two are lost, not more."""
    count = 300
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=5, max_batch_size=8))
        workers = hf.start_workers(processes, broker, 4)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            for number in range(count):
                mark = "exit" if number == count // 2 else ""
                producer.push(hf.image(number, mark=mark), stream=f"s{number % 3}", timeout=LIMIT_S)
            found = hf.ends(hf.read(subscriber, count))
        status = broker.wait_drained()
        codes = sorted(code for worker in workers if (code := worker.popen.poll()) is not None)

    assert sorted(found.values()) == [("error", "poison_frame"), *[("ok", "")] * (count - 1)]
    assert codes == [137, 137]
    assert status["workers_lost"] == 2


def test_a_batch_that_fails_is_halved_until_the_guilty_is_alone(tmp_path: Path) -> None:
    """Must-show 5: one failing frame of 32: 31 results, one error, six failed runs (log2(32) + 1) at most,
    and the worker lives on."""
    hr_models.write(tmp_path, hr_models.failing_on_mark())
    config = to_toml({"broker": {"port": 0, "http": False, "heartbeat_ms": 300}}) + (
        '\n[[models]]\nname = "m"\npath = "model.onnx"\n[models.image]\n[[models.size_classes]]\n'
        f"height = 16\nwidth = 16\nmax_batch_size = {BATCH}\n"
    )
    with Processes(tmp_path) as processes:
        broker = processes.broker(config)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            for number in range(BATCH):
                pixels = np.full((16, 16, 3), number, np.uint8)
                pixels[0, 0] = hr_models.MARK if number == GUILTY else number
                producer.push(pixels, stream=f"s{number % 4}", seq=number // 4)
            queued(broker, BATCH)
            worker = hf.start_worker(
                processes, broker, device="cpu", HEADRACE_CACHE=tmp_path / "cache", HEADRACE_WORKER__THREADS=1
            )
            outcomes = hf.read(subscriber, BATCH)
            status = broker.wait_drained()
        failed = broker.running.stderr.count('"event": "batch failed"')

        assert guilty_of(hf.ends(outcomes)) == ("error", "batch_failed")
        means = {o.stream + str(o.seq): headrace.tensors_of(o)["mean"] for o in outcomes if o.status == "ok"}
        for number in set(range(BATCH)) - {GUILTY}:
            np.testing.assert_allclose(means[f"s{number % 4}{number // 4}"], number, atol=0.01)
        assert failed <= int(math.log2(BATCH)) + 1
        assert status["classes"][0]["batches"] <= 1 + 2 * int(math.log2(BATCH))
        assert worker.popen.poll() is None
        assert status["workers_lost"] == 0


def test_a_batch_too_large_for_the_memory_is_split(tmp_path: Path) -> None:
    """ORT-05: eight large frames need more than the device has, two do not; one is too large even alone.
    Each gets a result or an error, 100 small ones after that are served by the same worker."""
    sizes = '[[models.size_classes]]\nname = "large"\nheight = 128\nwidth = 128\nmax_batch_size = 8\n'
    sizes += '[[models.size_classes]]\nname = "huge"\nheight = 256\nwidth = 256\nmax_batch_size = 8\n'
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config() + sizes)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address, max_unfinished_frames=256) as producer,
        ):
            for number in range(8):
                producer.push(hf.image(number, size=128), stream="large")
            producer.push(hf.image(size=256), stream="huge")
            queued(broker, 9)
            worker = hf.start_worker(processes, broker, HR_ENGINE_MEMORY_PIXELS=2 * 128 * 128)
            for number in range(100):
                producer.push(hf.image(number), stream="small")
            found = hf.ends(hf.read(subscriber, 109))
        status = broker.wait_drained()

        assert found.pop(("huge", 0)) == ("error", "batch_failed")
        assert set(found.values()) == {("ok", "")}
        assert worker.popen.poll() is None
        assert [entry["pid"] for entry in status["workers"]] == [worker.pid]


def test_a_device_that_failed_says_nothing_more(tmp_path: Path) -> None:
    """PRC-09: the worker ends with its own code, nothing it computed after the fault is published, and its
    batch is run by the other one."""
    count = 40
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=10, max_batch_size=4))
        failing = hf.start_worker(processes, broker, "--id", "failing", HR_ENGINE_FATAL_RUN=3)
        broker.wait_workers(1)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            for number in range(count):
                producer.push(hf.image(number), stream="s")
            code = failing.wait()
            hf.start_worker(processes, broker, "--id", "good")
            outcomes = hf.read(subscriber, count)
        status = broker.wait_drained()

    assert code == ExitCode.DEVICE_LOST
    assert set(hf.ends(outcomes).values()) == {("ok", "")}
    assert [outcome.outputs["first"] for outcome in outcomes] == [number % 200 for number in range(count)]
    assert sum(outcome.worker == "failing" for outcome in outcomes) <= 8
    assert status["workers_lost"] == 1
