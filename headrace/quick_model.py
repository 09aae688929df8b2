"""Serve one ONNX file without a configuration file: ``headrace up --model model.onnx``.

What a file would say is read from the graph. A 4-dimensional input with 1 or 3 channels is taken for an
image; whatever else the graph takes is served as plain tensors. docs/configuration.md says the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config_models import ImageSection, ModelSection, SizeClassSection
from headrace.errors import ConfigError, ModelError
from headrace.prepared import read_manifest
from headrace.workers.onnx_model import DYNAMIC, OnnxModel, OnnxTensor, read_model

#: Pixels of 0 to 255 become 0 to 1: what most image models are trained on.
SCALE = 1 / 255

_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def model_section(path: Path, *, sizes: Sequence[str] = (), adapter: str | None = None) -> ModelSection:
    """Describe the model at ``path`` as a [[models]] table would.

    ``sizes`` are size classes, "HEIGHTxWIDTH" each; without them the graph's own fixed shape is used.
    Raises ConfigError for a size that can't be read or is missing, ModelError for a file that is no model.
    """
    if path.is_dir():
        return _prepared_section(path, sizes, adapter)
    if not path.is_file():
        raise ConfigError(f"--model {path}: no such file: name an ONNX file")
    model = read_model(str(path), label=str(path))
    image = guess_image(model)
    if image is None:
        if sizes:
            raise ConfigError(f"--size {sizes[0]}: {path} takes no image (its inputs are {_shapes(model)})")
        classes: tuple[SizeClassSection, ...] = ()
    else:
        classes = _size_classes(path, model.inputs[0], image, sizes)
    return ModelSection(
        name=model_name(path),
        path=str(path.resolve()),
        extra_files=tuple(model.weights),
        image=image,
        size_classes=classes,
        adapter=adapter or "tensors",
    )


def _prepared_section(folder: Path, sizes: Sequence[str], adapter: str | None) -> ModelSection:
    manifest = read_manifest(folder)
    named: dict[str, Any] = {"adapter": adapter} if adapter else {}  # unset, the manifest says it
    classes = tuple(_parse_size(size) for size in sizes)
    return manifest.section(
        ModelSection(name=manifest.name, path=str(folder.resolve()), size_classes=classes, **named)
    )


def model_name(path: Path) -> str:
    """Return the name under which frames ask for the model at ``path``: that of its file, where it is one."""
    return _NAME_CHARACTERS.sub("-", path.stem).strip("-._") or "model"


def guess_image(model: OnnxModel) -> ImageSection | None:
    """Return how pixels become the input of a model that has one input, and that looks like an image's."""
    if len(model.inputs) != 1:
        return None
    tensor = model.inputs[0]
    if tensor.shape is None or len(tensor.shape) != 4:
        return None
    channels = next((tensor.shape[axis] for axis in (1, 3) if tensor.shape[axis] in {1, 3}), None)
    if channels is None:
        return None
    scale = 1.0 if tensor.dtype == "uint8" else SCALE
    if channels == 1:
        return ImageSection(color="gray", channels=1, scale=scale)
    return ImageSection(color="rgb", channels=3, scale=scale)


def _size_classes(
    path: Path, tensor: OnnxTensor, image: ImageSection, sizes: Sequence[str]
) -> tuple[SizeClassSection, ...]:
    if sizes:
        return tuple(_parse_size(size) for size in sizes)
    shape = tensor.shape or ()
    height, width = shape[2:4] if shape[1] == image.channels else shape[1:3]
    if DYNAMIC in {height, width}:
        raise ConfigError(
            f"--model {path}: its graph takes images of any size {_shape(shape)}: choose one or more with"
            " --size HEIGHTxWIDTH, for instance --size 640x640"
        )
    return (SizeClassSection(height=height, width=width),)


def _parse_size(text: str) -> SizeClassSection:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if not found or not all(1 <= int(number) <= 65_536 for number in found.groups()):
        raise ConfigError(f"--size {text}: must read HEIGHTxWIDTH in pixels, for instance 480x640")
    return SizeClassSection(height=int(found[1]), width=int(found[2]))


def _shapes(model: OnnxModel) -> str:
    if not model.inputs:
        raise ModelError(f"model {model.label}: has no inputs, so no frame could be given to it")
    return ", ".join(f"{tensor.name} {_shape(tensor.shape or ())}" for tensor in model.inputs)


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("?" if axis == DYNAMIC else str(axis) for axis in shape) + "]"
