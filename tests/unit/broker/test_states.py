"""docs/states.md says what the code does: every change of state that a random world shows is in its tables,
and every row of the tables is seen there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import hr_core as hr
import pytest
from hr_repo import ROOT
from hr_swarm import run

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.broker.records import FrameState
from headrace.broker.settings import CoreSettings
from headrace.broker.worker_registry import WorkerState

SEEDS = 60
NEW = "new"

#: Per life: (from, event, to).
Changes = dict[str, set[tuple[str, str, str]]]


def frame_states(core: BrokerCore) -> dict[object, str]:
    """State of every frame without a published outcome."""
    states: dict[object, str] = {}
    for stream in core.streams.by_name.values():
        for record in stream.order:
            states[record.number] = "held" if record.state is FrameState.FINISHED else "waiting"
    for served in core.models.classes:
        for record in served.suspects:
            states[record.number] = "suspect"
    for batch in core.ledger.batches.values():
        for record in batch.unfinished:
            states[record.number] = "in flight" if batch.twin is None else "hedged"
    return states


def batch_states(core: BrokerCore, now_ns: int) -> dict[object, str]:
    """State of every batch in the ledger."""
    states: dict[object, str] = {}
    for number, batch in core.ledger.batches.items():
        if batch.is_cancelled:
            states[number] = "cancelled"
        elif batch.twin is not None:
            states[number] = "one of two"
        else:
            states[number] = "overdue" if batch.due_ns <= now_ns else "running"
    return states


def worker_states(core: BrokerCore, now_ns: int) -> dict[object, str]:
    """State of every worker."""
    states: dict[object, str] = {}
    for worker in core.workers.by_peer.values():
        is_overdue = bool(worker.in_flight) and worker.overdue_ns <= now_ns
        is_trusted = worker.state is not WorkerState.READY or not is_overdue
        states[worker.index] = worker.state.value if is_trusted else "overdue"
    return states


class Watched(hr.CoreDriver):
    """A driver that notes every change of state."""

    def __init__(self, settings: CoreSettings, changes: Changes) -> None:
        super().__init__(settings)
        self._changes = changes

    def send(self, event: events.Event) -> list[act.Action]:
        """See CoreDriver."""
        before = self._states()
        done = super().send(event)
        after = self._states()
        name = type(event).__name__
        for life, last in (("frame", "published"), ("batch", "over"), ("worker", "gone")):
            keys = dict.fromkeys([*before[life], *after[life]])
            for key in keys:
                change = (before[life].get(key, NEW), name, after[life].get(key, last))
                if change[0] != change[2]:
                    self._changes[life].add(change)
        return done

    def _states(self) -> dict[str, dict[object, str]]:
        core, now_ns = self.core, self.now_ns
        return {
            "frame": frame_states(core),
            "batch": batch_states(core, now_ns),
            "worker": worker_states(core, now_ns),
        }


@cache
def observed() -> Changes:
    """Every change of state in a number of random worlds."""
    changes: Changes = {"frame": set(), "batch": set(), "worker": set()}
    make: Callable[[CoreSettings], hr.CoreDriver] = lambda settings: Watched(settings, changes)  # noqa: E731
    for seed in range(SEEDS):
        run(seed, make)
    return changes


def documented(life: str) -> dict[tuple[str, str], set[str]]:
    """The table of one life: (from, to) -> events."""
    text = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    section = text.split(f"## The life of a {life}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w ]+)` \| `([\w ]+)` \| ([^|]+) \|", section, re.MULTILINE)
    return {(before, after): set(re.findall(r"`(\w+)`", names)) for before, after, names in rows}


@pytest.mark.parametrize("life", ["frame", "batch", "worker"])
def test_every_change_is_in_the_table(life: str) -> None:
    """No state is left or reached in a way that the document does not name, nor by another event."""
    table = documented(life)

    unknown = [c for c in sorted(observed()[life]) if c[1] not in table.get((c[0], c[2]), set())]

    assert unknown == []


@pytest.mark.parametrize("life", ["frame", "batch", "worker"])
def test_every_row_of_the_table_happens(life: str) -> None:
    """The document names no way that the code does not go."""
    seen = {(before, after) for before, _, after in observed()[life]}

    assert sorted(set(documented(life)) - seen) == []
