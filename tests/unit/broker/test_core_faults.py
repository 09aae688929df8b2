"""Faults: workers that die, come back, share an id, fail batches or answer nonsense; frames that kill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import events
from headrace.errors import Code
from headrace.protocol.messages import (
    BadFrame,
    ClassProfile,
    Done,
    Failed,
    FrameResult,
    Heartbeat,
    Ready,
    SizeClassSpec,
    Status,
)


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """A core whose invariants hold at the end."""
    driver = hr.CoreDriver()
    yield driver
    driver.core.check_invariants()


def reports(actions: list[act.Action]) -> list[str]:
    """Names of the reports, in order."""
    return [one.name for one in hr.only(actions, act.Report)]


def refusals(actions: list[act.Action]) -> list[tuple[bytes, str, bool]]:
    """Refused peers: who, why, on the workers socket."""
    return [(one.peer, str(one.code), one.is_worker) for one in hr.only(actions, act.RefusePeer)]


def keep_alive(driver: hr.CoreDriver, ms: int, *peers: bytes) -> list[act.Action]:
    """Let time pass in steps, the given peers being heard from at each."""
    actions: list[act.Action] = []
    for _ in range(ms // 500):
        driver.hear(*peers)
        actions += driver.wait(500)
    return actions


class TestWorkerLost:
    """A worker that is gone with batches."""

    def test_killed_worker_costs_nobody_a_result(self, driver: hr.CoreDriver) -> None:
        """PRC-01: one of three workers dies with a batch; its frames run once more elsewhere, each once."""
        for peer in (b"w1", b"w2", b"w3"):
            driver.join_worker(peer)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(108)])
        held = hr.batches(driver.tick())
        dead = [sent for sent in held if sent.peer == b"w1"]
        todo = [sent for sent in held if sent.peer != b"w1"]

        lost = driver.send(events.PeerUnreachable(b"w1"))
        while todo:
            driver.now_ns += 10 * hr.MS
            driver.done(todo.pop(0))
            todo += hr.batches(driver.tick())

        finished = hr.outcomes(driver.actions)
        rerun = {one.stream for one in finished if one.attempt == 2}
        assert reports(lost) == ["worker lost"]
        assert len(finished) == 108
        assert {one.status for one in finished} == {Status.OK}
        assert rerun == {one.stream for sent in dead for one in sent.batch.frames}
        assert driver.core.account.ok == 108

    def test_frame_that_kills_its_workers_is_named(self, driver: hr.CoreDriver) -> None:
        """PRC-02: its neighbours get results, it gets poison_frame, and two workers are lost, no more."""
        for number in range(4):
            driver.join_worker(f"w{number}".encode(), slots=1)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(20)])
        todo = hr.batches(driver.tick())
        killed = 0

        while todo:
            sent = todo.pop(0)
            driver.now_ns += 10 * hr.MS
            if any(one.stream == "s7" for one in sent.batch.frames):
                killed += 1
                driver.send(events.PeerUnreachable(sent.peer))
            else:
                driver.done(sent)
            todo += hr.batches(driver.tick())

        ends = {one.stream: (one.status, str(one.code)) for one in hr.outcomes(driver.actions)}
        assert killed == 2
        assert ends.pop("s7") == (Status.ERROR, "poison_frame")
        assert set(ends.values()) == {(Status.OK, "")}
        assert len(ends) == 19

    def test_suspects_run_alone_on_an_idle_worker(self, driver: hr.CoreDriver) -> None:
        """After a loss each frame of the batch runs alone, one at a time, with nothing beside it."""
        driver.join_worker(b"w1", slots=2)
        driver.push(*[hr.frame(seq=seq) for seq in range(3)])
        driver.tick()
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2", slots=2)
        driver.push(*[hr.frame("cam-2", seq) for seq in range(8)])

        alone = []
        todo = hr.batches(driver.tick())
        while todo:
            assert len(todo) == 1 or len(todo[0].batch.frames) > 1
            sent = todo.pop(0)
            alone.append(hr.seqs(sent.batch))
            driver.now_ns += 10 * hr.MS
            driver.done(sent)
            todo += hr.batches(driver.tick())

        assert alone[:3] == [[0], [1], [2]]
        assert sorted(map(len, alone[3:])) == [4, 4]

    def test_busy_worker_is_reserved_for_suspects_and_others_go_on(self, driver: hr.CoreDriver) -> None:
        """With no idle worker one falls idle for the suspects; the rest keep serving everybody else."""
        driver.join_worker(b"w1")
        driver.join_worker(b"w2", per_batch_ms=20)
        driver.join_worker(b"w3", per_batch_ms=30)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(80)])
        held = {sent.batch.batch: sent for sent in hr.batches(driver.tick())}
        driver.send(events.PeerUnreachable(b"w1"))
        lost = [sent for sent in held.values() if sent.peer == b"w1"]
        assert [sent.peer for sent in held.values()].count(b"w2") == 2

        assert hr.batches(driver.tick()) == []
        driver.done(next(sent for sent in held.values() if sent.peer == b"w2"))
        driver.done(next(sent for sent in held.values() if sent.peer == b"w3"))
        refilled = hr.batches(driver.tick())
        driver.done([sent for sent in held.values() if sent.peer == b"w2"][1])
        alone = hr.batches(driver.tick())

        assert [(sent.peer, len(sent.batch.frames)) for sent in refilled] == [(b"w3", 4)]
        assert [(sent.peer, len(sent.batch.frames)) for sent in alone] == [(b"w2", 1)]
        assert alone[0].batch.frames[0] == lost[0].batch.frames[0]

    def test_reservation_ends_with_the_last_suspect(self, driver: hr.CoreDriver) -> None:
        """When the suspects have expired, the reserved worker serves everybody again."""
        driver.join_worker(b"w1", slots=1, per_batch_ms=9)
        driver.join_worker(b"w2", slots=1)
        driver.push(hr.frame(seq=0, ttl_ms=20))
        driver.tick()
        driver.push(*[hr.frame("cam-2", seq) for seq in range(8)])
        held = hr.batches(driver.tick())
        pool = driver.core.dispatcher.pools.of(driver.core.models.classes[0])
        driver.send(events.PeerUnreachable(b"w1"))
        driver.tick()
        reserved = pool.reserved

        driver.wait(25)
        driver.done(held[0])
        after = hr.batches(driver.tick())

        assert reserved is driver.core.workers.by_peer[b"w2"]
        assert pool.reserved is None
        assert driver.core.account.expired == 1
        assert [(sent.peer, len(sent.batch.frames)) for sent in after] == [(b"w2", 4)]

    def test_hanging_worker_is_not_waited_for(self, driver: hr.CoreDriver) -> None:
        """A reserved worker that is overdue gives the suspects up to the next one."""
        driver.join_worker(b"w1", slots=1)
        driver.join_worker(b"w2", slots=1)
        driver.join_worker(b"w3", slots=1)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(12)])
        held = hr.batches(driver.tick())
        assert len(held) == 3
        driver.push(*[hr.frame(f"t{n}", 0) for n in range(40)])
        driver.send(events.PeerUnreachable(b"w1"))
        driver.tick()
        pool = driver.core.dispatcher.pools.of(driver.core.models.classes[0])
        first = pool.reserved
        assert first is not None
        other = next(sent for sent in held if sent.peer not in (b"w1", first.peer))

        driver.now_ns += 5 * hr.MS
        driver.done(other)
        busy_again = hr.batches(driver.tick())
        driver.wait(57)

        assert [sent.peer for sent in busy_again] == [other.peer]
        assert pool.reserved is driver.core.workers.by_peer[other.peer]

    def test_lost_frames_keep_their_deadline(self, driver: hr.CoreDriver) -> None:
        """A frame that was with a lost worker expires when its time is over, not later."""
        driver.join_worker(b"w1")
        driver.push(hr.frame(seq=0, ttl_ms=50), hr.frame(seq=1, ttl_ms=80), hr.frame(seq=2))
        driver.tick()
        driver.send(events.PeerUnreachable(b"w1"))

        actions = driver.wait(60)

        assert hr.ends(actions) == [("cam-1", 0, "expired", "deadline")]
        assert driver.core.next_wakeup_ns() == driver.now_ns + 20 * hr.MS

    def test_stream_stays_in_order_when_a_worker_dies(self) -> None:
        """VID-04: 30 frames in three batches, the second one's worker dies: 30 outcomes, in order."""
        spec = hr.make_spec(classes=(SizeClassSpec("only", 64, 64, max_batch_size=10),))
        driver = hr.CoreDriver(hr.make_settings(spec))
        for peer in (b"w1", b"w2", b"w3"):
            driver.join_worker(peer, slots=1)
        driver.push(*[hr.frame(seq=seq) for seq in range(30)])
        first, second, third = hr.batches(driver.tick())

        driver.done(third)
        driver.send(events.PeerUnreachable(second.peer))
        driver.done(first)
        todo = hr.batches(driver.tick())
        while todo:
            driver.done(todo.pop(0))
            todo += hr.batches(driver.tick())

        assert [one.seq for one in hr.outcomes(driver.actions)] == list(range(30))
        assert [one.pub_seq for one in hr.outcomes(driver.actions)] == list(range(30))
        driver.core.check_invariants()

    @pytest.mark.parametrize(
        ("hedge_share", "late_count"), [(0.0, 4), (0.02, 0)], ids=["no hedges", "hedges"]
    )
    def test_only_one_batch_waits_for_the_detection(self, hedge_share: float, late_count: int) -> None:
        """SCL-06: the worker next in line is dead; its batch is late by the detection, all else is not. With
        hedges not even that one is."""
        driver = hr.CoreDriver(hr.make_settings(hedge_share=hedge_share))
        driver.join_worker(b"w1", slots=1, per_batch_ms=9)
        driver.join_worker(b"w2", slots=1)
        driver.push(*[hr.frame(f"s{n}", 0, ttl_ms=20_000) for n in range(50)])
        held = hr.batches(driver.tick())
        todo = [sent for sent in held if sent.peer == b"w2"]

        while todo:
            driver.now_ns += 10 * hr.MS
            driver.done(todo.pop(0))
            todo += hr.batches(driver.tick())
        in_time = len(hr.outcomes(driver.actions))
        todo = hr.batches(keep_alive(driver, 3_500, b"w2"))
        while todo:
            driver.done(todo.pop(0))
            todo += hr.batches(driver.tick())

        assert in_time == 50 - late_count
        assert driver.core.account.ok == 50
        assert reports(driver.actions)[-1] == "worker lost"
        driver.core.check_invariants()

    def test_undelivered_batch_is_not_suspected(self, driver: hr.CoreDriver) -> None:
        """ZMQ-08: a batch whose send failed goes to another worker whole, as often as it takes."""
        for number in range(5):
            driver.join_worker(f"w{number}".encode(), slots=1)
            driver.push(hr.frame(seq=2 * number), hr.frame(seq=2 * number + 1))
            sent = hr.batches(driver.tick())[-1]
            assert hr.seqs(sent.batch) == list(range(min(2 * number + 2, 4)))
            driver.send(events.PeerUnreachable(sent.peer, (sent.batch.batch, 999)))

        record = driver.core.streams.by_name["cam-1"].order[0]
        assert record.lost_with == 0
        assert not record.is_suspect

    def test_frame_lost_in_company_for_the_last_time_is_not_called_poison(self) -> None:
        """With one attempt only, nobody knows which frame of the batch it was: worker_lost."""
        driver = hr.CoreDriver(hr.make_settings(max_attempts=1))
        driver.join_worker()
        driver.push(hr.frame(seq=0), hr.frame(seq=1))
        driver.tick()

        actions = driver.send(events.PeerUnreachable(b"w1"))

        assert hr.ends(actions) == [
            ("cam-1", 0, "error", "worker_lost"),
            ("cam-1", 1, "error", "worker_lost"),
        ]
        driver.core.check_invariants()


