"""One hour of W1 at a fixed rate: does memory grow, does latency drift?

The rate is half of what the machine reached in a short closed loop at the beginning of the same run: the
baseline is the first quarter of the hour, the ratio compares the last quarter with it. Every window is one
open-loop run.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import graphs
from benchmarks.lanes import INLINE, SHM, has_lane
from benchmarks.mean import LOAD, SIDE, mean_config
from benchmarks.processes import Processes
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.throughput import Window, headrace_throughput

#: Share of the reached throughput that is asked for.
LOAD_SHARE = 0.5

#: Payload bytes that the broker of this benchmark may hold (admission.max_bytes).
BYTE_BUDGET = 1024**3

#: DESIGN section 9: resident at most the byte budget and a fifth, and flat. Two per cent an hour is what an
#: allocator's own movements make; a leak of one object a frame makes several times that.
RESIDENT_SHARE, GROWTH = 1.2, 1.02

#: The last quarter's p99 may be so much of the first's: a tail on a shared machine moves by some tenths.
DRIFT = 1.5

_PROCESSES = ("broker", "worker", "headrace-loop")


def run(*, quick: bool, minutes: float | None = None) -> Report:
    """Run for ``minutes`` (60; a quarter of a minute when quick)."""
    duration_s = (minutes * 60) if minutes is not None else (16.0 if quick else 3_600.0)
    lane = SHM if has_lane(SHM) else INLINE
    window_s = max(2.0, min(60.0, duration_s / 8))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = graphs.write_mean(Path(folder))
        reached = headrace_throughput(
            LOAD, Window.of(quick=True), lane=lane, config=mean_config(path), device="cpu"
        )
        rate = reached.per_s * LOAD_SHARE
        windows = _windows(path, lane, rate, duration_s, window_s)
    return Report("soak", tuple(windows), (_table(windows, rate, lane),), tuple(_budgets(windows)))


def _windows(
    path: Path, lane: str, rate: float, duration_s: float, window_s: float
) -> list[dict[str, float]]:
    windows: list[dict[str, float]] = []
    with Processes() as processes:
        address = processes.broker(mean_config(path))
        processes.workers(address, 1, "cpu")
        child = processes.role("headrace-loop", address=address, lane=lane, in_flight=1_024, side=SIDE)
        child.read()
        began_s = time.monotonic()
        while time.monotonic() - began_s < duration_s:
            question: dict[str, Any] = {
                "pattern": "poisson", "rate": rate, "duration_s": window_s, "warm_up_s": 0.5,
                "seed": len(windows), "drain_s": 5.0,
            }  # fmt: skip
            result = child.ask(question, timeout_s=window_s + 60.0)
            figures = {name: float(result[name]) for name in ("sent", "lost", "p50_ms", "p99_ms", "p999_ms")}
            for name in _PROCESSES:
                figures[f"{name} MiB"] = processes.children[name].resident_bytes() / 2**20
            windows.append({"minute": (time.monotonic() - began_s) / 60, **figures})
    return windows


def _quarter(windows: list[dict[str, float]], number: int, figure: str) -> float:
    """Return the median of a figure in quarter 0 to 3, the first window (everything warms up) left out."""
    kept = windows[1:] or windows
    length = max(1, len(kept) // 4)
    part = kept[-length:] if number == 3 else kept[number * length : (number + 1) * length]
    return median([each[figure] for each in part or kept])


def _table(windows: list[dict[str, float]], rate: float, lane: str) -> Table:
    figures = [name for name in windows[0] if name not in {"minute", "sent", "lost"}]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            figure,
            *(_quarter(windows, number, figure) for number in range(4)),
            _quarter(windows, 3, figure) / _quarter(windows, 0, figure),
        )
        for figure in figures
    )
    minutes = windows[-1]["minute"]
    sent = sum(each["sent"] for each in windows)
    title = f"Soak: {minutes:.1f} minutes of W1, {lane} lane, {rate:,.0f} frames/s, {sent:,.0f} frames"
    return Table(title, ("figure", "quarter 1", "2", "3", "4", "4 of 1"), rows)


def _budgets(windows: list[dict[str, float]]) -> list[Budget]:
    resident = max(each["broker MiB"] for each in windows)
    growth = _quarter(windows, 3, "broker MiB") / _quarter(windows, 0, "broker MiB")
    drift = _quarter(windows, 3, "p99_ms") / _quarter(windows, 0, "p99_ms")
    return [
        Budget.at_most("soak, frames lost", sum(each["lost"] for each in windows), 0.0),
        Budget.at_most("soak, broker resident, MiB", resident, BYTE_BUDGET / 2**20 * RESIDENT_SHARE),
        Budget.at_most("soak, broker resident, quarter 4 of 1", growth, GROWTH),
        Budget.at_most("soak, p99, quarter 4 of 1", drift, DRIFT),
    ]
