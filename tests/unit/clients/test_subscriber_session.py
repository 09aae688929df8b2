"""The subscriber's state machine: exact actions, and random schedules against a toy broker."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from hr_toy_broker import ToyBroker

from headrace.clients import stream_state
from headrace.clients import subscriber_events as se
from headrace.clients import subscriber_session as ss
from headrace.clients.records import Missed, MissedReason
from headrace.protocol.messages import (
    Message,
    Outcome,
    Outcomes,
    Refused,
    ReplayReply,
    Reply,
    Request,
    Status,
    Subscribed,
)

MS = 1_000_000
TOPIC = b"cam\0"
TICK = se.Tick(has_room=True)


def outcome(
    pub_seq: int, *, stream: str = "cam", boot: int = 1, seq: int | None = None, nbytes: int = 0
) -> Outcome:
    payloads = (bytes(nbytes),) if nbytes else ()
    number = pub_seq if seq is None else seq
    return Outcome(stream, 9, number, boot, pub_seq, Status.OK, payloads=payloads)


def published(*pub_seqs: int, boot: int = 1) -> se.Published:
    return se.Published(TOPIC, Outcomes(tuple(outcome(n, boot=boot) for n in pub_seqs)))


def delivered(*pub_seqs: int, boot: int = 1) -> list[se.Action]:
    return [se.Deliver(outcome(n, boot=boot)) for n in pub_seqs]


def positions(request_id: int, *, boot: int = 1, after: str = "", **next_pub_seqs: int) -> se.Answered:
    streams = {stream: [0, number] for stream, number in next_pub_seqs.items()}
    return se.Answered(Reply(request_id, {"boot": boot, "streams": streams, "streams_next": after}))  # type: ignore[dict-item]


def replay_of(first: int, last: int, request_id: int, boot: int = 1) -> se.Ask:
    params = {"stream": "cam", "boot": boot, "first": first, "last": last, "max_bytes": ss.FETCH_BYTES}
    return se.Ask(Request(request_id, "replay", params))  # type: ignore[arg-type]


def replayed(request_id: int, *pub_seqs: int, missed: tuple[tuple[int, int], ...] = ()) -> se.Answered:
    return se.Answered(ReplayReply(request_id, tuple(outcome(n) for n in pub_seqs), missed))


def open_session(session: ss.SubscriberSession, **next_pub_seqs: int) -> ss.SubscriberSession:
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    (ask,) = session.handle(se.Published(TOPIC, Subscribed(1, "cam")), 0)
    assert isinstance(ask, se.Ask)
    session.handle(positions(ask.request.id, **next_pub_seqs), 0)
    return session


@pytest.fixture
def session() -> Iterator[ss.SubscriberSession]:
    made = ss.SubscriberSession([TOPIC], jitter=0.5)
    yield made
    made.check_invariants()


def test_opening_subscribes_waits_for_the_mark_and_asks_for_positions(session: ss.SubscriberSession) -> None:
    """ZMQ-01: nothing is called open before the broker has confirmed every topic."""
    assert session.handle(TICK, 0) == [se.Connect()]
    assert session.handle(se.Connected(), 1) == [se.Subscribe(TOPIC)]
    assert session.handle(se.Published(b"other", Subscribed(1, "other")), 2) == []
    assert session.state is se.State.CONFIRMING

    asked = session.handle(se.Published(TOPIC, Subscribed(1, "cam")), 3)

    assert asked == [se.Ask(Request(1, "positions", {"topics": ["cam\0"], "earlier": True}))]
    assert session.handle(positions(1, after="cam"), 4) == [
        se.Ask(Request(2, "positions", {"topics": ["cam\0"], "earlier": True, "streams_after": "cam"}))
    ]
    assert session.handle(positions(2), 5) == []
    assert session.state is se.State.OPEN
    assert session.boot == 1


def test_a_lost_mark_is_asked_for_again(session: ss.SubscriberSession) -> None:
    """The confirmation is published like a result and may be lost like one."""
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)

    assert session.next_wakeup_ns() == 1_000 * MS
    assert session.handle(TICK, 999 * MS) == []
    assert session.handle(TICK, 1_000 * MS) == [se.Subscribe(TOPIC)]


def test_outcomes_in_order_are_yielded_at_once(session: ss.SubscriberSession) -> None:
    """Each once; one that comes again is dropped."""
    open_session(session)

    assert session.handle(published(0, 1), 1) == delivered(0, 1)
    assert session.handle(published(1, 2), 2) == delivered(2)


def test_a_gap_is_fetched_and_later_outcomes_wait(session: ss.SubscriberSession) -> None:
    """The reader sees no hole: 1 and 2 come by replay before 3 and 4."""
    open_session(session)
    session.handle(published(0), 1)

    assert session.handle(published(3, 4), 2) == []
    assert session.handle(TICK, 3) == [replay_of(1, 2, 2)]
    assert session.handle(TICK, 4) == []
    assert session.handle(replayed(2, 1, 2), 5) == delivered(1, 2, 3, 4)
    assert session.counts.fetched == 2


def test_what_has_left_the_ring_is_told(session: ss.SubscriberSession) -> None:
    """An explicit range, in its place in the order."""
    open_session(session)
    session.handle(published(5), 1)
    session.handle(TICK, 2)

    assert session.handle(replayed(2, 3, 4, missed=((0, 3),)), 3) == [
        se.Deliver(Missed("cam", 1, 0, 2, MissedReason.LEFT_RING)),
        *delivered(3, 4, 5),
    ]
    assert session.counts.missed == 3


def test_starting_late_is_a_gap(session: ss.SubscriberSession) -> None:
    """Positions tell what was published before: it is fetched from the beginning, page by page."""
    open_session(session, cam=ss.FETCH_COUNT + 1)

    assert session.handle(TICK, 1) == [replay_of(0, ss.FETCH_COUNT - 1, 2)]
    assert session.handle(replayed(2, *range(ss.FETCH_COUNT)), 2) == delivered(*range(ss.FETCH_COUNT))
    assert session.handle(TICK, 3) == [replay_of(ss.FETCH_COUNT, ss.FETCH_COUNT, 3)]


def test_starting_now_begins_after_the_positions() -> None:
    """What was published before is not yielded; what came while opening is, if it is later."""
    session = ss.SubscriberSession([TOPIC], start=se.Start.NOW)
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    assert session.handle(published(7, 8, 9), 0) == []
    session.handle(se.Published(TOPIC, Subscribed(1, "cam")), 0)

    assert session.handle(positions(1, cam=8), 1) == delivered(8, 9)
    assert session.handle(TICK, 2) == []
    session.check_invariants()


def test_starting_now_a_stream_born_meanwhile_begins_at_its_beginning() -> None:
    """It was not among the positions, so all of it is new."""
    session = ss.SubscriberSession([b""], start=se.Start.NOW)
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    session.handle(se.Published(b"", Subscribed(1, "")), 0)
    assert session.handle(published(0), 0) == []

    assert session.handle(positions(1), 1) == delivered(0)
    assert session.handle(published(1), 2) == delivered(1)


def test_a_lost_tail_is_found_by_asking(session: ss.SubscriberSession) -> None:
    """The last outcome before silence has no successor that shows the gap."""
    open_session(session)
    session.handle(published(0), 1)

    (ask,) = session.handle(TICK, 600 * MS)
    assert ask == se.Ask(Request(2, "positions", {"topics": ["cam\0"]}))
    assert session.handle(positions(2, cam=2), 601 * MS) == []
    assert session.handle(TICK, 602 * MS) == [replay_of(1, 1, 3)]
    assert session.handle(replayed(3, 1), 603 * MS) == delivered(1)


def test_a_busy_stream_is_not_asked_about(session: ss.SubscriberSession) -> None:
    """Its next outcome shows any gap by itself."""
    open_session(session)
    session.handle(published(0), 490 * MS)

    assert session.handle(TICK, 500 * MS) == []


def test_a_reader_without_room_fetches_nothing(session: ss.SubscriberSession) -> None:
    """A slow reader's memory stays bounded: pages come when it has room."""
    open_session(session, cam=10)

    assert session.handle(se.Tick(has_room=False), 600 * MS) == []
    assert session.handle(TICK, 601 * MS)[0] == replay_of(0, 9, 2)


