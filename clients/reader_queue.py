"""The queue between a subscriber's I/O thread and its readers: bounded, closable, conflating in ``latest``.

One thread puts, any number of threads get.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from headrace.clients.records import Missed
from headrace.clients.subscriber_events import Mode
from headrace.errors import ClosedError, RequestTimeoutError
from headrace.protocol.messages import Outcome
from headrace.protocol.wire import part_bytes


class ReaderQueue:
    """Items in the order of their arrival; in mode ``latest`` one per stream, the newest.

    Invariant: ``has_room()`` is asked before more is read from the network, so that the queue exceeds
    its bounds at most by what one message or one page of a replay brings.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        max_count: int,
        max_bytes: int,
        on_room: Callable[[], None] = lambda: None,
        on_item: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_room`` is called in a reader's thread when the queue was full and has room again;
        ``on_item`` in the putting thread when readers are woken, and in the closing one."""
        self.skipped_count = 0
        self.delivered_count = 0
        self.age_ms = 0.0
        self._is_latest = mode is Mode.LATEST
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._on_item = on_item
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting_count = 0
        self._has_news = False
        self._items: deque[tuple[Outcome | Missed, int, float]] = deque()
        self._latest: OrderedDict[str, tuple[Outcome | Missed, int, float]] = OrderedDict()
        self._bytes = 0
        self._was_full = False
        self._closed_by: str | None = None

    def has_room(self) -> bool:
        with self._lock:
            # In `latest` the queue holds one item per stream: reading on replaces, it does not grow.
            self._was_full = not self._is_latest and (
                len(self._items) >= self._max_count or self._bytes >= self._max_bytes
            )
            return not self._was_full

    def put(self, items: Sequence[Outcome | Missed]) -> None:
        """Add items. Readers that wait are woken by ``wake_readers``, once for all items of a turn: waking
        a thread costs more than all the rest that is done for an outcome."""
        now_s = time.monotonic()
        entries = [(item, _bytes_of(item), now_s) for item in items]
        with self._lock:
            if self._is_latest:
                for entry in entries:
                    self._replace(entry)
            else:
                self._items += entries
            self._bytes += sum([nbytes for _, nbytes, _ in entries])
            self._has_news = True

    def _replace(self, entry: tuple[Outcome | Missed, int, float]) -> None:
        # The stream keeps its place: streams take turns however unequal their rates are.
        stream = entry[0].stream
        replaced = self._latest.get(stream)
        if replaced is not None:
            self.skipped_count += 1
            self._bytes -= replaced[1]
        self._latest[stream] = entry

    def wake_readers(self) -> None:
        """Tell readers about what was put since the last call."""
        if not self._has_news:
            return
        with self._lock:
            self._has_news = False
            if self._waiting_count:
                self._changed.notify(len(self._items) + len(self._latest))
        self._on_item()

    def get(self, timeout: float | None) -> Outcome | Missed:
        """Return the next item; raise RequestTimeoutError, or ClosedError once closed and empty."""
        with self._lock:
            if not self._items and not self.is_answerable():
                self._wait(timeout)
            if self._items:
                item, nbytes, put_at = self._items.popleft()
            elif self._latest:
                item, nbytes, put_at = self._latest.popitem(last=False)[1]
            else:
                raise ClosedError(self._closed_by or "closed")
            self._bytes -= nbytes
            self.delivered_count += 1
            self.age_ms = (time.monotonic() - put_at) * 1e3
            # Half of the queue is read before the network is, so that a slow reader does not wake the
            # I/O thread for each item.
            must_wake = self._was_full and (
                len(self._items) <= self._max_count // 2 and self._bytes <= self._max_bytes // 2
            )
            if must_wake:
                self._was_full = False
        if must_wake:
            self._on_room()
        return item

    def is_answerable(self) -> bool:
        """Tell whether ``get`` would return or raise at once."""
        return bool(self._items or self._latest) or self._closed_by is not None

    def is_waited_for(self) -> bool:
        """Tell whether a reader waits."""
        return self._waiting_count > 0

    def close(self, reason: str, *, is_dropped: bool) -> None:
        """Wake every reader. With ``is_dropped`` what was not read yet is forgotten."""
        with self._lock:
            if self._closed_by is None:
                self._closed_by = reason
            if is_dropped:
                self._items.clear()
                self._latest.clear()
                self._bytes = 0
            self._changed.notify_all()
        self._on_item()

    def _wait(self, timeout: float | None) -> None:
        self._waiting_count += 1
        try:
            if not self._changed.wait_for(self.is_answerable, timeout):
                raise RequestTimeoutError(f"nothing came within {timeout:g} s")
        finally:
            self._waiting_count -= 1


def _bytes_of(item: Outcome | Missed) -> int:
    """Return the payload bytes of an item (its header is small beside them)."""
    if type(item) is not Outcome:
        return 0
    payloads = item.payloads
    return part_bytes(payloads[0]) if len(payloads) == 1 else sum(map(part_bytes, payloads))
