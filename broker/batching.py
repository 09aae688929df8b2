"""When a batch is closed: pure policies over a small view of one size class.

Not here: which class or worker (dispatch.py), which frames (queues.py).

Theory of operation: a policy answers "close now, with this many" or "look again at this time". One rule
stands above all policies: a batch that is not full is closed only for a worker that is idle (or about
to be), because a partial batch parked behind a running one could have gone on growing for nothing. A full
batch may wait in a worker's prefetch slot. Measured by hand before this was written, letting batches grow
until a worker is idle tripled the goodput of the same program.
"""

from __future__ import annotations

from typing import Protocol

from headrace.broker.settings import ClassPolicy
from headrace.protocol.per_frame import per_frame

#: A worker that is predicted to fall idle within this time counts as idle: about the time a batch needs
#: to travel and be staged, so that the device does not wait for it.
IDLE_LEAD_NS = 2_000_000


@per_frame(frozen=True, slots=True)
class ClassView:
    """What a policy sees of one size class. ``waiting_count`` >= 1; ``oldest_ns`` is when the longest
    waiting frame was received; ``next_idle_ns`` is when a worker with a free slot is predicted to fall
    idle (None when none has a free slot or nothing is known)."""

    waiting_count: int
    oldest_ns: int
    max_batch_size: int
    has_idle_worker: bool
    has_free_slot: bool
    next_idle_ns: int | None = None

    def has_idle_worker_at(self, now_ns: int) -> bool:
        """True when a worker is idle, or will be before a batch could reach it."""
        if self.has_idle_worker:
            return True
        return (
            self.has_free_slot
            and self.next_idle_ns is not None
            and self.next_idle_ns - now_ns <= IDLE_LEAD_NS
        )


@per_frame(frozen=True, slots=True)
class CloseNow:
    """Close a batch of ``count`` frames now."""

    count: int


@per_frame(frozen=True, slots=True)
class LookAgain:
    """Nothing yet; ask again at ``at_ns`` (None: only an event can change the answer)."""

    at_ns: int | None


class BatchPolicy(Protocol):
    """Decides from the view and the time alone: equal arguments give equal answers."""

    def decide(self, view: ClassView, now_ns: int) -> CloseNow | LookAgain:
        """Return what to do with the waiting frames of one size class."""
        ...


class WindowPolicy:
    """Close when full, or when the oldest frame has waited ``max_queue_delay_ns`` and a worker is idle."""

    def __init__(self, max_queue_delay_ns: int) -> None:
        self._delay_ns = max_queue_delay_ns

    def decide(self, view: ClassView, now_ns: int) -> CloseNow | LookAgain:
        """See BatchPolicy."""
        if not view.has_free_slot:
            return LookAgain(None)
        if view.waiting_count >= view.max_batch_size:
            return CloseNow(view.max_batch_size)
        due_ns = view.oldest_ns + self._delay_ns
        if now_ns < due_ns:
            return LookAgain(due_ns)
        if view.has_idle_worker_at(now_ns):
            return CloseNow(view.waiting_count)
        return LookAgain(_lead_before(view.next_idle_ns))


class AdaptivePolicy:
    """Greedy start of the adaptive policy: a batch grows exactly as long as no worker is idle.

    Stateless for now and without a wait of its own; ``max_queue_delay_ms`` will cap the wait that it
    learns once it adapts size and wait to the observed latency.
    """

    def decide(self, view: ClassView, now_ns: int) -> CloseNow | LookAgain:
        """See BatchPolicy."""
        if not view.has_free_slot:
            return LookAgain(None)
        if view.waiting_count >= view.max_batch_size:
            return CloseNow(view.max_batch_size)
        if view.has_idle_worker_at(now_ns):
            return CloseNow(view.waiting_count)
        return LookAgain(_lead_before(view.next_idle_ns))


def make_policy(settings: ClassPolicy) -> BatchPolicy:
    """Return the policy that the settings of a size class name.

    Raises:
        ValueError: the policy's name is unknown (the configuration refuses it before).
    """
    match settings.policy:
        case "window":
            return WindowPolicy(int(settings.max_queue_delay_ms * 1e6))
        case "adaptive":
            return AdaptivePolicy()
        case unknown:
            raise ValueError(f"unknown batching policy {unknown!r}; known: adaptive, window")


def _lead_before(next_idle_ns: int | None) -> int | None:
    return None if next_idle_ns is None else next_idle_ns - IDLE_LEAD_NS
