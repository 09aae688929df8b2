"""How processes end: SIGTERM finishes what was begun, a second one ends at once, nothing idle hangs."""

from __future__ import annotations

import signal
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
from hr_processes import (
    LIMIT_S,
    BrokerProcess,
    Processes,
    Running,
    alive,
    elapsed,
    emulated_config,
    no_broker,
)

import headrace
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Status

IMAGE = np.zeros((32, 32, 3), np.uint8)

#: PRC-11's limit for a process with nothing to do.
PROMPT_S = 2.0

#: A batch takes 300 ms: a signal sent when a worker is busy meets it at work.
SLOW = emulated_config(base_ms=300, per_frame_ms=0, max_batch_size=8)

#: A batch takes longer than anybody waits here.
STUCK = emulated_config(
    base_ms=60_000, per_frame_ms=0, broker={"grace_ms": 60_000}, worker={"grace_ms": 60_000}
)


def begin_work(broker: BrokerProcess, producer: headrace.Producer, count: int, stream: str = "cam") -> None:
    """Push frames and wait until every worker has some and the broker has them all."""
    for _ in range(count):
        producer.push(IMAGE, stream=stream, timeout=LIMIT_S)
    broker.wait_status(
        lambda status: (
            status["account"]["accepted"] == count
            and all(worker["in_flight"] for worker in status["workers"])
        )
    )


# -- worker ------------------------------------------------------------------------------------------------


