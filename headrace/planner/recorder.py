"""From what a broker tells of its arrivals to the frames of a trace.

Pure: the caller asks the broker (control method ``record``) and hands the answers over. Times count from the
first frame; those of a broker that was started again go on from the last one. Names of streams may be hashed
with a salt that is drawn for each recording: the same name gives the same hash within a trace, and nobody who
guesses a name can check the guess.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping

from headrace.errors import Code, RemoteProtocolError
from headrace.planner.trace_file import TraceFrame, TraceKind
from headrace.protocol.messages import Encoding, Keep, Value

#: Hexadecimal digits of a hashed name: 48 bits, so that two of 10,000 streams share one with a chance of 2 in
#: 10 million.
HASH_DIGITS = 12


class Recorder:
    """Turns answers into frames. ``params`` is the next question; ``more``: it can be asked at once."""

    def __init__(self, salt: bytes | None = None) -> None:
        """``salt``: hash the names of streams with it; None keeps them."""
        self._salt = salt
        self._names: dict[str, str] = {}
        self._begin_us: int | None = None
        self._last_us = 0
        self.params: dict[str, Value] = {}
        self.more = False
        self.frames_count = 0
        self.lost_count = 0

    @property
    def streams_count(self) -> int:
        """Return how many streams there were."""
        return len(self._names)

    def take(self, result: Mapping[str, Value]) -> list[TraceFrame]:
        """Return the frames of one answer. Raises RemoteProtocolError when it is none."""
        frames, following, lost = result.get("frames"), result.get("next"), result.get("lost")
        if not isinstance(frames, list) or not isinstance(following, int) or not isinstance(lost, int):
            raise RemoteProtocolError(Code.BAD_FIELD, "the broker's answer to `record` has no frames")
        self.params = {"after": following}
        self.more = result.get("more") is True
        self.lost_count += lost
        taken = [self._frame_of(entry) for entry in frames]
        self.frames_count += len(taken)
        return taken

    def _frame_of(self, entry: Value) -> TraceFrame:
        match entry:
            case [
                int(time_us),
                str(stream),
                list(shape),
                int(nbytes),
                str(model),
                int(priority),
                None | int() as ttl_ms,
                str(keep),
                str(encoding),
                str(dtype),
            ] if all(isinstance(side, int) for side in shape):
                sides = tuple(side for side in shape if isinstance(side, int))
                with contextlib.suppress(ValueError):
                    kind = TraceKind(
                        sides, nbytes, model, priority, ttl_ms, Keep(keep), Encoding(encoding), dtype
                    )
                    return TraceFrame(self._time_s(time_us), self._name(stream), kind)
        raise RemoteProtocolError(Code.BAD_FIELD, f"an entry of `record` can't be read: {entry!r:.200}")

    def _time_s(self, time_us: int) -> float:
        if self._begin_us is None:
            self._begin_us = time_us
        elapsed_us = time_us - self._begin_us
        if elapsed_us < self._last_us:
            # Another broker's clock.
            self._begin_us = time_us - self._last_us
            elapsed_us = self._last_us
        self._last_us = elapsed_us
        return elapsed_us / 1e6

    def _name(self, stream: str) -> str:
        name = self._names.get(stream)
        if name is None:
            name = stream if self._salt is None else self._hash(stream)
            self._names[stream] = name
        return name

    def _hash(self, stream: str) -> str:
        digest = hashlib.blake2b(stream.encode(), key=(self._salt or b"")[:64])
        return digest.hexdigest()[:HASH_DIGITS]
