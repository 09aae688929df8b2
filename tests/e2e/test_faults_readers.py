"""Readers that are slow, paused, or killed again and again: the broker stays well, the reader knows where it
stands."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

import hr_faults as hf
import pytest
from hr_processes import LIMIT_S, BrokerProcess, Processes

import headrace
from headrace.errors import RequestTimeoutError

MIB = 2**20


class Feed:
    """Pushes a frame every ``every_s`` from a thread of its own; ``pts_ns`` is the monotonic time of the
    push."""

    def __init__(self, address: str, every_s: float) -> None:
        self._producer = headrace.Producer(address)
        self._every_s = every_s
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.count = 0

    def _run(self) -> None:
        while not self._is_stopping.wait(self._every_s):
            with contextlib.suppress(RequestTimeoutError):
                self._producer.push(hf.image(self.count), stream="s", pts_ns=time.monotonic_ns(), timeout=1.0)
                self.count += 1

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._is_stopping.set()
        self._thread.join(LIMIT_S)
        self._producer.close()


@pytest.mark.parametrize(
    ("adapter", "case"),
    [
        pytest.param("answer", "ZMQ-03", id="small-results"),
        pytest.param("preview", "VID-02", id="results-with-a-preview-of-100-kb"),
    ],
)
def test_the_latest_result_is_never_old(tmp_path: Path, adapter: str, case: str) -> None:
    """ZMQ-03, VID-02: 50 results a second, a reader of 5 a second in mode latest, with the smallest broker
    queue: what it reads after some seconds is as fresh as at the start, and it is told what it skipped."""
    config = hf.config(base_ms=1, max_batch_size=1, broker={"results_queue_messages": 2})
    with Processes(tmp_path) as processes:
        broker = processes.broker(config.replace("hr_fault_hooks:answer", f"hr_fault_hooks:{adapter}"))
        hf.start_workers(processes, broker, 1)
        with (
            headrace.Subscriber(broker.address, stream="s", mode="latest") as subscriber,
            Feed(broker.address, 0.02) as feed,
        ):
            ages_s = read_slowly(subscriber, seconds=2.5)
            account = subscriber.account

    assert max(ages_s[5:]) < 0.5, (case, ages_s)
    assert account.skipped > account.delivered
    assert account.delivered + account.skipped == pytest.approx(feed.count, abs=30)


def test_a_reader_of_everything_sees_how_far_it_is_behind(tmp_path: Path) -> None:
    """ZMQ-03: in mode every the same reader falls behind; how far, and how old what it reads is, stands in
    its account."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=1, max_batch_size=1))
        hf.start_workers(processes, broker, 1)
        with (
            headrace.Subscriber(broker.address, stream="s", max_queued=8) as subscriber,
            Feed(broker.address, 0.02),
        ):
            ages_s = read_slowly(subscriber, seconds=2.2)
            account = subscriber.account

    assert ages_s[-1] > 1.0
    assert account.age_ms > 500.0
    assert account.missed == account.skipped == 0


def read_slowly(subscriber: headrace.Subscriber, seconds: float) -> list[float]:
    """Read five items a second; return the age in seconds of each."""
    pause = threading.Event()
    ages_s: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pause.wait(0.2)
        item = subscriber.get(LIMIT_S)
        assert isinstance(item, headrace.Outcome), item
        ages_s.append((time.monotonic_ns() - (item.pts_ns or 0)) / 1e9)
    return ages_s


def test_memory_comes_back_after_a_backlog(tmp_path: Path) -> None:
    """ZMQ-04: a paused reader, 64 results of 1 MB, resume, drain, five times: the broker stays within its
    budget and 20 % and does not grow after the second drain."""
    budget = (16 + 32) * MIB
    config = hf.config(
        base_ms=1,
        max_batch_size=1,
        admission={"max_bytes": 16 * MIB},
        retention={"max_bytes": 32 * MIB},
        broker={"results_queue_messages": 8},
    ).replace("hr_fault_hooks:answer", "hr_fault_hooks:megabyte")
    resident: list[int] = []
    with Processes(tmp_path) as processes:
        broker = processes.broker(config)
        hf.start_workers(processes, broker, 1)
        idle = hf.memory_bytes(broker.pid)
        with headrace.Producer(broker.address) as producer:
            for _ in range(5):
                with headrace.Subscriber(
                    broker.address, stream="s", start="now", max_queued=2, max_queued_bytes=2 * MIB
                ) as subscriber:
                    for number in range(64):
                        producer.push(hf.image(number), stream="s")
                    producer.flush(LIMIT_S)  # nobody has read anything so far
                    ended = missed = 0
                    while ended + missed < 64:
                        item = subscriber.get(LIMIT_S)
                        if isinstance(item, headrace.Outcome):
                            ended += 1
                        else:
                            missed += item.count or 0
                    assert ended >= 16
                resident.append(hf.memory_bytes(broker.pid))
        peak = hf.memory_bytes(broker.pid, "VmHWM")

    assert peak - idle < 1.2 * budget, f"{peak / MIB:.0f} MiB, idle {idle / MIB:.0f}"
    assert max(resident[2:]) < resident[1] * 1.05 + 2 * MIB, [round(each / MIB) for each in resident]


def test_a_broker_does_not_grow_by_readers_that_crash(tmp_path: Path) -> None:
    """ZMQ-05: 1,000 subscribers that connect, subscribe and vanish: an idle broker neither grows nor keeps
    their descriptors."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config())
        crash_readers(broker, 200)
        settled = hf.memory_bytes(broker.pid)
        descriptors = steady_descriptors(broker, None)

        crash_readers(broker, 1_000)

        assert steady_descriptors(broker, descriptors) <= descriptors
        assert hf.memory_bytes(broker.pid) - settled < 4 * MIB
        with headrace.Subscriber(broker.address) as subscriber:
            assert subscriber.is_connected


def crash_readers(broker: BrokerProcess, count: int) -> None:
    """Connect as a subscriber by hand, subscribe, and reset the connection as a killed process's kernel does
    when data is unread."""
    host, _, port = broker.endpoints["results"].removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
    subscribe = b"\x01some-stream\x00"
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(greeting)
            receive(connection, 64)
            connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
            receive(connection, 2)
            connection.sendall(b"\x00" + bytes([len(subscribe)]) + subscribe)


def receive(connection: socket.socket, count: int) -> None:
    while count > 0:
        data = connection.recv(count)
        assert data, "the broker closed the connection"
        count -= len(data)


def steady_descriptors(broker: BrokerProcess, wanted: int | None) -> int:
    """Return the descriptors of a broker once they are as few as wanted, or have not changed for a while."""
    pause = threading.Event()
    last = hf.descriptor_count(broker.pid)
    unchanged = 0
    for _ in range(100):
        if wanted is not None and last <= wanted:
            return last
        pause.wait(0.1)
        now = hf.descriptor_count(broker.pid)
        unchanged = unchanged + 1 if now == last else 0
        last = now
        if wanted is None and unchanged >= 10:
            return last
    return last