def test_a_stopped_worker_finishes_what_it_has(tmp_path: Path) -> None:
    """PRC-03: SIGTERM with 8 in flight and more queued: it delivers them, exits 0; nothing is run twice."""
    count = 40
    with Processes(tmp_path) as processes:
        broker = processes.broker(SLOW)
        leaving, _ = processes.workers(broker, 2)
        with (
            headrace.Subscriber(broker.address, stream="cam") as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            begin_work(broker, producer, count)
            in_flight = sum(entry["in_flight"] for entry in broker.status()["classes"])

            code = leaving.stop()

            outcomes = [subscriber.get(timeout=LIMIT_S) for _ in range(count)]
            account = producer.flush(LIMIT_S)
        status = broker.wait_drained()

    assert in_flight >= 8
    assert code == ExitCode.OK, leaving.text()
    assert [(item.seq, item.status, item.attempt) for item in outcomes] == [
        (number, Status.OK, 1) for number in range(count)
    ]
    assert {item.worker for item in outcomes} == {"w0", "w1"}
    assert account.by_status == {"ok": count}
    assert (status["workers_lost"], status["requeued"], status["late_done"]) == (0, 0, 0)


def test_the_last_worker_may_leave_and_another_take_over(tmp_path: Path) -> None:
    """PRC-03: the only worker is replaced under load: what it did not begin waits for the next one."""
    count = 60
    with Processes(tmp_path) as processes:
        broker = processes.broker(SLOW)
        (leaving,) = processes.workers(broker, 1)
        with headrace.Producer(broker.address) as producer:
            begin_work(broker, producer, count)
            assert leaving.stop() == ExitCode.OK
            assert broker.status()["account"]["unfinished"] > 0
            processes.worker(broker)
            account = producer.flush(LIMIT_S)
        status = broker.wait_drained()

    assert account.by_status == {"ok": count}
    assert (status["workers_lost"], status["requeued"]) == (0, 0)


# -- broker ------------------------------------------------------------------------------------------------


def test_a_stopped_broker_drains(tmp_path: Path) -> None:
    """PRC-03: SIGTERM with work in flight and queued: all is run and published; it exits 0 and the workers
    go on looking for it."""
    count = 40
    with Processes(tmp_path) as processes:
        broker = processes.broker(SLOW)
        workers = processes.workers(broker, 2)
        with (
            headrace.Subscriber(broker.address, stream="cam") as subscriber,
            headrace.Producer(broker.address, linger_s=0.1) as producer,
        ):
            begin_work(broker, producer, count)
            broker.running.popen.send_signal(signal.SIGTERM)
            outcomes = [subscriber.get(timeout=LIMIT_S) for _ in range(count)]
            code = broker.running.wait()
            account = producer.flush(LIMIT_S)

        assert code == ExitCode.OK, broker.running.text()
        assert [(item.seq, item.status) for item in outcomes] == [(n, Status.OK) for n in range(count)]
        assert account.by_status == {"ok": count}
        assert [worker.popen.poll() for worker in workers] == [None, None]

        broker.restart()
        broker.wait_workers(2)


def test_a_draining_broker_takes_no_new_frames(tmp_path: Path) -> None:
    """Frames pushed after SIGTERM are refused with a code, not left hanging; earlier ones finish."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(SLOW)
        processes.workers(broker, 1)
        with (
            headrace.Producer(broker.address) as early,
            headrace.Producer(broker.address, linger_s=0.1) as late,
        ):
            late.wait_connected(LIMIT_S)
            begin_work(broker, early, 20, "early")
            broker.running.popen.send_signal(signal.SIGTERM)
            broker.running.read_log("stopping when drained")
            late.push(IMAGE, stream="late")
            late_account = late.flush(LIMIT_S)
            early_account = early.flush(LIMIT_S)
            assert broker.running.wait() == ExitCode.OK

    assert late_account.rejected == {"draining": 1}
    assert early_account.by_status == {"ok": 20}


def test_a_broker_whose_grace_ends_gives_the_rest_an_end(tmp_path: Path) -> None:
    """PRC-03: what can't finish in time ends as `error shutdown`: published, accounted for, exit 0."""
    config = emulated_config(base_ms=60_000, per_frame_ms=0, broker={"grace_ms": 300})
    with Processes(tmp_path) as processes:
        broker = processes.broker(config)
        processes.workers(broker, 1)
        with (
            headrace.Subscriber(broker.address, stream="cam") as subscriber,
            headrace.Producer(broker.address, linger_s=0.1) as producer,
        ):
            begin_work(broker, producer, 20)
            code = broker.running.stop()
            outcomes = [subscriber.get(timeout=LIMIT_S) for _ in range(20)]
            account = producer.flush(LIMIT_S)

    assert code == ExitCode.OK
    assert [(item.seq, item.status, item.code) for item in outcomes] == [
        (number, Status.ERROR, "shutdown") for number in range(20)
    ]
    assert account.by_status == {"error": 20}


@pytest.mark.parametrize("role", ["worker", "broker"])
def test_two_signals_at_one_moment_are_one(tmp_path: Path, role: str) -> None:
    """A supervisor, a shell or systemd may signal a process and then its group: work is finished all the
    same."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(SLOW)
        (worker,) = processes.workers(broker, 1)
        with headrace.Producer(broker.address, linger_s=0.1) as producer:
            begin_work(broker, producer, 8)
            stopped = {"worker": worker, "broker": broker.running}[role]
            stopped.popen.send_signal(signal.SIGTERM)
            if role == "broker":
                stopped.read_log("stopping when drained")
            assert stopped.stop() == ExitCode.OK, stopped.text()
            if role == "worker":
                processes.worker(broker)
            account = producer.flush(LIMIT_S)

    assert account.by_status == {"ok": 8}


# -- second signal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["worker", "broker"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, role: str, number: signal.Signals) -> None:
    """PRC-03: the first waits for a batch that takes a minute; the second does not."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(STUCK)
        (worker,) = processes.workers(broker, 1)
        producer = headrace.Producer(broker.address, linger_s=0.1)
        try:
            begin_work(broker, producer, 1)
            stopped = {"worker": worker, "broker": broker.running}[role]
            stopped.popen.send_signal(number)
            if role == "broker":
                stopped.read_log("stopping when drained")
            else:
                broker.wait_status(lambda status: not any(w["state"] == "ready" for w in status["workers"]))
            assert stopped.popen.poll() is None

            watch = elapsed()
            code = stopped.insist(number)

            assert watch() < PROMPT_S
            assert code in {128 + number, -number}
        finally:
            with pytest.raises(headrace.NotDeliveredError):
                producer.close(timeout=0)


# -- up ----------------------------------------------------------------------------------------------------


def start_up(
    processes: Processes, config: str, workers_count: int
) -> tuple[Running, list[psutil.Process], str]:
    """Start ``headrace up`` and wait until its workers serve; return it, its children and its address."""
    path = processes.folder / "up.toml"
    path.write_text(config)
    up = processes.start("up", "--config", path, "--device", "emulated", "--workers", workers_count, "--json")
    ready = up.read_json()
    address = ready["endpoints"]["frames"]
    with headrace.Control(address) as control:
        watch = elapsed()
        while sum(w["state"] == "ready" for w in control.status()["workers"]) < workers_count:
            assert watch() < LIMIT_S, up.text()
    children = psutil.Process(up.pid).children(recursive=True)
    assert {child.pid for child in children} == set(ready["pids"].values())
    return up, children, address


def test_up_stops_all_and_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM under load: frames finish, exit 0, and none of its processes is left."""
    with Processes(tmp_path) as processes:
        up, children, address = start_up(processes, SLOW, 2)
        with headrace.Producer(address) as producer:
            for _ in range(40):
                producer.push(IMAGE, stream="cam")
            while producer.account.finished == 0:
                producer.push(IMAGE, stream="cam", timeout=LIMIT_S)
            sent = producer.account.sent
            up.popen.send_signal(signal.SIGTERM)
            account = producer.flush(LIMIT_S)
        code = up.wait()
        left = alive(children)

    assert code == ExitCode.OK, up.text()
    assert left == []
    assert (account.sent, account.finished) == (sent, sent)
    assert account.by_status.get("ok", 0) + account.rejected.get("draining", 0) == sent
    assert "Traceback" not in up.stderr


def test_a_second_signal_ends_up_and_all_its_processes_at_once(tmp_path: Path) -> None:
    """PRC-03: with a batch that takes a minute, twice SIGTERM leaves nothing within the limit."""
    with Processes(tmp_path) as processes:
        up, children, address = start_up(processes, STUCK, 2)
        producer = headrace.Producer(address, linger_s=0.1)
        try:
            producer.push(IMAGE, stream="cam")
            with headrace.Control(address) as control:
                while not any(worker["in_flight"] for worker in control.status()["workers"]):
                    pass
                up.popen.send_signal(signal.SIGTERM)
                while not control.status()["is_draining"]:
                    pass
            assert up.popen.poll() is None

            watch = elapsed()
            code = up.insist(signal.SIGTERM)
            gone, left = psutil.wait_procs(children, timeout=PROMPT_S)

            assert watch() < PROMPT_S
            assert left == []
            assert len(gone) == 3
            assert code != ExitCode.OK
        finally:
            with pytest.raises(headrace.NotDeliveredError):
                producer.close(timeout=0)


def test_nothing_is_left_of_an_up_killed_while_it_starts(tmp_path: Path) -> None:
    """PRC-05: killed at the first sign of life, before the workers said anything."""
    path = tmp_path / "up.toml"
    path.write_text(SLOW)
    with Processes(tmp_path) as processes:
        up = processes.start("up", "--config", path, "--device", "emulated", "--workers", 2)
        up.read_log("process started")
        children = psutil.Process(up.pid).children(recursive=True)
        assert children

        up.kill()
        _, left = psutil.wait_procs(children, timeout=5.0)

        assert left == []


# -- PRC-11: idle processes --------------------------------------------------------------------------------


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A folder of three images, for a source that is soon at its end."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        cv2.imwrite(str(folder / f"{number}.png"), np.zeros((32, 32, 3), np.uint8))
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_push_between_two_frames_ends_soon(tmp_path: Path, picture: Path, number: signal.Signals) -> None:
    """PRC-11: a source that gives a frame every twenty seconds does not keep a stopped push waiting."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(emulated_config())
        processes.workers(broker, 1)
        push = processes.start(
            "push", picture, "--stream", "cam", "--connect", broker.address, "--fps", "0.05", "--json"
        )
        broker.wait_status(lambda status: status["account"]["ok"] == 1)

        watch = elapsed()
        code = push.stop(number)

        assert watch() < PROMPT_S
        assert code == ExitCode.OK, push.text()
        assert push.read_json()["outcomes"] == {"ok": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_push_that_waits_for_outcomes_says_so_and_ends_at_the_second_signal(
    tmp_path: Path, picture: Path, number: signal.Signals
) -> None:
    """PRC-11: without a worker its frames have no outcome: the first signal waits for them, aloud."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(emulated_config())
        push = processes.start("push", picture, "--connect", broker.address, "--fast", "--json")
        broker.wait_status(lambda status: status["account"]["accepted"] == 3)
        push.popen.send_signal(number)
        push.read_line(lambda line: "again to end at once" in line, "stderr")

        watch = elapsed()
        code = push.insist(number)

        assert watch() < PROMPT_S
        # A third signal may have met it while it was ending.
        assert code in {ExitCode.FAILED, ExitCode.INTERRUPTED, -number}, push.text()
        assert "Traceback" not in push.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("role", ["worker", "watch", "push", "status"])
def test_before_the_broker_exists_a_signal_ends_everything_soon(
    tmp_path: Path, picture: Path, role: str, number: signal.Signals
) -> None:
    """PRC-11: while it still looks for a broker that is not there."""
    commands: dict[str, list[object]] = {
        "worker": ["worker", "--device", "emulated"],
        "watch": ["watch", "cam"],
        "push": ["push", picture],
        "status": ["status"],
    }
    with no_broker() as address, Processes(tmp_path) as processes:
        running = processes.start(*commands[role], "--connect", address)
        wait_until_it_connects(running)

        watch = elapsed()
        running.popen.send_signal(number)
        running.wait()

        assert watch() < PROMPT_S
        assert "Traceback" not in running.stderr


def wait_until_it_connects(running: Running) -> None:
    """Wait for a thread that ZeroMQ starts with its first socket: from then on it looks for the broker."""
    watch = elapsed()
    while psutil.Process(running.pid).num_threads() < 3:
        assert watch() < LIMIT_S, running.text()
        assert running.popen.poll() is None, running.text()


@pytest.mark.parametrize("role", ["worker", "watch", "push"])
def test_while_the_broker_is_away_a_signal_ends_everything_soon(
    tmp_path: Path, picture: Path, role: str
) -> None:
    """PRC-11: after the broker was killed under them."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(emulated_config())
        (worker,) = processes.workers(broker, 1)
        running, is_begun = {
            "worker": lambda: (worker, None),
            "watch": lambda: (processes.start("watch", "cam", "--connect", broker.address), "watching cam"),
            "push": lambda: (
                processes.start("push", picture, "--connect", broker.address, "--fps", "0.05"),
                None,
            ),
        }[role]()
        if is_begun:
            running.read_line(lambda line: is_begun in line, "stderr")
        elif role == "push":
            broker.wait_status(lambda status: status["account"]["ok"] == 1)
        broker.running.kill()

        watch = elapsed()
        running.stop(signal.SIGINT)

        assert watch() < PROMPT_S
        assert "Traceback" not in running.stderr
