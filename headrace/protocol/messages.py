"""Every message of wire version 1 as a frozen dataclass: the shared vocabulary of all processes.

This module holds data only: no sockets, no clock, no validation. ``codec`` turns bytes into these
classes and back and owns every check. Field names are the wire's own keys unless a comment says
otherwise. Times are durations (``_ms``, ``_us``) because no two machines share a clock; ``pts_ns``
alone is the producer's own and is carried through unread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from headrace.protocol.models import ClassProfile as ClassProfile
from headrace.protocol.models import Color as Color
from headrace.protocol.models import EmulatedCost as EmulatedCost
from headrace.protocol.models import Fit as Fit
from headrace.protocol.models import ImageInput as ImageInput
from headrace.protocol.models import ModelFile as ModelFile
from headrace.protocol.models import ModelProfile as ModelProfile
from headrace.protocol.models import ModelSpec as ModelSpec
from headrace.protocol.models import Oversize as Oversize
from headrace.protocol.models import SizeClassSpec as SizeClassSpec
from headrace.protocol.models import TensorSpec as TensorSpec
from headrace.protocol.models import Value as Value
from headrace.protocol.per_frame import per_frame
from headrace.protocol.reload import Compare as Compare
from headrace.protocol.reload import Compared as Compared
from headrace.protocol.reload import Load as Load
from headrace.protocol.reload import Loaded as Loaded
from headrace.protocol.reload import NotLoaded as NotLoaded
from headrace.protocol.reload import ReloadMessage
from headrace.protocol.reload import Unload as Unload

PROTOCOL_VERSION = 1

#: What ZeroMQ hands us and takes: one message part.
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Encoding(StrEnum):
    """What the payload is: a tensor's bytes, or an image file's."""

    RAW = "raw"
    JPEG = "jpeg"
    PNG = "png"


class Keep(StrEnum):
    """``latest`` frames still waiting are superseded by the next one of their stream."""

    ALL = "all"
    LATEST = "latest"


class Status(StrEnum):
    """How a frame ended. ``accepted = ok + error + expired + superseded``; ``rejected`` stands apart."""

    OK = "ok"
    ERROR = "error"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    REJECTED = "rejected"


# ---------------------------------------------------------------------------------------------------
# Frames
# ---------------------------------------------------------------------------------------------------


@per_frame(frozen=True, slots=True)
class ShmRef:
    """Payload of lane ``shm``: a slot in the producer's arena. Valid while ``generation`` matches."""

    arena: str
    offset: int
    nbytes: int
    generation: int


Payload: TypeAlias = "Buffer | ShmRef"


@per_frame(frozen=True, slots=True)
class Frame:
    """One input. After decoding, ``shape`` is always known: for ``raw`` as sent, for encoded images
    (height, width, channels) as read from the image's own header with EXIF orientation applied.

    ``inputs`` is empty for the usual one-tensor frame. A model with several inputs gets one entry per
    input: the payload is then their bytes one after another in that order (``raw`` only).
    ``seq`` and ``epoch`` are None when a plain script leaves the numbering to the broker.
    ``model`` is "" (the broker's default), "name" (its newest version) or "name:version".
    """

    stream: str
    payload: Payload
    nbytes: int
    shape: tuple[int, ...]
    dtype: str = "uint8"
    encoding: Encoding = Encoding.RAW
    color: Color = Color.RGB
    seq: int | None = None
    epoch: int | None = None
    model: str = ""
    priority: int = 0
    ttl_ms: int | None = None
    keep: Keep = Keep.ALL
    pts_ns: int | None = None
    meta: dict[str, Value] | None = None
    inputs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class BadFrame:
    """A frame of a readable message that is itself wrong: it is rejected, its neighbours are not.
    ``stream`` is None when not even that could be read (then there is no topic to publish on)."""

    code: str
    message: str
    stream: str | None = None
    seq: int | None = None
    epoch: int | None = None
    pts_ns: int | None = None
    meta: dict[str, Value] | None = None


@per_frame(frozen=True, slots=True)
class Frames:
    """FRAME, one or a bundle. On the wire a single frame has its fields in the header itself."""

    frames: tuple[Frame | BadFrame, ...]


