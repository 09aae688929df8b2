"""A push before it has a number: every argument checked, nothing copied yet.

Not here: the numbering and the window (``producer``), what arrays become (``arrays``).

A camera pushes the same words with each frame, and an array of the same form. ``Drafts`` remembers per stream
what it checked last, and checks again only what is not the very same object: a check costs more than all the
rest of a push.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Required, TypedDict, TypeVar

import numpy as np

from headrace.clients import arrays
from headrace.clients.producer_session import FRAME_HEADER_BYTES
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import (
    Buffer,
    Color,
    Encoding,
    Frame,
    Keep,
    Limits,
    Payload,
    TensorSpec,
    Value,
)
from headrace.protocol.per_frame import per_frame

MAX_STREAM_BYTES = 128
MAX_TTL_MS = 86_400_000

#: What one more input adds to a header: its name, dtype and shape.
INPUT_HEADER_BYTES = 256

#: Streams whose last words are remembered; beyond it all are forgotten and checked anew.
MAX_REMEMBERED = 1_024

_I64_MAX = 2**63 - 1

MemberT = TypeVar("MemberT", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Words:
    """What a push says beside its payload, checked."""

    stream: str
    model: str
    color: Color
    priority: int
    ttl_ms: int | None
    keep: Keep


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of a payload but its bytes."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding
    inputs: tuple[TensorSpec, ...]


@per_frame(frozen=True, slots=True)
class Draft:
    """All of a frame but its number. ``data`` still views the caller's memory."""

    data: Buffer
    form: Form
    words: Words
    pts_ns: int | None
    meta: dict[str, Value] | None
    header_bytes: int  # the room its header takes in a message, at most

    @property
    def nbytes(self) -> int:
        return self.form.nbytes

    def frame(self, payload: Payload, epoch: int, seq: int) -> Frame:
        """Return the frame, with ``payload`` in place of the caller's memory."""
        form, words = self.form, self.words
        return Frame(
            words.stream, payload, form.nbytes, form.shape, form.dtype, form.encoding, words.color, seq,
            epoch, words.model, words.priority, words.ttl_ms, words.keep, self.pts_ns, self.meta, form.inputs,
        )  # fmt: skip


class SlotOptions(TypedDict, total=False):
    """What ``Producer.slot`` takes of the options of ``Producer.push``: all that say nothing of its array."""

    stream: Required[str]
    model: str
    color: Color | str
    priority: int
    ttl_ms: int | None
    keep: Keep | str
    pts_ns: int | None
    meta: Mapping[str, object] | None


@dataclass(slots=True, eq=False)
class _Last:
    """The last push of a stream: its words as given, what they became, and the form of its array if that
    needed no conversion. Compared by identity: 1 and True are equal, and one of them is no priority."""

    limits: Limits
    model: object
    color: object
    priority: object
    ttl_ms: object
    keep: object
    words: Words
    dtype: np.dtype[np.generic] | None
    form: Form


class Drafts:
    """Makes drafts. Not thread-safe in what it remembers, and no worse for that: an entry is replaced as a
    whole, and never changed once others see it."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def draft(
        self,
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
        last = self._last.get(stream) if type(stream) is str else None
        if (
            last is None
            or last.limits is not limits
            or last.model is not model
            or last.color is not color
            or last.priority is not priority
            or last.ttl_ms is not ttl_ms
            or last.keep is not keep
        ):
            last = None
            words = _words(limits, stream, model, color, priority, ttl_ms, keep)
        else:
            words = last.words
        if (
            last is not None
            and type(image) is np.ndarray
            and image.dtype is last.dtype
            and image.shape == last.form.shape
            and encoding is None
            and image.flags.c_contiguous
        ):
            data: Buffer = image.data
            form = last.form
        else:
            prepared = arrays.prepare(image, encoding=encoding)
            data = prepared.data
            form = Form(prepared.nbytes, prepared.shape, prepared.dtype, prepared.encoding, prepared.inputs)
            if form.nbytes > limits.max_frame_bytes:
                text = f"{form.nbytes} bytes; the broker's limit is {limits.max_frame_bytes}"
                raise InvalidFrameError(Code.FRAME_TOO_LARGE, text)
            if len(self._last) >= MAX_REMEMBERED:
                self._last.clear()
            dtype = _plain_dtype(image, form)
            self._last[stream] = _Last(limits, model, color, priority, ttl_ms, keep, words, dtype, form)
        header_bytes = FRAME_HEADER_BYTES + INPUT_HEADER_BYTES * len(form.inputs)
        plain_meta = None
        if meta is not None:
            plain_meta, meta_bytes = arrays.plain_meta(meta, max_bytes=limits.max_meta_bytes)
            header_bytes += meta_bytes
        if pts_ns is not None:
            pts_ns = arrays.checked_int(pts_ns, "pts_ns", -_I64_MAX - 1, _I64_MAX)
        return Draft(data, form, words, pts_ns, plain_meta, header_bytes)


def _plain_dtype(image: object, form: Form) -> np.dtype[np.generic] | None:
    """Return the dtype of arrays that travel as they are; None where something has to be converted.

    memoryview has no half floats, so those take the long way."""
    if type(image) is not np.ndarray or form.encoding is not Encoding.RAW or form.inputs:
        return None
    dtype: np.dtype[np.generic] = image.dtype
    return dtype if dtype.isnative and dtype == dtype.newbyteorder("<") and dtype.char != "e" else None


def _words(
    limits: Limits, stream: object, model: object, color: str, priority: object, ttl_ms: object, keep: str
) -> Words:
    stream = _checked_stream(stream)
    if not isinstance(model, str):
        raise InvalidFrameError(Code.BAD_FIELD, f"model: {model!r} is not a string")
    return Words(
        stream=stream,
        model=model,
        color=_member(Color, color, Code.BAD_COLOR),
        priority=arrays.checked_int(priority, "priority", 0, limits.priority_levels - 1),
        ttl_ms=None if ttl_ms is None else arrays.checked_int(ttl_ms, "ttl_ms", 1, MAX_TTL_MS),
        keep=_member(Keep, keep, Code.BAD_FIELD),
    )


def _checked_stream(stream: object) -> str:
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
    return stream


def _member(kind: type[MemberT], value: str, code: Code) -> MemberT:
    try:
        return kind(value)
    except ValueError:
        raise InvalidFrameError(code, f"{value!r} is not one of {', '.join(kind)}") from None
