"""kill -9 of a broker that publishes about 1,000 results a second, with a journal and without one.

With a journal each subscriber gets each outcome exactly once, whichever boot it is of, and nothing is missed.
Without one each frame still has one outcome per subscriber, and what can't be had is told as missed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hr_processes import LIMIT_S, BrokerProcess, Processes, emulated_config

import headrace
from headrace.clients.records import Missed, MissedReason

IMAGE = np.zeros((32, 32, 3), np.uint8)

STREAMS = ("a", "b", "c", "d")

#: Frames of each stream and how fast they are pushed: 4 x 250 a second, killed twice on the way.
COUNT = 750
FRAMES_PER_SECOND = 250

#: When the broker is killed, in outcomes that the first subscriber has had.
KILLS = (600, 1_500)

Item = headrace.Outcome | Missed


def configuration(journal: Path | None) -> str:
    broker = {} if journal is None else {"journal": str(journal)}
    return emulated_config(base_ms=1.0, per_frame_ms=0.1, max_batch_size=8, broker=broker)


class Pusher(threading.Thread):
    """Pushes one stream at a steady pace, then waits until every frame has its end."""

    def __init__(self, address: str, stream: str) -> None:
        super().__init__(name=f"push-{stream}", daemon=True)
        self.account: headrace.ProducerAccount | None = None
        self._address = address
        self._stream = stream

    def run(self) -> None:
        pace = threading.Event()  # never set: a pause that ends at the next frame's time
        with headrace.Producer(self._address, max_unfinished_frames=COUNT) as producer:
            began_s = time.monotonic()
            for number in range(COUNT):
                pace.wait(max(0.0, began_s + number / FRAMES_PER_SECOND - time.monotonic()))
                producer.push(IMAGE, stream=self._stream, timeout=LIMIT_S)
            self.account = producer.flush(2 * LIMIT_S)


class Reader(threading.Thread):
    """Reads into ``items`` until it has the last frame of each of its streams."""

    def __init__(self, address: str, streams: tuple[str, ...]) -> None:
        super().__init__(name=f"read-{'-'.join(streams)}", daemon=True)
        self.streams = streams
        self.items: list[Item] = []
        self.subscriber = headrace.Subscriber(address, streams=streams)
        self._changed = threading.Condition()

    def run(self) -> None:
        open_streams = set(self.streams)
        with contextlib.suppress(headrace.HeadraceError):  # too slow: the checks say what is not there
            while open_streams:
                item = self.subscriber.get(LIMIT_S)
                with self._changed:
                    self.items.append(item)
                    self._changed.notify_all()
                if isinstance(item, headrace.Outcome) and item.seq == COUNT - 1:
                    open_streams.discard(item.stream)

    def wait_count(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.items) >= count, LIMIT_S), len(self.items)

    @property
    def outcomes(self) -> list[headrace.Outcome]:
        return [item for item in self.items if isinstance(item, headrace.Outcome)]

    @property
    def missed(self) -> list[Missed]:
        return [item for item in self.items if isinstance(item, Missed)]


@contextlib.contextmanager
def reading(address: str, *streams: tuple[str, ...]) -> Iterator[list[Reader]]:
    readers = [Reader(address, each) for each in streams]
    for reader in readers:
        reader.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.join(LIMIT_S)
            reader.subscriber.close()


def run_with_kills(broker: BrokerProcess, readers: list[Reader]) -> list[headrace.ProducerAccount]:
    """Push all frames while the broker is killed twice; return the producers' accounts."""
    pushers = [Pusher(broker.address, stream) for stream in STREAMS]
    for pusher in pushers:
        pusher.start()
    for count in KILLS:
        readers[0].wait_count(count)
        broker.running.kill()
        broker.restart()
    for pusher in pushers:
        pusher.join(3 * LIMIT_S)
    accounts = [pusher.account for pusher in pushers if pusher.account is not None]
    assert len(accounts) == len(STREAMS), "a producer did not get the end of its frames"
    return accounts


