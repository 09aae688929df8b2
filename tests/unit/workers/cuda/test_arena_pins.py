"""Rows that the device reads in the arena where the producer wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_gpu import Faults, OrderError, RecordingDevice
from hr_gpu_site import MEAN, SMALL, GpuSite, colors, colors_of
from numpy.typing import NDArray

from headrace.arena import ArenaReader, ArenaWriter
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Batch, Frame, Limits, ShmRef
from headrace.workers.arenas import ArenaMappings
from headrace.workers.cuda.arena_pins import ArenaPins
from headrace.workers.engine import EngineMisuseError, StagedBatch
from headrace.workers.staging import BufferPool, Stager, StagingPlan, StagingResult

SHAPE = (SMALL.height, SMALL.width, 3)
NBYTES = SMALL.height * SMALL.width * 3


class Yard:
    """An engine with one model, a producer's arena, and what stages from one into the other."""

    def __init__(self, folder: Path, faults: Faults | None = None, min_row_bytes: int = 1) -> None:
        self.site = GpuSite(folder, RecordingDevice(faults))
        self.site.load(classes=[SMALL])
        self.shm = folder / "shm"
        self.shm.mkdir()
        self.writer = ArenaWriter.create(64 * NBYTES, 7, self.shm)
        self.pins = ArenaPins(self.site.device, self.site.gate, min_row_bytes)
        self.mappings = ArenaMappings(self.shm, on_close=self.pins.release)
        pool = self.site.engine.staging_pool()
        assert pool is not None
        self.stager = Stager(pool, Limits(), self.mappings, self.pins)
        self.plan = StagingPlan(
            MEAN, self.site.specs[MEAN], SMALL, self.site.engine.plan(MEAN, "small"), (1, 2, 4)
        )

    def put(self, color: tuple[int, int, int]) -> ShmRef:
        ref = self.writer.take(NBYTES)
        assert ref is not None
        np.frombuffer(self.writer.view(ref), np.uint8).reshape(SHAPE)[...] = color
        return ref

    def stage(self, *payloads: ShmRef | bytes) -> StagingResult:
        frames = tuple(Frame("s", payload, seq, SHAPE) for seq, payload in enumerate(payloads))
        return self.stager.stage(Batch(1, "mean", "1", "small", frames), self.plan)

    def run(self, staged: StagedBatch) -> tuple[NDArray[np.float32], tuple[int, ...]]:
        self.site.engine.submit(staged)
        outputs = self.site.engine.collect()
        self.site.give_back(staged)
        return colors_of(outputs), outputs.stale_rows


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.writer.close()


def staged_of(result: StagingResult) -> StagedBatch:
    assert result.batch is not None
    return result.batch


def test_rows_in_an_arena_are_left_to_the_device(yard: Yard) -> None:
    """Mixed with rows from messages, each comes out as its own; the host copied the others alone."""
    wanted = colors(4)
    inline = np.full(SHAPE, wanted[1], np.uint8).tobytes()

    staged = staged_of(yard.stage(yard.put(wanted[0]), inline, yard.put(wanted[2]), yard.put(wanted[3])))
    assert [row.row for row in staged.direct] == [0, 2, 3]
    found, stale = yard.run(staged)

    np.testing.assert_allclose(found, wanted, atol=1e-3)
    assert stale == ()
    assert yard.pins.registered_count == 1
    (nbytes,) = yard.site.device.registered.values()
    assert yard.pins.figures() == {"registered_arenas": 1, "registered_arena_bytes": nbytes}


def test_padding_is_zero_beside_direct_rows(yard: Yard) -> None:
    """Three rows in a bucket of four."""
    wanted = colors(3, 8)

    found, _ = yard.run(staged_of(yard.stage(*(yard.put(color) for color in wanted))))

    np.testing.assert_allclose(found, wanted, atol=1e-3)


def test_small_rows_are_copied_by_the_host(tmp_path: Path) -> None:
    """Enqueueing a copy costs more than they do."""
    yard = Yard(tmp_path, min_row_bytes=NBYTES + 1)

    staged = staged_of(yard.stage(yard.put((1, 2, 3))))

    assert staged.direct == ()
    assert yard.site.device.registered == {}
    np.testing.assert_allclose(yard.run(staged)[0], [(1, 2, 3)], atol=1e-3)
    yard.writer.close()