# ---------------------------------------------------------------------------------------------------
# Both ways, any peer
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Alive, never "ready". Any other message counts as one.

    The broker puts a number into ``probe`` to ask a worker whether it lives *now*; the worker repeats it at
    once. Nothing else proves that: any other message may have been sent by a process that has died since."""

    probe: int | None = None


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Producer: no more frames; release my streams. Worker: drain me (no new batches; in-flight ones
    will still be DONE). Broker: I am stopping."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker will not deal with this peer, or with this message: code and reason."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Discover:
    """First word of any client on any ROUTER socket of the broker: which addresses do you have?"""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Answer to Discover. Each address is as bound; a peer replaces a wildcard or unspecified host by
    the host it reached the broker with. ``http`` is "" when that server is off."""

    boot: int
    frames: str
    intake: str
    results: str
    workers: str
    control: str
    http: str
    host_key: str  # equal on both sides means: same host, shared memory possible


# ---------------------------------------------------------------------------------------------------
# Producer and broker
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A producer introduces itself. ``epoch`` names this run of the producer. ``arena``: its shared memory,
    named where ``host_key`` is the broker's."""

    epoch: int
    name: str = ""
    host_key: str = ""
    arena: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The one set of limits that producer, broker, worker and subscriber share."""

    max_frame_bytes: int = 64 * 1024 * 1024
    max_message_bytes: int = 128 * 1024 * 1024
    max_header_bytes: int = 1024 * 1024
    max_frames_per_message: int = 256
    max_meta_bytes: int = 4096
    max_pixels: int = 64 * 1024 * 1024  # height * width, checked from an image's header
    max_depth: int = 16
    priority_levels: int = 10  # priorities 0 .. priority_levels - 1


@dataclass(frozen=True, slots=True)
class Welcome:
    """The broker's answer to Hello. ``credits`` is how many frames may be unfinished at once."""

    boot: int
    credits: int
    heartbeat_ms: int
    limits: Limits
    models: tuple[ModelSpec, ...]  # files left out
    endpoints: Endpoints
    is_shm_possible: bool = False  # frames may lie in the arena that Hello named


@per_frame(frozen=True, slots=True)
class Credit:
    """Cumulative since Hello: ``finished`` frames of this session (outcome or reject). A producer may
    have sent at most ``finished + credits`` frames. ``streams`` maps stream to the highest seq such
    that it and every admitted seq below it have their outcome; only streams that moved are named.
    ``by_status`` counts outcomes of this session by Status value, cumulative."""

    finished: int
    streams: dict[str, int]
    by_status: dict[str, int]


@dataclass(frozen=True, slots=True)
class Reject:
    """One frame was not admitted and is finished; an identical outcome is published if it has a
    stream. ``retry_after_ms`` is given when waiting can help."""

    code: str
    message: str
    stream: str | None = None
    epoch: int | None = None
    seq: int | None = None
    retry_after_ms: int | None = None


# ---------------------------------------------------------------------------------------------------
# Worker and broker
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker asks for its set-up. ``instance`` is a random u64 drawn at process start: the same id
    with another instance is another process."""

    worker: str
    instance: int
    host_key: str
    device: str  # "cpu", "cuda:0 NVIDIA H200", "emulated"
    engine: str  # "cpu" | "cuda" | "emulated"
    release: str  # headrace version
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to serve: models (files by sha256, fetched over control) and limits."""

    boot: int
    heartbeat_ms: int
    limits: Limits
    models: tuple[ModelSpec, ...]
    endpoints: Endpoints


@dataclass(frozen=True, slots=True)
class Ready:
    """Free for work: ``slots`` batches may be in flight at this worker at once. Sent again, it
    replaces the earlier one (a reconnect, or other models)."""

    worker: str
    instance: int
    slots: int
    models: tuple[ModelProfile, ...]


@per_frame(frozen=True, slots=True)
class Batch:
    """Frames of one (model, size class) for one worker. ``frames[i].payload`` is part i; their ``meta`` has
    stayed at the broker."""

    batch: int
    model: str
    version: str
    size_class: str
    frames: tuple[Frame, ...]


