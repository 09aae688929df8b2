"""Frames of a small class in a large one's batch."""

from __future__ import annotations

from dataclasses import replace

import hr_core as hr
import pytest

from headrace.broker import events
from headrace.broker.settings import ClassPolicy, ModelSettings
from headrace.protocol.messages import ClassProfile, Fit, Frame, ModelProfile, SizeClassSpec

SMALL = SizeClassSpec("small", 64, 64, max_batch_size=8)
LARGE = SizeClassSpec("large", 256, 256, max_batch_size=8)
PROMOTE = ClassPolicy(promote=True)


def make(
    *classes: SizeClassSpec,
    per_frame_ms: dict[str, float] | None = None,
    policy: ClassPolicy = PROMOTE,
    **changes: object,
) -> hr.CoreDriver:
    """A core whose one worker (one slot) is busy for 10 ms; T(b) = 10 ms + per_frame_ms * b in each class."""
    spec = hr.make_spec(classes=classes or (SMALL, LARGE))
    driver = hr.CoreDriver(hr.make_settings(spec, policy=policy, **changes))
    costs = per_frame_ms or {}
    profiles = [
        ClassProfile(c, tuple((size, 10.0 + costs.get(c.name, 0.0) * size) for size in (1, 2, 4, 8)))
        for c in spec.size_classes
    ]
    driver.join_worker(slots=1, profiles=[ModelProfile(spec.name, spec.version, tuple(profiles), ())])
    driver.push(hr.frame("first", 0))
    driver.tick()
    return driver


def push(driver: hr.CoreDriver, *frames: Frame) -> None:
    """Frames one millisecond apart, so that the first one's class goes first."""
    for one in frames:
        driver.push(one)
        driver.now_ns += hr.MS


def next_batch(driver: hr.CoreDriver) -> tuple[str, list[str]]:
    """Let the running batch end; return class and streams of the one sent after it."""
    driver.now_ns += 10 * hr.MS
    driver.done(hr.batches(driver.actions)[-1])
    sent = hr.batches(driver.tick())[0].batch
    driver.core.check_invariants()
    return sent.size_class, [one.stream for one in sent.frames]


def test_small_frames_ride_in_free_rows() -> None:
    """One batch instead of two; the outcome names the class that ran, the figures say how many rode."""
    driver = make()
    push(driver, hr.frame("large", 0, size=100), hr.frame("a", 0), hr.frame("b", 0))

    sent = next_batch(driver)
    driver.done(hr.batches(driver.actions)[-1])

    assert sent == ("large", ["large", "a", "b"])
    classes = {one.stream: one.size_class for one in hr.outcomes(driver.actions)}
    assert classes == {"first": "small", "large": "large", "a": "large", "b": "large"}
    small, large = driver.core.models.classes
    assert (small.promoted_count, large.promoted_count) == (2, 0)
    assert large.frames_count == 3


def test_nobody_rides_unless_asked() -> None:
    """Off by default."""
    driver = make(policy=ClassPolicy())

    push(driver, hr.frame("large", 0, size=100), hr.frame("a", 0))

    assert next_batch(driver) == ("large", ["large"])


@pytest.mark.parametrize(
    ("large_ms", "rides"), [(0.0, True), (0.5, True), (2.0, False)], ids=["free", "cheap", "dear"]
)
def test_cost_table_decides(large_ms: float, rides: bool) -> None:
    """A frame's share of a full small batch is (10 + 8 * 0.1) / 8 = 1.35 ms; one more large row costs more
    than that or less."""
    driver = make(per_frame_ms={"small": 0.1, "large": large_ms})

    push(driver, hr.frame("large", 0, size=100), hr.frame("a", 0))

    assert next_batch(driver) == ("large", ["large", "a"] if rides else ["large"])


@pytest.mark.parametrize("count", [7, 8])
def test_all_that_wait_ride_or_none(count: int) -> None:
    """Eight do not fit beside one: they make a batch of their own."""
    driver = make()

    push(driver, hr.frame("large", 0, size=100), *[hr.frame(f"a{n}", 0) for n in range(count)])
    sent = [next_batch(driver)[0]]
    sent += [next_batch(driver)[0]] if count == 8 else []

    assert sent == (["large"] if count == 7 else ["small", "large"])


