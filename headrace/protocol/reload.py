"""What broker and workers say to each other while a model is reloaded: data only, as in ``messages``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.protocol.models import ModelProfile, ModelSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Broker: load this model beside those that you serve, test and measure it, and go on serving."""

    model: ModelSpec


@dataclass(frozen=True, slots=True)
class Loaded:
    """Worker: a model of LOAD can be run from now on."""

    profile: ModelProfile


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Worker: a model of LOAD can't be run here; all others go on."""

    name: str
    version: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Broker: no batch of this model will come any more; free its memory."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Compare:
    """Broker: batch ``batch``, the next message, is to be run on ``version`` of its model too, once its own
    answer has left. That second answer goes nowhere; COMPARED tells how it differs."""

    batch: int
    version: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Worker: how the outputs of a batch differ between the two versions. ``frames`` is 0 when it was not
    compared. ``agreed`` frames have their largest value at the same place; ``max_rel`` is relative to the
    largest value of the version that serves; ``non_finite`` frames have a NaN or infinity on one side only.
    ``error`` says why the other version could not run it."""

    batch: int
    version: str
    frames: int = 0
    agreed: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    non_finite: int = 0
    error: str = ""


ReloadMessage: TypeAlias = "Load | Loaded | NotLoaded | Unload | Compare | Compared"
