"""When a batch is closed: pure policies over a small view of one size class.

Not here: which class or worker (dispatch.py), which frames (queues.py).

Theory of operation. A policy answers "close now, with this many", "close only if the worker would idle
otherwise" or "look again at this time". One rule stands above all policies: a batch that is not full is
closed only for a worker that is idle (or about to be), because a partial batch parked behind a running one
could have gone on growing for nothing. A full batch may wait in a worker's prefetch slot. Measured by hand
before this was written, letting batches grow until a worker is idle tripled the goodput of the same program.

``adaptive`` learns from batches that are done: 99 % of the frames are within the objective exactly as long as
at most one in a hundred is late, so counting late frames is enough. How busy the workers are is the share of
batches that found one idle: it costs one comparison per batch and is right whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from headrace.broker.settings import ClassPolicy
from headrace.protocol.peers import MAX_BATCH_SIZE
from headrace.protocol.per_frame import per_frame

#: A worker that is predicted to fall idle within this time counts as idle, as long as its way is not known.
IDLE_LEAD_NS = 2_000_000

#: "auto": a window of 2 to 3 run times is the usual rule of those who set it by hand.
AUTO_FACTOR = 2.5

#: Frames after which ``adaptive`` judges: two late ones are the 99th percentile. A full second of one camera
#: is less than that, a busy class gets there in a tenth of one.
JUDGED_FRAMES = 200

#: ``adaptive``: at most this share of batches found an idle worker = the workers are saturated; at least
#: IDLE_SHARE of them = waiting for more frames would leave workers idle.
SATURATED_SHARE = 0.05
IDLE_SHARE = 0.5

#: What is left of the batch size after a judgement "late" (TCP halves; a batch of half the size can cost a
#: third of the throughput, so this is gentler), and steps from no wait to the longest one.
SIZE_DECREASE = 0.75
WAIT_STEPS = 8

#: A wait below this is none: the loop's own turns are as long.
SHORTEST_WAIT_NS = 100_000


@per_frame(frozen=True, slots=True)
class ClassView:
    """What a policy sees of one size class. ``waiting_count`` >= 1; ``oldest_ns`` is when the longest
    waiting frame was received; ``next_idle_ns`` is when a worker with a free slot is predicted to fall
    idle (None when none has a free slot or nothing is known), ``lead_ns`` how long before that a batch must
    be sent to be there in time; ``full_ns`` is the predicted run of a full batch.

    The rest is filled in for policies that look ahead: ``due_ns`` is the earliest deadline of a waiting
    frame, ``run_ns`` the predicted run of all that waits, ``frames_per_ns`` the measured arrival rate,
    ``rivals_ns`` the predicted run of one full batch of each other class that has frames for the same worker
    (None: no other has)."""

    waiting_count: int
    oldest_ns: int
    max_batch_size: int
    has_idle_worker: bool
    has_free_slot: bool
    next_idle_ns: int | None = None
    lead_ns: int = IDLE_LEAD_NS
    full_ns: int = 0
    due_ns: int | None = None
    run_ns: int = 0
    frames_per_ns: float = 0.0
    rivals_ns: int | None = None

    def has_idle_worker_at(self, now_ns: int) -> bool:
        """True when a worker is idle, or will be before a batch could reach it."""
        if self.has_idle_worker:
            return True
        return (
            self.has_free_slot
            and self.next_idle_ns is not None
            and self.next_idle_ns - now_ns <= self.lead_ns
        )

    @property
    def close_to_idle_ns(self) -> int | None:
        """Return when a batch must be sent so that the next idle worker does not wait for it."""
        return None if self.next_idle_ns is None else self.next_idle_ns - self.lead_ns


@per_frame(frozen=True, slots=True)
class CloseNow:
    """Close a batch of ``count`` frames now."""

    count: int


@per_frame(frozen=True, slots=True)
class GiveWay:
    """Let other classes go first; close a batch of ``count`` frames only if the worker would idle
    otherwise. At ``at_ns`` this turns into CloseNow."""

    count: int
    at_ns: int


@per_frame(frozen=True, slots=True)
class LookAgain:
    """Nothing yet; ask again at ``at_ns`` (None: only an event can change the answer)."""

    at_ns: int | None


Decision = CloseNow | GiveWay | LookAgain


class BatchPolicy(Protocol):
    """Decides from the view, the time and what it has observed: the same history gives the same answers.

    ``window_ns`` is how long a frame may now wait for others while a worker is idle, ``size_limit`` the
    largest batch as of now (None: the class's own limit): both are for people to see. ``is_looking_ahead``:
    wants the whole view; ``is_learning``: wants to observe."""

    is_looking_ahead: ClassVar[bool]
    is_learning: ClassVar[bool]

    @property
    def window_ns(self) -> int:
        """See the class."""
        ...

    @property
    def size_limit(self) -> int | None:
        """See the class."""
        ...

    def decide(self, view: ClassView, now_ns: int) -> Decision:
        """Return what to do with the waiting frames of one size class."""
        ...

    def observe(self, latencies_ns: Sequence[int], ran_ns: int, *, found_idle: bool) -> None:
        """Take in a batch that is done: what each frame took from received to done, how long the worker
        ran it, and whether that worker was idle when it was sent."""
        ...


class WindowPolicy:
    """Close when full, or when the oldest frame has waited the window and a worker is idle.

    ``max_queue_delay_ns`` None is "auto": AUTO_FACTOR run times, and no more than leaves room in the
    objective for the batch that runs before and for the frame's own."""

    is_looking_ahead: ClassVar[bool] = False
    is_learning: ClassVar[bool] = False
    size_limit: int | None = None

    def __init__(self, max_queue_delay_ns: int | None, objective_ns: int) -> None:
        self._delay_ns = max_queue_delay_ns
        self._objective_ns = objective_ns
        self.window_ns = max_queue_delay_ns or 0

    def decide(self, view: ClassView, now_ns: int) -> Decision:
        """See BatchPolicy."""
        if self._delay_ns is None:
            self.window_ns = auto_window_ns(view.full_ns, self._objective_ns)
        if not view.has_free_slot:
            return LookAgain(None)
        if view.waiting_count >= view.max_batch_size:
            return CloseNow(view.max_batch_size)
        due_ns = view.oldest_ns + self.window_ns
        if now_ns < due_ns:
            return LookAgain(due_ns)
        if view.has_idle_worker_at(now_ns):
            return CloseNow(view.waiting_count)
        return LookAgain(view.close_to_idle_ns)

    def observe(self, latencies_ns: Sequence[int], ran_ns: int, *, found_idle: bool) -> None:
        """See BatchPolicy: nothing is learned."""


class AdaptivePolicy:
    """A batch grows as long as no worker is idle; size and wait follow the observed latency.

    Additive increase, multiplicative decrease (AIMD), judged every JUDGED_FRAMES frames. Late: the wait is
    halved; if there is none, the workers are not saturated and two runs of the largest batch exceed the
    objective, the size shrinks, unless a smaller batch took as long when one was last seen. Late and
    saturated: smaller batches would make it worse, so the size doubles. Saturated is a class whose batches
    find no idle worker, or are mostly as large as the size allows: a worker of one slot is idle whenever it
    can be sent to. In time: the size grows by one, and the wait by one step up to its cap, or to nothing when
    workers idle.

    Invariants: 1 <= size <= the class's limit; 0 <= wait <= the cap (``max_queue_delay_ms``; 0 = never wait).
    """

    is_looking_ahead: ClassVar[bool] = False
    is_learning: ClassVar[bool] = True

    def __init__(self, max_wait_ns: int | None, objective_ns: int, max_batch_size: int) -> None:
        self._max_wait_ns = max_wait_ns or 0
        self._is_auto = max_wait_ns is None
        self._objective_ns = objective_ns
        self._max_size = max_batch_size
        self._size = max_batch_size
        self.window_ns = 0
        self._frames_count = self._late_count = self._batches_count = self._idle_count = self._full_count = 0
        self._largest = self._largest_ran_ns = 0
        # What a batch of each size took when it was last seen: at most max_batch_size entries.
        self._ran_ns: dict[int, int] = {}

    @property
    def size_limit(self) -> int | None:
        """See BatchPolicy."""
        return self._size

    def decide(self, view: ClassView, now_ns: int) -> Decision:
        """See BatchPolicy."""
        if self._is_auto:
            self._max_wait_ns = auto_window_ns(view.full_ns, self._objective_ns)
        if not view.has_free_slot:
            return LookAgain(None)
        limit = min(view.max_batch_size, self._size)
        if view.waiting_count >= limit:
            return CloseNow(limit)
        if not view.has_idle_worker_at(now_ns):
            return LookAgain(view.close_to_idle_ns)
        due_ns = view.oldest_ns + self.window_ns
        return CloseNow(view.waiting_count) if now_ns >= due_ns else LookAgain(due_ns)

    def observe(self, latencies_ns: Sequence[int], ran_ns: int, *, found_idle: bool) -> None:
        """See BatchPolicy."""
        objective_ns = self._objective_ns
        self._frames_count += len(latencies_ns)
        self._late_count += sum(latency_ns > objective_ns for latency_ns in latencies_ns)
        self._batches_count += 1
        self._idle_count += found_idle
        self._full_count += len(latencies_ns) >= self._size
        if len(latencies_ns) >= self._largest:
            self._largest = len(latencies_ns)
            self._largest_ran_ns = ran_ns
        self._ran_ns[len(latencies_ns)] = ran_ns
        if self._frames_count >= JUDGED_FRAMES:
            self._judge()
            self._begin()

    def _begin(self) -> None:
        self._frames_count = self._late_count = self._batches_count = self._idle_count = self._full_count = 0
        self._largest = self._largest_ran_ns = 0

    def _judge(self) -> None:
        idle_share = self._idle_count / self._batches_count
        if self._late_count * 100 <= self._frames_count:
            self._size = min(self._size + 1, self._max_size)
            step_ns = -(-self._max_wait_ns // WAIT_STEPS)
            self.window_ns = (
                0 if idle_share >= IDLE_SHARE else min(self.window_ns + step_ns, self._max_wait_ns)
            )
        elif idle_share <= SATURATED_SHARE or 2 * self._full_count > self._batches_count:
            self._size = min(self._size * 2, self._max_size)
            self.window_ns = self._less_wait_ns()
        elif self.window_ns:
            self.window_ns = self._less_wait_ns()
        elif 2 * self._largest_ran_ns > self._objective_ns:
            size = max(int(min(self._size, self._largest) * SIZE_DECREASE), 1)
            # A device whose batches cost the same at any size gains nothing, and would be saturated.
            seen = max((count for count in self._ran_ns if count <= size), default=None)
            if seen is None or 2 * self._ran_ns[seen] <= self._objective_ns:
                self._size = size

    def _less_wait_ns(self) -> int:
        half_ns = self.window_ns // 2
        return half_ns if half_ns >= SHORTEST_WAIT_NS else 0


class DeferredPolicy:
    """Close at the latest moment at which the batch still meets its deadlines and the objective.

    That moment is the earliest deadline (or the objective of the oldest frame) less the predicted run of what
    will have come by then, less a batch of each other class, less its way. Waiting must be good for
    something: if no other class has frames for the worker, or no further frame is expected by then, the batch
    closes at once. It never costs idle time: while it waits, other classes go first, and if all of them wait,
    the most urgent one is run.
    """

    is_looking_ahead: ClassVar[bool] = True
    is_learning: ClassVar[bool] = False
    size_limit: int | None = None

    def __init__(self, objective_ns: int) -> None:
        self._objective_ns = objective_ns
        self.window_ns = 0

    def decide(self, view: ClassView, now_ns: int) -> Decision:
        """See BatchPolicy."""
        latest_ns = self._latest_ns(view)
        self.window_ns = 0 if view.rivals_ns is None else max(latest_ns - view.oldest_ns, 0)
        if not view.has_free_slot:
            return LookAgain(None)
        if view.waiting_count >= view.max_batch_size:
            return CloseNow(view.max_batch_size)
        if not view.has_idle_worker_at(now_ns):
            return LookAgain(view.close_to_idle_ns)
        expected_count = view.frames_per_ns * (latest_ns - now_ns)
        if view.rivals_ns is not None and expected_count >= 1.0:
            return GiveWay(view.waiting_count, latest_ns)
        return CloseNow(view.waiting_count)

    def _latest_ns(self, view: ClassView) -> int:
        due_ns = view.oldest_ns + self._objective_ns
        if view.due_ns is not None:
            due_ns = min(due_ns, view.due_ns)
        # By then it may be full: reckoning with that leaves the batch a little early rather than late.
        run_ns = max(view.run_ns, view.full_ns) if view.frames_per_ns else view.run_ns
        # At its latest moment the others may be at theirs, and what runs can't be interrupted.
        return due_ns - (view.rivals_ns or 0) - run_ns - view.lead_ns

    def observe(self, latencies_ns: Sequence[int], ran_ns: int, *, found_idle: bool) -> None:
        """See BatchPolicy: nothing is learned here; costs and rates are measured elsewhere."""


def auto_window_ns(full_ns: int, objective_ns: int) -> int:
    """Return the window that "auto" stands for: AUTO_FACTOR times the run of a full batch, and at most what
    the objective leaves beside the batch that runs before and the frame's own."""
    return max(min(int(AUTO_FACTOR * full_ns), objective_ns - 2 * full_ns), 0)


def make_policy(settings: ClassPolicy, max_batch_size: int = MAX_BATCH_SIZE) -> BatchPolicy:
    """Return the policy that the settings of a size class name.

    Raises:
        ValueError: the policy's name is unknown (the configuration refuses it before).
    """
    delay_ms = settings.max_queue_delay_ms
    delay_ns = None if isinstance(delay_ms, str) else int(delay_ms * 1e6)
    objective_ns = int(settings.objective_ms * 1e6)
    match settings.policy:
        case "window":
            return WindowPolicy(delay_ns, objective_ns)
        case "adaptive":
            return AdaptivePolicy(delay_ns, objective_ns, max_batch_size)
        case "deferred":
            return DeferredPolicy(objective_ns)
        case unknown:
            raise ValueError(f"unknown batching policy {unknown!r}; known: adaptive, deferred, window")
