"""When a frame would be done if it were admitted now, and when a refused one may come again: predictions.

Not here: what a batch costs (costs.py), what a prediction means for a frame (room.py).

Theory of operation. A frame is done after the first worker is free, the frames ahead of it have run, and its
own batch has run. Ahead are, in its own and in every other class that shares the worker, the frames of
higher priority and those of its own priority with an earlier deadline, as queues.py orders them. They leave
at the rate of all workers together, which are taken to be equal partners and never to wait. Everything that
is not known counts as favourable (partial batches, aged frames of lower priority, slots that are filled
behind a running batch), so a frame that is refused would have been late even with some luck, and one that
is admitted may still expire.
"""

from __future__ import annotations

from headrace.broker.costs import CostTable
from headrace.broker.model_table import ModelTable, ServedClass
from headrace.broker.worker_pool import WorkerPools

#: retry_after_ms is kept between these: sooner only adds load, later only adds latency.
MIN_RETRY_MS = 10
MAX_RETRY_MS = 10_000

#: retry_after_ms while nothing is known of the class.
UNKNOWN_RETRY_MS = 1_000


class Forecast:
    """Predicts from the cost table, the queues and the pools; changes nothing."""

    def __init__(self, models: ModelTable, pools: WorkerPools, costs: CostTable) -> None:
        self._models = models
        self._pools = pools
        self._costs = costs

    def done_ns(self, served: ServedClass, priority: int, deadline_ns: int, now_ns: int) -> int | None:
        """Return when a frame of a class would be done, None if that is not known, or of no account
        because it would run at once."""
        pool = self._pools.of(served)
        rate = pool.frames_per_ns(now_ns)
        idle = pool.best_idle()
        worker = idle or pool.first_busy(now_ns)
        if worker is None or rate == 0.0:
            return None
        start_ns = now_ns if idle is not None else max(worker.busy_until_ns, now_ns)
        limit = pool.service(worker).max_batch_size
        ahead = len(served.suspects) + served.queue.count_ahead(priority, deadline_ns)
        if idle is not None and not ahead:
            # It is tried whatever is predicted: only runs correct a prediction that is wrong.
            return None
        # What fills up its own batch runs with it, not before it.
        wait = (ahead - ahead % limit) / rate
        for other in self._models.classes:
            if other is not served and other.queue and worker.index in self._pools.of(other).workers:
                other_rate = self._pools.of(other).frames_per_ns(now_ns)
                count = other.queue.count_ahead(priority, deadline_ns)
                wait += count / other_rate if other_rate else 0.0
        size = min(len(served.queue) + 1, limit)
        own_ns = self._costs.predict_ns(worker.id, served.model, served.live_version, served.spec.name, size)
        return start_ns + int(wait) + own_ns

    def retry_ms(self, served: ServedClass, now_ns: int) -> int:
        """Return after how long room is likely: when one batch more of the class has run."""
        pool = self._pools.of(served)
        rate = pool.frames_per_ns(now_ns)
        if rate == 0.0:
            return UNKNOWN_RETRY_MS
        return clamp_retry_ms(pool.largest_batch / rate)


def clamp_retry_ms(wait_ns: float) -> int:
    """Return a wait as milliseconds for the wire."""
    return min(max(-int(-wait_ns // 1_000_000), MIN_RETRY_MS), MAX_RETRY_MS)
