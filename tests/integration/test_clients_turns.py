"""Whose thread does the work: a lone frame is sent by whoever pushes it, a waiting reader receives itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hr_broker import BrokerThread, running_broker
from hr_clients import AutoWorker, image, wait_for
from hr_stand_in import StandIn

from headrace import Missed, NotDeliveredError, Outcome, Producer, Subscriber
from headrace.clients import producer_loop, subscriber_loop
from headrace.clients import producer_session as ps
from headrace.clients import subscriber_events as se
from headrace.errors import ClosedError, RequestTimeoutError

Item = Outcome | Missed


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    with running_broker() as running, AutoWorker(running.endpoints):
        yield running


@pytest.fixture
def producer(broker: BrokerThread) -> Iterator[Producer]:
    with Producer(broker.endpoints.frames) as made:
        made.wait_connected(5)
        yield made


def threads_of(loop: object, kind: type, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the thread of each event of ``kind`` that a loop hands to its session."""
    seen: list[int] = []
    session = loop._session  # type: ignore[attr-defined]
    handle = session.handle

    def watched(event: object, now_ns: int) -> object:
        if isinstance(event, kind):
            seen.append(threading.get_ident())
        return handle(event, now_ns)

    monkeypatch.setattr(loop, "_session", StandIn(session, handle=watched))
    return seen


class Reader:
    """Reads in a thread of its own, which ends when the subscriber is closed."""

    def __init__(self, subscriber: Subscriber, timeout: float | None = None) -> None:
        self.items: list[Item] = []
        self._get: Callable[[], Item] = lambda: subscriber.get(timeout)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        while True:
            try:
                self.items.append(self._get())
            except RequestTimeoutError:
                continue
            except ClosedError:
                return


def push(producer: Producer, count: int, gap_s: float = 0.005) -> None:
    for value in range(count):
        producer.push(image(value), stream="cam")
        time.sleep(gap_s)  # frames of a camera: each has ended before the next


# -- producers ---------------------------------------------------------------------------------------


