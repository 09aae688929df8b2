"""What the world does to processes: clocks jump, versions differ, names move, brokers restart, disks fill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hr_clients
import hr_faults as hf
import pytest
import zmq
from hr_processes import LIMIT_S, SOCKETS, Processes, emulated_config

import headrace
from headrace.clients.records import Missed
from headrace.exit_codes import ExitCode

SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *shift;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("HR_CLOCK_FILE"), O_RDONLY);
    shift = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec += *shift;
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """A wall clock that can be set for processes that were started with ``env``."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "shim.c", folder / "shim.so"
        source.write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=LIMIT_S)
        self._file = folder / "clock"
        self.shift_s(0)
        self.env = {"LD_PRELOAD": str(library), "HR_CLOCK_FILE": str(self._file)}

    def shift_s(self, seconds: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRC-06: +1 h, -1 h and +10 years under load: no worker is lost, no frame expires early, and those whose
    time is over still expire."""
    if subprocess.run(["sh", "-c", "command -v cc"], capture_output=True).returncode:
        pytest.skip("this machine has no C compiler for the clock shim")
    clock = WallClock(tmp_path)
    for name, value in clock.env.items():
        monkeypatch.setenv(name, value)  # for all that is started from here on
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=5, max_batch_size=4))
        hf.start_workers(processes, broker, 2)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address) as producer,
        ):
            for number, shift_s in enumerate((0, 3_600, -3_600, 10 * 365 * 86_400, 0)):
                clock.shift_s(shift_s)
                shown = subprocess.run(["date", "+%s"], capture_output=True, text=True).stdout
                assert abs(int(shown) - time.time() - shift_s) < 60, "the shim does not work"
                began_s = time.monotonic()
                while time.monotonic() < began_s + 0.65:  # longer than three heartbeats
                    producer.push(hf.image(), stream=f"s{number}", ttl_ms=5_000)
                    (outcome,) = hf.read(subscriber, 1)
                    assert outcome.status == "ok"
            status = broker.status()
            # Nobody serves this model's class while both workers are stopped: the deadline must still come.
            for entry in status["workers"]:
                os.kill(entry["pid"], signal.SIGSTOP)
            clock.shift_s(-3_600)
            for _ in range(32):
                producer.push(hf.image(), stream="late", ttl_ms=300)
            began_s = time.monotonic()
            late = hf.read(subscriber, 32)
            took_s = time.monotonic() - began_s
            for entry in status["workers"]:
                os.kill(entry["pid"], signal.SIGCONT)

    assert status["workers_lost"] == 0
    assert {str(outcome.status) for outcome in late} <= {"expired", "rejected", "error"}
    assert [str(outcome.status) for outcome in late].count("expired") >= 8
    assert took_s < 5.0


def test_an_error_per_frame_does_not_fill_the_log(tmp_path: Path) -> None:
    """PRC-07: 6,000 frames that can't be decoded and 2,000 messages that can't be read: the first of a kind
    is logged and then a count, in under 100 KB."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(emulated_config(base_ms=0, per_frame_ms=0.1, max_batch_size=32))
        worker = processes.worker(broker)
        broken = b"\xff\xd8\xff\xe0" + bytes(100)
        png = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000200000002008020000000000000000") + bytes(
            40
        )
        with headrace.Producer(broker.address) as producer, zmq.Context() as context:
            with context.socket(zmq.PUSH) as push:
                push.connect(broker.endpoints["intake"])
                for _ in range(2_000):
                    push.send(b"\xc1 no msgpack at all")
                for number in range(6_000):
                    data = png if number % 2 else broken
                    try:
                        producer.push(data, stream="s", timeout=LIMIT_S)
                    except headrace.InvalidFrameError:
                        continue  # refused where it is made: nothing is sent
            producer.flush(LIMIT_S)
        status = broker.status()
        written = len(broker.running.stderr) + len(worker.stderr)
        broker.running.stop()

    assert status["account"]["rejected"] >= 2_000
    assert status["account"]["error"] >= 2_000
    assert written < 100_000, f"{written} bytes of log"
    assert "repeated_count" in broker.running.stderr or written < 20_000


