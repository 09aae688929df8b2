"""Why a model is not prepared: one stable word for each reason, so that scripts can tell them apart."""

from __future__ import annotations

from enum import StrEnum

from headrace.errors import ModelError


class Reason(StrEnum):
    """The reasons; docs/models.md says what each means and what to do about it."""

    CONTROL_FLOW = "control_flow"
    NO_BATCH_AXIS = "no_batch_axis"
    BATCH_AXES_DIFFER = "batch_axes_differ"
    CANNOT_RUN = "cannot_run"
    ROWS_NOT_SPLIT = "rows_not_split"
    ROWS_MIXED = "rows_mixed"
    NOT_FINITE = "not_finite"
    NOTHING_TO_CONVERT = "nothing_to_convert"
    FP16_OVERFLOW = "fp16_overflow"
    FP16_TOLERANCE = "fp16_tolerance"
    INT8_TOLERANCE = "int8_tolerance"
    NO_SIZE = "no_size"
    NO_FRAMES = "no_frames"
    OUT_EXISTS = "out_exists"


class PrepareRefusedError(ModelError):
    """A model that can't be prepared as asked. ``reason`` is stable, the text is for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
