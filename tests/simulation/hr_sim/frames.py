"""The frames that producers push: drawn from the options, each with an id of its own and maybe a fate."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from headrace.protocol.messages import BadFrame, Frame, Keep
from hr_sim.models import SIDES, TOO_LARGE_SIDE
from hr_sim.options import Options

#: What a frame does to the worker that runs it.
FATES = ("poison", "failing", "miscount", "damaged")


@dataclass(slots=True)
class StreamPlan:
    """How one stream's frames look."""

    name: str
    model: str
    sides: tuple[int, ...]
    priority: int | None  # None: each frame draws one
    keep: Keep
    is_timed: bool


class FrameMaker:
    """Makes frames and remembers what each of them does: ``fate_of[id]``."""

    def __init__(self, options: Options, rng: random.Random) -> None:
        self._options = options
        self._rng = rng
        self._padding = bytes(TOO_LARGE_SIDE * TOO_LARGE_SIDE * 3)
        self.last_id = 0
        self.fate_of: dict[int, str] = {}

    def plan(self, name: str) -> StreamPlan:
        """Draw how a stream looks."""
        options, rng = self._options, self._rng
        sides = SIDES[: options.classes]
        return StreamPlan(
            name,
            rng.choice(("", "mean", "mean:1", "edge")),
            rng.choice((sides, (rng.choice(sides),))),
            rng.choice((None, rng.randrange(options.priorities))),
            Keep.LATEST if rng.random() < options.latest_share else Keep.ALL,
            rng.random() < options.ttl_share,
        )

    def make(self, plan: StreamPlan, seq: int | None, epoch: int | None) -> Frame:
        """Return the next frame of a stream. ``pts_ns`` is its id, and ``meta`` holds it, too."""
        options, rng, shares = self._options, self._rng, self._options.shares
        self.last_id += 1
        side = rng.choice(plan.sides)
        if rng.random() < shares.get("too_large", 0.0):
            side = TOO_LARGE_SIDE
        nbytes = side * side * 3
        for fate in FATES:
            if rng.random() < shares.get(fate, 0.0):
                self.fate_of[self.last_id] = fate
        content = self.last_id.to_bytes(8, "little")
        if options.has_copies and self.fate_of.get(self.last_id) == "poison":
            content = bytes(8)
        frame = Frame(
            stream=plan.name,
            payload=content + self._padding[: nbytes - 8],
            nbytes=nbytes,
            shape=(side, side, 3),
            seq=seq,
            epoch=epoch,
            model=plan.model,
            priority=rng.randrange(options.priorities) if plan.priority is None else plan.priority,
            ttl_ms=options.ttl_ms if plan.is_timed else None,
            keep=plan.keep,
            pts_ns=self.last_id,
            meta={"id": self.last_id},
        )
        if rng.random() < shares.get("bad", 0.0):
            # Decoding turns the first into a BadFrame; the others are refused by admission.
            change = rng.randrange(3)
            if change == 0:
                return replace(frame, dtype="bool")
            if change == 1:
                return replace(frame, model="nobody")
            return replace(frame, shape=(nbytes,))
        return frame


def as_received(frame: Frame | BadFrame) -> Frame | BadFrame:
    """Return what decoding makes of a frame, for worlds in which messages cross undecoded."""
    if isinstance(frame, Frame) and frame.dtype == "bool":
        return BadFrame("bad_dtype", "bool", frame.stream, frame.seq, frame.epoch, frame.pts_ns, frame.meta)
    return frame
