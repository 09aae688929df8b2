"""Batches that take much too long: the second copy, its budget, its ends, and workers that are told off.

In every table worker w1 has a batch of four frames (a batch takes 10 ms, so it is overdue 50 ms after its
predicted end), and w2 is free. ``driver.tick()`` at the due time probes w1; a moment later w2 gets the copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.hedging import Hedges
from headrace.broker.inflight import InFlightBatch, Ledger
from headrace.errors import Code
from headrace.protocol.messages import Failed

#: From dispatch to overdue: 10 ms predicted, and the larger of 3 x 10 ms and 50 ms.
DUE_MS = 60

#: Nothing else happens by itself within a test.
QUIET = {"heartbeat_ms": 60_000, "stream_stale_ms": 86_400_000}


def make(workers: int = 2, slots: int = 1, **changes: object) -> tuple[hr.CoreDriver, act.SendBatch]:
    """A core whose worker w1 holds the first batch, four frames of streams s0 to s3."""
    driver = hr.CoreDriver(hr.make_settings(**QUIET, **changes))
    driver.join_worker(b"w1", slots=slots, per_batch_ms=10)
    driver.push(*[hr.frame(f"s{n}", 0, ttl_ms=None) for n in range(4)])
    sent = hr.batches(driver.tick())
    for number in range(2, workers + 1):
        driver.join_worker(f"w{number}".encode(), slots=slots, per_batch_ms=10)
    assert [(one.peer, len(one.batch.frames)) for one in sent] == [(b"w1", 4)]
    return driver, sent[0]


def make_hedged(**changes: object) -> tuple[hr.CoreDriver, act.SendBatch, act.SendBatch]:
    """The same with the second copy at w2, both unanswered."""
    driver, sent = make(**changes)
    hedges = hr.batches(driver.wait(DUE_MS + 2))
    assert [one.peer for one in hedges] == [b"w2"]
    driver.actions.clear()
    return driver, sent, hedges[0]


@pytest.fixture
def hedged() -> Iterator[tuple[hr.CoreDriver, act.SendBatch, act.SendBatch]]:
    """See make_hedged."""
    found = make_hedged()
    yield found
    found[0].core.check_invariants()


def reports(actions: list[act.Action]) -> list[str]:
    """Names of the reports, in order."""
    return [one.name for one in hr.only(actions, act.Report)]


def slots_taken(driver: hr.CoreDriver) -> dict[str, int]:
    """Batches per worker."""
    return {worker.id: len(worker.in_flight) for worker in driver.core.workers.by_peer.values()}


ALL_OK = [(f"s{n}", 0, "ok", "") for n in range(4)]


class TestSending:
    """When a second copy is sent, and where to."""

    def test_overdue_batch_is_sent_a_second_time(self) -> None:
        """The exact actions: a probe at the due time, then the copy and its report."""
        driver, sent = make()

        early = driver.wait(DUE_MS - 1)
        probe = driver.wait(1)
        hedge = driver.wait(1)

        assert early == []
        assert probe == [act.SendHeartbeat(b"w1", is_worker=True)]
        assert isinstance(hedge[0], act.SendBatch)
        assert hedge[0].peer == b"w2"
        assert hedge[0].batch.frames == sent.batch.frames
        assert hedge[0].batch.batch != sent.batch.batch
        values = {
            "batch": sent.batch.batch,
            "hedge": hedge[0].batch.batch,
            "frames": 4,
            "worker": "w1",
            "hedge_worker": "w2",
            "running_ms": DUE_MS + 1,
        }
        assert hedge[1:] == [act.Report("batch hedged", values)]
        assert driver.wait(20_000) == []
        driver.core.check_invariants()

    @pytest.mark.parametrize(
        ("changes", "due_ms"),
        [
            pytest.param({"overdue_min_ms": 100}, 110, id="floor"),
            pytest.param({"overdue_factor": 20.0}, 210, id="factor"),
        ],
    )
    def test_when_it_is_overdue_can_be_set(self, changes: dict[str, object], due_ms: int) -> None:
        """The larger of factor times the prediction and the floor, after the predicted end."""
        driver, _ = make(**changes)

        assert hr.batches(driver.wait(due_ms)) == []
        assert len(hr.batches(driver.wait(2))) == 1

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"hedge_share": 0.0}, id="switched off"),
            pytest.param({"workers": 1}, id="no other worker"),
        ],
    )
    def test_no_copy_is_sent(self, changes: dict[str, object]) -> None:
        """It then waits for its own worker, or for its loss."""
        driver, sent = make(**changes)  # type: ignore[arg-type]

        assert hr.batches(driver.wait(1_000)) == []
        assert hr.ends(driver.done(sent)) == ALL_OK
        driver.core.check_invariants()

    def test_suspects_are_never_hedged(self) -> None:
        """A frame that may have killed a worker is not given to two."""
        driver, _ = make()
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w3")
        alone = hr.batches(driver.tick())

        later = hr.batches(driver.wait(1_000))

        assert [len(one.batch.frames) for one in alone] == [1, 1]
        assert later == []
        driver.core.check_invariants()

    def test_copy_needs_a_worker_that_holds_it_whole(self) -> None:
        """A worker with a smaller limit is passed over; the copy goes out when another one comes."""
        driver, _ = make(workers=1)
        driver.join_worker(b"w2", limit=2)
        small = hr.batches(driver.wait(DUE_MS + 10))
        driver.join_worker(b"w3", per_batch_ms=9)

        assert small == []
        assert [one.peer for one in hr.batches(driver.wait(2))] == [b"w3"]
        driver.core.check_invariants()

    def test_copy_takes_a_free_slot_of_a_busy_worker(self) -> None:
        """Nobody is idle: it goes where a slot is free, never to the one that hangs, though it has one."""
        driver, _ = make(slots=2)
        driver.wait(DUE_MS - 5)
        driver.push(*[hr.frame(f"t{n}", 0) for n in range(4)])
        busy = hr.batches(driver.tick())

        hedge = hr.batches(driver.wait(7))

        assert [one.peer for one in busy + hedge] == [b"w2", b"w2"]
        assert slots_taken(driver) == {"w1": 1, "w2": 2}
        driver.core.check_invariants()

    def test_worker_gets_nothing_more_while_it_is_overdue(self) -> None:
        """PRC-01 for a hang: work goes to the others; when it has answered it is trusted again."""
        driver, sent, hedge = make_hedged(slots=2)
        driver.done(hedge)
        driver.push(*[hr.frame(f"t{n}", 0) for n in range(16)])
        peers = [one.peer for one in hr.batches(driver.tick())]
        status = driver.core.status(driver.now_ns)["workers"]
        driver.done(sent)

        assert peers == [b"w2", b"w2"]
        assert [worker["is_overdue"] for worker in status] == [True, False]  # type: ignore[index, union-attr]
        assert [one.peer for one in hr.batches(driver.tick())] == [b"w1", b"w1"]
        driver.core.check_invariants()


class TestEnds:
    """Which copy counts, and what becomes of the other. Each row: exact actions and slots."""

    @pytest.mark.parametrize("winner", [0, 1], ids=["original", "hedge"])
    def test_first_completion_wins(
        self, hedged: tuple[hr.CoreDriver, act.SendBatch, act.SendBatch], winner: int
    ) -> None:
        """One outcome each; CANCEL to the loser, whose slot stays taken until it has answered; its answer is
        suppressed and teaches nothing."""
        driver, *copies = hedged
        won, lost = copies[winner], copies[1 - winner]

        first = driver.done(won, ran_ms=5)
        taken = slots_taken(driver)
        late = driver.done(lost, ran_ms=400)
        repeated = driver.done(lost)

        assert first[0] == act.CancelBatch(lost.peer, lost.batch.batch)
        assert hr.ends(first) == ALL_OK
        assert [one.worker for one in hr.outcomes(first)] == [won.peer.decode()] * 4
        assert [one.attempt for one in hr.outcomes(first)] == [2] * 4
        assert taken == {won.peer.decode(): 0, lost.peer.decode(): 1}
        assert late == repeated == []
        assert slots_taken(driver) == {"w1": 0, "w2": 0}
        hedges, costs = driver.core.hedges, driver.core.costs
        assert (hedges.won_count, hedges.suppressed_count) == (winner, 1)
        assert driver.core.late_done_count == 1
        assert costs.predict_ns(lost.peer.decode(), "mean", "1", "small", 4) == 10 * hr.MS
        assert costs.predict_ns(won.peer.decode(), "mean", "1", "small", 4) < 10 * hr.MS

    @pytest.mark.parametrize(("winner", "batched_us"), [(0, 0), (1, 61_000)], ids=["original", "hedge"])
    def test_timeline_is_that_of_the_winner(
        self, hedged: tuple[hr.CoreDriver, act.SendBatch, act.SendBatch], winner: int, batched_us: int
    ) -> None:
        """A frame's stages are those of the run that gave its result."""
        driver, *copies = hedged

        timing = hr.outcomes(driver.done(copies[winner]))[0].timing

        assert timing is not None
        assert timing.batched_us == batched_us

    @pytest.mark.parametrize("failing", [0, 1], ids=["original", "hedge"])
    @pytest.mark.parametrize("fault", ["failed", "handed back", "wrong count"])
    def test_copy_that_fails_leaves_the_frames_to_the_other(self, failing: int, fault: str) -> None:
        """The other copy is on time: it decides, and nothing is put back. Original on time: it was heard of
        again. The hedge fails while the original is overdue: the frames are recovered, the original is
        cancelled."""
        driver, *copies = make_hedged()
        bad, other = copies[failing], copies[1 - failing]

        if fault == "wrong count":
            actions = driver.done(bad, results=[hr.ok()])
        else:
            actions = driver.fail(bad, Code.SHUTDOWN if fault == "handed back" else Code.BATCH_FAILED)

        is_recovered = failing == 1
        cancels = [act.CancelBatch(other.peer, other.batch.batch)] if is_recovered else []
        assert hr.only(actions, act.CancelBatch) == cancels
        if is_recovered and fault == "wrong count":
            assert hr.ends(actions) == [(f"s{n}", 0, "error", "result_count") for n in range(4)]
        elif is_recovered:
            assert hr.ends(actions) == []
            assert len(hr.batches(driver.tick())[0].batch.frames) == (2 if fault == "failed" else 4)
        else:
            assert hr.ends(actions) == []
            assert hr.batches(driver.tick()) == []
            assert hr.ends(driver.done(other)) == ALL_OK
        driver.core.check_invariants()

    @pytest.mark.parametrize("lost", [b"w1", b"w2"], ids=["original", "hedge"])
    def test_frames_of_a_lost_copy_are_no_suspects_while_the_other_is_on_time(self, lost: bytes) -> None:
        """The original's worker dies: the hedge goes on. The hedge's worker dies while the original hangs:
        nobody is on time, so its frames are suspects and the original is cancelled."""
        driver, sent, hedge = make_hedged()

        actions = driver.send(events.PeerUnreachable(lost))
        after = hr.batches(driver.tick())

        if lost == b"w1":
            assert hr.only(actions, act.CancelBatch) == []
            assert after == []
            assert hr.ends(driver.done(hedge)) == ALL_OK
            assert driver.core.recovery.requeued_count == 0
        else:
            assert hr.only(actions, act.CancelBatch) == [act.CancelBatch(b"w1", sent.batch.batch)]
            driver.join_worker(b"w3")
            assert [len(one.batch.frames) for one in hr.batches(driver.tick())] == [1]
            assert hr.ends(driver.done(sent)) == []
        driver.core.check_invariants()

    def test_guilty_frame_is_named_although_it_was_hedged(self) -> None:
        """A frame that hangs its worker hangs the hedge's too, is found alone, and costs nobody else."""
        driver, *_ = make_hedged(stuck_ms=1_000)
        driver.join_worker(b"w3")
        driver.join_worker(b"w4")

        for _ in range(300):
            for one in hr.batches(driver.wait(10)):
                if len(one.batch.frames) == 1 and one.batch.frames[0].stream != "s1":
                    driver.done(one)

        assert sorted(hr.ends(driver.actions)) == [
            ("s0", 0, "ok", ""),
            ("s1", 0, "error", "poison_frame"),
            ("s2", 0, "ok", ""),
            ("s3", 0, "ok", ""),
        ]
        assert driver.core.life.lost_count == 3
        driver.core.check_invariants()

    def test_end_of_the_drain_ends_a_hedged_frame_once(
        self, hedged: tuple[hr.CoreDriver, act.SendBatch, act.SendBatch]
    ) -> None:
        """Both copies are cancelled, each frame ends once."""
        driver, sent, hedge = hedged

        actions = driver.send(events.GraceEnded())

        cancelled = [(one.peer, one.batch) for one in hr.only(actions, act.CancelBatch)]
        assert cancelled == [(b"w1", sent.batch.batch), (b"w2", hedge.batch.batch)]
        assert [code for *_, code in hr.ends(actions)] == ["shutdown"] * 4
        assert slots_taken(driver) == {"w1": 0, "w2": 0}

    def test_end_of_the_drain_cancels_a_loser_once(
        self, hedged: tuple[hr.CoreDriver, act.SendBatch, act.SendBatch]
    ) -> None:
        """The loser was told before."""
        driver, _, hedge = hedged
        driver.done(hedge)

        assert hr.only(driver.send(events.GraceEnded()), act.CancelBatch) == []
        assert slots_taken(driver) == {"w1": 0, "w2": 0}

    def test_loser_answers_after_its_worker_said_goodbye(
        self, hedged: tuple[hr.CoreDriver, act.SendBatch, act.SendBatch]
    ) -> None:
        """The slot is free then, and the worker is forgotten."""
        driver, sent, hedge = hedged
        driver.done(hedge)
        driver.send(events.WorkerLeft(b"w1"))
        held = len(driver.core.workers)

        driver.send(events.BatchFailed(b"w1", Failed(sent.batch.batch, Code.CANCELLED, "")))

        assert (held, len(driver.core.workers)) == (2, 1)


