"""W2: ResNet-50 on the CPU through headrace with 2 workers of 1 thread, batches of 4.

In-process: two processes, each with its own ONNX Runtime session of one thread, run the same graph on
batches of 4 that stand ready. Rounds are interleaved. A shared machine moves these figures by some per
cent: read the range.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks import graphs
from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.processes import Child, Processes
from benchmarks.report import Budget, Report, Table, median
from benchmarks.stats import ratio_text, spread

SIDE, BATCH, WORKERS = 224, 4, 2

#: Unfinished frames: both workers hold two batches (slots), and as many wait at the broker.
IN_FLIGHT = BATCH * WORKERS * 4

#: DESIGN section 9, W2.
RATIO = 0.97


def run(*, quick: bool) -> Report:
    """Measure interleaved rounds of both."""
    warm_up_s, measure_s = (1.0, 3.0) if quick else (3.0, 12.0)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = graphs.write_resnet50(Path(folder))
        for _ in range(1 if quick else 5):
            in_process = _in_process(path, warm_up_s, measure_s)
            rounds.append({"in-process": in_process, "headrace": _headrace(path, warm_up_s, measure_s)})
    shares = [each["headrace"] / each["in-process"] for each in rounds]
    rows = tuple(
        (
            name,
            spread([each[name] for each in rounds], 1),
            ratio_text([each[name] / each["in-process"] for each in rounds]),
        )
        for name in ("in-process", "headrace")
    )
    title = f"Compute (W2): ResNet-50, {WORKERS} workers of 1 thread, batches of {BATCH}"
    return Report(
        "compute",
        tuple(rounds),
        (Table(title, ("system", "images/s", "of in-process"), rows),),
        (Budget.at_least("W2, share of in-process", median(shares), RATIO),),
    )


def _in_process(path: Path, warm_up_s: float, measure_s: float) -> float:
    with Processes() as processes:
        children = [
            processes.role(
                "in-process-model", f"in-process {n}", model=str(path), batch=BATCH, shape=(3, SIDE, SIDE)
            )
            for n in range(WORKERS)
        ]
        for child in children:
            child.read()
        return _rate(children, warm_up_s, measure_s)


def _headrace(path: Path, warm_up_s: float, measure_s: float) -> float:
    config = broker_config(Model((SquareClass(SIDE, BATCH),), path=path), credits_count=IN_FLIGHT)
    with Processes() as processes:
        address = processes.broker(config)
        processes.workers(address, WORKERS, "cpu", threads=1)
        subscriber = processes.role("subscriber", address=address)
        subscriber.read()
        processes.role(
            "producer", address=address, shape=(SIDE, SIDE, 3), in_flight=IN_FLIGHT, streams=4, bundle="auto",
            lane="inline",
        ).read()  # fmt: skip
        return _rate([subscriber], warm_up_s, measure_s)


def _rate(children: list[Child], warm_up_s: float, measure_s: float) -> float:
    """Return frames a second, between whole batches.

    A batch takes some 250 ms here: counting from change to change keeps a cut batch from moving the
    figure."""
    time.sleep(warm_up_s)
    first = _next_change(children)
    time.sleep(measure_s)
    last = _next_change(children)
    return (last[0] - first[0]) / (last[1] - first[1])


def _next_change(children: list[Child]) -> tuple[int, float]:
    def count() -> tuple[int, float]:
        answers = [child.ask() for child in children]
        return sum(answer["count"] for answer in answers), answers[-1]["at_s"]

    was, _ = count()
    while True:
        now, at_s = count()
        if now != was:
            return now, at_s
        time.sleep(0.002)
