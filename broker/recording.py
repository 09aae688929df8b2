"""What arrives, kept for a while for whoever records traffic: shapes and times, never pixels.

Theory of operation. Nothing is kept until somebody asks. Each question keeps the recording going for
KEEP_NS; when nobody asks any more it ends with the next frame, and its memory goes. Entries are numbered from
1; whoever asks says which one it had last. A ring of MAX_FRAMES bounds the memory: a reader that is too slow
for it is told how many it has lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from headrace.protocol.messages import BadFrame, Frame, Value

#: Frames kept, about 15 MB. At 20,000 frames a second a reader has 1.6 s to come back.
MAX_FRAMES = 32_768

#: Entries in one answer, and bytes, of the 1 MiB that a header may have: what a frame says its model is was
#: not looked up yet and can be long.
MAX_FRAMES_PER_PAGE = 2_048
MAX_BYTES_PER_PAGE = 768 * 1024

#: Most bytes of an entry without its stream and model: eight axes and five numbers of nine, three words.
_ENTRY_BYTES = 160

#: A recording ends when it was not asked for this long.
KEEP_NS = 5_000_000_000


class Recording:
    """The last frames that arrived. Invariant: while ``is_on`` is False nothing is kept."""

    def __init__(self) -> None:
        self.is_on = False
        self._ring: deque[tuple[Value, ...]] = deque(maxlen=MAX_FRAMES)  # oldest first
        self._count = 0  # entries so far; the last one has this number
        self._until_ns = 0

    def note(self, frame: Frame | BadFrame, now_ns: int) -> None:
        """Keep what a frame is like. One that can't be read has no shape and is left out."""
        if now_ns >= self._until_ns:
            self._end()
        elif isinstance(frame, Frame):
            self._count += 1
            # Not the frame itself: that would keep its pixels.
            self._ring.append(
                (
                    now_ns // 1_000,
                    frame.stream,
                    list(frame.shape),
                    frame.nbytes,
                    frame.model,
                    frame.priority,
                    frame.ttl_ms,
                    frame.keep.value,
                    frame.encoding.value,
                    frame.dtype,
                )
            )

    def read(self, after: int | None, max_frames: int, now_ns: int) -> dict[str, Value]:
        """Return the entries behind number ``after`` (None: those that are yet to come), and go on recording.

        The result has ``frames``; ``next``, the ``after`` of the next question; ``lost``, how many entries
        behind ``after`` have left the ring; ``more``, whether others wait.
        """
        if now_ns >= self._until_ns:
            self._end()
        self.is_on = True
        self._until_ns = now_ns + KEEP_NS
        before = self._count - len(self._ring)  # number of the entry before the oldest kept
        asked = self._count if after is None else min(after, self._count)
        start = max(asked, before)
        page = _head(islice(self._ring, start - before, start - before + max_frames))
        following = start + len(page)
        frames: list[Value] = [list(entry) for entry in page]
        return {
            "frames": frames,
            "next": following,
            "lost": start - asked,
            "more": following < self._count,
        }

    def _end(self) -> None:
        self.is_on = False
        self._ring.clear()


def _head(entries: Iterable[tuple[Value, ...]]) -> list[tuple[Value, ...]]:
    """Return the first entries, as many as an answer has room for."""
    page: list[tuple[Value, ...]] = []
    left_bytes = MAX_BYTES_PER_PAGE
    for entry in entries:
        left_bytes -= _ENTRY_BYTES + len(f"{entry[1]!s}{entry[4]!s}".encode())
        if left_bytes < 0:
            break
        page.append(entry)
    return page
