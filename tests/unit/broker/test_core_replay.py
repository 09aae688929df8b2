"""Replay from the core's retention ring: what is there, what is lost, and ranges on either side of it."""

from __future__ import annotations

import hr_core as hc
import pytest


def core_with_outcomes(count: int, *, kept: int) -> hc.CoreDriver:
    """Return a core that published so many outcomes on cam-1 and retains the last ``kept``."""
    world = hc.CoreDriver(hc.make_settings(retention_frames=kept))
    world.join_worker()
    for seq in range(count):
        world.push(hc.frame(seq=seq))
        (sent,) = hc.batches(world.tick())
        world.done(sent)
    return world


@pytest.mark.parametrize(
    ("first", "last", "found", "missed"),
    [
        (0, 9, [6, 7, 8, 9], [(0, 6)]),
        (0, 4, [], [(0, 5)]),
        (0, 5, [], [(0, 6)]),
        (5, 6, [6], [(5, 6)]),
        (7, 8, [7, 8], []),
        (9, 2**63 - 1, [9], []),
        (10, 12, [], []),
        (3, 2, [], []),
    ],
    ids=[
        "all",
        "wholly lost",
        "lost to the edge",
        "over the edge",
        "kept",
        "to the end",
        "future",
        "backwards",
    ],
)
def test_any_range_is_answered(
    first: int, last: int, found: list[int], missed: list[tuple[int, int]]
) -> None:
    """Retained and lost tile the part of the range that was published."""
    world = core_with_outcomes(10, kept=4)

    outcomes, lost, has_more = world.core.replay("cam-1", hc.BOOT, first, last, 2**20)

    assert [outcome.pub_seq for outcome in outcomes] == found
    assert lost == missed
    assert not has_more
