"""The waiting frames of one (model, size class): one queue per priority, with ageing and fairness.

Not here: when a batch is closed (batching.py), where it goes (dispatch.py), what becomes of an expired
frame (core.py).

Theory of operation. A frame's place inside its priority is the tuple ``order``: deadline first (no deadline
sorts last), then a fairness tag, then arrival. The tag is start-time fair queueing in units of frames: a
stream's next frame is tagged one past its last, but never behind the priority's virtual time, so that frames
without deadlines are taken round-robin over the streams that wait and a stream that was idle earns no
credit. Indexes with lazy deletion give O(log n) push, cancel and take, O(1) for frames that come in the
order in which they leave; a cancelled entry is skipped when it comes up, and an index that is mostly
cancelled entries is swept.

Ageing. A frame that has waited ``ageing_ns`` is aged. Each time a frame is taken while aged ones of lower
priorities wait, a debt of share / (1 - share) is entered under its priority. A debt is owed to the oldest
aged frame below the priority that it stands under: the oldest of those that were passed. A frame to which 1
or more is owed is taken next, and 1 is paid; if it leaves otherwise, its debt passes to the next oldest, and
ends when there is none. So no frame is paid for what an older one put up with. Hence the bound: while its
class is served at r frames a second, a frame waits at most ``ageing_ns`` plus ceil((frames aged before it +
1) / share) / r, whatever higher priorities bring.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, count

from headrace.broker.records import FrameRecord

#: Sorts behind every real deadline: no monotonic clock gets here.
_NO_DEADLINE_NS = 1 << 63

#: An index is swept when it holds more than this many entries and over half are dead.
_SWEEP_ABOVE = 64

#: A debt is due from here on: three thirds, added up, are not always 1.
_DEBT_DUE = 1.0 - 1e-9

_Key = tuple[int, int, int]
_Entry = tuple[_Key, int]


class _Index:
    """Tickets of waiting frames by key, smallest first. An entry is dead when its ticket is no longer live.

    Frames mostly come in the order of their keys: such entries stand in a line, which costs one comparison a
    push and none a removal; only the others go to a heap. Entries name frames by ticket: a dead one must not
    keep the payload of a frame that has ended."""

    __slots__ = ("_heap", "_line", "_live")

    def __init__(self, live: dict[int, FrameRecord]) -> None:
        self._live = live
        self._line: deque[_Entry] = deque()
        self._heap: list[_Entry] = []

    def push(self, key: _Key, ticket: int, live_count: int) -> None:
        """Add an entry. ``live_count`` entries of this index are live, this one included."""
        line, entry = self._line, (key, ticket)
        if not line or line[-1] <= entry:
            line.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        held_count = len(line) + len(self._heap)
        if held_count > _SWEEP_ABOVE and held_count > 2 * live_count:
            self._line = deque([one for one in line if one[1] in self._live])
            self._heap = [one for one in self._heap if one[1] in self._live]
            heapq.heapify(self._heap)

    def peek(self) -> _Entry | None:
        """Return the first live entry."""
        live, line, heap = self._live, self._line, self._heap
        while line and line[0][1] not in live:
            line.popleft()
        while heap and heap[0][1] not in live:
            heapq.heappop(heap)
        if line and (not heap or line[0] < heap[0]):
            return line[0]
        return heap[0] if heap else None

    def pop(self, entry: _Entry) -> None:
        """Remove the entry that peek() has just returned."""
        if self._line and self._line[0] == entry:  # equal is the same: no two entries have one ticket
            self._line.popleft()
        else:
            heapq.heappop(self._heap)

    def __iter__(self) -> Iterator[int]:
        """Yield the live tickets in no particular order."""
        return (ticket for _, ticket in chain(self._line, self._heap) if ticket in self._live)


class _PriorityQueue:
    """Frames of one priority, ``size`` of them. ``virtual`` is the fairness tag of the frame taken last,
    ``deadlines`` are those of the waiting frames, ascending."""

    __slots__ = ("_prune_above", "deadlines", "index", "last_tag", "size", "virtual")

    def __init__(self, live: dict[int, FrameRecord]) -> None:
        self.index = _Index(live)
        self.size = 0
        self.virtual = 0
        self.last_tag: dict[str, int] = {}
        self._prune_above = _SWEEP_ABOVE
        self.deadlines: list[int] = []

    def tag_for(self, stream: str) -> int:
        # The last tag of a stream of which nothing waits stays: the stream was just served at the virtual
        # time, and its next frame comes one behind it; else streams with one frame at a time would pass a
        # waiting backlog for ever.
        tag = self.last_tag.get(stream, -1) + 1
        if tag < self.virtual:
            tag = self.virtual
        self.last_tag[stream] = tag
        if len(self.last_tag) > self._prune_above:
            # A tag behind the virtual time says nothing any more. The limit doubles with what is left, so
            # that pruning costs O(1) a push however many streams there are.
            self.last_tag = {name: last for name, last in self.last_tag.items() if last >= self.virtual}
            self._prune_above = max(_SWEEP_ABOVE, 2 * len(self.last_tag))
        return tag


class ClassQueue:
    """All waiting frames of one size class.

    Invariants: a record is in at most one place (the indexes or an exact batch); ``len`` counts both; every
    record in it has ``is_queued`` set and no other has it through this queue. A record in the indexes is in
    ``_live`` under its ticket; it is aged exactly when the ticket is in ``_aged_tickets``.
    """

    def __init__(self, priority_levels: int, ageing_ns: int, ageing_share: float) -> None:
        self._live: dict[int, FrameRecord] = {}
        self._queues = [_PriorityQueue(self._live) for _ in range(priority_levels)]
        self._priorities = 0  # bit p is set when frames of priority p are in the indexes
        self._ageing_ns = ageing_ns
        self._debt_step = ageing_share / (1.0 - ageing_share)
        self._debts: dict[int, float] = {}  # by the priority of the frames that passed aged ones
        self._exact: deque[list[FrameRecord]] = deque()
        # Side indexes: by time of arrival (young, then aged) and by deadline.
        self._young = _Index(self._live)
        self._aged = [_Index(self._live) for _ in range(priority_levels)]
        self._aged_tickets: dict[int, None] = {}
        self._deadlines = _Index(self._live)
        self._deadlines_count = 0
        self._streams: dict[str, int] = {}
        self._size = 0
        self._tickets = count(1)
        self._front = count(-1, -1)
        self.pushed_count = 0  # frames that came in anew, for the arrival rate

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[FrameRecord]:
        for batch in self._exact:
            yield from batch
        yield from self._live.values()

    # -- in -----------------------------------------------------------------------------------------

    def push(self, record: FrameRecord, now_ns: int) -> None:
        """Add a frame behind its equals."""
        self.pushed_count += 1
        queue = self._queues[record.priority]
        record.order = (_deadline(record), queue.tag_for(record.frame.stream), record.number)
        record.waits_from_ns = record.received_ns
        self._insert(record, now_ns)

    def push_front(self, record: FrameRecord, now_ns: int) -> None:
        """Put a frame back before all others of its priority: it was taken before and its worker is gone.

        Called last frame first, they keep their order; each keeps its age, also an inherited one."""
        record.order = (-1, next(self._front), record.number)
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
        priority, waits_from_ns, deadline_ns = record.priority, record.waits_from_ns, record.deadline_ns
        ticket = record.ticket = next(self._tickets)
        self._live[ticket] = record
        queue = self._queues[priority]
        queue.size += 1
        self._priorities |= 1 << priority
        queue.index.push(record.order, ticket, queue.size)
        key = (waits_from_ns, record.number, 0)
        if now_ns < waits_from_ns + self._ageing_ns:
            self._young.push(key, ticket, len(self._live) - len(self._aged_tickets))
        else:
            self._aged_tickets[ticket] = None
            self._aged[priority].push(key, ticket, len(self._aged_tickets))
        if deadline_ns is not None:
            insort(queue.deadlines, deadline_ns)
            self._deadlines_count += 1
            self._deadlines.push((deadline_ns, record.number, 0), ticket, self._deadlines_count)

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
        while len(taken) < limit and self._live:
            record, creditors = self._next()
            if creditors or self._debts:
                self._enter_debt(record, creditors)
            queue = self._queues[record.priority]
            tag = record.order[1]
            if tag > queue.virtual:
                queue.virtual = tag
            self._unindex(record)
            taken.append(record)
        return taken

    def pop_expired(self, now_ns: int) -> list[FrameRecord]:
        """Take out every frame whose deadline has come, earliest first; exact batches shrink."""
        expired: list[FrameRecord] = []
        if not self._deadlines_count and not self._exact:
            return expired
        for batch in self._exact:
            expired += [r for r in batch if r.deadline_ns is not None and r.deadline_ns <= now_ns]
        for record in expired:
            self.remove(record)
        while (top := self._deadlines.peek()) is not None and top[0][0] <= now_ns:
            record = self._live[top[1]]
            self._unindex(record)
            expired.append(record)
        return expired

    def _next(self) -> tuple[FrameRecord, dict[int, int]]:
        """Return the frame that is to be taken, and to whom what is owed: see _creditors."""
        best = self._best()
        if not self._aged_tickets or not (best.priority or self._debts):
            return best, {}
        creditors = self._creditors(best.priority)
        owed: dict[int, float] = {}
        for priority, ticket in creditors.items():
            owed[ticket] = owed.get(ticket, 0.0) + self._debts.get(priority, 0.0)
        due = [ticket for ticket, debt in owed.items() if debt >= _DEBT_DUE]
        return self._live[due[-1]] if due else best, creditors

    def _creditors(self, passing: int) -> dict[int, int]:
        """Return, by each priority under which a debt stands and the one that is ``passing``, the ticket of
        the frame that it is owed to. Priorities ascend, and so does the age of the frames."""
        found: dict[int, int] = {}
        oldest: _Entry | None = None
        for priority, index in enumerate(self._aged):
            if oldest is not None and (priority == passing or priority in self._debts):
                found[priority] = oldest[1]
            if self._priorities >> priority & 1:
                top = index.peek()
                if top is not None and (oldest is None or top < oldest):
                    oldest = top
        return found

    def _enter_debt(self, taken: FrameRecord, creditors: dict[int, int]) -> None:
        """Pay the frame that is about to be taken what it is owed, up to 1; or, if it is owed less, enter
        what is owed for it to those that it passes. Debts that nobody is left for end."""
        debts = self._debts = {one: debt for one, debt in self._debts.items() if one in creditors}
        own = [one for one, ticket in creditors.items() if ticket == taken.ticket and one in debts]
        if own and sum([debts[one] for one in own]) >= _DEBT_DUE:
            # From the lowest priority first: what stands under higher ones may be owed to more frames.
            left = 1.0
            for one in own:
                paid = min(left, debts[one])
                left -= paid
                debts[one] -= paid
        elif taken.priority in creditors:
            debts[taken.priority] = debts.get(taken.priority, 0.0) + self._debt_step

    def _best(self) -> FrameRecord:
        """Return the first frame of the highest priority. Requires one in the indexes."""
        top = self._queues[self._priorities.bit_length() - 1].index.peek()
        if top is None:
            raise LookupError("nothing waits in the indexes")
        return self._live[top[1]]

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
        """Return how many frames of a priority or above wait, exact batches left out."""
        return sum([queue.size for queue in self._queues[priority:]])

    def count_ahead(self, priority: int, deadline_ns: int) -> int:
        """Return how many frames would be taken before one of this priority and deadline that came now,
        ageing left out: higher priorities, and its own with a deadline that is not later."""
        same = self._queues[priority]
        # Counted from below, exact batches being among them: most frames have the lowest priorities.
        above = self._size - sum([queue.size for queue in self._queues[:priority]]) - same.size
        return above + bisect_right(same.deadlines, deadline_ns)

    def oldest_ns(self) -> int | None:
        """Return since when the longest waiting frame (or the place it inherited) waits, None without one."""
        top = self._young.peek()
        times = [] if top is None else [top[0][0]]
        if self._aged_tickets:
            times += [top[0][0] for index in self._aged if (top := index.peek()) is not None]
        if self._exact:
            times += [record.received_ns for batch in self._exact for record in batch]
        return min(times, default=None)

    def next_expiry_ns(self) -> int | None:
        """Return the earliest deadline of a waiting frame."""
        if not self._deadlines_count and not self._exact:
            return None
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
        record, _ = self._next()
        # An aged frame that is due competes with other classes at the priority that it displaces in its own.
        return (-self._best().priority, _deadline(record), record.waits_from_ns)

    def waiting_by_priority(self) -> dict[int, int]:
        """Return the number of waiting frames per priority that has any, exact batches included."""
        counts = {priority: queue.size for priority, queue in enumerate(self._queues) if queue.size}
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
        for ticket, record in self._live.items():
            if record.ticket != ticket:
                raise AssertionError(
                    f"frame {record.number} has ticket {record.ticket}, is there as {ticket}"
                )
        for priority, queue in enumerate(self._queues):
            held = sum(1 for ticket in queue.index if self._live[ticket].priority == priority)
            if not held == queue.size or bool(held) != bool(self._priorities >> priority & 1):
                raise AssertionError(f"{held} frames of priority {priority} are found, {queue.size} counted")
        young = sorted(self._young)
        aged = sorted(chain.from_iterable(self._aged))
        if sorted(young + aged) != sorted(self._live) or aged != sorted(self._aged_tickets):
            raise AssertionError(f"{len(young)} young + {len(aged)} aged of {len(self._live)} waiting")
        deadlines = sum(len(queue.deadlines) for queue in self._queues)
        if not deadlines == self._deadlines_count == len(list(self._deadlines)):
            raise AssertionError(f"{deadlines} deadlines by priority, {self._deadlines_count} in all")
        by_stream: dict[str, int] = {}
        for record in records:
            by_stream[record.frame.stream] = by_stream.get(record.frame.stream, 0) + 1
        if by_stream != self._streams:
            raise AssertionError(f"stream counts {self._streams} != {by_stream}")

    # -- helpers ------------------------------------------------------------------------------------

    def _age(self, now_ns: int) -> None:
        while (top := self._young.peek()) is not None and now_ns >= top[0][0] + self._ageing_ns:
            self._young.pop(top)
            key, ticket = top
            self._aged_tickets[ticket] = None
            self._aged[self._live[ticket].priority].push(key, ticket, len(self._aged_tickets))

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
        ticket, priority, deadline_ns = record.ticket, record.priority, record.deadline_ns
        del self._live[ticket]
        if self._aged_tickets:
            self._aged_tickets.pop(ticket, None)
        queue = self._queues[priority]
        queue.size -= 1
        if not queue.size:
            self._priorities &= ~(1 << priority)
        if deadline_ns is not None:
            del queue.deadlines[bisect_left(queue.deadlines, deadline_ns)]
            self._deadlines_count -= 1
        self._mark_out(record)

    def _drop_empty_exact(self) -> None:
        if any(not batch for batch in self._exact):
            self._exact = deque(batch for batch in self._exact if batch)


def _deadline(record: FrameRecord) -> int:
    return _NO_DEADLINE_NS if record.deadline_ns is None else record.deadline_ns
