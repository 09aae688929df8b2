"""Turns JPEG and PNG payloads into pixels, or into a reason why not.

The rules (docs/protocol.md states them for users):

- What comes back is uint8 [height, width, 3] in BGR order. Gray and palette images become colour,
  alpha is dropped (not blended), 16 bits become 8 by dropping the low byte, CMYK is converted.
- The EXIF orientation of a JPEG is applied; that of a PNG is not, as the broker reads a PNG's size
  from IHDR alone.
- An image that is not all there is an error ``damaged_image``. One exception: a JPEG that lacks nothing
  but its end marker, as some cameras write them, is used and flagged ``image_truncated``.

How lost data is found. A PNG has a checksum on each chunk and on its pixels. A JPEG has none, and a
decoder fills what is missing with a flat colour. So when the end marker is missing, or the bottom
right corner is flat, the image is decoded twice more with two different continuations in place of what
could be missing: only if pixels depend on the continuation was something missing. The image itself is
never one of those two, and no pixel of another image can show: the size is known from the header before
anything is allocated, and an image that is short is refused whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np

from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Encoding, Frame, Limits
from headrace.workers.jpeg_scan import JpegScan, scan_jpeg
from headrace.workers.pixels import Pixels

FLAG_TRUNCATED = "image_truncated"

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_START = b"\xff\xd8"
_JPEG_END = b"\xff\xd9"

#: Two continuations that no image agrees with at once: zero bits, and bits without a pattern. Without
#: 0xFF, which would start a marker. One block of 64 coefficients takes less than 256 bytes.
_CONTINUATION_ZEROS = bytes(256)
_CONTINUATION_MIXED = bytes((73 * index + 41) % 251 for index in range(256))

#: Zero bytes at the very end of a JPEG without end marker: real entropy-coded data does not end so (it
#: is padded with one bits), a file whose tail was never written does.
_ZERO_TAIL = bytes(16)

#: Rows and columns of the bottom right corner that must all be equal to look like a decoder's filling.
_CORNER = 4

#: OpenCV's LOG_LEVEL_SILENT, which has no name in the older releases.
_OPENCV_SILENT = 0

#: Chunks of one PNG: a 64 MiB file in the usual 8 KiB chunks has 8,192.
MAX_PNG_CHUNKS = 100_000


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """``pixels`` is uint8 [height, width, 3], BGR. ``flags`` are remarks for the frame's outcome."""

    pixels: Pixels
    flags: tuple[str, ...] = ()


def decode_image(frame: Frame, data: memoryview, limits: Limits) -> DecodedImage:
    """Decode the JPEG or PNG payload of ``frame``.

    Raises InvalidFrameError: ``empty_payload``, ``bad_image`` (no image, or another size than its header
    told the broker), ``bad_encoding`` (a PNG sent as JPEG or the reverse), ``image_too_large``,
    ``damaged_image``.
    """
    if not len(data):
        raise InvalidFrameError(Code.EMPTY_PAYLOAD, "the image has no bytes")
    _check_magic(frame.encoding, data)
    if frame.encoding is Encoding.JPEG:
        return _decode_jpeg(frame, data, limits)
    return _decode_png(frame, data, limits)


def silence_codecs() -> None:
    """Keep OpenCV and the libjpeg and libpng inside it from writing a line per damaged image.

    What they would say is in the frame's outcome, counted and bounded. They print to C's ``stderr``
    stream with no way to switch it off, so that stream is pointed at /dev/null; file descriptor 2, on
    which our log, tracebacks and the C library's own abort messages go, stays as it is. For a worker
    process only: it changes the process. Where the C library has no such symbol nothing happens.
    """
    # OpenCV 4.10 to 4.12 have it at the top, later ones in utils.logging.
    set_level: Callable[[int], object] = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel
    set_level(_OPENCV_SILENT)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        silent = libc.fopen(os.devnull.encode(), b"w")
        if silent:
            ctypes.c_void_p.in_dll(libc, "stderr").value = silent


def _check_magic(encoding: Encoding, data: memoryview) -> None:
    found = None
    if bytes(data[:2]) == _JPEG_START:
        found = Encoding.JPEG
    elif bytes(data[:8]) == _PNG_SIGNATURE:
        found = Encoding.PNG
    if found is None:
        raise InvalidFrameError(Code.BAD_IMAGE, f"the payload is no {encoding.value} image")
    if found is not encoding:
        raise InvalidFrameError(
            Code.BAD_ENCODING, f"sent as {encoding.value}, but it is a {found.value} image"
        )


def _check_size(frame: Frame, height: int, width: int, limits: Limits, *, may_turn: bool) -> None:
    """Compare the image's own header with what the broker read, before pixels are allocated."""
    if height * width > limits.max_pixels:
        raise InvalidFrameError(
            Code.IMAGE_TOO_LARGE, f"{height}x{width} is above the limit of {limits.max_pixels} pixels"
        )
    told = tuple(frame.shape[:2])
    if told != (height, width) and not (may_turn and told == (width, height)):
        raise InvalidFrameError(Code.BAD_IMAGE, f"the image is {height}x{width}, its frame said {told}")