def test_what_can_not_be_held_is_fetched_later(session: ss.SubscriberSession) -> None:
    """Beyond the bound early outcomes are dropped and become part of the gap."""
    open_session(session)
    last = stream_state.MAX_HELD_COUNT + 5
    session.handle(published(*range(1, last + 1)), 1)
    session.check_invariants()
    assert session.handle(TICK, 2) == [replay_of(0, 0, 2)]

    got = session.handle(replayed(2, 0), 3)

    assert got == delivered(*range(stream_state.MAX_HELD_COUNT + 1))
    assert session.handle(TICK, 4) == [replay_of(stream_state.MAX_HELD_COUNT + 1, last, 3)]


def test_held_bytes_are_bounded(session: ss.SubscriberSession) -> None:
    """A few outcomes of many bytes count as much as many of few."""
    open_session(session)
    half = stream_state.MAX_HELD_BYTES // 2 + 1
    big = (outcome(1, nbytes=half), outcome(2, nbytes=half))

    session.handle(se.Published(TOPIC, Outcomes(big)), 1)

    session.check_invariants()
    session.handle(TICK, 2)
    assert session.handle(replayed(2, 0), 3) == [se.Deliver(outcome(0)), se.Deliver(big[0])]


def test_an_answer_that_moves_nothing_is_no_endless_loop(session: ss.SubscriberSession) -> None:
    """What the broker neither has nor calls gone is told as missed after one question."""
    open_session(session)
    session.handle(published(2), 1)
    session.handle(TICK, 2)

    assert session.handle(replayed(2), 3) == [
        se.Deliver(Missed("cam", 1, 0, 1, MissedReason.NO_ANSWER)),
        *delivered(2),
    ]


