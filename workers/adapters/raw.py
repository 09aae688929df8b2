"""The ``tensors`` adapter: a model's outputs as they are, one payload part each."""

from __future__ import annotations

from headrace.workers.adapters.base import Adapter, Outputs, RowResult, pick_output
from headrace.workers.adapters.options import Options
from headrace.workers.geometry import Placement


class TensorsAdapter(Adapter):
    """Options: ``outputs`` (names to send, in that order; all by default)."""

    name = "tensors"

    def __init__(self, options: Options) -> None:
        self._names = options.texts("outputs")
        options.finish()

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Return the tensors of one frame. Raises AdapterError for a name the model does not have."""
        names = self._names or tuple(row)
        return RowResult(tensors=tuple((name, pick_output(row, name)) for name in names))
