"""Message parts to a header map and back: the only place that runs msgpack on a peer's bytes.

Not here: what the fields mean (``frames``, ``results``, ``peers``), sockets.

Theory of operation. A header is refused before anything is built from it. ``unpack_header`` checks the
sizes of the parts, then walks the header with msgpack's own ``skip``, which follows the structure at C
speed and builds nothing: when the walk ends at the last byte, every length that the header claims is
backed by real bytes, so what ``unpackb`` then allocates is a small multiple of the header's size. Without
the walk a few kilobytes of nested array heads, each claiming as many items as the message has bytes,
would make ``unpackb`` allocate a list for each. Depth is checked in the same walk (see ``_walk``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import msgpack  # type: ignore[import-untyped]  # it ships no stubs; nobody else imports it

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.messages import Buffer, Limits

#: Below this size the walk is left out: the worst a header of this size can make unpackb claim is a list
#: of 512 pointers for each of about 340 nested array heads, 1.4 MB, gone when the call returns.
_SMALL_HEADER_BYTES: Final = 512

#: A header in one part that is larger than this is searched for a top-level ``data`` to cut out, so
#: that pixels are neither walked nor copied. Below it, the copy is cheaper than the search.
_CARVE_BYTES: Final = 4096

#: A frame has about twenty keys; more pairs than this at the top level end the search for ``data``.
_MAX_CARVE_PAIRS: Final = 64

#: First bytes of a msgpack array or map (fixmap, fixarray, array16/32, map16/32).
_CONTAINER_HEADS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])

_DATA_KEYS: Final = (b"\xa4data", b"\xd9\x04data")


def pack(value: object) -> bytes:
    """Return a value as msgpack; ValueError, TypeError or OverflowError for what it has no type for."""
    packed: bytes = msgpack.packb(value)
    return packed


def part_bytes(part: Buffer) -> int:
    """Return the size of one part in bytes (``len`` of a memoryview counts its first axis)."""
    return part.nbytes if type(part) is memoryview else len(part)


def unpack_header(parts: Sequence[Buffer], limits: Limits) -> dict[Any, Any]:
    """Return the header map of a message, refusing it before allocation when it breaks a limit.

    A ``data`` field (single-part frames) comes back as bytes or memoryview whether it was sent as msgpack
    bin or, by a producer that still writes the old raw format, as str: the bytes are the same, and
    no content makes a difference.

    Raises RemoteProtocolError: message_too_large, part_count, bad_msgpack, too_deep, trailing_bytes.
    """
    if not parts:
        raise RemoteProtocolError(Code.PART_COUNT, "a message has at least one part, this one has 0")
    total_bytes = 0
    for part in parts:
        total_bytes += part.nbytes if type(part) is memoryview else len(part)
    if total_bytes > limits.max_message_bytes:
        raise RemoteProtocolError(
            Code.MESSAGE_TOO_LARGE,
            f"the message has {total_bytes} bytes, "
            f"the limit is {limits.max_message_bytes} (max_message_bytes)",
        )
    head = parts[0]
    payload: memoryview | None = None
    if len(parts) == 1 and total_bytes > _CARVE_BYTES:
        head, payload = _carve_data(head, limits)
    header_bytes = part_bytes(head)
    if header_bytes > limits.max_header_bytes:
        raise RemoteProtocolError(
            Code.MESSAGE_TOO_LARGE,
            f"the header has {header_bytes} bytes beside its payload, the limit is {limits.max_header_bytes} "
            "(max_header_bytes)",
        )
    # Headers are small: own them, so that no later write to a shared buffer can change what was checked.
    header = _unpack(bytes(head), limits)
    if payload is not None:
        header["data"] = payload
    return header


def _unpack(head: bytes, limits: Limits) -> dict[Any, Any]:
    """Walk ``head`` when it is worth it, unpack it, and demand a map."""
    # Bytes that may start a container are an upper bound of the depth: most single frames stop here.
    heads_count = len(head) - len(head.translate(None, _CONTAINER_HEADS))
    try:
        if heads_count > limits.max_depth or len(head) > _SMALL_HEADER_BYTES:
            _walk(head, limits)
        try:
            header = _UNPACKB(head)
        except UnicodeDecodeError:
            header = _unpack_old_raw(head)
    except RemoteProtocolError:
        raise
    except (ValueError, msgpack.OutOfData) as error:
        _refuse(error, head, limits)
    if type(header) is not dict:
        raise RemoteProtocolError(Code.BAD_MSGPACK, f"the header is a {type(header).__name__}, not a map")
    return header


def _refuse(error: Exception, head: bytes, limits: Limits) -> NoReturn:
    """Turn an error of the msgpack library into ours; its text stays here."""
    if isinstance(error, msgpack.StackError):
        raise RemoteProtocolError(
            Code.TOO_DEEP, f"the header is nested deeper than {limits.max_depth} levels (max_depth)"
        ) from None
    if isinstance(error, msgpack.ExtraData):
        raise RemoteProtocolError(
            Code.TRAILING_BYTES, f"{len(error.extra)} bytes follow the header in a part of {len(head)} bytes"
        ) from None
    if isinstance(error, UnicodeError):
        raise RemoteProtocolError(Code.BAD_MSGPACK, "a text in the header is not UTF-8") from None
    raise RemoteProtocolError(
        Code.BAD_MSGPACK,
        f"the header of {len(head)} bytes is not one whole msgpack map with text keys and no extension types",
    ) from None


def _refuse_extension(_code: int, _data: bytes) -> NoReturn:
    raise ValueError("extension types have no place in a header")


def _unpackb_with(unicode_errors: str) -> Callable[[bytes], object]:
    def unpackb(head: bytes) -> object:
        return msgpack.unpackb(
            head,
            strict_map_key=True,
            unicode_errors=unicode_errors,
            max_ext_len=0,  # refuses timestamps, which never reach ext_hook
            ext_hook=_refuse_extension,
        )

    return unpackb


_UNPACKB: Final = _unpackb_with("strict")
#: Keeps each byte that is not UTF-8 as a lone surrogate (PEP 383), so that it can be given back exactly.
_UNPACKB_ESCAPED: Final = _unpackb_with("surrogateescape")


def _unpack_old_raw(head: bytes) -> object:
    """Unpack a header in which some text is not UTF-8, which is fine for ``data`` and nothing else.

    The raw format of msgpack before 2013 has one type for text and bytes. Its producers are accepted
    whatever the bytes are: here ``data`` gets its bytes back and everything else must still be text.
    """
    header = _UNPACKB_ESCAPED(head)
    if type(header) is not dict:
        raise ValueError("not a map")
    entries = header.get("frames")
    held = [(entry, entry["data"]) for entry in _entries_with_data(header, entries)]
    for entry, _data in held:
        entry["data"] = None
    msgpack.packb(header)  # raises UnicodeEncodeError, a ValueError, at a surrogate that is left
    for entry, data in held:
        entry["data"] = data.encode("utf-8", "surrogateescape")
    return header


def _entries_with_data(header: dict[Any, Any], entries: object) -> list[dict[Any, Any]]:
    candidates = [header, *entries] if type(entries) is list else [header]
    return [entry for entry in candidates if type(entry) is dict and type(entry.get("data")) is str]


# -- the walk ----------------------------------------------------------------------------------------


def _new_unpacker(size_bytes: int) -> msgpack.Unpacker:
    # read_size only sizes the first buffer; its default of 1 MiB would be allocated for every header.
    return msgpack.Unpacker(read_size=1, max_buffer_size=size_bytes)


def _is_depth_accepted(depth: int) -> bool:
    unpacker = _new_unpacker(depth + 1)
    unpacker.feed(b"\x91" * depth + b"\xc0")
    try:
        unpacker.skip()
    except msgpack.StackError:
        return False
    return True


def stack_capacity(is_accepted: Callable[[int], bool], module: str) -> int:
    """Find how many containers msgpack's C unpacker holds open at once (1024 in msgpack 1.x).

    Raises ImportError for the pure Python fallback, whose limit moves with the caller's own stack.
    """
    if module.endswith("fallback"):
        raise ImportError(
            "headrace needs msgpack's C extension and found only its pure Python fallback: "
            "install a msgpack wheel for this Python and unset MSGPACK_PUREPYTHON"
        )
    low, high = 1, 2
    while is_accepted(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_accepted(middle) else (low, middle)
    return low


_STACK_CAPACITY: Final = stack_capacity(_is_depth_accepted, msgpack.Unpacker.__module__)


def _walk(head: bytes, limits: Limits) -> None:
    """Follow the header's structure to its last byte without building it.

    Depth: the C unpacker keeps open containers on a stack of fixed size and raises StackError when it
    is full. Opening ``capacity - max_depth`` one-item arrays in front of the header leaves it exactly
    ``max_depth`` levels, at about 2 microseconds a message. A walk in Python cost more per frame than
    all of the rest of decoding.
    """
    prefix = b"\x91" * max(0, _STACK_CAPACITY - limits.max_depth)
    unpacker = _new_unpacker(len(prefix) + len(head))
    unpacker.feed(prefix + head)
    unpacker.skip()
    extra_bytes = len(prefix) + len(head) - unpacker.tell()
    if extra_bytes:
        raise RemoteProtocolError(
            Code.TRAILING_BYTES, f"{extra_bytes} bytes follow the header in a part of {len(head)} bytes"
        )


# -- single-part frames ------------------------------------------------------------------------------


def _carve_data(part: Buffer, limits: Limits) -> tuple[Buffer, memoryview | None]:
    """Cut a top-level ``data`` out of a header: returns the header with nil in its place, and its bytes.

    The bytes are a view of ``part``, not a copy. Where there is no such field, or the part is no map
    at all, the part comes back as it was: the ordinary path then finds the right words for it.
    """
    view = memoryview(part)
    if not view.contiguous:
        return part, None
    view = view.cast("B")
    try:
        span = _find_data(view)
    except (ValueError, msgpack.OutOfData):
        return part, None
    if span is None:
        return part, None
    start, end = span
    text_start = start + _raw_head_bytes(view[start])
    rest_bytes = start + 1 + len(view) - end
    if rest_bytes > limits.max_header_bytes:
        return part, None
    return b"".join((view[:start], b"\xc0", view[end:])), view[text_start:end]


def _find_data(view: memoryview) -> tuple[int, int] | None:
    """Return where the value of the last ``data`` key starts and ends; None if it is no bin or str."""
    unpacker = _new_unpacker(len(view))
    unpacker.feed(view)
    span: tuple[int, int] | None = None
    for _ in range(min(unpacker.read_map_header(), _MAX_CARVE_PAIRS)):
        key_start = unpacker.tell()
        unpacker.skip()
        start = unpacker.tell()
        unpacker.skip()
        if bytes(view[key_start : min(start, key_start + 6)]) in _DATA_KEYS and start - key_start <= 6:
            span = (start, unpacker.tell()) if _raw_head_bytes(view[start]) else None
    return span


def _raw_head_bytes(first: int) -> int:
    """Return how many bytes stand before the content of a bin or str that starts with ``first``; else 0."""
    if 0xA0 <= first <= 0xBF:  # fixstr
        return 1
    return {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xD9: 2, 0xDA: 3, 0xDB: 5}.get(first, 0)