class TestDeadlines:
    """Frames whose time is over while a batch hangs."""

    def test_frames_of_an_overdue_batch_expire_in_time(self) -> None:
        """BAT-05 for a hang: the outcome comes at the deadline; the copy holds only the others; a late
        result of the expired frame is suppressed."""
        driver = hr.CoreDriver(hr.make_settings(**QUIET, hedge_burst_frames=2, hedge_share=0.5))
        driver.join_worker(b"w1", slots=1)
        ttls = (None, 100, None, None)
        driver.push(*[hr.frame(f"s{n}", 0, ttl_ms=ttl) for n, ttl in enumerate(ttls)])
        sent = hr.batches(driver.tick())[0]

        before = hr.ends(driver.wait(99))
        at = hr.ends(driver.wait(1))
        driver.join_worker(b"w2")
        hedge = hr.batches(driver.wait(2))[0]
        late = hr.ends(driver.done(sent))

        assert (before, at) == ([], [("s1", 0, "expired", "deadline")])
        assert [one.stream for one in hedge.batch.frames] == ["s0", "s2", "s3"]
        assert late == [("s0", 0, "ok", ""), ("s2", 0, "ok", ""), ("s3", 0, "ok", "")]
        driver.core.check_invariants()

    def test_batch_of_expired_frames_is_not_hedged_and_its_failure_recovers_nothing(self) -> None:
        """Nobody waits for any of them any more."""
        driver = hr.CoreDriver(hr.make_settings(**QUIET))
        driver.join_worker(b"w1", slots=1)
        driver.push(hr.frame("a", 0, ttl_ms=60), hr.frame("b", 0, ttl_ms=60))
        sent = hr.batches(driver.tick())[0]
        driver.wait(60)
        driver.join_worker(b"w2")
        later = hr.batches(driver.wait(100))

        actions = driver.fail(sent)

        assert driver.core.account.expired == 2
        assert later == []
        assert reports(actions) == ["batch failed"]
        assert hr.batches(driver.tick()) == []
        driver.core.check_invariants()

    def test_drain_ends_what_is_left_of_an_overdue_batch(self) -> None:
        """The stream of a frame that expired may be forgotten by then."""
        driver = hr.CoreDriver(hr.make_settings(**QUIET, stream_idle_ms=1_000))
        driver.join_worker(b"w1", slots=1)
        driver.push(hr.frame("a", 0, ttl_ms=60), hr.frame("b", 0))
        driver.tick()
        driver.wait(5_000)

        assert hr.ends(driver.send(events.GraceEnded())) == [("b", 0, "error", "shutdown")]
        assert "a" not in driver.core.streams.by_name


