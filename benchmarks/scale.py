"""Scaling by launching: frames a second of 1, 2, 4 and 8 workers of one broker, on the emulated engine.

Every process is real; only the device is emulated: a worker sleeps T(b) = 36 + 0.5 b ms for a batch of b
frames and computes nothing. Why this T: a full batch of 8 takes 40 ms, so a worker makes at most 200 frames
a second. Eight of them need 1,600, a fraction of what the broker, the producers and the subscriber can do on
two cores with frames of 32x32 (the table shows the CPU that they took), and sleeping workers take no core
from each other. So what is measured is whether the broker keeps every worker busy with full batches, not
how fast the machine is. Nine tenths of T do not depend on b: batches that are not full show at once.

The load is open loop: producers offer OVERLOAD times what the workers can do, each frame at its own time,
and what finds no room is shed there and counted. A round measures every number of workers; the rounds are
interleaved, ratios are taken within a round, and the medians count.

`python -m benchmarks.scale ADDRESS JSON` is one producer, a child of this module.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.processes import Child, Processes
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.stats import ratio_text, spread
from benchmarks.throughput import Window, measure
from headrace.clients.producer import Producer
from headrace.errors import RequestTimeoutError

SIDE = 32
MAX_BATCH_SIZE = 8
BASE_MS, PER_FRAME_MS = 36.0, 0.5

#: Most frames a second that one worker can make: full batches without a pause between them.
CAPACITY_PER_S = MAX_BATCH_SIZE / (BASE_MS + PER_FRAME_MS * MAX_BATCH_SIZE) * 1e3

WORKERS = (1, 2, 4, 8)
ROUNDS = 3
PRODUCERS = 2
STREAMS_PER_PRODUCER = 4

#: Offered load as a multiple of the workers' capacity.
OVERLOAD = 1.5

#: Frames that all producers together may have unfinished per worker: its two slots, and as much queued, so
#: that a worker never waits for a producer.
UNFINISHED_PER_WORKER = 4 * MAX_BATCH_SIZE

#: Budget of issue "The main job end to end": workers -> ratio to one worker.
BUDGETS = {2: 1.9, 4: 3.6}


@dataclass(frozen=True, slots=True)
class Measured:
    """``cpu`` is a share of one core, by process name without its number."""

    per_s: float
    shed_share: float
    cpu: dict[str, float]


def run(*, quick: bool = False) -> Report:
    """Measure every number of workers, round by round."""
    window = Window(0.7, 2.0) if quick else Window(2.0, 6.0)
    rounds = [
        {count: measure_scale(count, window) for count in WORKERS} for _ in range(1 if quick else ROUNDS)
    ]
    ratios = {count: [each[count].per_s / each[1].per_s for each in rounds] for count in WORKERS}
    budgets = [
        Budget.at_least(f"emulated: {count} workers / 1 worker", median(ratios[count]), limit)
        for count, limit in BUDGETS.items()
    ]
    table = Table(
        f"Scaling on the emulated engine (no model runs): T(b) = {BASE_MS:g} + {PER_FRAME_MS:g} b ms, batches"
        f" of {MAX_BATCH_SIZE}, at most {CAPACITY_PER_S:g} frames/s a worker, {OVERLOAD:g} times it offered",
        (
            "workers",
            "frames/s",
            "to one worker",
            "of the most possible",
            "shed %",
            "broker CPU %",
            "producers CPU %",
        ),
        tuple(_row(count, [each[count] for each in rounds], ratios[count]) for count in WORKERS),
    )
    return Report("scale", tuple(_flat(each) for each in rounds), (table,), tuple(budgets))


def measure_scale(workers_count: int, window: Window) -> Measured:
    """Measure one broker with so many workers under a load that they can't bear."""
    unfinished = UNFINISHED_PER_WORKER * workers_count // PRODUCERS
    model = Model((SquareClass(SIDE, MAX_BATCH_SIZE),), emulated_ms=(BASE_MS, PER_FRAME_MS))
    with Processes() as processes:
        address = processes.broker(broker_config(model, credits_count=unfinished))
        processes.workers(address, workers_count, "emulated")
        subscriber = processes.role("subscriber", address=address)
        subscriber.read()
        rate = OVERLOAD * CAPACITY_PER_S * workers_count / PRODUCERS
        producers = [
            _start_producer(processes, number, address, rate, unfinished) for number in range(PRODUCERS)
        ]
        before = [producer.ask() for producer in producers]
        measured = measure(processes, [subscriber], window)
        after = [producer.ask() for producer in producers]
    offered, shed = (
        sum(last[name] - first[name] for first, last in zip(before, after, strict=True))
        for name in ("offered", "shed")
    )
    if not shed:
        raise RuntimeError(
            f"{workers_count} workers took all {offered} frames offered: they were not saturated"
        )
    cpu = {
        role: sum(us for name, us in measured.cpu_us.items() if name.startswith(role)) * measured.per_s / 1e6
        for role in ("broker", "producer", "worker")
    }
    return Measured(measured.per_s, shed / offered, cpu)


def _start_producer(processes: Processes, number: int, address: str, rate: float, unfinished: int) -> Child:
    name = f"producer {number}"
    settings = {"name": name, "rate_per_s": rate, "max_unfinished": unfinished}
    child = Child(["-m", "benchmarks.scale", address, json.dumps(settings)], name)
    processes.children[name] = child  # which ends it
    child.read()
    return child


def _row(count: int, measured: list[Measured], ratios: list[float]) -> tuple[Cell, ...]:
    return (
        f"{count} emulated",
        spread([each.per_s for each in measured]),
        ratio_text(ratios),
        f"{median([each.per_s for each in measured]) / CAPACITY_PER_S / count:.3f}",
        f"{100 * median([each.shed_share for each in measured]):.0f}",
        f"{100 * median([each.cpu['broker'] for each in measured]):.0f}",
        f"{100 * median([each.cpu['producer'] for each in measured]):.0f}",
    )


def _flat(one: dict[int, Measured]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for count, measured in one.items():
        figures[f"emulated_{count}_workers_per_s"] = measured.per_s
        figures[f"emulated_{count}_workers_shed_share"] = measured.shed_share
        figures[f"emulated_{count}_workers_broker_cpu"] = measured.cpu["broker"]
    return figures


# -- one producer ------------------------------------------------------------------------------------------


def produce(address: str, *, name: str, rate_per_s: float, max_unfinished: int) -> None:
    """Offer frames at a steady rate; answer each line on stdin with the counts so far."""
    counts = {"offered": 0, "shed": 0}

    def answer() -> None:
        for _ in sys.stdin:
            _say(dict(counts))
        os._exit(0)  # the parent is done with us, or gone

    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    with Producer(address, name=name, max_unfinished_frames=max_unfinished) as producer:
        producer.wait_connected(10.0)
        _say({"ready": True})
        threading.Thread(target=answer, daemon=True).start()
        began_s = time.monotonic()
        while True:
            wait_s = began_s + counts["offered"] / rate_per_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            stream = f"{name}/{counts['offered'] % STREAMS_PER_PRODUCER}"
            counts["offered"] += 1
            try:
                producer.push(image, stream=stream, timeout=0)
            except RequestTimeoutError:
                counts["shed"] += 1


def _say(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    produce(sys.argv[1], **json.loads(sys.argv[2]))