class TestLateAnswers:
    """What arrives for batches that are no longer in flight."""

    def test_late_done_of_a_lost_worker_is_suppressed(self, driver: hr.CoreDriver) -> None:
        """The frame ran twice; it has one outcome, the second run's."""
        driver.join_worker(b"w1")
        driver.push(hr.frame(seq=0))
        late = hr.batches(driver.tick())[0]
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2")
        again = hr.batches(driver.tick())[0]

        actions = driver.done(late)
        driver.done(again)

        assert refusals(actions) == [(b"w1", "unknown_peer", True)]
        assert hr.outcomes(actions) == []
        assert driver.core.late_done_count == 1
        assert [one.worker for one in hr.outcomes(driver.actions)] == ["w2"]

    @pytest.mark.parametrize("batch_id", [1, 99], ids=["somebody else's", "never sent"])
    def test_done_of_a_batch_it_does_not_hold_is_suppressed(
        self, driver: hr.CoreDriver, batch_id: int
    ) -> None:
        """A worker can't finish another worker's batch."""
        driver.join_worker(b"w1")
        driver.join_worker(b"w2")
        driver.push(hr.frame())
        driver.tick()
        other = next(peer for peer in (b"w1", b"w2") if not driver.core.workers.by_peer[peer].in_flight)

        done = driver.send(events.BatchDone(other, Done(batch_id, (hr.ok(),))))
        failed = driver.send(events.BatchFailed(other, Failed(batch_id, "x", "y")))

        assert done == failed == []
        assert driver.core.late_done_count == 2
        assert driver.core.account.unfinished == 1

    def test_second_done_of_a_batch_is_suppressed(self, driver: hr.CoreDriver) -> None:
        """Twice is once."""
        driver.join_worker()
        driver.push(hr.frame())
        sent = hr.batches(driver.tick())[0]
        driver.done(sent)

        assert driver.done(sent) == []

    def test_reconnected_worker_keeps_its_frames_free_of_suspicion(self, driver: hr.CoreDriver) -> None:
        """The same process on a new connection lives: its batch goes back whole, to the front, in order."""
        driver.join_worker(b"w1")
        driver.push(*[hr.frame(seq=seq) for seq in range(6)])
        late = hr.batches(driver.tick())[0]
        driver.push(*[hr.frame("cam-2", seq) for seq in range(2)])

        driver.join_worker(b"w1b", worker="w1", instance=1)
        sent = hr.batches(driver.tick())

        assert [hr.seqs(one.batch) for one in sent] == [[0, 1, 2, 3], [0, 4, 1, 5]]
        assert refusals(driver.done(late)) == [(b"w1", "unknown_peer", True)]

    def test_suspect_of_a_reconnected_worker_stays_first_in_line(self, driver: hr.CoreDriver) -> None:
        """A suspect that was not run is still a suspect, and still the first."""
        driver.join_worker(b"w1")
        driver.push(hr.frame(seq=0), hr.frame(seq=1))
        driver.tick()
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2")
        assert hr.seqs(hr.batches(driver.tick())[0].batch) == [0]

        driver.join_worker(b"w2b", worker="w2", instance=1)

        assert hr.seqs(hr.batches(driver.tick())[0].batch) == [0]


