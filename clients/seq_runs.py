"""A set of seqs as runs: exact, and small for streams that count on."""

from __future__ import annotations

from bisect import bisect_right


class SeqRuns:
    """Sorted, disjoint, non-touching runs of seqs, both ends included.

    Bounded: beyond ``max_runs`` the lowest run is forgotten. A stream that counts 0, 1, 2 is one run;
    one that leaves out seqs has a run per hole.
    """

    def __init__(self, max_runs: int = 1_024) -> None:
        self._max_runs = max_runs
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, seq: int) -> bool:
        index = bisect_right(self._firsts, seq) - 1
        return index >= 0 and seq <= self._lasts[index]

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._firsts)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def add(self, first: int, last: int | None = None) -> None:
        """Add one seq, or the seqs from ``first`` to ``last``."""
        last = first if last is None else last
        # The usual case: the stream counts on.
        if self._lasts and first == self._lasts[-1] + 1:
            self._lasts[-1] = last
            return
        # Every run that overlaps or touches [first, last] becomes part of it.
        low = bisect_right(self._firsts, first) - 1
        if low < 0 or self._lasts[low] < first - 1:
            low += 1
        high = low
        while high < len(self._firsts) and self._firsts[high] <= last + 1:
            high += 1
        if high > low:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]
        if len(self._firsts) > self._max_runs:
            del self._firsts[0], self._lasts[0]