@pytest.mark.parametrize(
    "smaller",
    [
        replace(SMALL, fit=Fit.LETTERBOX),
        replace(SMALL, fit=Fit.EXACT, height=32, width=32),
        SizeClassSpec("small", 64, 300, max_batch_size=8),
        SizeClassSpec("small", 300, 64, max_batch_size=8),
    ],
    ids=["letterboxed", "exact", "wider", "higher"],
)
def test_only_classes_inside_the_larger_one_that_fit_alike_ride(smaller: SizeClassSpec) -> None:
    """Pixels must sit as they would in the frame's own class."""
    driver = make(smaller, LARGE)

    push(driver, hr.frame("large", 0, size=100), hr.frame("a", 0))

    assert next_batch(driver) == ("large", ["large"])


def test_exact_classes_take_no_riders() -> None:
    """Both are exact: neither takes a smaller frame."""
    driver = make(*(replace(c, fit=Fit.EXACT) for c in (replace(SMALL, height=32, width=32), LARGE)))

    push(driver, hr.frame("large", 0, size=256), hr.frame("a", 0))

    assert next_batch(driver) == ("large", ["large"])


@pytest.mark.parametrize(("deadline_ms", "rides"), [(40, True), (36, False)])
@pytest.mark.parametrize("who", ["large", "a"])
def test_nobody_is_made_late(deadline_ms: int, rides: bool, who: str) -> None:
    """All five would be done 38 ms after the begin: 20 ms, and a bucket of 8 of 10 + 8 * 1 ms."""
    driver = make(per_frame_ms={"small": 1.0, "large": 1.0})
    driver.now_ns += 5 * hr.MS

    push(
        driver, hr.frame("large", 0, size=100, priority=1, ttl_ms=deadline_ms - 5 if who == "large" else None)
    )
    push(driver, *[hr.frame("a", seq, ttl_ms=deadline_ms - 6 if who == "a" else None) for seq in range(4)])

    assert next_batch(driver) == ("large", ["large", *"aaaa"] if rides else ["large"])