class TestStuck:
    """A worker that hangs for ever and still sends heartbeats."""

    def test_stuck_worker_is_told_off(self) -> None:
        """After stuck_ms it is lost, told why, and its frames go on; what it says later is refused."""
        driver, _ = make(workers=1, stuck_ms=1_000)
        driver.wait(DUE_MS + 999)
        before = driver.core.status(driver.now_ns)["workers"]

        actions = driver.wait(1)
        after = driver.send(events.PeerHeard(b"w1", is_heartbeat=True, is_worker=True))
        driver.join_worker(b"w2")

        assert len(before) == 1  # type: ignore[arg-type]
        assert reports(actions) == ["worker lost"]
        refused = hr.only(actions, act.RefusePeer)[0]
        assert (refused.peer, refused.code, refused.is_worker) == (b"w1", Code.WORKER_STUCK, True)
        assert "expected to take 10 ms and has taken 1060 ms" in refused.message
        assert driver.core.status(driver.now_ns)["workers_lost"] == 1
        assert hr.only(after, act.RefusePeer)[0].code == Code.UNKNOWN_PEER
        assert [len(one.batch.frames) for one in hr.batches(driver.tick())] == [1]
        driver.core.check_invariants()

    def test_cancelled_copy_counts_too(
        self, hedged: tuple[hr.CoreDriver, act.SendBatch, act.SendBatch]
    ) -> None:
        """Its frames have results, and still its worker does not answer: it is lost, and blames nobody."""
        driver, _, hedge = hedged
        driver.done(hedge)

        actions = driver.wait(40_000)

        assert reports(actions)[0] == "worker lost"
        assert hr.only(actions, act.RefusePeer)[0].peer == b"w1"
        assert hr.outcomes(actions) == []
        assert driver.core.recovery.requeued_count == 0

    def test_two_stuck_batches_are_one_loss(self) -> None:
        """A second batch behind the first one is as late as that."""
        driver = hr.CoreDriver(hr.make_settings(**QUIET, stuck_ms=1_000))
        driver.join_worker(b"w1", slots=2)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(8)])
        driver.tick()
        driver.now_ns += 10_000 * hr.MS

        actions = driver.tick()

        assert reports(actions) == ["worker lost"]
        assert driver.core.ledger.batches == {}
        driver.core.check_invariants()

    def test_batch_behind_one_that_was_answered_begins_its_time_anew(self) -> None:
        """Its predicted end counts from the moment its device is free."""
        driver = hr.CoreDriver(hr.make_settings(**QUIET))
        driver.join_worker(b"w1", slots=2)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(8)])
        first = hr.batches(driver.tick())[0]
        driver.now_ns += 50 * hr.MS
        driver.done(first)
        driver.join_worker(b"w2")

        before = hr.batches(driver.wait(DUE_MS))
        after = hr.batches(driver.wait(2))

        assert (len(before), len(after)) == (0, 1)

    def test_answer_to_a_later_batch_gives_an_earlier_one_no_more_time(self) -> None:
        """A batch that was cancelled before it began is answered while the one before it hangs."""
        driver = hr.CoreDriver(hr.make_settings(**QUIET))
        driver.join_worker(b"w1", slots=2)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(8)])
        _, second = hr.batches(driver.tick())
        worker = driver.core.workers.by_peer[b"w1"]
        due_ns = worker.overdue_ns
        driver.now_ns += 30 * hr.MS

        driver.fail(second, Code.SHUTDOWN)

        assert worker.overdue_ns == due_ns
        driver.core.check_invariants()


