"""Which bytes of an arena are free: a pure allocator of aligned blocks.

Not here: memory, files, threads (``arena``).

Theory of operation. Blocks are multiples of ALIGNMENT. The smallest free block that is large enough is
taken, and of those the one that was freed last, whose pages are still in the processor's caches; what it has
too much stays free behind it. A freed block is joined with its free neighbours at once, so that two free
blocks never touch. Finding a block takes a bisection in the list of the different free sizes, of which
there are few, as frames come in few sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

#: A cache line; also what the widest vector instructions want.
ALIGNMENT: Final = 64


class SlotAllocator:
    """Invariants: taken and free blocks together cover the space exactly; no two free blocks touch."""

    def __init__(self, nbytes: int) -> None:
        """Manage ``nbytes``, rounded down to ALIGNMENT, all of them free."""
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.taken_bytes = 0
        self._taken: dict[int, int] = {}  # start -> size
        self._free: dict[int, int] = {}  # start -> size
        self._free_ends: dict[int, int] = {}  # end -> start
        self._starts: dict[int, dict[int, None]] = {}  # size -> starts of free blocks, in order of freeing
        self._sizes: list[int] = []  # the keys of _starts, ascending
        if self.nbytes:
            self._add_free(0, self.nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Tell whether ``take`` would return a block."""
        return bool(self._sizes) and self._sizes[-1] >= nbytes

    def take(self, nbytes: int) -> int | None:
        """Take a block of at least ``nbytes`` (1 or more); return its start, None when none is free."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        index = bisect_left(self._sizes, wanted)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        start = next(reversed(self._starts[size]))
        self._remove_free(start, size)
        if size > wanted:
            self._add_free(start + wanted, size - wanted)
        self._taken[start] = wanted
        self.taken_bytes += wanted
        return start

    def give_back(self, start: int) -> None:
        """Free the block that ``take`` returned. Raises KeyError when it is not taken."""
        size = self._taken.pop(start)
        self.taken_bytes -= size
        before = self._free_ends.get(start)
        if before is not None:
            size_before = self._free[before]
            self._remove_free(before, size_before)
            start, size = before, size + size_before
        size_after = self._free.get(start + size)
        if size_after is not None:
            self._remove_free(start + size, size_after)
            size += size_after
        self._add_free(start, size)

    def check_invariants(self) -> None:
        """Raise AssertionError when the blocks do not cover the space (a bug of ours)."""
        blocks = sorted([*self._taken.items(), *self._free.items()])
        end = 0
        was_free = False
        for start, size in blocks:
            is_free = start in self._free
            if start != end or size <= 0 or size % ALIGNMENT or (is_free and was_free):
                raise AssertionError(f"block {start} of {size} bytes follows {end}")
            end, was_free = start + size, is_free
        if end != self.nbytes:
            raise AssertionError(f"blocks end at {end} of {self.nbytes}")
        listed = sorted((start, size) for size, starts in self._starts.items() for start in starts)
        if listed != sorted(self._free.items()) or self._sizes != sorted(self._starts):
            raise AssertionError("the lists of free blocks differ")
        if self._free_ends != {start + size: start for start, size in self._free.items()}:
            raise AssertionError("the ends of free blocks differ")
        if self.taken_bytes != sum(self._taken.values()):
            raise AssertionError(f"{self.taken_bytes} bytes counted as taken")

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_ends[start + size] = start
        starts = self._starts.get(size)
        if starts is None:
            starts = self._starts[size] = {}
            self._sizes.insert(bisect_left(self._sizes, size), size)
        starts[start] = None

    def _remove_free(self, start: int, size: int) -> None:
        del self._free[start]
        del self._free_ends[start + size]
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
