"""The waiting frames of one (model, size class): one queue per priority, with ageing and fairness.

Not here: when a batch is closed (batching.py), where it goes (dispatch.py), what becomes of an expired
frame (core.py).

Theory of operation. A frame's place inside its priority is the tuple ``order``: deadline first (no deadline
sorts last), then a fairness tag, then arrival. The tag is start-time fair queueing in units of frames: a
stream's next frame is tagged one past its last, but never behind the priority's virtual time, so that frames
without deadlines are taken round-robin over the streams that wait and a stream that was idle earns no
credit. Heaps with lazy deletion give O(log n) push, cancel and take; a cancelled entry is skipped when it
comes up, and a heap that is mostly cancelled entries is rebuilt.

Ageing. A frame that has waited ``ageing_ns`` is aged. Each time a frame of a higher priority is taken while a
lower one waits aged, ``debt`` grows by share / (1 - share); at 1 or more the oldest of those aged frames is
taken instead and 1 is paid. Hence the bound: while its class is served at r frames a second, a frame waits
at most ``ageing_ns`` plus ceil((frames aged before it + 1) / share) / r, whatever higher priorities bring.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from headrace.broker.records import FrameRecord

#: Sorts behind every real deadline: no monotonic clock gets here.
_NO_DEADLINE_NS = 1 << 63

#: A lazily deleted heap is rebuilt when it holds more than this many entries and over half are dead.
_REBUILD_ABOVE = 64

_Entry = tuple[tuple[int, int, int], int]


class _LazyHeap:
    """A heap of records with lazy deletion. An entry is dead when its ticket is no longer its record's.

    Entries name records by ticket: a dead one must not keep the payload of a frame that has ended."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._tickets = count()
        self._live: dict[FrameRecord, int] = {}
        self._records: dict[int, FrameRecord] = {}

    def __len__(self) -> int:
        return len(self._live)

    def push(self, key: tuple[int, int, int], record: FrameRecord) -> None:
        self.discard(record)
        ticket = next(self._tickets)
        self._live[record] = ticket
        self._records[ticket] = record
        heapq.heappush(self._heap, (key, ticket))
        if len(self._heap) > _REBUILD_ABOVE and len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if entry[1] in self._records]
            heapq.heapify(self._heap)

    def discard(self, record: FrameRecord) -> None:
        ticket = self._live.pop(record, None)
        if ticket is not None:
            del self._records[ticket]

    def peek(self) -> tuple[tuple[int, int, int], FrameRecord] | None:
        while self._heap:
            key, ticket = self._heap[0]
            record = self._records.get(ticket)
            if record is not None:
                return key, record
            heapq.heappop(self._heap)
        return None

    def __iter__(self) -> Iterator[FrameRecord]:
        return iter(self._live)


class _PriorityQueue:
    """Frames of one priority. ``virtual`` is the fairness tag of the frame taken last, ``deadlines`` are
    those of the waiting frames, ascending."""

    def __init__(self) -> None:
        self.heap = _LazyHeap()
        self.virtual = 0
        self.last_tag: dict[str, int] = {}
        self._prune_above = _REBUILD_ABOVE
        self.waiting: dict[str, int] = {}
        self.deadlines: list[int] = []

    def tag_for(self, stream: str) -> int:
        tag = max(self.virtual, self.last_tag.get(stream, -1) + 1)
        self.last_tag[stream] = tag
        if len(self.last_tag) > self._prune_above:
            # A tag behind the virtual time says nothing any more. The limit doubles with what is left, so
            # that pruning costs O(1) a push however many streams there are.
            self.last_tag = {name: last for name, last in self.last_tag.items() if last >= self.virtual}
            self._prune_above = max(_REBUILD_ABOVE, 2 * len(self.last_tag))
        return tag

    def add(self, record: FrameRecord) -> None:
        stream = record.frame.stream
        self.waiting[stream] = self.waiting.get(stream, 0) + 1
        self.heap.push(record.order, record)
        if record.deadline_ns is not None:
            insort(self.deadlines, record.deadline_ns)

    def drop(self, record: FrameRecord) -> None:
        stream = record.frame.stream
        self.heap.discard(record)
        if record.deadline_ns is not None:
            del self.deadlines[bisect_left(self.deadlines, record.deadline_ns)]
        left = self.waiting[stream] - 1
        if left:
            self.waiting[stream] = left
        else:
            # Its last tag stays: the stream was just served at the virtual time, and its next frame comes one
            # behind it; else streams with one frame at a time would pass a waiting backlog for ever.
            del self.waiting[stream]


