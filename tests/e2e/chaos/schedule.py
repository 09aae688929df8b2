"""Which fault hits whom and when: the same seed gives the same list."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Mean seconds between two faults of a kind. Kills at this rate are over 100 in five minutes, and leave a
#: system of eleven processes on two cores some time to do work in between.
KILL_EVERY_S = 2.2
PAUSE_EVERY_S = 5.0
LINK_FAULT_EVERY_S = 4.0

#: Roles in the proportion in which they are killed and paused; each bag is drawn empty before the next, so
#: that short runs hit every role too.
KILL_BAG = ("broker", "worker", "worker", "worker", "producer", "producer", "subscriber", "subscriber")
PAUSE_BAG = ("broker", "worker", "worker", "producer", "subscriber")
LINK_BAG = ("delay", "throttle", "cut", "cut", "swallow")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at ``at_s``. ``kind``: ``kill`` (started again after ``for_s``), ``pause`` (SIGSTOP, SIGCONT
    after ``for_s``), or a link's fault (healed after ``for_s``; ``value`` as ``Link.set_fault`` takes it)."""

    at_s: float
    kind: str
    role: str
    number: int
    for_s: float
    value: float = 0.0


def plan(seed: int, seconds: float, counts: dict[str, int]) -> list[Fault]:
    """Return the faults of a run, by time. ``counts``: how many processes each role has."""
    rng = random.Random(seed)
    linked = [role for role in counts if role != "broker"]
    faults: list[Fault] = []
    roles = _bag(rng, KILL_BAG)
    for at_s in _times(rng, KILL_EVERY_S, seconds):
        role = next(roles)
        for_s = rng.choice((0.05, rng.uniform(0.1, 1.0), rng.uniform(0.5, 3.0)))
        faults.append(Fault(at_s, "kill", role, rng.randrange(counts[role]), for_s))
    roles = _bag(rng, PAUSE_BAG)
    for at_s in _times(rng, PAUSE_EVERY_S, seconds):
        role = next(roles)
        faults.append(Fault(at_s, "pause", role, rng.randrange(counts[role]), rng.uniform(0.1, 3.0)))
    kinds = _bag(rng, LINK_BAG)
    for at_s in _times(rng, LINK_FAULT_EVERY_S, seconds):
        kind, role = next(kinds), rng.choice(linked)
        value = {"delay": rng.uniform(0.02, 0.6), "throttle": rng.uniform(20e3, 300e3)}.get(kind, 0.0)
        faults.append(Fault(at_s, kind, role, rng.randrange(counts[role]), rng.uniform(0.1, 4.0), value))
    return sorted(faults, key=lambda fault: fault.at_s)


def _times(rng: random.Random, mean_s: float, until_s: float) -> Iterator[float]:
    at_s = 0.0
    while (at_s := at_s + rng.uniform(0.2, 1.8) * mean_s) < until_s:
        yield at_s


def _bag(rng: random.Random, items: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(items, len(items))
