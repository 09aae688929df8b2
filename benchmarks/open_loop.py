"""The open-loop load on headrace: frames are pushed when they are due, whatever became of those before.

Latency runs from the time a frame was due, so a sender that falls behind shows it. Not here: the schedule.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np

from benchmarks.arrivals import SIZES, STREAMS, draw, size_index_of
from benchmarks.lanes import producer_options
from benchmarks.results import probe_result
from benchmarks.stats import percentile
from headrace.clients.producer import Producer
from headrace.clients.subscriber import Subscriber
from headrace.errors import RequestTimeoutError
from headrace.protocol.messages import Outcome, Status, Timing

#: A sender that is so far behind its schedule can't reach any objective worth measuring.
HOPELESS_LAG_S = 1.0

#: How long an overloaded system gets to finish what it took.
DRAIN_LIMIT_S = 30.0

_STAGES = ("queued_us", "batched_us", "staged_us", "ran_us", "published_us")


class HeadraceLoop:
    """One producer and one subscriber of a broker; ``probe`` may be called again and again.

    ``side``: all frames are squares of that size; None means the sizes of W3. ``models`` names the model for
    each size; none means the broker's default."""

    def __init__(
        self,
        address: str,
        *,
        lane: str,
        in_flight: int,
        side: int | None = None,
        models: list[str] | None = None,
    ) -> None:
        rng = np.random.default_rng(1)
        sides = SIZES if side is None else (side,)
        self._models = models or [""] * len(sides)
        self._images = [[rng.integers(0, 256, (s, s, 3), dtype=np.uint8) for _ in range(8)] for s in sides]
        options: dict[str, Any] = producer_options(lane)
        self._subscriber = Subscriber(address, start="now")
        self._producer = Producer(
            address, max_unfinished_frames=in_flight, max_unfinished_bytes=2**31, **options
        )
        self._producer.wait_connected(10.0)
        self._lock = threading.Lock()
        self._due: dict[tuple[str, int], tuple[int, float]] = {}
        self._latencies: list[float | None] = []
        self._stages: list[list[int]] = []
        self._is_done = threading.Event()
        self._left_count = 0
        self._run = 0
        threading.Thread(target=self._read, daemon=True).start()

    def probe(self, question: dict[str, Any]) -> dict[str, Any]:
        """Push one run of arrivals, wait for the ends of its frames, return its figures."""
        arrivals = draw(question["pattern"], question["rate"], question["duration_s"], question["seed"])
        self._run += 1
        names = [f"run-{self._run}-camera-{number}" for number in range(STREAMS)]
        next_seq = [0] * STREAMS
        with self._lock:
            self._due.clear()
            self._latencies = [None] * len(arrivals.times_s)
            self._stages = []
            self._left_count = len(arrivals.times_s)
            self._is_done.clear()
        began_s = time.monotonic() + 0.05
        largest_lag_s = 0.0
        for index, (due_s, stream) in enumerate(zip(arrivals.times_s, arrivals.streams, strict=True)):
            wait_s = began_s + due_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            else:
                largest_lag_s = max(largest_lag_s, -wait_s)
                if largest_lag_s > HOPELESS_LAG_S:
                    break  # the rest has no result: it counts as lost
            self._due[names[stream], next_seq[stream]] = (index, began_s + due_s)
            next_seq[stream] += 1
            size = size_index_of(stream) if len(self._images) > 1 else 0
            image = self._images[size][index % len(self._images[size])]
            try:
                self._producer.push(image, stream=names[stream], model=self._models[size], timeout=10.0)
            except RequestTimeoutError:
                break  # a frame that the producer has no room for has no result: it counts as lost
        self._is_done.wait(question["drain_s"])
        with contextlib.suppress(RequestTimeoutError):
            self._producer.flush(DRAIN_LIMIT_S)  # so that the next run begins on an idle system
        with self._lock:
            self._due.clear()
            latencies, stages = list(self._latencies), list(self._stages)
        result = probe_result(question, arrivals.times_s, latencies, largest_lag_s=largest_lag_s)
        by_stage = zip(_STAGES, zip(*stages, strict=True), strict=False)
        return result | {"stages": {name: percentile(values, 0.5) for name, values in by_stage}}

    def _read(self) -> None:
        for item in self._subscriber:
            now_s = time.monotonic()
            if not isinstance(item, Outcome):
                continue
            with self._lock:
                index, due_s = self._due.pop((item.stream, item.seq or 0), (-1, 0.0))
                if index < 0:
                    continue
                if item.status is Status.OK:
                    self._latencies[index] = (now_s - due_s) * 1e3
                    self._stages.append(_stages(item.timing))
                self._left_count -= 1
                if not self._left_count:
                    self._is_done.set()


def _stages(timing: Timing) -> list[int]:
    return [getattr(timing, name) or 0 for name in _STAGES]
