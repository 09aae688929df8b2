"""Runs of seqs against a plain set."""

from __future__ import annotations

import random

import pytest

from headrace.clients.seq_runs import SeqRuns


@pytest.mark.parametrize("seed", range(20))
def test_runs_agree_with_a_set(seed: int) -> None:
    """Whatever is added in whatever order, membership is that of a set and runs never touch."""
    rng = random.Random(seed)
    runs, model = SeqRuns(), set()
    for _ in range(60):
        first = rng.randrange(80)
        last = first + rng.choice([0, 0, 0, 1, 5])

        runs.add(first, last)
        model.update(range(first, last + 1))

    assert [seq in runs for seq in range(-1, 100)] == [seq in model for seq in range(-1, 100)]
    for (_, end), (start, _) in zip(runs.runs, runs.runs[1:], strict=False):
        assert end + 1 < start


def test_a_stream_that_counts_on_is_one_run() -> None:
    """Memory does not grow with the length of a stream."""
    runs = SeqRuns()

    for seq in range(10_000):
        runs.add(seq)

    assert runs.runs == ((0, 9_999),)


def test_the_number_of_runs_is_bounded() -> None:
    """A stream with holes forgets its lowest run beyond the bound."""
    runs = SeqRuns(max_runs=3)

    for seq in (0, 2, 4, 6):
        runs.add(seq)

    assert runs.runs == ((2, 2), (4, 4), (6, 6))
    assert len(runs) == 3
