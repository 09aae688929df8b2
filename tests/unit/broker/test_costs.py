"""What a batch is predicted to cost."""

from __future__ import annotations

import pytest

from headrace.broker.costs import UNKNOWN_COST_NS, CostTable
from headrace.protocol.messages import ClassProfile, SizeClassSpec

PROFILE = ClassProfile(SizeClassSpec("c", 8, 8), ((1, 2.0), (4, 5.0), (8, 9.0)))


@pytest.fixture
def table() -> CostTable:
    table = CostTable()
    table.seed("w", PROFILE, "m", "1")
    return table


@pytest.mark.parametrize(("count", "ms"), [(1, 2), (2, 5), (4, 5), (5, 9), (8, 9), (99, 9)], ids=str)
def test_predicts_the_bucket_that_holds_the_batch(table: CostTable, count: int, ms: int) -> None:
    """A batch costs what its bucket costs."""
    assert table.predict_ns("w", "m", "1", "c", count) == ms * 1_000_000
    assert table.p99_ns("w", "m", "1", "c", count) == ms * 1_000_000


def test_follows_what_batches_really_took(table: CostTable) -> None:
    """The mean moves to the observed time; the other buckets do not."""
    for _ in range(60):
        table.observe("w", "m", "1", "c", 4, 20_000_000)

    assert table.predict_ns("w", "m", "1", "c", 4) == pytest.approx(20_000_000, rel=0.01)
    assert table.predict_ns("w", "m", "1", "c", 1) == 2_000_000


def test_p99_sees_the_recent_tail_only(table: CostTable) -> None:
    """One slow batch in a hundred shows; it is forgotten when it has left the window."""
    for index in range(100):
        table.observe("w", "m", "1", "c", 1, 90_000_000 if index in (50, 51) else 2_000_000)
    assert table.p99_ns("w", "m", "1", "c", 1) == 90_000_000

    for _ in range(128):
        table.observe("w", "m", "1", "c", 1, 2_000_000)
    assert table.p99_ns("w", "m", "1", "c", 1) == 2_000_000


def test_an_unknown_worker_has_the_default_cost(table: CostTable) -> None:
    """Nothing known, nothing learned, nothing raised."""
    table.observe("x", "m", "1", "c", 1, 5)
    table.observe("w", "m", "1", "c", 1, 0)
    table.forget("w")
    table.forget("w")

    assert table.predict_ns("w", "m", "1", "c", 1) == UNKNOWN_COST_NS
    assert table.p99_ns("x", "m", "1", "c", 1) == UNKNOWN_COST_NS


def test_the_table_of_a_class_is_told(table: CostTable) -> None:
    """Buckets with their milliseconds as they are known now; none for a worker without a profile."""
    assert table.table("w", "m", "1", "c") == [(1, 2.0), (4, 5.0), (8, 9.0)]
    assert table.table("other", "m", "1", "c") == []


def test_a_profile_without_buckets_is_like_none() -> None:
    """A worker that measured nothing gets the default cost."""
    table = CostTable()
    table.seed("w", ClassProfile(SizeClassSpec("c", 8, 8), ()), "m", "1")

    assert table.predict_ns("w", "m", "1", "c", 1) == UNKNOWN_COST_NS
