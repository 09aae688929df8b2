"""Figures of the loop for other threads."""

from __future__ import annotations

import threading
import time

import hr_core as hc
import pytest

from headrace.broker import snapshot
from headrace.broker.counters import MAX_KINDS, Counters, count
from headrace.broker.metrics import render_metrics, render_readiness
from headrace.broker.snapshot import Snapshots


def make_snapshots(counters: Counters, wake: threading.Event) -> Snapshots:
    driver = hc.CoreDriver()
    return Snapshots(driver.core, counters, wake.set)


def test_a_reader_gets_what_the_next_turn_shows() -> None:
    """It wakes the loop and waits for the end of a turn; what comes later is not in its copy."""
    counters, is_woken = Counters(), threading.Event()
    snapshots = make_snapshots(counters, is_woken)
    found: list[snapshot.Snapshot | None] = []
    reader = threading.Thread(target=lambda: found.append(snapshots.get(10)))
    reader.start()
    assert is_woken.wait(10)
    count(counters.reports, "worker lost")

    snapshots.end_turn(time.monotonic_ns())
    reader.join(10)
    count(counters.reports, "worker lost")

    assert found[0] is not None
    assert found[0].counters.reports == {"worker lost": 1}
    assert found[0].status["account"]["received"] == 0  # type: ignore[index,call-overload]


def test_nothing_is_made_when_nobody_asks() -> None:
    """A turn costs one look at a flag."""
    snapshots = make_snapshots(Counters(), threading.Event())

    snapshots.end_turn(5)

    assert snapshots.last_turn_ns == 5
    assert snapshots.get(0) is None


def test_a_fresh_snapshot_is_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd of readers does not make the loop work for each."""
    monkeypatch.setattr(snapshot, "MIN_AGE_NS", 10**12)
    is_woken = threading.Event()
    snapshots = make_snapshots(Counters(), is_woken)
    assert snapshots.get(0) is None
    snapshots.end_turn(time.monotonic_ns())
    is_woken.clear()

    first, second = snapshots.get(0), snapshots.get(0)

    assert first is not None
    assert first is second
    assert not is_woken.is_set()


def test_a_loop_that_ended_keeps_nobody_waiting() -> None:
    """A scrape during the stop gets the last figures, or the word that there are none."""
    snapshots = make_snapshots(Counters(), threading.Event())
    answers: list[int] = []
    readers = [
        threading.Thread(target=lambda page=page: answers.append(page(snapshots)[0]))
        for page in (render_metrics, render_readiness)
    ]
    for reader in readers:
        reader.start()

    snapshots.close()
    for reader in readers:
        reader.join(10)

    assert answers == [503, 503]
    assert snapshots.get(10) is None


def test_a_table_of_counts_has_a_bound() -> None:
    """Keys are our own words; should one ever hold a peer's text, memory stays flat."""
    table: dict[str, int] = {}

    for number in range(MAX_KINDS + 5):
        count(table, str(number))
    count(table, "0")

    assert len(table) == MAX_KINDS
    assert table["0"] == 2
