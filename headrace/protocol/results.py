"""DONE, published outcomes and replayed ones: results to header entries and back.

A hot path like ``frames``: straight code for what comes with each frame. The broker is not the judge of
what a model computed: ``outputs`` pass through it unread but for their structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.fields import (
    I64_MAX,
    I64_MIN,
    U32_MAX,
    array_of,
    bad_field,
    boolean,
    count,
    cut_text,
    integer,
    long_text,
    missing_field,
    name_text,
    optional,
    pair,
    shown,
    stream_id,
    tree,
    tree_map,
    u64,
)
from headrace.protocol.messages import (
    Buffer,
    Done,
    FrameResult,
    Limits,
    Outcome,
    Outcomes,
    ReplayReply,
    Status,
    TensorSpec,
    Timing,
)
from headrace.protocol.tensors import MAX_TENSORS, read_output_spec, read_shape, tensor_bytes, write_spec
from headrace.protocol.wire import part_bytes

#: Remarks on one result.
_MAX_FLAGS: Final = 16
#: Ranges in one replay answer: at most one beside each retained outcome of a full ring would fit here.
_MAX_MISSED: Final = 65_536

_STATUSES: Final = {member.value: member for member in Status}
_NO_TIMING: Final = Timing()
_TIMING_FIELDS: Final = ("queued_us", "batched_us", "staged_us", "ran_us", "published_us")

_read_flags: Final = array_of(name_text, _MAX_FLAGS)
_read_pts_ns: Final = integer(I64_MIN, I64_MAX)
_read_optional_u64: Final = optional(u64)
_read_retry_after_ms: Final = optional(integer(0, U32_MAX))
_read_missed: Final = array_of(pair(u64, u64), _MAX_MISSED)


# -- writing -----------------------------------------------------------------------------------------


def write_done(message: Done) -> tuple[dict[str, Any], list[Buffer]]:
    payloads: list[Buffer] = []
    fields: dict[str, Any] = {"batch": message.batch}
    entries: list[dict[str, Any]] = []
    for result in message.results:
        entry: dict[str, Any] = {"status": result.status}
        _write_result(result, entry, payloads)
        entries.append(entry)
    fields["results"] = entries
    if message.staged_us:
        fields["staged_us"] = message.staged_us
    if message.ran_us:
        fields["ran_us"] = message.ran_us
    if message.total_us:
        fields["total_us"] = message.total_us
    return fields, payloads


def write_outcomes(message: Outcomes) -> tuple[dict[str, Any], list[Buffer]]:
    payloads: list[Buffer] = []
    return {"outcomes": [write_outcome(outcome, payloads) for outcome in message.outcomes]}, payloads


def write_replay_reply(message: ReplayReply) -> tuple[dict[str, Any], list[Buffer]]:
    payloads: list[Buffer] = []
    fields: dict[str, Any] = {
        "id": message.id,
        "outcomes": [write_outcome(outcome, payloads) for outcome in message.outcomes],
    }
    if message.missed:
        fields["missed"] = message.missed
    if message.has_more:
        fields["has_more"] = True
    return fields, payloads


def _write_result(result: FrameResult | Outcome, entry: dict[str, Any], payloads: list[Buffer]) -> None:
    """Add what a worker's result and a published outcome have in common."""
    if result.code:
        entry["code"] = result.code
    if result.message:
        entry["message"] = cut_text(result.message)
    if result.outputs is not None:
        entry["outputs"] = result.outputs
    if result.tensors or result.payloads:
        if len(result.tensors) != len(result.payloads):
            raise ValueError(f"{len(result.tensors)} tensors are described, {len(result.payloads)} are there")
        entry["tensors"] = [write_spec(spec) for spec in result.tensors]
        payloads.extend(result.payloads)
    if result.flags:
        entry["flags"] = result.flags