class ClassQueue:
    """All waiting frames of one size class.

    Invariants: a record is in at most one place (a priority heap or an exact batch); ``len`` counts both;
    every record in it has ``is_queued`` set and no other has it through this queue.
    """

    def __init__(self, priority_levels: int, ageing_ns: int, ageing_share: float) -> None:
        self._queues = [_PriorityQueue() for _ in range(priority_levels)]
        self._ageing_ns = ageing_ns
        self._debt_step = ageing_share / (1.0 - ageing_share)
        self._debt = 0.0
        self._exact: deque[list[FrameRecord]] = deque()
        # Side indexes over the frames in the heaps: by time of arrival (young, then aged) and by deadline.
        self._young = _LazyHeap()
        self._aged = [_LazyHeap() for _ in range(priority_levels)]
        self._deadlines = _LazyHeap()
        self._streams: dict[str, int] = {}
        self._size = 0
        self._front = count(-1, -1)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[FrameRecord]:
        for batch in self._exact:
            yield from batch
        for queue in reversed(self._queues):
            yield from queue.heap

    # -- in -----------------------------------------------------------------------------------------

    def push(self, record: FrameRecord, now_ns: int) -> None:
        """Add a frame behind its equals."""
        queue = self._queues[record.priority]
        record.order = (_deadline(record), queue.tag_for(record.frame.stream), record.number)
        record.waits_from_ns = record.received_ns
        self._insert(record, now_ns)

    def push_front(self, record: FrameRecord, now_ns: int) -> None:
        """Put a frame back before all others of its priority: it was taken before and its worker is gone.

        Called last frame first, several frames keep their order."""
        record.order = (-1, next(self._front), record.number)
        record.waits_from_ns = record.received_ns
        self._insert(record, now_ns)

    def push_exact(self, records: Sequence[FrameRecord]) -> None:
        """Add frames that must be dispatched as exactly this batch, before everything else."""
        for record in records:
            self._mark_in(record)
        self._exact.append(list(records))

    def replace(self, old: FrameRecord, new: FrameRecord, now_ns: int) -> None:
        """Put ``new`` in the place of the waiting ``old`` of the same priority, which leaves the queue.

        The place in the line and the age are inherited, so that a stream which is superseded at every
        frame is not starved; the deadline is the new frame's own."""
        tag = old.order[1]
        number = old.order[2]
        self.remove(old)
        queue = self._queues[new.priority]
        queue.last_tag[new.frame.stream] = max(queue.last_tag.get(new.frame.stream, tag), tag)
        new.order = (_deadline(new), tag, number)
        new.waits_from_ns = old.waits_from_ns
        self._insert(new, now_ns)

    def _insert(self, record: FrameRecord, now_ns: int) -> None:
        self._mark_in(record)
        self._queues[record.priority].add(record)
        is_aged = now_ns >= record.waits_from_ns + self._ageing_ns
        index = self._aged[record.priority] if is_aged else self._young
        index.push((record.waits_from_ns, record.number, 0), record)
        if record.deadline_ns is not None:
            self._deadlines.push((record.deadline_ns, record.number, 0), record)

    # -- out ----------------------------------------------------------------------------------------

    def remove(self, record: FrameRecord) -> None:
        """Take a waiting frame out, wherever it waits."""
        for batch in self._exact:
            if record in batch:
                batch.remove(record)
                self._mark_out(record)
                break
        else:
            self._unindex(record)
        self._drop_empty_exact()

    def take(self, limit: int, now_ns: int) -> list[FrameRecord]:
        """Take up to ``limit`` frames for one batch: the first exact batch whole if there is one (then
        ``limit`` must hold it), else frames by priority, ageing, deadline, fairness and arrival."""
        if self._exact:
            batch = self._exact.popleft()
            for record in batch:
                self._mark_out(record)
            self._drop_empty_exact()
            return batch
        self._age(now_ns)
        taken: list[FrameRecord] = []
        while len(taken) < limit and self._size:
            record = self._next()
            self._queues[record.priority].virtual = max(
                self._queues[record.priority].virtual, record.order[1]
            )
            self._unindex(record)
            taken.append(record)
        return taken

    def pop_expired(self, now_ns: int) -> list[FrameRecord]:
        """Take out every frame whose deadline has come, earliest first; exact batches shrink."""
        expired: list[FrameRecord] = []
        for batch in self._exact:
            expired += [r for r in batch if r.deadline_ns is not None and r.deadline_ns <= now_ns]
        for record in expired:
            self.remove(record)
        while (top := self._deadlines.peek()) is not None and top[0][0] <= now_ns:
            self._unindex(top[1])
            expired.append(top[1])
        return expired

    def _next(self) -> FrameRecord:
        best = self._best()
        aged = self._oldest_aged_below(best.priority)
        if aged is None:
            return best
        if self._debt >= 1.0:
            self._debt -= 1.0
            return aged
        self._debt += self._debt_step
        return best

    def _best(self) -> FrameRecord:
        for queue in reversed(self._queues):
            top = queue.heap.peek()
            if top is not None:
                return top[1]
        raise LookupError("nothing waits in the heaps")

    def _oldest_aged_below(self, priority: int) -> FrameRecord | None:
        tops = [top for heap in self._aged[:priority] if (top := heap.peek()) is not None]
        return min(tops, key=lambda top: top[0])[1] if tops else None

    # -- questions ----------------------------------------------------------------------------------

    @property
    def has_exact(self) -> bool:
        """True when the next batch is fixed."""
        return bool(self._exact)

    def exact_size(self) -> int:
        """Return the number of frames of the first exact batch, 0 without one."""
        return len(self._exact[0]) if self._exact else 0

    def stream_count(self, stream: str) -> int:
        """Return how many frames of a stream wait here."""
        return self._streams.get(stream, 0)

    def count_from(self, priority: int) -> int:
        """Return how many frames of a priority or above wait in the heaps."""
        return sum(len(queue.heap) for queue in self._queues[priority:])

    def count_ahead(self, priority: int, deadline_ns: int) -> int:
        """Return how many frames would be taken before one of this priority and deadline that came now,
        ageing left out: higher priorities, and its own with a deadline that is not later."""
        ahead = self.count_from(priority + 1) + bisect_right(self._queues[priority].deadlines, deadline_ns)
        return ahead + sum(len(batch) for batch in self._exact)

    def oldest_ns(self) -> int | None:
        """Return since when the longest waiting frame (or the place it inherited) waits, None without one."""
        times = [top[0][0] for heap in (self._young, *self._aged) if (top := heap.peek()) is not None]
        times += [record.received_ns for batch in self._exact for record in batch]
        return min(times, default=None)

    def next_expiry_ns(self) -> int | None:
        """Return the earliest deadline of a waiting frame."""
        top = self._deadlines.peek()
        times = [] if top is None else [top[0][0]]
        times += [r.deadline_ns for batch in self._exact for r in batch if r.deadline_ns is not None]
        return min(times, default=None)

    def next_ageing_ns(self) -> int | None:
        """Return when the next waiting frame becomes aged, None when none will."""
        top = self._young.peek()
        return None if top is None else top[0][0] + self._ageing_ns

    def urgency(self, now_ns: int) -> tuple[int, int, int]:
        """Return a key that orders classes, smaller first: priority of the frame that would be taken next,
        its deadline, its age. Exact batches come before everything. Requires a waiting frame."""
        if self._exact:
            first = self._exact[0][0]
            return (-len(self._queues), _deadline(first), first.received_ns)
        self._age(now_ns)
        debt = self._debt
        record = self._next()
        self._debt = debt
        # An aged frame that is due competes with other classes at the priority that it displaces in its own.
        return (-self._best().priority, _deadline(record), record.waits_from_ns)

    def waiting_by_priority(self) -> dict[int, int]:
        """Return the number of waiting frames per priority that has any, exact batches included."""
        counts = {p: len(q.heap) for p, q in enumerate(self._queues) if len(q.heap)}
        for batch in self._exact:
            for record in batch:
                counts[record.priority] = counts.get(record.priority, 0) + 1
        return counts

    def check_invariants(self) -> None:
        """Raise AssertionError when the indexes disagree (a bug of ours, never a peer's doing)."""
        records = list(self)
        if len(records) != self._size or len({r.number for r in records}) != self._size:
            raise AssertionError(f"queue holds {len(records)} records, counts {self._size}")
        if not all(r.is_queued for r in records):
            raise AssertionError("a waiting record is not marked as queued")
        in_heaps = sum(len(q.heap) for q in self._queues)
        aged = sum(len(heap) for heap in self._aged)
        if len(self._young) + aged != in_heaps:
            raise AssertionError(f"{len(self._young)} young + {aged} aged != {in_heaps} waiting")
        deadlines = sum(len(q.deadlines) for q in self._queues)
        if deadlines != len(self._deadlines):
            raise AssertionError(f"{deadlines} deadlines by priority, {len(self._deadlines)} in all")
        by_stream: dict[str, int] = {}
        for record in records:
            by_stream[record.frame.stream] = by_stream.get(record.frame.stream, 0) + 1
        if by_stream != self._streams:
            raise AssertionError(f"stream counts {self._streams} != {by_stream}")

    # -- helpers ------------------------------------------------------------------------------------

    def _age(self, now_ns: int) -> None:
        while (top := self._young.peek()) is not None and now_ns >= top[0][0] + self._ageing_ns:
            self._young.discard(top[1])
            self._aged[top[1].priority].push(top[0], top[1])

    def _mark_in(self, record: FrameRecord) -> None:
        record.is_queued = True
        stream = record.frame.stream
        self._streams[stream] = self._streams.get(stream, 0) + 1
        self._size += 1

    def _mark_out(self, record: FrameRecord) -> None:
        record.is_queued = False
        stream = record.frame.stream
        left = self._streams[stream] - 1
        if left:
            self._streams[stream] = left
        else:
            del self._streams[stream]
        self._size -= 1

    def _unindex(self, record: FrameRecord) -> None:
        self._queues[record.priority].drop(record)
        self._young.discard(record)
        self._aged[record.priority].discard(record)
        self._deadlines.discard(record)
        self._mark_out(record)

    def _drop_empty_exact(self) -> None:
        if any(not batch for batch in self._exact):
            self._exact = deque(batch for batch in self._exact if batch)


def _deadline(record: FrameRecord) -> int:
    return _NO_DEADLINE_NS if record.deadline_ns is None else record.deadline_ns
