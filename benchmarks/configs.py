"""Configurations of the brokers under test, as TOML text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SquareClass:
    """One size class of the model: squares of ``size`` pixels a side."""

    size: int
    max_batch_size: int = 32


@dataclass(frozen=True, slots=True)
class Model:
    """One model: a file, or an emulated cost ``emulated_ms`` = (a, c) of T(b) = a + c * b."""

    classes: tuple[SquareClass, ...]
    name: str = "m"
    channels: int = 3
    emulated_ms: tuple[float, float] | None = None
    path: Path | None = None


def broker_config(
    *models: Model,
    credits_count: int = 64,
    policy: str = "adaptive",
    max_queue_delay_ms: float | str = 0.0,
    objective_ms: float = 50.0,
) -> str:
    """Return a broker on free ports, with the defaults for all that is not said here."""
    lines = [
        "[broker]",
        "port = 0",
        "http_port = 0",  # the metrics stay on, as in production
        "[admission]",
        f"credits_per_producer = {credits_count}",
        "max_bytes = 1073741824",
        "[queues]",
        f'policy = "{policy}"',
        f"max_queue_delay_ms = {json.dumps(max_queue_delay_ms)}",
        f"objective_ms = {objective_ms}",
    ]
    for model in models:
        lines += _model_lines(model)
    return "\n".join(lines) + "\n"


def _model_lines(model: Model) -> list[str]:
    lines = ["[[models]]", f'name = "{model.name}"']
    if model.path is not None:
        lines.append(f'path = "{model.path}"')
    color = "rgb" if model.channels == 3 else "gray"
    lines += ["[models.image]", f'color = "{color}"', f"channels = {model.channels}"]
    if model.emulated_ms is not None:
        base_ms, per_frame_ms = model.emulated_ms
        lines += ["[models.emulated]", f"base_ms = {base_ms}", f"per_frame_ms = {per_frame_ms}"]
    for each in model.classes:
        lines += [
            "[[models.size_classes]]",
            f"height = {each.size}",
            f"width = {each.size}",
            f"max_batch_size = {each.max_batch_size}",
        ]
    return lines