def _decode_jpeg(frame: Frame, data: memoryview, limits: Limits) -> DecodedImage:
    scan = scan_jpeg(data)
    _check_size(frame, scan.height, scan.width, limits, may_turn=True)
    if scan.has_end:
        pixels = _decode(data, cv2.IMREAD_COLOR)
        if _has_flat_corner(pixels) and _depends_on_more(data, scan):
            raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG has less data than its pixels need")
        return DecodedImage(_oriented_as_told(frame, pixels))
    entropy = _without_lone_ff(data, scan)
    if entropy[-len(_ZERO_TAIL) :] == _ZERO_TAIL or not scan.is_progression_complete:
        raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG breaks off before its end")
    if _depends_on_more(data, scan):
        raise InvalidFrameError(Code.DAMAGED_IMAGE, "JPEG breaks off before its last pixel")
    pixels = _decode(entropy + _JPEG_END, cv2.IMREAD_COLOR)
    return DecodedImage(_oriented_as_told(frame, pixels), (FLAG_TRUNCATED,))


def _without_lone_ff(data: memoryview, scan: JpegScan) -> bytes:
    """Return the file up to the end of its scan data, without the first half of a cut-off marker."""
    entropy = bytes(data[: scan.data_end])
    return entropy[:-1] if entropy.endswith(b"\xff") else entropy


def _depends_on_more(data: memoryview, scan: JpegScan) -> bool:
    """Tell whether the last scan lacks data: decode it with two continuations and compare."""
    entropy = _without_lone_ff(data, scan)
    first = _decode(entropy + _CONTINUATION_ZEROS + _JPEG_END, cv2.IMREAD_COLOR)
    second = _decode(entropy + _CONTINUATION_MIXED + _JPEG_END, cv2.IMREAD_COLOR)
    return not np.array_equal(first, second)


def _has_flat_corner(pixels: Pixels) -> bool:
    corner = pixels[-_CORNER:, -_CORNER:]
    return bool((corner == corner[-1, -1]).all())


def _oriented_as_told(frame: Frame, pixels: Pixels) -> Pixels:
    """Check that OpenCV turned the image as the broker expected from the same EXIF tag."""
    if pixels.shape[:2] != tuple(frame.shape[:2]):
        raise InvalidFrameError(
            Code.BAD_IMAGE,
            f"the image decodes to {pixels.shape[:2]}, its frame said {frame.shape[:2]}",
        )
    return pixels


def _decode_png(frame: Frame, data: memoryview, limits: Limits) -> DecodedImage:
    height, width = _check_png(data)
    _check_size(frame, height, width, limits, may_turn=False)
    return DecodedImage(_decode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION))


def _check_png(data: memoryview) -> tuple[int, int]:
    """Check every chunk's checksum and that IHDR comes first, IDAT is there and IEND ends it.

    Whether the pixel data itself is complete is checked by libpng through the zlib checksum: it fails,
    and does not fill (the tests hold it to that). Returns height and width.
    """
    position, has_pixels, size = len(_PNG_SIGNATURE), False, (0, 0)
    for index in range(MAX_PNG_CHUNKS):
        if position + 12 > len(data):
            raise InvalidFrameError(Code.DAMAGED_IMAGE, "PNG breaks off before its IEND chunk")
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise InvalidFrameError(Code.DAMAGED_IMAGE, "PNG breaks off inside a chunk")
        (stored,) = struct.unpack_from(">I", data, end - 4)
        if zlib.crc32(data[position + 4 : end - 4]) != stored:
            raise InvalidFrameError(Code.DAMAGED_IMAGE, f"PNG chunk {index} has a wrong checksum")
        if index == 0:
            if kind != b"IHDR" or length != 13:
                raise InvalidFrameError(Code.BAD_IMAGE, "PNG does not begin with its header")
            width, height = struct.unpack_from(">II", data, position + 8)
            size = (height, width)
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == b"IEND":
            if not has_pixels:
                raise InvalidFrameError(Code.DAMAGED_IMAGE, "PNG has no pixels")
            return size
        position = end
    raise InvalidFrameError(Code.DAMAGED_IMAGE, f"PNG has more than {MAX_PNG_CHUNKS} chunks")


def _decode(data: bytes | memoryview, flags: int) -> Pixels:
    """Let OpenCV decode; its two ways of failing (an exception, an empty result) become one."""
    try:
        # The stubs call the second type a union of all image types; what comes back is uint8 by the flags.
        pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        pixels = None
    if pixels is None or not pixels.size:
        raise InvalidFrameError(Code.DAMAGED_IMAGE, "the image can't be decoded")
    return cast("Pixels", pixels)
