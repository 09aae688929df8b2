"""FRAME, BATCH, DONE and OUTCOMES of several rows, as columns: written always, read beside the list form.

Not here: one frame or result on its own (``frames``, ``results``), how a table stands in a header
(``columns``).

Theory of operation. A table whose rows are all in order and of the usual kind (raw pixels, results alike)
is read by columns: each field is checked at once for all rows. Anything else, above all a table with a fault
in it, is turned into rows, which are read one by one and name the row that is wrong: one set of rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, Final

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol import frames as one
from headrace.protocol import results as end
from headrace.protocol.alike import STAGES, Alike
from headrace.protocol.columns import ColumnWriter, Table, cut_payloads, join_payloads
from headrace.protocol.fields import (
    I64_MAX,
    I64_MIN,
    MAX_NAME_CHARACTERS,
    U32_MAX,
    U64_MAX,
    bad_field,
    cut_text,
    long_text,
    name_text,
    required_name,
    stream_id,
    tree,
    tree_map,
    u64,
)
from headrace.protocol.messages import (
    BadFrame,
    Batch,
    Buffer,
    Color,
    Done,
    Encoding,
    Frame,
    FrameResult,
    Frames,
    Keep,
    Limits,
    Outcome,
    Outcomes,
    Payload,
    ShmRef,
    Status,
    TensorSpec,
    Timing,
)
from headrace.protocol.tensors import MAX_TENSORS, read_output_spec, read_shape, tensor_bytes, write_spec
from headrace.protocol.wire import part_bytes

_Written = tuple[dict[str, Any], list[Buffer]]

_FRAME_FIELDS: Final = (
    ("stream", "stream", ""),
    ("seq", "seq", None),
    ("epoch", "epoch", None),
    ("model", "model", ""),
    ("shape", "shape", ()),
    ("dtype", "dtype", "uint8"),
    ("encoding", "encoding", Encoding.RAW),
    ("color", "color", Color.RGB),
    ("priority", "priority", 0),
    ("ttl_ms", "ttl_ms", None),
    ("keep", "keep", Keep.ALL),
    ("pts_ns", "pts_ns", None),
    ("meta", "meta", None),
)
_SHM_FIELDS: Final = tuple(
    [(name, f"payload.{name}", None) for name in ("arena", "offset", "nbytes", "generation")]
)
_RESULT_FIELDS: Final[tuple[tuple[str, str, object], ...]] = (
    ("status", "status", None),
    ("code", "code", ""),
    ("message", "message", ""),
    ("outputs", "outputs", None),
    ("tensors", "tensors", ()),
    ("flags", "flags", ()),
)
_OUTCOME_FIELDS: Final = (
    *[(name, name, None) for name in ("stream", "epoch", "seq", "boot", "pub_seq")],
    *[(name, name, "") for name in ("model", "version", "size_class", "worker")],
    ("attempt", "attempt", 0),
    ("batch_size", "batch_size", 0),
    ("shape", "shape", ()),
    *[(name, name, None) for name in ("pts_ns", "meta", "retry_after_ms")],
    *[(name, f"timing.{name}", None) for name in STAGES],
    *_RESULT_FIELDS,
)
_inline_frames: Final = ColumnWriter(_FRAME_FIELDS, trees=["meta"])
_shm_frames: Final = ColumnWriter((*_FRAME_FIELDS, *_SHM_FIELDS), trees=["meta"])
_results: Final = ColumnWriter(_RESULT_FIELDS, trees=["outputs"])
_outcomes: Final = ColumnWriter(_OUTCOME_FIELDS, trees=["meta", "outputs"])
_alike = Alike()


# -- writing -----------------------------------------------------------------------------------------


def write_frames(message: Frames) -> _Written:
    """Return header fields and payload parts. Raises ValueError for a BadFrame: only decoders make those."""
    table = _frame_table(message.frames)
    return one.write_frames(message) if table is None else table


def write_batch(message: Batch) -> _Written:
    table = _frame_table(message.frames)
    if table is None:
        return one.write_batch(message)
    fields, payloads = table
    named = {
        "batch": message.batch,
        "model": message.model,
        "version": message.version,
        "size_class": message.size_class,
    }
    return named | fields, payloads


def _frame_table(frames: Sequence[Frame | BadFrame]) -> _Written | None:
    """Return the table of frames, None when they have to go as a list: one alone, or of several kinds."""
    if len(frames) < 2:
        return None
    payloads: list[Any] = []
    for frame in frames:
        if type(frame) is not Frame or frame.inputs:
            return None
        payloads.append(frame.payload)
    shm_count = list(map(type, payloads)).count(ShmRef)
    if shm_count == len(frames):
        fields = _shm_frames.write(frames)
        fields["shared"]["lane"] = "shm"
        return fields, []
    if shm_count:
        return None
    fields = _inline_frames.write(frames)
    sizes, parts = join_payloads(payloads)
    return fields | sizes, parts


def write_done(message: Done) -> _Written:
    if len(message.results) < 2:
        return end.write_done(message)
    fields, payloads = _result_table(_results, message.results)
    named = {"batch": message.batch}
    for name in ("staged_us", "ran_us", "total_us"):
        value = getattr(message, name)
        if value:
            named[name] = value
    return named | fields, payloads


def write_outcomes(message: Outcomes) -> _Written:
    if len(message.outcomes) < 2:
        return end.write_outcomes(message)
    return _result_table(_outcomes, message.outcomes)


def _result_table(writer: ColumnWriter, rows: Sequence[FrameResult | Outcome]) -> _Written:
    fields = writer.write(rows)
    shared, columns = fields["shared"], fields["columns"]
    payloads: list[Buffer] = []
    for row in rows:
        if len(row.tensors) != len(row.payloads):
            raise ValueError(f"{len(row.tensors)} tensors are described, {len(row.payloads)} are there")
        payloads += row.payloads
    if "tensors" in shared:
        shared["tensors"] = [write_spec(spec) for spec in shared["tensors"]]
    elif "tensors" in columns:
        columns["tensors"] = [specs and [write_spec(spec) for spec in specs] for specs in columns["tensors"]]
    if "message" in shared:
        shared["message"] = cut_text(shared["message"])
    elif "message" in columns:
        columns["message"] = [cut_text(text) for text in columns["message"]]
    sizes, parts = join_payloads(payloads)
    return fields | sizes, parts


# -- reading frames ----------------------------------------------------------------------------------


def read_frames(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Frames:
    """Read FRAME. Raises RemoteProtocolError only when the message as a whole can't be read."""
    if "columns" not in header:
        return one.read_frames(header, payloads, limits)
    table = Table(header, limits)
    cut = _frame_payloads(table, header, payloads)
    try:
        return Frames(tuple(_read_plain_frames(table, cut, limits)))
    except (RemoteProtocolError, TypeError):
        # A TypeError is a value of the wrong kind among texts: the rows say which.
        return one.read_frames({"frames": table.rows()}, cut, limits)


