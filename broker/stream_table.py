"""The streams that the broker knows: who owns them, which frames of them it has seen, what is kept of them.

Not here: whether a frame is admitted (admission.py), in which order outcomes leave (outcomes.py).

Theory of operation. A frame is named for ever by (stream, epoch, seq), and a producer's seq rises strictly.
So what was seen of an epoch is a short list of runs of consecutive seqs: one run for a producer that counts
1, 2, 3, whatever the length of the stream. A seq at or below the last one is a frame sent again if it lies
in a run, and a producer's fault if it does not.

A stream with nothing unfinished is idle; idle streams are kept in the order in which they fell idle, so the
one to forget is always the first. What can't be forgotten is the number of its next outcome, because
subscribers count on it within one boot: it moves to a second, compact table when the stream goes. That
table is bounded too; when it overflows, the highest number that was dropped becomes the floor from which
streams it no longer knows are numbered, so that numbers never go back.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from headrace.broker.records import FrameRecord, Refusal
from headrace.broker.restored import FinishedSeqs, RestoredStream
from headrace.protocol.messages import Outcome, Status

#: Epochs remembered per stream: a producer and its restarts, two producers that fight over a stream.
EPOCHS_PER_STREAM = 8

#: Forgotten streams whose next pub_seq is still known, per stream of the table (about 150 bytes each).
FORGOTTEN_PER_STREAM = 10


@dataclass(slots=True, eq=False)
class EpochHistory:
    """What was seen of one epoch of a stream. Runs are inclusive, ascending and never touch."""

    last_seq: int = -1
    released_seq: int = -1  # the last admitted seq whose outcome was published
    unfinished_count: int = 0
    firsts: array[int] = field(default_factory=lambda: array("Q"))
    lasts: array[int] = field(default_factory=lambda: array("Q"))
    rejects: dict[int, Refusal] = field(default_factory=dict)
    earlier: FinishedSeqs | None = None  # what earlier boots finished, when there is a journal

    def has_seen(self, seq: int) -> bool:
        """True when the seq lies in a remembered run."""
        index = bisect_right(self.firsts, seq) - 1
        return index >= 0 and seq <= self.lasts[index]

    def was_finished_earlier(self, seq: int) -> bool:
        """True when an earlier boot is known to have published the outcome of the seq."""
        return self.earlier is not None and seq in self.earlier

    def next_seq(self) -> int:
        """Return the number of a frame that brings none."""
        return max(self.last_seq, -1 if self.earlier is None else self.earlier.last) + 1

    def note(self, seq: int, max_runs: int) -> None:
        """Remember a seq above the last one; the oldest run is forgotten beyond ``max_runs``."""
        if self.lasts and seq == self.lasts[-1] + 1:
            self.lasts[-1] = seq
        else:
            self.firsts.append(seq)
            self.lasts.append(seq)
            if len(self.firsts) > max_runs:
                del self.firsts[0], self.lasts[0]
        self.last_seq = seq

    def note_reject(self, seq: int, refusal: Refusal, max_rejects: int) -> None:
        """Remember why a seq was refused, to say it again; the oldest goes beyond ``max_rejects``."""
        self.rejects[seq] = refusal
        if len(self.rejects) > max_rejects:
            del self.rejects[next(iter(self.rejects))]


@dataclass(slots=True, eq=False)
class Stream:
    """One stream. Invariants: ``order`` holds the admitted frames without a published outcome in the order
    of admission, ``unfinished`` the same by (epoch, seq); ``ring`` holds consecutive outcomes up to
    ``next_pub_seq - 1``; it is in the table's idle list exactly when ``order`` is empty."""

    name: str
    next_pub_seq: int
    last_frame_ns: int
    owner_peer: bytes | None = None
    owner_epoch: int | None = None  # None = owned by nobody
    order: deque[FrameRecord] = field(default_factory=deque)
    unfinished: dict[tuple[int, int], FrameRecord] = field(default_factory=dict)
    latest: FrameRecord | None = None  # the waiting frame that the next `latest` frame supersedes
    epochs: dict[int, EpochHistory] = field(default_factory=dict)
    ring: deque[tuple[Outcome, int]] = field(default_factory=deque)  # with its estimated bytes
    counts: dict[Status, int] = field(default_factory=dict)
    idle_since_ns: int = 0
    # Staleness (staleness.py).
    is_watched: bool = False
    is_stale: bool = False
    has_ended: bool = False  # its producer said goodbye and it brought no frame since

    def history(self, epoch: int) -> EpochHistory:
        """Return what was seen of an epoch, begun now if it is new.

        Beyond EPOCHS_PER_STREAM the epoch begun longest ago goes, but neither the owner's nor one with
        unfinished frames (those are bounded on their own)."""
        history = self.epochs.get(epoch)
        if history is None:
            if len(self.epochs) >= EPOCHS_PER_STREAM:
                self._forget_epoch()
            history = self.epochs[epoch] = EpochHistory()
        return history

    def _forget_epoch(self) -> None:
        for epoch, history in self.epochs.items():
            if epoch != self.owner_epoch and history.unfinished_count == 0:
                del self.epochs[epoch]
                return

    def release_owner(self) -> None:
        """Let any producer take the stream."""
        self.owner_peer = None
        self.owner_epoch = None


