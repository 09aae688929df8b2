"""Past facts that the shell hands to the core, one frozen dataclass each.

``peer`` is the ZeroMQ routing id of a connection: a new connection is a new peer. ``None`` as the
peer of a frame means the intake (PULL) socket, which can't be answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.broker.reload_state import ReloadOrder
from headrace.protocol.messages import (
    BadFrame,
    Compared,
    Done,
    Failed,
    Frame,
    Hello,
    Loaded,
    ModelFile,
    NotLoaded,
    Ready,
    WorkerHello,
)
from headrace.protocol.per_frame import per_frame


@per_frame(frozen=True, slots=True)
class FrameArrived:
    """One frame (or the readable remains of a bad one)."""

    peer: bytes | None
    frame: Frame | BadFrame


@per_frame(frozen=True, slots=True)
class FramesArrived:
    """The frames of one message, in their order: the same as one FrameArrived each."""

    peer: bytes | None
    frames: tuple[Frame | BadFrame, ...]


@dataclass(frozen=True, slots=True)
class ProducerArrived:
    """A producer said Hello. ``arena_bytes`` is the size of the arena that it named, 0 when the shell could
    not open it (another host, another user, the lane is off)."""

    peer: bytes
    hello: Hello
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ArenaClosed:
    """The shell has let go of an arena: its producer is dead and no frame needs it."""

    arena: str


@dataclass(frozen=True, slots=True)
class ProducerLeft:
    """It said goodbye."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class PeerHeard:
    """Any message from a peer that is not an event of its own (heartbeat, control request).

    ``is_heartbeat`` says that it was one: only a worker or a producer that believes to be in a session
    sends those, so the core answers an unknown one with RefusePeer and it introduces itself again."""

    peer: bytes
    is_heartbeat: bool = False
    is_worker: bool = False  # it came in on the workers socket
    probe: int | None = None  # the number of the probe that it answers


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """A send found the peer's connection gone: nothing sent to it since will arrive.

    ``undelivered`` names the batches whose own send failed: they were never with the worker, so their frames
    are not suspected of having killed it."""

    peer: bytes
    undelivered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerMisbehaved:
    """A peer sent a message that can't be read at all; it was told so. Counted by code. A worker that has
    batches is lost: it may have been the answer to one of them."""

    peer: bytes | None
    code: str
    kind: type | None = None  # class of the message, None if not even that could be read


@dataclass(frozen=True, slots=True)
class WorkerArrived:
    """A worker asks for its set-up."""

    peer: bytes
    hello: WorkerHello


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has loaded and tested its models and grants slots."""

    peer: bytes
    ready: Ready


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """It said goodbye: no new batches; what is in flight may still be done. When nothing is left in
    flight the worker is forgotten."""

    peer: bytes


@per_frame(frozen=True, slots=True)
class BatchDone:
    """A worker finished a batch."""

    peer: bytes
    done: Done


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A worker could not run a batch as a whole."""

    peer: bytes
    failed: Failed


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """Somebody wants another file in the place of a model's. The shell reads it meanwhile."""

    order: ReloadOrder


@dataclass(frozen=True, slots=True)
class ModelFilesRead:
    """The files of reload ``number`` are open and hashed: workers can fetch them."""

    number: int
    files: tuple[ModelFile, ...]
    gpu_files: tuple[ModelFile, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFilesUnreadable:
    """The files of reload ``number`` can't be read."""

    number: int
    message: str


@dataclass(frozen=True, slots=True)
class RollbackAsked:
    """Somebody wants the version before the last reload back, or gives up the one under way."""

    model: str


@dataclass(frozen=True, slots=True)
class CommitAsked:
    """Somebody will not want the earlier version back."""

    model: str


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """A worker has loaded and tested a version beside those that it serves."""

    peer: bytes
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class ModelNotLoaded:
    """A worker can't run a version."""

    peer: bytes
    answer: NotLoaded


@dataclass(frozen=True, slots=True)
class BatchCompared:
    """A worker has run a batch on two versions."""

    peer: bytes
    compared: Compared


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Admit nothing more; finish what was admitted."""


@dataclass(frozen=True, slots=True)
class GraceEnded:
    """The drain's time is over: every unfinished frame becomes `error shutdown`."""


@per_frame(frozen=True, slots=True)
class Tick:
    """Time has passed: a wake-up asked for with next_wakeup_ns(), or just another turn."""


Event: TypeAlias = (
    FrameArrived
    | FramesArrived
    | ProducerArrived
    | ArenaClosed
    | ProducerLeft
    | PeerHeard
    | PeerUnreachable
    | PeerMisbehaved
    | WorkerArrived
    | WorkerReady
    | WorkerLeft
    | BatchDone
    | BatchFailed
    | ReloadAsked
    | ModelFilesRead
    | ModelFilesUnreadable
    | RollbackAsked
    | CommitAsked
    | ModelLoaded
    | ModelNotLoaded
    | BatchCompared
    | DrainRequested
    | GraceEnded
    | Tick
)