def write_outcome(outcome: Outcome, payloads: list[Buffer]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "stream": outcome.stream,
        "epoch": outcome.epoch,
        "seq": outcome.seq,
        "boot": outcome.boot,
        "pub_seq": outcome.pub_seq,
        "status": outcome.status,
    }
    if outcome.model:
        entry["model"] = outcome.model
    if outcome.version:
        entry["version"] = outcome.version
    if outcome.size_class:
        entry["size_class"] = outcome.size_class
    if outcome.worker:
        entry["worker"] = outcome.worker
    if outcome.attempt:
        entry["attempt"] = outcome.attempt
    if outcome.batch_size:
        entry["batch_size"] = outcome.batch_size
    if outcome.shape:
        entry["shape"] = outcome.shape
    if outcome.pts_ns is not None:
        entry["pts_ns"] = outcome.pts_ns
    if outcome.meta is not None:
        entry["meta"] = outcome.meta
    if outcome.retry_after_ms is not None:
        entry["retry_after_ms"] = outcome.retry_after_ms
    if outcome.timing is not _NO_TIMING and outcome.timing != _NO_TIMING:
        entry["timing"] = _write_timing(outcome.timing)
    _write_result(outcome, entry, payloads)
    return entry


def _write_timing(timing: Timing) -> dict[str, int]:
    fields: dict[str, int] = {}
    if timing.queued_us is not None:
        fields["queued_us"] = timing.queued_us
    if timing.batched_us is not None:
        fields["batched_us"] = timing.batched_us
    if timing.staged_us is not None:
        fields["staged_us"] = timing.staged_us
    if timing.ran_us is not None:
        fields["ran_us"] = timing.ran_us
    if timing.published_us is not None:
        fields["published_us"] = timing.published_us
    return fields


# -- reading -----------------------------------------------------------------------------------------


