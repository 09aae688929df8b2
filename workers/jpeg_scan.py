"""Reads the structure of a JPEG file without decoding it: is all of it there?

OpenCV can't be asked whether the data ran out: depending on its version it refuses every file without
an end marker, or fills the missing part and prints a line on stderr. This module finds what decides:
the end marker, where the entropy-coded data ends, and for a progressive file whether every coefficient
got its last bit. It does not decode: see ``decode`` for how lost data inside a scan is found.

Source: ITU-T T.81, annexes B (markers) and G (progressive scans).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.errors import Code, InvalidFrameError

_SOI = b"\xff\xd8"
_SOS, _EOI, _TEM = 0xDA, 0xD9, 0x01
_RESTARTS = range(0xD0, 0xD8)
#: Start-of-frame markers: C0..CF without DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})

#: A marker that ends entropy-coded data: not a stuffed byte (FF00), a restart (FFD0-7) or fill (FFFF).
_ENDING_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")

#: Segments of one file. A camera writes about 10, a progressive file of many scans about 50.
MAX_SEGMENTS = 10_000

_COEFFICIENTS = 64


@dataclass(slots=True)
class JpegScan:
    """What the markers say. ``data_end`` is the offset behind the last entropy-coded byte, where the
    end marker stands or should stand. ``height`` and ``width`` are as stored, before EXIF."""

    height: int = 0
    width: int = 0
    has_end: bool = False
    data_end: int = 0
    is_progressive: bool = False
    #: Per component: the lowest bit seen so far of each coefficient (None: no bit at all).
    bits: dict[int, list[int | None]] = field(default_factory=dict)

    @property
    def is_progression_complete(self) -> bool:
        """True when every coefficient of every component was sent down to its last bit."""
        return all(bit == 0 for component in self.bits.values() for bit in component)


def scan_jpeg(data: bytes | memoryview) -> JpegScan:
    """Walk the markers of a JPEG file.

    Raises InvalidFrameError ``bad_image`` for what is no JPEG at all, ``damaged_image`` for one whose
    marker structure breaks off or makes no sense before the first scan.
    """
    if bytes(data[:2]) != _SOI:
        raise InvalidFrameError(Code.BAD_IMAGE, "no JPEG start marker")
    scan = JpegScan()
    position, has_scan = 2, False
    for _ in range(MAX_SEGMENTS):
        position, marker = _next_marker(data, position)
        if marker is None or marker == _EOI:
            break
        if marker == _TEM or marker in _RESTARTS:
            continue
        segment = _segment(data, position)
        if segment is None:
            break
        position += len(segment) + 2
        if marker in _FRAMES:
            _read_frame(scan, marker, segment)
        elif marker == _SOS:
            _read_scan(scan, segment)
            has_scan = True
            found = _ENDING_MARKER.search(data, position)
            position = found.start() if found else len(data)
            scan.data_end = position
    else:
        raise InvalidFrameError(Code.DAMAGED_IMAGE, f"JPEG has more than {MAX_SEGMENTS} segments")
    if not has_scan or not scan.height or not scan.width:
        raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG ends before its pixels")
    scan.has_end = marker == _EOI
    return scan


def _next_marker(data: bytes | memoryview, position: int) -> tuple[int, int | None]:
    """Return the offset behind the next marker and its code; None at the end of the data."""
    length = len(data)
    if position >= length or data[position] != 0xFF:
        return position, None
    while position < length and data[position] == 0xFF:
        position += 1
    return (position + 1, data[position]) if position < length else (length, None)


def _segment(data: bytes | memoryview, position: int) -> bytes | None:
    """Return the body of the segment at ``position``, None when it is cut off."""
    if position + 2 > len(data):
        return None
    size = int.from_bytes(data[position : position + 2], "big")
    if size < 2 or position + size > len(data):
        return None
    return bytes(data[position + 2 : position + size])


def _read_frame(scan: JpegScan, marker: int, segment: bytes) -> None:
    if len(segment) < 6 or len(segment) < 6 + 3 * segment[5]:
        raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG frame header is too short")
    scan.height = int.from_bytes(segment[1:3], "big")
    scan.width = int.from_bytes(segment[3:5], "big")
    scan.is_progressive = marker in _PROGRESSIVE
    scan.bits = {segment[6 + 3 * index]: [None] * _COEFFICIENTS for index in range(segment[5])}


def _read_scan(scan: JpegScan, segment: bytes) -> None:
    """Note which bits of which coefficients this scan brings (T.81 B.2.3: Ns, components, Ss, Se, Ah/Al)."""
    count = segment[0] if segment else 0
    if len(segment) < 4 + 2 * count:
        raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG scan header is too short")
    first, last, approximation = segment[1 + 2 * count : 4 + 2 * count]
    if not scan.is_progressive:
        first, last, approximation = 0, _COEFFICIENTS - 1, 0
    for index in range(count):
        component = scan.bits.get(segment[1 + 2 * index])
        if component is None:
            raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG scan names a component that it has not")
        for coefficient in range(first, min(last, _COEFFICIENTS - 1) + 1):
            component[coefficient] = approximation & 0x0F
