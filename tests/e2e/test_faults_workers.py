"""Workers that die, come back, hang or fall silent: nothing is lost, and nobody waits for the dead."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import hr_faults as hf
from chaos.proxy import Proxy
from hr_processes import LIMIT_S, Processes, Status, elapsed

import headrace
from headrace.errors import RequestTimeoutError
from headrace.exit_codes import ExitCode

HEARTBEAT_S = 0.2  # of hr_processes.emulated_config


def one_class(status: Status) -> Status:
    (found,) = status["classes"]
    assert isinstance(found, dict)
    return found


def test_a_dead_worker_next_in_line_delays_one_batch(tmp_path: Path) -> None:
    """SCL-06: two workers, the faster one is killed while idle; 50 frames with 1 s to live that come during
    the detection all end ok on the other; late is only what the dead one's two slots took."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=5, max_batch_size=8))
        first, second = hf.start_workers(processes, broker, 2)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            producer.push(hf.image(), stream="s")
            (warm,) = hf.read(subscriber, 1)
            dead = first if warm.worker == "w0" else second
            dead.kill()
            for number in range(50):
                producer.push(hf.image(number), stream="s", ttl_ms=1_000)
            outcomes = hf.read(subscriber, 50)
        status = broker.wait_drained()

    assert {outcome.status for outcome in outcomes} == {"ok"}
    assert {outcome.worker for outcome in outcomes} == {"w0", "w1"} - {warm.worker}
    assert sum(outcome.attempt > 1 for outcome in outcomes) <= 2 * 8
    assert len(status["workers"]) == 1


def test_a_name_that_comes_back_at_once_gets_work_at_once(tmp_path: Path) -> None:
    """ZMQ-06: `w1` is killed while the broker has its messages unread, and starts again under its name: it
    serves within a heartbeat of being ready, and what it held is requeued once."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=1, per_frame_ms=0.1, max_batch_size=4))
        worker = hf.start_worker(processes, broker, "--id", "w1")
        broker.wait_workers(1)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address, max_unfinished_frames=512) as producer,
        ):
            for number in range(400):
                producer.push(hf.image(number), stream="s")
            hf.read(subscriber, 20)
            os.kill(broker.pid, signal.SIGSTOP)
            # What was sent to the worker before is done meanwhile, and its answers lie unread.
            threading.Event().wait(0.1)
            worker.kill()
            again = hf.start_worker(processes, broker, "--id", "w1")
            again.read_line(lambda line: "worker started" in line, "stderr")
            os.kill(broker.pid, signal.SIGCONT)

            again.read_log("ready")
            waited_s = elapsed()
            rest = hf.read(subscriber, 380)
            first_s = waited_s()
        status = broker.wait_drained()

    assert {outcome.status for outcome in rest} == {"ok"}
    assert max(outcome.attempt for outcome in rest) <= 2
    assert [entry["id"] for entry in status["workers"]] == ["w1"]
    assert status["workers"][0]["pid"] == again.pid
    assert first_s < LIMIT_S


def test_each_new_worker_is_found_and_the_dead_are_forgotten(tmp_path: Path) -> None:
    """ZMQ-21: five workers one after another, each with a fresh id: ten results each time, one known worker
    at the end."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=1, max_batch_size=4))
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            for number in range(5):
                worker = hf.start_worker(processes, broker)
                worker.read_log("ready")
                for _ in range(10):
                    producer.push(hf.image(number), stream="s")
                outcomes = hf.read(subscriber, 10)
                assert {outcome.status for outcome in outcomes} == {"ok"}
                if number < 4:
                    worker.kill()
            pid = worker.pid
        status = broker.wait_status(lambda status: len(status["workers"]) == 1)

    assert [entry["pid"] for entry in status["workers"]] == [pid]


