"""Frames a second and CPU per frame of moving frames alone, against a hand-written forwarder and zmq.proxy.

The worker is the emulated engine with T(b) = 0 (it still stages every frame); the baselines' worker answers
with a byte. A closed loop: so many frames are unfinished at any time. Rounds are interleaved.
"""

from __future__ import annotations

from benchmarks.lanes import INLINE, SHM, has_lane
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.stats import ratio_text, spread
from benchmarks.throughput import Load, Measured, Window, headrace_throughput, plain_throughput

LOADS = {
    "1 KiB": Load((32, 32, 1), in_flight=256),
    "150,528 B": Load((224, 224, 3), in_flight=64),
    "2,764,800 B": Load((720, 1280, 3), in_flight=16),
}

FORWARDER, PROXY = "forwarder", "zmq.proxy"

#: DESIGN section 9.
BROKER_CPU_US = 25.0
RATIO_SMALL, RATIO_LARGE = 0.5, 2.0

_COLUMNS = (
    "frame", "system", "frames/s", "of forwarder", "broker us", "producer us", "worker us", "subscriber us",
)  # fmt: skip


def run(*, quick: bool) -> Report:
    """Measure every size, lane and bundle, and both baselines."""
    window = Window.of(quick=quick)
    rounds: list[dict[str, Measured]] = []
    for _ in range(1 if quick else 3):
        measured: dict[str, Measured] = {}
        for size, load in LOADS.items():
            for lane in (INLINE, SHM):
                for bundle in ("auto", "1"):
                    if has_lane(lane):
                        measured[_key(size, lane, bundle)] = headrace_throughput(
                            load, window, bundle=bundle, lane=lane
                        )
            measured[f"{size} {FORWARDER}"] = plain_throughput(load, window, "forwarder")
            measured[f"{size} {PROXY}"] = plain_throughput(load, window, "proxy")
        rounds.append(measured)
    return Report(
        "transport",
        tuple({key: one.per_s for key, one in each.items()} for each in rounds),
        (Table("Transport: no model work, closed loop", _COLUMNS, tuple(_rows(rounds))),),
        tuple(_budgets(rounds)),
    )


def _key(size: str, lane: str, bundle: str) -> str:
    return f"{size} headrace {lane}, bundles {bundle}"


def _rows(rounds: list[dict[str, Measured]]) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for size in LOADS:
        systems = [key for key in rounds[0] if key.startswith(f"{size} ")]
        rows += [_row(rounds, size, key) for key in systems]
        if not has_lane(SHM):
            rows.append((size, "headrace shm", *["not built yet"] * 6))
    return rows


def _row(rounds: list[dict[str, Measured]], size: str, key: str) -> tuple[Cell, ...]:
    values = [each[key] for each in rounds]
    processes = ("broker", "producer", "worker", "subscriber")
    return (
        size,
        key.removeprefix(f"{size} "),
        spread([one.per_s for one in values]),
        ratio_text(_ratios(rounds, size, key)),
        *(spread([one.cpu_of(name) for one in values], 1) for name in processes),
    )


def _ratios(rounds: list[dict[str, Measured]], size: str, key: str) -> list[float]:
    return [each[key].per_s / each[f"{size} {FORWARDER}"].per_s for each in rounds]


def _budgets(rounds: list[dict[str, Measured]]) -> list[Budget]:
    lane = SHM if has_lane(SHM) else INLINE
    small, large = _key("1 KiB", INLINE, "auto"), _key("150,528 B", lane, "auto")
    cpu_us = median([each[large].cpu_of("broker") for each in rounds])
    return [
        Budget.at_most(f"broker CPU per frame, {lane} lane, us", cpu_us, BROKER_CPU_US),
        Budget.at_least(
            "1 KiB, share of the forwarder", median(_ratios(rounds, "1 KiB", small)), RATIO_SMALL
        ),
        Budget.at_least(
            f"150,528 B, {lane} lane, share of the forwarder",
            median(_ratios(rounds, "150,528 B", large)),
            RATIO_LARGE,
        ),
    ]
