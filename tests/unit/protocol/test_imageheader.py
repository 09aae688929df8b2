"""Image headers: real files of many kinds, hostile ones, and agreement with a decoder."""

from __future__ import annotations

import io
import random
import struct

import cv2
import hr_wire
import numpy as np
import pytest
from PIL import Image

from headrace.errors import RemoteProtocolError
from headrace.protocol.imageheader import read_image_shape
from headrace.protocol.messages import Encoding


def code_of(data: bytes, encoding: Encoding) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        read_image_shape(data, encoding)
    return caught.value.code


def saved(mode: str, kind: str, size: tuple[int, int] = (50, 30), **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("I;16", 1), ("P", 3), ("RGB", 3), ("LA", 2), ("RGBA", 4)]
)
def test_png_kinds(mode, channels):
    """Channels are those that decoding gives: a palette is colour."""
    assert read_image_shape(saved(mode, "png"), Encoding.PNG) == (30, 50, channels)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("CMYK", 4)])
@pytest.mark.parametrize("is_progressive", [False, True], ids=["baseline", "progressive"])
def test_jpeg_kinds(mode, channels, is_progressive):
    """Baseline and progressive frame headers are read alike."""
    data = saved(mode, "jpeg", progressive=is_progressive)

    assert read_image_shape(data, Encoding.JPEG) == (30, 50, channels)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"], ids=["little-endian", "big-endian"])
def test_exif_orientation_gives_the_shape_that_the_decoder_gives(orientation, order):
    """IMG-04: one rule, the decoder's own: height and width are those of the upright picture."""
    plain = saved("RGB", "jpeg")
    data = plain[:2] + hr_wire.exif_segment(orientation, order) + plain[2:]
    decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)

    assert read_image_shape(data, Encoding.JPEG) == decoded.shape


def test_exif_behind_an_icc_profile_is_found():
    """Real files carry other segments first: comments, ICC profiles, thumbnails."""
    exif = Image.Exif()
    exif[0x0112] = 8
    data = saved("RGB", "jpeg", icc_profile=bytes(100_000), exif=exif, comment=b"hello")

    assert read_image_shape(data, Encoding.JPEG) == (50, 30, 3)


TIFF_RUBBISH = {
    "no exif": b"http://ns.adobe.com/xap/1.0/\0",
    "no tiff": b"Exif\0\0",
    "byte order": b"Exif\0\0XX*\0\x08\0\0\0",
    "tiff cut": b"Exif\0\0II*\0\x08",
    "directory outside": b"Exif\0\0II*\0\xff\xff\xff\xff",
    "entries outside": b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
    "no orientation": b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0100, 3, 1, 6, 0),
    "wrong type": b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 4, 1, 6, 0),
    "wrong count": b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 2, 6, 0),
    "orientation 0": b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, 0, 0),
    "orientation 9": b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, 9, 0),
}


@pytest.mark.parametrize("name", TIFF_RUBBISH)
def test_exif_that_can_not_be_read_means_upright(name):
    """A damaged tag is no reason to refuse a picture."""
    body = TIFF_RUBBISH[name]
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body

    assert read_image_shape(hr_wire.jpeg_bytes(30, 50, before=segment), Encoding.JPEG) == (30, 50, 3)


def test_fill_bytes_and_bare_markers_are_skipped():
    """T.81 B.1.1.2: any marker may be preceded by fill bytes; RST and TEM have no length."""
    data = hr_wire.jpeg_bytes(30, 50, before=b"\xff\xff\xff\x01\xff\xd0")

    assert read_image_shape(data, Encoding.JPEG) == (30, 50, 3)


NO_PNG = {
    "cut": hr_wire.png_bytes(4, 4)[:-1],
    "signature alone": hr_wire.png_bytes(4, 4)[:8],
    "first chunk": hr_wire.png_bytes(4, 4).replace(b"IHDR", b"IDAT"),
    "chunk length": hr_wire.png_bytes(4, 4).replace(b"\0\0\0\x0d", b"\0\0\0\x0e", 1),
    "width 0": hr_wire.png_bytes(4, 0),
    "height 0": hr_wire.png_bytes(0, 4),
    "width 2^31": hr_wire.png_bytes(4, 2**31),
    "height 2^31": hr_wire.png_bytes(2**31, 4),
    "colour type 5": hr_wire.png_bytes(4, 4, color_type=5),
    "depth 3": hr_wire.png_bytes(4, 4, depth=3),
    "palette of 16 bits": hr_wire.png_bytes(4, 4, color_type=3, depth=16),
    "compression 1": hr_wire.png_bytes(4, 4)[:26] + b"\x01" + hr_wire.png_bytes(4, 4)[27:],
    "filter 1": hr_wire.png_bytes(4, 4)[:27] + b"\x01" + hr_wire.png_bytes(4, 4)[28:],
    "interlace 2": hr_wire.png_bytes(4, 4)[:28] + b"\x02" + hr_wire.png_bytes(4, 4)[29:],
}


