"""The shared memory of the simulated host: made up but for the allocator, which is the production one.

A slot that is read after it was freed reads as stale, as in ``headrace.arena``, and what is read is compared
with what the frame's id says. A file goes when its owner is dead and no broker holds it.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.arena import BLOCK_HEADER_BYTES, HEADER_BYTES
from headrace.broker import actions as act
from headrace.errors import Code
from headrace.protocol.messages import Frame, Hello, ShmRef
from headrace.slot_allocator import SlotAllocator
from hr_sim.book import Violation


class Arena:
    """One producer's memory."""

    def __init__(self, name: str, epoch: int, nbytes: int) -> None:
        self.name = name
        self.epoch = epoch
        self.nbytes = HEADER_BYTES + nbytes
        self.has_owner = True
        self.holders: dict[int, None] = {}  # boots
        self._memory = bytearray(self.nbytes)
        self._allocator = SlotAllocator(nbytes)
        self._generation = epoch & (2**62 - 1)
        self._generations: dict[int, int] = {}

    @property
    def is_gone(self) -> bool:
        return not self.has_owner and not self.holders

    def take(self, payload: bytes) -> ShmRef | None:
        """Write a payload into a free slot."""
        block = self._allocator.take(BLOCK_HEADER_BYTES + len(payload))
        if block is None:
            return None
        self._generation += 1
        offset = HEADER_BYTES + block + BLOCK_HEADER_BYTES
        self._generations[offset] = self._generation
        self._memory[offset : offset + len(payload)] = payload
        return ShmRef(self.name, offset, len(payload), self._generation)

    def free(self, ref: ShmRef) -> None:
        """Free a slot."""
        del self._generations[ref.offset]
        self._allocator.give_back(ref.offset - BLOCK_HEADER_BYTES - HEADER_BYTES)

    def read(self, ref: ShmRef) -> bytes | None:
        """Return a payload, None when it is stale."""
        if self.is_gone or self._generations.get(ref.offset) != ref.generation:
            return None
        return bytes(self._memory[ref.offset : ref.offset + ref.nbytes])


class Arenas:
    """All of the host."""

    def __init__(self) -> None:
        self._by_name: dict[str, Arena] = {}

    def make(self, epoch: int, nbytes: int) -> Arena:
        """Make a producer's arena."""
        arena = Arena(f"headrace-{epoch:016x}.arena", epoch, nbytes)
        self._by_name[arena.name] = arena
        return arena

    def open(self, hello: Hello, boot: int) -> int:
        """Let a broker open the arena that a producer names; return its size, 0 for none."""
        arena = self._by_name.get(hello.arena)
        if arena is None or arena.is_gone or arena.epoch != hello.epoch:
            return 0
        arena.holders[boot] = None
        return arena.nbytes

    def held_by(self, boot: int) -> list[str]:
        return [arena.name for arena in self._by_name.values() if boot in arena.holders]

    def sweep(self, boot: int, used: Collection[str]) -> list[str]:
        """A broker lets go of the arenas of dead owners that it does not use."""
        closed = [
            arena
            for arena in self._by_name.values()
            if boot in arena.holders and not arena.has_owner and arena.name not in used
        ]
        for arena in closed:
            del arena.holders[boot]
        return [arena.name for arena in closed]

    def let_go(self, boot: int) -> None:
        """A broker is gone."""
        for arena in self._by_name.values():
            arena.holders.pop(boot, None)

    def read(self, ref: ShmRef) -> bytes | None:
        """Return a payload, None when it is stale."""
        arena = self._by_name.get(ref.arena)
        return None if arena is None else arena.read(ref)

    def judge_arrival(self, frame: Frame, actions: list[act.Action]) -> None:
        """Fail if a living producer's frame is refused for where its payload is: it would not come again."""
        arena = self._by_name.get(frame.payload.arena) if isinstance(frame.payload, ShmRef) else None
        for action in actions if arena is not None and arena.has_owner else ():
            if isinstance(action, act.SendReject) and action.reject.code == Code.LANE_UNAVAILABLE:
                key = (frame.stream, frame.epoch or 0, frame.seq or 0)
                raise Violation("it is refused for its lane, and its producer lives", key)

    def check_pixels(self, frame: Frame, payload: bytes) -> None:
        """Fail if a payload that was read is that of another frame. Copies of a poison frame are zeros."""
        if payload[:8] not in {(frame.pts_ns or 0).to_bytes(8, "little"), bytes(8)}:
            key = (frame.stream, frame.epoch or 0, frame.seq or 0)
            raise Violation(f"stale pixels: its slot holds {payload[:8].hex()}", key)