class TestBatchEnds:
    """Batches that do not end well."""

    def test_wrong_number_of_results_is_an_error_for_each(self, driver: hr.CoreDriver) -> None:
        """BAT-04: 1 or 5 answers for a batch of 4: nothing is matched up by luck; the worker goes on."""
        driver.join_worker()
        for count in (1, 5):
            start = driver.core.account.accepted
            driver.push(*[hr.frame(seq=start + n) for n in range(4)])
            sent = hr.batches(driver.tick())[0]

            actions = driver.done(sent, results=[hr.ok()] * count)

            assert [end[2:] for end in hr.ends(actions)] == [("error", "result_count")] * 4
            assert f"expected 4 results, got {count}" in hr.outcomes(actions)[0].message
        status = driver.core.status(driver.now_ns)
        assert status["error_by_code"] == {"result_count": 8}
        assert list(status["error_by_model"].values()) == [{"result_count": 8}]

    def test_frame_error_is_that_frame_only(self, driver: hr.CoreDriver) -> None:
        """BAT-01: one damaged image in a batch; its neighbours have results."""
        driver.join_worker()
        driver.push(*[hr.frame(seq=seq) for seq in range(3)])
        sent = hr.batches(driver.tick())[0]
        damaged = FrameResult(Status.ERROR, "damaged_image", "cut")

        actions = driver.done(sent, results=[hr.ok(0), damaged, hr.ok(2)])

        assert [end[1:] for end in hr.ends(actions)] == [
            (0, "ok", ""),
            (1, "error", "damaged_image"),
            (2, "ok", ""),
        ]

    def test_frame_of_a_stuck_worker_expires_if_its_time_is_over(self) -> None:
        """A broker that was paused finds a worker stuck and its frame's deadline past in one turn: the frame
        that comes back ends in that turn and is not sent once more."""
        changes = {"check_deadlines": False, "stuck_ms": 500}
        driver = hr.CoreDriver(hr.make_settings(**changes))
        driver.join_worker(b"w1", slots=1)
        driver.push(hr.frame(seq=0, ttl_ms=100))
        driver.tick()
        driver.join_worker(b"w2", slots=1)
        driver.now_ns += 2_000 * hr.MS
        driver.hear(b"w1", b"w2")

        actions = driver.tick()

        assert [one.name for one in hr.only(actions, act.Report)] == ["worker lost"]
        assert hr.ends(actions) == [("cam-1", 0, "expired", "deadline")]
        assert hr.batches(actions) == []
        driver.core.check_invariants()

    def test_copy_of_poison_that_comes_back_is_not_run_again(self) -> None:
        """It was with another worker when its content was found guilty, and that worker is lost as well."""
        driver = hr.CoreDriver()
        for name in (b"w1", b"w2", b"w3"):
            driver.join_worker(name, slots=1)
        payload = bytes(1024)
        driver.push(replace(hr.frame("cam-1", 0), payload=payload))
        (first,) = hr.batches(driver.tick())
        driver.send(events.PeerUnreachable(first.peer))
        (second,) = hr.batches(driver.tick())
        driver.push(replace(hr.frame("cam-2", 0), payload=payload))
        (third,) = hr.batches(driver.tick())
        driver.send(events.PeerUnreachable(second.peer))

        ends = hr.ends(driver.send(events.PeerUnreachable(third.peer)))
        driver.join_worker(b"w4", slots=1)

        assert ends == [("cam-2", 0, "error", "poison_frame")]
        assert hr.batches(driver.tick()) == []
        driver.core.check_invariants()

    def test_copy_of_poison_that_is_overdue_gets_no_second_worker(self) -> None:
        """It was with another worker when its content was found guilty: hedging it would cost one more."""
        driver = hr.CoreDriver(hr.make_settings(hedge_share=0.5))
        for name in (b"w1", b"w2", b"w3"):
            driver.join_worker(name, slots=1)
        payload = bytes(1024)
        driver.push(replace(hr.frame("cam-1", 0), payload=payload))
        (first,) = hr.batches(driver.tick())
        driver.send(events.PeerUnreachable(first.peer))
        (second,) = hr.batches(driver.tick())
        driver.push(replace(hr.frame("cam-2", 0), payload=payload))
        (third,) = hr.batches(driver.tick())
        driver.send(events.PeerUnreachable(second.peer))
        driver.join_worker(b"w4", slots=1)

        actions = driver.wait(600)
        actions += driver.wait(100)

        assert third.batch.frames[0].stream == "cam-2"
        assert hr.batches(actions) == []
        driver.core.check_invariants()

    def test_poison_that_expired_before_its_worker_was_missed_is_refused_too(self) -> None:
        """The second worker was dead, but not known to be when the frame's deadline came: its outcome is
        `expired`, and its content does not get a third worker."""
        driver = hr.CoreDriver(hr.make_settings(check_deadlines=False))
        driver.join_worker(b"w1", slots=1)
        driver.push(replace(hr.frame("cam-1", 0, ttl_ms=200), payload=bytes(1024)))
        driver.tick()
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2", slots=1)
        driver.tick()
        expired = hr.ends(driver.wait(300))
        driver.send(events.PeerUnreachable(b"w2"))

        ends = hr.ends(driver.push(replace(hr.frame("cam-2", 0), payload=bytes(1024))))

        assert expired == [("cam-1", 0, "expired", "deadline")]
        assert ends == [("cam-2", 0, "rejected", "poison_frame")]
        driver.core.check_invariants()

    def test_suspect_that_expired_is_not_condemned_before_its_attempts_are_used(self) -> None:
        """With three attempts, two lost workers prove nothing yet: the same content is admitted."""
        driver = hr.CoreDriver(hr.make_settings(check_deadlines=False, max_attempts=3))
        driver.join_worker(b"w1", slots=1)
        driver.push(replace(hr.frame("cam-1", 0, ttl_ms=200), payload=bytes(1024)))
        driver.tick()
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2", slots=1)
        driver.tick()
        driver.wait(300)
        driver.send(events.PeerUnreachable(b"w2"))

        ends = hr.ends(driver.push(replace(hr.frame("cam-2", 0), payload=bytes(1024))))

        assert ends == []
        assert driver.core.account.unfinished == 1
        driver.core.check_invariants()

    def test_frame_left_of_a_failing_batch_is_not_blamed(self) -> None:
        """Its neighbour expired in the overdue batch, which then failed: it runs alone before it ends."""
        driver = hr.CoreDriver(hr.make_settings(check_deadlines=False))
        driver.join_worker(b"w1")
        driver.push(hr.frame(seq=0, ttl_ms=200), hr.frame(seq=1))
        (sent,) = hr.batches(driver.tick())
        expired = hr.ends(driver.wait(300))

        failed = hr.ends(driver.fail(sent))
        (again,) = hr.batches(driver.tick())

        assert expired == [("cam-1", 0, "expired", "deadline")]
        assert failed == []
        assert hr.seqs(again.batch) == [1]
        assert hr.ends(driver.done(again)) == [("cam-1", 1, "ok", "")]
        driver.core.check_invariants()

    @pytest.mark.parametrize("guilty", range(8))
    def test_failing_batch_is_halved_until_the_guilty_frame_is_alone(self, guilty: int) -> None:
        """One failing frame of 8: 7 results, 1 error, in at most log2(8) + 1 extra rounds."""
        spec = hr.make_spec(classes=(SizeClassSpec("only", 64, 64, max_batch_size=8),))
        driver = hr.CoreDriver(hr.make_settings(spec))
        driver.join_worker(slots=2)
        driver.push(*[hr.frame(seq=seq) for seq in range(8)])
        todo = hr.batches(driver.tick())
        runs: list[int] = []

        while todo:
            sent = todo.pop(0)
            runs.append(len(sent.batch.frames))
            if guilty in hr.seqs(sent.batch):
                driver.fail(sent)
            else:
                driver.done(sent)
            todo += hr.batches(driver.tick())

        ends = hr.ends(driver.actions)
        assert [end[1] for end in ends] == list(range(8))
        assert [end[1] for end in ends if end[2] == "error"] == [guilty]
        assert ends[guilty][3] == "batch_failed"
        assert runs.count(8) == 1
        assert len(runs) <= 1 + 2 * 3
        driver.core.check_invariants()

    def test_half_that_fits_no_free_worker_is_split_further(self) -> None:
        """The other worker holds 1 at a time: the halves are cut to that."""
        spec = hr.make_spec(classes=(SizeClassSpec("only", 64, 64, max_batch_size=8),))
        driver = hr.CoreDriver(hr.make_settings(spec))
        driver.join_worker(b"w1", slots=1)
        driver.push(*[hr.frame(seq=seq) for seq in range(8)])
        sent = hr.batches(driver.tick())[0]
        driver.send(events.WorkerLeft(b"w1"))
        driver.join_worker(b"w2", slots=8, limit=1)

        driver.fail(sent)
        again = hr.batches(driver.tick())

        assert [hr.seqs(one.batch) for one in again] == [[seq] for seq in range(8)]
        assert b"w1" not in driver.core.workers.by_peer
        driver.core.check_invariants()

    def test_batch_handed_back_goes_to_the_front(self, driver: hr.CoreDriver) -> None:
        """A worker that stops returns what it has not run: no attempt is counted against the frames."""
        driver.join_worker(b"w1", slots=1)
        driver.push(*[hr.frame(seq=seq) for seq in range(2)])
        sent = hr.batches(driver.tick())[0]
        driver.push(hr.frame("cam-2", 0))
        driver.send(events.WorkerLeft(b"w1"))
        driver.join_worker(b"w2")

        driver.fail(sent, Code.SHUTDOWN)
        again = hr.batches(driver.tick())[0]

        assert [(one.stream, one.seq) for one in again.batch.frames] == [
            ("cam-1", 0),
            ("cam-1", 1),
            ("cam-2", 0),
        ]
        assert driver.core.streams.by_name["cam-1"].order[0].lost_with == 0


