"""Field cases of batching and scale, end to end, with workers whose batches take a known time.

Times are scaled down from the cases; each bound that is checked leaves room for a busy machine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hr_broker as hb
import hr_models
import hr_plant as hp
import hr_worker
import numpy as np
import pytest
from hr_clients import AutoWorker, Relay, image, wait_for

from headrace import Client, Producer
from headrace.broker.settings import ClassPolicy, ModelSettings
from headrace.protocol.messages import Frame, FrameResult, SizeClassSpec, Status
from headrace.protocol.peers import MAX_BATCH_SIZE
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.devices import Device, choose_device
from headrace.workers.engine import StagedBatch


def emulated(
    max_batch_size: int, base_ms: float, policy: ClassPolicy = hp.ADAPTIVE, per_frame_ms: float = 0.0
) -> hp.PlantModel:
    """A model whose batch takes ``base_ms`` whatever it holds."""
    spec = hr_models.emulated_spec(
        SizeClassSpec("small", 8, 8, max_batch_size), base_ms=base_ms, per_frame_ms=per_frame_ms
    )
    return hp.PlantModel(ModelSettings(spec, {"": policy}))


def frames(count: int) -> list[Frame]:
    return [hr_worker.raw_frame(image(number)) for number in range(count)]


def emulated_worker(plant: hp.Plant, folder: Path, name: str = "w1") -> hp.ThreadWorker:
    return hp.ThreadWorker(plant.endpoints, folder, choose_device("emulated", 1), worker_id=name)


def test_what_comes_while_one_job_runs_goes_together(tmp_path: Path) -> None:
    """BAT-07: no wait is configured; one job, and four more during its run: batches of one and four."""
    for policy in (ClassPolicy("window", 0.0), hp.ADAPTIVE):
        with (
            hp.open_plant(emulated(8, 200.0, policy)) as plant,
            emulated_worker(plant, tmp_path),
        ):
            plant.wait_for_workers()
            plant.producer.send(hb.frames(hb.frame("first", 0, epoch=1)))
            wait_for(lambda: plant.ready_workers()[0]["in_flight"] == 1)
            four = plant.outcomes(*frames(4), bundle=1)
            (one,) = plant.collect(("first", 0))

        assert one.batch_size == 1
        assert [outcome.batch_size for outcome in four] == [4] * 4


class Recording(CpuEngine):
    """Remembers how many rows each run had."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rows: list[int] = []

    def submit(self, batch: StagedBatch) -> None:
        self.rows.append(batch.count)
        super().submit(batch)


@pytest.mark.parametrize("limit", [1, 2, 7, 8])
def test_a_batch_reaches_its_limit_and_never_passes_it(tmp_path: Path, limit: int) -> None:
    """BAT-10: a burst of a hundred from ten producers; the rows of every run of the model are recorded."""
    engine = Recording()
    model = hp.onnx_model(
        tmp_path, hr_models.mean_color(), SizeClassSpec("small", 48, 64, limit), policy=hp.ADAPTIVE
    )
    with hp.open_plant(model) as plant, contextlib.ExitStack() as stack:
        producers = [stack.enter_context(hb.Peer(hb.zmq.DEALER, plant.endpoints.frames)) for _ in range(10)]
        keys = [(f"cam-{index}", seq) for index in range(10) for seq in range(10)]
        for index, producer in enumerate(producers):
            producer.send(hb.frames(*(hb.frame(f"cam-{index}", seq, epoch=1) for seq in range(10))))
        wait_for(lambda: plant.status()["account"]["accepted"] == 100)

        with hp.ThreadWorker(plant.endpoints, tmp_path, Device("cpu", "cpu", lambda: engine)):
            outcomes = plant.collect(*keys)

    assert {outcome.status for outcome in outcomes} == {Status.OK}
    assert sum(engine.rows) == 100
    assert max(engine.rows) == limit
    assert engine.rows.count(limit) >= 100 // limit - 1
    assert max(outcome.batch_size for outcome in outcomes) == limit