@per_frame(frozen=True, slots=True)
class FrameResult:
    """End of one frame of a batch at the worker. ``status`` is ok or error. ``outputs`` is a msgpack
    value (boxes, labels) or None; ``tensors`` describe raw output payloads, one part each, in order.
    ``flags`` are remarks on an ok result, for instance "image_truncated"."""

    status: Status
    code: str = ""
    message: str = ""
    outputs: Value = None
    tensors: tuple[TensorSpec, ...] = ()
    payloads: tuple[Buffer, ...] = ()
    flags: tuple[str, ...] = ()


@per_frame(frozen=True, slots=True)
class Done:
    """A batch was run: exactly one result per frame, in the order of the batch. Microseconds: staged
    from receipt until the batch stood in its buffer, ran the engine alone, total from receipt to send."""

    batch: int
    results: tuple[FrameResult, ...]
    staged_us: int = 0
    ran_us: int = 0
    total_us: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The batch as a whole failed; no frame of it has a result."""

    batch: int
    code: str
    message: str


#: Figures that one worker may tell at once; a key may be this long.
MAX_FIGURES = 512
MAX_FIGURE_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a worker says of its device, every few seconds: shown in /metrics, never acted upon.

    A key is a name, ``gpu_busy_ratio``, or a name with what it is about,
    ``graph_replays_total/detector:3 small x4``."""

    worker: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cancel:
    """The broker no longer wants this batch (it lost a hedge); a running one can't be interrupted."""

    batch: int


# ---------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------


@per_frame(frozen=True, slots=True)
class Timing:
    """Stage timeline of one frame: microseconds after the broker received it. Stages a frame never
    reached are None."""

    queued_us: int | None = None
    batched_us: int | None = None
    staged_us: int | None = None
    ran_us: int | None = None
    published_us: int | None = None


@per_frame(frozen=True, slots=True)
class Outcome:
    """The one published end of a frame. ``shape`` is the frame's (height, width, channels) in whose
    pixels coordinates are given."""

    stream: str
    epoch: int
    seq: int
    boot: int
    pub_seq: int
    status: Status
    code: str = ""
    message: str = ""
    model: str = ""
    version: str = ""
    size_class: str = ""
    worker: str = ""
    attempt: int = 0
    batch_size: int = 0
    shape: tuple[int, ...] = ()
    pts_ns: int | None = None
    meta: dict[str, Value] | None = None
    retry_after_ms: int | None = None
    timing: Timing = Timing()
    outputs: Value = None
    tensors: tuple[TensorSpec, ...] = ()
    payloads: tuple[Buffer, ...] = ()
    flags: tuple[str, ...] = ()


@per_frame(frozen=True, slots=True)
class Outcomes:
    """Published outcomes of one stream, ascending pub_seq. Parts: topic (stream + NUL), header, payloads."""

    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Published on a topic when the broker has taken a subscription to it: from here on nothing is
    lost for want of one. ``topic`` is the subscription as text, without the NUL."""

    boot: int
    topic: str


# ---------------------------------------------------------------------------------------------------
# Control
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A call on the control socket; docs/protocol.md lists the methods. ``id`` is the caller's and comes
    back, so that a late answer is never taken for another."""

    id: int
    method: str
    params: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer: ``code`` is "" on success. Payload parts as the method says."""

    id: int
    result: dict[str, Value] = field(default_factory=dict)
    code: str = ""
    message: str = ""
    payloads: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayReply:
    """Answer to ``replay``: the retained outcomes of one stream in the asked range, oldest first, and
    the half-open ``missed`` ranges of that range that have left the ring."""

    id: int
    outcomes: tuple[Outcome, ...]
    missed: tuple[tuple[int, int], ...] = ()
    has_more: bool = False  # the answer was cut at its byte limit: ask again from the next pub_seq


Message: TypeAlias = (
    "Heartbeat | Goodbye | Refused | Discover | Endpoints | Hello | Welcome | Credit | Reject | Frames"
    " | WorkerHello | Setup | Ready | Batch | Done | Failed | Telemetry | Cancel | Outcomes | Subscribed"
    " | Request | Reply | ReplayReply | ReloadMessage"
)
