"""The model tables of the configuration's schema, and what all tables are made with.

See ``headrace.config_schema`` for the rest and for the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from headrace.errors import ConfigError
from headrace.protocol.peers import MAX_BATCH_SIZE

#: Longest wait that can be asked of a batch or a heartbeat: one hour, far beyond any live use.
MAX_WAIT_MS = 3_600_000

Policy = Literal["adaptive", "deferred", "window"]

#: Longest objective that can be set: a day. Beyond it there is none.
MAX_OBJECTIVE_MS = 86_400_000


def key(default: Any, unit: str, why: str, **bounds: Any) -> Any:
    """Describe one key: its default (``...`` = required), its unit, why it is there and its bounds."""
    return Field(default, description=why, json_schema_extra={"unit": unit}, **bounds)


@dataclass(frozen=True)
class AutoOrNumber:
    """Lets a number in a range or the word "auto" through, and words errors as for the number alone: a union
    would name each of its branches."""

    ge: float
    le: float

    def __get_pydantic_core_schema__(
        self, _source: Any, _handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        number = core_schema.float_schema(strict=True, allow_inf_nan=False, ge=self.ge, le=self.le)
        return core_schema.no_info_wrap_validator_function(
            lambda value, check: value if value == "auto" else check(value),
            number,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )


Wait = Annotated[float | Literal["auto"], AutoOrNumber(0, MAX_WAIT_MS)]


class Section(BaseModel):
    """Base of every table: unknown keys refused, no coercion, immutable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ImageSection(Section):
    """How pixels become the model's input: `(pixel * scale - mean) / std` per channel."""

    color: Literal["rgb", "bgr", "gray"] = key("rgb", "color", "Channel order that the model was trained on.")
    channels: Literal[1, 3] = key(
        3, "channels", "Channels of the model's input; gray frames are replicated, alpha is dropped."
    )
    scale: float = key(1.0, "factor", "Applied to the pixel (0 to 255) first; 0.00392156862745098 = 1/255.")
    mean: tuple[float, ...] = key(
        (), "per channel", "Subtracted after scaling: one number per channel, or none.", strict=False
    )
    std: tuple[float, ...] = key(
        (), "per channel", "Divided by last: one number per channel, or none.", strict=False
    )
    pad_value: int = key(
        0, "pixel", "Value of the pixels around a frame smaller than its size class.", ge=0, le=255
    )

    @model_validator(mode="after")
    def _one_number_per_channel(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values and len(values) != self.channels:
                raise ValueError(
                    f"{name} has {len(values)} numbers for channels = {self.channels}: give one"
                    " per channel, or none"
                )
        if any(value == 0 for value in self.std):
            raise ValueError("std holds a 0: pixels can't be divided by it")
        if (self.color == "gray") != (self.channels == 1):
            raise ValueError(
                f"color = {self.color!r} does not go with channels = {self.channels}: gray has 1,"
                " rgb and bgr have 3"
            )
        return self


class SizeClassSection(Section):
    """One padded input shape of a model, with its own queue and batches."""

    name: str = key("", "name", "Name in results and metrics; empty = HEIGHTxWIDTH.", max_length=64)
    height: int = key(..., "pixels", "Height of the model's input.", ge=1, le=65_536)
    width: int = key(..., "pixels", "Width of the model's input.", ge=1, le=65_536)
    max_batch_size: int = key(
        8,
        "frames",
        "Most frames in one batch, and at most `limits.max_frames_per_message`: a batch is one message.",
        ge=1,
        le=MAX_BATCH_SIZE,
    )
    fit: Literal["exact", "pad", "letterbox"] = key(
        "pad",
        "fit",
        "A smaller frame is refused (`exact`), put at the top left unscaled (`pad`), or scaled"
        " with its aspect kept and centred (`letterbox`).",
    )
    traffic_share: float = key(
        1.0,
        "share",
        "Part of the frames expected in this class, in any unit. A GPU without room for all graphs captures"
        " those with the larger share.",
        ge=0,
        le=1_000_000,
    )
    policy: Policy | None = key(None, "policy", "As in [queues]; left out = the model's.")
    max_queue_delay_ms: Wait | None = key(None, "ms", "As in [queues]; left out = the model's.")
    objective_ms: float | None = key(
        None, "ms", "As in [queues]; left out = the model's.", gt=0, le=MAX_OBJECTIVE_MS
    )
    promote: bool | None = key(None, "on/off", "As in [queues]; left out = the model's.")
    max_queue_size: int | None = key(
        None, "frames", "As in [queues]; left out = the model's.", ge=0, le=100_000_000
    )

    @property
    def label(self) -> str:
        return self.name or f"{self.height}x{self.width}"


class EmulatedSection(Section):
    """Latency model of the `emulated` device: a batch of b frames takes `base_ms + per_frame_ms * b`."""

    base_ms: float = key(..., "ms", "Fixed cost of a batch.", ge=0, le=MAX_WAIT_MS)
    per_frame_ms: float = key(..., "ms", "Cost of each frame in it.", ge=0, le=MAX_WAIT_MS)


class ModelSection(Section):
    """One model. Without an `image` table it takes plain tensors of the graph's own shape."""

    name: str = key(
        ...,
        "name",
        "Name under which frames ask for it.",
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
    )
    version: str = key(
        "1",
        "version",
        "Told apart from other versions of the same name; the newest serves frames that name none.",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    path: str = key(
        "",
        "path",
        "The ONNX file, relative to this file; `package:NAME/path/in/it.onnx` for a file that an installed"
        " package ships; or a folder made by `headrace prepare`, whose manifest then says what `image`,"
        " `size_classes`, `oversize`, `adapter` and `adapter_options` are unless they are set here. Needed"
        " unless `emulated` is set.",
    )
    precision: Literal["auto", "fp32", "fp16", "int8"] = key(
        "auto",
        "precision",
        "Which file of a prepared folder is run. `auto`: FP16 on a GPU, FP32 elsewhere; `int8`: INT8 on CPUs"
        " and FP16 on GPUs; `fp32` and `fp16`: that one everywhere (FP16 is slow on a CPU).",
    )
    fp32_sample_share: float = key(
        0.0,
        "share",
        "Share of the batches that a worker of the FP16 or INT8 file of a prepared folder runs on the FP32"
        " file too, when it has nothing else to do; metrics tell how far they differ. 0 = none.",
        ge=0,
        le=1,
    )
    extra_files: tuple[str, ...] = key(
        (),
        "paths",
        "External weights, relative to the model's folder, under the names that the graph uses.",
        strict=False,
    )
    image: ImageSection | None = key(None, "table", "Set for a model that takes images.")
    size_classes: tuple[SizeClassSection, ...] = key(
        (),
        "tables",
        "Shapes that frames are padded to; a frame takes the smallest that contains it. Empty ="
        " the graph's own fixed shape.",
        strict=False,
    )
    oversize: Literal["letterbox", "reject"] = key(
        "letterbox", "choice", "A frame larger than every size class is scaled down, or rejected `oversize`."
    )
    adapter: str = key(
        "tensors",
        "adapter",
        "What becomes of the outputs: tensors, classify, detect, text, or `package.module:function`.",
        min_length=1,
    )
    adapter_options: dict[str, Any] = key(
        {},
        "table",
        "Options of the adapter, such as `thresh` of text or `labels` of classify; an unknown one is"
        " refused by name.",
    )
    emulated: EmulatedSection | None = key(None, "table", "Latency of the `emulated` device for this model.")
    policy: Policy | None = key(None, "policy", "As in [queues], for all size classes of this model.")
    max_queue_delay_ms: Wait | None = key(None, "ms", "As in [queues], for all size classes of this model.")
    objective_ms: float | None = key(
        None, "ms", "As in [queues], for all size classes of this model.", gt=0, le=MAX_OBJECTIVE_MS
    )
    promote: bool | None = key(None, "on/off", "As in [queues], for all size classes of this model.")
    max_queue_size: int | None = key(
        None, "frames", "As in [queues], for all size classes of this model.", ge=0, le=100_000_000
    )

    @property
    def may_be_folder(self) -> bool:
        """True when ``path`` may name a prepared folder: only a look at the disk tells."""
        return bool(self.path) and not self.path.startswith("package:") and not self.path.endswith(".onnx")

    @field_validator("size_classes", mode="after")
    @classmethod
    def _names_differ(cls, classes: tuple[SizeClassSection, ...]) -> tuple[SizeClassSection, ...]:
        labels = [item.label for item in classes]
        for index, label in enumerate(labels):
            first = labels.index(label)
            if first != index:
                raise ValueError(f"entries {first} and {index} are both named {label!r}: rename one")
        return classes

    @model_validator(mode="after")
    def _adapter_takes_its_options(self) -> Self:
        if self.adapter == "tensors" and not self.adapter_options:
            return self  # nothing to check, and a broker of such models starts without loading numpy
        from headrace.workers.adapters import check_adapter

        try:
            check_adapter(self.adapter, self.adapter_options)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _is_servable(self) -> Self:
        if not self.path and self.emulated is None:
            raise ValueError("has neither path nor emulated: name its ONNX file, or give it a latency model")
        if self.precision != "auto" and not self.may_be_folder:
            raise ValueError(
                f"precision = {self.precision!r} chooses among the files of a folder made by `headrace"
                f" prepare`; {self.path!r} is one file"
            )
        if self.fp32_sample_share and not self.may_be_folder:
            raise ValueError(
                "fp32_sample_share compares with the FP32 file of a folder made by `headrace prepare`;"
                f" {self.path!r} is no such folder"
            )
        if self.size_classes and self.image is None and not self.may_be_folder:
            raise ValueError(
                "has size_classes but no image table: padding is for images; add"
                " [models.image], or leave the size classes out"
            )
        if self.image is not None and not self.size_classes and not self.path:
            raise ValueError(
                "takes images but has no size_classes and no graph to read them from: add"
                " [[models.size_classes]]"
            )
        return self
