"""Room for urgent frames, deadlines that can't be met, and when to come again."""

from __future__ import annotations

import hr_core as hr
import pytest

from headrace.broker.settings import ClassPolicy
from headrace.protocol.messages import Keep, Limits, ModelProfile, SizeClassSpec

TINY = SizeClassSpec("tiny", 64, 64, max_batch_size=2)
BIG = SizeClassSpec("big", 256, 256, max_batch_size=2)


def make(**changes: object) -> hr.CoreDriver:
    """A core with two classes of two frames a batch."""
    spec = hr.make_spec(classes=(TINY, BIG))
    return hr.CoreDriver(hr.make_settings(spec, **changes))  # type: ignore[arg-type]


class TestPriorityReserve:
    """Urgent frames find room however many ordinary ones came before."""

    def test_each_priority_has_room_of_its_own_in_a_full_class(self) -> None:
        """max_queue_size 3, reserve 2, three levels: 3 + 2 x 2 frames at most, nothing thrown out."""
        driver = make(
            policy=ClassPolicy(max_queue_size=3),
            priority_reserve_frames=2,
            limits=Limits(priority_levels=3),
        )
        priorities = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 1]

        driver.push(*[hr.frame(f"s{n}", 0, priority=p) for n, p in enumerate(priorities)])

        refused = [(name, code) for name, _, _, code in hr.ends(driver.actions)]
        assert refused == [(name, "queue_full") for name in ("s3", "s6", "s9", "s10")]
        assert driver.core.models.classes[0].queue.waiting_by_priority() == {0: 3, 1: 2, 2: 2}
        assert all(one.retry_after_ms for one in hr.rejects(driver.actions))
        driver.core.check_invariants()

    def test_superseded_frame_gives_its_place_to_the_newer_one(self) -> None:
        """A `latest` frame in the reserve is replaced there."""
        driver = make(policy=ClassPolicy(max_queue_size=1), priority_reserve_frames=1)
        driver.push(hr.frame("a", 0))

        latest = [hr.frame("b", seq, priority=5, keep=Keep.LATEST) for seq in range(3)]
        actions = driver.push(*latest, hr.frame("c", 0, priority=5))

        assert [(name, seq, code) for name, seq, _, code in hr.ends(actions)] == [
            ("b", 0, "newer_frame"),
            ("b", 1, "newer_frame"),
            ("c", 0, "queue_full"),
        ]
        driver.core.check_invariants()

    def test_bytes_are_kept_for_the_higher_priorities_in_steps(self) -> None:
        """1,000 bytes, 40 % kept, three levels: 600, 800 and 1,000 may be filled."""
        driver = make(max_bytes=1_000, priority_bytes_share=0.4, limits=Limits(priority_levels=3))
        priorities = [0, 0, 0, 0, 1, 1, 2, 2]

        driver.push(*[hr.frame(f"s{n}", 0, priority=p, nbytes=200) for n, p in enumerate(priorities)])

        ends = [(name, code) for name, _, _, code in hr.ends(driver.actions)]
        assert ends == [("s3", "bytes_full"), ("s5", "bytes_full"), ("s7", "bytes_full")]
        assert "1000 (max_bytes), of which priority 1 may fill 800" in hr.outcomes(driver.actions)[1].message
        assert driver.core.outcomes.unfinished_bytes == 1_000
        driver.core.check_invariants()

    def test_frame_that_never_fits_is_too_large_and_not_busy(self) -> None:
        """To wait does not help a frame above what its priority may ever fill."""
        driver = make(max_bytes=1_000, priority_bytes_share=0.4, limits=Limits(priority_levels=3))

        actions = driver.push(hr.frame("a", 0, nbytes=700), hr.frame("b", 0, nbytes=700, priority=1))

        assert hr.ends(actions) == [("a", 0, "rejected", "frame_too_large")]
        driver.core.check_invariants()

    def test_one_level_has_no_reserve(self) -> None:
        """Without priorities everything is for everybody."""
        driver = make(max_bytes=1_000, priority_bytes_share=0.5, limits=Limits(priority_levels=1))

        assert driver.push(hr.frame("a", 0, nbytes=900)) == []


