"""Per size class, the workers that can run it, ordered so that the best one is found in O(log n).

Not here: whether a batch is closed, and which class comes first (dispatch.py).

Theory of operation. A pool keeps three heaps over the workers that serve its class: the idle ones by the
predicted time of a full batch, and the busy ones by their predicted finish of one more batch, once for
those with a free slot and once for all. Whenever a worker changes (a batch sent, done, lost; READY;
leaving) its stamp moves on, which kills its old entries, and new ones are pushed. Dead entries are skipped
when they come up and swept when most of a heap is dead.
"""

from __future__ import annotations

import heapq

from headrace.broker.model_table import ServedClass
from headrace.broker.worker_registry import Service, Worker, WorkerState

#: A heap is swept when it holds this many entries per worker of the pool, and some.
_SWEEP_FACTOR = 4
_SWEEP_ABOVE = 64

#: The rate of a pool is reckoned anew after this: it moves with the learned costs, and all workers are
#: looked at for it.
_RATE_KEEP_NS = 50_000_000

_Heap = list[tuple[int, int, int, Worker]]


class ClassPool:
    """The workers of one size class. Invariant: every READY worker that serves the class, runs nothing alone
    and is reserved for nobody has exactly one live entry in ``idle`` or in ``busy``."""

    def __init__(self, served: ServedClass) -> None:
        self.served = served
        self.workers: dict[int, Worker] = {}
        self.reserved: Worker | None = None  # falls idle, or is idle, for the class's suspects
        self._idle: _Heap = []
        self._open: _Heap = []
        self._busy: _Heap = []
        self._rate = 0.0
        self._rate_until_ns: int | None = None
        self.largest_batch = 0  # of all workers, as of the last reckoning of the rate

    def service(self, worker: Worker) -> Service:
        """Return what a worker of this pool can do for the class."""
        return worker.services[self.served.index]

    def push(self, worker: Worker) -> None:
        """Enter a worker under its present stamp."""
        service = worker.services[self.served.index]
        if not worker.in_flight:
            self._enter(self._idle, service.cost_ns, worker)
            return
        finish_ns = worker.busy_until_ns + service.cost_ns
        self._enter(self._busy, finish_ns, worker)
        if len(worker.in_flight) < worker.slots and not worker.is_alone:
            self._enter(self._open, finish_ns, worker)

    def best_idle(self) -> Worker | None:
        """Return the fastest idle worker."""
        return _peek(self._idle, None)

    def best_open(self, now_ns: int) -> Worker | None:
        """Return the busy worker with a free slot that would finish one more batch first.

        One that is overdue is passed over until it has been heard of again."""
        return _peek(self._open, now_ns)

    def first_busy(self, now_ns: int) -> Worker | None:
        """Return the busy worker, free slot or not, that would finish one more batch first."""
        return _peek(self._busy, now_ns)

    def frames_per_ns(self, now_ns: int) -> float:
        """Return how fast all workers together run full batches, those left out that are overdue or whose
        costs are not known."""
        if self._rate_until_ns is None or now_ns >= self._rate_until_ns:
            self._rate_until_ns = now_ns + _RATE_KEEP_NS
            self._rate = 0.0
            self.largest_batch = 0
            for worker in self.workers.values():
                service = self.service(worker)
                self.largest_batch = max(self.largest_batch, service.max_batch_size)
                if service.is_measured and (not worker.in_flight or now_ns < worker.overdue_ns):
                    self._rate += service.max_batch_size / max(service.cost_ns, 1)
        return self._rate

    def change(self, worker: Worker, *, is_in: bool) -> None:
        """Let a worker in or out."""
        self._rate_until_ns = None
        if is_in:
            self.workers[worker.index] = worker
        else:
            self.workers.pop(worker.index, None)

    def _enter(self, heap: _Heap, key_ns: int, worker: Worker) -> None:
        if len(heap) > _SWEEP_ABOVE and len(heap) > _SWEEP_FACTOR * len(self.workers):
            heap[:] = [entry for entry in heap if entry[3].stamp == entry[2]]
            heapq.heapify(heap)
        heapq.heappush(heap, (key_ns, worker.index, worker.stamp, worker))


class WorkerPools:
    """The pools of all size classes, and the one way in which a worker changes in them."""

    def __init__(self) -> None:
        self._pools: dict[int, ClassPool] = {}
        self.version = 0  # changes with every change of a worker

    def of(self, served: ServedClass) -> ClassPool:
        """Return the pool of a class, made now if the class is new."""
        pool = self._pools.get(served.index)
        if pool is None:
            pool = self._pools[served.index] = ClassPool(served)
        return pool

    def join(self, worker: Worker) -> None:
        """A worker has become READY."""
        for service in worker.services.values():
            self.of(service.served).change(worker, is_in=True)
        self.touch(worker)

    def leave(self, worker: Worker) -> None:
        """A worker takes no more batches: it left, was lost, or sends another READY."""
        for service in worker.services.values():
            self.of(service.served).change(worker, is_in=False)
        self.unreserve(worker)
        worker.stamp += 1
        self.version += 1

    def touch(self, worker: Worker) -> None:
        """A worker's batches or reservation changed: look at it anew."""
        worker.stamp += 1
        self.version += 1
        if worker.state is not WorkerState.READY or worker.reserved_for is not None:
            return
        for service in worker.services.values():
            self.of(service.served).push(worker)

    def reserve(self, pool: ClassPool, worker: Worker) -> None:
        """Give a worker no more batches until it is idle and has run the class's suspects."""
        pool.reserved = worker
        worker.reserved_for = pool.served
        worker.stamp += 1
        self.version += 1

    def unreserve(self, worker: Worker) -> None:
        """End a reservation. Idempotent; touch() must follow if the worker stays."""
        if worker.reserved_for is not None:
            self.of(worker.reserved_for).reserved = None
            worker.reserved_for = None


def _peek(heap: _Heap, now_ns: int | None) -> Worker | None:
    while heap:
        _, _, stamp, worker = heap[0]
        if worker.stamp == stamp and (now_ns is None or now_ns < worker.overdue_ns):
            return worker
        heapq.heappop(heap)
    return None
