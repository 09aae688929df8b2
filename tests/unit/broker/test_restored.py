"""Finished seqs as runs: against a plain set, and what is told of changed runs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headrace.broker.restored import FinishedSeqs


@pytest.mark.parametrize("seed", range(20))
def test_runs_equal_a_set_and_changes_rebuild_them(seed: int) -> None:
    """Any order of seqs; whoever applies the changes to a table has the same runs."""
    rng = random.Random(seed)
    seqs, finished, table = set(), FinishedSeqs(1_000), {}
    for _ in range(300):
        seq = rng.randrange(60)
        seqs.add(seq)
        changes: dict[int, int | None] = {}
        finished.add(seq, changes)
        for first, last in changes.items():
            if last is None:
                table.pop(first, None)
            else:
                table[first] = last

        assert [seq for seq in range(60) if seq in finished] == sorted(seqs)
        assert finished.runs == sorted(table.items())
        assert all(before[1] + 1 < after[0] for before, after in pairwise(finished.runs))
    assert finished.last == max(seqs)


def test_the_lowest_run_goes_first() -> None:
    """Bounded, and the change is told."""
    finished = FinishedSeqs(2)
    changes: dict[int, int | None] = {}
    for seq in (10, 20, 30):
        finished.add(seq, changes)

    assert finished.runs == [(20, 20), (30, 30)]
    assert changes == {10: None, 20: 20, 30: 30}


def test_the_ends_of_u64_fit() -> None:
    """0 and 2^64 - 1 are seqs like any other; an empty set has no last."""
    finished = FinishedSeqs(4)
    assert finished.last == -1
    for seq in (0, 2**64 - 1):
        finished.add(seq, {})

    assert finished.runs == [(0, 0), (2**64 - 1, 2**64 - 1)]
