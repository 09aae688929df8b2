"""Streams whose producer fell silent: found once, within a stated time.

Not here: who owns a stream (admission.py), when it is forgotten (stream_table.py).

Theory of operation. One heap entry per stream that brings frames, due when it would be stale. A frame writes
one attribute; an entry that comes up too early goes back for the rest of the time. A stream that is stale
has no entry until its next frame. Nothing is ever published because of it: the last outcome of a
dead camera stays what it is, the last one.
"""

from __future__ import annotations

import heapq
from itertools import count

from headrace.broker.stream_table import Stream, StreamTable


class Staleness:
    """Watches streams. Invariant: a stream that is watched has exactly one entry."""

    def __init__(self, stale_ns: int, streams: StreamTable) -> None:
        self._stale_ns = stale_ns
        self._streams = streams
        self._heap: list[tuple[int, int, Stream]] = []
        self._tickets = count()
        self.stale_count = 0  # times a stream became stale

    def watch(self, stream: Stream) -> None:
        """A frame came for a stream that is not watched."""
        stream.is_watched = True
        stream.is_stale = False
        stream.has_ended = False
        self._push(stream)

    def pop_stale(self, now_ns: int) -> list[Stream]:
        """Return the streams that have become stale. One whose producer said goodbye has ended instead."""
        stale: list[Stream] = []
        while self._heap and self._heap[0][0] <= now_ns:
            stream = heapq.heappop(self._heap)[2]
            if self._streams.by_name.get(stream.name) is not stream:
                continue
            if stream.last_frame_ns + self._stale_ns > now_ns:
                self._push(stream)
                continue
            stream.is_watched = False
            if not stream.has_ended:
                stream.is_stale = True
                self.stale_count += 1
                stale.append(stream)
        return stale

    def next_ns(self) -> int | None:
        """Return when pop_stale may have something."""
        return self._heap[0][0] if self._heap else None

    def _push(self, stream: Stream) -> None:
        heapq.heappush(self._heap, (stream.last_frame_ns + self._stale_ns, next(self._tickets), stream))
