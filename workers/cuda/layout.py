"""Where the tensors of a batch stand in a block: every copy of a batch is then one copy of one range.

Staging buffer, device stage and bound inputs share one layout, as do bound outputs and the two blocks behind
them; a model of three inputs costs no more copies than one of a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.workers.cuda.device import BoundTensor, Bytes

#: Tensors begin at multiples of this: what cudaMalloc gives itself, and enough for every vector load.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor: ``name`` as the engine calls it, ``bound_name`` and ``bound_shape`` as the session does.

    ``shape`` always has the rows of the bucket first; a session input without a batch axis lacks that 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bound_name: str
    bound_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def view(self, data: Bytes) -> NDArray[np.generic]:
        """Return this tensor in a block's bytes."""
        return data[self.offset : self.offset + self.nbytes].view(np.dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one block, in order, and the bytes from its beginning to the end of the last."""

    places: tuple[Place, ...]
    nbytes: int

    def bound(self, address: int) -> tuple[BoundTensor, ...]:
        """Return the tensors as they stand in a block at ``address``."""
        return tuple(
            BoundTensor(p.bound_name, p.dtype, p.bound_shape, address + p.offset) for p in self.places
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """What ``arrange`` is told of one tensor; the fields are those of Place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bound_name: str = ""
    bound_shape: tuple[int, ...] | None = None


def arrange(tensors: Sequence[Tensor]) -> Layout:
    """Place tensors one after another, each aligned."""
    places: list[Place] = []
    end = 0
    for tensor in tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        place = Place(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            offset,
            tensor.bound_name or tensor.name,
            tensor.shape if tensor.bound_shape is None else tensor.bound_shape,
        )
        places.append(place)
        end = offset + place.nbytes
    return Layout(tuple(places), end)