class TestWontMakeIt:
    """A frame that would be done too late is refused at the door."""

    @pytest.mark.parametrize(
        ("waiting", "priority", "ttl_ms", "late_ms"),
        [
            pytest.param(0, 0, 20, None, id="behind the running batch, just in time"),
            pytest.param(0, 0, 19, 10, id="behind the running batch, too late"),
            pytest.param(1, 0, 20, None, id="fills up a batch"),
            pytest.param(2, 0, 20, 10, id="one batch ahead"),
            pytest.param(2, 0, 30, None, id="one batch ahead, with time"),
            pytest.param(9, 0, 40, 20, id="four batches ahead"),
            pytest.param(9, 1, 20, None, id="overtakes them all"),
        ],
    )
    def test_prediction(self, waiting: int, priority: int, ttl_ms: int, late_ms: int | None) -> None:
        """One worker, 10 ms a batch of two, one batch running: what is ahead decides, in whole batches."""
        driver = make()
        driver.join_worker(slots=1)
        driver.push(hr.frame("r", 0), hr.frame("r", 1))
        driver.tick()
        driver.push(*[hr.frame(f"s{n}", 0, ttl_ms=60_000) for n in range(waiting)])
        # A later deadline than the waiting ones' is behind them, an earlier one is not.
        for number in range(waiting):
            record = driver.core.streams.by_name[f"s{number}"].order[0]
            driver.core.models.classes[0].queue.remove(record)
            record.deadline_ns = driver.now_ns
            driver.core.models.classes[0].queue.push(record, driver.now_ns)

        actions = driver.push(hr.frame("x", 0, priority=priority, ttl_ms=ttl_ms))

        if late_ms is None:
            assert actions == []
        else:
            assert hr.ends(actions) == [("x", 0, "rejected", "wont_make_it")]
            assert f"lives for {ttl_ms} ms" in hr.outcomes(actions)[0].message
            assert hr.rejects(actions)[0].retry_after_ms == late_ms

    def test_earlier_deadline_passes_later_ones_and_those_without(self) -> None:
        """Earliest deadline first: only what would be taken before it counts."""
        driver = make()
        driver.join_worker(slots=1)
        driver.push(hr.frame("r", 0), hr.frame("r", 1))
        driver.tick()
        driver.push(*[hr.frame(f"s{n}", 0, ttl_ms=1_000 if n % 2 else None) for n in range(10)])

        assert driver.push(hr.frame("x", 0, ttl_ms=20)) == []

    def test_other_classes_of_the_same_workers_count(self) -> None:
        """Ten frames of the other class with earlier deadlines take 50 ms of the one worker."""
        driver = make()
        driver.join_worker(slots=1)
        driver.push(hr.frame("r", 0), hr.frame("r", 1))
        driver.tick()
        driver.push(*[hr.frame(f"s{n}", 0, size=200, ttl_ms=69 + n) for n in range(10)])

        late = driver.push(hr.frame("x", 0, ttl_ms=69 + 10 - 10))
        late += driver.push(hr.frame("y", 0, ttl_ms=100))

        assert hr.ends(late) == []
        assert hr.ends(driver.push(hr.frame("z", 0, ttl_ms=79 - 10 + 9))) == []

    def test_twice_the_workers_take_half_the_time(self) -> None:
        """20 frames ahead in batches of two: 100 ms with one worker, 50 ms with two."""
        verdicts = []
        for workers in (1, 2):
            driver = make()
            for number in range(workers):
                driver.join_worker(f"w{number}".encode(), slots=1)
            driver.push(*[hr.frame(f"r{n}", 0) for n in range(2 * workers)])
            driver.tick()
            driver.push(*[hr.frame(f"s{n}", 0, priority=1) for n in range(20)])
            actions = driver.push(hr.frame("x", 0, ttl_ms=75))
            verdicts.append([code for *_, code in hr.ends(actions)])

        assert verdicts == [["wont_make_it"], []]

    @pytest.mark.parametrize("case", ["no worker", "no profile", "idle worker", "every worker hangs", "off"])
    def test_what_is_not_known_is_not_refused(self, case: str) -> None:
        """Nobody is refused on a guess; an idle worker tries whatever is predicted, since only runs correct a
        prediction; and the check can be switched off."""
        driver = make(check_deadlines=case != "off")
        if case == "no profile":
            spec = driver.settings.models[0].spec
            classes = tuple(one.__class__(one.size_class, ()) for one in hr.profile(spec).classes)
            driver.join_worker(slots=1, profiles=[ModelProfile(spec.name, spec.version, classes, ())])
        elif case != "no worker":
            driver.join_worker(slots=1, per_batch_ms=1_000)
        if case != "idle worker":
            driver.push(hr.frame("r", 0))
            driver.tick()
        if case == "every worker hangs":
            driver.now_ns += 10_000 * hr.MS

        assert driver.push(hr.frame("x", 0, ttl_ms=5)) == []
        driver.core.check_invariants()


