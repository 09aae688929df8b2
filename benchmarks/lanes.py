"""Which lanes the installed clients have: rows of a lane that is not there say so."""

from __future__ import annotations

from headrace.clients.producer import Producer

INLINE = "inline"
SHM = "shm"

#: Holds 64 frames in flight of the largest size measured (1280x720x3).
SHM_BYTES = 192 * 1024 * 1024


def has_lane(lane: str) -> bool:
    """Tell whether producers can send by this lane."""
    return lane == INLINE or hasattr(Producer, "slot")


def producer_options(lane: str) -> dict[str, object]:
    """Return what a Producer is made with to use exactly this lane.

    Without shared memory there is one lane, and no option to choose it."""
    if not has_lane(SHM):
        return {}
    return {"lane": lane, "shm_bytes": SHM_BYTES} if lane == SHM else {"lane": lane}
