"""Dispatch: which class, which worker, how many, and when; on a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import ceil

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import worker_pool
from headrace.broker.batching import ClassView, LookAgain
from headrace.broker.settings import ClassPolicy
from headrace.protocol.messages import Frame, Keep, SizeClassSpec


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """A core whose invariants hold at the end."""
    driver = hr.CoreDriver()
    yield driver
    driver.core.check_invariants()


def one_class(limit: int) -> SizeClassSpec:
    """The only class of a model, with a batch limit."""
    return SizeClassSpec("only", 64, 64, max_batch_size=limit)


def make(limit: int = 8, policy: ClassPolicy | None = None, **changes: object) -> hr.CoreDriver:
    """A core with one class."""
    spec = hr.make_spec(classes=(one_class(limit),))
    return hr.CoreDriver(hr.make_settings(spec, policy=policy, **changes))


class Emulation:
    """Workers that take a fixed time per batch, in one slot after the other, on the driver's clock."""

    def __init__(self, driver: hr.CoreDriver, run_ms: dict[bytes, float]) -> None:
        self.driver = driver
        self.run_ms = run_ms
        self.free_at_ns = dict.fromkeys(run_ms, driver.now_ns)
        self.running: list[tuple[int, int, act.SendBatch]] = []
        self.sent: list[tuple[int, act.SendBatch]] = []

    def take(self, actions: list[act.Action]) -> None:
        """Workers receive their batches."""
        for sent in hr.batches(actions):
            self.sent.append((self.driver.now_ns, sent))
            start_ns = max(self.free_at_ns[sent.peer], self.driver.now_ns)
            self.free_at_ns[sent.peer] = start_ns + int(self.run_ms[sent.peer] * hr.MS)
            heappush(self.running, (self.free_at_ns[sent.peer], sent.batch.batch, sent))

    def until(self, end_ns: int) -> None:
        """Run to a time: batches end when they end, the core wakes when it asks to."""
        driver = self.driver
        self.take(driver.tick())
        while True:
            times = [end_ns]
            if self.running:
                times.append(self.running[0][0])
            wakeup_ns = driver.core.next_wakeup_ns()
            if wakeup_ns is not None:
                times.append(wakeup_ns)
            driver.now_ns = max(driver.now_ns, min(times))
            while self.running and self.running[0][0] <= driver.now_ns:
                _, _, sent = heappop(self.running)
                driver.hear(*self.run_ms)
                driver.done(sent, ran_ms=self.run_ms[sent.peer])
            self.take(driver.tick())
            if driver.now_ns >= end_ns:
                return

    def sizes(self) -> list[int]:
        """Frames of each batch sent so far."""
        return [len(sent.batch.frames) for _, sent in self.sent]


