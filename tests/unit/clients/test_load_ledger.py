"""The ledger: each outcome closes the line of its frame, once."""

from __future__ import annotations

import threading

import pytest
from hr_bench import NAMES, Played, outcome

from headrace.clients.load.ledger import Ledger
from headrace.clients.records import Missed, MissedReason
from headrace.protocol.messages import Status


def test_an_outcome_closes_the_line_of_its_frame() -> None:
    """By stream and seq, whatever the order in which outcomes come."""
    played = Played()
    for stream, due_s in ((0, 0.0), (1, 0.1), (0, 0.2)):
        played.send(stream, due_s)

    played.end(0, 1, 0.5)
    played.end(1, 0, 0.6, Status.EXPIRED, "deadline")

    ledger = played.ledger
    assert ledger.status == [None, Status.EXPIRED, Status.OK]
    assert ledger.ended_s == [None, 100.6, 100.5]
    assert ledger.code[1] == "deadline"
    assert ledger.first_messages == {"deadline": "because of deadline"}
    assert ledger.open_count == 1
    assert list(ledger.open_of(0, 0)) == [(0, 0)]
    assert list(ledger.open_of(0, 1)) == []


def test_a_second_outcome_is_counted_and_changes_nothing() -> None:
    """Exactly one end: the generator checks it, it does not assume it."""
    played = Played()
    played.send(0, 0.0)
    played.end(0, 0, 0.1)

    played.end(0, 0, 0.9, Status.ERROR, "late")

    assert played.ledger.status == [Status.OK]
    assert played.ledger.ended_s == [100.1]
    assert played.ledger.duplicate_count == 1


def test_outcomes_of_frames_never_sent_are_counted() -> None:
    """Of a stream that is not ours, or of a number not given out."""
    played = Played()
    played.send(0, 0.0)

    played.ledger.put([outcome(0, 1)])
    played.ledger.put([outcome(1, 0)])

    assert played.ledger.stranger_count == 2
    assert played.ledger.status == [None]


def test_missed_ranges_are_counted() -> None:
    """With an unknown end it is known that something is missed, not how much."""
    ledger = Ledger(NAMES)

    ledger.put([Missed(NAMES[0], 1, 3, 5, MissedReason.LEFT_RING)])
    assert (ledger.missed_count, ledger.is_missed_unknown) == (3, False)
    ledger.put([Missed(NAMES[0], 1, 3, None, MissedReason.NEW_BOOT)])
    assert (ledger.missed_count, ledger.is_missed_unknown) == (3, True)


def test_a_frame_that_was_not_taken_leaves_no_line() -> None:
    """Its seq goes to the next frame of the stream."""
    played = Played()
    played.send(2, 0.0)
    played.send(2, 0.1)

    played.ledger.withdraw()
    played.ledger.open(2, 100.2, 100.2, is_held_up=False)
    played.end(2, 1, 0.3)

    assert len(played.ledger) == 2
    assert played.ledger.due_s == [100.0, 100.2]
    assert played.ledger.status == [None, Status.OK]


def test_settled_when_the_last_line_is_closed() -> None:
    """The waiter is woken by the outcome, in another thread."""
    played = Played()
    assert played.ledger.wait_settled(0.0)
    played.send(0, 0.0)
    assert not played.ledger.wait_settled(0.0)

    thread = threading.Timer(0.01, lambda: played.end(0, 0, 0.1))
    thread.start()

    assert played.ledger.wait_settled(10.0)
    thread.join()
    assert played.ledger.recent_ms() == pytest.approx([100.0])


def test_a_ledger_is_always_ready_to_take_more() -> None:
    """It never holds the subscriber up, and it is a sink also while it is empty."""
    assert Ledger(NAMES).has_room()