class TestTooLateToRun:
    """Frames that were admitted and can't be done in time any more when their turn has come."""

    def test_late_frames_make_way_for_those_in_time(self) -> None:
        """They end as expired when they are taken; the batch is filled with others."""
        driver = make(check_deadlines=True)
        driver.join_worker(slots=1)
        driver.push(hr.frame("r", 0), hr.frame("r", 1))
        running = hr.batches(driver.tick())[0]
        driver.push(hr.frame("a", 0, ttl_ms=25), hr.frame("b", 0, ttl_ms=30), hr.frame("c", 0))
        driver.push(hr.frame("d", 0))
        driver.now_ns += 18 * hr.MS
        driver.done(running)

        actions = driver.tick()

        assert hr.ends(actions) == [("a", 0, "expired", "deadline")]
        assert "3.0 ms after its time to live" in hr.outcomes(actions)[0].message
        assert [one.stream for one in hr.batches(actions)[0].batch.frames] == ["b", "c"]
        assert driver.core.models.classes[0].expired_count == 1
        driver.core.check_invariants()

    def test_last_ones_are_tried(self) -> None:
        """If nothing else waits, the worker would only be idle: the prediction may be wrong."""
        driver = make()
        driver.push(hr.frame("a", 0, ttl_ms=5), hr.frame("b", 0, ttl_ms=5))
        driver.join_worker(slots=1, per_batch_ms=1_000)

        sent = hr.batches(driver.tick())

        assert [len(one.batch.frames) for one in sent] == [2]
        assert driver.core.account.expired == 0
        driver.core.check_invariants()

    def test_it_can_be_switched_off(self) -> None:
        """Then a frame runs as long as its deadline has not come."""
        driver = make(check_deadlines=False)
        driver.join_worker(slots=1, per_batch_ms=1_000)
        driver.push(hr.frame("a", 0, ttl_ms=5), hr.frame("b", 0), hr.frame("c", 0))

        assert [one.stream for one in hr.batches(driver.tick())[0].batch.frames] == ["a", "b"]
        driver.core.check_invariants()


class TestRetry:
    """Every refusal that load causes says when to come again."""

    @pytest.mark.parametrize(
        ("workers", "per_batch_ms", "retry_ms"),
        [(0, 10, 1_000), (1, 80, 80), (2, 80, 40), (1, 1, 10), (1, 60_000, 10_000)],
        ids=["unknown", "one", "two", "at least", "at most"],
    )
    def test_time_of_one_batch(self, workers: int, per_batch_ms: float, retry_ms: int) -> None:
        """All workers together run one batch of the class in that time; kept within bounds."""
        driver = make(policy=ClassPolicy(max_queue_size=1), credits_per_producer=3)
        for number in range(workers):
            driver.join_worker(f"w{number}".encode(), per_batch_ms=per_batch_ms)
        driver.join_producer()

        actions = driver.push(*[hr.frame(seq=seq) for seq in range(3)])

        assert [one.retry_after_ms for one in hr.rejects(actions)] == [retry_ms] * 2

    def test_credit_exceeded_follows_the_class_of_the_frame(self) -> None:
        """The sender must wait for one of its frames; a frame that no class takes says the least."""
        driver = make(credits_per_producer=1)
        driver.join_worker(per_batch_ms=70)
        driver.join_producer()

        actions = driver.push(hr.frame(seq=0), hr.frame(seq=1), hr.frame(seq=2, model="nope"))

        assert [(one.code, one.retry_after_ms) for one in hr.rejects(actions)] == [
            ("credit_exceeded", 70),
            ("credit_exceeded", 10),
        ]
        driver.core.check_invariants()