READY = Ready("w1", 1, 2, (hr.profile(hr.make_spec()),))


def answer_probe(driver: hr.CoreDriver, peer: bytes, probe: int) -> list[act.Action]:
    """A worker repeats the number of a probe."""
    return driver.send(events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe))


class TestIds:
    """Worker ids."""

    def test_second_worker_with_a_living_id_is_refused(self, driver: hr.CoreDriver) -> None:
        """ZMQ-07: the holder is probed, answers, and is undisturbed; the second is told id_in_use."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.tick()

        claim = driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        waiting = driver.send(events.PeerHeard(b"w2", is_heartbeat=True, is_worker=True))
        answer = answer_probe(driver, b"w1", 1)

        assert claim == [act.SendHeartbeat(b"w1", is_worker=True, probe=1)]
        assert waiting == []
        assert refusals(answer) == [(b"w2", "id_in_use", True)]
        assert "pid 1" in hr.only(answer, act.RefusePeer)[0].message
        assert list(driver.core.workers.by_peer) == [b"w1"]

    def test_restarted_worker_gets_its_id_within_a_heartbeat(self, driver: hr.CoreDriver) -> None:
        """ZMQ-06: killed and started again under its id: the probe finds the old connection gone, its jobs
        are requeued once, and the new one gets them."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.push(hr.frame(seq=0))
        driver.tick()

        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        found = driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2", worker="w", instance=2)
        sent = hr.batches(driver.tick())

        assert [one.peer for one in hr.only(found, act.SetUpWorker)] == [b"w2"]
        assert [(one.peer, hr.seqs(one.batch)) for one in sent] == [(b"w2", [0])]

    def test_silent_holder_loses_its_id(self, driver: hr.CoreDriver) -> None:
        """No answer to the probe within its time: the claim stands."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.tick()
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))

        early = driver.wait(1_249)
        actions = driver.wait(1)

        assert hr.only(early, act.SetUpWorker) == []
        assert [one.peer for one in hr.only(actions, act.SetUpWorker)] == [b"w2"]
        assert list(driver.core.workers.by_peer) == [b"w2"]

    @pytest.mark.parametrize("kind", ["heartbeat", "done", "wrong number", "unreadable", "ready"])
    def test_only_the_number_of_the_probe_proves_life(self, driver: hr.CoreDriver, kind: str) -> None:
        """The holder was killed and its last words are read after the claim: they keep the id for nobody."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.push(hr.frame(seq=0))
        sent = hr.batches(driver.tick())[0]
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))

        match kind:
            case "heartbeat":
                driver.send(events.PeerHeard(b"w1", is_heartbeat=True, is_worker=True))
            case "done":
                driver.done(sent)
            case "wrong number":
                answer_probe(driver, b"w1", 2)
            case "unreadable":
                driver.send(events.PeerMisbehaved(b"w1", "bad_field", Heartbeat))
            case _:
                driver.send(events.WorkerReady(b"w1", replace(READY, worker="w")))
        actions = driver.wait(1_250)

        assert refusals(driver.actions) == []
        assert [one.peer for one in hr.only(actions, act.SetUpWorker)] == [b"w2"]

    def test_number_that_nobody_asked_for_is_a_heartbeat(self, driver: hr.CoreDriver) -> None:
        """An answer that comes late, when the claim has gone, or from the claimant itself."""
        driver.join_worker(b"w1", worker="w", instance=1)

        assert answer_probe(driver, b"w1", 1) == []
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        assert answer_probe(driver, b"w2", 1) == []

    def test_newest_claim_stands(self, driver: hr.CoreDriver) -> None:
        """A worker killed twice within one probe is served: its second life's claim gives way to the third's,
        for which the holder is asked anew. Which of the two lives nobody knows: none is refused for good."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.tick()
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        driver.wait(1_000)

        third = driver.send(events.WorkerArrived(b"w3", hr.hello("w", 3)))
        late = answer_probe(driver, b"w1", 1)
        actions = driver.wait(1_250)

        assert refusals(third) == [(b"w2", "id_claimed", True)]
        assert hr.only(third, act.SendHeartbeat) == [act.SendHeartbeat(b"w1", is_worker=True, probe=2)]
        assert late == []
        assert [one.peer for one in hr.only(actions, act.SetUpWorker)] == [b"w3"]

    def test_claims_that_keep_coming_do_not_keep_a_dead_holder(self, driver: hr.CoreDriver) -> None:
        """Each is given its own time, and the holder's silence ends them all."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.tick()

        for number in range(4):
            driver.send(events.WorkerArrived(b"c%d" % number, hr.hello("w", 2 + number)))
            driver.wait(1_000)

        assert list(driver.core.workers.by_peer) == [b"c2"]
        assert list(driver.core.workers.claims) == ["w"]

    def test_broker_that_slept_lets_the_holder_answer(self, driver: hr.CoreDriver) -> None:
        """The probe's time was over while the broker was suspended: the answer may be on its way."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.tick()
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        driver.now_ns += 60_000 * hr.MS

        slept = driver.tick()
        answer = answer_probe(driver, b"w1", 1)

        assert reports(slept) == []
        assert refusals(answer) == [(b"w2", "id_in_use", True)]

    def test_claimant_that_reconnects_keeps_its_claim(self, driver: hr.CoreDriver) -> None:
        """It is the same process on a new connection."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))

        driver.wait(1_000)
        again = driver.send(events.WorkerArrived(b"w3", hr.hello("w", 2)))
        actions = driver.send(events.PeerUnreachable(b"w1"))

        assert again == []
        assert [one.peer for one in hr.only(actions, act.SetUpWorker)] == [b"w3"]

    @pytest.mark.parametrize("event", [events.PeerUnreachable(b"w2"), events.WorkerLeft(b"w2")])
    def test_claimant_that_leaves_gives_its_claim_up(
        self, driver: hr.CoreDriver, event: events.Event
    ) -> None:
        """The holder's end then gives the id to nobody."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.join_worker(b"v1", worker="v", instance=1)
        driver.send(events.WorkerArrived(b"v2", hr.hello("v", 2)))
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        driver.send(event)

        actions = driver.send(events.PeerUnreachable(b"w1"))

        assert hr.only(actions, act.SetUpWorker) == []

    def test_holder_that_reconnects_is_probed_there(self, driver: hr.CoreDriver) -> None:
        """The holder was on its way to a new connection. Its hello too may be older than its death."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))

        moved = driver.send(events.WorkerArrived(b"w1b", hr.hello("w", 1)))
        answer = answer_probe(driver, b"w1b", 2)

        assert [type(one) for one in moved if not isinstance(one, act.Report)] == [
            act.SetUpWorker,
            act.SendHeartbeat,
        ]
        assert hr.only(moved, act.SendHeartbeat) == [act.SendHeartbeat(b"w1b", is_worker=True, probe=2)]
        assert refusals(answer) == [(b"w2", "id_in_use", True)]
        assert list(driver.core.workers.by_peer) == [b"w1b"]

    def test_holder_that_reconnects_and_dies_loses_its_id(self, driver: hr.CoreDriver) -> None:
        """Its hello was read late: nobody answers on the new connection."""
        driver.join_worker(b"w1", worker="w", instance=1)
        driver.send(events.WorkerArrived(b"w2", hr.hello("w", 2)))
        driver.send(events.WorkerArrived(b"w1b", hr.hello("w", 1)))

        actions = driver.wait(1_250)

        assert refusals(driver.actions) == []
        assert [one.peer for one in hr.only(actions, act.SetUpWorker)] == [b"w2"]

    def test_repeated_hello_is_answered_again(self, driver: hr.CoreDriver) -> None:
        """Its Setup was slow; nothing changes."""
        driver.join_worker(b"w1")

        actions = driver.send(events.WorkerArrived(b"w1", hr.hello("w1", 1)))

        assert [type(one) for one in actions] == [act.SetUpWorker]
        assert driver.core.workers.by_peer[b"w1"].slots == 2

    def test_connection_that_changes_its_name_is_another_worker(self, driver: hr.CoreDriver) -> None:
        """The earlier worker of the connection is gone."""
        driver.join_worker(b"w1")

        actions = driver.send(events.WorkerArrived(b"w1", hr.hello("other", 5)))

        assert reports(actions) == ["worker lost", "worker arrived"]
        assert list(driver.core.workers.by_id) == ["other"]

    def test_worker_limit(self) -> None:
        """One more than max_workers is refused with the number."""
        driver = hr.CoreDriver(hr.make_settings(max_workers=1))
        driver.join_worker(b"w1")

        actions = driver.send(events.WorkerArrived(b"w2", hr.hello("w2")))

        assert refusals(actions) == [(b"w2", "too_many_workers", True)]
        driver.core.check_invariants()


