"""A core that was told what earlier boots finished: which frames it knows, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hr_core import EPOCH, CoreDriver, batches, ends, frame, grants, make_settings, only, rejects, seqs

from headrace.broker import actions as act
from headrace.broker.records import Refusal
from headrace.broker.restored import FinishedSeqs, RestoredEpoch, RestoredStream

REFUSAL = Refusal("queue_full", "full", 40)


def restored(
    *runs: tuple[int, int],
    name: str = "cam-1",
    epoch: int = EPOCH,
    rejects: tuple[tuple[int, Refusal], ...] = (),
) -> RestoredStream:
    return RestoredStream(name, (RestoredEpoch(epoch, FinishedSeqs(100, runs), rejects),))


@pytest.fixture
def driver() -> Iterator[CoreDriver]:
    made = CoreDriver()
    yield made
    made.core.check_invariants()


def test_a_frame_that_an_earlier_boot_finished_is_not_run_again(driver: CoreDriver) -> None:
    """Its producer is told that it is finished, and nothing is published."""
    driver.core.restore([restored((0, 4))], driver.now_ns)
    driver.join_producer()
    driver.join_worker()

    done = driver.push(frame(seq=3)) + driver.push(frame(seq=4)) + driver.tick()

    assert batches(done) == []
    assert ends(done) == []
    ((_, credit),) = grants(done)
    assert (credit.finished, credit.streams, credit.by_status) == (2, {"cam-1": 4}, {})
    assert driver.core.account.duplicates == 2


def test_a_frame_between_finished_ones_is_run(driver: CoreDriver) -> None:
    """It was unfinished when the broker died, while a later one was refused: seqs of earlier boots are no
    reason to call it backwards."""
    driver.core.restore([restored((0, 3), (5, 5), rejects=((5, REFUSAL),))], driver.now_ns)
    driver.join_producer()
    driver.join_worker()

    done = driver.push(frame(seq=4)) + driver.push(frame(seq=5)) + driver.push(frame(seq=6)) + driver.tick()

    (sent,) = batches(done)
    assert seqs(sent.batch) == [4, 6]
    (reject,) = rejects(done)
    assert (reject.seq, reject.code, reject.message, reject.retry_after_ms) == (5, "queue_full", "full", 40)
    ((_, credit),) = grants(done)
    assert (credit.finished, credit.streams) == (1, {})
    assert [(end[1], end[2]) for end in ends(driver.done(sent))] == [(4, "ok"), (6, "ok")]


def test_a_refused_frame_whose_reason_is_forgotten_never_finishes_one_before_it(driver: CoreDriver) -> None:
    """The watermark told in Credit must not pass a frame that is still queued."""
    driver.core.restore([restored((0, 3), (5, 5))], driver.now_ns)
    driver.join_producer()

    done = driver.push(frame(seq=4)) + driver.push(frame(seq=5)) + driver.tick()

    ((_, credit),) = grants(done)
    assert (credit.finished, credit.streams) == (1, {})


@pytest.mark.parametrize(
    ("stream", "epoch"), [("cam-1", EPOCH + 1), ("cam-2", EPOCH)], ids=["another epoch", "another stream"]
)
def test_only_the_whole_name_counts(driver: CoreDriver, stream: str, epoch: int) -> None:
    """(stream, epoch, seq) names a frame: the same seq of another producer is another frame."""
    driver.core.restore([restored((0, 9))], driver.now_ns)
    driver.join_producer(epoch=epoch)
    driver.join_worker()

    (sent,) = batches(driver.push(frame(stream, seq=3, epoch=epoch)) + driver.tick())

    assert seqs(sent.batch) == [3]


def test_a_frame_without_seq_gets_one_above_all_that_are_finished(driver: CoreDriver) -> None:
    """Else it would take the name of another frame."""
    driver.core.restore([restored((0, 9))], driver.now_ns)
    driver.join_producer()
    driver.join_worker()

    (sent,) = batches(driver.push(frame(seq=None)) + driver.tick())

    assert seqs(sent.batch) == [10]


def test_a_plain_sender_is_told_nothing_of_a_finished_frame(driver: CoreDriver) -> None:
    """Who said no Hello has no credit; the frame is counted and not run."""
    driver.core.restore([restored((0, 9))], driver.now_ns)

    done = driver.push(frame(seq=9), peer=b"x") + driver.tick()

    assert only(done, act.PublishOutcome) == []
    assert grants(done) == []
    assert driver.core.account.duplicates == 1


def test_restored_streams_are_bounded() -> None:
    """Beyond max_streams those come in that were written to last; epochs likewise."""
    driver = CoreDriver(make_settings(max_streams=2))
    many = RestoredStream("z", tuple(RestoredEpoch(n, FinishedSeqs(9, [(0, 0)])) for n in range(12)))
    driver.core.restore([restored(name="a"), restored(name="b"), many], driver.now_ns)

    assert list(driver.core.streams.by_name) == ["b", "z"]
    assert list(driver.core.streams.by_name["z"].epochs) == list(range(4, 12))
    driver.core.check_invariants()


def test_a_full_table_restores_no_more() -> None:
    """A stream for which there is no place is left out; the ones that are there keep theirs."""
    driver = CoreDriver(make_settings(max_streams=1))
    driver.core.restore([restored(name="a")], driver.now_ns)

    driver.core.streams.restore(restored(name="b"), 8, driver.now_ns)

    assert list(driver.core.streams.by_name) == ["a"]


def test_positions_begin_anew(driver: CoreDriver) -> None:
    """A restored stream has published nothing in this boot."""
    driver.core.restore([restored((0, 9))], driver.now_ns)

    assert driver.core.positions([""])["streams"] == {"cam-1": [0, 0]}
