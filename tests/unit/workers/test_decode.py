"""Decoding: what is whole comes back as pixels, what is not comes back as a code."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib

import cv2
import hr_worker
import numpy as np
import pytest
from PIL import Image

from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Encoding, Limits
from headrace.workers.decode import FLAG_TRUNCATED, DecodedImage, decode_image
from headrace.workers.jpeg_scan import scan_jpeg

HEIGHT, WIDTH = 240, 320
RGB = hr_worker.gradient(HEIGHT, WIDTH)
JPEG = hr_worker.jpeg(RGB)
PROGRESSIVE = hr_worker.jpeg(RGB, is_progressive=True)
PNG = hr_worker.png(RGB)


def decode(
    data: bytes, encoding: Encoding = Encoding.JPEG, *, shape: tuple[int, int] = (HEIGHT, WIDTH)
) -> DecodedImage:
    frame = hr_worker.image_frame(data, encoding, *shape)
    return decode_image(frame, memoryview(data), Limits())


def code_of(data: bytes, encoding: Encoding = Encoding.JPEG, **options: tuple[int, int]) -> str:
    with pytest.raises(InvalidFrameError) as caught:
        decode(data, encoding, **options)
    return caught.value.code


def test_a_whole_png_comes_back_exactly() -> None:
    """PNG is lossless: every pixel is the one that was encoded, in BGR order."""
    decoded = decode(PNG, Encoding.PNG)

    assert (decoded.pixels[:, :, ::-1] == RGB).all()
    assert decoded.flags == ()


@pytest.mark.parametrize("data", [JPEG, PROGRESSIVE], ids=["baseline", "progressive"])
def test_a_whole_jpeg_comes_back_unflagged(data: bytes) -> None:
    """JPEG is lossy: pixels are near the ones that were encoded."""
    decoded = decode(data)

    assert np.abs(decoded.pixels[:, :, ::-1].astype(int) - RGB).mean() < 3
    assert decoded.flags == ()


@pytest.mark.parametrize("data", [JPEG, PROGRESSIVE], ids=["baseline", "progressive"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_img_02_a_cut_jpeg_is_damaged(data: bytes, share: float) -> None:
    """IMG-02: a JPEG cut at 90, 50 or 10 % is never used as if it were good."""
    assert code_of(data[: int(len(data) * share)]) == Code.DAMAGED_IMAGE


@pytest.mark.parametrize("data", [JPEG, PROGRESSIVE], ids=["baseline", "progressive"])
@pytest.mark.parametrize("lost", [1, 2], ids=["half the end marker", "the end marker"])
def test_img_02_a_jpeg_without_its_end_marker_is_flagged(data: bytes, lost: int) -> None:
    """IMG-02: all pixels are there, so the image is used; that something was missing is said."""
    decoded = decode(data[:-lost])

    assert decoded.flags == (FLAG_TRUNCATED,)
    assert (decoded.pixels == decode(data).pixels).all()


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_a_cut_jpeg_with_an_end_marker_put_behind_is_damaged(share: float) -> None:
    """Some senders close a broken file properly: the decoder's flat filling gives it away."""
    assert code_of(JPEG[: int(len(JPEG) * share)] + b"\xff\xd9") == Code.DAMAGED_IMAGE


def test_a_flat_image_is_not_taken_for_a_damaged_one() -> None:
    """A black frame looks like a decoder's filling but is complete."""
    black = np.zeros((HEIGHT, WIDTH, 3), np.uint8)

    decoded = decode(hr_worker.jpeg(black))

    assert not decoded.pixels.any()
    assert decoded.flags == ()