def bad_ready(**changes: object) -> Ready:
    """A READY of worker w1 with something wrong."""
    good = Ready("w1", 1, 2, (hr.profile(hr.make_spec()),))
    return replace(good, **changes)  # type: ignore[arg-type]


def with_class(described: ClassProfile) -> Ready:
    """A READY that describes one class like this."""
    profile = replace(hr.profile(hr.make_spec()), classes=(described,))
    return bad_ready(models=(profile,))


SMALL = hr.SMALL

BAD_READY = [
    pytest.param(bad_ready(worker="x"), "worker w1", id="another worker's"),
    pytest.param(bad_ready(slots=0), "slots is 0", id="no slots"),
    pytest.param(bad_ready(slots=65), "1 to 64", id="too many slots"),
    pytest.param(bad_ready(models=()), "0 models", id="no models"),
    pytest.param(bad_ready(models=(hr.profile(hr.make_spec()),) * 2), "each once", id="a model twice"),
    pytest.param(bad_ready(models=(hr.profile(hr.make_spec("x")),)), "x:1", id="unknown model"),
    pytest.param(with_class(ClassProfile(replace(SMALL, name="x"), ())), "x: unknown", id="unknown class"),
    pytest.param(with_class(ClassProfile(replace(SMALL, width=65), ())), "64x65", id="other shape"),
    pytest.param(with_class(ClassProfile(replace(SMALL, max_batch_size=0), ())), "is 0", id="batch of 0"),
    pytest.param(with_class(ClassProfile(SMALL, ((0, 1.0),))), "[0]", id="bucket of 0"),
    pytest.param(with_class(ClassProfile(SMALL, ((2, 1.0), (1, 1.0)))), "[2, 1]", id="buckets fall"),
    pytest.param(with_class(ClassProfile(SMALL, ((1, float("nan")),))), "milliseconds", id="cost nan"),
    pytest.param(with_class(ClassProfile(SMALL, ((1, -1.0),))), "milliseconds", id="cost negative"),
    pytest.param(
        bad_ready(models=(replace(hr.profile(hr.make_spec()), classes=()),)), "0 size classes", id="no class"
    ),
]


