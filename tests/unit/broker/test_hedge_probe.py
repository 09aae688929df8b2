"""Before an overdue batch is hedged its worker is probed: a batch that has killed one must not kill two."""

from __future__ import annotations

from collections.abc import Iterator

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import events


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """Two workers; w1 is the faster one and has four frames for which it is overdue now."""
    driver = hr.CoreDriver(hr.make_settings(overdue_min_ms=50, overdue_factor=1.0))
    driver.join_worker(b"w1", per_batch_ms=9)
    driver.join_worker(b"w2")
    driver.push(*[hr.frame(f"s{number}") for number in range(4)])
    sent = hr.batches(driver.tick())
    assert [(one.peer, len(one.batch.frames)) for one in sent] == [(b"w1", 4)]
    batch = next(iter(driver.core.ledger.batches.values()))
    driver.now_ns = batch.due_ns
    yield driver
    driver.core.check_invariants()


def test_a_worker_that_is_there_is_hedged_a_moment_later(driver: hr.CoreDriver) -> None:
    """First the heartbeat alone, once; when nothing is heard of it, the second copy."""
    probed = driver.tick()
    assert hr.only(probed, act.SendHeartbeat) == [act.SendHeartbeat(b"w1", is_worker=True)]
    assert not hr.batches(probed)

    hedged = driver.wait(2)

    assert [(one.peer, len(one.batch.frames)) for one in hr.batches(hedged)] == [(b"w2", 4)]
    assert not hr.only(hedged, act.SendHeartbeat)


def test_a_worker_that_is_gone_is_lost_and_not_hedged(driver: hr.CoreDriver) -> None:
    """PRC-02: its frames run alone, so that the second loss names the guilty one and there is no third."""
    driver.tick()
    driver.send(events.PeerUnreachable(b"w1"))
    alone = hr.batches(driver.tick())
    assert [(one.peer, len(one.batch.frames)) for one in alone] == [(b"w2", 1)]

    driver.send(events.PeerUnreachable(b"w2"))

    assert hr.ends(driver.actions) == [("s0", 0, "error", "poison_frame")]
    assert driver.core.life.lost_count == 2
    assert driver.core.hedges.batches_count == 0