def test_a_vast_limit_takes_no_memory_up_front(tmp_path: Path) -> None:
    """BAT-11: thousands of frames a batch and an hour of wait: frames still run, and memory stays."""
    vast = SizeClassSpec("small", 480, 640, max_batch_size=MAX_BATCH_SIZE)
    model = hp.onnx_model(tmp_path, hr_models.mean_color(), vast, policy=hp.ADAPTIVE)
    hour = hp.onnx_model(
        tmp_path, hr_models.mean_color(), vast, name="hour", policy=ClassPolicy("window", 3_600_000.0)
    )
    with hp.open_plant(model, hour) as plant, hp.ProcessWorker(plant.endpoints, tmp_path) as worker:
        plant.wait_for_workers()
        outcomes = plant.outcomes(*[hr_worker.raw_frame(hp.solid(4, 5, 6, 480, 640))] * 3)
        process_status = Path(f"/proc/{worker.pid}/status").read_text()

    assert [hp.mean(outcome) for outcome in outcomes] == [[4, 5, 6]] * 3
    # One batch of the limit would be 3.8 GB of pixels and 15 GB of float32.
    (peak_kib,) = (int(line.split()[1]) for line in process_status.splitlines() if line.startswith("VmHWM"))
    assert peak_kib < 1_500_000


def test_the_last_frames_of_a_burst_do_not_wait_for_more(tmp_path: Path) -> None:
    """BAT-15: limit 8, wait 20 ms, twenty frames and then none; and one frame at a time."""
    with (
        hp.open_plant(emulated(8, 2.0, ClassPolicy("window", 20.0))) as plant,
        emulated_worker(plant, tmp_path),
    ):
        plant.wait_for_workers()
        burst = plant.outcomes(*frames(20))
        lone = [plant.outcomes(frame)[0] for frame in frames(3)]

    assert [outcome.batch_size for outcome in burst] == [8] * 16 + [4] * 4
    for outcome in burst[16:] + lone:
        assert 20_000 <= (outcome.timing.batched_us or 0) < 20_000 + hp.SLACK_US
        assert (outcome.timing.published_us or 0) < 22_000 + 2 * hp.SLACK_US
    assert [outcome.batch_size for outcome in lone] == [1] * 3


def test_every_result_is_its_callers_own(tmp_path: Path) -> None:
    """BAT-14: two real workers, twenty threads of callers: pixels, meta and caller agree in each answer."""
    model = hp.onnx_model(tmp_path, hr_models.mean_color(), policy=hp.ADAPTIVE)
    wrong: list[tuple[int, int]] = []
    with (
        hp.open_plant(model) as plant,
        hp.ThreadWorker(plant.endpoints, tmp_path / "1"),
        hp.ThreadWorker(plant.endpoints, tmp_path / "2"),
    ):
        plant.wait_for_workers(2)
        with Client(plant.endpoints.frames) as client:

            def ask(caller: int) -> None:
                for number in range(25):
                    value = (caller * 25 + number) % 256
                    meta = {"caller": caller, "number": number}
                    outcome = client.infer(image(value, side=8 + number), meta=meta, timeout=20)
                    if outcome.meta != meta or not np.isclose(
                        hp.tensor(outcome)[0], value * (8 + number) ** 2 / (48 * 64), atol=0.01
                    ):
                        wrong.append((caller, number))

            threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        account = plant.status()["account"]

    assert wrong == []
    assert account["ok"] == 500


def test_a_job_whose_workers_connection_is_cut_goes_to_another(tmp_path: Path) -> None:
    """ZMQ-08: the batch is sent into a line that no longer carries it, which then breaks: each loss is
    noticed and counted, and every job runs elsewhere."""
    rounds = 5
    with hp.open_plant(emulated(1, 0.1)) as plant:
        for seq in range(rounds):
            with Relay(plant.endpoints.workers) as relay:
                through_relay = replace(plant.endpoints, workers=relay.endpoint)
                with hb.Worker(through_relay, "mortal", instance=seq + 1, slots=1):
                    plant.wait_for_workers()
                    relay.is_swallowing.set()
                    plant.producer.send(hb.frames(hb.frame("cam", seq, epoch=1)))
                    wait_for(lambda: plant.ready_workers()[0]["in_flight"] == 1)
                    relay.cut()
                    plant.wait_for_workers(0)
            with emulated_worker(plant, tmp_path, "steady"):
                (outcome,) = plant.collect(("cam", seq))
            plant.wait_for_workers(0)

            assert (outcome.status, outcome.worker, outcome.attempt) == (Status.OK, "steady", 2)
        status = plant.status()

    assert status["workers_lost"] == status["requeued"] == rounds