class TestBudget:
    """Extra load is capped in frames."""

    def make_hedges(self, **changes: object) -> Hedges:
        """The budget alone."""
        return Hedges(hr.make_settings(**changes), Ledger())

    def test_fresh_broker_has_a_burst_and_earns_its_share(self) -> None:
        """0.5 a frame, at most 8 saved; a batch above the burst needs a full bucket and leaves a debt."""
        hedges = self.make_hedges(hedge_share=0.5, hedge_burst_frames=8)
        seen = [(hedges.can_afford(8), hedges.can_afford(20))]
        hedges.budget_frames -= 20

        for earned in (8, 8, 24, 100):
            hedges.earn(earned)
            seen.append((hedges.budget_frames, hedges.can_afford(4)))  # type: ignore[arg-type]

        assert seen == [(True, True), (-8.0, False), (-4.0, False), (8.0, True), (8.0, True)]

    def test_second_hang_waits_for_the_budget(self) -> None:
        """The bucket holds one batch: the next one that hangs is hedged when enough frames were sent."""
        driver, _, hedge = make_hedged(workers=3, hedge_burst_frames=4, hedge_share=0.5)
        driver.push(*[hr.frame(f"t{n}", 0) for n in range(4)])
        hanging = hr.batches(driver.tick())
        driver.done(hedge)
        poor = [one for one in hr.batches(driver.wait(200)) if one.batch.frames == hanging[0].batch.frames]

        driver.push(*[hr.frame(f"u{n}", 0) for n in range(4)])
        driver.done(hr.batches(driver.tick())[0])
        rich = hr.batches(driver.wait(2))

        assert len(hanging) == 1
        assert poor == []
        assert [one.batch.frames for one in rich] == [hanging[0].batch.frames]
        assert driver.core.hedges.frames_count == 8
        status = driver.core.status(driver.now_ns)["hedges"]
        assert status == {"batches": 2, "frames": 8, "won": 1, "suppressed": 0, "budget_frames": 0.0}
        driver.core.check_invariants()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        pytest.param(lambda one, two: setattr(one, "twin", None), "has a twin", id="one-sided"),
        pytest.param(lambda one, two: setattr(two, "worker", one.worker), "w", id="same worker"),
        pytest.param(lambda one, two: one.records.pop(), "holds frames", id="other frames"),
    ],
)
def test_invariants_of_twins(break_it: object, words: str) -> None:
    """Each kind of disagreement between two copies is seen."""
    driver, sent, hedge = make_hedged()
    batches = driver.core.ledger.batches
    one, two = batches[sent.batch.batch], batches[hedge.batch.batch]
    assert isinstance(one, InFlightBatch)

    break_it(one, two)  # type: ignore[operator]

    with pytest.raises(AssertionError, match=words):
        driver.core.ledger.check_invariants()
