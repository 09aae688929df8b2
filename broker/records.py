"""The core's own record of one admitted frame, and of a refusal. Mutable, never shared outside the core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.errors import Code
from headrace.protocol.messages import Frame


class FrameState(Enum):
    """Life of an admitted frame: QUEUED <-> IN_FLIGHT -> FINISHED (outcome known, maybe held back until
    its predecessors in the stream are finished too)."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class FrameRecord:
    """One admitted frame. ``frame`` always has seq and epoch set. ``number`` is its broker-wide admission
    number, ascending. ``is_suspect`` frames were with a worker when it was lost: they run alone."""

    number: int
    frame: Frame
    peer: bytes | None
    model: str
    version: str
    size_class: str
    priority: int
    received_ns: int
    deadline_ns: int | None
    nbytes: int
    state: FrameState = FrameState.QUEUED
    attempt: int = 0  # workers it was dispatched to so far
    lost_with: int = 0  # workers that were lost while they had it
    is_suspect: bool = False
    batched_ns: int | None = None
    # The queue's own: written by queues.ClassQueue alone.
    order: tuple[int, int, int] = (0, 0, 0)
    waits_from_ns: int = 0
    is_queued: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a frame is not admitted. ``retry_after_ms`` is set when waiting can help."""

    code: Code
    message: str
    retry_after_ms: int | None = None
