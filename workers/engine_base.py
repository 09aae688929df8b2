"""What every engine does the same way: owner thread, buckets, checks of a staged batch, first in first out.

Not here: running anything. An engine derives from EngineBase and hands finished (or due) batches to
``_finished``; ``collect`` takes them out in that order.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from headrace.errors import ClosedError
from headrace.protocol.messages import SizeClassSpec
from headrace.workers.engine import EngineMisuseError, InputPlan, ModelKey, StagedBatch

if TYPE_CHECKING:
    from headrace.workers.staging import BufferPool


@dataclass(slots=True)
class ServedClass:
    """One size class of a loaded model. ``buckets`` is empty until the model is profiled, then ascending.

    ``size_class.max_batch_size`` is what the model can really do from then on. ``portion``: how many rows of
    a batch are run at once, where that may be fewer than all (0: all)."""

    size_class: SizeClassSpec
    plans: tuple[InputPlan, ...]
    buckets: tuple[int, ...] = field(default=())
    portion: int = 0


class _LoadedModel(Protocol):
    classes: dict[str, ServedClass]


Loaded = TypeVar("Loaded", bound=_LoadedModel)
Item = TypeVar("Item")


class EngineBase(Generic[Loaded, Item]):
    """Owner check, plans and buckets, and the queue between ``submit`` and ``collect``.

    Invariants: the first thread that calls a method owns the engine; batches leave in the order in which
    they came; after ``close`` nothing is accepted, what was submitted can still be collected.
    """

    name = ""
    device = ""
    loads_beside = True

    def __init__(self) -> None:
        self._models: dict[ModelKey, Loaded] = {}
        self._owner: int | None = None
        self._is_closed = False
        # Bounded by the worker's slots: it submits no batch for which it holds none.
        self._finished: queue.SimpleQueue[Item | None] = queue.SimpleQueue()

    def plan(self, model: ModelKey, size_class: str) -> tuple[InputPlan, ...]:
        """Return how each input of one row is staged for a size class."""
        return self._served(model, size_class).plans

    def bucket_for(self, model: ModelKey, size_class: str, count: int) -> int:
        """Return the smallest bucket that holds ``count`` rows.

        Raises EngineMisuseError when none does, or before the model was profiled."""
        buckets = self._served(model, size_class).buckets
        for bucket in buckets:
            if bucket >= count > 0:
                return bucket
        raise EngineMisuseError(
            f"{model.name}:{model.version} {size_class}: {count} rows fit no bucket of {buckets}"
        )

    def staging_pool(self) -> BufferPool | None:
        """Return None: any memory does."""
        return None

    def has_result(self) -> bool:
        """See Engine. An engine that can tell says more."""
        return False

    def unload(self, model: ModelKey) -> None:
        """Release one model; nothing of it is running. Idempotent."""
        self._check_owner("unload")
        self._models.pop(model, None)

    def hand_over(self) -> None:
        """Let the thread that calls next own the engine. The owner calls it, and nothing after it."""
        self._check_owner("hand_over")
        self._owner = None

    def close(self) -> None:
        """Release the models; a waiting ``collect`` ends. Idempotent, and allowed from any thread."""
        if not self._is_closed:
            self._is_closed = True
            self._models.clear()
            self._finished.put(None)

    def _next(self) -> Item:
        item = self._finished.get()
        if item is None:
            self._finished.put(None)  # for the next call
            raise ClosedError(f"engine {self.name} is closed")
        return item

    def _check_owner(self, call: str) -> None:
        thread = threading.get_ident()
        if self._is_closed:
            raise ClosedError(f"engine {self.name} is closed: {call}")
        if self._owner is None:
            self._owner = thread
        elif self._owner != thread:
            raise EngineMisuseError(
                f"engine {self.name}: {call} from thread {thread}, the engine is owned by {self._owner}"
            )

    def _loaded(self, model: ModelKey) -> Loaded:
        loaded = self._models.get(model)
        if loaded is None:
            raise EngineMisuseError(f"engine {self.name}: model {model.name}:{model.version} is not loaded")
        return loaded

    def _served(self, model: ModelKey, size_class: str) -> ServedClass:
        served = self._loaded(model).classes.get(size_class)
        if served is None:
            raise EngineMisuseError(f"model {model.name}:{model.version} has no size class {size_class}")
        return served

    def _check_batch(self, batch: StagedBatch) -> ServedClass:
        """Raise EngineMisuseError unless the batch stands as its plan says. A device may check nothing."""
        served = self._served(batch.model, batch.size_class)
        where = f"batch {batch.batch} of {batch.model.name}:{batch.model.version} {batch.size_class}"
        if batch.bucket not in served.buckets or not 0 < batch.count <= batch.bucket:
            raise EngineMisuseError(
                f"{where}: {batch.count} rows in bucket {batch.bucket} of {served.buckets}"
            )
        buffers = {buffer.name: buffer.array for buffer in batch.inputs}
        if len(buffers) != len(batch.inputs) or set(buffers) != {plan.name for plan in served.plans}:
            raise EngineMisuseError(f"{where}: inputs {[buffer.name for buffer in batch.inputs]}")
        for plan in served.plans:
            array = buffers[plan.name]
            expected = (batch.bucket, *plan.shape)
            is_fitting = len(array.shape) == len(expected) and all(
                wanted in (-1, found) for wanted, found in zip(expected, array.shape, strict=True)
            )
            if not is_fitting or array.dtype.name != plan.dtype or not array.flags.c_contiguous:
                raise EngineMisuseError(
                    f"{where}: input {plan.name} is {array.dtype} {list(array.shape)}, expected C-contiguous"
                    f" {plan.dtype} {list(expected)}"
                )
        return served
