"""When processes are started again, given up, drained and killed: decisions on a clock made of numbers."""

from __future__ import annotations

import random

import pytest

from headrace.exit_codes import ExitCode
from headrace.supervision import (
    BROKER,
    Action,
    Begun,
    BrokerReady,
    Ended,
    Event,
    Finish,
    Kill,
    KillAsked,
    Rules,
    Say,
    Start,
    StopAsked,
    Supervision,
    Terminate,
    TimePassed,
)

MS = 1_000_000
RULES = Rules(
    worker_count=2,
    backoff_ns=500 * MS,
    backoff_max_ns=3_000 * MS,
    quick_failure_ns=10_000 * MS,
    max_quick_failures=4,
    start_timeout_ns=30_000 * MS,
    broker_grace_ns=15_000 * MS,
    worker_grace_ns=15_000 * MS,
)


def acts(actions: list[Action]) -> list[Action]:
    """Leave out what is only said."""
    return [action for action in actions if not isinstance(action, Say)]


def running(rules: Rules = RULES) -> Supervision:
    supervision = Supervision(rules)
    supervision.handle(Begun(), 0)
    supervision.handle(BrokerReady(), 0)
    return supervision


def test_workers_start_once_the_broker_is_ready() -> None:
    """A worker started earlier would only fail to connect."""
    supervision = Supervision(RULES)

    assert supervision.handle(Begun(), 0) == [Start(BROKER)]
    assert supervision.handle(TimePassed(), 5 * MS) == []
    assert supervision.handle(BrokerReady(), 9 * MS) == [Start("worker-0"), Start("worker-1")]


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.FAILED, ExitCode.OK, -9])
def test_a_broker_that_never_got_ready_ends_everything(code: int) -> None:
    """A port in use or a bad file: its own message and exit code reach the caller at once."""
    supervision = Supervision(RULES)
    supervision.handle(Begun(), 0)

    actions = acts(supervision.handle(Ended(BROKER, code), 100 * MS))

    assert len(actions) == 1
    assert isinstance(actions[0], Finish)
    assert actions[0].code == (code if code >= 0 else ExitCode.FAILED)
    assert supervision.is_finished


def test_a_broker_that_never_says_ready_is_killed() -> None:
    """The start has a time limit."""
    supervision = Supervision(RULES)
    supervision.handle(Begun(), 0)

    assert supervision.next_wakeup_ns() == 30_000 * MS
    assert acts(supervision.handle(TimePassed(), 30_000 * MS)) == [Kill(BROKER)]
    finish = acts(supervision.handle(Ended(BROKER, -9), 30_001 * MS))
    assert [type(action) for action in finish] == [Finish]


def test_a_killed_worker_is_started_again_after_the_first_wait() -> None:
    """kill -9 of one worker: the other goes on, the dead one is back half a second later."""
    supervision = running()

    assert acts(supervision.handle(Ended("worker-1", -9), 60_000 * MS)) == []
    assert supervision.next_wakeup_ns() == 60_500 * MS
    assert supervision.handle(TimePassed(), 60_499 * MS) == []
    assert supervision.handle(TimePassed(), 60_500 * MS) == [Start("worker-1")]