def test_message_that_can_not_carry_more_takes_no_riders() -> None:
    """One batch is one message."""
    driver = make()
    free = driver.settings.limits.max_message_bytes - driver.settings.limits.max_header_bytes

    push(driver, *[hr.frame(name, 0, size=100, nbytes=free // 2) for name in ("c", "d")], hr.frame("a", 0))

    assert next_batch(driver) == ("large", ["c", "d"])


def test_own_frames_that_one_message_can_not_carry_come_before_riders() -> None:
    """A large frame that was left behind would be passed by a small one."""
    driver = make()
    free = driver.settings.limits.max_message_bytes - driver.settings.limits.max_header_bytes

    push(
        driver, *[hr.frame(name, 0, size=100, nbytes=free // 2 + 1) for name in ("c", "d")], hr.frame("a", 0)
    )

    assert next_batch(driver) == ("large", ["c"])


def test_frame_larger_than_the_other_class_stays_in_its_own() -> None:
    """A frame that no class contains is scaled into the one that keeps most of it, here a smaller one of
    another shape; the larger class would cut it."""
    wide = SizeClassSpec("wide", 60, 256, max_batch_size=8)
    driver = make(wide, LARGE)
    wide_frame = replace(hr.frame("w", 0), shape=(50, 300, 1))

    push(driver, hr.frame("large", 0, size=100), wide_frame)

    assert next_batch(driver) == ("large", ["large"])


def test_worker_that_does_not_run_the_small_class_gets_no_riders() -> None:
    """What they cost by themselves there is not known."""
    spec = hr.make_spec(classes=(SMALL, LARGE))
    driver = hr.CoreDriver(hr.make_settings(spec, policy=PROMOTE))
    driver.join_worker(profiles=[hr.profile(hr.make_spec(classes=(LARGE,)))])

    push(driver, hr.frame("large", 0, size=100), hr.frame("a", 0))
    sent = hr.batches(driver.tick())

    assert [one.stream for one in sent[0].batch.frames] == ["large"]


def test_half_of_a_failed_batch_takes_no_riders() -> None:
    """It looks for the guilty frame; and halves of the small class do not ride either."""
    driver = make()
    push(driver, *[hr.frame(f"l{n}", 0, size=100) for n in range(2)], hr.frame("a", 0), hr.frame("b", 0))
    assert next_batch(driver) == ("large", ["l0", "l1", "a", "b"])

    driver.fail(hr.batches(driver.actions)[-1])
    push(driver, hr.frame("c", 0))
    sent = hr.batches(driver.tick())

    assert [one.stream for one in sent[0].batch.frames] == ["l0", "l1"]
    assert next_batch(driver) == ("large", ["a", "b"])
    assert next_batch(driver) == ("small", ["c"])


def test_halves_of_the_small_class_do_not_ride() -> None:
    """They must run as they are."""
    driver = hr.CoreDriver(hr.make_settings(hr.make_spec(classes=(SMALL, LARGE)), policy=PROMOTE))
    driver.join_worker(b"both", slots=1)
    driver.join_worker(b"large", slots=1, profiles=[hr.profile(hr.make_spec(classes=(LARGE,)))])
    driver.push(hr.frame("a", 0), hr.frame("b", 0))
    (failing,) = hr.batches(driver.tick())
    driver.push(hr.frame("c", 0, size=100))
    driver.tick()
    driver.push(hr.frame("d", 0, size=100))

    driver.fail(failing)
    sent = hr.batches(driver.tick())

    assert [[one.stream for one in each.batch.frames] for each in sent] == [["a"]]
    driver.core.check_invariants()


def test_riders_of_a_lost_worker_wait_in_the_class_they_ran_in() -> None:
    """They are suspects there, and end once."""
    driver = make()
    push(driver, hr.frame("large", 0, size=100), hr.frame("a", 0))
    next_batch(driver)

    driver.send(events.PeerUnreachable(b"w1"))
    driver.join_worker(b"w2", worker="w2")
    for _ in range(3):
        driver.tick()
        for sent in hr.batches(driver.actions)[-1:]:
            if sent.peer == b"w2":
                driver.done(sent)
    driver.core.check_invariants()

    ends = sorted(hr.ends(driver.actions))
    assert [(stream, status) for stream, _, status, _ in ends if stream != "first"] == [
        ("a", "ok"),
        ("large", "ok"),
    ]


def test_copies_of_a_poison_frame_end_in_every_class_they_may_have_got_to() -> None:
    """The guilty frame rode in the large class; a copy of it waits in its own, another frame does, too."""
    driver = make(max_attempts=2)
    content = b"poison" * 16
    push(driver, hr.frame("large", 0, size=100), replace(hr.frame("a", 0), payload=content))
    next_batch(driver)
    driver.send(events.PeerUnreachable(b"w1"))
    driver.join_worker(b"w2")
    alone = hr.batches(driver.tick())[-1]
    driver.done(alone)
    alone = hr.batches(driver.tick())[-1]
    push(driver, replace(hr.frame("b", 0), payload=content), hr.frame("c", 0))

    driver.send(events.PeerUnreachable(b"w2"))

    assert alone.batch.frames[0].stream == "a"
    ends = {stream: code for stream, _, _, code in hr.ends(driver.actions)}
    assert (ends["a"], ends["b"], "c" in ends) == ("poison_frame", "poison_frame", False)
    driver.core.check_invariants()


def test_policy_of_one_class_can_promote_alone() -> None:
    """``promote`` is a matter of the class that rides."""
    middle = SizeClassSpec("middle", 128, 128, max_batch_size=8)
    spec = hr.make_spec(classes=(SMALL, middle, LARGE))
    settings = replace(
        hr.make_settings(spec), models=(ModelSettings(spec, {"": ClassPolicy(), "small": PROMOTE}),)
    )
    driver = hr.CoreDriver(settings)

    small, mid, large = driver.core.models.classes

    assert [one.smaller for one in (small, mid, large)] == [[], [small], [small]]
    assert small.kin == [small, mid, large]
