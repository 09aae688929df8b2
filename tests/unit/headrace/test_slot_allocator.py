"""The allocator of an arena's slots: nothing overlaps, nothing is lost, and what is hot is used again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.slot_allocator import ALIGNMENT, SlotAllocator

#: A step: take so many bytes, or give back the n-th of what is taken.
STEPS = st.lists(st.tuples(st.sampled_from(["take", "give back"]), st.integers(1, 700)), max_size=200)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, 4_096))
def test_blocks_cover_the_space_and_never_overlap(steps: list[tuple[str, int]], nbytes: int) -> None:
    """Whatever is taken and given back in whatever order; a take fails only where no free block suffices."""
    allocator = SlotAllocator(nbytes)
    taken: dict[int, int] = {}
    for kind, number in steps:
        if kind == "give back" and taken:
            start = list(taken)[number % len(taken)]
            del taken[start]
            allocator.give_back(start)
        elif kind == "take":
            had_room = allocator.has_room(number)
            start = allocator.take(number)
            assert (start is not None) == had_room
            if start is not None:
                assert start % ALIGNMENT == 0
                assert start + number <= nbytes
                assert all(start + number <= s or s + size <= start for s, size in taken.items())
                taken[start] = number
        allocator.check_invariants()
    for start in taken:
        allocator.give_back(start)
    allocator.check_invariants()
    assert allocator.taken_bytes == 0
    whole = nbytes // ALIGNMENT * ALIGNMENT
    assert allocator.take(max(whole, 1)) == (0 if whole else None)


def test_the_block_freed_last_is_taken_first() -> None:
    """Its pages are still in the caches."""
    allocator = SlotAllocator(64 * ALIGNMENT)
    blocks = [allocator.take(ALIGNMENT) for _ in range(8)]
    for block in (blocks[2], blocks[6], blocks[4]):
        assert block is not None
        allocator.give_back(block)

    assert [allocator.take(ALIGNMENT) for _ in range(3)] == [blocks[4], blocks[6], blocks[2]]


def test_a_small_block_is_not_cut_from_a_large_one_while_one_fits() -> None:
    """The smallest free block that suffices is used: large ones stay whole for large frames."""
    allocator = SlotAllocator(64 * ALIGNMENT)
    first, _wall, _last = allocator.take(4 * ALIGNMENT), allocator.take(1), allocator.take(8 * ALIGNMENT)
    assert first is not None
    allocator.give_back(first)

    assert allocator.take(3 * ALIGNMENT) == first
    assert allocator.take(30 * ALIGNMENT) is not None


def test_neighbours_are_joined() -> None:
    """Three freed blocks in any order make one."""
    allocator = SlotAllocator(3 * ALIGNMENT)
    blocks = [allocator.take(ALIGNMENT) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        assert block is not None
        allocator.give_back(block)

    assert allocator.take(3 * ALIGNMENT) == 0


def test_a_block_is_given_back_once() -> None:
    """The second time is a bug, and changes nothing."""
    allocator = SlotAllocator(ALIGNMENT)
    start = allocator.take(1)
    assert start is not None
    allocator.give_back(start)

    with pytest.raises(KeyError):
        allocator.give_back(start)
    allocator.check_invariants()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda allocator: allocator._taken.__setitem__(0, 128),
        lambda allocator: allocator._free.clear(),
        lambda allocator: allocator._sizes.append(1),
        lambda allocator: allocator._free_ends.clear(),
        lambda allocator: setattr(allocator, "taken_bytes", 1),
    ],
    ids=["overlap", "lost", "sizes", "ends", "count"],
)
def test_the_check_finds_what_is_broken(break_it: object) -> None:
    """A check that can't fail is a defect."""
    allocator = SlotAllocator(8 * ALIGNMENT)
    allocator.take(1)
    assert callable(break_it)
    break_it(allocator)

    with pytest.raises(AssertionError):
        allocator.check_invariants()
