"""Which size class goes first, by urgency and by efficiency; on a simulated clock."""

from __future__ import annotations

import hr_core as hr
import pytest

from headrace.broker.class_choice import most_urgent
from headrace.broker.settings import ClassPolicy
from headrace.protocol.messages import SizeClassSpec

SMALL = SizeClassSpec("small", 64, 64, max_batch_size=4)
LARGE = SizeClassSpec("large", 256, 256, max_batch_size=4)

POLICIES = {
    "adaptive": ClassPolicy(),
    "deferred": ClassPolicy("deferred"),
    "window": ClassPolicy("window"),
    "window auto": ClassPolicy("window", "auto", objective_ms=20),
    "promote": ClassPolicy(promote=True),
}


def make(policy: ClassPolicy | None = None, **changes: object) -> hr.CoreDriver:
    """A core with two classes, one worker of one slot, 10 ms a batch; the worker is busy for 10 ms."""
    driver = hr.CoreDriver(
        hr.make_settings(hr.make_spec(classes=(SMALL, LARGE)), policy=policy or ClassPolicy(), **changes)
    )
    driver.join_worker(slots=1)
    driver.push(hr.frame("first", 0))
    driver.tick()
    return driver


def next_batch(driver: hr.CoreDriver) -> tuple[str, int]:
    """Let the running batch end; return class and size of the one sent after it."""
    driver.now_ns += 5 * hr.MS
    driver.done(hr.batches(driver.actions)[-1])
    sent = hr.batches(driver.tick())
    driver.core.check_invariants()
    return sent[0].batch.size_class, len(sent[0].batch.frames)


def push_both(driver: hr.CoreDriver, *, full_ms: int = 5, **options: object) -> None:
    """One small frame, then four large ones some milliseconds later."""
    driver.push(hr.frame("old", 0, **options))  # type: ignore[arg-type]
    driver.now_ns += full_ms * hr.MS
    driver.push(*[hr.frame(f"s{n}", 0, size=100) for n in range(4)])


@pytest.mark.parametrize("policy", ["adaptive", "deferred", "window"])
def test_full_batch_goes_before_an_older_partial_one(policy: str) -> None:
    """The partial one still meets its objective after it, and becomes fuller."""
    driver = make(POLICIES[policy])

    push_both(driver)

    assert next_batch(driver) == ("large", 4)
    assert next_batch(driver) == ("small", 1)


def test_partial_batch_that_would_be_late_goes_first() -> None:
    """Objective 50 ms: after 35 ms there is no time for a batch of another class."""
    driver = make()

    push_both(driver, full_ms=35)

    assert next_batch(driver) == ("small", 1)


def test_deadline_counts_as_the_objective_does() -> None:
    """A frame that must be done in 22 ms can't follow a batch of 10 ms that begins in 10."""
    driver = make()

    push_both(driver, ttl_ms=22)

    assert next_batch(driver) == ("small", 1)


def test_higher_priority_goes_before_a_full_batch() -> None:
    """Efficiency decides among equals only."""
    driver = make()

    push_both(driver, priority=1)

    assert next_batch(driver) == ("small", 1)


def test_older_class_that_the_worker_does_not_run_does_not_hold_it_up() -> None:
    """The full batch takes nothing from it."""
    driver = hr.CoreDriver(hr.make_settings(hr.make_spec(classes=(SMALL, LARGE))))
    driver.join_worker(b"w1", profiles=[hr.profile(hr.make_spec(classes=(SMALL,)))], slots=2)
    driver.join_worker(b"w2", profiles=[hr.profile(hr.make_spec(classes=(LARGE,)))], slots=2)
    driver.push(hr.frame("a", 0), hr.frame("b", 0, size=100))
    driver.tick()
    driver.push(hr.frame("c", 0))
    driver.now_ns += hr.MS
    driver.push(*[hr.frame(f"d{n}", 0, size=100) for n in range(4)])

    sent = hr.batches(driver.tick())

    assert [(one.peer, len(one.batch.frames)) for one in sent] == [(b"w2", 4)]
    driver.core.check_invariants()


def test_nothing_is_served_where_nothing_is_ready() -> None:
    """No class, no batch."""
    assert most_urgent([], 0) is None


class TestGivingWay:
    """The deferred policy between classes."""

    @staticmethod
    def busy() -> hr.CoreDriver:
        """A core that has seen both classes bring a frame every 10 ms for a while."""
        driver = make(POLICIES["deferred"])
        for seq in range(30):
            driver.push(hr.frame("a", seq), hr.frame("b", seq, size=100))
            driver.tick()
            driver.now_ns += 10 * hr.MS
            driver.done(hr.batches(driver.actions)[-1])
        while driver.core.account.unfinished:
            driver.tick()
            driver.now_ns += 10 * hr.MS
            driver.done(hr.batches(driver.actions)[-1])
        driver.push(hr.frame("a", 30))
        driver.tick()
        return driver

    def test_class_that_has_time_goes_after_one_that_has_none(self) -> None:
        """The older frame has 50 ms, the younger one a deadline."""
        driver = self.busy()
        driver.push(hr.frame("a", 31))
        driver.now_ns += 2 * hr.MS
        driver.push(hr.frame("b", 31, size=100, ttl_ms=30))

        assert next_batch(driver) == ("large", 1)
        assert next_batch(driver) == ("small", 1)

    def test_worker_does_not_idle_while_all_give_way(self) -> None:
        """Then the oldest goes."""
        driver = self.busy()
        driver.push(hr.frame("b", 31, size=100))
        driver.now_ns += 2 * hr.MS
        driver.push(hr.frame("a", 31))

        assert next_batch(driver) == ("large", 1)

    def test_window_is_shown(self) -> None:
        """Whoever looks sees how long a class may give way."""
        driver = self.busy()
        driver.push(hr.frame("b", 31, size=100), hr.frame("a", 31))
        driver.now_ns += 5 * hr.MS
        driver.done(hr.batches(driver.actions)[-1])
        driver.tick()

        classes = driver.core.status(driver.now_ns)["classes"]
        assert isinstance(classes, list)
        shown = {one["size_class"]: one["window_ms"] for one in classes if isinstance(one, dict)}
        # The objective, less a batch of its own, one of the other class, and the way, which is not known.
        assert 20 <= max(float(str(value)) for value in shown.values()) <= 30


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("size", [32, 100], ids=["same class", "other class"])
def test_fresh_urgent_frame_is_in_the_next_batch(policy: ClassPolicy, size: int) -> None:
    """BAT-08: under every policy, with both classes full of older frames."""
    driver = make(policy)
    driver.push(*[hr.frame(f"s{n}", 0) for n in range(50)])
    driver.push(*[hr.frame(f"t{n}", 0, size=100) for n in range(50)])
    driver.wait(5)

    driver.push(hr.frame("urgent", 0, priority=5, size=size))
    driver.done(hr.batches(driver.actions)[-1])
    sent = hr.batches(driver.wait(30))

    assert "urgent" in [one.stream for one in sent[0].batch.frames]
    driver.core.check_invariants()