class TestReady:
    """What a worker may say of itself."""

    @pytest.mark.parametrize(("ready", "words"), BAD_READY)
    def test_bad_ready_is_refused_and_changes_nothing(
        self, driver: hr.CoreDriver, ready: Ready, words: str
    ) -> None:
        """Each value of a READY is checked; the worker stays what it was."""
        driver.send(events.WorkerArrived(b"w1", hr.hello("w1")))

        actions = driver.send(events.WorkerReady(b"w1", ready))

        assert refusals(actions) == [(b"w1", "bad_ready", True)]
        assert words in hr.only(actions, act.RefusePeer)[0].message
        assert driver.core.workers.by_peer[b"w1"].services == {}

    def test_image_class_without_pixels_is_refused(self) -> None:
        """A worker that describes an open model can't give it an empty class."""
        driver = hr.CoreDriver(hr.make_settings(replace(hr.make_spec(), size_classes=())))
        driver.send(events.WorkerArrived(b"w1", hr.hello("w1")))

        actions = driver.send(
            events.WorkerReady(b"w1", with_class(ClassProfile(replace(SMALL, height=0), ())))
        )

        assert refusals(actions) == [(b"w1", "bad_ready", True)]
        driver.core.check_invariants()

    def test_fewer_slots_than_batches_in_flight_is_refused(self, driver: hr.CoreDriver) -> None:
        """A second READY can't take back slots that are in use."""
        driver.join_worker(b"w1", slots=2)
        driver.push(*[hr.frame(seq=seq) for seq in range(8)])
        driver.tick()

        actions = driver.send(events.WorkerReady(b"w1", bad_ready(slots=1)))

        assert refusals(actions) == [(b"w1", "bad_ready", True)]

    def test_second_ready_replaces_the_first(self, driver: hr.CoreDriver) -> None:
        """Other models, other slots: what is in flight stays in flight."""
        driver.join_worker(b"w1", slots=1)
        driver.push(hr.frame(seq=0, size=100), hr.frame("cam-2", 0))
        sent = hr.batches(driver.tick())
        ready = with_class(ClassProfile(SMALL, ((1, 5.0),)))
        driver.send(events.WorkerReady(b"w1", replace(ready, slots=3)))

        done = [one for batch in sent for one in hr.outcomes(driver.done(batch))]

        assert len(done) == 1
        assert [one.spec.name for one in _served(driver)] == ["small"]

    def test_batch_of_a_class_that_is_no_longer_served_still_counts(self, driver: hr.CoreDriver) -> None:
        """A second READY that leaves a class out: what was in flight of it is done as usual."""
        driver.join_worker(b"w1", slots=1)
        driver.push(hr.frame(seq=0, size=100))
        sent = hr.batches(driver.tick())[0]
        driver.send(events.WorkerReady(b"w1", replace(with_class(ClassProfile(SMALL, ())), slots=1)))

        assert hr.ends(driver.done(sent)) == [("cam-1", 0, "ok", "")]
        driver.push(hr.frame(seq=1, size=100))
        assert hr.batches(driver.tick()) == []

    def test_ready_of_a_stranger_is_refused(self, driver: hr.CoreDriver) -> None:
        """It must say hello first."""
        actions = driver.send(events.WorkerReady(b"x", bad_ready()))

        assert refusals(actions) == [(b"x", "unknown_peer", True)]

    def test_worker_without_profile_is_served(self, driver: hr.CoreDriver) -> None:
        """No buckets: the class's own limit holds."""
        profile = replace(
            hr.profile(hr.make_spec()), classes=(ClassProfile(SMALL, ()),), notes=("no profile",)
        )
        driver.join_worker(profiles=[profile])
        driver.push(*[hr.frame(seq=seq) for seq in range(5)])

        sent = hr.batches(driver.tick())

        assert [len(one.batch.frames) for one in sent] == [4]
        assert driver.core.status(0)["workers"][0]["notes"] == ["no profile"]  # type: ignore[index,call-overload]


