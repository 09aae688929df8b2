"""How the outputs of two versions of a model differ: what a reload looks at before it switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

#: What a figure on the wire can hold; larger differences are as good as this.
MAX_DIFFERENCE = 1e18


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one batch. ``agreed`` frames have the largest value of the first float output at the same place (of
    the first output if none is float: all its values equal). ``max_rel`` is ``max_abs`` of an output over the
    largest finite magnitude that the first version gave there. ``non_finite`` frames have NaN or infinity
    on one side where the other has a number; those values count for nothing else."""

    agreed: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    non_finite: int = 0
    error: str = ""


def compare(expected: Mapping[str, Array], found: Mapping[str, Array], count: int) -> Difference:
    """Compare the first ``count`` rows of the outputs of two runs, in the graphs' own order of outputs.

    An output without a row per frame (first axis 1) is compared as a whole."""
    if len(expected) != len(found):
        return Difference(error=f"it has {len(found)} outputs, not {len(expected)}")
    max_abs, max_rel = 0.0, 0.0
    is_odd = np.zeros(count, dtype=bool)
    agreed: NDArray[np.bool_] | None = None
    for (name, first), second in zip(expected.items(), found.values(), strict=True):
        a, b = first[:count], second[:count]
        if a.shape != b.shape:
            shapes = f"{list(second.shape[1:])}, not {list(first.shape[1:])}"
            return Difference(error=f"output {name} of a frame has shape {shapes}")
        x = a.reshape(len(a), -1).astype(np.float64)
        y = b.reshape(len(b), -1).astype(np.float64)
        are_finite = np.isfinite(x) & np.isfinite(y)
        is_odd |= (np.isfinite(x) != np.isfinite(y)).any(axis=1)
        magnitude = float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))
        gaps = np.subtract(x, y, out=np.zeros_like(x), where=are_finite)
        largest = float(np.abs(gaps).max(initial=0.0))
        max_abs = max(max_abs, largest)
        if largest:
            max_rel = max(max_rel, largest / magnitude if magnitude else MAX_DIFFERENCE)
        if agreed is None and len(a) == count and a.dtype.kind == "f" and x.shape[1]:
            agreed = np.nan_to_num(x).argmax(axis=1) == np.nan_to_num(y).argmax(axis=1)
    if agreed is None:
        agreed = np.full(count, max_abs == 0.0)
    return Difference(
        agreed=int(np.count_nonzero(agreed)),
        max_abs=min(max_abs, MAX_DIFFERENCE),
        max_rel=min(max_rel, MAX_DIFFERENCE),
        non_finite=int(np.count_nonzero(is_odd)),
    )
