"""What broker, workers and clients tell each other about models: data only, as in ``messages``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from headrace.protocol.per_frame import per_frame

#: What msgpack can hold; ``meta`` and non-tensor outputs are made of it.
Value: TypeAlias = "bool | int | float | str | bytes | list[Value] | dict[str, Value] | None"


class Color(StrEnum):
    """Order of an image's channels."""

    RGB = "rgb"
    BGR = "bgr"
    GRAY = "gray"


class Fit(StrEnum):
    """How a frame smaller than its size class is placed: ``exact`` refuses it, ``pad`` puts it at the
    top left unscaled, ``letterbox`` scales it (aspect kept) to touch the class and centres it."""

    EXACT = "exact"
    PAD = "pad"
    LETTERBOX = "letterbox"


class Oversize(StrEnum):
    """What happens to a frame larger than every size class of its model."""

    LETTERBOX = "letterbox"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model. ``path`` is relative, with forward slashes and no "..": the first file of a
    model is the ONNX graph, the others are its external weights under the names the graph uses."""

    path: str
    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SizeClassSpec:
    """A named padded input shape. ``traffic_share`` is the part of the frames expected in it, in any unit:
    where a GPU's memory does not hold all graphs, classes with the larger share get theirs."""

    name: str
    height: int
    width: int
    max_batch_size: int = 8
    fit: Fit = Fit.PAD
    traffic_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How pixels become the model's image input: ``(pixel * scale - mean) / std`` per channel in
    ``color`` order. ``layout`` and ``dtype`` are the ONNX graph's own, found by the worker."""

    color: Color = Color.RGB
    channels: int = 3
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pad_value: int = 0


@dataclass(frozen=True, slots=True)
class EmulatedCost:
    """T(b) = base_ms + per_frame_ms * b of the ``emulated`` engine."""

    base_ms: float
    per_frame_ms: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the broker configures it. ``files`` is empty only for emulated models.

    ``image`` is None for a model that takes plain tensors (no colour, no padding): it has one size
    class per exact shape, named ``tensor``. Empty ``size_classes`` means: the worker finds them in the
    graph's fixed shape and says so in READY. ``gpu_files`` are what a GPU runs instead of ``files``: the
    same model in FP16. Empty = the same files everywhere. ``fp32_files`` are what a worker of other files
    compares ``fp32_sample_share`` of its batches with.
    """

    name: str
    version: str
    files: tuple[ModelFile, ...] = ()
    image: ImageInput | None = None
    size_classes: tuple[SizeClassSpec, ...] = ()
    oversize: Oversize = Oversize.LETTERBOX
    adapter: str = "tensors"
    adapter_options: dict[str, Value] = field(default_factory=dict)
    emulated: EmulatedCost | None = None
    gpu_files: tuple[ModelFile, ...] = ()
    fp32_files: tuple[ModelFile, ...] = ()
    fp32_sample_share: float = 0.0

    def for_engine(self, engine: str) -> ModelSpec:
        """Return the model with the files of one engine alone: ``cuda`` runs those for a GPU, if any."""
        files = self.gpu_files if self.gpu_files and engine == "cuda" else self.files
        fp32_files = () if self.fp32_files == files else self.fp32_files
        if not self.gpu_files and fp32_files == self.fp32_files:
            return self
        return replace(self, files=files, gpu_files=(), fp32_files=fp32_files)


@per_frame(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a payload. ``dtype`` is a numpy name (little-endian), ``shape`` all positive
    for inputs; outputs may hold zero-length axes (no detections)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassProfile:
    """Measured milliseconds of one batch per bucket, ascending by bucket size."""

    size_class: SizeClassSpec
    buckets: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What this worker can run of one model, after its self-tests. ``inputs`` are the graph's own
    (batch axis left out; -1 for a dynamic axis); ``notes`` are said aloud in status (for instance
    "fixed batch of 1")."""

    name: str
    version: str
    classes: tuple[ClassProfile, ...]
    inputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()
