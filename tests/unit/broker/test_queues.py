"""The waiting frames of one size class: order, fairness, ageing, cancellation."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hr_records import make_record

from headrace.broker.queues import ClassQueue
from headrace.broker.records import FrameRecord

MS = 1_000_000


@pytest.fixture
def queue() -> Iterator[ClassQueue]:
    queue = ClassQueue(priority_levels=10, ageing_ns=1000 * MS, ageing_share=0.25)
    yield queue
    queue.check_invariants()


def push_all(queue: ClassQueue, records: list[FrameRecord], now_ns: int = 0) -> None:
    for record in records:
        queue.push(record, now_ns)


def test_takes_in_order_of_arrival_when_nothing_else_differs(queue: ClassQueue) -> None:
    """Frames of one stream without deadlines leave as they came."""
    records = [make_record() for _ in range(5)]
    push_all(queue, records)

    taken = queue.take(3, 0) + queue.take(9, 0)

    assert taken == records
    assert len(queue) == 0
    assert not any(r.is_queued for r in records)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_takes_the_higher_priority_first_whatever_came_first(
    queue: ClassQueue, order: tuple[int, ...]
) -> None:
    """Priority beats arrival."""
    records = [make_record(priority=p) for p in order]
    push_all(queue, records)

    taken = queue.take(3, 0)

    assert [r.priority for r in taken] == [2, 1, 0]


def test_takes_the_earliest_deadline_first_and_no_deadline_last(queue: ClassQueue) -> None:
    """Inside a priority the deadline rules."""
    late, none, soon = (make_record(deadline_ns=d) for d in (900, None, 100))
    push_all(queue, [late, none, soon])

    assert queue.take(3, 0) == [soon, late, none]


def test_streams_take_turns_when_one_floods(queue: ClassQueue) -> None:
    """BAT-12: a stream with ten times the traffic does not starve another of the same priority."""
    flood = [make_record("flood") for _ in range(20)]
    push_all(queue, flood)
    shy = [make_record("shy") for _ in range(2)]
    push_all(queue, shy)

    first = queue.take(4, 0)

    assert [r.frame.stream for r in first] == ["flood", "shy", "flood", "shy"]


def test_an_idle_stream_earns_no_credit(queue: ClassQueue) -> None:
    """A stream that slept while another was served gets its turn, not its whole past."""
    push_all(queue, [make_record("busy") for _ in range(10)])
    queue.take(8, 0)
    push_all(queue, [make_record("late") for _ in range(4)])
    push_all(queue, [make_record("busy") for _ in range(2)])

    taken = [r.frame.stream for r in queue.take(8, 0)]

    assert taken[:4].count("late") == 2
    assert taken.count("late") == 4


def test_streams_with_one_frame_at_a_time_do_not_pass_a_backlog_for_ever(queue: ClassQueue) -> None:
    """BAT-12: a burst's frames take turns with streams that always have just one frame waiting."""
    burst = [make_record("burst") for _ in range(4)]
    push_all(queue, burst)
    push_all(queue, [make_record(f"single-{i}") for i in range(2)])
    served = []
    for _ in range(12):
        (record,) = queue.take(1, 0)
        served.append(record)
        if record.frame.stream != "burst":
            queue.push(make_record(record.frame.stream), 0)

    assert [served.index(record) for record in burst] == [0, 3, 6, 9]


def test_tags_of_streams_long_gone_are_forgotten(queue: ClassQueue) -> None:
    """The table of fairness tags follows the streams that wait, not all that ever came."""
    for index in range(5_000):
        queue.push(make_record(f"s{index}"), 0)
        queue.push(make_record("steady"), 0)
        queue.take(2, 0)

    assert len(queue._queues[0].last_tag) < 200


def test_requeued_frames_go_before_all_others_of_their_priority(queue: ClassQueue) -> None:
    """VID-04: frames of a lost worker keep their place at the front, in order."""
    waiting = [make_record(deadline_ns=5)]
    push_all(queue, waiting)
    lost = [make_record(), make_record()]
    for record in reversed(lost):
        queue.push_front(record, 0)

    assert queue.take(3, 0) == [*lost, *waiting]


def test_latest_takes_the_place_of_its_predecessor(queue: ClassQueue) -> None:
    """VID-01: a stream superseded at every frame keeps its place in the line and its age."""
    old, other = make_record("a"), make_record("b")
    push_all(queue, [old, other])
    newest = old
    for at_ns in range(1, 6):
        new = make_record("a", received_ns=at_ns)
        queue.replace(newest, new, at_ns)
        newest = new

    assert not old.is_queued
    assert queue.oldest_ns() == 0
    assert queue.stream_count("a") == 1
    assert queue.take(2, 10) == [newest, other]


