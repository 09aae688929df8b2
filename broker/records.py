"""The core's own record of one admitted frame, and of a refusal. Mutable, never shared outside the core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.protocol.messages import Frame, FrameResult, Status


class FrameState(Enum):
    """Life of an admitted frame: QUEUED <-> IN_FLIGHT -> FINISHED (outcome known, maybe held back until
    its predecessors in the stream are finished too)."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class End:
    """How an admitted frame ended, kept from then until its turn in the stream has come. ``staged_us`` and
    ``ran_us`` are durations as the worker measured them; ``batch_size`` is 0 when no batch ended it."""

    status: Status
    code: str = ""
    message: str = ""
    worker: str = ""
    batch_size: int = 0
    staged_us: int = 0
    ran_us: int = 0
    result: FrameResult | None = None
    version: str = ""  # of the model, in the batch that ended it; "" when none did


@dataclass(slots=True, eq=False)
class FrameRecord:
    """One admitted frame. ``frame`` always has seq and epoch set (and equal to the record's). ``number`` is
    its broker-wide admission number, ascending. ``is_suspect`` frames were with a worker when it was lost:
    they run alone."""

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
    epoch: int = 0
    seq: int = 0
    key: tuple[str, int, int] = ("", 0, 0)  # stream, epoch, seq
    session: int = 0  # number of the producer session that is credited for it; 0 = none
    end: End | None = None  # set exactly when state is FINISHED
    # The queue's own: written by queues.ClassQueue alone.
    order: tuple[int, int, int] = (0, 0, 0)
    waits_from_ns: int = 0
    ticket: int = 0
    is_queued: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a frame is not admitted: a ``Code``, and ``retry_after_ms`` when waiting can help."""

    code: str
    message: str
    retry_after_ms: int | None = None