def test_an_arena_that_can_not_be_registered_is_copied_from(tmp_path: Path) -> None:
    """Asked once, said once; frames are served as before."""
    yard = Yard(tmp_path, Faults(refuses_memory="operation not supported (801)"))

    for color in ((1, 2, 3), (4, 5, 6)):
        staged = staged_of(yard.stage(yard.put(color)))
        assert staged.direct == ()
        np.testing.assert_allclose(yard.run(staged)[0], [color], atol=1e-3)
    yard.writer.close()


def test_a_slot_that_was_freed_meanwhile_is_that_row_alone(yard: Yard) -> None:
    """Its outputs are worthless, and said to be; its neighbour's are right."""
    first, second = yard.put((10, 20, 30)), yard.put((40, 50, 60))
    staged = staged_of(yard.stage(first, second))

    yard.writer.free(first)
    found, stale = yard.run(staged)

    assert stale == (0,)
    np.testing.assert_allclose(found[1], (40, 50, 60), atol=1e-3)


def test_a_stale_slot_is_an_error_of_its_frame_before_it_is_staged(yard: Yard) -> None:
    """As where the host copies."""
    ref = yard.put((1, 1, 1))
    result = yard.stage(replace(ref, generation=ref.generation + 1), yard.put((2, 2, 2)))

    assert [failure.code for failure in result.failures.values()] == [Code.STALE_SLOT]
    np.testing.assert_allclose(yard.run(staged_of(result))[0], [(2, 2, 2)], atol=1e-3)


def test_an_arena_stays_registered_until_its_last_row_is_done(yard: Yard) -> None:
    """Its producer ends with rows on their way: they are run; then it is unregistered, then unmapped."""
    device = yard.site.device
    staged = staged_of(yard.stage(yard.put((7, 8, 9))))
    yard.writer.close()
    yard.mappings.sweep()
    assert yard.mappings.count == 0
    assert len(device.registered) == 1

    found, stale = yard.run(staged)
    del staged
    yard.pins.release(ArenaReader.__new__(ArenaReader))  # any later call of the thread that stages

    np.testing.assert_allclose(found, [(7, 8, 9)], atol=1e-3)
    assert stale == ()
    assert device.registered == {}


def test_an_arena_without_rows_is_unregistered_at_once(yard: Yard) -> None:
    """When its file is gone and the mapping goes."""
    device = yard.site.device
    yard.run(staged_of(yard.stage(yard.put((7, 8, 9)))))
    assert len(device.registered) == 1

    yard.mappings.close()

    assert device.registered == {}


def test_an_arena_that_is_unregistered_too_early_is_caught(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the order is for: without the drain the copy may still be reading."""
    device = yard.site.device
    yard.site.engine.submit(staged_of(yard.stage(yard.put((7, 8, 9)))))
    monkeypatch.setattr(device, "drain", lambda: None)

    with pytest.raises(OrderError, match="unregistered while"):
        device.unregister_host(next(iter(yard.pins._arenas.values())).block)  # type: ignore[union-attr]


@pytest.mark.parametrize("spoil", ["twice", "beyond", "outside", "length"])
def test_direct_rows_that_do_not_fit_are_refused(yard: Yard, spoil: str) -> None:
    """The device checks nothing."""
    staged = staged_of(yard.stage(yard.put((1, 2, 3)), yard.put((4, 5, 6))))
    first, second = staged.direct
    direct = {
        "twice": (first, first),
        "beyond": (first, replace(second, row=2)),
        "outside": (first, replace(second, offset=second.source.nbytes)),
        "length": (first, replace(second, nbytes=second.nbytes - 1)),
    }[spoil]

    with pytest.raises(EngineMisuseError, match="can't be read"):
        yard.site.engine.submit(replace(staged, direct=direct))

    np.testing.assert_allclose(yard.run(staged)[0], [(1, 2, 3), (4, 5, 6)], atol=1e-3)


def test_a_model_without_fixed_addresses_is_staged_by_the_host(tmp_path: Path) -> None:
    """It runs from host memory: nothing may be left out there."""
    yard = Yard(tmp_path)
    yard.site.load(hr_models.built_in_nms(), classes=[SMALL])
    assert yard.site.engine.staging_pool() is None
    yard.stager = Stager(BufferPool(), Limits(), yard.mappings, yard.pins)

    staged = staged_of(yard.stage(yard.put((0, 0, 0))))

    assert staged.direct == ()
    yard.writer.close()


def test_a_frame_of_a_removed_arena_is_an_error(yard: Yard) -> None:
    """It can't be mapped any more."""
    ref = yard.put((1, 2, 3))
    yard.writer.close()

    with pytest.raises(InvalidFrameError):
        yard.mappings.reader(ref)
