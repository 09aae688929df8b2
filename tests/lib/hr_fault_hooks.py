"""Faults inside a worker, set off by a mark in a frame: an adapter for the ``emulated`` engine.

A test writes ``adapter = "hr_fault_hooks:answer"`` into the model's table and starts the worker with
tests/lib on PYTHONPATH. The emulated engine hands on the first pixel of each frame, which holds the mark.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The first pixel of a marked frame is (255, 0, CODE).
CODES = {"abort": 1, "hang": 2, "raise": 3, "exit": 4, "slow": 5, "hang_once": 6}

_NAMES = {code: name for name, code in CODES.items()}

SLOW_S = 0.5


def mark(image: NDArray[np.uint8], kind: str) -> NDArray[np.uint8]:
    """Mark an image [height, width, 3] in place; return it."""
    image[0, 0] = (255, 0, CODES[kind])
    return image


def answer(outputs: dict[str, NDArray[Any]], placements: list[Any]) -> list[dict[str, Any]]:
    """Answer each frame with its first value, after doing what its mark says."""
    first = outputs["fingerprint"][:, 0]
    for pixel in first:
        _act(_NAMES.get(int(pixel[2])) if tuple(pixel[:2]) == (255, 0) else None)
    return [{"first": int(pixel[0])} for pixel in first]


def preview(outputs: dict[str, NDArray[Any]], placements: list[Any]) -> list[Any]:
    """Answer each frame with a preview of 100,000 bytes, as an encoded image would be."""
    return [(None, {"preview": np.zeros(100_000, np.uint8)}) for _ in placements]


def megabyte(outputs: dict[str, NDArray[Any]], placements: list[Any]) -> list[Any]:
    """Answer each frame with 1,000,000 bytes."""
    return [(None, {"mask": np.zeros(1_000_000, np.uint8)}) for _ in placements]


def _act(kind: str | None) -> None:
    match kind:
        case "abort":
            os.abort()
        case "exit":
            os._exit(137)
        case "hang":
            threading.Event().wait()
        case "hang_once":
            _hang_if_first(Path(os.environ["HR_HANG_FILE"]))
        case "slow":
            time.sleep(SLOW_S)
        case "raise":
            raise ValueError("this frame is marked")


def _hang_if_first(path: Path) -> None:
    """Hang the first worker that comes here, and no other: it was the worker, not the frame."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return
    threading.Event().wait()