def test_a_lone_frame_is_sent_by_the_thread_that_pushes_it(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that come together are left to the producer's own thread, which bundles them."""
    seen = threads_of(producer._loop, ps.FramesPushed, monkeypatch)

    push(producer, 5)
    assert threading.get_ident() in seen
    lone_count = len(seen)
    push(producer, 20, gap_s=0)
    producer.flush(5)

    assert producer._loop.thread.ident in seen[lone_count:]


def test_frames_wait_for_credit_whoever_pushes_them(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them end once, in order, with threads that push at all paces at once."""
    monkeypatch.setattr(producer_loop, "LONE_NS", 100_000)
    with Producer(broker.endpoints.frames) as producer:
        threads = [threading.Thread(target=push, args=(producer, 100, gap)) for gap in (0, 0.0002, 0.001)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        account = producer.flush(10)

    assert account.by_status == {"ok": 300}


def test_an_interrupted_push_is_sent_again(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's exception in the middle of sending leaves no frame without an end."""
    link = producer._loop._link
    assert link is not None

    def interrupted(_parts: object) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    push(producer, 1)
    monkeypatch.setattr(producer_loop, "LONE_NS", 0)
    wait_for(lambda: producer._loop._is_asleep)
    monkeypatch.setattr(link, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        push(producer, 1)
    push(producer, 1)
    account = producer.flush(10)

    assert (account.sent, account.finished, account.sessions) == (3, 3, 2)


def test_a_socket_that_takes_no_more_is_replaced(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the thread that pushes, cured by the producer's own."""
    link = producer._loop._link
    assert link is not None
    wait_for(lambda: producer._loop._is_asleep)
    monkeypatch.setattr(link, "send", lambda _parts: False)
    push(producer, 1)

    account = producer.flush(10)

    assert (account.finished, account.sessions) == (1, 2)


def test_a_bug_met_while_pushing_ends_the_producer_aloud(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one met by the producer's own thread does."""
    producer = Producer(broker.endpoints.frames)
    producer.wait_connected(5)
    wait_for(lambda: producer._loop._is_asleep)

    def fail(_event: object, _now_ns: int) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(producer._loop, "_session", StandIn(producer._loop._session, handle=fail))
    producer.push(image(0), stream="cam")

    with pytest.raises(ClosedError, match="a bug"):
        producer.flush(5)
    with pytest.raises(NotDeliveredError):
        producer.close()


# -- subscribers -------------------------------------------------------------------------------------


def test_a_reader_that_waits_receives_itself(
    broker: BrokerThread, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And hands over to the subscriber's thread when it reads no more."""
    with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
        seen = threads_of(subscriber._loop, se.Published, monkeypatch)
        reader = Reader(subscriber)
        push(producer, 20)
        wait_for(lambda: len(reader.items) == 20)

        assert reader.thread.ident in seen
        subscriber.close()
        reader.thread.join(5)

    assert [item.seq for item in reader.items if isinstance(item, Outcome)] == list(range(20))


def test_the_main_thread_never_leads(
    broker: BrokerThread, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signal handlers run there, and may raise anywhere."""
    with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
        seen = threads_of(subscriber._loop, se.Published, monkeypatch)
        push(producer, 5)
        got = [subscriber.get(5) for _ in range(5)]

    assert len(got) == 5
    assert set(seen) == {subscriber._loop.thread.ident}


def test_items_are_read_ahead_while_a_reader_is_busy(broker: BrokerThread, producer: Producer) -> None:
    """The subscriber's thread takes over from a reader that went off with its item."""
    with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
        first = threading.Thread(target=subscriber.get)
        first.start()
        push(producer, 1)
        first.join(5)
        push(producer, 5)

        wait_for(lambda: len(subscriber._queue._items) == 5)


@pytest.mark.parametrize("timeout", [None, 0.003])
def test_several_readers_share_the_items(
    broker: BrokerThread, producer: Producer, timeout: float | None
) -> None:
    """One leads, the others wait for what it leaves; each item goes to one."""
    with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
        readers = [Reader(subscriber, timeout) for _ in range(3)]
        push(producer, 50, gap_s=0.001)
        wait_for(lambda: sum(len(reader.items) for reader in readers) == 50)
        subscriber.close()
        for reader in readers:
            reader.thread.join(5)

    got = [item.seq for reader in readers for item in reader.items if isinstance(item, Outcome)]
    assert sorted(got) == list(range(50))


def test_a_turn_that_fails_ends_the_subscriber_aloud(
    broker: BrokerThread, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads is told what it was, also the reader that ran the turn."""
    subscriber = Subscriber(broker.endpoints.frames, stream="cam")
    told: list[str] = []

    def read() -> None:
        try:
            subscriber.get(5)
        except ClosedError as error:
            told.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: subscriber._loop._leader is not None)

    def fail(*_args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(subscriber._loop, "_session", StandIn(subscriber._loop._session, handle=fail))
    push(producer, 1)
    reader.join(5)

    assert "a bug" in told[0]
    subscriber.close()


def test_a_reader_that_is_torn_out_of_a_turn_ends_the_subscriber(
    broker: BrokerThread, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had received can't be known any more: ended aloud, not continued with a hole."""

    class Torn(BaseException):
        pass

    subscriber = Subscriber(broker.endpoints.frames, stream="cam")
    told: list[BaseException] = []

    def read() -> None:
        try:
            subscriber.get(5)
        except Torn as error:
            told.append(error)

    def tear(*_args: object) -> None:
        raise Torn

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: subscriber._loop._leader is not None)
    monkeypatch.setattr(subscriber_loop.codec, "decode_published", tear)
    push(producer, 1)
    reader.join(5)

    assert told
    with pytest.raises(ClosedError, match="Torn"):
        subscriber.get(5)
    subscriber.close()
