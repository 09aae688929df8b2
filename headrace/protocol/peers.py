"""All messages that do not come once per frame: one table of fields each, read and written by one loop.

A schema names a dataclass, its wire type and a reader per field; which fields may be left out, and what
they then are, is the dataclass's own defaults. Writing leaves out what equals its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol import messages as m
from headrace.protocol.fields import (
    I64_MAX,
    Reader,
    array_of,
    bad_field,
    boolean,
    choice,
    count,
    cut_text,
    integer,
    long_text,
    map_of,
    missing_field,
    name_text,
    number,
    optional,
    out_of_range,
    pair,
    path_text,
    positive,
    required_name,
    stream_id,
    text,
    tree_map,
    u64,
)
from headrace.protocol.tensors import MAX_TENSORS, read_graph_spec, write_spec

T = TypeVar("T")

MAX_MODELS: Final = 1_024
MAX_SIZE_CLASSES: Final = 64
MAX_MODEL_FILES: Final = 256
MAX_BUCKETS: Final = 64
MAX_NOTES: Final = 64
MAX_SIDE_PIXELS: Final = 65_536  # what a JPEG can be at most
MAX_BATCH_SIZE: Final = 4_096
MAX_TRAFFIC_SHARE: Final = 1e6
MAX_MILLISECONDS: Final = 1e9  # eleven days: any time that is measured or configured is below
MAX_FIGURE: Final = 1e18  # bytes and nanoseconds of any device are below
_MAX_COLOR_VALUE: Final = 1e9  # scale, mean and std: anything finite and sane


class Schema(Generic[T]):
    """How one dataclass looks in a header: its fields in wire order with their readers."""

    def __init__(
        self, kind: type[T], readers: Mapping[str, Reader[Any]], has_all_fields: bool = False
    ) -> None:
        self.kind = kind
        self._has_all_fields = has_all_fields
        self._fields: list[tuple[str, Reader[Any], Any]] = []
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # T is always a dataclass
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if field.name != "payloads":
                self._fields.append((field.name, readers[field.name], default))

    def write(self, message: T) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, reader, default in self._fields:
            value = getattr(message, name)
            if value != default or self._has_all_fields:
                fields[name] = cut_text(value) if reader is long_text else _write_value(value)
        return fields

    def read(self, header: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
        """Return the checked fields as keyword arguments of the dataclass."""
        checked: dict[str, Any] = {}
        for name, reader, default in self._fields:
            if name in header:
                checked[name] = reader(header[name], prefix + name)
            elif default is dataclasses.MISSING:
                raise missing_field(prefix + name)
        return checked

    def reader(self) -> Reader[T]:
        """Return a reader of this dataclass as a field of another."""

        def read(value: object, name: str) -> T:
            if type(value) is not dict:
                raise bad_field(name, "a map", value)
            return self.kind(**self.read(value, f"{name}."))

        return read


def _write_value(value: Any) -> Any:
    """Turn the values of message fields into what msgpack takes."""
    if type(value) is tuple:
        return [_write_value(item) for item in value]
    if type(value) is m.TensorSpec:
        return write_spec(value)
    schema = _NESTED.get(type(value))
    return value if schema is None else schema.write(value)


# -- fields with rules of their own ------------------------------------------------------------------


def _read_sha256(value: object, name: str) -> str:
    if type(value) is not str or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise bad_field(name, "64 lowercase hexadecimal digits", value)
    return value


def _read_model_path(value: object, name: str) -> str:
    """Read a path that can't lead out of the folder it is joined to, on any system."""
    path = path_text(value, name)
    if not set(path.split("/")).isdisjoint(("", ".", "..")) or not set(path).isdisjoint("\\:\0"):
        raise bad_field(name, "a relative path with forward slashes and no ..", value)
    return path


def _read_buckets(value: object, name: str) -> tuple[tuple[int, float], ...]:
    buckets = _read_bucket_pairs(value, name)
    sizes = [size for size, _milliseconds in buckets]
    if sizes != sorted(set(sizes)):
        raise bad_field(name, "ascending by bucket size", value)
    return buckets


def _read_std(value: object, name: str) -> tuple[float, ...]:
    std = _read_channel_values(value, name)
    if 0.0 in std:
        raise out_of_range(name, "anything", "but 0", 0.0)
    return std


