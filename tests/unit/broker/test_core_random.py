"""Random events against the whole core: exactly one outcome per frame, in order, within every bound."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hr_swarm import run

SEEDS = 300


@pytest.mark.parametrize("block", range(10))
def test_any_events_leave_exactly_one_outcome_per_frame(block: int) -> None:
    """Whatever joins, dies, fails, repeats or comes late: one outcome a frame, in order, invariants hold."""
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        try:
            world = run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

        account = world.driver.core.account
        assert account.unfinished == 0, f"seed {seed}"
        assert len(world.seen) == account.accepted + account.rejected, f"seed {seed}"


def trace_hash(seed: int) -> str:
    """Return a hash of every action of one seed, in order."""
    world = run(seed)
    return hashlib.sha256("\n".join(map(repr, world.driver.actions)).encode()).hexdigest()


def test_one_seed_gives_one_trace_under_any_hash_seed() -> None:
    """The core's actions do not depend on PYTHONHASHSEED."""
    here = Path(__file__)
    lib = here.parents[2] / "lib"
    code = (
        f"import sys; sys.path[:0] = [{str(lib)!r}, {str(here.parent)!r}]\n"
        "from test_core_random import trace_hash\n"
        "print([trace_hash(seed) for seed in range(5)])"
    )

    traces = [
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert traces[0] == traces[1]
    assert len(traces[0]) > 5 * 64
