"""W1: the mean of 224x224x3 uint8 frames, 64 in flight, one worker, batches to 32.

In-process: one thread gathers full batches from separate frames and runs the same graph with the same one
thread. The forwarder's worker does exactly that with the batches it gets. Rounds are interleaved.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import graphs
from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.lanes import INLINE, SHM, has_lane
from benchmarks.processes import Processes
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.stats import ratio_text, spread
from benchmarks.throughput import Load, Measured, Window, headrace_throughput, measure, plain_throughput

SIDE = 224
LOAD = Load((SIDE, SIDE, 3), in_flight=64)
MAX_BATCH = 32

#: DESIGN section 9, W1.
RATIO = 0.72

IN_PROCESS, FORWARDER = "in-process", "forwarder"


def run(*, quick: bool) -> Report:
    """Measure headrace by each lane, the forwarder and the bare function."""
    window = Window.of(quick=quick)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = graphs.write_mean(Path(folder))
        rounds = [_round(path, window) for _ in range(1 if quick else 3)]
    lane = SHM if has_lane(SHM) else INLINE
    shares = _shares(rounds, f"headrace {lane}")
    return Report(
        "mean",
        tuple({key: one.per_s for key, one in each.items()} for each in rounds),
        (_table(rounds),),
        (Budget.at_least(f"W1, {lane} lane, share of in-process", median(shares), RATIO),),
    )


def mean_config(path: Path) -> str:
    """Return a broker that serves W1's model."""
    model = Model((SquareClass(SIDE, MAX_BATCH),), path=path)
    return broker_config(model, credits_count=LOAD.in_flight)


def _round(path: Path, window: Window) -> dict[str, Measured]:
    measured = {IN_PROCESS: _in_process(path, window)}
    for lane in (INLINE, SHM):
        if has_lane(lane):
            measured[f"headrace {lane}"] = headrace_throughput(
                LOAD, window, lane=lane, config=mean_config(path), device="cpu"
            )
    measured[FORWARDER] = plain_throughput(LOAD, window, "forwarder", model=str(path))
    return measured


def _in_process(path: Path, window: Window) -> Measured:
    with Processes() as processes:
        child = processes.role("in-process-mean", model=str(path), size=SIDE, max_batch_size=MAX_BATCH)
        child.read()
        return measure(processes, [child], window)


def _shares(rounds: list[dict[str, Measured]], key: str) -> list[float]:
    return [each[key].per_s / each[IN_PROCESS].per_s for each in rounds]


def _table(rounds: list[dict[str, Measured]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            key,
            spread([each[key].per_s for each in rounds]),
            ratio_text(_shares(rounds, key)),
            *(
                spread([each[key].cpu_of(name) for each in rounds], 1)
                for name in ("broker", "producer", "worker", "subscriber")
            ),
        )
        for key in rounds[0]
    ]
    if not has_lane(SHM):
        rows.append(("headrace shm", *["not built yet"] * 6))
    columns = (
        "system", "frames/s", "of in-process", "broker us", "producer us", "worker us", "subscriber us",
    )  # fmt: skip
    return Table("Mean (W1): 224x224x3 uint8, 64 in flight, one worker, batches to 32", columns, tuple(rows))
