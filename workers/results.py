"""Puts together the Done of a batch: one result per frame, in its order, small enough to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import Code
from headrace.protocol import codec
from headrace.protocol.messages import Done, FrameResult, Limits, Status
from headrace.protocol.wire import part_bytes
from headrace.workers.staging import StagedRow

#: Left free in header and message for what surrounds the results.
_SPARE_BYTES = 4096

#: What a result, a tensor of up to 8 axes and a character of text take in a header at most.
_RESULT_BYTES, _TENSOR_BYTES, _CHARACTER_BYTES = 128, 160, 4


def in_batch_order(
    frame_count: int,
    rows: Sequence[StagedRow],
    row_results: Sequence[FrameResult],
    failures: dict[int, FrameResult],
) -> tuple[FrameResult, ...]:
    """Return one result per frame: those of the staged rows with their flags, and the failures of staging.

    A frame that has neither, which is a bug of ours, gets ``result_count``: nothing is matched up by luck.
    """
    if not failures and len(rows) == len(row_results) == frame_count and not any(row.flags for row in rows):
        return tuple(row_results)  # rows stand in the order of their frames
    results = dict(failures)
    for row, result in zip(rows, row_results, strict=True):
        is_flagged = bool(row.flags) and result.status is Status.OK
        results[row.index] = replace(result, flags=result.flags + row.flags) if is_flagged else result
    missing = FrameResult(Status.ERROR, Code.RESULT_COUNT, "the worker has no result for this frame")
    return tuple(results.get(index, missing) for index in range(frame_count))


def fitted(done: Done, limits: Limits) -> Done:
    """Return ``done``, or if it is above the message limits one in which the results that no longer fit,
    counted in the order of the batch, are errors ``message_too_large``."""
    header_bytes, message_bytes = _largest_size(done) or _size(done)
    if header_bytes <= limits.max_header_bytes and message_bytes <= limits.max_message_bytes:
        return done
    header_bytes, message_bytes = _size(done)
    if header_bytes <= limits.max_header_bytes and message_bytes <= limits.max_message_bytes:
        return done
    left_header = limits.max_header_bytes - _SPARE_BYTES
    left_message = limits.max_message_bytes - _SPARE_BYTES
    results = []
    for result in done.results:
        header_bytes, message_bytes = _size(Done(done.batch, (result,)))
        if header_bytes > left_header or message_bytes > left_message:
            result = _too_large(message_bytes, len(done.results), limits)  # noqa: PLW2901 - it takes its place
            header_bytes, message_bytes = _size(Done(done.batch, (result,)))
        left_header -= header_bytes
        left_message -= message_bytes
        results.append(result)
    return replace(done, results=tuple(results))


def _too_large(nbytes: int, frame_count: int, limits: Limits) -> FrameResult:
    return FrameResult(
        Status.ERROR,
        Code.MESSAGE_TOO_LARGE,
        f"this result of {nbytes} bytes does not fit into one message beside the others of its batch of"
        f" {frame_count}: the limits are {limits.max_header_bytes} bytes of values and"
        f" {limits.max_message_bytes} bytes in all",
    )


def _largest_size(done: Done) -> tuple[int, int] | None:
    """Return what the header and the message of a Done without values are at most; None where there are
    values, whose size only packing them tells."""
    header_bytes, payload_bytes = _SPARE_BYTES, 0
    for result in done.results:
        if result.outputs is not None:
            return None
        header_bytes += _RESULT_BYTES + _CHARACTER_BYTES * (len(result.code) + len(result.message))
        for flag in result.flags:
            header_bytes += _RESULT_BYTES + _CHARACTER_BYTES * len(flag)
        for tensor, payload in zip(result.tensors, result.payloads, strict=True):
            header_bytes += _TENSOR_BYTES + _CHARACTER_BYTES * len(tensor.name)
            payload_bytes += part_bytes(payload)
    return header_bytes, header_bytes + payload_bytes


def _size(done: Done) -> tuple[int, int]:
    header, *payloads = codec.encode(done)
    header_bytes = part_bytes(header)
    return header_bytes, header_bytes + sum(part_bytes(part) for part in payloads)
