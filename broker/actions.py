"""Imperatives that the core returns and the shell carries out, in the order given.

The order is part of the contract: an outcome is published before the credit that tells its producer,
and a batch is sent after the outcomes that the same event caused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.protocol.messages import (
    Batch,
    Compare,
    Credit,
    Load,
    ModelSpec,
    Outcome,
    Reject,
    Unload,
    Value,
)
from headrace.protocol.per_frame import per_frame


@per_frame(frozen=True, slots=True)
class SendBatch:
    """Dispatch a batch to a worker."""

    peer: bytes
    batch: Batch


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """Tell a worker that a batch is no longer wanted."""

    peer: bytes
    batch: int


@per_frame(frozen=True, slots=True)
class PublishOutcome:
    """Publish it. It is already in the retention ring. Consecutive outcomes of one stream may be
    bundled by the shell."""

    outcome: Outcome


@per_frame(frozen=True, slots=True)
class GrantCredit:
    """Tell a producer which of its frames are finished."""

    peer: bytes
    credit: Credit


@dataclass(frozen=True, slots=True)
class SendReject:
    """Tell a sender that its frame was not admitted."""

    peer: bytes
    reject: Reject


@dataclass(frozen=True, slots=True)
class WelcomeProducer:
    """Answer a Hello; the shell fills in endpoints and limits."""

    peer: bytes
    credits: int
    models: tuple[ModelSpec, ...]
    is_shm_possible: bool = False


@dataclass(frozen=True, slots=True)
class SetUpWorker:
    """Answer a WorkerHello; the shell fills in endpoints and limits. ``host_key`` is the worker's: on another
    host than the broker's it can't read arenas."""

    peer: bytes
    models: tuple[ModelSpec, ...]
    host_key: str = ""


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Tell a worker to load or unload a version of a model, or to compare two in the batch that follows."""

    peer: bytes
    message: Load | Unload | Compare


@dataclass(frozen=True, slots=True)
class RefusePeer:
    """Tell the peer that it is not dealt with (id in use, unknown peer, bad READY ...)."""

    peer: bytes
    code: str
    message: str
    is_worker: bool = False  # it came in on the workers socket


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """To a worker or a producer. A send that finds the connection gone comes back as PeerUnreachable.

    A ``probe`` asks a worker to repeat that number at once."""

    peer: bytes
    is_worker: bool
    probe: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A change of state that people want to see: the shell logs and counts it. ``name`` is fixed
    lowercase words ("worker lost", "stream stale"), ``values`` carry units in their names."""

    name: str
    values: dict[str, Value]


Action: TypeAlias = (
    SendBatch
    | CancelBatch
    | PublishOutcome
    | GrantCredit
    | SendReject
    | WelcomeProducer
    | SetUpWorker
    | SendToWorker
    | RefusePeer
    | SendHeartbeat
    | Report
)
