"""Twice as many frames as can be served: the most urgent ones do not notice, the rest is told why."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hr_faults as hf
import pytest
from hr_processes import LIMIT_S, Processes

import headrace
from headrace.errors import RequestTimeoutError
from headrace.protocol.messages import Reject

MIB = 2**20

#: A batch takes 60 ms whatever its size, as on a device that is far from full: so what a frame waits for is
#: the same at any load, and any growth of its latency is the queue's doing. 8 / 60 ms = 133 frames/s.
BASE_MS = 60.0
BATCH = 8
CAPACITY = BATCH / BASE_MS * 1e3

URGENT = 9


@dataclass
class Load:
    """What came of an open-loop load."""

    seconds: float
    ends: Counter[str] = field(default_factory=Counter)
    urgent_ms: list[float] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.ends["ok"] / self.seconds

    @property
    def p99_ms(self) -> float:
        return sorted(self.urgent_ms)[int(0.99 * len(self.urgent_ms))]


def offer(address: str, rate: float, seconds: float) -> Load:
    """Push at a rate, whatever becomes of it: one frame in ten is urgent, the others have priorities 0 to 2.
    Each has a second to live. Latency counts from the intended time of the push."""
    load = Load(seconds)
    is_done = threading.Event()

    def read(subscriber: headrace.Subscriber) -> None:
        while not is_done.is_set():
            with contextlib.suppress(RequestTimeoutError):
                item = subscriber.get(0.1)
                assert isinstance(item, headrace.Outcome), item
                load.ends[str(item.status)] += 1
                if item.status == "ok" and item.stream.startswith("urgent"):
                    load.urgent_ms.append((time.monotonic_ns() - (item.pts_ns or 0)) / 1e6)

    with (
        headrace.Subscriber(address, start="now", max_queued=10_000) as subscriber,
        headrace.Producer(address, on_reject=load.rejects.append) as urgent,
        headrace.Producer(address, on_reject=load.rejects.append) as others,
    ):
        reader = threading.Thread(target=read, args=(subscriber,), daemon=True)
        reader.start()
        began_s = time.monotonic()
        pause = threading.Event()
        for number in range(int(rate * seconds)):
            due_s = began_s + number / rate
            pause.wait(max(0.0, due_s - time.monotonic()))
            is_urgent = number % 10 == 0
            name = f"{'urgent' if is_urgent else 'other'}/{number % 7}"
            (urgent if is_urgent else others).push(
                hf.image(number), stream=name, priority=URGENT if is_urgent else number % 3, ttl_ms=1_000,
                pts_ns=int(due_s * 1e9), timeout=LIMIT_S,
            )  # fmt: skip
        for producer in (urgent, others):
            producer.flush(LIMIT_S)
        # Everything is published before its credit is granted: a moment for the reader's side.
        pause.wait(0.5)
        is_done.set()
        reader.join(LIMIT_S)
    return load


@dataclass(frozen=True)
class Round:
    """Half, full and twice the capacity, one after another."""

    half: Load
    full: Load
    twice: Load

    @property
    def is_good(self) -> bool:
        peak = max(self.half.goodput, self.full.goodput)
        return self.twice.goodput >= 0.95 * peak and self.twice.p99_ms <= 1.2 * self.half.p99_ms

    def __str__(self) -> str:
        loads = (self.half, self.full, self.twice)
        return ", ".join(f"{load.goodput:.1f}/s p99 {load.p99_ms:.1f} ms" for load in loads)


@pytest.mark.timeout(240)
def test_twice_the_load_keeps_the_goodput_and_the_urgent_frames(tmp_path: Path) -> None:
    """Must-show 7: at twice the capacity goodput is at least 95 % of the peak, p99 of the top priority within
    1.2 times its value at half load, memory bounded; every refused frame has a code and a time to retry.

    One round of up to three has to show it: on a busy machine this process is late as often as the broker.
    """
    admission = {"max_bytes": 8 * MIB, "credits_per_producer": 256}
    config = hf.config(
        base_ms=BASE_MS, per_frame_ms=0.0, max_batch_size=BATCH, admission=admission,
        queues={"max_queue_size": 64}, retention={"max_bytes": 8 * MIB},
    )  # fmt: skip
    rounds: list[Round] = []
    with Processes(tmp_path) as processes:
        broker = processes.broker(config)
        # One slot: a second one holds a batch that was closed earlier, behind which an urgent frame waits.
        hf.start_workers(processes, broker, 1, "--slots", 1)
        idle = hf.memory_bytes(broker.pid)
        while len(rounds) < 3 and not (rounds and rounds[-1].is_good):
            half = offer(broker.address, CAPACITY * 0.5, 4.0)
            full = offer(broker.address, CAPACITY * 1.0, 3.0)
            rounds.append(Round(half, full, offer(broker.address, CAPACITY * 2.0, 5.0)))
        status = broker.wait_drained()
        grown = hf.memory_bytes(broker.pid, "VmHWM") - idle

    last = rounds[-1]
    assert last.is_good, [str(each) for each in rounds]
    assert last.half.ends["ok"] == last.half.ends.total()
    assert last.twice.ends["rejected"] == len(last.twice.rejects) > 100
    assert all(reject.code and reject.retry_after_ms for reject in last.twice.rejects)
    assert grown < 1.2 * 16 * MIB
    assert status["account"]["unfinished"] == 0
