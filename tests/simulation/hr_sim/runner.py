"""Runs many seeds in a few processes and adds up what they saw."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from hr_sim.world import SimulationError, Summary, run_seed

#: Processes of one run: a seed is one thread, and the machine has others to serve.
PROCESSES = 2

#: Failures printed in full; of the others only the seed.
MAX_SHOWN = 5

_Attempt = tuple[int, Summary | None, str]


def fresh_seeds(minutes: float) -> Iterator[int]:
    """Yield seeds that no earlier run has used, until the time is over."""
    end_s = time.monotonic() + minutes * 60
    seed = time.time_ns() // 1_000_000
    while time.monotonic() < end_s:
        yield seed
        seed += 1


def attempt(seed: int) -> _Attempt:
    """Run one seed; return what it saw, or the text of its failure."""
    try:
        return seed, run_seed(seed), ""
    except SimulationError as error:
        return seed, None, str(error)


def _attempts(seeds: Iterable[int], processes: int) -> Iterator[_Attempt]:
    """Run seeds, never more ahead than keeps the processes busy: a time limit then means something."""
    if processes == 1:
        yield from map(attempt, seeds)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[_Attempt]] = set()
        for seed in seeds:
            running.add(pool.submit(attempt, seed))
            if len(running) >= 2 * processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()


def run_seeds(seeds: Iterable[int], *, processes: int = PROCESSES, is_verbose: bool = False) -> int:
    """Run seeds, print each failure and as the last line one JSON object; return the exit code."""
    total = Summary()
    failed: list[int] = []
    for seed, summary, text in _attempts(seeds, processes):
        if summary is None:
            failed.append(seed)
            print(text if len(failed) <= MAX_SHOWN else f"seed {seed} failed", flush=True)
            continue
        total.add(summary)
        if is_verbose:
            print(f"seed {seed}: {summary.frames} frames, {summary.faults}, {summary.trace}", flush=True)
    result = {
        "seeds": total.seeds + len(failed),
        "failed": sorted(failed),
        "events": total.events,
        "frame_events": total.frame_events,
        "faults": dict(sorted(total.faults.items())),
        "frames": total.frames,
        "outcomes": total.outcomes,
    }
    print(json.dumps(result))
    return 1 if failed else 0