def test_clients_of_a_broker_that_is_away_log_little(tmp_path: Path) -> None:
    """PRC-07: three seconds without a broker are a few lines of a worker, not one per attempt."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config())
        worker = hf.start_workers(processes, broker, 1)[0]
        broker.running.kill()
        worker.read_line(lambda line: "broker not reached" in line, "stderr")
        threading.Event().wait(3.0)
        written = worker.stderr

    assert len(written) < 4_000, written


def test_killed_processes_leave_no_shared_memory(tmp_path: Path) -> None:
    """PRC-08: workers and producers killed in mid-transfer, ten times. When what was accepted from them is
    finished, nothing of ours is left in the folder of shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    script = (
        "import sys, numpy, headrace\n"
        "rng = numpy.random.default_rng(int(sys.argv[2]))\n"
        "producer = headrace.Producer(sys.argv[1], shm_bytes=2**22, shm_folder=sys.argv[3])\n"
        # All different: one that two killed workers had is refused from then on, and so is its like.
        "while True: producer.push(rng.integers(0, 256, (256, 256, 3), numpy.uint8), stream='s')\n"
    )
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(size=256, shm={"folder": str(folder)}))
        for number in range(10):
            worker = hf.start_worker(processes, broker, HEADRACE_SHM__FOLDER=folder)
            producer = subprocess.Popen(
                [sys.executable, "-P", "-c", script, broker.address, str(number), str(folder)]
            )
            try:
                broker.wait_status(lambda status, n=number: status["account"]["ok"] > 5 * (n + 1))
            finally:
                producer.kill()
                producer.wait()
            worker.kill()
        assert list(folder.iterdir()), "nothing went through shared memory: the test shows nothing"
        hf.start_worker(processes, broker, HEADRACE_SHM__FOLDER=folder)
        status = broker.wait_drained()
        hr_clients.wait_for(lambda: not list(folder.iterdir()), LIMIT_S)
    assert status["account"]["ok"] > 50


# -- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("broker_version", "worker_version"), [(2, 1), (1, 2)])
def test_a_worker_of_another_protocol_version_is_refused_with_both_named(
    tmp_path: Path, broker_version: int, worker_version: int
) -> None:
    """SCL-03: it ends with its own code and says which version each side speaks; it never gets a batch."""
    with Processes(tmp_path) as processes:
        path = tmp_path / "broker.toml"
        path.write_text(hf.config())
        broker = processes.start(
            "broker", "--config", path, "--json", env=hf.env(HR_PROTOCOL_VERSION=broker_version)
        )
        address = broker.read_json()["endpoints"]["frames"]
        worker = processes.start(
            "worker", "--connect", address, "--device", "emulated",
            env=hf.env(HR_PROTOCOL_VERSION=worker_version),
        )  # fmt: skip
        code = worker.wait()

    assert code == ExitCode.UNAVAILABLE
    text = worker.stderr
    assert "protocol version" in text
    assert f"version {worker_version}" in text
    assert str(broker_version) in text


