"""One line per frame of a load: when it was due, when it left, when and how it ended.

Two threads write: the sender opens a line before it pushes the frame, the subscriber's thread closes it when
the outcome comes. Lists are only appended to by the one and written in place by the other, which needs no
lock; figures are made after both are done. Frames are numbered through all steps, so that an outcome that
comes after its step still finds its line.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from headrace.clients.records import Missed
from headrace.protocol.messages import Outcome, Status

#: Latest latencies from which the progress line takes its percentile.
RECENT_COUNT = 1_000


class Ledger:
    """The lines of all frames; also the subscriber's sink.

    Invariant: frame ``n`` of stream ``s`` of the producers is line ``frames_of[s][n]``, and each line is
    closed at most once: a second outcome is counted in ``duplicate_count``."""

    def __init__(self, names: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self.names = names
        self.due_s: list[float] = []
        self.left_s: list[float] = []
        self.is_held_up: list[bool] = []
        self.ended_s: list[float | None] = []
        self.status: list[Status | None] = []
        self.code: list[str] = []
        self.pool_us: list[int | None] = []
        self.streams: list[int] = []
        self.first_messages: dict[str, str] = {}
        self.missed_count = 0
        self.is_missed_unknown = False
        self.duplicate_count = 0
        self.stranger_count = 0
        self.closed_by_status: Counter[Status] = Counter()
        self._closed_count = 0
        self._recent_ms = [0.0] * RECENT_COUNT  # a ring, of which the first ``_ok_count`` are filled
        self._ok_count = 0
        self._clock = clock
        self._stream_of = {name: index for index, name in enumerate(names)}
        self._frames_of: list[list[int]] = [[] for _ in names]
        self._awaited = -1
        self._is_settled = threading.Event()

    # -- the sender ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def open_count(self) -> int:
        """Return how many frames have no outcome yet."""
        return len(self.due_s) - self._closed_count

    def open(self, stream: int, due_s: float, left_s: float, *, is_held_up: bool) -> None:
        """Note a frame that is about to be pushed; times are on the ledger's clock. ``is_held_up``: it is
        late because an earlier one had to wait for room, not because the sender is slow."""
        self._frames_of[stream].append(len(self.due_s))
        self.streams.append(stream)
        self.left_s.append(left_s)
        self.is_held_up.append(is_held_up)
        self.ended_s.append(None)
        self.status.append(None)
        self.code.append("")
        self.pool_us.append(None)
        self.due_s.append(due_s)  # last: the others' lines are there when ``len`` says so

    def withdraw(self) -> None:
        """Take the last line back: the frame could not be pushed, so no outcome of it can come."""
        self.due_s.pop()
        for column in (self.left_s, self.is_held_up, self.ended_s, self.status, self.code, self.pool_us):
            column.pop()
        self._frames_of[self.streams.pop()].pop()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until every frame opened so far has its outcome."""
        self._awaited = len(self.due_s)
        self._is_settled.clear()
        if self._closed_count >= self._awaited:
            return True
        return self._is_settled.wait(timeout_s)

    def open_of(self, stream: int, first: int) -> Iterator[tuple[int, int]]:
        """Yield (seq, line) of a stream's frames from line ``first`` on that have no outcome."""
        for seq, index in enumerate(self._frames_of[stream]):
            if index >= first and self.status[index] is None:
                yield seq, index

    def recent_ms(self) -> list[float]:
        """Return the latencies of the latest ``ok`` frames."""
        return self._recent_ms[: self._ok_count]

    # -- the subscriber's thread ---------------------------------------------------------------------

    def has_room(self) -> bool:
        """See Sink: a line costs little, whoever waits would measure the wait."""
        return True

    def put(self, items: Sequence[Outcome | Missed]) -> None:
        """Close the lines of outcomes."""
        now_s = self._clock()
        for item in items:
            self._close(item, now_s)

    def _close(self, item: Outcome | Missed, now_s: float) -> None:
        if isinstance(item, Missed):
            self.missed_count += item.count or 0
            self.is_missed_unknown = self.is_missed_unknown or item.count is None
            return
        stream = self._stream_of.get(item.stream)
        frames = self._frames_of[stream] if stream is not None else []
        if not 0 <= item.seq < len(frames):
            self.stranger_count += 1
            return
        index = frames[item.seq]
        if self.status[index] is not None:
            self.duplicate_count += 1
            return
        self.ended_s[index] = now_s
        self.pool_us[index] = item.timing.published_us
        self.code[index] = item.code
        if item.status is Status.OK:
            self._recent_ms[self._ok_count % RECENT_COUNT] = (now_s - self.due_s[index]) * 1e3
            self._ok_count += 1
        elif item.code not in self.first_messages:
            self.first_messages[item.code] = item.message
        self.status[index] = item.status
        self.closed_by_status[item.status] += 1
        self._closed_count += 1
        if self._closed_count >= self._awaited >= 0:
            self._is_settled.set()
