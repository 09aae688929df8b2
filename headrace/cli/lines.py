"""Outcomes and missed ranges as lines for people and as objects for machines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from headrace.protocol.messages import Outcome, Value

if TYPE_CHECKING:
    from headrace.clients.records import Missed

#: What stands in an outcome's object only when it says something.
_OPTIONAL = ("code", "message", "pts_ns", "meta", "retry_after_ms", "flags")


def outcome_object(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON can hold it. Tensors are described, their bytes left out."""
    fields = dataclasses.asdict(dataclasses.replace(outcome, payloads=()))
    del fields["payloads"]
    for name in _OPTIONAL:
        if fields[name] in (None, "", ()):
            del fields[name]
    return {"event": "outcome"} | fields


def outcome_line(outcome: Outcome) -> str:
    """Return an outcome as one line: stream, frame, status, where it ran, how long it took, what came out."""
    parts = [f"{outcome.stream} #{outcome.seq}", str(outcome.status)]
    if outcome.code:
        parts.append(f"{outcome.code}: {outcome.message}" if outcome.message else outcome.code)
    if outcome.model:
        parts.append(f"{outcome.model}/{outcome.size_class}" if outcome.size_class else outcome.model)
    if outcome.batch_size:
        parts.append(f"batch of {outcome.batch_size} on {outcome.worker}")
    if outcome.timing.published_us is not None:
        parts.append(f"{outcome.timing.published_us / 1_000:.1f} ms")
    summary = _outputs(outcome)
    if summary:
        parts.append(summary)
    parts += list(outcome.flags)
    return "  ".join(parts)


def missed_object(missed: Missed) -> dict[str, Any]:
    """Return a missed range as JSON can hold it."""
    return {"event": "missed"} | dataclasses.asdict(missed)


def missed_line(missed: Missed) -> str:
    """Return a missed range as one line."""
    which = f"{missed.first} to {missed.last}" if missed.last is not None else f"{missed.first} and later"
    return f"{missed.stream}  missed outcomes {which} ({missed.reason})"


def _outputs(outcome: Outcome) -> str:
    if outcome.tensors:
        return ", ".join(f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in outcome.tensors)
    return _value(outcome.outputs)


def _value(value: Value) -> str:
    """Say the size of a list, the entries of a map, and anything short as it is."""
    match value:
        case None:
            return ""
        case list():
            return f"{len(value)} results"
        case dict():
            return ", ".join(
                f"{len(item)} {name}" if isinstance(item, list) else f"{name}={_short(item)}"
                for name, item in value.items()
            )
        case _:
            return _short(value)


def _short(value: Value, limit: int = 40) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
