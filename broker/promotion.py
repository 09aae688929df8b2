"""Frames of a smaller size class that ride in the free rows of a larger one's batch.

Not here: which batch is sent (dispatch.py), how a frame sits in its class (workers/geometry.py, which takes
any frame that the class contains: coordinates come back in the frame's own pixels).

Theory of operation. A batch is padded up to its bucket, so some rows cost nothing, and further ones cost less
than a frame's share of its own batch where the fixed costs decide. All waiting frames of a smaller class of
the same model ride along if they fit into the free rows and the batch grows by no more than they would take
in full batches of their own, by the cost table: so it never costs a worker time, and they need not wait. A
price that is lower only than that of the small batch they make now was tried and lost: with costs in
proportion to the area it took 7 % of the highest rate. All or none: to take a few of many would not save
their batch. They then belong to the larger class: the outcome names it, and if the worker is lost they wait
there.
"""

from __future__ import annotations

from headrace.broker.costs import CostTable
from headrace.broker.model_table import ServedClass
from headrace.broker.records import FrameRecord
from headrace.broker.worker_registry import Worker


class Promotion:
    """Takes riders out of their queues. ``max_bytes`` of payload fit into one message to a worker."""

    def __init__(self, costs: CostTable, max_frames: int, max_bytes: int) -> None:
        self._costs = costs
        self._max_frames = max_frames
        self._max_bytes = max_bytes

    def take(
        self, served: ServedClass, worker: Worker, records: list[FrameRecord], now_ns: int
    ) -> list[FrameRecord]:
        """Return the frames that ride with ``records`` in a batch of ``served``, taken out of their lines."""
        riders: list[FrameRecord] = []
        if served.queue:
            # What waits in the class itself comes first, even if one message could not carry more of it.
            return riders
        limit = min(worker.services[served.index].max_batch_size, self._max_frames)
        for smaller in served.smaller:
            together = records + riders
            if self._has_room(smaller, served, limit - len(together)) and self._pays(
                smaller, served, worker, together, now_ns
            ):
                taken = smaller.queue.take(len(smaller.queue), now_ns)
                smaller.promoted_count += len(taken)
                for record in taken:
                    record.size_class = served.spec.name
                riders += taken
        return riders

    def _has_room(self, smaller: ServedClass, served: ServedClass, room: int) -> bool:
        queue, spec = smaller.queue, served.spec
        if not 0 < len(queue) <= room or queue.has_exact:
            return False
        # A frame that is larger than all classes may have been put into a smaller one of another shape.
        return all(
            record.frame.shape[0] <= spec.height and record.frame.shape[1] <= spec.width for record in queue
        )

    def _pays(
        self,
        smaller: ServedClass,
        served: ServedClass,
        worker: Worker,
        records: list[FrameRecord],
        now_ns: int,
    ) -> bool:
        """True when riding costs the worker no more than full batches of their own would, makes nobody too
        late, and one message can carry all."""
        own = worker.services.get(smaller.index)
        if own is None:
            return False
        riders = list(smaller.queue)
        if sum(record.nbytes for record in (*records, *riders)) > self._max_bytes:
            return False
        count = len(records)
        together_ns = self._predict_ns(worker, served, count + len(riders))
        added_ns = together_ns - self._predict_ns(worker, served, count)
        if added_ns * own.max_batch_size > own.cost_ns * len(riders):
            return False
        done_ns = max(worker.busy_until_ns, now_ns) + together_ns
        return all(
            record.deadline_ns is None or done_ns <= record.deadline_ns for record in (*records, *riders)
        )

    def _predict_ns(self, worker: Worker, served: ServedClass, count: int) -> int:
        return self._costs.predict_ns(worker.id, served.model, served.live_version, served.spec.name, count)
