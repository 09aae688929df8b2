"""The frames of a producer that have no known end: how many, their numbers, their bytes and slots.

Not here: threads (the producer calls this under its lock), sending (``producer_session``).
"""

from __future__ import annotations

from collections import Counter

from headrace.clients import arrays
from headrace.clients.lane import Lane
from headrace.clients.records import ProducerAccount
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Payload, Reject, ShmRef

_U64_MAX = 2**64 - 1


class Held:
    """Invariants: at most ``max_frames`` frames and ``max_bytes`` payload bytes are held; each frame that was
    numbered is counted once, as finished or unfinished."""

    def __init__(self, lane: Lane, max_frames: int, max_bytes: int) -> None:
        self.max_frames = max_frames
        self.max_bytes = max_bytes
        self.frames_count = 0  # a push that waits for its copy is held, and not sent yet
        self.nbytes = 0
        self.sent_count = 0
        self.finished_count = 0
        self._lane = lane
        self._next_seq: dict[str, int] = {}
        self._tickets: dict[tuple[str, int], int] = {}
        self._rejected: Counter[str] = Counter()

    @property
    def unfinished_count(self) -> int:
        return len(self._tickets)

    def is_unfinished(self, stream: str, seq: int) -> bool:
        return (stream, seq) in self._tickets

    def oldest_ticket(self) -> int:
        """Return which of all frames sent, counted from 1, is the first without a known end."""
        return next(iter(self._tickets.values()), self.sent_count + 1)

    def has_room(self, nbytes: int) -> bool:
        return (
            self.frames_count < self.max_frames
            and self.nbytes + nbytes <= self.max_bytes
            and self._lane.has_room(nbytes)
        )

    def reserve(self, nbytes: int) -> ShmRef | None:
        """Hold room for a frame; return the slot for its payload, None when that goes inline."""
        slot = self._lane.take(nbytes)
        self.frames_count += 1
        self.nbytes += nbytes
        return slot

    def release(self, nbytes: int, payload: Payload | None) -> None:
        """Hold the room no longer, and free the payload's slot if it has one."""
        self._lane.free(payload)
        self.frames_count -= 1
        self.nbytes -= nbytes

    def number(self, stream: str, seq: int | None, payload: Payload) -> int:
        """Count a frame as sent and return its seq; raise InvalidFrameError for one that does not rise."""
        lowest = self._next_seq.get(stream, 0)
        if seq is None:
            seq = lowest
        else:
            seq = arrays.checked_int(seq, "seq", 0, _U64_MAX)
            if seq < lowest:
                raise InvalidFrameError(
                    Code.SEQ_BACKWARDS, f"seq {seq} of stream {stream!r} follows {lowest - 1}; it must rise"
                )
        self._next_seq[stream] = seq + 1
        self.sent_count += 1
        self._tickets[stream, seq] = self.sent_count
        self._lane.note_sent(payload)
        return seq

    def finish(self, stream: str, seq: int, nbytes: int, payload: Payload, reject: Reject | None) -> None:
        """Count a frame whose end is known."""
        self._tickets.pop((stream, seq), None)
        self.release(nbytes, payload)
        self.finished_count += 1
        if reject is not None:
            self._rejected[reject.code] += 1

    def account(self, by_status: dict[str, int], resent: int, sessions: int) -> ProducerAccount:
        return ProducerAccount(
            sent=self.sent_count,
            finished=self.finished_count,
            unfinished=self.sent_count - self.finished_count,
            by_status=dict(by_status),
            rejected=dict(self._rejected),
            resent=resent,
            sessions=sessions,
            by_lane=dict(self._lane.counts),
            arena_full=self._lane.full_count,
        )
