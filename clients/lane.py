"""How a producer's payloads travel: in its own shared memory where the broker can read it, in messages else.

Not here: the layout of an arena (``headrace.arena``), when a frame's end is known (``producer_session``).

Theory of operation. Two processes share memory when their host keys are equal. The broker's is known from
discovery: only then is an arena made, and HELLO names it. WELCOME says whether the broker could open it;
from then on payloads are written into slots. A slot is freed when the frame's outcome is known, not before:
until then a worker may read it, or the frame may have to be sent again. Where no slot is free the frame goes
inline, and is counted. When a later broker can't read the arena, frames that lie there are copied into their
messages.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from headrace.arena import SHM_FOLDER, ArenaWriter, reclaim
from headrace.clients.sockets import snapshot
from headrace.errors import ArenaError, ConfigError, RemoteProtocolError
from headrace.host import host_key
from headrace.protocol.imageheader import read_image_shape
from headrace.protocol.messages import Buffer, Encoding, Frame, Payload, ShmRef

_log = logging.getLogger("headrace.clients.producer")

#: Memory that a producer shares by default. It is taken whole at the start, so it must suit a host with
#: dozens of camera processes; it holds 64 unfinished frames (the default credits) of 1 MiB, 24 of 1280x720x3.
DEFAULT_SHM_BYTES = 64 * 1024 * 1024

#: Payloads below this size go inline: a small message part costs less than a slot and what names it. CPU of
#: all processes per frame, inline and shm, in us: 1 KiB 66 and 69; 4 KiB 77 and 76; 12 KiB 103 and 73;
#: 16 KiB 118 and 81; 48 KiB 172 and 80 (the better of two runs on two busy cores).
MIN_SLOT_BYTES = 4 * 1024


#: numpy lets other threads run while it copies. For a copy of less than about 50 microseconds that costs more
#: than it gives: the producer's own thread takes over, and the one that pushes waits to get its turn back.
#: With frames of 150,528 bytes a producer that holds on takes 36 us of CPU a frame, one that lets go 44.
MAX_HELD_COPY_BYTES = 512 * 1024


class LaneChoice(StrEnum):
    """``auto``: shared memory where it can be had, else inline. ``inline``: never. ``shm``: always; push()
    waits for a free slot, and raises ArenaError where shared memory can't be had."""

    AUTO = "auto"
    INLINE = "inline"
    SHM = "shm"


class Lane:
    """A producer's arena, if it has one. ``prepare``, ``note_welcome`` and ``inlined`` belong to the loop's
    thread, the rest to any; ``take``, ``note_sent`` and ``free`` to one at a time (the producer's lock).

    Invariant: a slot that was taken is freed once, by ``free`` or by the end of it all.
    """

    def __init__(self, lane: LaneChoice | str, shm_bytes: int, epoch: int, folder: Path = SHM_FOLDER) -> None:
        """Raises ConfigError for a lane that there is not."""
        try:
            self.choice = choice = LaneChoice(lane)
        except ValueError:
            raise ConfigError(f"lane {lane!r} is not one of {', '.join(LaneChoice)}") from None
        self.host_key = "" if choice is LaneChoice.INLINE else host_key(folder)
        #: Why there is no shared memory; "" while there is, or while it is not known.
        self.fault = ""
        self.counts: Counter[str] = Counter()
        self.full_count = 0
        self._shm_bytes = shm_bytes
        self._epoch = epoch
        self._folder = folder
        self._arena: ArenaWriter | None = None
        self._is_open = False  # the broker of the last WELCOME reads the arena
        self._has_told = False

    # -- the loop's thread ---------------------------------------------------------------------------

    def prepare(self, broker_host_key: str) -> str:
        """Make the arena if the broker found can read one; return its name, "" for none."""
        if not self.host_key or broker_host_key != self.host_key:
            self.fault = (
                "the broker and this producer share no memory: other host, user or folder, or it is off"
            )
            return ""
        if self._arena is None:
            reclaim(self._folder)
            try:
                self._arena = ArenaWriter.create(self._shm_bytes, self._epoch, self._folder)
            except ArenaError as error:
                self._give_up(str(error))
                return ""
        return self._arena.name

    def note_welcome(self, is_shm_possible: bool) -> None:
        """Take the broker's word on whether it reads the arena."""
        self._is_open = is_shm_possible and self._arena is not None
        if self._is_open:
            self.fault = ""
        elif self._arena is not None and not self.fault:
            self._give_up(f"the broker can't open arena {self._arena.name}; its log says why")

    def inlined(self, frame: Frame) -> Frame:
        """Return the frame with its payload in place of its slot."""
        ref = frame.payload
        if not isinstance(ref, ShmRef) or self._arena is None:
            return frame
        return replace(frame, payload=snapshot(self._arena.view(ref)))

    # -- any thread ----------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Tell whether a frame can be taken now. With a choice of lanes it always can."""
        if self.choice is not LaneChoice.SHM:
            return True
        return bool(self.fault) or (
            self._is_open and self._arena is not None and self._arena.has_room(nbytes)
        )

    def take(self, nbytes: int) -> ShmRef | None:
        """Take a slot; None when the payload goes inline. Raises ArenaError when it may not."""
        if not self._is_open or self._arena is None:
            if self.choice is LaneChoice.SHM:
                raise ArenaError(f"lane shm: {self.fault or 'not connected'}")
            return None
        if nbytes < MIN_SLOT_BYTES and self.choice is LaneChoice.AUTO:
            return None
        ref = self._arena.take(nbytes)
        if ref is None:
            self.full_count += 1
        return ref

    def view(self, ref: ShmRef) -> memoryview:
        """Return the bytes of a slot that was taken, to be written."""
        assert self._arena is not None  # noqa: S101 - it was taken from there
        return self._arena.view(ref)

    def fill(self, ref: ShmRef | None, data: Buffer) -> Payload:
        """Copy a payload, once: into its slot, or into memory that ZeroMQ can send."""
        if ref is None:
            return snapshot(data)
        if ref.nbytes <= MAX_HELD_COPY_BYTES:
            self.view(ref)[:] = memoryview(data).cast("B")
        else:
            np.frombuffer(self.view(ref), np.uint8)[:] = np.frombuffer(data, np.uint8)
        return ref

    def note_sent(self, payload: Payload) -> None:
        """Count a frame by its lane."""
        self.counts["shm" if isinstance(payload, ShmRef) else "inline"] += 1

    def shape_in_slot(self, encoding: Encoding, data: Buffer) -> tuple[int, ...] | None:
        """Return (height, width, channels) of an encoded image, which the broker does not look into when it
        lies in a slot; None when it can't be read: then the broker must see the image and say why."""
        try:
            return read_image_shape(data, encoding)
        except RemoteProtocolError:
            return None

    def free(self, payload: Payload | None) -> None:
        """Give a slot back; anything else needs no such thing."""
        if isinstance(payload, ShmRef) and self._arena is not None:
            self._arena.free(payload)

    def close(self, *, is_abandoned: bool) -> None:
        """Remove the arena. ``is_abandoned``: the broker may still need it, and removes it then."""
        if self._arena is not None:
            self._arena.close(is_abandoned=is_abandoned)

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        if not self._has_told:
            self._has_told = True
            _log.warning("no shared memory, frames go inline: %s", fault)
