"""What a broker with a journal knows of the frames that earlier boots finished: plain data for the core.

Not here: how it is read from disk (journal.py), what it changes (admission.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.broker.records import Refusal


class FinishedSeqs:
    """The seqs of one epoch whose outcome was published.

    Invariant: runs are inclusive, ascending and never touch. Bounded: beyond ``max_runs`` the lowest run is
    forgotten. A producer that counts 1, 2, 3 needs one run, whatever the length of its stream.
    """

    __slots__ = ("_firsts", "_lasts", "_max_runs")

    def __init__(self, max_runs: int, runs: Iterable[tuple[int, int]] = ()) -> None:
        """``runs`` are (first, last) and keep to the invariant, in any order."""
        ordered = sorted(runs)[-max_runs:]
        self._max_runs = max_runs
        self._firsts = array("Q", [first for first, _ in ordered])
        self._lasts = array("Q", [last for _, last in ordered])

    def __contains__(self, seq: int) -> bool:
        index = bisect_right(self._firsts, seq) - 1
        return index >= 0 and seq <= self._lasts[index]

    @property
    def last(self) -> int:
        """Return the highest seq, -1 when there is none."""
        return self._lasts[-1] if self._lasts else -1

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return all runs, ascending."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def add(self, seq: int, changes: dict[int, int | None]) -> None:
        """Add one seq, and note in ``changes`` what became of the runs: first -> last, or None when no run
        begins there any more."""
        firsts, lasts = self._firsts, self._lasts
        at = bisect_right(firsts, seq)  # the run before it is at - 1
        if at and seq <= lasts[at - 1]:
            return
        extends = at > 0 and lasts[at - 1] == seq - 1
        joins = at < len(firsts) and firsts[at] == seq + 1
        if extends:
            lasts[at - 1] = lasts[at] if joins else seq
            changes[firsts[at - 1]] = lasts[at - 1]
            if joins:
                changes[firsts[at]] = None
                del firsts[at], lasts[at]
            return
        if joins:
            changes[firsts[at]] = None
            firsts[at] = seq
            changes[seq] = lasts[at]
            return
        firsts.insert(at, seq)
        lasts.insert(at, seq)
        changes[seq] = seq
        if len(firsts) > self._max_runs:
            changes[firsts[0]] = None
            del firsts[0], lasts[0]


@dataclass(frozen=True, slots=True)
class RestoredEpoch:
    """One epoch of a stream: the seqs that are finished, and why the latest refused ones were refused."""

    epoch: int
    finished: FinishedSeqs
    rejects: tuple[tuple[int, Refusal], ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredStream:
    """One stream; the epoch begun longest ago comes first."""

    name: str
    epochs: tuple[RestoredEpoch, ...]
