"""The ``tensors`` adapter: a model's outputs as they are, one payload part each.

The rows of a batch are alike, so what describes them is made once, and each output is copied as a whole and
cut up. Whatever is not as plain as that goes row by row, as in every adapter, and gets its error there.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.messages import Buffer, FrameResult, Status, TensorSpec
from headrace.workers.adapters.base import (
    Adapter,
    Array,
    Outputs,
    RowResult,
    is_plain,
    non_finite_output,
    pick_output,
)
from headrace.workers.adapters.options import Options
from headrace.workers.geometry import Placement


class TensorsAdapter(Adapter):
    """Options: ``outputs`` (names to send, in that order; all by default)."""

    name = "tensors"

    def __init__(self, options: Options) -> None:
        self._names = options.texts("outputs")
        options.finish()

    def process(self, outputs: Outputs, placements: Sequence[Placement | None]) -> list[FrameResult]:
        """Return one result per frame; see Adapter."""
        count = len(placements)
        names = self._names or tuple(outputs)
        arrays = [outputs[name] for name in names if name in outputs]
        if (
            not arrays
            or len(arrays) < len(names)
            or non_finite_output(outputs) is not None
            or not all(is_plain(array) and len(array) == count for array in arrays)
        ):
            return super().process(outputs, placements)
        specs = tuple(
            TensorSpec(name, array.dtype.name, array.shape[1:])
            for name, array in zip(names, arrays, strict=True)
        )
        columns = [_rows_of(array) for array in arrays]
        return [FrameResult(Status.OK, tensors=specs, payloads=row) for row in zip(*columns, strict=True)]

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Return the tensors of one frame. Raises AdapterError for a name the model does not have."""
        names = self._names or tuple(row)
        return RowResult(tensors=tuple((name, pick_output(row, name)) for name in names))


def _rows_of(array: Array) -> list[Buffer]:
    """Copy an output once; return the bytes of each of its rows."""
    data = memoryview(array.tobytes())
    nbytes = len(data) // len(array)
    return [data[start : start + nbytes] for start in range(0, len(data), nbytes)]
