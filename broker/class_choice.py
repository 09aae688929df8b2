"""Which of the batches that could be sent now goes first: pure helpers of the dispatcher.

Not here: what makes a class urgent (queues.py), when its batch is closed (batching.py), ageing across classes
(dispatch.py).

Theory of operation. The class whose next frame has the highest priority goes first; among equals one that
gives way comes last, then the earliest deadline decides, then age. One exception is for efficiency: a full
batch goes before a partial one of the same priority while the partial one still meets its objective and its
deadlines after it, by the cost table. That loses nothing and the partial one becomes fuller meanwhile. Going
by frames per millisecond alone was tried and lost: it lets rare and expensive classes wait until they have no
slack, and with costs in proportion to the area the highest rate that meets the objective fell by a tenth
(docs/adr/0010-default-policy.md).
"""

from __future__ import annotations

from dataclasses import replace

from headrace.broker.batching import ClassView, CloseNow, GiveWay
from headrace.broker.worker_pool import ClassPool
from headrace.broker.worker_registry import Worker
from headrace.protocol.per_frame import per_frame


@per_frame(frozen=True, slots=True)
class Choice:
    """A batch that could be sent now. ``count`` is 1 and a suspect's if ``is_alone``. ``is_growing``: no
    worker is idle and it may still become fuller or more urgent, so it is sent only if it would lose its
    slot to another class. ``gives_way``: its policy lets others go first. ``is_full``: no more frames go in.
    ``oldest_ns`` is when the longest waiting frame of its class came."""

    pool: ClassPool
    worker: Worker
    count: int
    urgency: tuple[int, int, int] = (0, 0, 0)
    oldest_ns: int = 0
    is_alone: bool = False
    is_growing: bool = False
    gives_way: bool = False
    is_full: bool = False

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """Return the order in which choices are served, smaller first."""
        priority, deadline_ns, since_ns = self.urgency
        return priority, self.gives_way, deadline_ns, since_ns

    @property
    def due_ns(self) -> int:
        """Return until when the batch should be done: its first frame's deadline, or the objective."""
        return min(self.urgency[1], self.oldest_ns + self.pool.served.objective_ns)


@per_frame(frozen=True, slots=True)
class Growing:
    """A batch that its policy lets grow while no worker is idle: until ``until_ns`` if it stays below
    ``limit`` frames and no worker changes, which ``version`` tells. In most turns that is so."""

    pool: ClassPool
    worker: Worker
    version: int
    until_ns: int
    limit: int

    def still_grows(self, version: int, count: int, now_ns: int) -> bool:
        """True when the policy would say the same again."""
        return version == self.version and count < self.limit and now_ns < self.until_ns


def grow(pool: ClassPool, worker: Worker, view: ClassView, until_ns: int, version: int) -> Growing:
    """Note for how long a batch grows. A policy that looks ahead is asked anew every time."""
    policy = pool.served.policy
    limit = min(view.max_batch_size, policy.size_limit or view.max_batch_size)
    return Growing(pool, worker, version, 0 if policy.is_looking_ahead else until_ns, limit)


def choice_of(
    pool: ClassPool,
    worker: Worker,
    view: ClassView,
    decision: CloseNow | GiveWay,
    now_ns: int,
    *,
    is_growing: bool,
) -> Choice:
    """Return the batch that a policy has decided to close."""
    return Choice(
        pool,
        worker,
        decision.count,
        pool.served.queue.urgency(now_ns),
        view.oldest_ns,
        is_growing=is_growing,
        gives_way=isinstance(decision, GiveWay),
        is_full=decision.count >= view.max_batch_size,
    )


def most_urgent(choices: list[Choice], now_ns: int) -> Choice | None:
    """Return the choice that is served, None when all of them had better go on growing."""
    ready = [choice for choice in choices if not choice.is_growing]
    if not ready:
        return None
    best = min(ready, key=_rank)
    first = min(choices, key=_rank)
    if not first.is_full:
        full = [each for each in ready if each.is_full and each.urgency[0] == first.urgency[0]]
        if full:
            fullest = min(full, key=_rank)
            if _can_follow(first, fullest, now_ns):
                return fullest
    return best if first is best else instead(best, first) or best


def instead(best: Choice, other: Choice) -> Choice | None:
    """Return the other choice for the worker that the best one would take, None if that can't run it.

    The slot goes away in any case, so a batch that could still grow goes as it is."""
    if best.worker.index not in other.pool.workers:
        return None
    count = min(other.count, other.pool.service(best.worker).max_batch_size)
    return replace(other, worker=best.worker, count=count, is_growing=False)


def _rank(choice: Choice) -> tuple[int, bool, int, int]:
    return choice.rank


def _can_follow(first: Choice, full: Choice, now_ns: int) -> bool:
    """True when the more urgent batch is still in time after the full one on the same worker."""
    worker = full.worker
    if worker.index not in first.pool.workers:
        return True
    start_ns = max(worker.busy_until_ns, now_ns)
    own_ns = first.pool.service(worker).cost_ns
    return start_ns + full.pool.service(worker).cost_ns + own_ns <= first.due_ns