_read_bucket_pairs: Final = array_of(
    pair(integer(1, MAX_BATCH_SIZE), number(0, MAX_MILLISECONDS)), MAX_BUCKETS
)
_read_channel_values: Final = array_of(number(-_MAX_COLOR_VALUE, _MAX_COLOR_VALUE), 4)
_read_milliseconds: Final = number(0, MAX_MILLISECONDS)
_read_address: Final = text(512)
_read_statuses: Final = map_of(name_text, u64)


def _read_by_status(value: object, name: str) -> dict[str, int]:
    by_status = _read_statuses(value, name)
    for status in by_status:
        if status not in _STATUS_VALUES:
            raise bad_field(f"a key of {name}", f"one of {', '.join(_STATUS_VALUES)}", status)
    return by_status


_STATUS_VALUES: Final = tuple([status.value for status in m.Status])

# -- parts of messages, innermost first ---------------------------------------------------------------

_MODEL_FILE: Final = Schema(
    m.ModelFile, {"path": _read_model_path, "sha256": _read_sha256, "nbytes": integer(0, I64_MAX)}
)
_SIZE_CLASS: Final = Schema(
    m.SizeClassSpec,
    {
        "name": required_name,
        "height": integer(0, MAX_SIDE_PIXELS),
        "width": integer(0, MAX_SIDE_PIXELS),
        "max_batch_size": integer(1, MAX_BATCH_SIZE),
        "fit": choice(m.Fit),
        "traffic_share": number(0.0, MAX_TRAFFIC_SHARE),
    },
)
_read_sides: Final = _SIZE_CLASS.reader()


def _read_size_class(value: object, name: str) -> m.SizeClassSpec:
    """Read a size class: both sides are pixels, or both are 0 in the one class of a model of tensors."""
    size_class = _read_sides(value, name)
    if (size_class.height == 0) != (size_class.width == 0):
        raise RemoteProtocolError(
            Code.OUT_OF_RANGE,
            f"{name} is {size_class.height}x{size_class.width}: both sides are 0 (tensors), or none is",
        )
    return size_class


_IMAGE_INPUT: Final = Schema(
    m.ImageInput,
    {
        "color": choice(m.Color),
        "channels": integer(1, 4),
        "scale": number(-_MAX_COLOR_VALUE, _MAX_COLOR_VALUE),
        "mean": _read_channel_values,
        "std": _read_std,
        "pad_value": integer(0, 255),
    },
)
_EMULATED_COST: Final = Schema(
    m.EmulatedCost, {"base_ms": _read_milliseconds, "per_frame_ms": _read_milliseconds}
)
_MODEL: Final = Schema(
    m.ModelSpec,
    {
        "name": required_name,
        "version": required_name,
        "files": array_of(_MODEL_FILE.reader(), MAX_MODEL_FILES),
        "image": optional(_IMAGE_INPUT.reader()),
        "size_classes": array_of(_read_size_class, MAX_SIZE_CLASSES),
        "oversize": choice(m.Oversize),
        "adapter": required_name,
        "adapter_options": tree_map,
        "emulated": optional(_EMULATED_COST.reader()),
        "gpu_files": array_of(_MODEL_FILE.reader(), MAX_MODEL_FILES),
        "fp32_files": array_of(_MODEL_FILE.reader(), MAX_MODEL_FILES),
        "fp32_sample_share": number(0.0, 1.0),
    },
)
#: Limits are always sent whole: two releases may differ in their defaults, and must not in their limits.
_LIMITS: Final = Schema(
    m.Limits, {field.name: positive for field in dataclasses.fields(m.Limits)}, has_all_fields=True
)
_ENDPOINTS_FIELDS: Final[dict[str, Reader[Any]]] = {
    "boot": u64,
    **dict.fromkeys(("frames", "intake", "results", "workers", "control", "http"), _read_address),
    "host_key": name_text,
}
_ENDPOINTS: Final = Schema(m.Endpoints, _ENDPOINTS_FIELDS)
_CLASS_PROFILE: Final = Schema(m.ClassProfile, {"size_class": _read_size_class, "buckets": _read_buckets})
_MODEL_PROFILE: Final = Schema(
    m.ModelProfile,
    {
        "name": required_name,
        "version": required_name,
        "classes": array_of(_CLASS_PROFILE.reader(), MAX_SIZE_CLASSES),
        "inputs": array_of(read_graph_spec, MAX_TENSORS),
        "notes": array_of(long_text, MAX_NOTES),
    },
)
_NESTED: Final[dict[type, Schema[Any]]] = {
    schema.kind: schema
    for schema in (
        _MODEL_FILE,
        _SIZE_CLASS,
        _IMAGE_INPUT,
        _EMULATED_COST,
        _MODEL,
        _LIMITS,
        _ENDPOINTS,
        _CLASS_PROFILE,
        _MODEL_PROFILE,
    )
}