def read_batch(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Batch:
    """Read BATCH. A bad frame fails the whole: the broker has checked them all."""
    if "columns" not in header:
        return one.read_batch(header, payloads, limits)
    table = Table(header, limits)
    cut = _frame_payloads(table, header, payloads)
    get = header.get
    try:
        frames = tuple(_read_plain_frames(table, cut, limits))
    except (RemoteProtocolError, TypeError):
        return one.read_batch(header | {"frames": table.rows()}, cut, limits)
    return Batch(
        batch=u64(get("batch"), "batch"),
        model=required_name(get("model"), "model"),
        version=required_name(get("version"), "version"),
        size_class=required_name(get("size_class"), "size_class"),
        frames=frames,
    )


def _frame_payloads(table: Table, header: dict[Any, Any], payloads: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return one payload a row, or none when all are in shared memory."""
    if "data" in table.shared or "data" in table.columns:
        raise bad_field("data", "left out in a table", None)
    if "lane" in table.columns:
        raise bad_field("lane", "the same in all rows of a table", None)
    wanted = 0 if table.shared.get("lane") == "shm" else table.count
    cut = cut_payloads(header, payloads, wanted) if wanted else payloads
    if len(cut) != wanted:
        raise RemoteProtocolError(
            Code.PART_COUNT, f"the header announces {wanted} payload parts, the message has {len(cut)}"
        )
    return cut


def _read_plain_frames(table: Table, payloads: Sequence[Buffer], limits: Limits) -> list[Frame]:
    """Read raw frames by columns. Raises RemoteProtocolError or TypeError when one needs a closer look."""
    shared, columns = table.shared, table.columns
    if shared.get("encoding", "raw") != "raw" or table.has("inputs") or "encoding" in columns:
        raise bad_field("encoding", "raw", None)
    if "dtype" in columns or "color" in columns:
        raise bad_field("dtype and color", "the same in all rows", None)
    rows_payloads, sizes = _read_payloads(table, payloads, limits)
    color = Color.RGB if shared.get("color") is None else one.read_color(shared["color"])
    dtype = "uint8" if shared.get("dtype") is None else shared["dtype"]
    shapes = _read_shapes(table, dtype, sizes)
    if color is Color.GRAY:
        for shape in set(shapes):
            one.check_gray(Encoding.RAW, shape)
    if "meta" in columns:
        metas = [None if meta is None else one.read_meta(meta, limits) for meta in columns["meta"]]
    else:
        held = shared.get("meta")
        metas = [None if held is None else one.read_meta(held, limits)] * table.count
    return list(
        map(
            Frame,
            table.each("stream", _read_stream),
            rows_payloads,
            sizes,
            shapes,
            repeat(dtype),
            repeat(Encoding.RAW),
            repeat(color),
            table.integers("seq", 0, U64_MAX, None),
            table.integers("epoch", 0, U64_MAX, None),
            table.each("model", _read_model, ""),
            table.integers("priority", 0, limits.priority_levels - 1, 0),
            table.integers("ttl_ms", 1, one.MAX_TTL_MS, None),
            table.each("keep", _read_keep, Keep.ALL),
            table.integers("pts_ns", I64_MIN, I64_MAX, None),
            metas,
        )
    )


def _read_payloads(
    table: Table, payloads: Sequence[Buffer], limits: Limits
) -> tuple[Sequence[Payload], list[int]]:
    lane = table.shared.get("lane")
    rows_payloads: Sequence[Payload] = payloads
    if lane == "shm":
        sizes = list(table.numbers("nbytes"))
        rows_payloads = list(
            map(
                ShmRef,
                table.each("arena", required_name),
                table.numbers("offset"),
                sizes,
                table.numbers("generation"),
            )
        )
    elif lane is None or lane == "inline":
        sizes = list(map(part_bytes, payloads))
    else:
        raise bad_field("lane", "inline or shm", lane)
    if not 0 < min(sizes) <= max(sizes) <= limits.max_frame_bytes:
        raise one.bad_size(min(sizes), limits)
    return rows_payloads, sizes


def _read_shapes(table: Table, dtype: object, sizes: list[int]) -> list[tuple[int, ...]]:
    """Return the shapes, each of which must have exactly the bytes of its payload."""
    column = table.columns.get("shape")
    if column is None:
        shape = table.shared.get("shape")
        by_size = {size: one.read_raw_shape(shape, dtype, size) for size in set(sizes)}
        return [by_size[size] for size in sizes]
    # A bool in a shape is equal to a number: it must not pass for one.
    if set(map(type, column)) != {list} or not set(map(type, chain.from_iterable(column))) <= {int}:
        raise bad_field("column shape", "arrays of integers", column)
    pairs = list(zip(map(tuple, column), sizes, strict=True))
    known = {pair: one.read_raw_shape(list(pair[0]), dtype, pair[1]) for pair in set(pairs)}
    return [known[pair] for pair in pairs]


def _read_stream(value: object, _name: str) -> str:
    return one.read_stream(value)


def _read_model(value: object, name: str) -> str:
    if type(value) is not str or len(value) > MAX_NAME_CHARACTERS:
        raise bad_field(name, "text", value)
    return value


def _read_keep(value: object, _name: str) -> Keep:
    return one.read_keep(value)


# -- reading results ---------------------------------------------------------------------------------


def read_done(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Done:
    if "columns" not in header:
        return end.read_done(header, payloads, limits)
    table = Table(header, limits)
    cut = cut_payloads(header, payloads, table.count * MAX_TENSORS)
    try:
        results = tuple(_read_plain_results(table, cut))
    except (RemoteProtocolError, TypeError):
        results = end.read_result_list(table.rows(), cut)
    get = header.get
    return Done(
        batch=u64(get("batch"), "batch"),
        results=results,
        staged_us=u64(get("staged_us", 0), "staged_us"),
        ran_us=u64(get("ran_us", 0), "ran_us"),
        total_us=u64(get("total_us", 0), "total_us"),
    )


def _read_plain_results(table: Table, payloads: Sequence[Buffer]) -> list[FrameResult]:
    """Read results by columns. Raises RemoteProtocolError or TypeError when one needs a closer look."""
    statuses = list(table.each("status", _read_result_status))
    tensors, taken = _read_tensors(table, payloads)
    return list(
        map(
            FrameResult,
            statuses,
            table.each("code", name_text, ""),
            table.each("message", long_text, ""),
            _read_outputs(table),
            repeat(tensors),
            taken,
            repeat(_read_no_flags(table)),
        )
    )


def read_outcomes(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> Outcomes:
    if "columns" not in header:
        return end.read_outcomes(header, payloads, limits)
    table = Table(header, limits)
    if "stream" in table.columns:
        raise RemoteProtocolError(Code.BAD_FIELD, "the outcomes of one message must be of one stream")
    cut = cut_payloads(header, payloads, table.count * MAX_TENSORS)
    key = _alike.key(table)
    try:
        if key is not None and (known := _alike.read(key, table, cut)) is not None:
            return Outcomes(tuple(known))
        outcomes = tuple(_read_plain_outcomes(table, cut))
        if key is not None:
            _alike.learn(key, outcomes[0])
        return Outcomes(outcomes)
    except (RemoteProtocolError, TypeError):
        return Outcomes(end.read_outcome_list([_with_timing(row) for row in table.rows()], cut))


def _read_plain_outcomes(table: Table, payloads: Sequence[Buffer]) -> list[Outcome]:
    """Read outcomes by columns. Raises RemoteProtocolError or TypeError when one needs a closer look."""
    shared, columns, count = table.shared, table.columns, table.count
    if "shape" in columns or "timing" in shared or "timing" in columns:
        raise bad_field("shape", "the same in all rows", None)
    tensors, taken = _read_tensors(table, payloads)
    timings = map(Timing, *[table.integers(name, 0, U64_MAX, None) for name in STAGES])
    if not table.has(*STAGES):
        timings = repeat(Timing(), count)  # type: ignore[assignment]  # both are iterated once
    metas: Any = columns.get("meta") or [shared.get("meta")] * count
    return list(
        map(
            Outcome,
            repeat(stream_id(shared.get("stream"), "stream"), count),
            table.numbers("epoch"),
            table.numbers("seq"),
            table.numbers("boot"),
            table.numbers("pub_seq"),
            table.each("status", _read_status),
            table.each("code", name_text, ""),
            table.each("message", long_text, ""),
            *[table.each(name, name_text, "") for name in ("model", "version", "size_class", "worker")],
            table.integers("attempt", 0, U32_MAX, 0),
            table.integers("batch_size", 0, U32_MAX, 0),
            repeat(read_shape(shared["shape"], "shape") if "shape" in shared else ()),
            table.integers("pts_ns", I64_MIN, I64_MAX, None),
            [None if meta is None else tree_map(meta, "meta") for meta in metas],
            table.integers("retry_after_ms", 0, U32_MAX, None),
            timings,
            _read_outputs(table),
            repeat(tensors),
            taken,
            repeat(_read_no_flags(table)),
        )
    )


def _read_tensors(
    table: Table, payloads: Sequence[Buffer]
) -> tuple[tuple[TensorSpec, ...], list[tuple[Buffer, ...]]]:
    """Read the tensors that all rows have alike, and return each row's payloads."""
    if "tensors" in table.columns:
        raise bad_field("tensors", "the same in all rows", None)
    described = table.shared.get("tensors")
    if "tensors" not in table.shared:
        tensors: tuple[TensorSpec, ...] = ()
    elif type(described) is list and len(described) <= MAX_TENSORS:
        tensors = tuple([read_output_spec(spec, f"tensors[{i}]") for i, spec in enumerate(described)])
    else:
        raise bad_field("tensors", f"an array of at most {MAX_TENSORS} maps", described)
    width = len(tensors)
    if len(payloads) != width * table.count:
        raise RemoteProtocolError(
            Code.PART_COUNT, f"{width * table.count} payloads are announced, {len(payloads)} are there"
        )
    if not width:
        return (), [()] * table.count
    for index, spec in enumerate(tensors):
        expected = tensor_bytes(spec.shape, spec.dtype)
        if set(map(part_bytes, payloads[index::width])) != {expected}:
            raise bad_field("a tensor", f"{expected} bytes", None)
    return tensors, list(zip(*[iter(payloads)] * width, strict=True))


def _read_outputs(table: Table) -> list[Any]:
    outputs = table.columns.get("outputs")
    if outputs is None:
        return [tree(table.shared.get("outputs"), "outputs")] * table.count
    for value in outputs:
        tree(value, "outputs")
    return outputs


def _read_no_flags(table: Table) -> tuple[str, ...]:
    if table.has("flags"):
        raise bad_field("flags", "left out", None)
    return ()


def _read_status(value: object, _name: str) -> Status:
    return end.read_status(value)


def _read_result_status(value: object, name: str) -> Status:
    status = end.read_status(value)
    if status is not Status.OK and status is not Status.ERROR:
        raise bad_field(name, "ok or error", value)
    return status


def _with_timing(row: dict[Any, Any]) -> dict[Any, Any]:
    """Put the stages of a row where an outcome on its own has them."""
    timing = {name: row.pop(name) for name in STAGES if name in row}
    return row | {"timing": timing} if timing else row
