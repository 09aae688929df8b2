"""Writes the frames of a batch straight into the buffers that the engine reads.

One copy per raw frame: from the message part or the producer's shared memory into its row, converted on the
way (``pixels`` has the rules for images). A frame that has the size, channels and colour order of its row is
copied as bytes, with nothing else looked at. Encoded frames are decoded first and then placed like raw ones.
Rows behind the last frame are zeroed, so that no pixel of an earlier batch is left in a buffer that is used
again.

A tensor is cast to the model's dtype when numpy calls the cast safe, or from a float to a narrower
float. Anything else is ``wrong_dtype``.

A frame that can't be staged gets its own error and gives its row to the next one: its neighbours run.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from headrace.arena import ArenaReader
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import (
    Batch,
    Color,
    Encoding,
    Frame,
    FrameResult,
    ImageInput,
    Limits,
    ModelSpec,
    Payload,
    ShmRef,
    SizeClassSpec,
    Status,
    TensorSpec,
)
from headrace.protocol.per_frame import per_frame
from headrace.workers.arenas import ArenaMappings
from headrace.workers.decode import decode_image
from headrace.workers.engine import DirectRow, InputBuffer, InputPlan, ModelKey, StagedBatch
from headrace.workers.geometry import Placement, place
from headrace.workers.pixels import Pixels, place_image

#: Buffers kept for reuse while no batch uses them. Twice 8 frames of 720p in two slots is 44 MB.
DEFAULT_MAX_IDLE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """How batches of one (model, size class) are staged. ``buckets`` are ascending and not empty."""

    model: ModelKey
    spec: ModelSpec
    size_class: SizeClassSpec
    inputs: tuple[InputPlan, ...]
    buckets: tuple[int, ...]

    def bucket_for(self, count: int) -> int | None:
        """Return the smallest bucket that holds ``count`` rows, None when there is none."""
        return next((bucket for bucket in self.buckets if bucket >= count), None)


@per_frame(frozen=True, slots=True)
class StagedRow:
    """One row that stands in the buffers: which frame of the batch it is, and how it was placed
    (None for a frame without an image input)."""

    index: int
    placement: Placement | None
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StagingResult:
    """``batch`` is None when no frame could be staged. Rows and failures together name each frame once.
    ``is_pooled`` tells that the buffers go back to the pool when nothing reads them any more."""

    batch: StagedBatch | None
    rows: tuple[StagedRow, ...]
    failures: dict[int, FrameResult]
    is_pooled: bool = True


class BufferPool:
    """Buffers of finished batches, kept for the next batch of the same class and bucket.

    Thread-safe: staging takes, completion gives back. Invariant: the idle buffers together hold at most
    ``max_idle_bytes``; what would exceed it is left to the garbage collector. A buffer is handed out
    dirty: whoever writes a row writes all of it.
    """

    def __init__(self, max_idle_bytes: int = DEFAULT_MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: dict[tuple[ModelKey, str, int], list[tuple[InputBuffer, ...]]] = {}
        self.idle_bytes = 0

    def take(self, plan: StagingPlan, bucket: int) -> tuple[InputBuffer, ...]:
        """Return one buffer per input of ``plan``, [bucket, ...], contents undefined."""
        with self._lock:
            idle = self._idle.get((plan.model, plan.size_class.name, bucket))
            if idle:
                buffers = idle.pop()
                self.idle_bytes -= _nbytes(buffers)
                return buffers
        return tuple(
            InputBuffer(each.name, np.empty((bucket, *each.shape), dtype=np.dtype(each.dtype)))
            for each in plan.inputs
        )

    def takes_direct_rows(self, plan: StagingPlan, bucket: int) -> bool:
        """Tell whether the engine reads rows of this bucket from arenas by itself."""
        return False

    def give_back(self, batch: StagedBatch) -> None:
        """Take the buffers of a batch that nothing reads any more."""
        nbytes = _nbytes(batch.inputs)
        with self._lock:
            if self.idle_bytes + nbytes > self._max_idle_bytes:
                return
            self.idle_bytes += nbytes
            self._idle.setdefault((batch.model, batch.size_class, batch.bucket), []).append(batch.inputs)

    def clear(self) -> None:
        """Forget all idle buffers (other models were loaded)."""
        with self._lock:
            self._idle.clear()
            self.idle_bytes = 0


class Pins(Protocol):
    """Arenas that a device can read by itself."""

    def row(self, row: int, reader: ArenaReader, ref: ShmRef) -> DirectRow | None:
        """Return a payload as a row for the device, None when it must be copied.

        Raises InvalidFrameError ``stale_slot``."""
        ...


class Stager:
    """Stages batches one after another; owned by one thread."""

    def __init__(
        self,
        pool: BufferPool,
        limits: Limits,
        arenas: ArenaMappings | None = None,
        pins: Pins | None = None,
    ) -> None:
        self._pool = pool
        self._arenas = arenas or ArenaMappings(None)
        self._pins = pins
        self.limits = limits

    def use_pool(self, pool: BufferPool) -> None:
        """Take buffers from another pool (other models were loaded); no batch may be inside."""
        self._pool = pool

    def stage(self, batch: Batch, plan: StagingPlan) -> StagingResult:
        """Write every frame of ``batch`` into a buffer of its bucket.

        Raises InvalidFrameError ``batch_failed`` when no bucket holds the batch; per-frame faults are
        in the result.
        """
        bucket = plan.bucket_for(len(batch.frames))
        if bucket is None:
            raise InvalidFrameError(
                Code.BATCH_FAILED,
                f"batch of {len(batch.frames)} is above this worker's largest of {plan.buckets[-1]}"
                f" for {batch.model} {batch.size_class}",
            )
        self._arenas.begin_batch()
        plan, is_dynamic = _with_fixed_shapes(plan, batch)
        buffers = _new_buffers(plan, bucket) if is_dynamic else self._pool.take(plan, bucket)
        rows: list[StagedRow] = []
        failures: dict[int, FrameResult] = {}
        plain = _PlainRows.of(plan, buffers)
        pins = self._pins if not is_dynamic and self._pool.takes_direct_rows(plan, bucket) else None
        direct: list[DirectRow] = []
        for index, frame in enumerate(batch.frames):
            try:
                if plain is not None and plain.takes(frame):
                    left = self._leave_to_device(frame, pins, len(rows))
                    if left is not None:
                        direct.append(left)
                    else:
                        self._copy_plain(frame, plain, len(rows))
                    rows.append(StagedRow(index, plain.placement, ()))
                    continue
                placement, flags = self._stage_frame(frame, plan, buffers, len(rows))
            except InvalidFrameError as error:
                failures[index] = FrameResult(Status.ERROR, code=error.code, message=error.message)
            except cv2.error:
                failures[index] = FrameResult(
                    Status.ERROR, code=Code.BAD_IMAGE, message="the image can't be scaled or converted"
                )
            else:
                rows.append(StagedRow(index, placement, flags))
        staged = StagedBatch(
            batch.batch, plan.model, plan.size_class.name, len(rows), bucket, buffers, tuple(direct)
        )
        for buffer in buffers:
            buffer.array[len(rows) :] = 0
        if rows:
            return StagingResult(staged, tuple(rows), failures, is_pooled=not is_dynamic)
        if not is_dynamic:
            self._pool.give_back(staged)
        return StagingResult(None, (), failures)

    def _leave_to_device(self, frame: Frame, pins: Pins | None, row: int) -> DirectRow | None:
        payload = frame.payload
        if pins is None or not isinstance(payload, ShmRef):
            return None
        return pins.row(row, self._arenas.reader(payload), payload)

    def _copy_plain(self, frame: Frame, plain: _PlainRows, row: int) -> None:
        payload = frame.payload
        if not isinstance(payload, ShmRef):
            plain.flat[row] = np.frombuffer(payload, np.uint8)
            return
        reader = self._arenas.reader(payload)
        plain.flat[row] = np.frombuffer(reader.view(payload), np.uint8)
        # The slot may have been freed and filled anew while the row was written: then the row is worthless.
        reader.check(payload)

    def _stage_frame(
        self, frame: Frame, plan: StagingPlan, buffers: tuple[InputBuffer, ...], row: int
    ) -> tuple[Placement | None, tuple[str, ...]]:
        payload = frame.payload
        if not isinstance(payload, ShmRef):
            return self._stage_row(frame, memoryview(payload).cast("B"), plan, buffers, row)
        reader = self._arenas.reader(payload)
        if frame.encoding is not Encoding.RAW:
            # A decoder reads a file more than once and trusts what it read first: it gets a copy, which is
            # small beside what it does with it.
            return self._stage_row(frame, memoryview(reader.copy(payload)), plan, buffers, row)
        staged = self._stage_row(frame, reader.view(payload), plan, buffers, row)
        # The slot may have been freed and filled anew while the row was written: then the row is worthless.
        reader.check(payload)
        return staged

    def _stage_row(
        self,
        frame: Frame,
        data: memoryview,
        plan: StagingPlan,
        buffers: tuple[InputBuffer, ...],
        row: int,
    ) -> tuple[Placement | None, tuple[str, ...]]:
        placement: Placement | None = None
        flags: tuple[str, ...] = ()
        if frame.encoding is not Encoding.RAW:
            _check_single_image(plan)
            decoded = decode_image(frame, data, self.limits)
            placement = place_image(
                decoded.pixels, Color.BGR, plan.spec, plan.size_class, cast("Pixels", buffers[0].array[row])
            )
            return placement, decoded.flags
        arrays = _arrays(frame, data, plan)
        for each, buffer, array in zip(plan.inputs, buffers, arrays, strict=True):
            if each.is_image:
                placement = place_image(array, frame.color, plan.spec, plan.size_class, buffer.array[row])
            else:
                _cast_into(each, array, buffer.array[row])
        return placement, flags


class _PlainRows:
    """The rows of a buffer of images, as bytes, and what a frame must be like to be copied into one as it is.

    ``flat`` is uint8 [bucket, height x width x channels]."""

    def __init__(self, row_shape: tuple[int, ...], color: Color, plan: StagingPlan, flat: Pixels) -> None:
        height, width, channels = row_shape
        self.flat = flat
        # Gray pixels are gray in any order, and may leave out their one channel.
        self._shapes = {row_shape, (height, width)} if channels == 1 else {row_shape}
        self._colors = frozenset(Color) if channels == 1 else frozenset({color})
        self._nbytes = height * width * channels
        self.placement = place(row_shape, plan.size_class, plan.spec.oversize)

    @classmethod
    def of(cls, plan: StagingPlan, buffers: tuple[InputBuffer, ...]) -> _PlainRows | None:
        """Return the rows of a model whose one input is an image; None for all others."""
        if len(plan.inputs) != 1 or not plan.inputs[0].is_image:
            return None
        array = cast("Pixels", buffers[0].array)
        shape, size_class = array.shape[1:], plan.size_class
        if array.dtype != np.uint8 or shape[:2] != (size_class.height, size_class.width):
            return None
        color = (plan.spec.image or ImageInput()).color
        return cls(shape, color, plan, array.reshape(len(array), -1))

    def takes(self, frame: Frame) -> bool:
        """Tell whether a frame is a row of bytes already."""
        payload = frame.payload
        return (
            frame.shape in self._shapes
            and frame.color in self._colors
            and frame.dtype == "uint8"
            and frame.encoding is Encoding.RAW
            and not frame.inputs
            and _payload_bytes(payload) == self._nbytes
        )


def _payload_bytes(payload: Payload) -> int:
    return len(payload) if isinstance(payload, (bytes, bytearray)) else payload.nbytes


# -- reading a payload --------------------------------------------------------------------------------


def _arrays(frame: Frame, data: memoryview, plan: StagingPlan) -> list[NDArray[np.generic]]:
    """Return the frame's tensors in the order of the plan's inputs, as views of the payload."""
    if not frame.inputs:
        if len(plan.inputs) != 1:
            raise _wrong_inputs(plan, f"a frame of one tensor for a model of {len(plan.inputs)} inputs")
        return [_array(data, frame.dtype, frame.shape, plan.inputs[0].name)]
    given = {each.name: each for each in frame.inputs}
    expected = [each.name for each in plan.inputs]
    if len(given) != len(frame.inputs) or set(given) != set(expected):
        raise _wrong_inputs(plan, f"got {', '.join(each.name for each in frame.inputs)}")
    found: dict[str, NDArray[np.generic]] = {}
    offset = 0
    for each in frame.inputs:
        end = offset + _nbytes_of(each)
        found[each.name] = _array(data[offset:end], each.dtype, each.shape, each.name)
        offset = end
    if offset != len(data):
        raise InvalidFrameError(
            Code.SIZE_MISMATCH, f"inputs take {offset} bytes, the payload has {len(data)}"
        )
    return [found[name] for name in expected]


def _nbytes_of(tensor: TensorSpec) -> int:
    count = 1
    for axis in tensor.shape:
        count *= axis
    return count * _dtype(tensor.dtype).itemsize


def _dtype(name: str) -> np.dtype[np.generic]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise InvalidFrameError(Code.BAD_DTYPE, f"dtype {name!r} is not a numpy dtype") from None
    if dtype.kind not in "uif":
        raise InvalidFrameError(Code.BAD_DTYPE, f"dtype {name!r} is not a number")
    return dtype.newbyteorder("<")


def _array(data: memoryview, dtype: str, shape: tuple[int, ...], name: str) -> NDArray[np.generic]:
    """View ``data`` as an array. Its start may be at any offset of a message: numpy copes (PAY-12)."""
    wanted = _nbytes_of(TensorSpec(name, dtype, shape))
    if wanted != len(data):
        raise InvalidFrameError(
            Code.SIZE_MISMATCH, f"{name}: {dtype} {shape} takes {wanted} bytes, the payload has {len(data)}"
        )
    return np.frombuffer(data, dtype=_dtype(dtype)).reshape(shape)


def _wrong_inputs(plan: StagingPlan, found: str) -> InvalidFrameError:
    expected = ", ".join(f"{each.name}: {each.dtype} {list(each.shape)}" for each in plan.inputs)
    return InvalidFrameError(Code.WRONG_INPUTS, f"{found}; model {plan.model.name} takes {expected}")


def _check_single_image(plan: StagingPlan) -> None:
    if len(plan.inputs) != 1 or not plan.inputs[0].is_image:
        raise _wrong_inputs(plan, "an encoded image")


# -- plain tensors ------------------------------------------------------------------------------------


def _cast_into(plan: InputPlan, array: NDArray[np.generic], row: NDArray[np.generic]) -> None:
    if array.shape != row.shape:
        raise InvalidFrameError(
            Code.WRONG_SHAPE, f"{plan.name} takes shape {list(plan.shape)}, the frame has {list(array.shape)}"
        )
    if not is_castable(array.dtype, row.dtype):
        raise InvalidFrameError(
            Code.WRONG_DTYPE,
            f"{plan.name} takes {plan.dtype}, {array.dtype} can't be cast to it without loss",
        )
    with np.errstate(over="ignore"):
        np.copyto(row, array, casting="same_kind")


def is_castable(source: np.dtype[np.generic], target: np.dtype[np.generic]) -> bool:
    """Tell whether a tensor is cast: every value kept, or a float to a narrower float."""
    return bool(np.can_cast(source, target, "safe")) or (source.kind == "f" and target.kind == "f")


def _with_fixed_shapes(plan: StagingPlan, batch: Batch) -> tuple[StagingPlan, bool]:
    """Replace dynamic axes (-1) of the plan by those of the batch's first frame; tell whether it did."""
    if all(-1 not in each.shape for each in plan.inputs):
        return plan, False
    first = batch.frames[0]
    shapes = {each.name: each.shape for each in first.inputs} or {plan.inputs[0].name: first.shape}
    inputs = tuple(
        InputPlan(each.name, each.dtype, _fixed(each.shape, shapes.get(each.name, ())), each.is_image)
        for each in plan.inputs
    )
    return StagingPlan(plan.model, plan.spec, plan.size_class, inputs, plan.buckets), True


def _fixed(planned: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    if len(planned) != len(given):
        return tuple(max(axis, 1) for axis in planned)
    return tuple(own if axis == -1 else axis for axis, own in zip(planned, given, strict=True))


def _new_buffers(plan: StagingPlan, bucket: int) -> tuple[InputBuffer, ...]:
    return BufferPool(0).take(plan, bucket)


def _nbytes(buffers: tuple[InputBuffer, ...]) -> int:
    return sum(buffer.array.nbytes for buffer in buffers)
