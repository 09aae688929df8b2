"""The in-process baselines: the same work without any transport, in one thread.

``InProcessLoop`` serves arrivals with one queue per size class, or with one queue for all that cuts a batch
at each change of size. A batch grows while the device is busy; frames are gathered into a buffer, then the
device takes T(b).
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import SIZES, draw
from benchmarks.emulation import cost_s
from benchmarks.graphs import session
from benchmarks.results import probe_result

MAX_BATCH = 32


def run_mean(model: Any, images: list[np.ndarray], max_batch_size: int, count: list[int]) -> None:
    """Gather full batches of frames and run W1's graph on them for ever; ``count[0]`` counts."""
    buffer = np.empty((max_batch_size, *images[0].shape), dtype=np.uint8)
    following = 0
    while True:
        for row in buffer:
            row[...] = images[following]
            following = (following + 1) % len(images)
        model.run(None, {"frames": buffer})
        count[0] += max_batch_size


class BareFunction:
    """W1's function called with one frame at a time, when each is due."""

    def __init__(self, *, model: str, size: int) -> None:
        rng = np.random.default_rng(1)
        self._session = session(Path(model), 1)
        self._images = [rng.integers(0, 256, (1, size, size, 3), dtype=np.uint8) for _ in range(64)]

    def probe(self, question: dict[str, Any]) -> dict[str, Any]:
        """Serve one run of arrivals; return its figures."""
        arrivals = draw(question["pattern"], question["rate"], question["duration_s"], question["seed"])
        latencies: list[float | None] = []
        began_s = time.monotonic() + 0.05
        for index, due_s in enumerate(arrivals.times_s):
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            self._session.run(None, {"frames": self._images[index % len(self._images)]})
            latencies.append((time.monotonic() - began_s - due_s) * 1e3)
        return probe_result(question, arrivals.times_s, latencies, largest_lag_s=0.0)


class InProcessLoop:
    """Serves seeded arrivals by itself. ``has_classes`` False: one queue, cut at each change of size."""

    def __init__(self, *, has_classes: bool, is_scaled: bool) -> None:
        rng = np.random.default_rng(1)
        self._is_scaled = is_scaled
        self._has_classes = has_classes
        self._images = [
            [rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(8)] for size in SIZES
        ]
        self._buffers = [np.zeros((MAX_BATCH, size, size, 3), dtype=np.uint8) for size in SIZES]

    def probe(self, question: dict[str, Any]) -> dict[str, Any]:
        """Serve one run of arrivals; return its figures."""
        arrivals = draw(question["pattern"], question["rate"], question["duration_s"], question["seed"])
        times, count = arrivals.times_s, len(arrivals.times_s)
        sizes = [arrivals.size_index(index) for index in range(count)]
        queues: list[deque[int]] = [deque() for _ in (SIZES if self._has_classes else (0,))]
        ended_s = [0.0] * count
        following = 0
        began_s = time.monotonic() + 0.05
        give_up_s = question["duration_s"] + question["drain_s"]
        while following < count or any(queues):
            now_s = time.monotonic() - began_s
            if now_s > give_up_s:
                break
            while following < count and times[following] <= now_s:
                queues[sizes[following] if self._has_classes else 0].append(following)
                following += 1
            batch = self._take(queues, sizes)
            if batch:
                self._run(batch, sizes[batch[0]])
                done_s = time.monotonic() - began_s
                for index in batch:
                    ended_s[index] = done_s
            else:
                time.sleep(max(0.0, times[following] - now_s))
        latencies = [
            (ended - due) * 1e3 if ended else None for due, ended in zip(times, ended_s, strict=True)
        ]
        return probe_result(question, times, latencies, largest_lag_s=0.0)

    def _take(self, queues: list[deque[int]], sizes: list[int]) -> list[int]:
        waiting = [queue for queue in queues if queue]
        if not waiting:
            return []
        queue = min(waiting, key=lambda each: each[0])  # whose oldest frame came first
        batch = [queue.popleft()]
        while queue and len(batch) < MAX_BATCH and sizes[queue[0]] == sizes[batch[0]]:
            batch.append(queue.popleft())
        return batch

    def _run(self, batch: list[int], size_index: int) -> None:
        buffer, images = self._buffers[size_index], self._images[size_index]
        for row, index in enumerate(batch):
            buffer[row] = images[index % len(images)]
        time.sleep(cost_s(len(batch), SIZES[size_index], is_scaled=self._is_scaled))
