"""What no scheduler can exceed, however well it knows what will arrive.

The device needs at least so much time as the fewest batches that meet the objective take. Per size class
(batches never mix classes) a batch that ends in time holds at most 32 frames and begins after its last
frame arrived, so a batch whose first frame came at a and last at b ends at b + T or later: b - a + T(count)
must not exceed the objective. Taking as many as fit from the left gives the fewest batches. One frame in a
hundred may be late: the batches that hold the fewest frames are struck out, up to that share, as if late
frames rode elsewhere for their own cost alone. When even that needs more device time than there is, the
rate is impossible. Classes that compete at the same moment are not looked at, so the bound is generous.

That looks at the whole time alone. A burst can be too much while the mean is not: where a frame costs the
same in every class, the device is also taken as a fluid that serves frames in the order of arrival at the
rate of full batches, and turns away each frame that would be late. For equal costs and objectives nobody can
turn away fewer.
"""

from __future__ import annotations

from benchmarks.arrivals import SIZES, Arrivals
from benchmarks.emulation import BASE_MS, cost_s, per_frame_ms

MAX_BATCH = 32
LATE_SHARE = 0.01


def is_possible(arrivals: Arrivals, duration_s: float, objective_s: float, *, is_scaled: bool) -> bool:
    """Tell whether the device time that the arrivals need is there."""
    by_class: list[list[float]] = [[] for _ in SIZES]
    for index, time_s in enumerate(arrivals.times_s):
        by_class[arrivals.size_index(index)].append(time_s)
    sizes: list[int] = []
    needed_s = 0.0
    if not is_scaled and _fewest_late(arrivals.times_s, objective_s) > LATE_SHARE * len(arrivals.times_s):
        return False
    for side, times in zip(SIZES, by_class, strict=True):
        sizes += _fewest_batches(times, side, objective_s, is_scaled=is_scaled)
        needed_s += len(times) * per_frame_ms(side, is_scaled=is_scaled) / 1e3
    late = int(len(arrivals.times_s) * LATE_SHARE)
    batches = len(sizes)
    for size in sorted(sizes):
        if size > late:
            break
        late -= size
        batches -= 1
    return needed_s + batches * BASE_MS / 1e3 <= duration_s + objective_s


def _fewest_late(times_s: tuple[float, ...], objective_s: float) -> int:
    per_frame_s = cost_s(MAX_BATCH, SIZES[0], is_scaled=False) / MAX_BATCH
    late, free_s = 0, 0.0
    for time_s in times_s:
        done_s = max(free_s, time_s) + per_frame_s
        if done_s - time_s > objective_s:
            late += 1
        else:
            free_s = done_s
    return late


def _fewest_batches(times: list[float], side: int, objective_s: float, *, is_scaled: bool) -> list[int]:
    sizes: list[int] = []
    first = 0
    while first < len(times):
        count = 1
        while first + count < len(times) and count < MAX_BATCH:
            ends_s = times[first + count] + cost_s(count + 1, side, is_scaled=is_scaled)
            if ends_s - times[first] > objective_s:
                break
            count += 1
        sizes.append(count)
        first += count
    return sizes