def test_a_refused_replay_is_told_as_missed(session: ss.SubscriberSession) -> None:
    """A reply with a code is an answer too."""
    open_session(session)
    session.handle(published(1), 1)
    session.handle(TICK, 2)

    assert session.handle(se.Answered(Reply(2, code="bad_params")), 3) == [
        se.Deliver(Missed("cam", 1, 0, 0, MissedReason.NO_ANSWER)),
        *delivered(1),
    ]


def test_late_answers_belong_to_nobody(session: ss.SubscriberSession) -> None:
    """ZMQ-10: after a reconnect an old id means nothing."""
    open_session(session)
    session.handle(published(1), 1)
    session.handle(TICK, 2)
    session.handle(se.Disconnected("cut"), 3)

    assert session.handle(replayed(2, 0), 4) == []


def test_a_reconnect_to_the_same_broker_goes_on_where_it_was(session: ss.SubscriberSession) -> None:
    """What was published meanwhile is fetched, nothing comes twice."""
    open_session(session)
    session.handle(published(0), 1)
    session.handle(se.Disconnected("cut"), 2)
    assert session.handle(TICK, 3) == [se.Connect()]
    session.handle(se.Connected(), 4)
    (ask,) = session.handle(se.Published(TOPIC, Subscribed(1, "cam")), 5)
    assert isinstance(ask, se.Ask)
    session.handle(positions(ask.request.id, cam=2), 6)

    assert session.handle(TICK, 7) == [replay_of(1, 1, 3)]
    assert session.handle(replayed(3, 1), 8) == delivered(1)


def test_a_new_boot_ends_the_old_one_in_order(session: ss.SubscriberSession) -> None:
    """Held outcomes are yielded, the gap before them and the unknown rest are told, and a frame that runs
    a second time is yielded once."""
    open_session(session)
    session.handle(published(0, 2), 1)

    (ask,) = session.handle(published(0, boot=5), 2)
    assert ask == se.Ask(Request(2, "positions", {"topics": ["cam\0"], "earlier": True}))
    assert session.handle(TICK, 3) == []
    actions = session.handle(positions(2, boot=5, cam=1), 4)

    assert actions == [
        se.Deliver(Missed("cam", 1, 1, 1, MissedReason.NEW_BOOT)),
        *delivered(2),
        se.Deliver(Missed("cam", 1, 3, None, MissedReason.NEW_BOOT)),
    ]
    assert session.counts.duplicates == 1
    assert session.handle(published(1, boot=5), 5) == delivered(1, boot=5)
    assert session.counts.missed_unknown == 1
    assert session.boot == 5