def _served(driver: hr.CoreDriver) -> list[object]:
    return [service.served for service in driver.core.workers.by_peer[b"w1"].services.values()]


class TestLeaving:
    """Goodbye."""

    def test_leaving_worker_finishes_and_is_forgotten(self, driver: hr.CoreDriver) -> None:
        """No new batches; what it holds may still be done."""
        driver.join_worker(b"w1")
        driver.push(hr.frame(seq=0))
        sent = hr.batches(driver.tick())[0]
        driver.push(hr.frame(seq=1))

        left = driver.send(events.WorkerLeft(b"w1"))
        assert hr.batches(driver.tick()) == []
        done = driver.done(sent)

        assert reports(left) == ["worker leaving"]
        assert len(hr.outcomes(done)) == 1
        assert driver.core.workers.by_peer == {}

    def test_idle_worker_is_forgotten_at_once(self, driver: hr.CoreDriver) -> None:
        """Nothing to wait for."""
        driver.join_worker(b"w1")

        driver.send(events.WorkerLeft(b"w1"))

        assert driver.core.workers.by_id == {}

    def test_restarted_worker_takes_the_id_of_the_one_that_left(self, driver: hr.CoreDriver) -> None:
        """ZMQ-21: ten restarts, each with a fresh id: the dead are forgotten."""
        for number in range(10):
            peer = f"w{number}".encode()
            driver.join_worker(peer)
            driver.push(hr.frame(seq=number))
            driver.done(hr.batches(driver.tick())[0])
            driver.send(events.WorkerLeft(peer))
        driver.join_worker(b"last")

        assert list(driver.core.workers.by_id) == ["last"]
        assert driver.core.account.ok == 10


class TestHeartbeats:
    """Life signs both ways."""

    def test_each_peer_gets_a_heartbeat_per_interval(self, driver: hr.CoreDriver) -> None:
        """Workers and producers that said Hello are told every interval that the broker lives."""
        driver.join_worker(b"w1")
        driver.join_producer(b"p1")

        actions = keep_alive(driver, 2_000, b"w1", b"p1")

        assert (
            hr.only(actions, act.SendHeartbeat)
            == [
                act.SendHeartbeat(b"w1", is_worker=True),
                act.SendHeartbeat(b"p1", is_worker=False),
            ]
            * 2
        )

    @pytest.mark.parametrize("kind", [Done, Failed, None], ids=["done", "failed", "anything"])
    def test_unreadable_answer_loses_its_worker(self, driver: hr.CoreDriver, kind: type | None) -> None:
        """The batch would be in flight for good otherwise: its frames go to others, and the worker is told to
        introduce itself again."""
        driver.join_worker(b"w1", slots=1)
        driver.push(*[hr.frame(f"s{number}") for number in range(2)])
        driver.tick()

        actions = driver.send(events.PeerMisbehaved(b"w1", "size_mismatch", kind))
        driver.join_worker(b"w2")
        again = hr.batches(driver.tick())

        assert reports(actions) == ["worker lost"]
        assert "size_mismatch" in str(hr.only(actions, act.Report)[0].values["reason"])
        assert refusals(actions) == [(b"w1", "unknown_peer", True)]
        assert [(one.peer, [each.stream for each in one.batch.frames]) for one in again] == [(b"w2", ["s0"])]

    def test_frame_whose_result_nobody_can_read_is_named(self, driver: hr.CoreDriver) -> None:
        """A user's adapter returns what no header can hold: it has an outcome after two attempts, its
        neighbour a result."""
        driver.push(hr.frame("s0"), hr.frame("s1"))
        answered: list[act.Action] = []
        for number in range(3):
            driver.join_worker(b"w%d" % number)
            for sent in hr.batches(driver.tick()):
                if "s0" in [each.stream for each in sent.batch.frames]:
                    driver.send(events.PeerMisbehaved(sent.peer, "message_too_large"))
                else:
                    answered += driver.done(sent)

        assert hr.ends(driver.actions) == [("s0", 0, "error", "poison_frame"), ("s1", 0, "ok", "")]

    @pytest.mark.parametrize(
        ("kind", "has_batch"), [(Heartbeat, True), (Done, False)], ids=["no answer", "idle"]
    )
    def test_misbehaviour_that_leaves_no_doubt_is_a_sign_of_life(
        self, driver: hr.CoreDriver, kind: type, has_batch: bool
    ) -> None:
        """A message of another type was no answer, and an idle worker owes none."""
        driver.join_worker(b"w1")
        if has_batch:
            driver.push(hr.frame())
            driver.tick()

        assert driver.send(events.PeerMisbehaved(b"w1", "bad_field", kind)) == []

    @pytest.mark.parametrize("kind", [Ready, None], ids=["ready", "anything"])
    def test_unreadable_ready_is_a_bad_one(self, driver: hr.CoreDriver, kind: type | None) -> None:
        """Else the worker would wait for batches and the broker for its READY."""
        driver.send(events.WorkerArrived(b"w1", hr.hello("w1")))

        actions = driver.send(events.PeerMisbehaved(b"w1", "too_deep", kind))

        assert refusals(actions) == [(b"w1", "bad_ready", True)]
        assert reports(actions) == ["worker refused"]

    def test_unreadable_answer_from_before_its_hello_is_no_bad_ready(self, driver: hr.CoreDriver) -> None:
        """It holds answers back while it has no session; nobody waits for those of a lost batch."""
        driver.send(events.WorkerArrived(b"w1", hr.hello("w1")))

        assert driver.send(events.PeerMisbehaved(b"w1", "size_mismatch", Done)) == []

    def test_silence_of_three_intervals_is_a_loss(self, driver: hr.CoreDriver) -> None:
        """Both roles; any message counts as a sign of life, also one that can't be read."""
        driver.join_worker(b"w1")
        driver.join_producer(b"p1")
        driver.wait(1_000)
        driver.send(events.PeerMisbehaved(b"w1", "bad_field"))
        driver.push(BadFrame("bad_shape", "", "cam-1", 1, 1), hr.frame(seq=2))

        early = driver.wait(2_999)
        actions = driver.wait(1)

        assert "worker lost" not in reports(early)
        assert reports(actions) == ["worker lost", "producer lost"]
        assert driver.core.streams.by_name["cam-1"].owner_epoch is None

    def test_broker_that_slept_declares_nobody_dead(self, driver: hr.CoreDriver) -> None:
        """After a suspension of the broker itself its peers get one more interval to be heard."""
        driver.join_worker(b"w1")
        driver.tick()
        driver.now_ns += 60_000 * hr.MS

        slept = driver.tick()
        driver.hear(b"w1")
        later = driver.wait(1_500)

        assert reports(slept + later) == []
        assert list(driver.core.workers.by_peer) == [b"w1"]

    @pytest.mark.parametrize("is_worker", [True, False])
    def test_heartbeat_of_a_stranger_is_told_to_say_hello(
        self, driver: hr.CoreDriver, is_worker: bool
    ) -> None:
        """It may have been taken for dead: it must introduce itself again."""
        actions = driver.send(events.PeerHeard(b"x", is_heartbeat=True, is_worker=is_worker))

        assert refusals(actions) == [(b"x", "unknown_peer", is_worker)]
        assert driver.send(events.PeerHeard(b"x")) == []

    def test_unreachable_stranger_is_nobody(self, driver: hr.CoreDriver) -> None:
        """A send to a plain script failed: nothing to do."""
        assert driver.send(events.PeerUnreachable(b"x")) == []
        assert driver.send(events.PeerMisbehaved(None, "bad_msgpack")) == []
        assert driver.send(events.ProducerLeft(b"x")) == []