def test_exact_batches_are_taken_whole_and_first(queue: ClassQueue) -> None:
    """Halves of a failed batch run as they are, before anything else."""
    urgent = make_record(priority=9)
    halves = [[make_record(), make_record()], [make_record()]]
    push_all(queue, [urgent])
    for half in halves:
        queue.push_exact(half)

    assert queue.has_exact
    assert queue.exact_size() == 2
    assert queue.urgency(0)[0] < -9
    assert queue.waiting_by_priority() == {9: 1, 0: 3}
    assert list(queue) == [*halves[0], *halves[1], urgent]
    assert queue.take(8, 0) == halves[0]
    assert queue.take(8, 0) == halves[1]
    assert queue.exact_size() == 0
    assert queue.take(8, 0) == [urgent]


def test_removing_from_an_exact_batch_shrinks_it(queue: ClassQueue) -> None:
    """A cancelled frame leaves its half; an empty half vanishes."""
    lone, pair = [make_record()], [make_record(), make_record()]
    queue.push_exact(lone)
    queue.push_exact(pair)

    queue.remove(lone[0])
    queue.remove(pair[0])

    assert queue.take(8, 0) == [pair[1]]


def test_expired_frames_come_out_wherever_they_wait(queue: ClassQueue) -> None:
    """BAT-05: what is past its deadline is found in the heaps and in exact batches."""
    exact = [make_record(deadline_ns=10), make_record(deadline_ns=99), make_record()]
    plain = [make_record(deadline_ns=20), make_record(deadline_ns=30), make_record()]
    queue.push_exact(exact)
    push_all(queue, plain)

    assert queue.next_expiry_ns() == 10
    assert queue.pop_expired(20) == [exact[0], plain[0]]
    assert queue.next_expiry_ns() == 30
    assert len(queue) == 4


def test_an_empty_queue_has_no_times(queue: ClassQueue) -> None:
    """Nothing waits: nothing to wake up for."""
    assert queue.oldest_ns() is None
    assert queue.next_expiry_ns() is None
    assert queue.next_ageing_ns() is None
    assert queue.take(4, 0) == []
    with pytest.raises(LookupError):
        queue.urgency(0)


def test_a_fresh_urgent_frame_goes_before_aged_backlog(queue: ClassQueue) -> None:
    """BAT-08: with an aged priority 0 backlog a priority 5 frame is the next one taken."""
    push_all(queue, [make_record() for _ in range(50)])
    urgent = make_record(priority=5, received_ns=5000 * MS)
    queue.push(urgent, 5000 * MS)

    assert queue.take(1, 5000 * MS) == [urgent]


def test_aged_frames_get_their_share_against_endless_urgent_ones(queue: ClassQueue) -> None:
    """BAT-08: a quarter of the places go to aged lower frames, the oldest first, across all levels."""
    aged = [make_record(f"s{i}", priority=i % 3) for i in range(8)]
    push_all(queue, aged)
    now_ns = 1000 * MS
    push_all(queue, [make_record(priority=5, received_ns=now_ns) for _ in range(64)], now_ns)

    taken = queue.take(32, now_ns)

    positions = [i for i, r in enumerate(taken) if r.priority != 5]
    assert positions == [3, 7, 11, 15, 19, 23, 27, 31]
    assert [r for r in taken if r.priority != 5] == aged


def test_an_aged_urgent_backlog_does_not_hide_older_lower_frames(queue: ClassQueue) -> None:
    """Aged frames of the top priority do not use up the share of the levels below."""
    push_all(queue, [make_record(priority=5) for _ in range(20)])
    low = make_record(priority=0, received_ns=1)
    queue.push(low, 1)

    taken = queue.take(8, 2000 * MS)

    assert taken.index(low) == 3


def test_a_frame_that_comes_back_keeps_an_inherited_age(queue: ClassQueue) -> None:
    """`latest`, then a lost worker: the frame is as old as the place it took, not as its own arrival."""
    old, new = make_record(), make_record(received_ns=900 * MS)
    queue.push(old, 0)
    queue.replace(old, new, 900 * MS)
    queue.push(make_record("other", received_ns=950 * MS), 950 * MS)
    assert queue.take(1, 960 * MS) == [new]

    queue.push_front(new, 970 * MS)

    assert queue.oldest_ns() == 0
    assert queue.next_ageing_ns() == 1000 * MS


def test_urgency_orders_classes_by_priority_deadline_and_age(queue: ClassQueue) -> None:
    """The key that dispatch compares across size classes."""
    other = ClassQueue(10, 1000 * MS, 0.25)
    queue.push(make_record(priority=1, received_ns=7), 7)
    other.push(make_record(priority=1, received_ns=3), 7)
    assert other.urgency(7) < queue.urgency(7)

    queue.push(make_record(priority=1, deadline_ns=50, received_ns=8), 8)
    assert queue.urgency(8) < other.urgency(8)

    other.push(make_record(priority=2, received_ns=9), 9)
    assert other.urgency(9) < queue.urgency(9)