def earlier_positions(
    request_id: int,
    boots: dict[int, bool],
    spans: dict[str, list[list[int]]],
    *,
    boot: int,
    **next_pub_seqs: int,
) -> se.Answered:
    """An answer of a broker with a journal."""
    result = {
        "boot": boot,
        "streams": {stream: [0, number] for stream, number in next_pub_seqs.items()},
        "streams_next": "",
        "earlier_boots": [[one, is_complete] for one, is_complete in boots.items()],
        "earlier": spans,
    }
    return se.Answered(Reply(request_id, result))  # type: ignore[arg-type]


def replayed_of(request_id: int, boot: int, *pub_seqs: int, first_seq: int = 0) -> se.Answered:
    outcomes = tuple(outcome(n, boot=boot, seq=first_seq + n) for n in pub_seqs)
    return se.Answered(ReplayReply(request_id, outcomes))


def live(boot: int, *pub_seqs: int, first_seq: int) -> se.Published:
    outcomes = tuple(outcome(n, boot=boot, seq=first_seq + n) for n in pub_seqs)
    return se.Published(TOPIC, Outcomes(outcomes))


def items_of(actions: list[se.Action]) -> list[tuple[int, int, int | None]]:
    """(boot, first, last) of what was delivered; last is None for an outcome."""
    found: list[tuple[int, int, int | None]] = []
    for action in actions:
        if isinstance(action, se.Deliver):
            item = action.item
            is_missed = isinstance(item, Missed)
            found.append((item.boot, item.first, item.last) if is_missed else (item.boot, item.pub_seq, None))  # type: ignore[union-attr]
    return found


def test_the_rest_of_an_earlier_boot_comes_from_the_journal_first(session: ss.SubscriberSession) -> None:
    """What was recorded and not seen is fetched under its own boot; the new boot's outcomes wait for it."""
    open_session(session)
    session.handle(published(0, 1), 1)
    (ask,) = session.handle(live(5, 0, 1, first_seq=4), 2)
    assert isinstance(ask, se.Ask)

    assert session.handle(earlier_positions(2, {1: True}, {"cam": [[1, 0, 4]]}, boot=5, cam=2), 3) == []
    assert session.handle(TICK, 4) == [replay_of(2, 3, 3)]
    got = session.handle(replayed_of(3, 1, 2, 3), 5)

    assert items_of(got) == [(1, 2, None), (1, 3, None), (5, 0, None), (5, 1, None)]
    assert session.counts.missed_unknown == 0
    assert items_of(session.handle(live(5, 2, first_seq=4), 6)) == [(5, 2, None)]


@pytest.mark.parametrize(
    ("boots", "spans", "expected"),
    [
        ({1: True}, [[1, 0, 2]], [(5, 0, None)]),
        ({1: True}, [], [(5, 0, None)]),
        ({1: False}, [[1, 0, 2]], [(5, 0, None)]),
        ({1: False}, [], [(1, 2, None), (5, 0, None)]),
        ({}, [], [(1, 2, None), (5, 0, None)]),
    ],
    ids=["read to its end", "complete, no span", "a span is enough", "stream was dropped", "no journal"],
)
def test_a_boot_that_was_read_to_its_end_has_no_hole(
    session: ss.SubscriberSession,
    boots: dict[int, bool],
    spans: list[list[int]],
    expected: list[tuple[int, int, int | None]],
) -> None:
    """Missed with an unknown end is told only when nobody can tell where the earlier boot ended."""
    open_session(session)
    session.handle(published(0, 1), 1)
    session.handle(live(5, 0, first_seq=2), 2)

    actions = session.handle(earlier_positions(2, boots, {"cam": spans} if spans else {}, boot=5, cam=1), 3)

    assert items_of(actions) == expected


