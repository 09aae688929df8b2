"""Traces: what was sent to a broker and when, as JSON Lines. ``headrace record`` writes them.

The first line says what the file is: ``{"headrace_trace": 1}``, with what is known of its making. Every
other line is one frame: ``t`` seconds since the first frame (never falls), ``stream``, ``shape`` [height,
width, channels] or that of a tensor, ``bytes``, and, when they are not the default, ``model``, ``priority``,
``ttl_ms``, ``encoding``, ``dtype`` and ``keep``. Pixels are never in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from headrace.errors import ConfigError
from headrace.protocol.messages import Encoding, Keep

TRACE_VERSION = 1

#: Longest line that is read: a stream has at most 128 bytes, a shape a few numbers.
MAX_LINE_CHARS = 4_096

_MAX_U32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TraceKind:
    """What frames of a trace have in common: all but their time and stream."""

    shape: tuple[int, ...]
    nbytes: int
    model: str = ""
    priority: int = 0
    ttl_ms: int | None = None
    keep: Keep = Keep.ALL
    encoding: Encoding = Encoding.RAW
    dtype: str = "uint8"


@dataclass(frozen=True, slots=True)
class TraceFrame:
    """One frame of a trace. ``time_s`` counts from the first one."""

    time_s: float
    stream: str
    kind: TraceKind


class TraceWriter:
    """Writes a trace, frame by frame."""

    def __init__(self, file: TextIO, about: dict[str, Any] | None = None) -> None:
        """Write the first line. ``about``: facts for people, such as the broker's release."""
        self._file = file
        self._put({"headrace_trace": TRACE_VERSION, **(about or {})})

    def write(self, frame: TraceFrame) -> None:
        """Write one frame."""
        kind = frame.kind
        entry: dict[str, Any] = {
            "t": round(frame.time_s, 6),
            "stream": frame.stream,
            "shape": list(kind.shape),
            "bytes": kind.nbytes,
        }
        if kind.model:
            entry["model"] = kind.model
        if kind.priority:
            entry["priority"] = kind.priority
        if kind.ttl_ms is not None:
            entry["ttl_ms"] = kind.ttl_ms
        if kind.encoding is not Encoding.RAW:
            entry["encoding"] = kind.encoding.value
        if kind.dtype != "uint8":
            entry["dtype"] = kind.dtype
        if kind.keep is not Keep.ALL:
            entry["keep"] = kind.keep.value
        self._put(entry)

    def _put(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":"), ensure_ascii=False) + "\n")


def read_trace(path: Path) -> Iterator[TraceFrame]:
    """Yield the frames of a trace in order, reading as they are asked for.

    Raises ConfigError that names the line when it is no trace or a line can't be used."""
    kinds: dict[TraceKind, TraceKind] = {}
    last_s = 0.0
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}): `headrace record --out {path}` makes one"
        ) from None
    with file:
        number = 0
        try:
            while line := file.readline(MAX_LINE_CHARS):
                number += 1
                entry = json.loads(line)
                if number == 1:
                    _check_head(entry, path)
                    continue
                frame = _frame_of(entry, kinds)
                last_s = _later(frame.time_s, last_s)
                yield frame
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}, line {number}: not a frame of a trace: {reason}") from None
    if number == 0:
        raise ConfigError(f'{path}: is empty: a trace begins with {{"headrace_trace": {TRACE_VERSION}}}')


def _check_head(entry: Any, path: Path) -> None:
    version = entry.get("headrace_trace") if isinstance(entry, dict) else None
    if version != TRACE_VERSION:
        raise ConfigError(
            f"{path}: is no trace that this release reads: its first line must hold"
            f' "headrace_trace": {TRACE_VERSION}'
        )


def _later(time_s: float, last_s: float) -> float:
    if time_s < last_s:
        raise ValueError(f"t is {time_s:g} after {last_s:g}: times never fall")
    return time_s


def _frame_of(entry: dict[str, Any], kinds: dict[TraceKind, TraceKind]) -> TraceFrame:
    time_s = float(entry["t"])
    stream = entry["stream"]
    if not math.isfinite(time_s) or time_s < 0:
        raise ValueError(f"t is {time_s}: expected seconds from 0")
    if not isinstance(stream, str) or not stream:
        raise ValueError(f"stream is {stream!r}: expected a name")
    ttl_ms = entry.get("ttl_ms")
    kind = TraceKind(
        shape=tuple(_integer("shape", side, 1) for side in entry["shape"]),
        nbytes=_integer("bytes", entry["bytes"], 0),
        model=str(entry.get("model", "")),
        priority=_integer("priority", entry.get("priority", 0), 0),
        ttl_ms=None if ttl_ms is None else _integer("ttl_ms", ttl_ms, 0),
        keep=Keep(entry.get("keep", "all")),
        encoding=Encoding(entry.get("encoding", "raw")),
        dtype=str(entry.get("dtype", "uint8")),
    )
    # One object for all frames alike: a trace has few kinds and many frames.
    return TraceFrame(time_s, stream, kinds.setdefault(kind, kind))


def _integer(name: str, value: object, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= _MAX_U32:
        raise ValueError(f"{name} holds {value!r}: expected a whole number from {lowest}")
    return value
