"""Which lanes the installed clients have: rows of a lane that is not there say so."""

from __future__ import annotations

from headrace.clients.producer import Producer

INLINE = "inline"
SHM = "shm"


def has_lane(lane: str) -> bool:
    """Tell whether producers can send by this lane."""
    return lane == INLINE or hasattr(Producer, "slot")


def producer_options(lane: str) -> dict[str, object]:
    """Return what a Producer is made with to use exactly this lane.

    Without shared memory there is one lane, and no option to choose it."""
    return {"lane": lane} if has_lane(SHM) else {}