def test_several_boots_are_read_in_order(session: ss.SubscriberSession) -> None:
    """Two restarts while the subscriber was away: the rest of the first boot, all of the next, the last."""
    open_session(session)
    session.handle(published(0), 1)
    session.handle(se.Disconnected("broker died"), 2)
    session.handle(TICK, 3)
    session.handle(se.Connected(), 4)
    (ask,) = session.handle(se.Published(TOPIC, Subscribed(7, "cam")), 5)
    assert isinstance(ask, se.Ask)
    spans = {"cam": [[9, 0, 5], [1, 0, 2], [6, 0, 1]]}

    session.handle(earlier_positions(ask.request.id, {9: True, 1: True, 6: True}, spans, boot=7, cam=1), 6)

    assert session.handle(TICK, 7) == [replay_of(1, 1, 3)]
    assert items_of(session.handle(replayed_of(3, 1, 1), 8)) == [(1, 1, None)]
    assert session.handle(TICK, 9) == [replay_of(0, 0, 4, boot=6)]
    assert items_of(session.handle(replayed_of(4, 6, 0, first_seq=2), 10)) == [(6, 0, None)]
    assert session.handle(TICK, 11) == [replay_of(0, 0, 5, boot=7)]
    assert items_of(session.handle(replayed_of(5, 7, 0, first_seq=3), 12)) == [(7, 0, None)]
    assert session.behind_count == 0


@pytest.mark.parametrize(
    ("start", "expected"),
    [(se.Start.EARLIEST, [replay_of(0, 1, 2)]), (se.Start.NOW, [])],
)
def test_starting_earliest_reaches_into_the_journal(start: se.Start, expected: list[se.Action]) -> None:
    """A subscriber that starts after the restart gets the earlier boots too; one that starts now does not."""
    session = ss.SubscriberSession([TOPIC], start=start)
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    session.handle(se.Published(TOPIC, Subscribed(5, "cam")), 0)
    session.handle(live(5, 1, first_seq=2), 0)

    actions = session.handle(earlier_positions(1, {1: True}, {"cam": [[1, 0, 2]]}, boot=5, cam=1), 1)

    assert items_of(actions) == ([] if start is se.Start.EARLIEST else [(5, 1, None)])
    assert session.handle(TICK, 2) == expected
    session.check_invariants()


def test_starting_now_gets_all_of_a_stream_that_came_up_before_the_restart() -> None:
    """Its outcome was recorded and the broker killed before it was published: it is new to the subscriber."""
    session = ss.SubscriberSession([TOPIC], start=se.Start.NOW)
    open_session(session)

    (ask,) = session.handle(live(5, 0, first_seq=1), 1)
    assert isinstance(ask, se.Ask)
    spans = {"cam": [[9, 0, 3], [1, 0, 1]]}
    assert session.handle(earlier_positions(2, {9: True, 1: True}, spans, boot=5, cam=1), 2) == []

    assert session.handle(TICK, 3) == [replay_of(0, 0, 3)]
    assert items_of(session.handle(replayed_of(3, 1, 0), 4)) == [(1, 0, None), (5, 0, None)]


@pytest.mark.parametrize(
    ("boots", "spans", "expected"),
    [
        (
            {1: True, 5: True},
            [[1, 0, 1], [5, 0, 2]],
            [(5, 0, None), (5, 1, None), (6, 0, None)],
        ),
        (
            {},
            [],
            [(1, 1, None), (5, 0, None), (5, 1, None), (5, 2, None), (6, 0, None)],
        ),
        ({1: True, 5: True}, [[1, 0, 1]], [(6, 0, None)]),
    ],
    ids=["both in the journal", "no journal", "a journal that denies what was heard"],
)
def test_a_second_restart_before_the_first_is_settled(
    session: ss.SubscriberSession,
    boots: dict[int, bool],
    spans: list[list[int]],
    expected: list[tuple[int, int, int | None]],
) -> None:
    """What was held of the boot in between is yielded in its place, whoever can tell the rest of it."""
    open_session(session)
    session.handle(published(0), 1)
    session.handle(live(5, 0, 1, first_seq=1), 2)
    (ask,) = session.handle(live(6, 0, first_seq=3), 3)
    assert isinstance(ask, se.Ask)

    actions = session.handle(earlier_positions(3, boots, {"cam": spans} if spans else {}, boot=6, cam=1), 4)

    assert items_of(actions) == expected
    session.check_invariants()