def test_waits_double_up_to_their_bound_and_end_in_giving_up() -> None:
    """PRC-10: a worker that fails at once is tried a stated number of times, then named and left."""
    supervision = running()
    waits, now = [], 0
    while True:
        said = supervision.handle(Ended("worker-0", 1), now)
        wake = supervision.next_wakeup_ns()
        if wake is None:
            break
        waits.append((wake - now) // MS)
        now = wake
        assert supervision.handle(TimePassed(), now) == [Start("worker-0")]

    assert waits == [500, 1_000, 2_000]
    assert [(item.event, item.name) for item in said if isinstance(item, Say)] == [
        ("process given up", "worker-0")
    ]
    assert not supervision.is_finished


def test_the_wait_never_exceeds_its_maximum() -> None:
    """Doubling stops at backoff_max."""
    supervision = running(Rules(1, backoff_ns=500 * MS, backoff_max_ns=900 * MS, max_quick_failures=50))
    now, waits = 0, []
    for _ in range(10):
        supervision.handle(Ended("worker-0", 1), now)
        wake = supervision.next_wakeup_ns()
        assert wake is not None
        waits.append((wake - now) // MS)
        now = wake
        supervision.handle(TimePassed(), now)

    assert waits == [500] + [900] * 9


def test_a_long_life_clears_the_record() -> None:
    """Failures once an hour never add up to giving up."""
    supervision = running()
    now = 0
    for _ in range(20):
        now += 3_600_000 * MS
        supervision.handle(Ended("worker-0", -9), now)
        assert supervision.next_wakeup_ns() == now + 500 * MS
        now += 500 * MS
        assert supervision.handle(TimePassed(), now) == [Start("worker-0")]


@pytest.mark.parametrize("code", [ExitCode.MODEL, ExitCode.CONFIG, ExitCode.USAGE])
def test_what_a_restart_cannot_mend_is_not_restarted(code: int) -> None:
    """A model that can't be served fails the same way again."""
    supervision = running()

    said = supervision.handle(Ended("worker-0", code), 100 * MS)

    assert acts(said) == []
    assert supervision.next_wakeup_ns() is None
    assert isinstance(said[0], Say)
    assert said[0].level == "error"


def test_the_last_worker_given_up_stops_the_broker_and_names_the_reason() -> None:
    """A broker without any hope of a worker ends, with the worker's exit code."""
    supervision = running()
    supervision.handle(Ended("worker-0", ExitCode.MODEL), 0)

    assert acts(supervision.handle(Ended("worker-1", ExitCode.MODEL), 1)) == [Terminate(BROKER)]
    finish = acts(supervision.handle(Ended(BROKER, 0), 2))
    assert finish == [
        Finish(
            65,
            "no worker is left: the last one ended with exit code 65 (model); its own message stands above",
        )
    ]


def test_a_broker_that_died_is_started_again_and_workers_are_left_alone() -> None:
    """kill -9 of the broker: workers reconnect by themselves."""
    supervision = running()

    assert acts(supervision.handle(Ended(BROKER, -9), 20_000 * MS)) == []
    assert supervision.handle(TimePassed(), 20_500 * MS) == [Start(BROKER)]
    assert supervision.handle(BrokerReady(), 20_600 * MS) == []


def test_a_drained_broker_ends_everything_with_success() -> None:
    """`drain` over the control socket ends the broker with 0: the rest follows."""
    supervision = running()

    assert acts(supervision.handle(Ended(BROKER, 0), 1)) == [Terminate("worker-0"), Terminate("worker-1")]
    supervision.handle(Ended("worker-0", 0), 2)
    assert acts(supervision.handle(Ended("worker-1", 0), 3)) == [Finish(0)]


def test_stop_drains_the_broker_first_and_the_workers_after_it() -> None:
    """The broker needs its workers to finish what it admitted."""
    supervision = running()

    assert supervision.handle(StopAsked(), 0) == [Terminate(BROKER)]
    assert supervision.handle(Ended("worker-0", -9), 1) == []
    assert supervision.handle(Ended(BROKER, 0), 2) == [Terminate("worker-1")]
    assert supervision.handle(Ended("worker-1", 0), 3) == [Finish(0)]
    assert supervision.handle(StopAsked(), 4) == []


def test_what_outlives_its_grace_is_killed() -> None:
    """Neither a stuck broker nor a stuck worker holds up the end."""
    supervision = running()
    supervision.handle(StopAsked(), 0)

    assert supervision.next_wakeup_ns() == 15_000 * MS
    assert acts(supervision.handle(TimePassed(), 15_000 * MS)) == [Kill(BROKER)]
    assert acts(supervision.handle(Ended(BROKER, -9), 15_001 * MS)) == [
        Terminate("worker-0"),
        Terminate("worker-1"),
    ]
    supervision.handle(Ended("worker-0", 0), 15_002 * MS)
    assert acts(supervision.handle(TimePassed(), 30_001 * MS)) == [Kill("worker-1")]
    assert acts(supervision.handle(Ended("worker-1", -9), 30_002 * MS)) == [Finish(0)]


def test_a_second_request_kills_everything() -> None:
    """Ctrl-C twice ends at once, and says so with its exit code."""
    supervision = running()
    supervision.handle(StopAsked(), 0)

    assert supervision.handle(StopAsked(), 500 * MS) == [Kill(BROKER), Kill("worker-0"), Kill("worker-1")]
    supervision.handle(Ended("worker-0", -9), 501 * MS)
    supervision.handle(Ended("worker-1", -9), 502 * MS)
    finish = supervision.handle(Ended(BROKER, -9), 503 * MS)
    assert isinstance(finish[-1], Finish)
    assert finish[-1].code == ExitCode.FAILED


def test_two_requests_at_the_same_moment_are_one() -> None:
    """timeout(1) signals a process and then its group: that is no wish to kill."""
    supervision = running()
    supervision.handle(StopAsked(), 0)

    assert supervision.handle(StopAsked(), 1 * MS) == []


def test_kill_needs_no_request_to_stop_before_it() -> None:
    """kill() ends everything at once."""
    supervision = running()

    assert supervision.handle(KillAsked(), 0) == [Kill(BROKER), Kill("worker-0"), Kill("worker-1")]
    for name in (BROKER, "worker-0", "worker-1"):
        finish = acts(supervision.handle(Ended(name, -9), 1))
    assert [type(action) for action in finish] == [Finish]


def test_stop_while_a_restart_is_due_starts_nothing() -> None:
    """A pending restart dies with the request to stop."""
    supervision = running()
    supervision.handle(Ended("worker-0", -9), 0)

    supervision.handle(StopAsked(), 1)

    assert supervision.handle(TimePassed(), 600 * MS) == []


@pytest.mark.parametrize("seed", range(200))
def test_no_schedule_starts_a_process_twice_or_never_ends(seed: int) -> None:
    """Whatever happens in whatever order: one life at a time each, and a stop always finishes."""
    rng = random.Random(seed)
    supervision = Supervision(RULES)
    alive: set[str] = set()
    now = 0
    finished = False

    def feed(event: Event) -> None:
        nonlocal finished
        for action in supervision.handle(event, now):
            assert not finished
            match action:
                case Start(name):
                    assert name not in alive
                    alive.add(name)
                case Terminate(name) | Kill(name):
                    assert name in alive
                case Finish():
                    assert not alive
                    finished = True

    feed(Begun())
    for step in range(400):
        now += rng.randrange(0, 2_000) * MS
        choice = rng.random()
        if choice < 0.3 and alive:
            name = rng.choice(sorted(alive))
            alive.remove(name)
            feed(Ended(name, rng.choice([0, 1, 65, -9])))
        elif choice < 0.5 and BROKER in alive:
            feed(BrokerReady())
        elif choice < 0.52 or step > 350:
            feed(StopAsked())
            if step > 350 and alive:
                name = min(alive)
                alive.remove(name)
                feed(Ended(name, -9))
        else:
            feed(TimePassed())

    assert finished
