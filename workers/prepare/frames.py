"""The rows that a model is measured on: frames in every size class, and noise for its other inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.protocol.messages import ModelSpec
from headrace.workers.geometry import Placement
from headrace.workers.model_io import ModelIO
from headrace.workers.prepare.calibration import SEED, Array, CalibrationFrames, load_frames, tensor_feeds


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to feed, one at a time; ``placements`` has one entry for each. ``description`` is for people."""

    io: ModelIO
    frames: tuple[CalibrationFrames, ...]
    count: int
    seed: int
    description: str

    @property
    def placements(self) -> tuple[Placement | None, ...]:
        """Where each frame lies in its size class; None for plain tensors."""
        if not self.frames:
            return (None,) * self.count
        return tuple(placement for frames in self.frames for placement in frames.placements)

    def __call__(self) -> Iterator[dict[str, Array]]:
        """Start a pass over the rows: input name to [1, ...]."""
        plain = [i for i in self.io.inputs if not i.is_image]
        names = [i.feed_name for i in plain]
        plans = [plan for plan in self.io.plans(self.io.classes[0]) if not plan.is_image]
        others = tensor_feeds(plans, names, max(self.count, len(self.placements)), self.seed)()
        if not self.frames:
            yield from others
            return
        image = next(i.feed_name for i in self.io.inputs if i.is_image)
        for frames in self.frames:
            for batch in frames.batches():
                yield {image: batch, **next(others)}

    def split(self) -> tuple[Rows, Rows]:
        """Part the frames in two halves, one to calibrate with and one to judge by; noise serves for both."""
        halves = [frames.split(-(-len(frames) // 2)) for frames in self.frames]
        return (
            replace(self, frames=tuple(first for first, _ in halves)),
            replace(self, frames=tuple(second for _, second in halves)),
        )

    def joined(self) -> Iterator[dict[str, Array]]:
        """Yield the rows of each size class as one batch."""
        rows = self()
        for count in [len(frames) for frames in self.frames] or [self.count]:
            feeds = [next(rows) for _ in range(count)]
            yield {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


def gather(
    io: ModelIO, spec: ModelSpec, sources: Sequence[str], count: int, *, per_class: int = 1, seed: int = SEED
) -> Rows:
    """Choose ``count`` rows in all, at least ``per_class`` in every size class.

    Raises PrepareRefusedError when the sources hold no frame, or are given for a model without images.
    """
    if spec.image is None:
        return Rows(io, (), max(count, per_class), seed, f"{max(count, per_class)} rows of seeded noise")
    share = max(per_class, -(-count // len(io.classes)))
    frames = tuple(load_frames(sources, spec, each, share, seed) for each in io.classes)
    return Rows(io, frames, 0, seed, "; ".join(each.describe() for each in frames))
