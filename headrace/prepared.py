"""The manifest of a prepared folder: `headrace prepare` writes it, a configuration and a check read it.

Light on purpose: a broker reads it, which imports neither numpy nor ONNX Runtime. How the folder is made:
``headrace.workers.prepare``. docs/models.md describes it for people.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from headrace.config_models import ImageSection, ModelSection, Section, SizeClassSection
from headrace.errors import ConfigError, ModelError

MANIFEST_NAME = "manifest.json"

#: Version of the manifest's own format. A reader refuses any other.
FORMAT_VERSION = 1

#: A manifest names files, classes and nodes; one of this size is another file.
MAX_MANIFEST_BYTES = 16 * 1024 * 1024

Precision = Literal["fp32", "fp16", "int8"]


class FileEntry(Section):
    """One file: its name inside the folder, its length and its hash."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    nbytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SourceEntry(Section):
    """The file that was prepared, under the name it had; its external weights, if any, beside it."""

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    weights: dict[str, str] = Field(default_factory=dict)


class TensorEntry(Section):
    """An input or output. ``shape`` begins with -1, the batch; further axes of -1 are open as well."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class OutputEntry(Section):
    """What one output of one file was on the seeded noise: its mean and its root mean square."""

    name: str
    mean: float
    rms: float = Field(ge=0)


class VariantEntry(Section):
    """One precision of the model.

    ``files``: the graph first, then its weights where they are apart. ``tolerance`` is what was asked for,
    ``measured`` what was found against FP32 on ``frames``. A check repeats what was found on seeded noise:
    ``seeded_difference``, the largest relative difference to FP32, and ``seeded_outputs``. ``notes`` holds
    what the precision has to tell: nodes kept in FP32, clamped weights, layers left out of INT8, calibration.
    """

    files: tuple[FileEntry, ...] = Field(min_length=1)
    tolerance: dict[str, float] = Field(default_factory=dict)
    measured: dict[str, Any] = Field(default_factory=dict)
    seeded_difference: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    seeded_outputs: tuple[OutputEntry, ...] = ()
    notes: dict[str, Any] = Field(default_factory=dict)


class Manifest(Section):
    """A prepared folder. ``image`` is the normalisation that is folded into every file of it: a server adds
    none of its own."""

    format_version: Literal[1] = 1
    name: str
    source: SourceEntry
    inputs: tuple[TensorEntry, ...] = Field(min_length=1)
    outputs: tuple[TensorEntry, ...] = Field(min_length=1)
    image: ImageSection | None = None
    size_classes: tuple[SizeClassSection, ...] = ()
    oversize: Literal["letterbox", "reject"] = "letterbox"
    adapter: str = "tensors"
    adapter_options: dict[str, Any] = Field(default_factory=dict)
    frames: str = ""
    rows_proven: int = Field(ge=2)
    rows_difference: float = Field(ge=0)
    variants: dict[Precision, VariantEntry]
    tools: dict[str, str] = Field(default_factory=dict)

    def served_image(self) -> ImageSection | None:
        """Return how frames are staged for the files: their arithmetic is in the graph."""
        if self.image is None:
            return None
        return self.image.model_copy(update={"scale": 1.0, "mean": (), "std": ()})

    def section(self, model: ModelSection) -> ModelSection:
        """Return the model of a configuration with what the manifest knows filled in.

        Size classes, adapter and its options are the configuration's own where it names any. Raises
        ConfigError for an image table that says something else than the folder.
        """
        image = self.served_image()
        if model.image not in (None, image):
            raise ConfigError(
                f"model {model.name}: [models.image] beside a prepared folder: how pixels become the input is"
                f" folded into its files, and {MANIFEST_NAME} says how; leave the table out"
            )
        given = model.model_fields_set
        filled: dict[str, Any] = {"image": image}
        if not model.size_classes:
            filled["size_classes"] = self.size_classes
        if "oversize" not in given:
            filled["oversize"] = self.oversize
        if "adapter" not in given:
            filled["adapter"] = self.adapter
            if "adapter_options" not in given:
                filled["adapter_options"] = self.adapter_options
        return model.model_copy(update=filled)

    def choose(self, precision: str, engine: str) -> Precision:
        """Return the file that a worker of ``engine`` runs when the configuration asks for ``precision``.

        "auto" is FP16 on a GPU and FP32 elsewhere. INT8 is for CPUs: a GPU, which runs it slower than FP16,
        gets FP16 all the same. Raises ConfigError when the folder lacks what was asked for by name.
        """
        if precision not in ("auto", *self.variants):
            raise ConfigError(
                f"precision = {precision!r}: the folder has no such file, only {', '.join(self.variants)};"
                f" prepare it again with --{precision}"
            )
        on_gpu: Precision = "fp16" if "fp16" in self.variants else "fp32"
        match precision:
            case "fp32" | "fp16":
                return precision
            case "int8":
                return on_gpu if engine == "cuda" else "int8"
            case _:
                return on_gpu if engine == "cuda" else "fp32"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder. Raises ModelError naming what is wrong with it."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ModelError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes, so it is no manifest of ours")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: not a prepared folder: it has no {MANIFEST_NAME}; make one with"
            " `headrace prepare MODEL.onnx --out DIR`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelError(
            f"{path}: {where}: {first['msg']} (format version {FORMAT_VERSION} is read)"
        ) from None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
