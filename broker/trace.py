"""What happened to a frame: a bounded ring of recent transitions, formatted only when somebody asks.

Not a log: nothing leaves the process by itself, and old transitions are overwritten.
"""

from __future__ import annotations

from collections import deque

from headrace.broker.records import FrameRecord

#: Transitions kept, all frames together: about the last 5,000 frames and 4 MB.
STORY_TRANSITIONS = 20_000


class Story:
    """The last ``limit`` transitions of all frames. Invariant: oldest first, times never fall."""

    def __init__(self, limit: int = STORY_TRANSITIONS) -> None:
        self._ring: deque[tuple[int, tuple[str, int, int], str, object]] = deque(maxlen=limit)

    def note(self, now_ns: int, record: FrameRecord, what: str, detail: object = "") -> None:
        """Remember a transition of an admitted frame; ``detail`` is formatted with str() on demand."""
        self._ring.append((now_ns, record.key, what, detail))

    def note_id(self, now_ns: int, stream: str, epoch: int, seq: int, what: str, detail: object) -> None:
        """Remember something about a frame that was never admitted."""
        self._ring.append((now_ns, (stream, epoch, seq), what, detail))

    def of(self, stream: str, epoch: int, seq: int) -> list[str]:
        """Return one line per remembered transition of a frame, oldest first, times from the first one."""
        found = [entry for entry in self._ring if entry[1] == (stream, epoch, seq)]
        return [f"+{(entry[0] - found[0][0]) / 1e6:.3f} ms {entry[2]} {entry[3]}".rstrip() for entry in found]
