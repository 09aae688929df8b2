"""What one seed is about: sizes, limits and which faults happen how often, drawn from the seed alone.

Swarm testing (Groce et al., ISSTA 2012): each seed leaves most kinds of fault out, so that the others can
pile up to what never happens when everything is always a little broken.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

#: Faults of processes and connections: how many a second, when they are switched on.
_RATES: dict[str, tuple[float, float]] = {
    "broker_crash": (0.05, 0.4),
    "broker_stop": (0.05, 0.3),
    "broker_pause": (0.1, 1.0),
    "producer_crash": (0.1, 1.0),
    "producer_pause": (0.1, 2.0),
    "producer_goodbye": (0.1, 1.0),
    "worker_crash": (0.1, 2.0),
    "worker_pause": (0.1, 2.0),
    "worker_stop": (0.1, 1.0),
    "worker_hang": (0.1, 0.6),
    "worker_slow": (0.1, 1.0),
    "worker_twin": (0.1, 0.5),
    "subscriber_crash": (0.1, 0.6),
    "subscriber_pause": (0.1, 1.0),
    "subscriber_late": (0.1, 0.5),
    "cut": (0.2, 4.0),
    "partition": (0.2, 2.0),
    "garbage": (0.2, 4.0),
}

#: The same, of kinds that were added later: they are drawn last.
_LATE_RATES: dict[str, tuple[float, float]] = {"reload": (0.3, 3.0), "way_back": (0.1, 2.0)}

#: Faults that frames bring: the share of frames, when they are switched on.
_SHARES: dict[str, tuple[float, float]] = {
    "poison": (0.001, 0.01),
    "failing": (0.005, 0.05),
    "miscount": (0.002, 0.02),
    "damaged": (0.01, 0.1),
    "bad": (0.01, 0.1),
    "too_large": (0.01, 0.05),
}


@dataclass(frozen=True, slots=True)
class Options:
    """All that was drawn for one seed. ``rates`` are a second, ``shares`` of the frames."""

    seed: int
    safety_ms: int
    is_encoded: bool
    heartbeat_ms: int
    delay_us: tuple[int, int]
    turn_us: int
    producers: int
    streams_per_producer: int
    plain_senders: int
    workers: int
    slots: int
    subscribers: int
    frames_per_s: int
    burst: int
    priorities: int
    ttl_ms: int
    ttl_share: float
    latest_share: float
    batch_ms: float
    frame_ms: float
    classes: int
    max_batch_size: int
    policy: str
    max_queue_size: int
    credits: int
    max_bytes: int
    max_queued_per_stream: int
    max_unfinished_per_stream: int
    max_streams: int
    retention_frames: int
    retention_bytes: int
    results_hwm: int
    router_hwm: int
    reader_count: int
    read_ms: int
    ageing_ms: int
    max_frames_per_message: int
    hedge_share: float
    stuck_ms: int
    check_deadlines: bool
    has_copies: bool
    hedge_burst_frames: int
    rates: dict[str, float]
    shares: dict[str, float]
    max_queue_delay_ms: float | Literal["auto"]
    objective_ms: float
    promote: bool
    arena_bytes: int  # of each producer; 0: all payloads go inline
    remote_workers: int  # of the workers: they read no shared memory

    def lines(self) -> str:
        """Return one option a line, for a failure."""
        values = asdict(self)
        return "\n".join(f"  {each.name} = {values[each.name]}" for each in fields(self))


def draw(seed: int) -> Options:
    """Return the options of a seed: always the same."""
    rng = random.Random(seed)
    share_on = rng.choice((0.0, 0.15, 0.3, 0.5, 0.7))
    rates = {kind: _between(rng, span) for kind, span in _RATES.items() if rng.random() < share_on}
    shares = {kind: _between(rng, span) for kind, span in _SHARES.items() if rng.random() < share_on}
    low_us = rng.choice((10, 100, 1_000))
    options = Options(
        seed=seed,
        safety_ms=rng.choice((1_500, 3_000, 5_000)),
        is_encoded=rng.random() < 0.2,
        heartbeat_ms=rng.choice((100, 250, 500)),
        delay_us=(low_us, low_us * rng.choice((1, 3, 30))),
        turn_us=rng.choice((0, 50, 500, 5_000)),
        producers=rng.randint(1, 4),
        streams_per_producer=rng.randint(1, 4),
        plain_senders=rng.choice((0, 0, 1, 2)),
        workers=rng.randint(1, 4),
        slots=rng.choice((1, 2, 2, 3)),
        subscribers=rng.randint(1, 4),
        frames_per_s=rng.choice((50, 100, 200, 200, 500, 1_000)),
        burst=rng.choice((1, 1, 5, 40)),
        priorities=rng.choice((1, 1, 2, 4)),
        ttl_ms=rng.choice((5, 50, 500)),
        ttl_share=rng.choice((0.0, 0.0, 0.2, 1.0)),
        latest_share=rng.choice((0.0, 0.0, 0.3, 1.0)),
        batch_ms=rng.choice((0.2, 2.0, 10.0)),
        frame_ms=rng.choice((0.0, 0.1, 2.0)),
        classes=rng.randint(1, 3),
        max_batch_size=rng.choice((1, 2, 4, 8, 32)),
        policy=rng.choice(("adaptive", "window")),
        max_queue_size=rng.choice((16, 128, 1_024)),
        credits=rng.choice((1, 8, 64)),
        max_bytes=rng.choice((4_000, 20_000, 512 * 1024 * 1024)),
        max_queued_per_stream=rng.choice((4, 64, 256)),
        max_unfinished_per_stream=rng.choice((6, 64, 1_024)),
        max_streams=10_000,
        retention_frames=rng.choice((4, 64, 1_024)),
        retention_bytes=rng.choice((20_000, 256 * 1024 * 1024)),
        results_hwm=rng.choice((2, 30, 10_000)),
        router_hwm=rng.choice((40, 1_024, 1_024)),
        reader_count=rng.choice((2, 100, 1_000)),
        read_ms=rng.choice((0, 0, 0, 5)),
        ageing_ms=rng.choice((20, 200, 1_000)),
        max_frames_per_message=rng.choice((4, 256)),
        hedge_share=rng.choice((0.0, 0.02, 0.02, 0.5)),
        stuck_ms=rng.choice((200, 1_000, 30_000)),
        check_deadlines=rng.random() < 0.5,
        has_copies=rng.random() < 0.5,
        hedge_burst_frames=rng.choice((1, 8)),
        rates=rates,
        shares=shares,
        max_queue_delay_ms=rng.choice((0.0, 5.0, "auto")),
        objective_ms=rng.choice((5.0, 50.0, 1_000.0)),
        promote=rng.random() < 0.5,
        arena_bytes=0,
        remote_workers=0,
    )
    # Drawn last, so that what was added later changes nothing in what a seed drew before.
    return replace(
        options,
        policy=rng.choice((options.policy, options.policy, "deferred")),
        arena_bytes=rng.choice((0, 0, 2_048, 65_536)),
        remote_workers=rng.choice((0, 0, 1)),
        rates={
            **options.rates,
            **{kind: _between(rng, span) for kind, span in _LATE_RATES.items() if rng.random() < 0.3},
        },
    )


def _between(rng: random.Random, span: tuple[float, float]) -> float:
    """Return a number of the span, its logarithm evenly spread."""
    low, high = span
    return round(low * (high / low) ** rng.random(), 4)