def test_a_restart_before_a_new_stream_is_settled(session: ss.SubscriberSession) -> None:
    """A stream first heard of in a boot that ended at once: read from its beginning, boot by boot."""
    open_session(session)
    session.handle(live(5, 1, first_seq=1), 1)
    session.handle(live(6, 0, first_seq=3), 2)
    session.handle(earlier_positions(3, {1: True, 5: True}, {"cam": [[5, 0, 2]]}, boot=6, cam=1), 3)

    assert session.handle(TICK, 4) == [replay_of(0, 0, 4, boot=5)]
    assert items_of(session.handle(replayed_of(4, 5, 0, first_seq=1), 5)) == [
        (5, 0, None),
        (5, 1, None),
        (6, 0, None),
    ]


def test_a_restart_while_opening_begins_the_questions_again(session: ss.SubscriberSession) -> None:
    """Pages of two boots are not mixed."""
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    session.handle(se.Published(TOPIC, Subscribed(1, "cam")), 0)
    (second,) = session.handle(positions(1, cam=1, after="cam"), 1)
    assert isinstance(second, se.Ask)

    (again,) = session.handle(positions(2, boot=5), 2)

    assert again == se.Ask(Request(3, "positions", {"topics": ["cam\0"], "earlier": True}))
    assert session.state is se.State.CONFIRMING
    session.handle(earlier_positions(3, {1: True}, {"cam": [[1, 0, 1]]}, boot=5, cam=0), 3)
    assert session.state is se.State.OPEN
    assert session.handle(TICK, 4) == [replay_of(0, 0, 4)]


def test_starting_now_a_restart_while_opening_drops_what_was_heard() -> None:
    """Nothing from before the moment at which the subscriber is open."""
    session = ss.SubscriberSession([TOPIC], start=se.Start.NOW)
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    session.handle(published(4, 5), 0)
    (ask,) = session.handle(se.Published(TOPIC, Subscribed(5, "cam")), 0)
    assert isinstance(ask, se.Ask)
    session.handle(live(5, 2, first_seq=6), 1)

    got = session.handle(earlier_positions(1, {1: True}, {"cam": [[1, 0, 6]]}, boot=5, cam=2), 2)

    assert items_of(got) == [(5, 2, None)]
    assert session.handle(TICK, 3) == []
    session.check_invariants()


def test_within_one_boot_equal_names_are_not_duplicates(session: ss.SubscriberSession) -> None:
    """A broker publishes one outcome per frame; two rejects of unnumbered frames may share a seq."""
    open_session(session)

    actions = session.handle(se.Published(TOPIC, Outcomes((outcome(0, seq=0), outcome(1, seq=0)))), 1)

    assert actions == [se.Deliver(outcome(0, seq=0)), se.Deliver(outcome(1, seq=0))]


def test_latest_skips_gaps_and_counts_them() -> None:
    """Nothing is fetched for a hole that a newer outcome has made worthless."""
    session = ss.SubscriberSession([TOPIC], mode=se.Mode.LATEST, start=se.Start.NOW)
    open_session(session, cam=5)

    assert session.handle(published(9), 1) == delivered(9)
    assert session.handle(TICK, 2) == []
    assert session.counts.skipped == 4


def test_latest_fetches_the_newest_when_it_was_lost() -> None:
    """The one outcome that counts is fetched when nothing came after it."""
    session = ss.SubscriberSession([TOPIC], mode=se.Mode.LATEST, start=se.Start.NOW)
    open_session(session, cam=5)
    session.handle(TICK, 600 * MS)

    session.handle(positions(2, cam=9), 601 * MS)

    assert session.handle(TICK, 602 * MS) == [replay_of(8, 8, 3)]
    assert session.handle(replayed(3, 8), 603 * MS) == delivered(8)
    assert session.counts.skipped == 3


