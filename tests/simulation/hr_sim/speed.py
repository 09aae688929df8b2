"""How fast the core alone is: frame events a second of one thread, with nothing around it.

A frame event is a frame arriving, dispatched, answered or published. Two streams of four producers, batches
of eight, no faults: the common way through the core and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import replace

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.protocol.messages import (
    ClassProfile,
    Done,
    Frame,
    FrameResult,
    Hello,
    ModelProfile,
    Ready,
    Status,
    WorkerHello,
)
from hr_sim.models import core_settings
from hr_sim.options import draw

FRAMES = 20_000
_BATCH = 8


def measure(frames: int = FRAMES) -> dict[str, float]:
    """Return {"frames", "frame_events", "seconds", "frame_events_per_s"}."""
    settings = replace(
        core_settings(replace(draw(0), classes=1, max_batch_size=_BATCH, max_bytes=2**29, max_queue_size=0)),
        credits_per_producer=2 * _BATCH,
    )
    core = BrokerCore(settings, boot=1)
    now_ns = 0
    for producer in range(4):
        core.handle(events.ProducerArrived(b"p%d" % producer, Hello(producer)), now_ns)
    spec = settings.models[0].spec
    described = tuple(ClassProfile(c, ((1, 1.0), (_BATCH, 2.0))) for c in spec.size_classes)
    core.handle(events.WorkerArrived(b"w", WorkerHello("w", 1, "", "", "", "")), now_ns)
    ready = Ready("w", 1, 2, (ModelProfile(spec.name, spec.version, described, ()),))
    core.handle(events.WorkerReady(b"w", ready), now_ns)
    payload = bytes(48)
    count = 0
    began_s = time.perf_counter()
    for seq in range(frames // _BATCH):
        now_ns += 1_000_000
        for index in range(_BATCH):
            producer = index % 4
            frame = Frame(f"s{index}", payload, 48, (4, 4, 3), seq=seq, epoch=producer)
            core.handle(events.FrameArrived(b"p%d" % producer, frame), now_ns)
            count += 1
        todo = core.handle(events.Tick(), now_ns)
        while todo:
            action = todo.pop(0)
            if isinstance(action, act.SendBatch):
                count += 2 * len(action.batch.frames)
                results = tuple(FrameResult(Status.OK) for _ in action.batch.frames)
                todo += core.handle(
                    events.BatchDone(b"w", Done(action.batch.batch, results, 1, 1, 1)), now_ns
                )
                todo += core.handle(events.Tick(), now_ns)
            elif isinstance(action, act.PublishOutcome):
                count += 1
    took_s = time.perf_counter() - began_s
    return {
        "frames": frames,
        "frame_events": count,
        "seconds": round(took_s, 3),
        "frame_events_per_s": round(count / took_s),
    }
