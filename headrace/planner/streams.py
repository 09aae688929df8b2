"""What arrives in a simulated world: streams by pattern, a list, or a recorded trace, in blocks of time.

A block holds the arrivals of a short span in order of time, so that memory stays flat however long the run
is. Everything is drawn from the seed; two sources made alike give the same arrivals. Not here: how long a
frame takes to the broker (world.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.clients.load.schedule import BURST_RATIO, BURST_S, CALM_S, Pattern, spread
from headrace.planner.trace_file import TraceFrame, TraceKind

#: Length of a block. At 300,000 frames a second it holds 75,000 arrivals.
BLOCK_S = 0.25

#: Frames of a trace in one block.
TRACE_BLOCK_FRAMES = 65_536


@dataclass(frozen=True, slots=True)
class Block:
    """Arrivals in order of time. ``times_ns`` count from the begin of the run; ``streams`` and ``kinds`` are
    indexes into the source's lists, one of each per arrival."""

    times_ns: Sequence[int]
    streams: Sequence[int]
    kinds: Sequence[int]


class Source(Protocol):
    """What arrives. ``streams`` and ``kinds`` may grow while blocks are read."""

    streams: list[str]
    kinds: list[TraceKind]

    def blocks(self) -> Iterator[Block]:
        """Yield all arrivals."""
        ...


class PatternSource:
    """``count`` streams of one rate; frame kinds in the given shares, one kind a stream."""

    def __init__(
        self,
        count: int,
        fps: float,
        kinds: Sequence[tuple[TraceKind, float]],
        seconds: float,
        *,
        pattern: Pattern = Pattern.CAMERAS,
        seed: int = 0,
    ) -> None:
        """Args:
        count: streams, at least 1.
        fps: mean frames a second of each.
        kinds: what frames are, with shares (any positive numbers); streams get theirs interleaved.
        seconds: length of the run.
        pattern: when frames come.
        seed: of the phases or the gaps.
        """
        self.streams = [f"camera-{number}" for number in range(count)]
        self.kinds = [kind for kind, _ in kinds]
        self._fps = fps
        self._seconds = seconds
        self._pattern = pattern
        self._rng = np.random.default_rng(seed)
        self._kind_of = np.array(spread([share for _, share in kinds], count))

    def blocks(self) -> Iterator[Block]:
        """See Source. To be read once."""
        spans = self._cameras() if self._pattern is Pattern.CAMERAS else self._random(self._rates())
        for times_s, streams in spans:
            order = np.argsort(times_s, kind="stable")
            chosen = streams[order]
            times_ns = (times_s[order] * 1e9).astype(np.int64)
            yield Block(times_ns.tolist(), chosen.tolist(), self._kind_of[chosen].tolist())

    def _cameras(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        period_s = 1.0 / self._fps
        phases_s = self._rng.random(len(self.streams)) * period_s
        numbers = np.arange(len(self.streams))
        begin_s = 0.0
        while begin_s < self._seconds:
            end_s = min(begin_s + BLOCK_S, self._seconds)
            first = np.ceil((begin_s - phases_s) / period_s)
            last = np.ceil((end_s - phases_s) / period_s)  # exclusive
            most = int((last - first).max(initial=0))
            times: list[np.ndarray] = [np.empty(0)]
            streams: list[np.ndarray] = [np.empty(0, np.int64)]
            for step in range(most):
                is_in = first + step < last
                times.append(phases_s[is_in] + (first[is_in] + step) * period_s)
                streams.append(numbers[is_in])
            yield np.concatenate(times), np.concatenate(streams)
            begin_s = end_s

    def _random(self, rates: Iterable[tuple[float, float]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        begin_s = 0.0
        for length_s, rate in rates:
            count = int(self._rng.poisson(rate * length_s))
            times = begin_s + self._rng.random(count) * length_s
            yield times, self._rng.integers(0, len(self.streams), count)
            begin_s += length_s

    def _rates(self) -> Iterator[tuple[float, float]]:
        """Yield (length in s, frames a second of all streams) until the run is over."""
        rate = self._fps * len(self.streams)
        calm = rate * (CALM_S + BURST_S) / (CALM_S + BURST_S * BURST_RATIO)
        left_s = self._seconds
        is_burst = True  # turned at once: a run begins calm
        state_s = 0.0 if self._pattern is Pattern.BURSTS else self._seconds
        while left_s > 0:
            if state_s <= 0:
                is_burst = not is_burst
                state_s = float(self._rng.exponential(BURST_S if is_burst else CALM_S))
            length_s = min(BLOCK_S, state_s, left_s)
            middle_s = self._seconds - left_s + length_s / 2
            match self._pattern:
                case Pattern.BURSTS:
                    yield length_s, calm * (BURST_RATIO if is_burst else 1.0)
                case Pattern.RAMP:
                    yield length_s, rate * middle_s / self._seconds
                case _:
                    yield length_s, rate
            left_s -= length_s
            state_s -= length_s


class TraceSource:
    """Frames of a trace, at their own times divided by ``speed``, up to ``seconds`` of the run."""

    def __init__(
        self, frames: Iterable[TraceFrame], *, speed: float = 1.0, seconds: float | None = None
    ) -> None:
        self.streams: list[str] = []
        self.kinds: list[TraceKind] = []
        self._frames = frames
        self._speed = speed
        self._end_s = seconds

    def blocks(self) -> Iterator[Block]:
        """See Source. To be read once."""
        stream_of: dict[str, int] = {}
        kind_of: dict[TraceKind, int] = {}
        times: list[int] = []
        streams: list[int] = []
        kinds: list[int] = []
        for frame in self._frames:
            time_s = frame.time_s / self._speed
            if self._end_s is not None and time_s >= self._end_s:
                break
            stream = stream_of.setdefault(frame.stream, len(stream_of))
            if stream == len(self.streams):
                self.streams.append(frame.stream)
            kind = kind_of.setdefault(frame.kind, len(kind_of))
            if kind == len(self.kinds):
                self.kinds.append(frame.kind)
            times.append(round(time_s * 1e9))
            streams.append(stream)
            kinds.append(kind)
            if len(times) >= TRACE_BLOCK_FRAMES:
                yield Block(times, streams, kinds)
                times, streams, kinds = [], [], []
        if times:
            yield Block(times, streams, kinds)
