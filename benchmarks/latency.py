"""W4: 20 frames a second of W1 on an idle system, over the bare function.

Open loop at a steady rate; latency runs from the time a frame was due until its outcome is in the
subscriber's hands. In-process: the bare function called with one frame at the same times. The bare chain is
what the way alone takes, with and without the payload on it (``benchmarks.chain``). The second table says
where the time of a frame goes, from the timeline that each outcome carries.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import graphs
from benchmarks.lanes import INLINE, SHM, has_lane
from benchmarks.mean import SIDE, mean_config
from benchmarks.processes import Processes
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.stats import spread

FPS = 20

#: DESIGN section 9, W4: milliseconds over in-process.
P50_OVER_MS, P99_OVER_MS = 0.5, 2.0

IN_PROCESS = "in-process"

#: The chain's rows, and whether its frames carry their payload.
CHAINS = {"bare chain, inline": True, "bare chain, no payload": False}


def run(*, quick: bool) -> Report:
    """Measure interleaved rounds of the bare function and of each lane."""
    duration_s, warm_up_s = (4.0, 1.0) if quick else (30.0, 5.0)
    question = {
        "pattern": "steady", "rate": FPS, "duration_s": duration_s, "warm_up_s": warm_up_s, "seed": 1,
        "drain_s": 5.0,
    }  # fmt: skip
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = graphs.write_mean(Path(folder))
        for _ in range(1 if quick else 3):
            measured = {IN_PROCESS: _in_process(path, question)}
            for name, has_payload in CHAINS.items():
                measured[name] = _chain(path, question, has_payload=has_payload)
            for lane in (INLINE, SHM):
                if has_lane(lane):
                    measured[f"headrace {lane}"] = _headrace(path, question, lane)
            rounds.append(measured)
    figures = ("p50_ms", "p99_ms", "p999_ms")
    return Report(
        "latency",
        tuple({f"{k} {f}": one[f] for k, one in each.items() for f in figures} for each in rounds),
        (_table(rounds), _stages(rounds)),
        _budgets(rounds),
    )


def _in_process(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    with Processes() as processes:
        child = processes.role("bare-function", model=str(path), size=SIDE)
        child.read()
        return child.ask(question)


def _chain(path: Path, question: dict[str, Any], *, has_payload: bool) -> dict[str, Any]:
    with Processes() as processes:
        relay = processes.role("chain-relay").read()
        processes.role("chain-worker", address=relay["back"], model=str(path), size=SIDE).read()
        child = processes.role(
            "chain-loop", front=relay["front"], results=relay["results"], size=SIDE, has_payload=has_payload
        )
        child.read()
        return child.ask(question)


def _headrace(path: Path, question: dict[str, Any], lane: str) -> dict[str, Any]:
    with Processes() as processes:
        address = processes.broker(mean_config(path))
        processes.workers(address, 1, "cpu")
        child = processes.role("headrace-loop", address=address, lane=lane, in_flight=64, side=SIDE)
        child.read()
        return child.ask(question)


def _over(rounds: list[dict[str, dict[str, Any]]], key: str, figure: str) -> list[float]:
    return [each[key][figure] - each[IN_PROCESS][figure] for each in rounds]


def _table(rounds: list[dict[str, dict[str, Any]]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for key in rounds[0]:
        values = [each[key] for each in rounds]
        rows.append(
            (
                key,
                *(spread([one[figure] for one in values], 2) for figure in ("p50_ms", "p99_ms", "p999_ms")),
                spread(_over(rounds, key, "p50_ms"), 2),
                spread(_over(rounds, key, "p99_ms"), 2),
                sum(one["lost"] for one in values),
            )
        )
    if not has_lane(SHM):
        rows.append(("headrace shm", *["not built yet"] * 6))
    columns = ("system", "p50 ms", "p99 ms", "p99.9 ms", "p50 over", "p99 over", "lost")
    return Table(f"Latency (W4): {FPS} frames/s of W1, idle system", columns, tuple(rows))


def _stages(rounds: list[dict[str, dict[str, Any]]]) -> Table:
    keys = [key for key, one in rounds[0].items() if "stages" in one]
    names = list(rounds[0][keys[0]]["stages"])
    rows = tuple(
        (key, *(spread([each[key]["stages"][name] for each in rounds]) for name in names)) for key in keys
    )
    title = "Timeline of a frame: median microseconds since the broker received it"
    return Table(title, ("system", *(name.removesuffix("_us") for name in names)), rows)


def _budgets(rounds: list[dict[str, dict[str, Any]]]) -> tuple[Budget, ...]:
    lane = SHM if has_lane(SHM) else INLINE
    key = f"headrace {lane}"
    p50, p99 = (median(_over(rounds, key, figure)) for figure in ("p50_ms", "p99_ms"))
    return (
        Budget.at_most(f"W4, {lane} lane, p50 over in-process, ms", p50, P50_OVER_MS),
        Budget.at_most(f"W4, {lane} lane, p99 over in-process, ms", p99, P99_OVER_MS),
    )