def test_an_update_one_worker_at_a_time_loses_nothing(tmp_path: Path) -> None:
    """SCL-03: workers of this version are replaced one by one under load, one of a newer version among them
    is refused: every frame is served, by those that understand it."""
    count = 400
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=2, max_batch_size=4))
        workers = hf.start_workers(processes, broker, 2)
        with (
            headrace.Subscriber(broker.address) as subscriber,
            headrace.Producer(broker.address, max_unfinished_frames=32) as producer,
        ):
            for number in range(count):
                producer.push(hf.image(number), stream="s", timeout=LIMIT_S)
                if number in {100, 200}:
                    old = workers[number // 100 - 1]
                    hf.start_worker(processes, broker, HR_PROTOCOL_VERSION=2)
                    hf.start_worker(processes, broker)
                    broker.wait_workers(3)
                    assert old.stop() == ExitCode.OK
            outcomes = hf.read(subscriber, count)
        status = broker.wait_drained()

    assert {outcome.status for outcome in outcomes} == {"ok"}
    assert status["workers_lost"] == 0
    assert len(status["workers"]) == 2


# -- names and restarts ------------------------------------------------------------------------------


def test_clients_follow_a_name_to_its_new_address(tmp_path: Path) -> None:
    """SCL-04: the broker moves from 127.0.0.12 to 127.0.0.13 under the same name: worker, producer and
    subscriber find it there within 30 s, without a restart."""
    hosts = tmp_path / "hosts"
    hosts.write_text("hub.example 127.0.0.12\n")
    settings = {"HR_HOSTS_FILE": hosts}
    script = (
        "import sys, numpy, headrace\n"
        "with headrace.Subscriber(sys.argv[1]) as subscriber, headrace.Producer(sys.argv[1]) as producer:\n"
        "    for line in sys.stdin:\n"
        "        producer.push(numpy.zeros((8, 8, 3), numpy.uint8), stream='s')\n"
        "        while not isinstance(item := subscriber.get(30), headrace.Outcome): pass\n"
        "        print(item.seq, item.status, flush=True)\n"
    )
    with Processes(tmp_path) as processes:
        first = processes.broker(hf.config(broker={"host": "127.0.0.12"}))
        port = first.address.rpartition(":")[2]
        name = f"tcp://hub.example:{port}"
        worker = processes.start("worker", "--connect", name, "--device", "emulated", env=hf.env(**settings))
        first.wait_workers(1)
        with subprocess.Popen(
            [sys.executable, "-P", "-c", script, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | hf.env(**settings),
        ) as client:  # fmt: skip
            try:
                assert ask(client) == "0 ok"

                first.running.kill()
                moved = {f"HEADRACE_BROKER__{key.upper()}": value.replace("127.0.0.12", "127.0.0.13")
                         for key, value in first.endpoints.items() if key in SOCKETS}  # fmt: skip
                moved["HEADRACE_BROKER__HOST"] = "127.0.0.13"
                second = processes.start("broker", "--config", tmp_path / "broker.toml", "--json", env=moved)
                assert second.read_json()["endpoints"]["frames"] == f"tcp://127.0.0.13:{port}"
                hosts.write_text("hub.example 127.0.0.13\n")

                assert ask(client) == "1 ok"
                assert worker.popen.poll() is None
            finally:
                client.kill()


def ask(client: subprocess.Popen[str]) -> str:
    """Have the client push a frame; return what it prints about the outcome."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("\n")
    client.stdin.flush()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(client.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(LIMIT_S)
    assert lines, "nothing within 30 s"
    return lines[0].strip()


@pytest.mark.timeout(180)
def test_everybody_is_back_after_each_restart_of_the_broker(tmp_path: Path) -> None:
    """SCL-05: five producers at 20 frames a second, two subscribers, two workers; the broker is killed and
    started again four times: all are back within 5 s each time, every frame is concluded, and each subscriber
    sees each outcome at most once and is told of the gap."""
    streams = [f"cam-{number}" for number in range(5)]
    is_stopping = threading.Event()
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=2, max_batch_size=8))
        hf.start_workers(processes, broker, 2)
        producers = [headrace.Producer(broker.address) for _ in streams]
        subscribers = [headrace.Subscriber(broker.address, max_queued=100_000) for _ in range(2)]

        def feed() -> None:
            number = 0
            while not is_stopping.wait(0.05):
                number += 1
                for stream, producer in zip(streams, producers, strict=True):
                    producer.push(hf.image(number), stream=stream, timeout=LIMIT_S)

        feeder = threading.Thread(target=feed, daemon=True)
        feeder.start()
        try:
            for _ in range(4):
                broker.wait_status(lambda status: status["account"]["ok"] > 50)
                broker.running.kill()
                broker.restart()
                broker.wait_status(lambda status: is_whole(status, subscribers), 5.0)
            broker.wait_status(lambda status: status["account"]["ok"] > 50)
        finally:
            is_stopping.set()
            feeder.join(LIMIT_S)
        accounts = [producer.flush(LIMIT_S) for producer in producers]
        last = broker.wait_drained()
        items = [drain(subscriber, last) for subscriber in subscribers]
        for closed in (*producers, *subscribers):
            closed.close()

    assert all(account.sent == account.finished > 50 for account in accounts)
    assert all(account.sessions >= 5 for account in accounts)
    for seen in items:
        hf.ends(item for item in seen if isinstance(item, headrace.Outcome))
        gaps = [item for item in seen if isinstance(item, Missed)]
        assert len({gap.boot for gap in gaps}) == 4


def is_whole(status: dict[str, Any], subscribers: list[headrace.Subscriber]) -> bool:
    """Tell whether everybody is connected to the broker whose status this is."""
    ready = [worker for worker in status["workers"] if worker["state"] == "ready"]
    reading = [one for one in subscribers if one.is_connected and one.boot == status["boot"]]
    return (len(ready), len(status["producers"]), len(reading)) == (2, 5, len(subscribers))


def drain(subscriber: headrace.Subscriber, status: dict[str, Any]) -> list[headrace.Outcome | Missed]:
    """Read until the last outcome of every stream of the last broker has come."""
    left = {stream: entry["next_pub_seq"] - 1 for stream, entry in status["streams"].items()}
    items: list[headrace.Outcome | Missed] = []
    while left:
        item = subscriber.get(LIMIT_S)
        items.append(item)
        if isinstance(item, headrace.Outcome) and (item.boot, item.pub_seq) == (
            status["boot"],
            left.get(item.stream),
        ):
            del left[item.stream]
    return items