_read_any_figures: Final = map_of(text(m.MAX_FIGURE_CHARACTERS, 1), number(-MAX_FIGURE, MAX_FIGURE))


def _read_figures(value: object, name: str) -> dict[str, float]:
    figures = _read_any_figures(value, name)
    if len(figures) > m.MAX_FIGURES:
        raise out_of_range(f"the number of {name}", 0, m.MAX_FIGURES, len(figures))
    return figures


# -- the messages --------------------------------------------------------------------------------------

_read_models: Final = array_of(_MODEL.reader(), MAX_MODELS)

#: Wire type -> schema of every message without payload parts (REPLY may carry some; see ``codec``).
SCHEMAS: Final[dict[str, Schema[Any]]] = {
    "heartbeat": Schema(m.Heartbeat, {"probe": optional(u64)}),
    "goodbye": Schema(m.Goodbye, {"reason": long_text}),
    "refused": Schema(m.Refused, {"code": required_name, "message": long_text}),
    "discover": Schema(m.Discover, {}),
    "endpoints": _ENDPOINTS,
    "hello": Schema(m.Hello, {"epoch": u64, "name": name_text, "host_key": name_text, "arena": name_text}),
    "welcome": Schema(
        m.Welcome,
        {
            "boot": u64,
            "credits": count,
            "heartbeat_ms": positive,
            "limits": _LIMITS.reader(),
            "models": _read_models,
            "endpoints": _ENDPOINTS.reader(),
            "is_shm_possible": boolean,
        },
    ),
    "credit": Schema(
        m.Credit, {"finished": u64, "streams": map_of(stream_id, u64), "by_status": _read_by_status}
    ),
    "reject": Schema(
        m.Reject,
        {
            "code": required_name,
            "message": long_text,
            "stream": optional(stream_id),
            "epoch": optional(u64),
            "seq": optional(u64),
            "retry_after_ms": optional(count),
        },
    ),
    "worker_hello": Schema(
        m.WorkerHello,
        {
            "worker": required_name,
            "instance": u64,
            "host_key": name_text,
            "device": name_text,
            "engine": name_text,
            "release": name_text,
            "pid": count,
        },
    ),
    "setup": Schema(
        m.Setup,
        {
            "boot": u64,
            "heartbeat_ms": positive,
            "limits": _LIMITS.reader(),
            "models": _read_models,
            "endpoints": _ENDPOINTS.reader(),
        },
    ),
    "ready": Schema(
        m.Ready,
        {
            "worker": required_name,
            "instance": u64,
            "slots": integer(1, 1_024),
            "models": array_of(_MODEL_PROFILE.reader(), MAX_MODELS),
        },
    ),
    "failed": Schema(m.Failed, {"batch": u64, "code": required_name, "message": long_text}),
    "telemetry": Schema(m.Telemetry, {"worker": required_name, "figures": _read_figures}),
    "cancel": Schema(m.Cancel, {"batch": u64}),
    "load": Schema(m.Load, {"model": _MODEL.reader()}),
    "loaded": Schema(m.Loaded, {"profile": _MODEL_PROFILE.reader()}),
    "not_loaded": Schema(
        m.NotLoaded,
        {"name": required_name, "version": required_name, "code": required_name, "message": long_text},
    ),
    "unload": Schema(m.Unload, {"name": required_name, "version": required_name}),
    "compare": Schema(m.Compare, {"batch": u64, "version": required_name}),
    "compared": Schema(
        m.Compared,
        {
            "batch": u64,
            "version": required_name,
            "frames": count,
            "agreed": count,
            "max_abs": number(0, MAX_FIGURE),
            "max_rel": number(0, MAX_FIGURE),
            "non_finite": count,
            "error": long_text,
        },
    ),
    "subscribed": Schema(m.Subscribed, {"boot": u64, "topic": text(1_024)}),
    "request": Schema(m.Request, {"id": u64, "method": required_name, "params": tree_map}),
    "reply": Schema(m.Reply, {"id": u64, "result": tree_map, "code": name_text, "message": long_text}),
}