@pytest.mark.parametrize("name", NO_PNG)
def test_a_png_header_that_can_not_be_is_refused(name):
    """Only what the PNG specification allows is read on."""
    assert code_of(NO_PNG[name], Encoding.PNG) == "bad_image"


NO_JPEG = {
    "magic alone": b"\xff\xd8\xff",
    "fill bytes without end": b"\xff\xd8" + b"\xff" * 200,
    "no marker": b"\xff\xd8\xff\xe0\0\x02abc",
    "segment cut": b"\xff\xd8\xff\xe0\0",
    "segment length 0": b"\xff\xd8\xff\xe0\0\0" + bytes(10),
    "segment outside": b"\xff\xd8\xff\xe0\xff\xff" + bytes(10),
    "image data first": b"\xff\xd8\xff\xda\0\x02",
    "end first": b"\xff\xd8\xff\xd9",
    "too many segments": hr_wire.jpeg_bytes(4, 4, before=b"\xff\xfe\0\x02" * 1025),
    "frame header cut": b"\xff\xd8\xff\xc0\0\x05\x08\0\x04",
    "components 2": hr_wire.jpeg_bytes(4, 4, components=2),
    "components lie": hr_wire.jpeg_bytes(4, 4).replace(b"\0\x04\0\x04\x03", b"\0\x04\0\x04\x01"),
    "height 0": hr_wire.jpeg_bytes(0, 4),
    "width 0": hr_wire.jpeg_bytes(4, 0),
    "precision 3": hr_wire.jpeg_bytes(4, 4, precision=3),
    "only a Huffman table": hr_wire.jpeg_bytes(4, 4, marker=0xC4),
}


@pytest.mark.parametrize("name", NO_JPEG)
def test_a_jpeg_header_that_can_not_be_is_refused(name):
    """The scan ends at the first thing that no decoder would follow."""
    assert code_of(NO_JPEG[name], Encoding.JPEG) == "bad_image"


@pytest.mark.parametrize("encoding", [Encoding.PNG, Encoding.JPEG])
@pytest.mark.parametrize("data", [b"", b"x", b"hello, world", b"<html>404</html>", b"GIF89a"], ids=repr)
def test_what_is_no_image_is_refused(data, encoding):
    """IMG-03: nothing, one byte, text and an error page have one code."""
    assert code_of(data, encoding) == "bad_image"


def test_an_image_under_the_wrong_name_is_refused():
    """IMG-03: a PNG declared as JPEG is a mistake of the sender, and named as such."""
    assert code_of(hr_wire.png_bytes(4, 4), Encoding.JPEG) == "bad_encoding"
    assert code_of(hr_wire.jpeg_bytes(4, 4), Encoding.PNG) == "bad_encoding"


def test_huge_images_are_only_measured():
    """IMG-06: what declares 65,500 x 65,500 pixels is read in microseconds; refusing it is the caller's."""
    assert read_image_shape(hr_wire.jpeg_bytes(65_500, 65_500), Encoding.JPEG) == (65_500, 65_500, 3)
    assert read_image_shape(hr_wire.png_bytes(19_000, 19_000), Encoding.PNG) == (19_000, 19_000, 3)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_any_damage_gives_a_shape_or_a_refusal(kind):
    """Cut at every byte and with bytes changed at random: nothing else is ever raised."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved("RGB", kind, exif=exif)
    rng = random.Random(1)
    variants = [data[:length] for length in range(min(len(data), 700))]
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(min(len(data), 700))] = rng.randrange(256)
        variants.append(bytes(damaged))

    for variant in variants:
        code, shape = None, (0,)
        try:
            shape = read_image_shape(variant, Encoding(kind))
        except RemoteProtocolError as error:
            code = error.code
        assert code in {"bad_image", "bad_encoding"} if code else min(shape) > 0
