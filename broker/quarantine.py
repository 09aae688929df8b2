"""The contents of frames that took down workers: refused for a while when they come again.

Not here: how a frame is found guilty (recovery.py).

Theory of operation. A frame is known by a hash of its payload, and only for the model that it took down. In
normal operation the table is empty and nothing is hashed. While it is not, a frame is hashed only if its
length and a sample of its bytes are those of a quarantined one: hashing every frame would cost far more than
all else that the broker does with it, and raw frames of one camera all have the same length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from headrace.broker.records import FrameRecord
from headrace.protocol.messages import Buffer, Frame, Payload, ShmRef

#: Bytes of a digest: with 16, two different payloads are not mistaken for each other by accident.
_DIGEST_BYTES = 16

#: Bytes sampled at the beginning, in the middle and at the end: there frames of one camera differ by noise.
_SAMPLE_BYTES = 64

#: Returns the bytes of an unfinished frame's payload in shared memory, None when they are gone. They are
#: looked at in place: a queue of large frames can be compared without copying any.
ReadSlot: TypeAlias = Callable[[ShmRef], "Buffer | None"]

_Key = tuple[str, str, bytes]
_Sample = tuple[int, bytes, bytes, bytes]


class Quarantine:
    """Bounded table of contents. Invariant: entries in the order in which they end; ``_samples`` counts
    exactly theirs."""

    def __init__(self, quarantine_ms: int, max_frames: int, read_slot: ReadSlot | None = None) -> None:
        """Make an empty table; ``quarantine_ms`` 0 keeps it empty."""
        self._read_slot = read_slot or no_slots
        self._stay_ns = quarantine_ms * 1_000_000
        self._max_frames = max_frames
        self._entries: dict[_Key, tuple[int, _Sample]] = {}
        self._samples: dict[_Sample, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, record: FrameRecord, now_ns: int) -> None:
        """Refuse the content of a frame from now on; beyond the bound the oldest entry goes."""
        payload = self._bytes_of(record.frame.payload)
        if self._stay_ns == 0 or payload is None:
            return
        key = (record.model, record.version, _digest(payload))
        self._drop(key)
        if len(self._entries) >= self._max_frames:
            self._drop(next(iter(self._entries)))
        sample = _sample(payload)
        self._entries[key] = (now_ns + self._stay_ns, sample)
        self._samples[sample] = self._samples.get(sample, 0) + 1

    def find(self, model: str, version: str, frame: Frame, now_ns: int) -> int | None:
        """Return for how many nanoseconds more a frame's content is refused, None if it is not."""
        while self._entries:
            key, (until_ns, _) = next(iter(self._entries.items()))
            if now_ns < until_ns:
                break
            self._drop(key)
        if not self._entries:
            return None
        payload = self._bytes_of(frame.payload)
        if payload is None or _sample(payload) not in self._samples:
            return None
        entry = self._entries.get((model, version, _digest(payload)))
        return None if entry is None else entry[0] - now_ns

    def with_payload(self, frame: Frame) -> Frame:
        """Return a suspect with its bytes taken out of shared memory: its outcome, with which the producer
        frees the slot, may be known before its guilt is."""
        if not isinstance(frame.payload, ShmRef):
            return frame
        held = self._read_slot(frame.payload)
        return frame if held is None else replace(frame, payload=bytes(held))

    def has_same_content(self, one: Payload, other: Payload) -> bool:
        """Return True when two payloads hold the same bytes."""
        first, second = self._bytes_of(one), self._bytes_of(other)
        if first is None or second is None:
            return False
        return _sample(first) == _sample(second) and _digest(first) == _digest(second)

    def _bytes_of(self, payload: Payload) -> memoryview | None:
        """Return a payload's bytes, None if they can't be had."""
        held = self._read_slot(payload) if isinstance(payload, ShmRef) else payload
        return memoryview(held).cast("B") if held else None

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        sample = entry[1]
        self._samples[sample] -= 1
        if not self._samples[sample]:
            del self._samples[sample]


def no_slots(_ref: ShmRef) -> None:
    """Find no payload in shared memory: what a core does that was given no way to read it."""


def _digest(view: memoryview) -> bytes:
    return hashlib.blake2b(view, digest_size=_DIGEST_BYTES).digest()


def _sample(view: memoryview) -> _Sample:
    middle = len(view) // 2
    return (
        len(view),
        bytes(view[:_SAMPLE_BYTES]),
        bytes(view[middle : middle + _SAMPLE_BYTES]),
        bytes(view[-_SAMPLE_BYTES:]),
    )
