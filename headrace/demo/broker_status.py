"""Read the broker's answer to ``status`` into rows for the table and the report.

The answer comes over the wire from a broker that may be of another release, so every field is looked at
before it is used and a missing one reads as 0 or "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.protocol.messages import Value


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One size class. ``padding_waste`` is the mean share of padding in its frames, 0 to 1."""

    name: str
    queued: int
    batches: int
    mean_batch: float
    padding_waste: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker. ``load`` is the share of time it was running batches, 0 to 1."""

    worker: str
    device: str
    state: str
    in_flight: int
    frames: int
    load: float


def account_of(status: Mapping[str, Value]) -> dict[str, int]:
    """Return the broker's account: counts by name."""
    account = _map(status.get("account"))
    return {name: value for name, value in account.items() if isinstance(value, int)}


def class_rows(status: Mapping[str, Value]) -> tuple[ClassRow, ...]:
    """Return one row per size class of every model, in the broker's order."""
    return tuple(
        ClassRow(
            name=_text(entry, "size_class"),
            queued=int(_number(entry, "waiting")),
            batches=int(_number(entry, "batches")),
            mean_batch=_number(entry, "mean_batch"),
            padding_waste=_number(entry, "padding_waste"),
        )
        for entry in _entries(status.get("classes"))
    )


def worker_rows(status: Mapping[str, Value]) -> tuple[WorkerRow, ...]:
    """Return one row per worker the broker knows."""
    return tuple(
        WorkerRow(
            worker=_text(entry, "id"),
            device=_text(entry, "device"),
            state=_text(entry, "state"),
            in_flight=int(_number(entry, "in_flight")),
            frames=int(_number(entry, "frames")),
            load=_number(entry, "busy_share"),
        )
        for entry in _entries(status.get("workers"))
    )


def _entries(value: Value) -> list[Mapping[str, Value]]:
    return [_map(entry) for entry in value] if isinstance(value, list) else []


def _map(value: Value) -> Mapping[str, Value]:
    return value if isinstance(value, dict) else {}


def _number(entry: Mapping[str, Value], key: str) -> float:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _text(entry: Mapping[str, Value], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) else ""
