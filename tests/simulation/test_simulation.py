"""A short run of the simulator: ``make sim`` and ``make canary`` are the long ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixed_seeds import FIXED_SEEDS
from hr_sim.canary import CANARIES, catch
from hr_sim.options import draw
from hr_sim.world import run_seed

from headrace.build_kind import is_compiled

#: Seeds of the default run.
SEEDS = 20

#: Bugs shown to be caught by the default run; ``make canary`` shows all of them.
QUICK_CANARIES = ("double_publish", "order_bypassed", "credit_off_by_one", "skipped_pub_seq")


@pytest.mark.parametrize("seed", [*range(SEEDS), *(seed for seed in FIXED_SEEDS if seed >= SEEDS)])
def test_every_promise_holds(seed: int) -> None:
    """No referee objects, and after the faults everything is concluded."""
    summary = run_seed(seed)

    assert summary.frames > 0


def test_options_are_the_seeds_alone() -> None:
    """Drawing twice gives the same options; another seed gives others."""
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_one_seed_gives_one_trace_under_any_hash_seed() -> None:
    """A seed is a schedule: two processes with different PYTHONHASHSEEDs run it alike."""
    code = "from hr_sim.world import run_seed; print([run_seed(seed).trace for seed in (0, 3)])"

    traces = [
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert traces[0] == traces[1]
    assert len(traces[0]) > 2 * 64


# `make coverage` runs these on the sources as they stand.
@pytest.mark.skipif(
    is_compiled(), reason="no method of a compiled class can be replaced: make coverage runs it"
)
@pytest.mark.parametrize("name", QUICK_CANARIES)
def test_planted_bug_is_caught(name: str) -> None:
    """A simulator that can't fail shows nothing."""
    needed, finding = catch(name, 20)

    assert needed is not None, finding


def test_canaries_are_many() -> None:
    """Each has a name of its own and replaces a method that exists."""
    assert len(CANARIES) >= 10
    assert all(method in owner.__dict__ for owner, method, _ in CANARIES.values())
