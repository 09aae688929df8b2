"""Frames whose payload lies in shared memory: whose are taken, and how long an arena is needed."""

from __future__ import annotations

from dataclasses import replace

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.protocol.messages import Frame, Hello, ShmRef, Status

ARENA = "headrace-0123456789abcdef.arena"
ARENA_BYTES = 1024 * 1024


def slot(offset: int = 4160, arena: str = ARENA, generation: int = 1) -> ShmRef:
    return ShmRef(arena, offset, hr.frame().nbytes, generation)


def frame(seq: int = 0, payload: ShmRef | None = None, stream: str = "cam-1") -> Frame:
    return replace(hr.frame(stream, seq), payload=payload or slot(), epoch=1)


def arrive(driver: hr.CoreDriver, arena: str = ARENA, arena_bytes: int = ARENA_BYTES) -> list[act.Action]:
    return driver.send(events.ProducerArrived(b"p1", Hello(1, "p", "host", arena), arena_bytes))


def rejects(actions: list[act.Action]) -> list[str]:
    return [reject.code for reject in hr.rejects(actions)]


@pytest.fixture
def driver() -> hr.CoreDriver:
    driver = hr.CoreDriver()
    driver.join_worker(b"w1")
    return driver


@pytest.mark.parametrize(
    ("arena", "arena_bytes", "is_possible"),
    [(ARENA, ARENA_BYTES, True), (ARENA, 0, False), ("", 0, False)],
    ids=["opened", "not opened", "none named"],
)
def test_welcome_says_whether_the_named_arena_can_be_read(
    driver: hr.CoreDriver, arena: str, arena_bytes: int, is_possible: bool
) -> None:
    """The shell opens it, the core passes the answer on, and frames are judged by it."""
    welcome = arrive(driver, arena, arena_bytes)

    assert [a.is_shm_possible for a in welcome if isinstance(a, act.WelcomeProducer)] == [is_possible]
    assert rejects(driver.push(frame(), peer=b"p1")) == ([] if is_possible else ["lane_unavailable"])
    driver.core.check_invariants()


def test_a_frame_may_lie_only_in_its_own_producers_arena(driver: hr.CoreDriver) -> None:
    """Not in another's, not beyond its end, and nobody without a HELLO has one."""
    arrive(driver)

    foreign = driver.push(frame(0, slot(arena="headrace-ffffffffffffffff.arena")), peer=b"p1")
    outside = driver.push(frame(1, slot(offset=ARENA_BYTES - 1)), peer=b"p1")
    last = driver.push(frame(2, slot(offset=ARENA_BYTES - hr.frame().nbytes)), peer=b"p1")
    script = driver.push(replace(frame(0, stream="cam-2"), epoch=None), peer=b"script")

    assert [rejects(a) for a in (foreign, outside, last, script)] == [
        ["lane_unavailable"],
        ["out_of_range"],
        [],
        ["lane_unavailable"],
    ]
    driver.core.check_invariants()


def test_a_repeated_hello_may_bring_another_arena(driver: hr.CoreDriver) -> None:
    """A producer whose HELLO was answered late says it again."""
    other = "headrace-ffffffffffffffff.arena"
    arrive(driver)
    arrive(driver, other)

    assert rejects(driver.push(frame(0, slot(arena=other)), peer=b"p1")) == []
    assert list(driver.core.arenas_in_use([other])) == [other]
    driver.core.check_invariants()


def test_a_producer_that_was_taken_for_dead_has_its_arena_until_it_is(driver: hr.CoreDriver) -> None:
    """It may have sent frames before it noticed: they are judged like any of an unknown peer."""
    arrive(driver)
    driver.send(events.PeerUnreachable(b"p1"))

    assert rejects(driver.push(frame(0), peer=b"p1")) == []
    assert rejects(driver.push(replace(frame(0), stream="cam-2", epoch=2), peer=b"p1")) == [
        "lane_unavailable"
    ]
    driver.send(events.ArenaClosed(ARENA))
    assert rejects(driver.push(frame(1), peer=b"p1")) == ["lane_unavailable"]
    driver.core.check_invariants()


def test_an_arena_is_needed_while_its_producer_is_known_or_frames_are_unfinished(
    driver: hr.CoreDriver,
) -> None:
    """A killed producer's accepted frames finish: until then its arena is in use."""
    other = "headrace-ffffffffffffffff.arena"
    arrive(driver)
    assert list(driver.core.arenas_in_use([ARENA, other])) == [ARENA]
    driver.push(frame(0), peer=b"p1")
    driver.push(hr.frame("inline", 0), peer=b"p2")
    driver.send(events.ProducerLeft(b"p1"))

    assert list(driver.core.arenas_in_use([ARENA, other])) == [ARENA]

    ended = [end for sent in hr.batches(driver.tick()) for end in hr.outcomes(driver.done(sent))]
    assert [end.status for end in ended] == [Status.OK, Status.OK]
    assert list(driver.core.arenas_in_use([ARENA, other])) == []
    driver.core.check_invariants()


def test_a_suspects_bytes_are_taken_out_of_shared_memory() -> None:
    """Its outcome may be known, and its slot freed, before it is known to have killed its worker."""
    memory = {slot(): b"pixels"}
    driver = hr.CoreDriver()
    driver.core = BrokerCore(driver.settings, hr.BOOT, memory.get)
    driver.join_worker(b"w1")
    arrive(driver)
    driver.push(frame(0), frame(1, slot(offset=8_256)), peer=b"p1")
    driver.tick()
    driver.send(events.PeerUnreachable(b"w1"))
    driver.join_worker(b"w2")

    sent = hr.batches(driver.tick())
    again = [one.payload for batch in sent for one in batch.batch.frames]

    assert again == [b"pixels"]  # alone, as a suspect
    sent = hr.batches([*driver.done(sent[0]), *driver.tick()])
    # What could not be read stays where it is said to be: the worker will not find it either.
    assert [one.payload for batch in sent for one in batch.batch.frames] == [slot(offset=8_256)]
    driver.core.check_invariants()