def test_asking_for_urgency_changes_nothing(queue: ClassQueue) -> None:
    """The ageing debt is paid by taking alone."""
    push_all(queue, [make_record() for _ in range(4)])
    push_all(queue, [make_record(priority=5, received_ns=1500 * MS) for _ in range(8)], 1500 * MS)

    for _ in range(10):
        queue.urgency(1500 * MS)

    assert [r.priority for r in queue.take(4, 1500 * MS)] == [5, 5, 5, 0]


def test_frames_of_a_fixed_batch_count_for_the_longest_wait(queue: ClassQueue) -> None:
    """Wherever it waits, the oldest frame is the oldest."""
    push_all(queue, [make_record(received_ns=9)], 9)
    queue.push_exact([make_record(received_ns=3)])

    assert queue.oldest_ns() == 3


def test_next_ageing_is_the_moment_the_oldest_young_frame_ages(queue: ClassQueue) -> None:
    """The core wakes up for it."""
    queue.push(make_record(received_ns=5), 5)

    assert queue.next_ageing_ns() == 5 + 1000 * MS


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_every_frame_in_exactly_one_place(seed: int) -> None:
    """Push, take, cancel, replace, expire and requeue in any order lose and double nothing."""
    rng = random.Random(seed)
    queue = ClassQueue(3, 50, 0.5)
    inside: dict[int, FrameRecord] = {}
    now_ns = 0
    for _ in range(600):
        now_ns += rng.randrange(5)
        record = make_record(
            f"s{rng.randrange(4)}",
            priority=rng.randrange(3),
            received_ns=now_ns,
            deadline_ns=rng.choice([None, now_ns + rng.randrange(1, 80)]),
        )
        match rng.randrange(8):
            case 0 | 1 | 2:
                queue.push(record, now_ns)
                inside[record.number] = record
            case 3:
                queue.push_front(record, now_ns)
                inside[record.number] = record
            case 4 if inside:
                victim = inside.pop(rng.choice(sorted(inside)))
                queue.remove(victim)
            case 5:
                queue.push_exact([record])
                inside[record.number] = record
            case 6:
                for gone in queue.pop_expired(now_ns):
                    del inside[gone.number]
                for gone in queue.take(rng.randrange(1, 5), now_ns):
                    del inside[gone.number]
            case _:
                same = [r for r in inside.values() if r.priority == record.priority and r.order != (0, 0, 0)]
                if same:
                    victim = same[0]
                    queue.replace(victim, record, now_ns)
                    del inside[victim.number]
                    inside[record.number] = record
        queue.check_invariants()
        assert {r.number for r in queue} == set(inside)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda q: setattr(q, "_size", 5), "counts 5"),
        (lambda q: setattr(next(iter(q)), "is_queued", False), "not marked"),
        (lambda q: setattr(next(iter(q)), "ticket", 7), "has ticket 7"),
        (lambda q: setattr(q._queues[0], "size", 2), "1 frames of priority 0 are found, 2 counted"),
        (lambda q: q._young.pop(q._young.peek()), "0 young"),
        (lambda q: q._queues[0].deadlines.append(1), "deadlines by priority"),
        (lambda q: q._streams.update(ghost=1), "stream counts"),
    ],
    ids=["size", "mark", "ticket", "priority", "index", "deadlines", "streams"],
)
def test_the_invariant_check_can_fail(spoil: object, says: str) -> None:
    """A planted inconsistency is found."""
    queue = ClassQueue(2, 100, 0.25)
    queue.push(make_record(), 0)

    spoil(queue)  # type: ignore[operator]

    with pytest.raises(AssertionError, match=says):
        queue.check_invariants()


def test_a_frame_that_has_left_is_not_kept_in_memory(queue: ClassQueue) -> None:
    """BAT-09: behind a live one, frames that were removed leave dead entries in the heaps, but no payload."""
    old = [make_record(deadline_ns=10 + number) for number in range(9)]
    payloads = [weakref.ref(_Payload.of(record)) for record in old]
    push_all(queue, [make_record(deadline_ns=5), *old])

    while old:
        queue.remove(old.pop())

    assert [payload() for payload in payloads] == [None] * 9


class _Payload(bytearray):
    """Bytes that can be watched."""

    @classmethod
    def of(cls, record: FrameRecord) -> _Payload:
        payload = cls()
        record.frame = replace(record.frame, payload=payload)
        return payload
