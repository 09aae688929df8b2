"""Pinned memory that frames are staged into, so that the device reads it without another copy by the host.

Sized at the start from the largest bucket, one block per batch that the worker may hold: pinning while frames
wait would stop the device. A batch that finds no block free is staged in plain memory and copied once more.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np

from headrace.workers.cuda.device import HostBlock
from headrace.workers.cuda.layout import Layout
from headrace.workers.engine import InputBuffer, ModelKey, StagedBatch
from headrace.workers.staging import BufferPool, StagingPlan

#: What a bucket is found by: model, size class, rows.
BucketKey: TypeAlias = tuple[ModelKey, str, int]


class StagingBlocks(BufferPool):
    """A pool whose buffers are views of pinned blocks; see the module. Thread-safe as its base.

    Invariant: a block is lent to one batch at a time, from ``take`` to ``give_back``.
    """

    def __init__(self, blocks: list[HostBlock], layouts: dict[BucketKey, Layout]) -> None:
        super().__init__()
        self._blocks = {block.address: block for block in blocks}
        self._free = list(blocks)
        self._lent: dict[int, HostBlock] = {}
        self._layouts = layouts
        self._blocks_lock = threading.Lock()
        self.unpinned_count = 0

    def take(self, plan: StagingPlan, bucket: int) -> tuple[InputBuffer, ...]:
        """Return one buffer per input, [bucket, ...], contents undefined; pinned when a block is free."""
        layout = self._layouts.get((plan.model, plan.size_class.name, bucket))
        if layout is None:
            return super().take(plan, bucket)
        with self._blocks_lock:
            if not self._free:
                self.unpinned_count += 1
            else:
                block = self._free.pop()
                self._lent[block.address] = block
                data = block.for_writing()
                return tuple(InputBuffer(place.name, place.view(data)) for place in layout.places)
        return super().take(plan, bucket)

    def takes_direct_rows(self, plan: StagingPlan, bucket: int) -> bool:
        """Tell whether rows of this bucket may be left to the device: it has a fixed address."""
        return (plan.model, plan.size_class.name, bucket) in self._layouts

    def give_back(self, batch: StagedBatch) -> None:
        """Take the buffers of a batch that nothing reads any more."""
        with self._blocks_lock:
            block = self._lent.pop(_address(batch), None)
            if block is not None:
                self._free.append(block)
        if block is None:
            super().give_back(batch)

    def block_of(self, batch: StagedBatch) -> HostBlock | None:
        """Return the block that a batch is staged in, None for plain memory."""
        with self._blocks_lock:
            return self._lent.get(_address(batch))

    def clear(self) -> None:
        """Forget idle plain buffers; the blocks stay."""
        super().clear()


def _address(batch: StagedBatch) -> int:
    """Return where the first input of a batch stands: the beginning of its block, if it is in one."""
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = batch.inputs[0].array
    return int(array.ctypes.data)
