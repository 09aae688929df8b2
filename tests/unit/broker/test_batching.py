"""When a batch closes."""

from __future__ import annotations

import pytest

from headrace.broker.batching import IDLE_LEAD_NS, ClassView, CloseNow, LookAgain, make_policy
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
        "window-waits",
        "window-due",
        "window-full",
        "window-full-batch-prefetched",
        "window-due-but-busy",
        "window-due-busy-unknown",
        "window-no-slot",
    ],
)
def test_decides(policy: str, seen: ClassView, now_ns: int, answer: CloseNow | LookAgain) -> None:
    """BAT-07, BAT-10, BAT-15: full closes at the limit, a partial batch only for an idle worker."""
    decided = make_policy(ClassPolicy(policy=policy, max_queue_delay_ms=5)).decide(seen, now_ns)

    assert decided == answer


def test_an_unknown_policy_is_named() -> None:
    """The core never guesses a policy."""
    with pytest.raises(ValueError, match="'magic'"):
        make_policy(ClassPolicy(policy="magic"))
