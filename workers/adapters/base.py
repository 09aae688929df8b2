"""What all adapters share: one frame at a time, so that a frame that fails hurts no other.

Not here: what any adapter computes. User code and bad numbers end here as codes: ``non_finite`` for outputs
with NaN or infinity, ``post_process_failed`` for everything that an adapter raises.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from headrace.errors import Code, LocalError
from headrace.protocol.messages import Buffer, FrameResult, Status, TensorSpec, Value
from headrace.workers.adapters.values import to_value
from headrace.workers.geometry import Placement

Array: TypeAlias = NDArray[np.generic]
#: Output name to an array: [count, ...] for a batch, [...] for one row.
Outputs: TypeAlias = dict[str, Array]

#: Kinds of numpy dtype that the wire carries: bool, signed, unsigned, float.
_WIRE_KINDS = "biuf"

#: numpy's marks of dtypes whose bytes are the wire's already; "=" is native order, "|" has none.
_LITTLE_ENDIAN = "<|=" if sys.byteorder == "little" else "<|"

_log = structlog.get_logger(__name__)


class AdapterError(LocalError):
    """The outputs of a frame can't be turned into a result. Its text is ours and goes to the client."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """What an adapter makes of one frame. ``outputs`` may hold numpy scalars and arrays; they are converted.
    ``tensors`` are sent as they are, one payload part each."""

    outputs: object = None
    tensors: tuple[tuple[str, Array], ...] = ()


class Adapter(ABC):
    """One way to read a model's outputs. Stateless between frames: any thread may use one, one at a time."""

    name = ""

    def process(self, outputs: Outputs, placements: Sequence[Placement | None]) -> list[FrameResult]:
        """Return one result per frame.

        ``outputs`` arrays have a row for each entry of ``placements``, which is None for frames of models
        without an image input. Never raises for what a row holds or an adapter does.
        """
        # One look at the whole batch is far cheaper than one a frame, and nearly always the last.
        is_finite = non_finite_output(outputs) is None
        return [
            self._process_one({name: array[i, ...] for name, array in outputs.items()}, placement, is_finite)
            for i, placement in enumerate(placements)
        ]

    @abstractmethod
    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Return the result of one frame. Raises AdapterError when the outputs are not what it reads."""

    def _process_one(self, row: Outputs, placement: Placement | None, is_finite: bool) -> FrameResult:
        bad_name = None if is_finite else non_finite_output(row)
        if bad_name is not None:
            return non_finite_result(bad_name)
        try:
            return to_frame_result(self.process_row(row, placement))
        except Exception as error:  # noqa: BLE001 - an adapter may be user code: whatever it raises is a code
            return self._failure(error)

    def _failure(self, error: Exception) -> FrameResult:
        if isinstance(error, AdapterError):
            message = f"adapter {self.name}: {error}"
        else:
            # The error's own text may hold anything of the user's code; it stays in the worker's log.
            message = f"adapter {self.name} failed: {type(error).__name__}"
            _log.warning("adapter failed", adapter=self.name, exc_info=error)
        return FrameResult(Status.ERROR, Code.POST_PROCESS_FAILED, message)


def to_frame_result(result: RowResult) -> FrameResult:
    """Convert an adapter's result to what the wire carries.

    Raises AdapterError or ValueConversionError (an AdapterError's text either way) for what it can't carry.
    """
    specs: list[TensorSpec] = []
    payloads: list[Buffer] = []
    for name, array in result.tensors:
        if array.dtype.kind not in _WIRE_KINDS or array.dtype.itemsize > 8:
            raise AdapterError(f"output {name} has dtype {array.dtype}, which can't be sent")
        if array.dtype.byteorder not in _LITTLE_ENDIAN:
            array = array.astype(array.dtype.newbyteorder("<"))  # noqa: PLW2901 - the same numbers
        specs.append(TensorSpec(name, array.dtype.name, array.shape))
        payloads.append(array.tobytes())
    try:
        outputs: Value = to_value(result.outputs)
    except ValueError as error:
        raise AdapterError(str(error)) from error
    return FrameResult(Status.OK, outputs=outputs, tensors=tuple(specs), payloads=tuple(payloads))


def is_plain(array: Array) -> bool:
    """Tell whether a batch of an output can be sent as it stands: rows of numbers of a wire dtype, each of at
    least one byte."""
    dtype = array.dtype
    return (
        array.ndim > 0
        and array.size > 0
        and dtype.kind in _WIRE_KINDS
        and dtype.itemsize <= 8
        and dtype.byteorder in _LITTLE_ENDIAN
    )


def non_finite_output(row: Outputs) -> str | None:
    """Return the name of an output that holds NaN or infinity, None when all numbers are finite."""
    for name, array in row.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return name
    return None


def non_finite_result(name: str) -> FrameResult:
    """Return the error of a frame whose output ``name`` is not finite."""
    return FrameResult(
        Status.ERROR, Code.NON_FINITE, f"output {name} of this frame holds values that are not finite"
    )


def pick_output(row: Outputs, name: str) -> Array:
    """Return the output called ``name``, or the first one for "". Raises AdapterError if it is not there."""
    if not row:
        raise AdapterError("the model gave no outputs")
    if not name:
        return next(iter(row.values()))
    if name not in row:
        raise AdapterError(f"the model has no output {name}: it has {', '.join(row)}")
    return row[name]
