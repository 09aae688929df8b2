"""The content of a frame that took down workers is refused for a while."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hr_core as hr
import pytest
from hr_records import make_frame, make_record

from headrace.broker import actions as act
from headrace.broker import events, quarantine
from headrace.broker.quarantine import Quarantine
from headrace.protocol.messages import Frame, ShmRef

POISON = bytes(range(256)) * 4


def frame(stream: str, seq: int, payload: bytes) -> Frame:
    """A frame with bytes of its own."""
    return replace(hr.frame(stream, seq), payload=payload)


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """A core whose invariants hold at the end."""
    driver = hr.CoreDriver(hr.make_settings(quarantine_ms=60_000))
    yield driver
    driver.core.check_invariants()


def kill_two(driver: hr.CoreDriver) -> list[act.Action]:
    """Two workers come and each dies with what it is given first."""
    actions: list[act.Action] = []
    for peer in (b"d1", b"d2"):
        driver.join_worker(peer)
        driver.tick()
        actions += driver.send(events.PeerUnreachable(peer))
    return actions


class TestInTheCore:
    """From the loss of the second worker on."""

    def test_sent_again_it_costs_no_worker(self, driver: hr.CoreDriver) -> None:
        """Must-show 4: the poison frame comes again under another name; it is refused, with the time."""
        driver.push(frame("a", 0, POISON))
        ended = kill_two(driver)
        driver.join_worker(b"w1")
        driver.now_ns += 10_000 * hr.MS

        again = driver.push(frame("b", 0, POISON), frame("b", 1, POISON[:-1] + b"x"))

        assert hr.ends(ended) == [("a", 0, "error", "poison_frame")]
        assert hr.ends(again) == [("b", 0, "rejected", "poison_frame")]
        assert hr.rejects(again)[0].retry_after_ms == 50_000
        assert [hr.seqs(sent.batch) for sent in hr.batches(driver.tick())] == [[1]]
        assert driver.core.life.lost_count == 2
        assert driver.core.status(driver.now_ns)["quarantined"] == 1

    def test_it_is_let_in_again_after_its_time(self, driver: hr.CoreDriver) -> None:
        """The fault may have been mended."""
        driver.push(frame("a", 0, POISON))
        kill_two(driver)
        driver.now_ns += 60_000 * hr.MS

        again = driver.push(frame("b", 0, POISON))

        assert again == []
        assert len(driver.core.quarantine) == 0

    def test_waiting_copies_end_with_it(self, driver: hr.CoreDriver) -> None:
        """Copies that were admitted before it was found guilty reach no worker: suspects and others."""
        driver.push(frame("a", 0, POISON), frame("b", 0, POISON), frame("c", 0, b"good"))
        driver.join_worker(b"d1")
        driver.tick()
        driver.push(frame("d", 0, POISON), frame("e", 0, b"fine"))
        driver.send(events.PeerUnreachable(b"d1"))
        driver.join_worker(b"d2")
        driver.tick()

        ended = driver.send(events.PeerUnreachable(b"d2"))
        driver.join_worker(b"w1")
        alone = hr.batches(driver.tick())
        driver.done(alone[0])
        rest = hr.batches(driver.tick())

        guilty = [(name, 0, "error", "poison_frame") for name in "abd"]
        assert hr.ends(ended) == guilty
        assert "seq 0 of stream a" in hr.outcomes(ended)[1].message
        assert [sent.batch.frames[0].stream for sent in alone + rest] == ["c", "e"]

    def test_copy_that_a_worker_hands_back_ends_with_it(self, driver: hr.CoreDriver) -> None:
        """It was in flight when the other one was found guilty."""
        driver.join_worker(b"w1", slots=1)
        driver.push(frame("b", 0, POISON))
        held = hr.batches(driver.tick())[0]
        driver.push(frame("a", 0, POISON))
        kill_two(driver)

        actions = driver.fail(held, "shutdown")

        assert hr.ends(actions) == [("b", 0, "error", "poison_frame")]

    def test_zero_switches_it_off(self) -> None:
        """quarantine_ms = 0: who sends it again loses workers again."""
        driver = hr.CoreDriver(hr.make_settings(quarantine_ms=0))
        driver.push(frame("a", 0, POISON))
        kill_two(driver)

        assert driver.push(frame("b", 0, POISON)) == []
        driver.core.check_invariants()


class TestTable:
    """The table alone."""

    def test_it_is_bounded(self) -> None:
        """Beyond max_frames the oldest content goes; a repeated one becomes the newest."""
        table = Quarantine(1_000, 2)
        first, second, third = (make_record_of(bytes([n]) * 100) for n in range(3))
        for at, record in enumerate((first, second, first, third)):
            table.put(record, at)

        left = [table.find("m", "1", record.frame, 10) for record in (first, second, third)]

        assert left == [1_000_000_000 + 2 - 10, None, 1_000_000_000 + 3 - 10]
        assert len(table) == 2

    def test_it_holds_for_the_model_that_was_taken_down(self) -> None:
        """Another model may take the same bytes."""
        table = Quarantine(1_000, 2)
        record = make_record_of(POISON)
        table.put(record, 0)

        assert table.find("m", "1", record.frame, 1) is not None
        assert table.find("m", "2", record.frame, 1) is None

    @pytest.mark.parametrize(
        ("payload", "is_hashed"),
        [
            pytest.param(POISON + b"x", False, id="another length"),
            pytest.param(b"x" + POISON[1:], False, id="another beginning"),
            pytest.param(POISON[:600] + b"x" + POISON[601:], True, id="same samples"),
            pytest.param(POISON, True, id="same bytes"),
        ],
    )
    def test_only_likely_frames_are_hashed(
        self, payload: bytes, is_hashed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Raw frames of a camera all have one length: a sample of bytes comes before the hash."""
        table = Quarantine(1_000, 2)
        table.put(make_record_of(POISON), 0)
        hashed: list[int] = []
        blake2b = hashlib.blake2b

        def count(view: memoryview, *, digest_size: int) -> Any:
            hashed.append(len(view))
            return blake2b(view, digest_size=digest_size)

        monkeypatch.setattr(hashlib, "blake2b", count)
        found = table.find("m", "1", make_frame(payload=payload), 1)

        assert bool(hashed) == is_hashed
        assert (found is not None) == (payload == POISON)

    def test_two_contents_with_one_sample_go_one_by_one(self) -> None:
        """The sample stays as long as one of its contents does."""
        table = Quarantine(1, 2)
        first = make_record_of(POISON)
        second = make_record_of(POISON[:600] + b"x" + POISON[601:])
        table.put(first, 0)
        table.put(second, 1)

        assert table.find("m", "1", first.frame, hr.MS) is None
        assert table.find("m", "1", second.frame, hr.MS) == 1
        assert table.find("m", "1", second.frame, hr.MS + 1) is None

    @pytest.mark.parametrize("payload", [ShmRef("a", 0, 1, 1), b""], ids=["shared memory", "empty"])
    def test_bytes_that_are_not_here_are_never_the_same(self, payload: ShmRef | bytes) -> None:
        """Nothing can be said of them."""
        table = Quarantine(1_000, 1)
        record = make_record_of(payload)
        table.put(record, 0)

        assert len(table) == 0
        table.put(make_record_of(POISON), 0)
        assert table.find("m", "1", record.frame, 1) is None
        assert not table.has_same_content(payload, payload)
        assert not table.has_same_content(POISON, payload)

    def test_a_payload_in_shared_memory_is_read_where_it_lies(self) -> None:
        """The core is given a way to read it; what is gone by then is like nothing."""
        slot = ShmRef("a", 4160, len(POISON), 7)
        held: dict[ShmRef, bytes] = {slot: POISON}
        table = Quarantine(1_000, 1, held.get)
        table.put(make_record_of(slot), 0)

        assert table.find("m", "1", make_frame(payload=POISON), 1) is not None
        assert table.find("m", "1", make_frame(payload=slot), 1) is not None
        assert table.has_same_content(slot, POISON)
        assert table.with_payload(make_frame(payload=slot)) == make_frame(payload=POISON)
        assert table.with_payload(make_frame(payload=POISON)) == make_frame(payload=POISON)
        held.clear()
        assert table.with_payload(make_frame(payload=slot)).payload == slot
        assert table.find("m", "1", make_frame(payload=slot), 1) is None
        assert not table.has_same_content(slot, POISON)


def make_record_of(payload: ShmRef | bytes) -> quarantine.FrameRecord:
    """A record with this payload."""
    record = make_record()
    record.frame = make_frame(payload=payload)
    return record
