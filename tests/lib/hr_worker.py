"""Helpers for tests of the worker: images with known faults, plans and batches for staging.

Images are drawn, not random, so that a lost part shows: smooth gradients with no flat corner.
"""

from __future__ import annotations

import io
import struct
import zlib

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headrace.protocol.messages import (
    Batch,
    Color,
    Encoding,
    Fit,
    Frame,
    ImageInput,
    ModelSpec,
    Oversize,
    SizeClassSpec,
    TensorSpec,
)
from headrace.workers.engine import InputPlan, ModelKey
from headrace.workers.staging import StagingPlan

Pixels = NDArray[np.uint8]


def gradient(height: int, width: int, seed: int = 0) -> Pixels:
    """Return a smooth RGB image [height, width, 3] in which no two regions are alike."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    channels = [
        127 + 120 * np.sin(x / (17 + seed) + y / 29),
        127 + 120 * np.cos(x / 31 - y / (13 + seed)),
        (x * 255 / max(1, width - 1) + y * 255 / max(1, height - 1)) / 2,
    ]
    return np.stack(channels, axis=-1).astype(np.uint8)


def jpeg(rgb: Pixels, *, quality: int = 90, is_progressive: bool = False) -> bytes:
    flags = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_PROGRESSIVE, int(is_progressive)]
    return bytes(cv2.imencode(".jpg", rgb[:, :, ::-1], flags)[1])


def png(rgb: Pixels) -> bytes:
    return bytes(cv2.imencode(".png", rgb[:, :, ::-1])[1])


def pil_bytes(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def jpeg_with_orientation(rgb: Pixels, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return pil_bytes(Image.fromarray(rgb), "JPEG", quality=95, exif=exif)


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    chunks, position = [], 8
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        chunks.append((kind, data[position + 8 : position + 8 + length]))
        position += 12 + length
    return chunks


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """Return a PNG of the given chunks, each with a right checksum."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in chunks:
        parts.append(struct.pack(">I4s", len(body), kind) + body + struct.pack(">I", zlib.crc32(kind + body)))
    return b"".join(parts)


def png_header_only(height: int, width: int, body: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png_of([(b"IHDR", header), (b"IDAT", body), (b"IEND", b"")])


# -- frames, plans, batches ----------------------------------------------------------------------------


def image_frame(
    data: bytes, encoding: Encoding, height: int, width: int, channels: int = 3, **fields: object
) -> Frame:
    return Frame(
        "cam-1",
        data,
        len(data),
        (height, width, channels),
        encoding=encoding,
        **fields,  # type: ignore[arg-type]
    )


def raw_frame(array: NDArray[np.generic], color: Color = Color.RGB, **fields: object) -> Frame:
    data = np.ascontiguousarray(array).tobytes()
    return Frame(
        "cam-1",
        data,
        len(data),
        array.shape,
        dtype=str(array.dtype),
        color=color,
        **fields,  # type: ignore[arg-type]
    )


def tensors_frame(arrays: dict[str, NDArray[np.generic]]) -> Frame:
    """Return a frame of several named inputs."""
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    inputs = tuple(TensorSpec(name, str(array.dtype), array.shape) for name, array in arrays.items())
    return Frame("cam-1", data, len(data), (), inputs=inputs)


def image_plan(
    height: int = 64,
    width: int = 96,
    *,
    channels: int = 3,
    color: Color = Color.RGB,
    fit: Fit = Fit.PAD,
    oversize: Oversize = Oversize.LETTERBOX,
    pad_value: int = 114,
    buckets: tuple[int, ...] = (1, 2, 4, 8),
) -> StagingPlan:
    size_class = SizeClassSpec("small", height, width, buckets[-1], fit)
    image = ImageInput(color=color, channels=channels, pad_value=pad_value)
    spec = ModelSpec("m", "1", image=image, size_classes=(size_class,), oversize=oversize)
    inputs = (InputPlan("x", "uint8", (height, width, channels), is_image=True),)
    return StagingPlan(ModelKey("m", "1"), spec, size_class, inputs, buckets)


def tensor_plan(*inputs: InputPlan, buckets: tuple[int, ...] = (1, 2, 4)) -> StagingPlan:
    size_class = SizeClassSpec("tensor", 1, 1, buckets[-1])
    return StagingPlan(ModelKey("m", "1"), ModelSpec("m", "1"), size_class, inputs, buckets)


def batch_of(*frames: Frame, number: int = 1, size_class: str = "small") -> Batch:
    return Batch(number, "m", "1", size_class, frames)