def test_latest_tells_no_ranges() -> None:
    """Mode latest counts what it leaves out, across boots and unanswered fetches too."""
    session = ss.SubscriberSession([TOPIC], mode=se.Mode.LATEST, start=se.Start.EARLIEST)
    open_session(session, cam=5)
    assert session.handle(TICK, 1) == [replay_of(4, 4, 2)]
    assert session.handle(replayed(2, missed=((4, 5),)), 2) == []
    assert session.counts.skipped == 5

    assert session.handle(published(0, boot=2), 3) == delivered(0, boot=2)


def test_a_broker_that_does_not_answer_is_left(session: ss.SubscriberSession) -> None:
    """Control is asked twice a second when it is quiet: silence there is a dead broker."""
    open_session(session)
    session.handle(TICK, 600 * MS)

    assert session.handle(TICK, 5_600 * MS) == [se.Disconnect("no answer on control for 5000 ms")]
    assert session.state is se.State.AWAY


@pytest.mark.parametrize(
    "message",
    [
        Refused("draining", "stopping"),
        Reply(1, code="internal"),
        Reply(1, {"boot": "x", "streams": {}}),
        Reply(1, {"boot": 1, "streams": {"cam": [0]}}),
        Reply(1, {"boot": 1, "streams": {"cam": [0, -1]}}),
        Reply(1, {"boot": 1, "streams": {}, "earlier_boots": [7]}),
        Reply(1, {"boot": 1, "streams": {}, "earlier": [7]}),
        Reply(1, {"boot": 1, "streams": {}, "earlier": {"cam": 7}}),
        Reply(1, {"boot": 1, "streams": {}, "earlier": {"cam": [[7, 0, -1]]}}),
        ReplayReply(1, ()),
    ],
)
def test_answers_that_make_no_sense_end_the_connection(
    session: ss.SubscriberSession, message: Message
) -> None:
    """A peer's wrong answer is never believed and never fatal."""
    session.handle(TICK, 0)
    session.handle(se.Connected(), 0)
    session.handle(se.Published(TOPIC, Subscribed(1, "cam")), 0)

    (action,) = session.handle(se.Answered(message), 1)

    assert isinstance(action, se.Disconnect)
    assert session.state is se.State.AWAY


@pytest.mark.parametrize("event", [published(0), se.Published(TOPIC, Subscribed(1, "cam")), se.Connected()])
def test_events_out_of_place_change_nothing(session: ss.SubscriberSession, event: se.Event) -> None:
    """What a closed connection still brings is not taken."""
    assert session.handle(event, 0) == []
    assert session.state is se.State.AWAY


