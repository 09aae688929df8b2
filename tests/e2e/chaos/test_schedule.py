"""The schedule of a chaos run."""

from __future__ import annotations

from collections import Counter

from chaos.schedule import plan

COUNTS = {"broker": 1, "worker": 3, "producer": 4, "subscriber": 3}


def test_a_seed_gives_the_same_faults_again() -> None:
    """Same seed, same list; another seed, another list."""
    assert plan(1, 60, COUNTS) == plan(1, 60, COUNTS)
    assert plan(1, 60, COUNTS) != plan(2, 60, COUNTS)


def test_five_minutes_hold_over_a_hundred_kills_of_every_role() -> None:
    """Each role is killed, each kind of fault happens, and every member is met."""
    faults = plan(1, 300, COUNTS)

    kills = Counter(fault.role for fault in faults if fault.kind == "kill")
    assert kills.total() > 120
    assert set(kills) == set(COUNTS)
    assert min(kills.values()) >= 15
    assert {fault.kind for fault in faults} == {"kill", "pause", "delay", "throttle", "cut", "swallow"}
    assert len({(f.role, f.number) for f in faults if f.kind == "kill"}) == sum(COUNTS.values())
    assert all(0 <= fault.at_s < 300 for fault in faults)


def test_a_short_run_meets_every_role() -> None:
    """What the default test suite runs is short and still kills each role."""
    for seed in range(20):
        assert {fault.role for fault in plan(seed, 22, COUNTS) if fault.kind == "kill"} >= {
            "broker",
            "worker",
        }
