"""Size of a PNG or JPEG read from its own header, without decoding a pixel.

The broker uses it to know a frame's shape and to refuse a decompression bomb before anything is
allocated. What it accepts may still turn out damaged: that is found by the worker's decoder.

Sources: PNG is ISO/IEC 15948 (W3C PNG specification, sections 5.2 and 11.2.2); JPEG markers are
ITU-T T.81 annex B; orientation is Exif 2.32 tag 0x0112 in a TIFF 6.0 directory.
"""

from __future__ import annotations

import struct
from typing import Final

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.messages import Buffer, Encoding

_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_SIGNATURE: Final = b"\xff\xd8\xff"
_PNG_HEADER_BYTES: Final = 33  # signature, then the IHDR chunk: length, type, 13 bytes, CRC

#: PNG colour type -> (channels as decoded, allowed bit depths). A palette decodes to RGB.
_PNG_COLOR_TYPES: Final = {
    0: (1, (1, 2, 4, 8, 16)),
    2: (3, (8, 16)),
    3: (3, (1, 2, 4, 8)),
    4: (2, (8, 16)),
    6: (4, (8, 16)),
}

#: Segments looked at before the frame header. Real files have some ten (a large ICC profile a few
#: hundred of 64 KiB); the bound keeps the scan short for any bytes.
_MAX_JPEG_SEGMENTS: Final = 1024
#: Fill bytes (0xFF) allowed before one marker.
_MAX_FILL_BYTES: Final = 64
#: SOF0 to SOF15 without DHT (C4), JPG (C8) and DAC (CC), which share the number range.
_SOF_MARKERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Markers without a length: TEM and RST0 to RST7.
_BARE_MARKERS: Final = frozenset({0x01, *range(0xD0, 0xD8)})
_APP1: Final = 0xE1
_SOS: Final = 0xDA
_EOI: Final = 0xD9

_ORIENTATION_TAG: Final = 0x0112
_TIFF_SHORT: Final = 3
#: Entries looked at in the first TIFF directory.
_MAX_TIFF_ENTRIES: Final = 512


def read_image_shape(buffer: Buffer, encoding: Encoding) -> tuple[int, int, int]:
    """Return (height, width, channels) of an encoded image, with EXIF orientation applied.

    ``channels`` is 1 gray, 2 gray and alpha, 3 colour, 4 colour and alpha (or CMYK in a JPEG).

    Raises RemoteProtocolError: bad_encoding when the bytes are an image of the other kind, bad_image
    when they are no readable header of the declared kind.
    """
    view = memoryview(buffer)
    magic = bytes(view[:8])
    found = _kind_of(magic)
    if found is None:
        raise _bad_image(f"the payload does not start like a {encoding} image: {magic.hex() or 'no bytes'}")
    if found is not encoding:
        raise RemoteProtocolError(
            Code.BAD_ENCODING, f"the payload is a {found} image, the header says encoding {encoding}"
        )
    return _read_png(view) if found is Encoding.PNG else _read_jpeg(view)


def _kind_of(magic: bytes) -> Encoding | None:
    if magic == _PNG_SIGNATURE:
        return Encoding.PNG
    return Encoding.JPEG if magic.startswith(_JPEG_SIGNATURE) else None


def _bad_image(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(Code.BAD_IMAGE, message)


def _read_png(view: memoryview) -> tuple[int, int, int]:
    if len(view) < _PNG_HEADER_BYTES:
        raise _bad_image(f"the PNG ends inside its header: {len(view)} bytes of {_PNG_HEADER_BYTES}")
    length, kind, width, height, depth, color_type, compression, filtering, interlace = struct.unpack(
        ">I4sIIBBBBB", view[8:29]
    )
    if length != 13 or kind != b"IHDR":
        raise _bad_image("the PNG does not start with an IHDR chunk of 13 bytes")
    channels, depths = _PNG_COLOR_TYPES.get(color_type, (0, ()))
    if depth not in depths or compression != 0 or filtering != 0 or interlace > 1:
        raise _bad_image(
            f"the PNG declares colour type {color_type}, bit depth {depth}, compression {compression}, "
            f"filter {filtering}, interlace {interlace}: no such PNG exists"
        )
    if not (0 < width < 2**31 and 0 < height < 2**31):
        raise _bad_image(f"the PNG declares {width}x{height} pixels")
    return height, width, channels


def _read_jpeg(view: memoryview) -> tuple[int, int, int]:
    position = 2
    orientation = 1
    for _ in range(_MAX_JPEG_SEGMENTS):
        marker, position = _next_marker(view, position)
        if marker in _BARE_MARKERS:
            continue
        if marker in (_SOS, _EOI):
            raise _bad_image("the JPEG has no frame header before its image data")
        if position + 2 > len(view):
            raise _bad_image("the JPEG ends inside a segment header")
        length = int.from_bytes(view[position : position + 2], "big")
        end = position + length
        if length < 2 or end > len(view):
            raise _bad_image(
                f"a JPEG segment of {length} bytes at offset {position} does not fit in {len(view)} bytes"
            )
        segment = view[position + 2 : end]
        if marker in _SOF_MARKERS:
            return _read_frame_header(segment, orientation)
        if marker == _APP1 and orientation == 1:
            orientation = _read_orientation(segment)
        position = end
    raise _bad_image(f"the JPEG has no frame header in its first {_MAX_JPEG_SEGMENTS} segments")


def _next_marker(view: memoryview, position: int) -> tuple[int, int]:
    """Return the marker at ``position`` and the offset behind it; fill bytes may stand in front."""
    window = bytes(view[position : position + _MAX_FILL_BYTES])
    code = window.lstrip(b"\xff")[:1]
    fill_count = window.find(code) if code else len(window)
    if not code or fill_count == 0:
        raise _bad_image(f"no JPEG marker at offset {position}")
    return code[0], position + fill_count + 1


def _read_frame_header(segment: memoryview, orientation: int) -> tuple[int, int, int]:
    if len(segment) < 6:
        raise _bad_image(f"the JPEG's frame header has {len(segment)} bytes")
    precision, height, width, components = struct.unpack(">BHHB", segment[:6])
    if components not in (1, 3, 4) or len(segment) != 6 + 3 * components:
        raise _bad_image(f"the JPEG's frame header of {len(segment)} bytes declares {components} components")
    if precision not in (8, 12, 16) or width == 0 or height == 0:
        # Height 0 means "told later, by a DNL marker" (T.81 B.2.5): decoders do not support it either.
        raise _bad_image(f"the JPEG declares {width}x{height} pixels of {precision} bits")
    return (width, height, components) if orientation >= 5 else (height, width, components)


def _read_orientation(segment: memoryview) -> int:
    """Return the EXIF orientation 1 to 8; 1 when there is none or it can't be read, as decoders do."""
    if bytes(segment[:6]) != b"Exif\0\0":
        return 1
    tiff = segment[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None or len(tiff) < 8:
        return 1
    (directory,) = struct.unpack(f"{order}I", tiff[4:8])
    if directory + 2 > len(tiff):
        return 1
    (entry_count,) = struct.unpack(f"{order}H", tiff[directory : directory + 2])
    for index in range(min(entry_count, _MAX_TIFF_ENTRIES)):
        start = directory + 2 + 12 * index
        if start + 12 > len(tiff):
            break
        tag, kind, value_count, value = struct.unpack(f"{order}HHIH", tiff[start : start + 10])
        if tag == _ORIENTATION_TAG:
            return value if kind == _TIFF_SHORT and value_count == 1 and 1 <= value <= 8 else 1
    return 1
