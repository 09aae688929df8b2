"""Ageing over three and more priorities: to whom a debt is owed, and the bound that follows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hr_records import make_record

from headrace.broker.queues import ClassQueue
from headrace.broker.records import FrameRecord

AGEING_NS = 100

#: All aged, each priority at its own time; fresh frames come later.
LATE_NS = 1_000


@pytest.fixture
def queue() -> Iterator[ClassQueue]:
    queue = ClassQueue(priority_levels=10, ageing_ns=AGEING_NS, ageing_share=0.25)
    yield queue
    queue.check_invariants()


def pushed(queue: ClassQueue, priority: int, received_ns: int, deadline_ns: int | None = None) -> FrameRecord:
    record = make_record(priority=priority, received_ns=received_ns, deadline_ns=deadline_ns)
    queue.push(record, received_ns)
    return record


def test_a_debt_is_paid_to_the_frame_that_was_passed(queue: ClassQueue) -> None:
    """Three frames passed an aged one of priority 5; a younger one of priority 0 is not paid for that."""
    middle, low = pushed(queue, 5, 0), pushed(queue, 0, 50)
    fresh = [pushed(queue, 9, LATE_NS) for _ in range(3)]

    taken = queue.take(5, LATE_NS)

    assert taken == [*fresh, middle, low]


def test_a_debt_earned_by_an_older_frame_goes_to_it_first(queue: ClassQueue) -> None:
    """Of two passed frames the older is paid, whatever its priority; the younger earns its own debt."""
    low, middle = pushed(queue, 0, 0), pushed(queue, 5, 50)
    fresh = [pushed(queue, 9, LATE_NS) for _ in range(6)]

    taken = queue.take(8, LATE_NS)

    assert taken == [*fresh[:3], low, *fresh[3:], middle]


def test_a_frame_is_not_paid_for_what_it_was_never_passed_by(queue: ClassQueue) -> None:
    """Three frames of priority 5 passed one of priority 0; an aged one of priority 5 has no claim on that."""
    low = pushed(queue, 0, 10)
    passing = [pushed(queue, 5, 20) for _ in range(4)]
    assert queue.take(3, LATE_NS) == passing[:3]
    fresh = pushed(queue, 9, LATE_NS)

    assert queue.take(3, LATE_NS) == [low, fresh, passing[3]]


def test_the_debt_of_a_frame_that_leaves_passes_to_the_next_oldest(queue: ClassQueue) -> None:
    """Both were passed; the one to which it was owed expired: the other waits no longer for that."""
    middle, low = pushed(queue, 5, 0, deadline_ns=LATE_NS + 1), pushed(queue, 0, 50)
    fresh = [pushed(queue, 9, LATE_NS) for _ in range(5)]
    queue.take(2, LATE_NS)
    assert queue.pop_expired(LATE_NS + 1) == [middle]

    assert queue.take(4, LATE_NS + 1) == [fresh[2], low, *fresh[3:]]


def test_a_debt_ends_with_the_last_frame_that_it_is_owed_to(queue: ClassQueue) -> None:
    """A frame that ages later is not paid for what others put up with."""
    gone = pushed(queue, 0, 0)
    fresh = [pushed(queue, 9, LATE_NS) for _ in range(8)]
    queue.take(2, LATE_NS)
    queue.remove(gone)
    queue.take(1, LATE_NS)
    low = pushed(queue, 0, LATE_NS)

    taken = queue.take(6, LATE_NS + AGEING_NS)

    assert taken == [*fresh[3:6], low, *fresh[6:]]


def test_what_is_paid_comes_out_of_debts_of_low_priorities_first(queue: ClassQueue) -> None:
    """What stands under a higher priority is owed to more frames, and stays."""
    older, low = pushed(queue, 0, 0), pushed(queue, 1, 10)
    fives = [pushed(queue, 5, LATE_NS) for _ in range(2)]
    queue.take(2, LATE_NS)
    nines = [pushed(queue, 9, LATE_NS) for _ in range(4)]

    taken = queue.take(6, LATE_NS)

    assert len(fives) == 2
    assert taken == [nines[0], older, *nines[1:], low]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_no_aged_frame_waits_longer_than_the_bound(share: float, seed: int) -> None:
    """While an aged frame waits, at most ceil((older aged ones + 1) / share) frames that are older or of
    higher priorities leave, it included: among four priorities, at any mixture."""
    rng = random.Random(seed)
    queue = ClassQueue(4, AGEING_NS, share)
    waiting: dict[int, FrameRecord] = {}
    limits: dict[int, int] = {}
    passed: dict[int, int] = {}
    now_ns = 0
    for _ in range(1_500):
        now_ns += rng.randrange(8)
        for _ in range(rng.randrange(3)):
            record = make_record(f"s{rng.randrange(3)}", priority=rng.randrange(4), received_ns=now_ns)
            queue.push(record, now_ns)
            waiting[record.number] = record
        aged = [one for one in waiting.values() if one.received_ns + AGEING_NS <= now_ns]
        for place, record in enumerate(sorted(aged, key=lambda one: (one.received_ns, one.number))):
            limits.setdefault(record.number, math.ceil(round((place + 1) / share, 6)))
        for record in queue.take(1, now_ns):
            del waiting[record.number]
            for one in aged:
                is_before = (record.received_ns, record.number) <= (one.received_ns, one.number)
                if one.number in limits and (is_before or record.priority > one.priority):
                    passed[one.number] = passed.get(one.number, 0) + 1
                    assert passed[one.number] <= limits[one.number], one
            limits.pop(record.number, None)
        queue.check_invariants()

    assert len(passed) > 100
