"""When a batch closes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.broker.batching import (
    IDLE_LEAD_NS,
    JUDGED_FRAMES,
    AdaptivePolicy,
    ClassView,
    CloseNow,
    Decision,
    DeferredPolicy,
    GiveWay,
    LookAgain,
    WindowPolicy,
    make_policy,
)
from headrace.broker.settings import ClassPolicy

MS = 1_000_000


def view(
    count: int = 3,
    *,
    oldest_ns: int = 0,
    idle: bool = True,
    slot: bool = True,
    next_idle_ns: int | None = None,
) -> ClassView:
    return ClassView(
        waiting_count=count,
        oldest_ns=oldest_ns,
        max_batch_size=8,
        has_idle_worker=idle,
        has_free_slot=slot,
        next_idle_ns=next_idle_ns,
    )


@pytest.mark.parametrize(
    ("policy", "seen", "now_ns", "answer"),
    [
        ("adaptive", view(3), 0, CloseNow(3)),
        ("adaptive", view(20), 0, CloseNow(8)),
        ("adaptive", view(20, idle=False), 0, CloseNow(8)),
        ("adaptive", view(3, idle=False), 0, LookAgain(None)),
        ("adaptive", view(3, idle=False, next_idle_ns=50 * MS), 0, LookAgain(50 * MS - IDLE_LEAD_NS)),
        ("adaptive", view(3, idle=False, next_idle_ns=50 * MS), 49 * MS, CloseNow(3)),
        ("adaptive", view(20, idle=False, slot=False), 0, LookAgain(None)),
        ("deferred", view(3), 0, CloseNow(3)),
        ("deferred", view(20, idle=False), 0, CloseNow(8)),
        ("deferred", view(3, idle=False, next_idle_ns=50 * MS), 0, LookAgain(50 * MS - IDLE_LEAD_NS)),
        ("deferred", view(20, idle=False, slot=False), 0, LookAgain(None)),
        ("window", view(3), 4 * MS, LookAgain(5 * MS)),
        ("window", view(3), 5 * MS, CloseNow(3)),
        ("window", view(8), 0, CloseNow(8)),
        ("window", view(8, idle=False), 0, CloseNow(8)),
        ("window", view(3, idle=False, next_idle_ns=50 * MS), 5 * MS, LookAgain(50 * MS - IDLE_LEAD_NS)),
        ("window", view(3, idle=False), 5 * MS, LookAgain(None)),
        ("window", view(3, idle=False, slot=False), 9 * MS, LookAgain(None)),
    ],
    ids=[
        "adaptive-idle",
        "adaptive-never-over-the-limit",
        "adaptive-full-batch-prefetched",
        "adaptive-grows-while-busy",
        "adaptive-looks-again-before-idle",
        "adaptive-idle-soon-counts-as-idle",
        "adaptive-no-slot",
        "deferred-idle-and-alone",
        "deferred-full-batch-prefetched",
        "deferred-grows-while-busy",
        "deferred-no-slot",
        "window-waits",
        "window-due",
        "window-full",
        "window-full-batch-prefetched",
        "window-due-but-busy",
        "window-due-busy-unknown",
        "window-no-slot",
    ],
)
def test_decides(policy: str, seen: ClassView, now_ns: int, answer: Decision) -> None:
    """BAT-07, BAT-10, BAT-15: full closes at the limit, a partial batch only for an idle worker."""
    delay_ms = 5 if policy == "window" else 0
    decided = make_policy(ClassPolicy(policy=policy, max_queue_delay_ms=delay_ms)).decide(seen, now_ns)

    assert decided == answer


def test_an_unknown_policy_is_named() -> None:
    """The core never guesses a policy."""
    with pytest.raises(ValueError, match="'magic'"):
        make_policy(ClassPolicy(policy="magic"))


class TestAutoWindow:
    """``max_queue_delay_ms = "auto"``."""

    @pytest.mark.parametrize(
        ("full_ms", "window_ms"),
        [(4, 10), (20, 10), (25, 0), (100, 0)],
        ids=["2.5 runs", "what the objective leaves", "two runs fill it", "a run exceeds it"],
    )
    def test_window_follows_the_run_time_and_the_objective(self, full_ms: int, window_ms: int) -> None:
        """2.5 times the measured run; the running batch, the window and the own run fit into 50 ms."""
        policy = WindowPolicy(None, 50 * MS)
        seen = replace(view(3), full_ns=full_ms * MS)

        answers = [policy.decide(seen, (window_ms + offset) * MS) for offset in (-1, 0)]

        assert answers == [LookAgain(window_ms * MS), CloseNow(3)]
        assert policy.window_ns == window_ms * MS

    def test_window_moves_with_the_measured_run_time(self) -> None:
        """A device that becomes slower gets a longer window."""
        policy = make_policy(ClassPolicy("window", "auto"))

        for full_ms in (2, 6):
            policy.decide(replace(view(3), full_ns=full_ms * MS), 0)
            assert policy.window_ns == full_ms * 2.5 * MS


class TestAdaptive:
    """Size and wait follow the latency and the workers' idleness."""

    @staticmethod
    def show(
        policy: AdaptivePolicy, *, late: int, idle_share: float, batch: int = 8, ran_ms: int = 30
    ) -> None:
        """Let the policy observe one judgement's worth of batches; ``late`` of the frames are late."""
        batches_count = -(-JUDGED_FRAMES // batch)
        for index in range(batches_count):
            late_here = min(late, batch)
            late -= late_here
            latencies_ns = [60 * MS] * late_here + [10 * MS] * (batch - late_here)
            policy.observe(latencies_ns, ran_ms * MS, found_idle=index < idle_share * batches_count)

    @pytest.mark.parametrize(
        ("late", "idle_share", "ran_ms", "size"),
        [(3, 0.2, 30, 5), (2, 0.2, 30, 8), (3, 0.2, 20, 8), (3, 0.0, 30, 8)],
        ids=["late", "just in time", "late, but not by the batch", "late and saturated"],
    )
    def test_size_shrinks_only_where_that_helps(
        self, late: int, idle_share: float, ran_ms: int, size: int
    ) -> None:
        """More than 1 % late, workers with time to spare, and two runs longer than the objective."""
        policy = AdaptivePolicy(0, 50 * MS, 8)

        self.show(policy, late=late, idle_share=idle_share, batch=7, ran_ms=ran_ms)

        assert policy.size_limit == size
        assert policy.decide(view(20), 0) == CloseNow(size)

    def test_size_grows_again(self) -> None:
        """By one while all is in time, twofold while late and saturated, never beyond the limit."""
        policy = AdaptivePolicy(0, 50 * MS, 8)
        sizes = []

        for late, idle_share, batch in (
            (200, 0.2, 7),
            (200, 0.2, 4),
            (0, 0.2, 3),
            (200, 0.0, 3),
            (200, 0.0, 8),
        ):
            self.show(policy, late=late, idle_share=idle_share, batch=batch)
            sizes.append(policy.size_limit)

        assert sizes == [5, 3, 4, 8, 8]

    def test_size_grows_when_batches_are_full_though_a_worker_of_one_slot_is_always_idle(self) -> None:
        """Small batches that are late for want of throughput must not stay small: that would never end."""
        policy = AdaptivePolicy(0, 50 * MS, 8)
        self.show(policy, late=200, idle_share=1.0, batch=4)
        assert policy.size_limit == 3

        self.show(policy, late=200, idle_share=1.0, batch=3)
        self.show(policy, late=200, idle_share=1.0, batch=6)

        assert policy.size_limit == 8

    def test_size_stays_where_smaller_batches_take_as_long(self) -> None:
        """A fixed cost beyond the objective: smaller batches would only cost throughput."""
        policy = AdaptivePolicy(0, 50 * MS, 8)

        for batch in (2, 6) * JUDGED_FRAMES:
            policy.observe([70 * MS] * batch, 60 * MS, found_idle=True)

        assert policy.size_limit == 8

    def test_smaller_batches_seen_long_ago_are_remembered(self) -> None:
        """One frame at the start cost as much as eight: half a load must not end in expiry."""
        policy = AdaptivePolicy(0, 50 * MS, 8)
        policy.observe([60 * MS], 60 * MS, found_idle=True)

        for _ in range(5):
            self.show(policy, late=200, idle_share=0.5, batch=4, ran_ms=60)
            assert policy.size_limit == 8

        policy.observe([10 * MS], 10 * MS, found_idle=True)
        self.show(policy, late=200, idle_share=0.5, batch=4, ran_ms=60)
        assert policy.size_limit == 3

    def test_size_never_falls_below_one(self) -> None:
        """A model that can't make its objective is still run."""
        policy = AdaptivePolicy(0, 50 * MS, 2)

        for _ in range(20):
            self.show(policy, late=200, idle_share=0.2, batch=1, ran_ms=100)
            assert policy.size_limit in {1, 2}

    def test_wait_is_learned_up_to_its_cap(self) -> None:
        """In steps while all is in time and the workers are busy; halved when late; none when they idle."""
        policy = AdaptivePolicy(8 * MS, 50 * MS, 8)
        waits = []

        for late, idle_share in ((0, 0.2), (0, 0.2), (200, 0.2), (200, 0.0), (0, 0.2), (0, 0.8)):
            self.show(policy, late=late, idle_share=idle_share)
            waits.append(policy.window_ns / MS)

        assert waits == [1, 2, 1, 0.5, 1.5, 0]
        assert policy.size_limit == 8

    def test_short_wait_ends_at_nothing(self) -> None:
        """Halving does not go on for ever."""
        policy = AdaptivePolicy(MS, 50 * MS, 8)
        self.show(policy, late=0, idle_share=0.2)

        self.show(policy, late=200, idle_share=0.2)

        assert policy.window_ns == 0

    def test_wait_is_halved_before_the_size_shrinks(self) -> None:
        """Late with time to spare: frames that waited less come earlier at no cost."""
        policy = AdaptivePolicy(8 * MS, 50 * MS, 8)
        for _ in range(4):
            self.show(policy, late=0, idle_share=0.2, batch=4)
        assert policy.window_ns == 4 * MS

        self.show(policy, late=200, idle_share=0.2, batch=4)

        assert policy.window_ns == 2 * MS
        assert policy.size_limit == 8

    def test_frame_waits_for_an_idle_worker_no_longer_than_learned(self) -> None:
        """And not at all while there is nothing learned."""
        policy = AdaptivePolicy(8 * MS, 50 * MS, 8)
        before = policy.decide(view(3), 0)
        self.show(policy, late=0, idle_share=0.2)

        assert before == CloseNow(3)
        assert policy.decide(view(3), 0) == LookAgain(MS)
        assert policy.decide(view(3), MS) == CloseNow(3)

    def test_auto_caps_the_wait_by_the_run_time(self) -> None:
        """As the window of the policy of that name."""
        policy = AdaptivePolicy(None, 50 * MS, 8)
        policy.decide(replace(view(3), full_ns=4 * MS), 0)

        for _ in range(20):
            self.show(policy, late=0, idle_share=0.2)

        assert policy.window_ns == 10 * MS


class TestDeferred:
    """The latest moment that still does."""

    @staticmethod
    def rivals(count: int = 3, *, due_ns: int | None = None, frames_per_ms: float = 1.0) -> ClassView:
        """A class that has company: full batches take 10 ms, those of the others 5 ms."""
        return replace(
            view(count),
            full_ns=10 * MS,
            run_ns=4 * MS,
            rivals_ns=5 * MS,
            due_ns=due_ns,
            frames_per_ns=frames_per_ms / MS,
        )

    @pytest.mark.parametrize(
        ("seen", "latest_ms"),
        [(rivals(), 33), (rivals(due_ns=40 * MS), 23), (rivals(due_ns=90 * MS), 33)],
        ids=["objective", "deadline", "deadline beyond the objective"],
    )
    def test_gives_way_until_the_latest_moment(self, seen: ClassView, latest_ms: int) -> None:
        """50 ms or the deadline, less the run of a full batch, one of the others', and the way there."""
        policy = DeferredPolicy(50 * MS)

        early, late = (policy.decide(seen, at_ms * MS) for at_ms in (latest_ms - 2, latest_ms))

        assert early == GiveWay(3, latest_ms * MS)
        assert late == CloseNow(3)
        assert policy.window_ns == latest_ms * MS

    def test_waits_for_nothing_that_will_not_come(self) -> None:
        """Less than one frame is expected before the latest moment."""
        policy = DeferredPolicy(50 * MS)

        assert policy.decide(self.rivals(frames_per_ms=0.01), 0) == CloseNow(3)
        assert policy.decide(self.rivals(frames_per_ms=0.0), 0) == CloseNow(3)

    def test_window_is_none_without_rivals(self) -> None:
        """An idle worker is not kept waiting."""
        policy = make_policy(ClassPolicy("deferred"))

        assert policy.decide(replace(self.rivals(), rivals_ns=None), 0) == CloseNow(3)
        assert policy.window_ns == 0


@pytest.mark.parametrize("policy", ["window", "deferred"])
def test_policies_that_do_not_learn_stay_as_they_are(policy: str) -> None:
    """Whatever they observe."""
    made = make_policy(ClassPolicy(policy, 5))
    before = made.decide(view(3), 0)

    for _ in range(JUDGED_FRAMES):
        made.observe([60 * MS] * 8, 30 * MS, found_idle=False)

    assert made.decide(view(3), 0) == before
    assert made.size_limit is None
    assert not made.is_learning
