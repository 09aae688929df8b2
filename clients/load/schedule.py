"""When frames are due and which stream each belongs to: seeded, open loop, drawn before the clock starts.

Random patterns are drawn at unit rate and stretched to the rate asked for, so that steps of one seed and
different rates compare like with like. Not here: sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]

#: Bursts: a two-state Markov-modulated Poisson process, 3 times the calm rate while it bursts. A state lasts
#: 0.2 s (burst) or 0.6 s (calm) on average: a quarter of the time bursts, the mean rate is the one asked for.
BURST_RATIO = 3.0
BURST_S, CALM_S = 0.2, 0.6

#: Most frames of one run. What became of each is held in memory until the end, at about 250 bytes a frame.
MAX_FRAMES = 5_000_000


class Pattern(StrEnum):
    """``cameras``: each stream at its own steady rate, with a random phase. ``poisson``: at random.
    ``bursts``: at random, with a rate that jumps. ``ramp``: at random, with a rate that rises from zero to
    the rate asked for at the end, so that its mean is half of that."""

    CAMERAS = "cameras"
    POISSON = "poisson"
    BURSTS = "bursts"
    RAMP = "ramp"


@dataclass(frozen=True, slots=True)
class Schedule:
    """``times_s``: ascending, from 0, below the duration. ``streams``: the stream of each frame, from 0."""

    times_s: tuple[float, ...]
    streams: tuple[int, ...]


def draw(pattern: Pattern, rate_per_s: float, duration_s: float, streams_count: int, seed: int) -> Schedule:
    """Return the frames of one step at ``rate_per_s`` frames a second of all streams together.

    Raises ValueError for a rate or duration that is not above zero, or that makes too many frames.
    """
    if not rate_per_s > 0 or not duration_s > 0:
        raise ValueError(f"{rate_per_s:g} frames/s for {duration_s:g} s: both must be above zero")
    if rate_per_s * duration_s > MAX_FRAMES:
        raise ValueError(
            f"{rate_per_s:g} frames/s for {duration_s:g} s are {rate_per_s * duration_s:,.0f} frames;"
            f" at most {MAX_FRAMES:,} make one run"
        )
    rng = np.random.default_rng(seed)
    match pattern:
        case Pattern.CAMERAS:
            return _cameras(rng, rate_per_s, duration_s, streams_count)
        case Pattern.POISSON:
            times = poisson(rng, rate_per_s, duration_s)
        case Pattern.BURSTS:
            times = bursts(rng, rate_per_s, duration_s)
        case Pattern.RAMP:
            times = ramp(rng, rate_per_s, duration_s)
    # A generator of its own, so that the streams do not depend on how many gaps were drawn.
    streams = np.random.default_rng(seed + 1).integers(0, streams_count, len(times))
    return Schedule(tuple(times.tolist()), tuple(streams.tolist()))


def poisson(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> Times:
    """Return arrivals of a Poisson process."""
    return _below(_unit_arrivals(rng, rate_per_s * duration_s) / rate_per_s, duration_s)


def bursts(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> Times:
    """Return arrivals of a Markov-modulated Poisson process: see BURST_RATIO."""
    mean_ratio = (CALM_S + BURST_S * BURST_RATIO) / (CALM_S + BURST_S)
    calm_rate = rate_per_s / mean_ratio
    # Modulation by time change: unit-rate arrivals, placed where the integral of the rate reaches them.
    ends, areas, is_burst = [0.0], [0.0], False
    while ends[-1] < duration_s:
        length_s = float(rng.exponential(BURST_S if is_burst else CALM_S))
        ends.append(ends[-1] + length_s)
        areas.append(areas[-1] + length_s * calm_rate * (BURST_RATIO if is_burst else 1.0))
        is_burst = not is_burst
    unit = _unit_arrivals(rng, areas[-1])
    return _below(np.interp(unit[unit < areas[-1]], areas, ends), duration_s)


def ramp(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> Times:
    """Return Poisson arrivals whose rate rises linearly from zero to ``rate_per_s`` at the end."""
    unit = _unit_arrivals(rng, rate_per_s * duration_s / 2)
    # Until t, rate * t^2 / (2 * duration) frames are expected: solved for t.
    return _below(np.sqrt(2.0 * duration_s / rate_per_s * unit), duration_s)


def spread(shares: Sequence[float], count: int) -> tuple[int, ...]:
    """Return which share each of ``count`` streams belongs to, interleaved.

    By largest debt: each stream goes to the share that is furthest behind, so that any first part of the
    streams has the shares too. Raises ValueError when a share gets no stream."""
    total = sum(shares)
    owed = [0.0] * len(shares)
    chosen = []
    for _ in range(count):
        owed = [debt + share / total for debt, share in zip(owed, shares, strict=True)]
        index = max(range(len(shares)), key=owed.__getitem__)
        owed[index] -= 1.0
        chosen.append(index)
    for index, share in enumerate(shares):
        if index not in chosen:
            raise ValueError(
                f"{count} streams are too few for these shares: none is left for share {share / total:.3g}"
            )
    return tuple(chosen)


def ladder(first: float, last: float, step: float) -> tuple[float, ...]:
    """Return the rates ``first``, ``first + step`` ... up to ``last``, which is included if it is met.

    Raises ValueError if they are not ascending from above zero."""
    if not 0 < first <= last or not step > 0:
        raise ValueError(f"{first:g}:{last:g}:{step:g}: rates rise from above zero by a step above zero")
    count = int((last - first) / step + 1e-9) + 1
    return tuple(first + number * step for number in range(count))


def _unit_arrivals(rng: np.random.Generator, mean_count: float) -> Times:
    """Return arrivals at rate 1, more than enough of them: a Poisson count is never 20 % and 100 above its
    mean."""
    return np.cumsum(rng.exponential(1.0, int(mean_count * 1.2) + 100))


def _below(times: Times, duration_s: float) -> Times:
    return times[times < duration_s]


def _cameras(rng: np.random.Generator, rate_per_s: float, duration_s: float, streams_count: int) -> Schedule:
    period_s = streams_count / rate_per_s
    phases = rng.random(streams_count) * period_s
    steps = np.arange(int(duration_s / period_s) + 2) * period_s
    times = (phases[:, None] + steps[None, :]).ravel()
    streams = np.repeat(np.arange(streams_count), len(steps))
    kept = times < duration_s
    order = np.argsort(times[kept], kind="stable")
    return Schedule(tuple(times[kept][order].tolist()), tuple(streams[kept][order].tolist()))
