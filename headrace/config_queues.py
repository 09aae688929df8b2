"""The configuration's schema: how frames wait, are batched and dispatched.

See ``headrace.config_schema`` for the rest and for the rules.
"""

from __future__ import annotations

from headrace.config_models import MAX_OBJECTIVE_MS, MAX_WAIT_MS, Policy, Section, Wait, key


class QueuesSection(Section):
    """How frames wait. The first five are defaults that a model or a size class may override."""

    policy: Policy = key(
        "adaptive",
        "policy",
        "`adaptive`: a batch grows until a worker is idle; its largest size, and a wait of at most"
        " `max_queue_delay_ms`, are learned from how many frames miss `objective_ms` and from how busy the"
        " workers are. `deferred`: a size class lets others go first until the last moment at which its"
        " frames meet their deadlines and `objective_ms`; no worker idles for that. `window`: a batch closes"
        " when full or when its oldest frame has waited `max_queue_delay_ms` and a worker is idle.",
    )
    max_queue_delay_ms: Wait = key(
        0.0,
        "ms",
        "Longest wait for more frames while a worker is idle, under the policies `window` and `adaptive`."
        ' `"auto"` = 2.5 times the measured run of a full batch, and no more than leaves room for two runs in'
        " `objective_ms`.",
    )
    objective_ms: float = key(
        50.0,
        "ms",
        "Time from received to done that 99 % of the frames should keep. The policies aim at it, and a full"
        " batch of one size class goes before a partial one of another only while that keeps it. No frame"
        " expires by it: that is `ttl_ms`.",
        gt=0,
        le=MAX_OBJECTIVE_MS,
    )
    promote: bool = key(
        False,
        "on/off",
        "Waiting frames of a smaller size class ride in a batch of a larger one of the same model and `fit`"
        " when that costs the worker no more than full batches of their own, by measured run times. Their"
        " outcome names the larger class; coordinates stay those of the frame. For models whose results do"
        " not depend on how much padding is around a frame.",
    )
    max_queue_size: int = key(
        1_024,
        "frames",
        "Frames that may wait in one size class, all priorities"
        " together; 0 = bounded by `admission.max_bytes` alone.",
        ge=0,
        le=100_000_000,
    )
    priority_reserve_frames: int = key(
        64,
        "frames",
        "Room in a size class that is full (`max_queue_size`): a frame of priority 1 or higher is still"
        " admitted while fewer than this many of its priority and above wait there.",
        ge=0,
        le=1_000_000,
    )
    ageing_ms: int = key(
        1_000,
        "ms",
        "A frame that has waited this long gets a share of dispatches whatever"
        " its priority, so that none starves.",
        ge=1,
        le=MAX_WAIT_MS,
    )
    ageing_share: float = key(
        0.25, "share", "Share of dispatches that aged frames get while more urgent ones wait.", gt=0, lt=1
    )


class HedgingSection(Section):
    """What happens to batches that take much too long. A running batch can't be interrupted: a second copy
    runs on another worker, and the first to be done counts."""

    overdue_factor: float = key(
        3.0,
        "factor",
        "A batch is overdue when its predicted end has passed by this many times its predicted run. Its"
        " worker gets nothing more until it answers.",
        ge=0.5,
        le=1_000,
    )
    overdue_min_ms: int = key(
        50,
        "ms",
        "... and by at least this: below it the noise of transport and scheduling decides.",
        ge=1,
        le=MAX_WAIT_MS,
    )
    share: float = key(
        0.02,
        "share",
        "Extra load that second copies may cause: hedged frames per dispatched frame. 0 = no hedges.",
        ge=0,
        le=1,
    )
    burst_frames: int = key(
        64,
        "frames",
        "Hedged frames that may be saved up; a fresh broker starts with as many, so that the very first"
        " batch that hangs can be hedged. 64 holds two batches of 32.",
        ge=1,
        le=1_000_000,
    )
    stuck_ms: int = key(
        30_000,
        "ms",
        "A worker with a batch overdue for this long is told off: it counts as lost and ends itself, so"
        " that `headrace up` starts another one.",
        ge=100,
        le=86_400_000,
    )
