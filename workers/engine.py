"""The Engine seam: what a worker asks of whatever runs its models.

An engine is owned by one thread, the device thread: every method is called from it alone, except
``collect``, which the completion thread may call as well. Engines: ``cpu`` (ONNX Runtime), ``emulated`` (a
latency model that sleeps), and later ``cuda``; one contract suite
(tests/unit/workers/test_engine_contract.py) holds for all of them.

Theory of operation: ``load`` -> ``profile`` (warms up and measures every bucket) -> any number of
``submit``/``collect`` pairs, first in first out -> ``close``. The staging buffer of a batch belongs to the
engine from ``submit`` until its ``collect`` returns, so that a device may read it without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import LocalError
from headrace.protocol.messages import ModelProfile, ModelSpec

if TYPE_CHECKING:
    from headrace.workers.staging import BufferPool


class EngineMisuseError(LocalError):
    """The worker broke a rule of the seam (thread, model, shape, dtype); the engine itself is unharmed."""


@dataclass(frozen=True, slots=True)
class ModelKey:
    """What a model is called in an engine."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class InputBuffer:
    """One staged model input: ``array`` is [bucket, ...], C-contiguous; rows past ``count`` are padding."""

    name: str
    array: NDArray[np.generic]


class DirectSource(Protocol):
    """Memory that a device reads by itself."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DirectRow:
    """A row that the device reads where its producer wrote it, ``nbytes`` from ``offset``: in the staging
    buffer nothing stands there. ``is_valid`` tells afterwards whether it still was that frame's."""

    row: int
    source: DirectSource
    offset: int
    nbytes: int
    is_valid: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch that stands in its staging buffers. ``count`` real rows, ``bucket`` >= count rows in all."""

    batch: int
    model: ModelKey
    size_class: str
    count: int
    bucket: int
    inputs: tuple[InputBuffer, ...]
    direct: tuple[DirectRow, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchOutputs:
    """Outputs of one batch: name -> array whose first axis is ``count`` (padding rows already cut off).
    ``error`` is set, and ``outputs`` empty, when the run failed; ``is_fatal`` means the device itself can't
    be trusted any more and the worker must exit without publishing. ``stale_rows`` were computed from direct
    rows that were no longer their frames': their outputs are worthless."""

    batch: int
    outputs: dict[str, NDArray[np.generic]]
    ran_ns: int
    error: str = ""
    is_fatal: bool = False
    stale_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class InputPlan:
    """How one model input is to be staged: ``array`` rows have ``shape`` and ``dtype`` (native order).

    ``is_image`` marks the input that frames are placed into: shape (height, width, channels) uint8.
    An axis of -1 takes any length: such a model runs batches of one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_image: bool


class Engine(Protocol):
    """See the module. Errors: ModelError for a model that can't be served, DeviceError for the device."""

    name: str
    device: str
    #: Another engine can be made and fill itself in another thread while this one serves.
    loads_beside: bool

    def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
        """Load one model. ``files`` maps ModelFile.path to a verified local path.

        Raises ModelError naming what was found and what is supported."""
        ...

    def profile(self, model: ModelKey) -> ModelProfile:
        """Self-test and warm the model, measure every bucket of every size class.

        Self-tests: two different inputs give two different outputs; the rows of a batch equal single
        runs. Raises ModelError when one fails."""
        ...

    def plan(self, model: ModelKey, size_class: str) -> tuple[InputPlan, ...]:
        """Return how each input of one row is staged for a size class."""
        ...

    def bucket_for(self, model: ModelKey, size_class: str, count: int) -> int:
        """Return the smallest bucket that holds ``count`` rows."""
        ...

    def staging_pool(self) -> BufferPool | None:
        """Return the pool that batches should be staged in, None where any memory does.

        Asked once all models are profiled; a batch staged elsewhere is taken too."""
        ...

    def submit(self, batch: StagedBatch) -> None:
        """Start running a staged batch; returns before or after it is done, as the device has it.

        Raises EngineMisuseError for another thread, an unknown model, or buffers that break the plan. A
        run that fails is no exception here: its ``BatchOutputs.error`` says so."""
        ...

    def collect(self) -> BatchOutputs:
        """Return the oldest submitted batch that was not collected yet, waiting for it.

        Raises ClosedError once the engine is closed and nothing is left to collect."""
        ...

    def has_result(self) -> bool:
        """Tell whether ``collect`` would return at once when only one batch is to be collected.

        False is always right: the batch is then collected by another thread, which costs a hand-over."""
        ...

    def unload(self, model: ModelKey) -> None:
        """Release one model; nothing of it is running. Idempotent."""
        ...

    def hand_over(self) -> None:
        """Let the thread that calls next own the engine."""
        ...

    def close(self) -> None:
        """Release the device; a waiting ``collect`` ends. Idempotent, and allowed from any thread."""
        ...