class TestProducers:
    """Sessions."""

    def test_repeated_hello_does_not_begin_the_count_again(self, driver: hr.CoreDriver) -> None:
        """The session goes on."""
        driver.join_producer()
        driver.push(hr.frame(model="nope"))

        again = driver.join_producer()

        assert [type(one) for one in again] == [act.WelcomeProducer, act.GrantCredit]
        assert driver.core.producers.by_peer[b"p1"].received == 1

    def test_new_epoch_on_a_connection_is_a_new_session(self, driver: hr.CoreDriver) -> None:
        """Its streams are free, its earlier frames are credited to nobody."""
        driver.join_producer(epoch=1)
        driver.push(hr.frame(seq=0))
        driver.join_producer(epoch=2)
        driver.join_worker()

        done = driver.done(hr.batches(driver.tick())[0])

        assert hr.grants(done) == []
        assert driver.push(hr.frame(seq=0, epoch=2)) == []

    def test_frame_of_another_epoch_is_credited_but_moves_no_stream(self, driver: hr.CoreDriver) -> None:
        """Credit.streams speaks of the session's own epoch."""
        driver.join_producer(epoch=1)
        driver.push(hr.frame(seq=0, epoch=8))
        driver.join_worker()

        done = driver.done(hr.batches(driver.tick())[0])

        assert hr.grants(done)[0][1].streams == {}
        assert hr.grants(done)[0][1].finished == 1

    def test_producer_limit(self) -> None:
        """One more than max_producers is refused with the number."""
        driver = hr.CoreDriver(hr.make_settings(max_producers=1))
        driver.join_producer(b"p1", 1)

        actions = driver.join_producer(b"p2", 2)

        assert refusals(actions) == [(b"p2", "too_many_producers", False)]
        driver.core.check_invariants()

    def test_unreachable_producer_is_lost_and_its_frames_finish(self, driver: hr.CoreDriver) -> None:
        """Accepted frames end as usual; the stream has no owner any more."""
        driver.join_producer()
        driver.push(hr.frame(seq=0))

        lost = driver.send(events.PeerUnreachable(b"p1"))
        driver.join_worker()
        done = driver.done(hr.batches(driver.tick())[0])

        assert hr.only(lost, act.Report)[0].values["streams"] == ["cam-1"]
        assert hr.ends(done) == [("cam-1", 0, "ok", "")]


class TestDrain:
    """The end."""

    def test_drain_finishes_what_was_admitted(self, driver: hr.CoreDriver) -> None:
        """PRC-03: nothing new comes in, the rest gets its results."""
        driver.push(hr.frame(seq=0))
        first = driver.send(events.DrainRequested())
        second = driver.send(events.DrainRequested())
        assert not driver.core.is_drained
        driver.join_worker()
        driver.done(hr.batches(driver.tick())[0])

        assert reports(first) == ["drain started"]
        assert second == []
        assert driver.core.is_drained

    def test_end_of_grace_ends_every_frame(self, driver: hr.CoreDriver) -> None:
        """Waiting, suspected, with a worker: each becomes `error shutdown`, in order; DONE is nothing."""
        driver.join_worker(b"w1", slots=1)
        driver.push(hr.frame(seq=0), hr.frame(seq=1))
        driver.tick()
        driver.send(events.PeerUnreachable(b"w1"))
        driver.join_worker(b"w2", slots=1)
        driver.push(hr.frame("cam-2", 0))
        held = hr.batches(driver.tick())

        actions = driver.send(events.GraceEnded())
        late = driver.done(held[0])

        assert hr.ends(actions) == [
            ("cam-1", 0, "error", "shutdown"),
            ("cam-1", 1, "error", "shutdown"),
            ("cam-2", 0, "error", "shutdown"),
        ]
        assert hr.only(actions, act.CancelBatch) == [act.CancelBatch(b"w2", held[0].batch.batch)]
        assert late == []
        assert driver.core.is_drained