@pytest.mark.parametrize(
    ("mode", "has_journal"),
    [(se.Mode.EVERY, False), (se.Mode.LATEST, False), (se.Mode.EVERY, True)],
    ids=["every", "latest", "every, with a journal"],
)
@pytest.mark.parametrize("seed", range(40))
def test_every_outcome_is_yielded_once_or_told_as_missed(seed: int, mode: se.Mode, has_journal: bool) -> None:
    """Random loss of results, cut connections, new boots, a small ring, a reader that stalls: per stream
    and boot the yielded pub_seqs and Missed ranges tile the line from 0 to the last outcome. With a journal
    they do so for every boot, and nothing is left open."""
    rng = random.Random(seed)
    session = ss.SubscriberSession([b""], mode=mode, start=se.Start.EARLIEST, jitter=rng.random())
    broker = ToyBroker(1, ring=rng.choice([5, 1_000]))
    results: deque[se.Published] = deque()
    answers: deque[Message] = deque()
    asked: deque[Request] = deque()
    items: list[Outcome | Missed] = []
    ends: dict[tuple[int, str], int] = {}
    names: list[tuple[str, int]] = []
    now = 0

    def handle(event: se.Event) -> None:
        for action in session.handle(event, now):
            match action:
                case se.Deliver(item):
                    items.append(item)
                case se.Ask(request):
                    asked.append(request)
                case se.Subscribe(topic):
                    results.append(se.Published(topic, Subscribed(broker.boot, "")))
                case se.Connect():
                    for queue in (results, answers, asked):
                        queue.clear()
                    handle(se.Connected())
                case se.Disconnect():
                    for queue in (results, answers, asked):
                        queue.clear()
        session.check_invariants()

    for step in range(1_500):
        now += rng.randrange(1, 60) * MS
        is_healed = step > 900
        roll = rng.random()
        is_run_again = rng.random() < 0.1 and not has_journal  # it knows what was finished
        if roll < 0.3 and not is_healed:
            stream = rng.choice(["a", "b"])
            seq = len(names)
            if names and is_run_again:  # run again after a restart: the same name under a new boot
                stream, seq = rng.choice(names)
            names.append((stream, seq))
            message = broker.publish(stream, seq)
            ends[broker.boot, stream] = message.outcomes[-1].pub_seq + 1
            if rng.random() < 0.7:
                results.append(se.Published(stream.encode() + b"\0", message))
        elif roll < 0.33 and not is_healed:
            handle(se.Disconnected("cut"))
            results.clear()
        elif roll < 0.34 and not is_healed:
            before = broker if has_journal else None
            broker = ToyBroker(broker.boot + 1, ring=rng.choice([5, 1_000]), before=before)
            handle(se.Disconnected("broker died"))
            results.clear()
        elif roll < 0.6 and results:
            handle(results.popleft())
        elif roll < 0.75 and asked:
            answers.append(broker.answer(asked.popleft()))
        elif roll < 0.9 and answers:
            handle(se.Answered(answers.popleft()))
        handle(se.Tick(has_room=is_healed or rng.random() < 0.7))

    had = [(item.stream, item.epoch, item.seq) for item in items if isinstance(item, Outcome)]
    by_boot: dict[tuple[int, str], int] = {}
    for item in items:
        key = (item.boot, item.stream)
        expected = by_boot.get(key, 0)
        if isinstance(item, Missed):
            assert mode is se.Mode.EVERY
            assert item.first == expected or session.counts.duplicates
            by_boot[key] = (item.last if item.last is not None else item.first) + 1
        else:
            assert item.pub_seq >= expected
            if mode is se.Mode.EVERY and not session.counts.duplicates:
                assert item.pub_seq == expected
            by_boot[key] = item.pub_seq + 1
    assert session.behind_count == 0
    assert not (has_journal and session.counts.missed_unknown)
    for (boot, stream), end in ends.items():
        if (boot == broker.boot or has_journal) and not session.counts.duplicates:
            assert by_boot.get((boot, stream)) == end, f"seed {seed}: stream {stream} ends early"
    boots_of_name: dict[tuple[str, int, int], set[int]] = {}
    for item in items:
        if isinstance(item, Outcome):
            boots = boots_of_name.setdefault((item.stream, item.epoch, item.seq), set())
            boots.add(item.boot)
            assert len(boots) == 1, f"seed {seed}: {item} was yielded under two boots"
    assert had


def test_the_toy_broker_knows_its_ring() -> None:
    """The checker's own ground: a ring of 2 has lost the first of three."""
    broker = ToyBroker(1, ring=2)
    for seq in range(3):
        broker.publish("cam", seq)
    params = {"stream": "cam", "boot": 1, "first": 0, "last": 2}

    reply = broker.answer(Request(1, "replay", params))  # type: ignore[arg-type]

    assert isinstance(reply, ReplayReply)
    assert [o.pub_seq for o in reply.outcomes] == [1, 2]
    assert reply.missed == ((0, 1),)


def test_a_tick_is_needed_when_there_is_something_to_do(session: ss.SubscriberSession) -> None:
    """While all goes well it is not: a turn that only delivers leaves it out."""
    assert session.needs_tick(True, 0)
    open_session(session, cam=0)
    session.handle(TICK, 0)

    assert not session.needs_tick(True, 1)
    assert session.needs_tick(False, 1)
    assert session.needs_tick(True, ss.QUIET_NS)
    session.handle(published(0), 2)
    assert not session.needs_tick(True, 3)
    session.handle(published(2), 4)
    assert session.needs_tick(True, 5)
