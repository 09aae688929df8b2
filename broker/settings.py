"""The core's settings as plain frozen dataclasses; ``headrace.config`` makes them from TOML.

Every bound of the core has its name here. Defaults are the defaults of the configuration file and the
reasons stand there. All ``_ms`` values are turned into nanoseconds once, when the core is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.protocol.messages import Limits, ModelSpec


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """How one size class queues and batches (Triton's words where Triton has one).

    ``policy`` is "adaptive", "deferred" or "window" (batching.py says what they do). ``objective_ms`` is what
    99 % of the frames should take from received to done. ``max_queue_delay_ms`` is the wait of "window" and
    the longest that "adaptive" may learn; "auto" derives it from the measured run time. ``max_queue_size``
    frames may wait in the class, all priorities together; 0 means the class has no bound of its own (the byte
    budget still holds). ``promote``: frames of this class may ride in a larger one's batch (promotion.py).
    """

    policy: str = "adaptive"
    max_queue_delay_ms: float | Literal["auto"] = 0.0
    max_queue_size: int = 1024
    objective_ms: float = 50.0
    promote: bool = False


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model: what it is, and per size class (by name; "" for any other) how it is served."""

    spec: ModelSpec
    policies: dict[str, ClassPolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Everything the core needs to know before its first event."""

    models: tuple[ModelSettings, ...]
    default_model: str = ""  # "" = the first one
    limits: Limits = field(default_factory=Limits)

    # Admission.
    default_timeout_ms: int | None = None  # deadline of a frame that brings no ttl_ms
    check_deadlines: bool = True  # refuse a frame that is predicted to be done after its deadline
    max_bytes: int = 512 * 1024 * 1024  # payload bytes of all unfinished frames
    priority_reserve_frames: int = 64  # room of each higher priority in a class that is full (room.py)
    priority_bytes_share: float = 0.0625  # of max_bytes, kept from the lowest priority
    max_streams: int = 10_000
    max_producers: int = 1_000
    max_workers: int = 1_024
    credits_per_producer: int = 64
    max_queued_per_stream: int = 256  # waiting frames of one stream in one size class
    max_unfinished_per_stream: int = 1_024  # admitted frames of one stream without a published outcome
    duplicate_window: int = 4_096  # finished seqs remembered per stream, to recognise frames sent again
    stream_stale_ms: int = 10_000  # a stream that brings no frame for this long is reported as stale
    stream_idle_ms: int = 600_000  # a stream with nothing unfinished is forgotten after this

    # Ageing (see queues.py for the bound these two state).
    ageing_ms: int = 1_000
    ageing_share: float = 0.25

    # Workers.
    heartbeat_ms: int = 1_000
    heartbeats_missed: int = 3
    max_attempts: int = 2  # workers one frame may be lost with
    quarantine_ms: int = 600_000  # the content of a poison frame is refused for this long; 0 = never
    quarantine_frames: int = 1_024  # contents in quarantine at once

    # Hedging (see hedging.py). A batch is overdue when its predicted end passed by overdue_factor times its
    # predicted run, and by overdue_min_ms at least.
    overdue_factor: float = 3.0
    overdue_min_ms: int = 50
    hedge_share: float = 0.02  # hedged frames per dispatched frame; 0 = no hedges
    hedge_burst_frames: int = 64  # hedged frames that may be saved up, and that a fresh broker starts with
    stuck_ms: int = 30_000  # a worker with a batch overdue for this long is told off

    # Outcomes.
    retention_frames: int = 1_024  # outcomes kept per stream for replay
    retention_bytes: int = 256 * 1024 * 1024  # all streams together
