"""The queue between the I/O thread and the readers."""

from __future__ import annotations

import threading

import pytest

from headrace.clients.reader_queue import ReaderQueue
from headrace.clients.records import Missed, MissedReason
from headrace.clients.subscriber_events import Mode
from headrace.errors import ClosedError, RequestTimeoutError
from headrace.protocol.messages import Outcome, Status


def outcome(pub_seq: int, stream: str = "cam", nbytes: int = 0) -> Outcome:
    return Outcome(stream, 1, pub_seq, 1, pub_seq, Status.OK, payloads=(bytes(nbytes),) if nbytes else ())


def test_items_come_in_order_and_the_count_is_bounded() -> None:
    """Full at two; room is announced once half of it was read, and once only."""
    rooms: list[int] = []
    queue = ReaderQueue(Mode.EVERY, max_count=2, max_bytes=10**6, on_room=lambda: rooms.append(1))
    missed = Missed("cam", 1, 1, 2, MissedReason.LEFT_RING)
    queue.put([outcome(0)])
    assert queue.has_room()
    queue.put([missed])

    assert not queue.has_room()
    assert queue.get(0) == outcome(0)
    assert rooms == [1]
    assert queue.get(0) == missed
    assert rooms == [1]
    assert queue.delivered_count == 2
    with pytest.raises(RequestTimeoutError):
        queue.get(0)


def test_bytes_are_bounded_too() -> None:
    """One large outcome fills the queue."""
    rooms: list[int] = []
    queue = ReaderQueue(Mode.EVERY, max_count=100, max_bytes=1_000, on_room=lambda: rooms.append(1))
    queue.put([outcome(0, nbytes=1_000)])

    assert not queue.has_room()
    queue.get(0)
    assert rooms == [1]
    assert queue.has_room()


def test_latest_keeps_one_item_per_stream_and_takes_turns() -> None:
    """ZMQ-18: a busy stream neither pushes out a quiet one nor goes before it."""
    queue = ReaderQueue(Mode.LATEST, max_count=1, max_bytes=1)
    queue.put([outcome(0, "busy", nbytes=5)])
    queue.put([outcome(0, "quiet")])
    for number in range(1, 50):
        queue.put([outcome(number, "busy", nbytes=5)])

    assert queue.has_room()
    assert [queue.get(0), queue.get(0)] == [outcome(49, "busy", nbytes=5), outcome(0, "quiet")]
    assert queue.skipped_count == 49


def test_closing_wakes_every_reader() -> None:
    """Each gets ClosedError with the reason."""
    queue = ReaderQueue(Mode.EVERY, max_count=1, max_bytes=1)
    errors: list[str] = []

    def read() -> None:
        try:
            queue.get(None)
        except ClosedError as error:
            errors.append(str(error))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()

    queue.close("the end", is_dropped=True)
    queue.close("another end", is_dropped=True)
    for reader in readers:
        reader.join(5)

    assert errors == ["the end"] * 3


def test_what_was_queued_is_read_out_after_a_failure() -> None:
    """Closing without dropping lets a reader have what came before."""
    queue = ReaderQueue(Mode.EVERY, max_count=9, max_bytes=9)
    queue.put([outcome(0)])

    queue.close("failed", is_dropped=False)

    assert queue.get(0) == outcome(0)
    with pytest.raises(ClosedError, match="failed"):
        queue.get(0)


def test_age_is_how_long_an_item_had_waited() -> None:
    """Measured in this process, so no clocks are compared."""
    queue = ReaderQueue(Mode.EVERY, max_count=9, max_bytes=9)
    queue.put([outcome(0)])
    threading.Event().wait(0.02)

    queue.get(0)

    assert queue.age_ms >= 20


def test_readers_are_told_once_about_all_that_was_put() -> None:
    """Several items and several waiting readers: one call wakes as many readers as there are items."""
    told: list[int] = []
    queue = ReaderQueue(Mode.EVERY, max_count=10, max_bytes=10**6, on_item=lambda: told.append(1))
    got: list[Outcome | Missed] = []
    readers = [threading.Thread(target=lambda: got.append(queue.get(10.0))) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(3):
        queue.put([outcome(number)])

    queue.wake_readers()
    queue.wake_readers()

    for reader in readers:
        reader.join(10.0)
    assert sorted(item.pub_seq for item in got if isinstance(item, Outcome)) == [0, 1, 2]
    assert told == [1]
