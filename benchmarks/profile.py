"""Where the broker's CPU time of a frame goes, stage by stage and function by function.

The same load as ``transport``; the baseline is the broker process of the hand-written forwarder under it.
The broker samples itself by CPU time (``benchmarks.sampler``), which costs it about a per cent.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.lanes import INLINE, SHM, has_lane
from benchmarks.processes import Processes
from benchmarks.report import Cell, Report, Table, median
from benchmarks.sampler import STAGES, read_samples
from benchmarks.stats import spread
from benchmarks.throughput import NO_WORK_MS, Load, Window, measure, plain_throughput
from benchmarks.transport import LOADS

TOP = 25


def run(*, quick: bool) -> Report:
    """Profile the broker under each size and lane."""
    window = Window(0.4, 1.2) if quick else Window(2.0, 15.0)
    rounds: list[dict[str, float]] = []
    functions: dict[str, dict[str, float]] = {}
    for _ in range(1 if quick else 3):
        figures: dict[str, float] = {}
        for size, load in list(LOADS.items())[: 1 if quick else 2]:
            baseline = plain_throughput(load, Window.of(quick=quick), "forwarder")
            figures[f"{size} forwarder: all"] = baseline.cpu_of("broker")
            for lane in (INLINE, SHM):
                if not has_lane(lane):
                    continue
                case = f"{size} {lane}"
                cpu_us, stages, functions[case] = _profile(load, lane, window)
                figures[f"{case}: all"] = cpu_us
                figures |= {f"{case}: {stage}": share * cpu_us for stage, share in stages.items()}
        rounds.append(figures)
    cases = list(functions)
    tables = [_stage_table(rounds, cases)]
    tables += [_function_table(case, functions[case], rounds) for case in cases]
    return Report("profile", tuple(rounds), tuple(tables), ())


def _profile(load: Load, lane: str, window: Window) -> tuple[float, dict[str, float], dict[str, float]]:
    height, width, channels = load.shape
    model = Model((SquareClass(max(height, width)),), channels=channels, emulated_ms=NO_WORK_MS)
    with Processes() as processes:
        output = processes.folder / "samples.json"
        config = broker_config(model, credits_count=max(64, load.in_flight))
        address = processes.sampled_broker(config, output)
        processes.workers(address, 1, "emulated")
        subscriber = processes.role("subscriber", address=address)
        subscriber.read()
        processes.role(
            "producer", address=address, shape=load.shape, in_flight=load.in_flight, streams=load.streams,
            bundle="auto", lane=lane,
        ).read()  # fmt: skip
        measured = measure(processes, [subscriber], window)
        processes.children["producer"].end()
        processes.children["broker"].end()
        return (measured.cpu_of("broker"), *read_samples(Path(output)))


def _stage_table(rounds: list[dict[str, float]], cases: list[str]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (stage, *(spread([each[f"{case}: {stage}"] for each in rounds], 1) for case in cases))
        for stage in (*STAGES, "all")
    ]
    forwarders = [f"{case.rpartition(' ')[0]} forwarder: all" for case in cases]
    rows.append(("the forwarder, all", *(spread([each[key] for each in rounds], 1) for key in forwarders)))
    ratios = [
        [each[f"{case}: all"] / each[key] for each in rounds]
        for case, key in zip(cases, forwarders, strict=True)
    ]
    rows.append(("times the forwarder", *(spread(values, 2) for values in ratios)))
    return Table("CPU of the broker process per frame, microseconds", ("stage", *cases), tuple(rows))


def _function_table(case: str, functions: dict[str, float], rounds: list[dict[str, float]]) -> Table:
    cpu_us = median([each[f"{case}: all"] for each in rounds])
    rows = tuple((name, share * cpu_us) for name, share in list(functions.items())[:TOP])
    return Table(f"{case}: functions by their own CPU, microseconds a frame", ("function", "us"), rows)