def test_img_01_zeroed_data_gives_the_same_refusal_each_time() -> None:
    """IMG-01: a JPEG whose second half is zeroed is refused, whatever was decoded before it."""
    bright = hr_worker.jpeg(np.full((HEIGHT, WIDTH, 3), 250, np.uint8))
    zeroed = JPEG[: len(JPEG) // 2] + bytes(len(JPEG) - len(JPEG) // 2)

    codes = set()
    for _ in range(50):
        decode(bright)
        codes.add(code_of(zeroed))

    assert codes == {Code.DAMAGED_IMAGE}


@pytest.mark.parametrize("cut", range(2, 600, 7))
def test_a_jpeg_cut_anywhere_in_its_header_is_refused(cut: int) -> None:
    """No cut makes anything but a refusal with a code."""
    assert code_of(JPEG[:cut]) == Code.DAMAGED_IMAGE


@pytest.mark.parametrize(
    ("data", "encoding", "code"),
    [
        (b"", Encoding.JPEG, Code.EMPTY_PAYLOAD),
        (b"\xff", Encoding.JPEG, Code.BAD_IMAGE),
        (b"hello world" * 9, Encoding.JPEG, Code.BAD_IMAGE),
        (PNG, Encoding.JPEG, Code.BAD_ENCODING),
        (JPEG, Encoding.PNG, Code.BAD_ENCODING),
        (b"<html><body>502 Bad Gateway</body></html>", Encoding.PNG, Code.BAD_IMAGE),
        (b"\xff\xd8", Encoding.JPEG, Code.DAMAGED_IMAGE),
        (b"\xff\xd8" + b"\xff" * 500, Encoding.JPEG, Code.DAMAGED_IMAGE),
        (b"\xff\xd8\xff\xd9", Encoding.JPEG, Code.DAMAGED_IMAGE),
        (PNG[:8], Encoding.PNG, Code.DAMAGED_IMAGE),
        (PNG[:-12], Encoding.PNG, Code.DAMAGED_IMAGE),
        (PNG[: len(PNG) // 2], Encoding.PNG, Code.DAMAGED_IMAGE),
    ],
    ids=[
        "empty", "one byte", "text", "png as jpeg", "jpeg as png", "error page", "start marker alone",
        "fill bytes", "no pixels", "png signature alone", "png without IEND", "png cut",
    ],
)  # fmt: skip
def test_img_03_what_is_no_whole_image_has_a_code(data: bytes, encoding: Encoding, code: Code) -> None:
    """IMG-03: empty, garbage and mislabelled payloads are told apart and never raise anything else."""
    assert code_of(data, encoding) == code


@pytest.mark.parametrize("offset", [20, 60, 200, -20])
def test_a_png_with_one_wrong_byte_is_damaged(offset: int) -> None:
    """The chunk checksums catch every changed byte."""
    data = bytearray(PNG)
    data[offset] ^= 0x10

    assert code_of(bytes(data), Encoding.PNG) == Code.DAMAGED_IMAGE


@pytest.mark.parametrize("fault", ["short pixels", "cut stream", "wrong adler", "no pixel chunk"])
def test_a_png_with_right_checksums_but_missing_pixels_is_damaged(fault: str) -> None:
    """libpng must fail on short pixel data, not fill it: no pixel of another image can show."""
    chunks = hr_worker.png_chunks(PNG)
    stream = b"".join(body for kind, body in chunks if kind == b"IDAT")
    half = zlib.decompress(stream)[: HEIGHT * (WIDTH * 3 + 1) // 2]
    faulty = {
        "short pixels": [(b"IDAT", zlib.compress(half))],
        "cut stream": [(b"IDAT", stream[: len(stream) // 2])],
        "wrong adler": [(b"IDAT", stream[:-4] + b"abcd")],
        "no pixel chunk": [],
    }[fault]

    assert code_of(hr_worker.png_of([chunks[0], *faulty, chunks[-1]]), Encoding.PNG) == Code.DAMAGED_IMAGE


@pytest.mark.parametrize("orientation", range(1, 9))
def test_img_04_exif_orientation_is_applied(orientation: int) -> None:
    """IMG-04: a red bar stored at the top ends where the tag says; the size is the turned one."""
    stored = np.zeros((48, 64, 3), np.uint8)
    stored[:8] = (255, 0, 0)
    flipped = stored[::-1, ::-1]
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: flipped,
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: flipped.transpose(1, 0, 2),
        8: np.rot90(stored),
    }[orientation]

    decoded = decode(
        hr_worker.jpeg_with_orientation(stored, orientation), shape=(turned.shape[0], turned.shape[1])
    )

    assert decoded.pixels.shape == turned.shape
    assert np.abs(decoded.pixels[:, :, ::-1].astype(int) - turned).mean() < 6


def test_img_04_an_orientation_that_the_broker_did_not_see_is_refused() -> None:
    """The pixels must have the size in which coordinates will be given."""
    data = hr_worker.jpeg_with_orientation(np.zeros((48, 64, 3), np.uint8), 6)

    assert code_of(data, shape=(48, 64)) == Code.BAD_IMAGE


def _rgba() -> bytes:
    rgba = np.dstack([RGB, np.full((HEIGHT, WIDTH), 7, np.uint8)])
    return hr_worker.pil_bytes(Image.fromarray(rgba, "RGBA"), "PNG")


@pytest.mark.parametrize(
    ("data", "encoding", "expected"),
    [
        (_rgba(), Encoding.PNG, RGB),
        (
            hr_worker.pil_bytes(Image.fromarray(RGB[:, :, 0]), "PNG"),
            Encoding.PNG,
            np.repeat(RGB[:, :, :1], 3, 2),
        ),
        (
            hr_worker.pil_bytes(Image.fromarray(np.dstack([RGB[:, :, 0], RGB[:, :, 1]]), "LA"), "PNG"),
            Encoding.PNG,
            np.repeat(RGB[:, :, :1], 3, 2),
        ),
        (
            hr_worker.pil_bytes(Image.fromarray(RGB).quantize(256), "PNG"),
            Encoding.PNG,
            np.asarray(Image.fromarray(RGB).quantize(256).convert("RGB")),
        ),
        (
            bytes(cv2.imencode(".png", RGB[:, :, ::-1].astype(np.uint16) * 256 + 255)[1]),
            Encoding.PNG,
            RGB,
        ),
    ],
    ids=["rgba", "gray", "gray and alpha", "palette", "16 bit"],
)
def test_img_05_odd_pngs_become_colour(data: bytes, encoding: Encoding, expected: hr_worker.Pixels) -> None:
    """IMG-05: alpha is dropped, gray is repeated, a palette is looked up, 16 bits keep the high byte."""
    decoded = decode(data, encoding)

    assert (decoded.pixels[:, :, ::-1] == expected).all()


def test_img_05_a_cmyk_jpeg_becomes_colour() -> None:
    """IMG-05: CMYK is converted without a colour profile."""
    data = hr_worker.pil_bytes(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95)

    decoded = decode(data)

    assert np.abs(decoded.pixels[:, :, ::-1].astype(int) - RGB).mean() < 4


def _jpeg_announcing(height: int, width: int) -> bytes:
    data = bytearray(JPEG)
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "encoding", "shape"),
    [
        (hr_worker.png_header_only(19000, 19000, zlib.compress(bytes(44_000))), Encoding.PNG, (19000, 19000)),
        (_jpeg_announcing(65500, 65500), Encoding.JPEG, (65500, 65500)),
    ],
    ids=["png", "jpeg"],
)
def test_img_06_a_huge_size_is_refused_from_the_header(
    data: bytes, encoding: Encoding, shape: tuple[int, int]
) -> None:
    """IMG-06: nothing is allocated for an image above the limit, though the broker let it through."""
    assert code_of(data, encoding, shape=shape) == Code.IMAGE_TOO_LARGE


@pytest.mark.parametrize("data", [JPEG, PNG], ids=["jpeg", "png"])
def test_a_size_other_than_the_frame_said_is_refused(data: bytes) -> None:
    """The broker placed the frame by its header; other pixels would stand in the wrong class."""
    encoding = Encoding.JPEG if data is JPEG else Encoding.PNG

    assert code_of(data, encoding, shape=(HEIGHT, WIDTH + 1)) == Code.BAD_IMAGE


def test_the_scan_of_a_progressive_file_knows_when_a_scan_is_missing() -> None:
    """Without its last scan every marker is fine; the bits of the coefficients are not complete."""
    last_scan = PROGRESSIVE.rindex(b"\xff\xda")
    cut = PROGRESSIVE[:last_scan]

    assert scan_jpeg(PROGRESSIVE).is_progression_complete
    assert not scan_jpeg(cut).is_progression_complete
    assert code_of(cut) == Code.DAMAGED_IMAGE


def test_codecs_write_nothing_on_stderr_once_silenced() -> None:
    """A stream of damaged images must not fill a log (PRC-07); our own stderr goes on working."""
    script = (
        "import sys, numpy as np, cv2\n"
        "from headrace.workers.decode import silence_codecs\n"
        "silence_codecs()\n"
        "data = np.frombuffer(bytes.fromhex(sys.stdin.read()), np.uint8)\n"
        "cv2.imdecode(data, 1)\n"
        "print('still heard', file=sys.stderr)\n"
    )
    damaged = JPEG[: len(JPEG) // 2] + b"\xff\xd9"

    done = subprocess.run(
        [sys.executable, "-P", "-c", script], input=damaged.hex(), capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "still heard\n")