def check_accounts(accounts: list[headrace.ProducerAccount]) -> None:
    for account in accounts:
        assert (account.sent, account.finished, account.unfinished) == (COUNT, COUNT, 0)
        assert not account.rejected
    assert sum(account.resent for account in accounts) > 0, "no kill met an unfinished frame"


def check_order(reader: Reader) -> None:
    """Each stream's frames came in their order, none twice."""
    for stream in reader.streams:
        seqs = [outcome.seq for outcome in reader.outcomes if outcome.stream == stream]
        assert seqs == sorted(set(seqs)), stream


@pytest.mark.timeout(180)
def test_with_a_journal_each_subscriber_gets_each_outcome_exactly_once(tmp_path: Path) -> None:
    """Must-show 8: three boots, four producers, three subscribers and one that starts after it all: the same
    3,000 outcomes everywhere, each once, in order, nothing missed."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(configuration(tmp_path / "journal.db"))
        processes.workers(broker, 2)
        with reading(broker.address, STREAMS, STREAMS, ("b",)) as readers:
            accounts = run_with_kills(broker, readers)
        with reading(broker.address, STREAMS) as late:
            pass

    check_accounts(accounts)
    names = {}
    for reader in (*readers, *late):
        assert reader.missed == [], reader.name
        check_order(reader)
        had = Counter((outcome.stream, outcome.seq) for outcome in reader.outcomes)
        assert had == {(stream, seq): 1 for stream in reader.streams for seq in range(COUNT)}, reader.name
        assert {outcome.status for outcome in reader.outcomes} == {"ok"}
        for outcome in reader.outcomes:
            # One frame, one outcome: all subscribers had the same one, of the same boot.
            name = names.setdefault((outcome.stream, outcome.seq), (outcome.boot, outcome.pub_seq))
            assert name == (outcome.boot, outcome.pub_seq)
    assert len({boot for boot, _ in names.values()}) == 3, "not every boot published: the test shows nothing"
    assert late[0].subscriber.account.duplicates == 0


@pytest.mark.timeout(180)
def test_without_a_journal_every_frame_ends_once_and_holes_are_told(tmp_path: Path) -> None:
    """Must-show 8: no frame twice at a subscriber; one that it did not get lies in a missed range of a boot
    that is gone."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(configuration(None))
        processes.workers(broker, 2)
        with reading(broker.address, STREAMS, STREAMS, ("b",)) as readers:
            accounts = run_with_kills(broker, readers)

    check_accounts(accounts)
    for reader in readers:
        check_order(reader)
        assert {item.reason for item in reader.missed} <= {MissedReason.NEW_BOOT}
        for stream in reader.streams:
            had = {outcome.seq for outcome in reader.outcomes if outcome.stream == stream}
            lost = set(range(COUNT)) - had
            holes = holes_of(reader.items, stream)
            assert all(any(first < seq < last for first, last in holes) for seq in lost), (stream, lost)


def holes_of(items: list[Item], stream: str) -> list[tuple[int, int]]:
    """Return the seqs before and after each missed range of a stream, as the subscriber saw them."""
    holes: list[tuple[int, int]] = []
    before, is_open = -1, False
    for item in items:
        if item.stream != stream:
            continue
        if isinstance(item, Missed):
            is_open = True
            continue
        if is_open:
            holes.append((before, item.seq))
        before, is_open = item.seq, False
    return holes


def test_two_brokers_on_one_journal_are_refused_with_the_reason(tmp_path: Path) -> None:
    """The second ends with the code of a wrong configuration and says which file; the first goes on."""
    with Processes(tmp_path) as processes:
        first = processes.broker(configuration(tmp_path / "journal.db"))
        second = processes.start("broker", "--config", tmp_path / "broker.toml", "--json")

        assert second.wait() == 78
        assert "is in use by another broker" in second.stderr
        assert first.status()["journal"]["path"] == str(tmp_path / "journal.db")