def read_done(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Done:
    get = header.get
    results = read_result_list(_read_entries(get("results"), "results", limits), payloads)
    return Done(
        batch=u64(get("batch"), "batch"),
        results=results,
        staged_us=u64(get("staged_us", 0), "staged_us"),
        ran_us=u64(get("ran_us", 0), "ran_us"),
        total_us=u64(get("total_us", 0), "total_us"),
    )


def read_result_list(entries: list[Any], payloads: Sequence[Buffer]) -> tuple[FrameResult, ...]:
    """Read the results of a batch, each of which takes as many payloads as it describes tensors."""
    source = _Payloads(payloads)
    results: list[FrameResult] = []
    for entry in entries:
        if type(entry) is not dict:
            raise bad_field("a result", "a map", entry)
        status = read_status(entry.get("status"))
        if status is not Status.OK and status is not Status.ERROR:
            raise bad_field("status of a result", "ok or error", status.value)
        code, message, outputs, flags = read_result(entry)
        tensors: tuple[TensorSpec, ...] = ()
        taken: tuple[Buffer, ...] = ()
        if "tensors" in entry:
            tensors, taken = source.take(entry["tensors"])
        results.append(FrameResult(status, code, message, outputs, tensors, taken, flags))
    source.demand_end()
    return tuple(results)


def read_outcomes(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Outcomes:
    entries = _read_entries(header.get("outcomes"), "outcomes", limits)
    outcomes = read_outcome_list(entries, payloads)
    if len({outcome.stream for outcome in outcomes}) > 1:
        raise RemoteProtocolError(Code.BAD_FIELD, "the outcomes of one message must be of one stream")
    return Outcomes(outcomes)


def read_replay_reply(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> ReplayReply:
    get = header.get
    entries = get("outcomes")
    if type(entries) is not list:  # no limit but the message's own: a page of a ring, cut by its bytes
        raise bad_field("outcomes", "an array", entries)
    return ReplayReply(
        id=u64(get("id"), "id"),
        outcomes=read_outcome_list(entries, payloads),
        missed=_read_missed(get("missed", []), "missed"),
        has_more=boolean(get("has_more", False), "has_more"),
    )


class _Payloads:
    """Hands the payload parts of a message out, one per described tensor, in order."""

    def __init__(self, payloads: Sequence[Buffer]) -> None:
        self._payloads = payloads
        self._taken_count = 0

    def take(self, value: object) -> tuple[tuple[TensorSpec, ...], tuple[Buffer, ...]]:
        """Read the tensors of one result and take their parts, whose lengths must be theirs."""
        if type(value) is not list or len(value) > MAX_TENSORS:
            raise bad_field("tensors", f"an array of at most {MAX_TENSORS} maps", value)
        start = self._taken_count
        end = self._taken_count = start + len(value)
        taken = tuple(self._payloads[start:end])
        if len(taken) != len(value):
            raise RemoteProtocolError(
                Code.PART_COUNT,
                f"the header announces at least {end} payload parts, the message has {len(self._payloads)}",
            )
        specs = tuple([read_output_spec(item, f"tensors[{index}]") for index, item in enumerate(value)])
        for spec, payload in zip(specs, taken, strict=True):
            expected = tensor_bytes(spec.shape, spec.dtype)
            if expected != part_bytes(payload):
                raise RemoteProtocolError(
                    Code.SIZE_MISMATCH,
                    f"tensor {shown(spec.name)}: shape {list(spec.shape)} of {spec.dtype} is {expected} "
                    f"bytes, its part has {part_bytes(payload)}",
                )
        return specs, taken

    def demand_end(self) -> None:
        if self._taken_count != len(self._payloads):
            raise RemoteProtocolError(
                Code.PART_COUNT,
                f"the header announces {self._taken_count} payload parts, "
                f"the message has {len(self._payloads)}",
            )


def _read_entries(value: object, name: str, limits: Limits) -> list[Any]:
    if value is None:
        raise missing_field(name)
    if type(value) is not list:
        raise bad_field(name, "an array", value)
    if not 1 <= len(value) <= limits.max_frames_per_message:
        raise RemoteProtocolError(
            Code.OUT_OF_RANGE,
            f"{name} must have 1 to {limits.max_frames_per_message} items (max_frames_per_message), "
            f"it has {len(value)}",
        )
    return value


def read_outcome_list(entries: list[Any], payloads: Sequence[Buffer]) -> tuple[Outcome, ...]:
    source = _Payloads(payloads)
    outcomes = tuple([_read_outcome(entry, source) for entry in entries])
    source.demand_end()
    return outcomes


def read_status(value: object) -> Status:
    status = _STATUSES.get(value) if type(value) is str else None
    if status is None:
        raise bad_field("status", f"one of {', '.join(_STATUSES)}", value)
    return status


def read_result(entry: dict[Any, Any]) -> tuple[str, str, Any, tuple[str, ...]]:
    get = entry.get
    code = get("code", "")
    if code != "":
        code = name_text(code, "code")
    message = get("message", "")
    if message != "":
        message = long_text(message, "message")
    outputs = get("outputs")
    if outputs is not None:
        tree(outputs, "outputs")
    return code, message, outputs, _read_flags(entry["flags"], "flags") if "flags" in entry else ()


def _read_outcome(entry: object, source: _Payloads) -> Outcome:
    if type(entry) is not dict:
        raise bad_field("an outcome", "a map", entry)
    get = entry.get
    code, message, outputs, flags = read_result(entry)
    tensors: tuple[TensorSpec, ...] = ()
    taken: tuple[Buffer, ...] = ()
    if "tensors" in entry:
        tensors, taken = source.take(entry["tensors"])
    pts_ns = get("pts_ns")
    meta = get("meta")
    return Outcome(
        stream=stream_id(get("stream"), "stream"),
        epoch=u64(get("epoch"), "epoch"),
        seq=u64(get("seq"), "seq"),
        boot=u64(get("boot"), "boot"),
        pub_seq=u64(get("pub_seq"), "pub_seq"),
        status=read_status(get("status")),
        code=code,
        message=message,
        model=name_text(get("model", ""), "model"),
        version=name_text(get("version", ""), "version"),
        size_class=name_text(get("size_class", ""), "size_class"),
        worker=name_text(get("worker", ""), "worker"),
        attempt=count(get("attempt", 0), "attempt"),
        batch_size=count(get("batch_size", 0), "batch_size"),
        shape=read_shape(entry["shape"], "shape") if "shape" in entry else (),
        pts_ns=None if pts_ns is None else _read_pts_ns(pts_ns, "pts_ns"),
        meta=None if meta is None else tree_map(meta, "meta"),
        retry_after_ms=_read_retry_after_ms(get("retry_after_ms"), "retry_after_ms"),
        timing=_read_timing(entry["timing"]) if "timing" in entry else _NO_TIMING,
        outputs=outputs,
        tensors=tensors,
        payloads=taken,
        flags=flags,
    )


def _read_timing(value: object) -> Timing:
    if type(value) is not dict:
        raise bad_field("timing", "a map", value)
    return Timing(*[_read_optional_u64(value.get(name), f"timing.{name}") for name in _TIMING_FIELDS])
