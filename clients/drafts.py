"""A push before it has a number: every argument checked, nothing copied yet.

Not here: the numbering and the window (``producer``), what arrays become (``arrays``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from headrace.clients import arrays
from headrace.clients.producer_session import FRAME_HEADER_BYTES
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Buffer, Color, Encoding, Frame, Keep, Limits, Value

MAX_STREAM_BYTES = 128
MAX_TTL_MS = 86_400_000

#: What one more input adds to a header: its name, dtype and shape.
INPUT_HEADER_BYTES = 256

_I64_MAX = 2**63 - 1

MemberT = TypeVar("MemberT", Color, Keep)


@dataclass(frozen=True, slots=True)
class Draft:
    """All of a frame but its number. ``prepared.data`` still views the caller's memory."""

    prepared: arrays.Prepared
    stream: str
    model: str
    color: Color
    priority: int
    ttl_ms: int | None
    keep: Keep
    pts_ns: int | None
    meta: dict[str, Value] | None
    meta_bytes: int

    @property
    def nbytes(self) -> int:
        return self.prepared.nbytes

    @property
    def header_bytes(self) -> int:
        """The room its header takes in a message, at most."""
        return FRAME_HEADER_BYTES + self.meta_bytes + INPUT_HEADER_BYTES * len(self.prepared.inputs)

    def frame(self, payload: Buffer, epoch: int, seq: int) -> Frame:
        """Return the frame, with ``payload`` in place of the caller's memory."""
        prepared = self.prepared
        return Frame(
            self.stream, payload, prepared.nbytes, prepared.shape, prepared.dtype, prepared.encoding,
            self.color, seq, epoch, self.model, self.priority, self.ttl_ms, self.keep, self.pts_ns,
            self.meta, prepared.inputs,
        )  # fmt: skip


def draft(
    image: object,
    limits: Limits,
    *,
    stream: str,
    model: str = "",
    color: Color | str = Color.RGB,
    priority: int = 0,
    ttl_ms: int | None = None,
    keep: Keep | str = Keep.ALL,
    pts_ns: int | None = None,
    meta: Mapping[str, object] | None = None,
    encoding: Encoding | str | None = None,
) -> Draft:
    """Check every argument of a push; raise InvalidFrameError, which names the one that is wrong."""
    _check_stream(stream)
    prepared = arrays.prepare(image, encoding=encoding)
    if prepared.nbytes > limits.max_frame_bytes:
        raise InvalidFrameError(
            Code.FRAME_TOO_LARGE, f"{prepared.nbytes} bytes; the broker's limit is {limits.max_frame_bytes}"
        )
    plain_meta, meta_bytes = arrays.plain_meta(meta, max_bytes=limits.max_meta_bytes)
    if not isinstance(model, str):
        raise InvalidFrameError(Code.BAD_FIELD, f"model: {model!r} is not a string")
    return Draft(
        prepared=prepared,
        stream=stream,
        model=model,
        color=_member(Color, color, Code.BAD_COLOR),
        priority=arrays.checked_int(priority, "priority", 0, limits.priority_levels - 1),
        ttl_ms=None if ttl_ms is None else arrays.checked_int(ttl_ms, "ttl_ms", 1, MAX_TTL_MS),
        keep=_member(Keep, keep, Code.BAD_FIELD),
        pts_ns=None if pts_ns is None else arrays.checked_int(pts_ns, "pts_ns", -_I64_MAX - 1, _I64_MAX),
        meta=plain_meta,
        meta_bytes=meta_bytes,
    )


def _check_stream(stream: object) -> None:
    if not isinstance(stream, str):
        raise InvalidFrameError(Code.BAD_STREAM, f"stream: {stream!r} is not a string")
    try:
        size = len(stream.encode())
    except UnicodeEncodeError:
        raise InvalidFrameError(Code.BAD_STREAM, f"stream {stream!r} can't be written as UTF-8") from None
    if not 1 <= size <= MAX_STREAM_BYTES or "\0" in stream:
        raise InvalidFrameError(
            Code.BAD_STREAM, f"stream {stream!r}: {size} bytes; 1 to {MAX_STREAM_BYTES} without NUL are right"
        )


def _member(kind: type[MemberT], value: str, code: Code) -> MemberT:
    try:
        return kind(value)
    except ValueError:
        raise InvalidFrameError(code, f"{value!r} is not one of {', '.join(kind)}") from None