class StreamTable:
    """All streams by name, bounded. Invariant: streams with unfinished frames are never forgotten."""

    def __init__(self, max_streams: int, idle_ns: int, min_idle_ns: int) -> None:
        self._max_streams = max_streams
        self._idle_ns = idle_ns
        self._min_idle_ns = min_idle_ns
        self.by_name: dict[str, Stream] = {}
        self._idle: OrderedDict[str, Stream] = OrderedDict()
        self._forgotten: OrderedDict[str, int] = OrderedDict()
        self._floor = 0
        self.forgotten_count = 0

    def __len__(self) -> int:
        return len(self.by_name)

    def open(self, name: str, now_ns: int) -> tuple[Stream | None, Stream | None]:
        """Return the stream, begun now if it is new, and the idle stream that had to go for it.

        The stream is None when the table is full of streams that are in use."""
        stream = self.by_name.get(name)
        if stream is not None:
            return stream, None
        evicted = None
        if len(self.by_name) >= self._max_streams:
            evicted = self._pop_idle(now_ns - self._min_idle_ns)
            if evicted is None:
                return None, None
        stream = Stream(name, self._forgotten.pop(name, self._floor), now_ns)
        self.by_name[name] = stream
        self.mark_idle(stream, now_ns)
        return stream, evicted

    def restore(self, restored: RestoredStream, max_rejects: int, now_ns: int) -> None:
        """Begin a stream with what earlier boots finished of it. The table must not know it yet.

        Their seqs stand apart from this boot's: what was unfinished among them is sent again and must be
        admitted although higher ones are finished."""
        stream, _ = self.open(restored.name, now_ns)
        if stream is None:
            return
        for one in restored.epochs[-EPOCHS_PER_STREAM:]:
            history = stream.history(one.epoch)
            history.earlier = one.finished
            for seq, refusal in one.rejects:
                history.note_reject(seq, refusal, max_rejects)

    def mark_busy(self, stream: Stream) -> None:
        """A frame was admitted to a stream: it can't be forgotten."""
        self._idle.pop(stream.name, None)

    def mark_idle(self, stream: Stream, now_ns: int) -> None:
        """The last unfinished frame was published, or an idle stream was used without an admission."""
        stream.idle_since_ns = now_ns
        self._idle[stream.name] = stream
        self._idle.move_to_end(stream.name)

    def pop_idle(self, now_ns: int) -> Stream | None:
        """Forget and return one stream that was idle for the configured time."""
        return self._pop_idle(now_ns - self._idle_ns)

    def next_idle_ns(self) -> int | None:
        """Return when the next idle stream is to be forgotten."""
        for stream in self._idle.values():
            return stream.idle_since_ns + self._idle_ns
        return None

    def take_stray_pub_seq(self, name: str) -> int:
        """Return the next pub_seq of a stream that has no place in the table, and count it on."""
        pub_seq = self._forgotten.pop(name, self._floor)
        self._remember_pub_seq(name, pub_seq + 1)
        return pub_seq

    def next_pub_seq(self, name: str) -> int | None:
        """Return the next pub_seq of a stream, also of a forgotten one; None for one never seen."""
        stream = self.by_name.get(name)
        return self._forgotten.get(name) if stream is None else stream.next_pub_seq

    def _pop_idle(self, idle_before_ns: int) -> Stream | None:
        for stream in self._idle.values():
            if stream.idle_since_ns > idle_before_ns:
                return None
            del self._idle[stream.name], self.by_name[stream.name]
            self.forgotten_count += 1
            self._remember_pub_seq(stream.name, stream.next_pub_seq)
            return stream
        return None

    def _remember_pub_seq(self, name: str, pub_seq: int) -> None:
        self._forgotten[name] = pub_seq
        if len(self._forgotten) > FORGOTTEN_PER_STREAM * self._max_streams:
            self._floor = max(self._floor, self._forgotten.popitem(last=False)[1])

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables disagree (a bug of ours)."""
        if len(self.by_name) > self._max_streams:
            raise AssertionError(f"{len(self.by_name)} streams, limit {self._max_streams}")
        for name, stream in self.by_name.items():
            if len(stream.order) != len(stream.unfinished):
                raise AssertionError(
                    f"stream {name}: order holds {len(stream.order)}, index {len(stream.unfinished)}"
                )
            if (name in self._idle) == bool(stream.order):
                raise AssertionError(f"stream {name}: idle list and {len(stream.order)} unfinished disagree")
            if sum(history.unfinished_count for history in stream.epochs.values()) != len(stream.order):
                raise AssertionError(f"stream {name}: epochs disagree about {len(stream.order)} unfinished")
            for position, (outcome, _) in enumerate(reversed(stream.ring), start=1):
                if outcome.pub_seq != stream.next_pub_seq - position:
                    raise AssertionError(f"stream {name}: ring holds {outcome.pub_seq} at -{position}")
