"""One outcome as the bytes that the journal keeps: what the protocol codec makes of it, in one piece.

Layout, little-endian: crc32 of all that follows (4 bytes), number of parts (4), length of each part (8 each),
the parts themselves. SQLite has no checksum of its own on a row's content, so that without this one a flipped
bit could be replayed as a result.
"""

from __future__ import annotations

import struct
import zlib

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import Limits, Outcome, Outcomes

_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def pack(outcome: Outcome) -> bytes:
    """Return an outcome, payloads included, as bytes."""
    parts = codec.encode(Outcomes((outcome,)))
    lengths = [memoryview(part).nbytes for part in parts]
    content = b"".join((_COUNT.pack(len(parts)), struct.pack(f"<{len(parts)}Q", *lengths), *parts))
    return _CRC.pack(zlib.crc32(content)) + content


def unpack(body: bytes, limits: Limits) -> Outcome | None:
    """Return the outcome, None when the bytes are damaged or beyond the limits."""
    view = memoryview(body)
    if len(view) < _CRC.size + _COUNT.size or _CRC.unpack_from(view)[0] != zlib.crc32(view[_CRC.size :]):
        return None
    (count,) = _COUNT.unpack_from(view, _CRC.size)
    at = _CRC.size + _COUNT.size
    if count * _LENGTH.size > len(view) - at:
        return None
    lengths = struct.unpack_from(f"<{count}Q", view, at)
    at += count * _LENGTH.size
    if sum(lengths) != len(view) - at:
        return None
    parts = []
    for length in lengths:
        parts.append(view[at : at + length])
        at += length
    try:
        message = codec.decode(parts, limits)
    except RemoteProtocolError:
        return None
    if not isinstance(message, Outcomes) or len(message.outcomes) != 1:
        return None
    return message.outcomes[0]
