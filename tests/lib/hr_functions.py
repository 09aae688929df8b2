"""Post-process functions as users write them, good and bad; named in tests as ``hr_functions:NAME``."""

from __future__ import annotations

from typing import Any

import numpy as np

Outputs = dict[str, np.ndarray[Any, Any]]


def red(outputs: Outputs, placements: list[Any]) -> list[dict[str, float]]:
    """The red mean of each frame."""
    return [{"red": float(row[0])} for row in outputs["mean"]]


def writes_into_its_arrays(outputs: Outputs, placements: list[Any]) -> list[dict[str, float]]:
    """Double the outputs in place, one frame at a time, then spoil all of them."""
    results = []
    for row in outputs["mean"]:
        np.multiply(row, 2, out=row)
        results.append({"doubled": float(row[0])})
    outputs["mean"][:] = -1
    return results


def raises_for_five(outputs: Outputs, placements: list[Any]) -> list[dict[str, float]]:
    """Fail when any frame of the batch is number five."""
    if (outputs["mean"].round() == 5).any():
        raise ValueError("number five")
    return red(outputs, placements)


def one_too_few_or_many(outputs: Outputs, placements: list[Any], *, count: int) -> list[int]:
    """Return ``count`` results whatever the batch holds."""
    return list(range(count))


def numpy_scalars(outputs: Outputs, placements: list[Any]) -> list[dict[str, Any]]:
    """Results as numpy gives them."""
    return [
        {
            "index": np.int64(row[0]),
            "score": np.float32(0.5),
            "flag": np.bool_(True),
            "size": (np.int32(3), np.int32(4)),
            "box": np.array([1.5, 2.5], np.float32),
        }
        for row in outputs["mean"]
    ]