def test_a_worker_that_hangs_for_ever_hurts_nobody_else(tmp_path: Path) -> None:
    """Must-show 6: one of three workers hangs with a batch and goes on sending heartbeats. Every frame ends
    ok, p99 of all stays under three times the fault-free one, hedges stay within their budget, and the
    worker is told off and ends."""
    share, burst = 0.02, 8
    hedging = {
        "share": share, "burst_frames": burst, "overdue_factor": 1.0, "overdue_min_ms": 50, "stuck_ms": 1_000,
    }  # fmt: skip
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=30, per_frame_ms=1, max_batch_size=4, hedging=hedging))
        workers = hf.start_workers(processes, broker, 3, HR_HANG_FILE=tmp_path / "hung")
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            calm = latencies_ms(producer, subscriber, 250)
            hung = latencies_ms(producer, subscriber, 250, hang_at=60)
        status = broker.wait_status(lambda status: len(status["workers"]) == 2)
        left = {entry["id"] for entry in status["workers"]}
        codes = [worker.wait() for number, worker in enumerate(workers) if f"w{number}" not in left]

    assert len(calm) == len(hung) == 250
    assert sorted(hung)[-3] < 3 * sorted(calm)[-3], (sorted(calm)[-5:], sorted(hung)[-5:])
    assert status["hedges"]["batches"] >= 1
    assert status["hedges"]["won"] >= 1
    assert status["hedges"]["frames"] <= share * one_class(status)["frames_batched"] + burst
    assert status["account"]["ok"] == 500
    assert codes == [ExitCode.DEVICE_LOST]


def latencies_ms(
    producer: headrace.Producer, subscriber: headrace.Subscriber, count: int, hang_at: int = -1
) -> list[float]:
    """Push a frame every 8 ms, each on a stream of its own so that none waits for another's turn; return the
    milliseconds from the intended push to the outcome of each."""
    began_s = time.monotonic()
    found: list[float] = []
    pushed = 0
    while len(found) < count:
        due_s = began_s + 0.008 * pushed
        if pushed < count and time.monotonic() >= due_s:
            pixels = hf.image(pushed, mark="hang_once" if pushed == hang_at else "")
            producer.push(pixels, stream=f"{hang_at}/{pushed}", pts_ns=int(due_s * 1e9))
            pushed += 1
            continue
        wait_s = due_s - time.monotonic() if pushed < count else LIMIT_S
        with contextlib.suppress(RequestTimeoutError):
            item = subscriber.get(max(0.0, wait_s))
            assert isinstance(item, headrace.Outcome)
            assert item.status == "ok", item
            found.append((time.monotonic_ns() - (item.pts_ns or 0)) / 1e6)
        assert time.monotonic() < began_s + 2 * LIMIT_S, f"{len(found)} of {count} outcomes"
    return found


def test_a_link_that_swallows_everything_is_given_up_by_both_sides(tmp_path: Path) -> None:
    """ZMQ-11: no FIN, no RST, no bytes: within three heartbeats the broker takes worker and producer for
    dead; when the link works again all three clients are back by themselves, and nothing is lost."""
    with Processes(tmp_path) as processes:
        config = hf.config(broker={"host": "127.0.0.10"})
        broker = processes.broker(config)
        ports = [
            int(broker.endpoints[name].rpartition(":")[2])
            for name in ("frames", "results", "workers", "control")
        ]
        with Proxy("127.0.0.10", ports) as proxy:
            proxy.add("link", "127.0.0.21")
            address = f"tcp://127.0.0.21:{ports[0]}"
            processes.start("worker", "--connect", address, "--device", "emulated", env=hf.env())
            broker.wait_workers(1)
            with headrace.Subscriber(address) as subscriber, headrace.Producer(address) as producer:
                producer.push(hf.image(), stream="s")
                hf.read(subscriber, 1)

                proxy.set_fault("link", "swallow")
                took_s = elapsed()
                broker.wait_status(lambda status: not status["workers"] and not status["producers"])
                noticed_s = took_s()
                for number in range(1, 20):
                    producer.push(hf.image(number), stream="s")
                proxy.heal("link")

                outcomes = hf.read(subscriber, 19)
                producer.flush(LIMIT_S)

    assert noticed_s < 4 * HEARTBEAT_S + 1.0
    assert [outcome.seq for outcome in outcomes] == list(range(1, 20))
    assert {outcome.status for outcome in outcomes} == {"ok"}