def test_work_goes_to_workers_that_come_late(tmp_path: Path) -> None:
    """SCL-01: forty jobs of 40 ms wait; one worker comes, then three more: all four work to the end."""
    jobs, job_s, workers, slots = 40, 0.04, 4, 2
    with hp.open_plant(emulated(1, job_s * 1000)) as plant, contextlib.ExitStack() as stack:
        plant.producer.send(hb.frames(*(hb.frame("cam", seq, epoch=1) for seq in range(jobs))))
        wait_for(lambda: plant.status()["account"]["accepted"] == jobs)
        stack.enter_context(emulated_worker(plant, tmp_path, "w1"))
        (first,) = plant.collect(("cam", 0))
        held = plant.ready_workers()[0]["in_flight"]
        for name in ("w2", "w3", "w4"):
            stack.enter_context(emulated_worker(plant, tmp_path, name))
        plant.wait_for_workers(workers)
        started_s = time.monotonic()
        done_before = plant.status()["account"]["ok"]
        outcomes = [first, *plant.collect(*(("cam", seq) for seq in range(1, jobs)))]
        took_s = time.monotonic() - started_s

    assert held <= slots
    share = Counter(outcome.worker for outcome in outcomes)
    assert set(share) == {"w1", "w2", "w3", "w4"}
    ideal_s = (jobs - done_before) * job_s / workers
    assert took_s < 1.6 * ideal_s + 0.2
    late = Counter(outcome.worker for outcome in outcomes[done_before + workers * slots :])
    assert max(late.values()) <= 2 * min(late.values()) + slots


def paced(wait_s: float) -> Callable[[Frame], FrameResult]:
    """An answer that takes so long."""
    pause = threading.Event()

    def answer(frame: Frame) -> FrameResult:
        pause.wait(wait_s)
        return FrameResult(Status.OK, outputs=frame.seq)

    return answer


def test_the_faster_of_two_workers_gets_the_more_work(tmp_path: Path) -> None:
    """SCL-02: 12 ms and 240 ms a batch at 60 % of what both can do: shares follow the speeds, nobody waits
    for the slow one while the fast one is idle."""
    fast_s, slow_s, jobs = 0.012, 0.240, 120
    rate = 0.6 * (1 / fast_s + 1 / slow_s)
    settings = hb.broker_settings(
        hb.emulated_model("m", SizeClassSpec("small", 16, 16, max_batch_size=1), base_ms=1)
    )
    with (
        hb.running_broker(settings) as broker,
        AutoWorker(broker.endpoints, worker="slow", answer=paced(slow_s)),
        AutoWorker(broker.endpoints, worker="fast", answer=paced(fast_s)),
        hb.Listener(broker.endpoints) as listener,
        Producer(broker.endpoints.frames) as producer,
    ):
        pause = threading.Event()
        started_s = time.monotonic()
        for number in range(jobs):  # an open loop: the time of each push is fixed beforehand
            pause.wait(max(0.0, started_s + number / rate - time.monotonic()))
            producer.push(image(number), stream=f"cam-{number}")
        outcomes = listener.outcomes(jobs, 20)

    assert {outcome.status for outcome in outcomes} == {Status.OK}
    learnt = sorted(outcomes, key=lambda outcome: int(outcome.stream[4:]))[jobs // 4 :]
    share = Counter(outcome.worker for outcome in learnt)
    assert share["fast"] >= 8 * share["slow"], share
    waits_s = sorted((outcome.timing.published_us or 0) / 1e6 for outcome in learnt)
    assert waits_s[int(len(waits_s) * 0.99)] < 2 * slow_s
    assert waits_s[len(waits_s) // 2] < slow_s / 2
