"""The in-process baselines in virtual time: one thread, batches that grow while the device is busy.

The same decisions as ``benchmarks.inprocess``, without a clock: what a plain program is worth on an ideal
machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from benchmarks.arrivals import SIZES, Arrivals

MAX_BATCH = 32

#: frames, side -> seconds
Cost = Callable[[int, int], float]


def serve(arrivals: Arrivals, cost: Cost, *, has_classes: bool) -> list[float]:
    """Return the latency of each frame, in seconds. ``has_classes`` False: one queue for all sizes, which
    cuts a batch at each change of size."""
    times = arrivals.times_s
    sizes = [arrivals.size_index(index) for index in range(len(times))]
    queues: list[deque[int]] = [deque() for _ in (SIZES if has_classes else (0,))]
    latencies_s = [0.0] * len(times)
    following, now_s = 0, 0.0
    while following < len(times) or any(queues):
        while following < len(times) and times[following] <= now_s:
            queues[sizes[following] if has_classes else 0].append(following)
            following += 1
        batch = take(queues, sizes)
        if not batch:
            now_s = times[following]
            continue
        now_s += cost(len(batch), SIZES[sizes[batch[0]]])
        for index in batch:
            latencies_s[index] = now_s - times[index]
    return latencies_s


def take(queues: list[deque[int]], sizes: list[int]) -> list[int]:
    """Take a batch from the queue whose oldest frame came first: frames of one size, MAX_BATCH at most."""
    waiting = [queue for queue in queues if queue]
    if not waiting:
        return []
    queue = min(waiting, key=lambda each: each[0])
    batch = [queue.popleft()]
    while queue and len(batch) < MAX_BATCH and sizes[queue[0]] == sizes[batch[0]]:
        batch.append(queue.popleft())
    return batch
