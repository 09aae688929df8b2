"""A worker's mappings of producers' arenas, and the frames that it stages from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hr_worker import batch_of, gradient, image_frame, image_plan, jpeg, raw_frame

from headrace.arena import ArenaReader, ArenaWriter
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Encoding, Frame, Limits, ShmRef
from headrace.workers import arenas
from headrace.workers.arenas import ArenaMappings
from headrace.workers.staging import BufferPool, Stager

NBYTES = 256 * 1024
RGB = gradient(24, 32)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ArenaWriter]:
    made = ArenaWriter.create(NBYTES, 7, tmp_path)
    yield made
    made.close()


def in_slot(writer: ArenaWriter, frame: Frame) -> Frame:
    """Return the frame with its payload in shared memory."""
    assert not isinstance(frame.payload, ShmRef)
    slot = writer.take(frame.nbytes)
    assert slot is not None
    writer.view(slot)[:] = memoryview(frame.payload).cast("B")
    return replace(frame, payload=slot)


def test_frames_in_shared_memory_are_staged_as_inline_ones(writer: ArenaWriter, tmp_path: Path) -> None:
    """Raw and encoded, row by row the same."""
    inline = [raw_frame(RGB), image_frame(jpeg(RGB), Encoding.JPEG, 24, 32), raw_frame(RGB[::-1])]
    stager = Stager(BufferPool(), Limits(), ArenaMappings(tmp_path))

    expected = stager.stage(batch_of(*inline), image_plan())
    found = stager.stage(batch_of(*[in_slot(writer, frame) for frame in inline]), image_plan())

    assert expected.batch is not None
    assert found.batch is not None
    assert found.failures == {}
    assert found.rows == expected.rows
    np.testing.assert_array_equal(found.batch.inputs[0].array, expected.batch.inputs[0].array)


def test_a_slot_that_was_freed_is_the_error_of_its_frame(writer: ArenaWriter, tmp_path: Path) -> None:
    """Its neighbours close ranks."""
    frames = [in_slot(writer, raw_frame(RGB)) for _ in range(3)]
    freed = frames[1].payload
    assert isinstance(freed, ShmRef)
    writer.free(freed)

    result = Stager(BufferPool(), Limits(), ArenaMappings(tmp_path)).stage(batch_of(*frames), image_plan())

    assert {index: failure.code for index, failure in result.failures.items()} == {1: Code.STALE_SLOT}
    assert [row.index for row in result.rows] == [0, 2]


@pytest.mark.parametrize("shape", [(24, 32, 3), (64, 96, 3)], ids=["scaled or padded", "copied as it is"])
def test_a_slot_that_is_freed_while_it_is_staged_is_not_used(
    writer: ArenaWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]
) -> None:
    """The row was written, perhaps from two frames: it is worthless."""
    frame = in_slot(writer, raw_frame(gradient(*shape[:2])))
    view = ArenaReader.view

    def and_free(reader: ArenaReader, ref: ShmRef) -> memoryview:
        found = view(reader, ref)
        writer.free(ref)
        return found

    monkeypatch.setattr(ArenaReader, "view", and_free)
    stager = Stager(BufferPool(), Limits(), ArenaMappings(tmp_path))
    result = stager.stage(batch_of(frame), image_plan())

    assert {index: failure.code for index, failure in result.failures.items()} == {0: Code.STALE_SLOT}


def test_an_arena_is_mapped_once_and_unmapped_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is told of both, in this order, and may register the memory between."""
    told: list[tuple[str, str]] = []
    mappings = ArenaMappings(
        tmp_path,
        on_open=lambda reader: told.append(("open", reader.name)),
        on_close=lambda reader: told.append(("close", reader.name)),
    )
    first, second = (ArenaWriter.create(NBYTES, 7, tmp_path) for _ in range(2))
    refs = [writer.take(100) for writer in (first, second)]
    assert refs[0] is not None
    assert refs[1] is not None
    readers = [mappings.reader(ref) for ref in (refs[0], refs[0], refs[1])]
    first.close()
    monkeypatch.setattr(arenas, "SWEEP_S", 0.0)
    mappings.sweep()

    assert readers[0] is readers[1]
    assert all(isinstance(reader, ArenaReader) for reader in readers)
    assert told == [("open", first.name), ("open", second.name), ("close", first.name)]
    assert mappings.count == 1
    mappings.close()
    second.close()
    assert told[-1] == ("close", second.name)


def test_mappings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was opened first goes; its producer's next frame opens it again."""
    monkeypatch.setattr(arenas, "MAX_MAPPINGS", 2)
    mappings = ArenaMappings(tmp_path)
    writers = [ArenaWriter.create(NBYTES, 7, tmp_path) for _ in range(3)]
    refs = [writer.take(100) for writer in writers]
    for ref in refs:
        assert ref is not None
        mappings.reader(ref)

    assert mappings.count == 2
    assert refs[0] is not None
    assert mappings.reader(refs[0]).copy(refs[0]) == bytes(100)
    mappings.close()
    for writer in writers:
        writer.close()


def test_mappings_leave_half_of_the_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the limit on open files is low, fewer arenas are mapped at once."""
    monkeypatch.setattr(arenas, "limits", lambda: (40, 40))

    assert ArenaMappings(tmp_path).max_count == 10


def test_an_arena_that_was_cut_short_is_stale_and_ends_nobody(tmp_path: Path) -> None:
    """Reading the mapping would be a SIGBUS: frames of that arena end, their neighbours run, and so does the
    next batch."""
    cut, good = (ArenaWriter.create(NBYTES, 7, tmp_path) for _ in range(2))
    stager = Stager(BufferPool(), Limits(), ArenaMappings(tmp_path))
    frames = [in_slot(writer, raw_frame(RGB)) for writer in (cut, good, cut)]
    assert stager.stage(batch_of(*frames), image_plan()).failures == {}
    os.truncate(tmp_path / cut.name, 4096)

    for _ in range(2):  # with a mapping from before, and without one
        result = stager.stage(batch_of(*frames), image_plan())

        assert {index: failure.code for index, failure in result.failures.items()} == {
            0: Code.STALE_SLOT,
            2: Code.STALE_SLOT,
        }
        assert [row.index for row in result.rows] == [1]
    good.close()
    cut.close()


@pytest.mark.parametrize("folder", ["here", None], ids=["no such arena", "lane off"])
def test_an_arena_that_is_not_there_is_a_stale_slot(tmp_path: Path, folder: str | None) -> None:
    mappings = ArenaMappings(None if folder is None else tmp_path)

    with pytest.raises(InvalidFrameError, match="stale_slot"):
        mappings.reader(ShmRef("headrace-0123456789abcdef.arena", 4160, 1, 1))
