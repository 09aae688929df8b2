"""Whether `headrace simulate` tells the truth: the same arrivals through real processes and its world.

The pool: 4 emulated workers, T(b) = 80 + 1 b ms, batches to 8 of frames of 32x32, at most 364 frames a
second; frames live for 400 ms. Why this T: sleeping devices leave the two cores of a small machine to the
broker, the producer and the subscriber, whose work at these rates is a tenth of a core, so that the machine
is not what is measured; and what it adds on the way is small beside a batch.

What it adds is measured first, at 2 % of the capacity where no frame waits for another, and is what the
simulator takes for its overheads. So a slow machine moves both sides alike; one whose cores are taken by
others also has a tail that no simulator can know: the lag of the producer behind its schedule tells.

Open loop, from the time a frame is due. Arrivals, configuration and objective are the same on both sides.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.arrivals import draw
from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.lanes import INLINE
from benchmarks.processes import Processes
from benchmarks.report import Budget, Report, Table, median
from headrace import config
from headrace.config_settings import to_core_settings
from headrace.planner.costs import Costs
from headrace.planner.streams import TraceSource
from headrace.planner.trace_file import TraceFrame, TraceKind
from headrace.planner.world import Overheads, World

SIDE = 32
MAX_BATCH_SIZE = 8
BASE_MS, PER_FRAME_MS = 80.0, 1.0
WORKERS = 4
CAPACITY_PER_S = WORKERS * MAX_BATCH_SIZE / (BASE_MS + PER_FRAME_MS * MAX_BATCH_SIZE) * 1e3

#: What the policy aims at.
OBJECTIVE_MS = 200.0

#: Time to live of every frame, so that an overload sheds.
TTL_MS = 400
IN_FLIGHT = 1_024

#: How far the simulated figure may be from the real one, as a share of that.
LIMIT = 0.10

_FIGURES = ("p50_ms", "p99_ms", "goodput_per_s")


@dataclass(frozen=True, slots=True)
class Load:
    """``load``: share of the pool's capacity. ``good_ms``: latency up to which a frame counts as good; in the
    middle of the latencies, where a difference shows."""

    pattern: str
    load: float
    good_ms: float = 150.0

    @property
    def name(self) -> str:
        return f"{self.pattern} at {100 * self.load:.0f} %"


LOADS = (Load("poisson", 0.5), Load("poisson", 0.85), Load("poisson", 1.3, 600.0), Load("bursty", 0.5))

#: Where no frame waits for another.
IDLE = Load("poisson", 0.02)


def run(*, quick: bool = False) -> Report:
    """Serve each load for real and in the simulator, with the same seeds."""
    duration_s, warm_up_s = (4.0, 0.5) if quick else (20.0, 2.0)
    loads = LOADS[:3] if quick else LOADS
    text = broker_config(
        Model((SquareClass(SIDE, MAX_BATCH_SIZE),), emulated_ms=(BASE_MS, PER_FRAME_MS)),
        credits_count=IN_FLIGHT,
    )
    text = text.replace("[queues]", f"[queues]\nobjective_ms = {OBJECTIVE_MS}")
    text = text.replace("[admission]", f"[admission]\ndefault_timeout_ms = {TTL_MS}")
    rounds: list[dict[str, float]] = []
    for seed in range(1 if quick else 3):
        found: dict[str, float] = {}
        with Processes() as processes:
            address = processes.broker(text)
            processes.workers(address, WORKERS, "emulated")
            child = processes.role(
                "headrace-loop", address=address, lane=INLINE, in_flight=IN_FLIGHT, side=SIDE
            )
            child.read()
            overheads = _overheads(child.ask(_question(IDLE, duration_s, warm_up_s, seed)))
            found |= asdict(overheads)
            for load in loads:
                question = _question(load, duration_s, warm_up_s, seed)
                real, simulated = child.ask(question), _simulate(text, question, overheads)
                found |= _flat(real, f"{load.name}: real", duration_s - warm_up_s)
                found |= _flat(simulated, f"{load.name}: simulated", duration_s - warm_up_s)
        rounds.append(found)
    tables = (_table(rounds, loads), _stages(rounds, loads))
    budgets = [
        Budget.at_most(f"{load.name}: deviation of {figure}", _deviation(rounds, load, figure), LIMIT)
        for load in loads
        for figure in _FIGURES
    ]
    return Report("agreement", tuple(rounds), tables, tuple(budgets))


def _question(load: Load, duration_s: float, warm_up_s: float, seed: int) -> dict[str, Any]:
    return {
        "pattern": load.pattern,
        "rate": load.load * CAPACITY_PER_S,
        "duration_s": duration_s,
        "warm_up_s": warm_up_s,
        "seed": seed,
        "drain_s": 5.0,
        "objective_ms": load.good_ms,
    }


def _overheads(idle: dict[str, Any]) -> Overheads:
    """Return what the way of a frame alone takes here. Only sums can be seen from outside: each is halved."""
    stages = idle["stages"]
    run_us = (BASE_MS + PER_FRAME_MS) * 1e3
    broker_to_worker_and_back_us = max(0.0, stages["published_us"] - stages["ran_us"])
    to_and_from_broker_us = max(0.0, idle["p50_ms"] * 1e3 - stages["published_us"])
    staged_us = max(0.0, stages["ran_us"] - stages["batched_us"] - run_us)
    return Overheads(
        to_broker_us=to_and_from_broker_us / 2,
        to_worker_us=broker_to_worker_and_back_us / 2,
        stage_us=staged_us,
        stage_frame_us=0.0,  # frames of 3 KiB
        to_results_us=broker_to_worker_and_back_us / 2,
        to_subscriber_us=to_and_from_broker_us / 2,
    )


def _simulate(text: str, question: dict[str, Any], overheads: Overheads) -> dict[str, Any]:
    arrivals = draw(question["pattern"], question["rate"], question["duration_s"], question["seed"])
    kind = TraceKind((SIDE, SIDE, 3), SIDE * SIDE * 3)
    frames = (
        TraceFrame(time_s, f"camera-{stream}", kind)
        for time_s, stream in zip(arrivals.times_s, arrivals.streams, strict=True)
    )
    settings = to_core_settings(config.load("benchmark", text=text).config)
    run = World(settings, Costs(), WORKERS, overheads=overheads).run(
        TraceSource(frames),
        question["duration_s"],
        warm_up_s=question["warm_up_s"],
        objective_ms=question["objective_ms"],
    )
    latency = run.tally.latency
    return {
        "p50_ms": latency.quantile_ms(0.50),
        "p99_ms": latency.quantile_ms(0.99),
        "good": run.tally.good,
    }


def _flat(figures: dict[str, Any], name: str, seconds: float) -> dict[str, float]:
    found = {f"{name} {figure}": figures[figure] for figure in ("p50_ms", "p99_ms")}
    found[f"{name} goodput_per_s"] = figures["good"] / seconds
    if "largest_lag_ms" in figures:
        found[f"{name} largest_lag_ms"] = figures["largest_lag_ms"]
    for stage, value in figures.get("stages", {}).items():
        found[f"{name} {stage}"] = value
    return found


def _deviation(rounds: list[dict[str, float]], load: Load, figure: str) -> float:
    """Return the median over the rounds of how far the simulator is off, as a share of the real figure."""
    return abs(median([_signed(each, load, figure) for each in rounds]))


def _signed(one: dict[str, float], load: Load, figure: str) -> float:
    real, simulated = (one[f"{load.name}: {side} {figure}"] for side in ("real", "simulated"))
    return simulated / real - 1.0


def _table(rounds: list[dict[str, float]], loads: tuple[Load, ...]) -> Table:
    rows = []
    for load in loads:
        for figure in _FIGURES:
            real, simulated = (
                median([each[f"{load.name}: {side} {figure}"] for each in rounds])
                for side in ("real", "simulated")
            )
            off = median([_signed(each, load, figure) for each in rounds])
            name = figure if figure != "goodput_per_s" else f"frames/s within {load.good_ms:g} ms"
            rows.append((load.name, name, round(real, 2), round(simulated, 2), f"{100 * off:+.1f}"))
    title = (
        f"Simulator and real processes: {WORKERS} emulated workers, T(b) = {BASE_MS:g} + {PER_FRAME_MS:g} b"
        f" ms, batches to {MAX_BATCH_SIZE}, capacity {CAPACITY_PER_S:.0f} frames/s"
    )
    return Table(title, ("load", "figure", "real", "simulated", "off by %"), tuple(rows))


def _stages(rounds: list[dict[str, float]], loads: tuple[Load, ...]) -> Table:
    """What the simulator was told of this machine, and how quiet it was."""
    ways = ", ".join(
        f"{name.removesuffix('_us')} {median([each[name] for each in rounds]):.0f}"
        for name in Overheads.__dataclass_fields__
    )
    rows = tuple(
        (load.name, round(max(each[f"{load.name}: real largest_lag_ms"] for each in rounds), 1))
        for load in loads
    )
    return Table(f"Overheads in microseconds: {ways}", ("load", "producer's largest lag ms"), rows)