class TestBatchSizes:
    """How many frames go together."""

    @pytest.mark.parametrize("limit", [1, 2, 7, 8])
    def test_limit_is_reached_exactly_and_never_passed(self, limit: int) -> None:
        """BAT-10: a burst of 100 from 10 streams: full batches, never one above the limit."""
        driver = make(limit)
        driver.join_worker(slots=1)
        emulation = Emulation(driver, {b"w1": 10})

        driver.push(*[hr.frame(f"s{n % 10}", n // 10) for n in range(100)])
        emulation.until(driver.now_ns + 2_000 * hr.MS)

        assert max(emulation.sizes()) == limit
        assert emulation.sizes() == [limit] * (100 // limit) + [100 % limit] * (100 % limit > 0)
        assert driver.core.account.ok == 100
        driver.core.check_invariants()

    @pytest.mark.parametrize("buckets_to", [1, 4])
    def test_worker_limit_holds_too(self, buckets_to: int) -> None:
        """ORT-07: a worker whose largest bucket is smaller than the class gets batches of that."""
        driver = make(8)
        driver.join_worker(slots=1, limit=buckets_to)

        driver.push(*[hr.frame(f"s{n}", 0) for n in range(20)])

        assert len(hr.batches(driver.tick())[0].batch.frames) == buckets_to
        driver.core.check_invariants()

    def test_frames_that_came_during_a_run_go_together(self) -> None:
        """BAT-07: no wait configured, one frame, four more during its run: batches of 1 and 4."""
        driver = make(8)
        driver.join_worker(per_batch_ms=500)
        emulation = Emulation(driver, {b"w1": 500})

        driver.push(hr.frame(seq=0))
        emulation.until(driver.now_ns + 50 * hr.MS)
        driver.push(*[hr.frame(seq=seq) for seq in range(1, 5)])
        emulation.until(driver.now_ns + 2_000 * hr.MS)

        assert emulation.sizes() == [1, 4]
        driver.core.check_invariants()

    def test_last_frames_of_a_source_wait_for_the_window_only(self) -> None:
        """BAT-15: limit 8, window 20 ms, 20 frames: the last 4 go out at 20 ms."""
        driver = make(8, ClassPolicy("window", 20))
        driver.join_worker()
        driver.join_worker(b"w2")
        start_ns = driver.now_ns
        emulation = Emulation(driver, {b"w1": 1, b"w2": 1})

        driver.push(*[hr.frame(seq=seq) for seq in range(20)])
        emulation.until(start_ns + 100 * hr.MS)

        assert emulation.sizes() == [8, 8, 4]
        assert (emulation.sent[-1][0] - start_ns) / hr.MS == 20
        driver.core.check_invariants()

    def test_slow_stream_waits_for_the_window_at_most(self) -> None:
        """BAT-15: at one frame a second each waits exactly the window."""
        driver = make(8, ClassPolicy("window", 20))
        driver.join_worker()
        emulation = Emulation(driver, {b"w1": 1})

        for seq in range(3):
            driver.push(hr.frame(seq=seq))
            emulation.until(driver.now_ns + 1_000 * hr.MS)

        waits = [one.timing.batched_us for one in hr.outcomes(driver.actions)]
        assert waits == [20_000] * 3
        driver.core.check_invariants()

    @pytest.mark.parametrize("slots", [1, 2])
    def test_batches_hold_one_class_and_no_class_starves(self, slots: int) -> None:
        """BAT-12: three sizes interleaved, one with ten times the traffic: all done, never mixed."""
        spec = hr.make_spec(
            classes=(
                SizeClassSpec("vga", 480, 640, max_batch_size=8),
                SizeClassSpec("odd", 480, 641, max_batch_size=8),
                SizeClassSpec("hd", 720, 1280, max_batch_size=8),
            )
        )
        driver = hr.CoreDriver(hr.make_settings(spec))
        driver.join_worker(slots=slots)
        emulation = Emulation(driver, {b"w1": 10})
        for n in range(100):
            for width, count in ((640, 10), (641, 1), (1280, 1)):
                height = 720 if width == 1280 else 480
                for k in range(count):
                    one = hr.frame(f"{width}-{k}", n)
                    driver.push(_sized(one, height, width))
            emulation.until(driver.now_ns + 20 * hr.MS)
        emulation.until(driver.now_ns + 3_000 * hr.MS)

        for _, sent in emulation.sent:
            assert len({one.shape for one in sent.batch.frames}) == 1
        waits: dict[str, int] = {}
        for one in hr.outcomes(driver.actions):
            waits[one.size_class] = max(waits.get(one.size_class, 0), one.timing.batched_us or 0)
        assert driver.core.account.ok == 1_200
        assert max(waits["odd"], waits["hd"]) <= 100_000
        driver.core.check_invariants()

    def test_results_belong_to_their_frames(self) -> None:
        """BAT-14: two workers, batches that end out of order: each result is its own frame's."""
        driver = make(4)
        driver.join_worker(b"w1", per_batch_ms=7)
        driver.join_worker(b"w2", per_batch_ms=3)
        emulation = Emulation(driver, {b"w1": 7, b"w2": 3})

        for seq in range(50):
            driver.push(*[hr.frame(f"s{n}", seq) for n in range(20)])
            emulation.until(driver.now_ns + 10 * hr.MS)
        emulation.until(driver.now_ns + 2_000 * hr.MS)

        finished = hr.outcomes(driver.actions)
        assert len(finished) == 1_000
        assert all(one.outputs == one.seq for one in finished)
        driver.core.check_invariants()


def _sized(one: Frame, height: int, width: int) -> Frame:
    return replace(one, shape=(height, width, 3))


class TestDeadlines:
    """Time to live."""

    def test_deadline_is_acted_on_while_every_worker_is_busy(self) -> None:
        """BAT-05: the worker is busy for 10 s; a frame with 1 s to live expires at 1 s and never runs."""
        driver = make(check_deadlines=False)
        driver.join_worker(slots=1, per_batch_ms=10_000)
        driver.push(hr.frame("a", 0))
        driver.tick()
        driver.push(hr.frame("b", 0, ttl_ms=1_000))
        driver.tick()
        start_ns = driver.now_ns

        while not hr.ends(driver.actions):
            driver.now_ns = driver.core.next_wakeup_ns() or 0
            driver.tick()

        assert hr.ends(driver.actions) == [("b", 0, "expired", "deadline")]
        assert driver.now_ns - start_ns == 1_000 * hr.MS
        assert "1000 ms" in hr.outcomes(driver.actions)[0].message
        driver.core.check_invariants()

    @pytest.mark.parametrize("check_deadlines", [False, True], ids=["expire", "refused"])
    def test_frames_that_nobody_waits_for_are_not_run(self, check_deadlines: bool) -> None:
        """BAT-06: 1,000 frames with 200 ms at 20 frames a second: at most 4 and one batch reach the model."""
        driver = make(1, ClassPolicy(max_queue_size=2_000), check_deadlines=check_deadlines)
        driver.join_worker(per_batch_ms=50)
        emulation = Emulation(driver, {b"w1": 50})

        driver.push(*[hr.frame(f"s{n}", 0, ttl_ms=200) for n in range(1_000)])
        emulation.until(driver.now_ns + 5_000 * hr.MS)

        assert sum(emulation.sizes()) <= 5
        account = driver.core.account
        assert account.ok + account.expired + account.rejected == 1_000
        assert (account.rejected > 0) == check_deadlines
        driver.core.check_invariants()

    def test_default_time_to_live_is_for_frames_without_one(self) -> None:
        """``default_timeout_ms`` is a default, not a limit."""
        driver = make(default_timeout_ms=100)

        driver.push(hr.frame("a", 0), hr.frame("b", 0, ttl_ms=500))
        early = driver.wait(100)
        late = driver.wait(400)

        assert hr.ends(early) == [("a", 0, "expired", "deadline")]
        assert hr.ends(late) == [("b", 0, "expired", "deadline")]
        driver.core.check_invariants()

    def test_expired_latest_frame_is_not_superseded_afterwards(self) -> None:
        """Its end was its deadline."""
        driver = make()
        driver.push(hr.frame(seq=0, ttl_ms=10, keep=Keep.LATEST))
        driver.wait(10)

        assert driver.push(hr.frame(seq=1, keep=Keep.LATEST)) == []
        assert driver.core.account.superseded == 0
        driver.core.check_invariants()


class TestPriority:
    """More urgent frames first, and nobody starves."""

    @pytest.mark.parametrize("size", [32, 100], ids=["same class", "other class"])
    def test_urgent_frame_is_in_the_next_batch(self, driver: hr.CoreDriver, size: int) -> None:
        """BAT-08: 200 waiting frames of priority 0, both workers full, one frame of priority 5: it is in
        the next batch dispatched, in its own class or another."""
        driver.join_worker(b"w1")
        driver.join_worker(b"w2")
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(200)])
        held = hr.batches(driver.tick())
        assert len(held) == 4
        driver.wait(5)

        driver.push(hr.frame("urgent", 0, priority=5, size=size))
        assert hr.batches(driver.tick()) == []
        driver.done(held[0])
        driver.done(held[1])
        sent = hr.batches(driver.tick())

        assert "urgent" in [one.stream for one in sent[0].batch.frames]

    @pytest.mark.parametrize("size", [32, 100], ids=["same class", "other class"])
    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize(
        "policy",
        [
            ClassPolicy(max_queue_size=0),
            ClassPolicy("adaptive", "auto", 0),
            ClassPolicy("window", "auto", 0),
            ClassPolicy("deferred", 0, 0),
            ClassPolicy("deferred", 0, 0, objective_ms=5_000),
            ClassPolicy(max_queue_size=0, promote=True),
        ],
        ids=["adaptive", "adaptive auto", "window auto", "deferred", "deferred for long", "promote"],
    )
    def test_frame_never_waits_longer_than_the_ageing_bound(
        self, policy: ClassPolicy, size: int, slots: int
    ) -> None:
        """Must-show 4, BAT-08: under every policy and 90 % load of priority 5 each priority 0 frame is
        dispatched within ageing_ms + ceil((aged before it + 1) / share) / rate, and the slots' batches (see
        queues.py); across classes whole batches count, so it is a batch instead of 1 (see dispatch.py)."""
        small = SizeClassSpec("small", 64, 64, max_batch_size=4)
        large = SizeClassSpec("large", 256, 256, max_batch_size=4)
        driver = hr.CoreDriver(
            hr.make_settings(
                hr.make_spec(classes=(small, large)), policy=policy, ageing_ms=200, ageing_share=0.25
            )
        )
        driver.join_worker(slots=slots)
        emulation = Emulation(driver, {b"w1": 10})
        received_ms: dict[int, float] = {}
        for step in range(300):
            # A batch of 4 takes 10 ms: 3.6 frames of priority 5 in that time are 90 %.
            count = 4 if step % 10 < 6 else 3
            driver.push(*[hr.frame(f"high-{n}", step, priority=5) for n in range(count)])
            if step % 10 < 3:
                received_ms[len(received_ms)] = driver.now_ns / hr.MS
                driver.push(hr.frame("low", len(received_ms) - 1, size=size))
            emulation.until(driver.now_ns + 10 * hr.MS)
        emulation.until(driver.now_ns + 1_000 * hr.MS)

        low = {one.seq: one for one in hr.outcomes(driver.actions) if one.stream == "low"}
        sent_ms = {seq: received_ms[seq] + (low[seq].timing.batched_us or 0) / 1_000 for seq in received_ms}
        assert len(low) == 90
        for seq, at_ms in sent_ms.items():
            aged_ms = received_ms[seq] + 200
            aged_before = sum(sent_ms[earlier] > aged_ms for earlier in range(seq))
            unit_count = 1 if size == 32 else 4
            bound_ms = 200 + ceil((aged_before + unit_count) / 0.25) / (4 / 10) + 10 * (slots + 1)
            assert at_ms - received_ms[seq] <= bound_ms, f"seq {seq}, {aged_before} aged before it"
        driver.core.check_invariants()


class TestWorkers:
    """Who gets the batch."""

    def test_work_goes_to_free_slots_only(self) -> None:
        """SCL-01: 100 jobs of 100 ms, one worker, three more 200 ms later: about 100 x 0.1 / 4 s in all,
        and the first never holds more than its slots."""
        driver = make(1)
        driver.join_worker(b"w1", per_batch_ms=100)
        start_ns = driver.now_ns
        emulation = Emulation(driver, dict.fromkeys((b"w1", b"w2", b"w3", b"w4"), 100.0))
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(100)])
        emulation.until(start_ns + 200 * hr.MS)
        held = len(driver.core.workers.by_peer[b"w1"].in_flight)
        for peer in (b"w2", b"w3", b"w4"):
            driver.join_worker(peer, per_batch_ms=100)

        while driver.core.account.unfinished:
            emulation.until(driver.now_ns + 10 * hr.MS)

        assert held == 2
        assert (driver.now_ns - start_ns) / hr.MS <= 2_800
        driver.core.check_invariants()

    def test_share_follows_speed(self) -> None:
        """SCL-02: 10 ms and 200 ms a batch, 60 % load: shares near 20 to 1, p99 under two slow batches."""
        driver = make(1)
        driver.join_worker(b"fast", per_batch_ms=10)
        driver.join_worker(b"slow", per_batch_ms=200)
        emulation = Emulation(driver, {b"fast": 10, b"slow": 200})
        period_ns = int(1e9 / (105 * 0.6))

        for n in range(2_000):
            driver.push(hr.frame(f"s{n % 50}", n // 50))
            emulation.until(driver.now_ns + period_ns)
        emulation.until(driver.now_ns + 1_000 * hr.MS)

        slow = sum(sent.peer == b"slow" for _, sent in emulation.sent)
        waits = sorted(one.timing.published_us or 0 for one in hr.outcomes(driver.actions))
        assert driver.core.account.ok == 2_000
        assert slow <= 2_000 / 15
        assert waits[int(len(waits) * 0.99)] < 400_000
        driver.core.check_invariants()

    def test_slow_worker_helps_when_the_fast_one_cannot_keep_up(self) -> None:
        """Under overload an idle slow worker is better than a long queue."""
        driver = make(1)
        driver.join_worker(b"fast", per_batch_ms=10, slots=1)
        driver.join_worker(b"slow", per_batch_ms=200, slots=1)

        driver.push(*[hr.frame(f"s{n}", 0) for n in range(100)])
        sent = hr.batches(driver.tick())

        assert [one.peer for one in sent] == [b"fast", b"slow"]
        driver.core.check_invariants()

    def test_slow_worker_steps_in_when_the_fast_one_hangs(self) -> None:
        """A fast worker that is overdue is not waited for."""
        driver = make(1)
        driver.join_worker(b"fast", per_batch_ms=10, slots=1)
        driver.join_worker(b"slow", per_batch_ms=200, slots=1)
        driver.push(hr.frame("a", 0))
        first = hr.batches(driver.tick())
        driver.push(hr.frame("b", 0))

        second = hr.batches(driver.tick())
        later = driver.wait(100)

        assert [one.peer for one in first] == [b"fast"]
        assert second == []
        assert [one.peer for one in hr.batches(later)] == [b"slow"]
        driver.core.check_invariants()

    def test_overdue_worker_gets_no_second_batch(self) -> None:
        """A worker that hangs with a batch and still sends heartbeats is not trusted with another."""
        driver = make(1)
        driver.join_worker(b"w1", slots=2)
        driver.push(hr.frame("a", 0))
        driver.tick()
        driver.wait(200)

        driver.push(hr.frame("b", 0))

        assert hr.batches(driver.tick()) == []
        driver.done(hr.batches(driver.actions)[0])
        assert len(hr.batches(driver.tick())) == 1
        driver.core.check_invariants()

    def test_full_batch_may_wait_in_a_prefetch_slot_and_a_partial_one_may_not(self) -> None:
        """A partial batch grows until a worker is idle, or nearly so."""
        driver = make(4)
        driver.join_worker(b"w1", slots=2)
        driver.push(*[hr.frame(f"s{n}", 0) for n in range(4)])
        driver.tick()
        driver.push(*[hr.frame(f"t{n}", 0) for n in range(3)])
        partial = hr.batches(driver.tick())
        wakeup_ns = driver.core.next_wakeup_ns()
        driver.push(hr.frame("t3", 0))
        full = hr.batches(driver.tick())

        assert partial == []
        assert wakeup_ns == driver.now_ns + 8 * hr.MS
        assert [len(one.batch.frames) for one in full] == [4]
        driver.core.check_invariants()

    def test_learned_speed_moves_the_choice(self) -> None:
        """A worker that turns out slower than its profile is no longer the first choice."""
        driver = make(1)
        driver.join_worker(b"w1", per_batch_ms=9, slots=1)
        driver.join_worker(b"w2", per_batch_ms=10, slots=1)
        for seq in range(10):
            driver.push(hr.frame(seq=seq))
            sent = hr.batches(driver.tick())[0]
            driver.now_ns += 30 * hr.MS
            driver.done(sent, ran_ms=30 if sent.peer == b"w1" else 10)

        assert [one.worker for one in hr.outcomes(driver.actions)] == ["w1"] + ["w2"] * 9
        driver.core.check_invariants()

    def test_worker_serves_only_what_it_described(self, driver: hr.CoreDriver) -> None:
        """A frame of a class that no worker runs waits; the worker's own class goes on."""
        profile = hr.profile(hr.make_spec(classes=(hr.SMALL,)))
        driver.join_worker(profiles=[profile])

        driver.push(hr.frame("a", 0, size=100), hr.frame("b", 0))
        sent = hr.batches(driver.tick())

        assert [one.batch.size_class for one in sent] == ["small"]

    def test_growing_batch_is_not_forced_onto_a_worker_that_cannot_run_it(
        self, driver: hr.CoreDriver
    ) -> None:
        """An urgent batch that could still grow goes early only where it would lose its slot."""
        driver.join_worker(b"w1", profiles=[hr.profile(hr.make_spec(classes=(hr.SMALL,)))])
        driver.join_worker(b"w2", profiles=[hr.profile(hr.make_spec(classes=(hr.LARGE,)))])
        driver.push(hr.frame("a", 0, size=100), hr.frame("b", 0, size=100))
        driver.tick()

        driver.push(hr.frame("c", 0, size=100, priority=5), hr.frame("d", 0))
        sent = hr.batches(driver.tick())

        assert [(one.peer, one.batch.size_class) for one in sent] == [(b"w1", "small")]

    @pytest.mark.parametrize("at_ns", [None, 5], ids=["never", "in the past"])
    def test_policy_that_names_no_future_time_does_not_make_the_core_spin(
        self, driver: hr.CoreDriver, at_ns: int | None
    ) -> None:
        """Only an event can then change the answer."""

        class Never:
            is_looking_ahead = is_learning = False
            window_ns, size_limit = 0, None

            def decide(self, _view: ClassView, _now_ns: int) -> LookAgain:
                return LookAgain(at_ns)

            def observe(self, _latencies_ns: Sequence[int], _ran_ns: int, *, found_idle: bool) -> None:
                """It learns nothing."""

        driver.join_worker()
        driver.core.models.classes[0].policy = Never()
        driver.push(hr.frame())
        driver.tick()

        assert driver.core.next_wakeup_ns() == driver.now_ns + 1_000 * hr.MS

    def test_pools_stay_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Entries of workers that changed are swept: a pool's heaps do not grow with the work done."""
        monkeypatch.setattr(worker_pool, "_SWEEP_ABOVE", 8)
        driver = make(1)
        driver.join_worker(b"w1", slots=1, per_batch_ms=1)
        driver.join_worker(b"w2", slots=2, per_batch_ms=1)
        emulation = Emulation(driver, {b"w1": 1, b"w2": 1})

        for seq in range(300):
            driver.push(hr.frame("a", seq), hr.frame("b", seq), hr.frame("c", seq))
            emulation.until(driver.now_ns + 2 * hr.MS)

        pool = driver.core.dispatcher.pools.of(driver.core.models.classes[0])
        assert max(len(heap) for heap in (pool._idle, pool._open, pool._busy)) <= 10
        driver.core.check_invariants()


def test_batch_message_and_order_of_actions(driver: hr.CoreDriver) -> None:
    """One frame, one worker: exactly these actions, in this order."""
    driver.join_producer()
    driver.join_worker()
    one = hr.frame()

    admitted = driver.push(one)
    ticked = driver.tick()
    driver.now_ns += 10 * hr.MS
    done = driver.done(hr.batches(ticked)[0])

    assert admitted == []
    assert [type(action) for action in ticked] == [act.SendBatch]
    batch = hr.batches(ticked)[0].batch
    assert (batch.batch, batch.model, batch.version, batch.size_class) == (1, "mean", "1", "small")
    assert batch.frames == (one,)
    assert [type(action) for action in done] == [act.PublishOutcome, act.GrantCredit]
    assert driver.tick() == []
