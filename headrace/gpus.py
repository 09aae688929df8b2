"""Which GPUs this process may use, found without loading CUDA: ``headrace up`` starts one worker for each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: One folder per GPU, named by PCI address, made by the NVIDIA driver.
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] | None = None, folder: Path = DRIVER_FOLDER) -> list[str]:
    """Return the values of CUDA_VISIBLE_DEVICES that name one visible GPU each, in order.

    CUDA_VISIBLE_DEVICES is obeyed when it is set (indexes, UUIDs; it ends at the first -1, as CUDA reads it).
    """
    variables = os.environ if environment is None else environment
    listed = variables.get("CUDA_VISIBLE_DEVICES")
    try:
        present = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
    if listed is None:
        return [str(index) for index in range(len(present))]
    chosen: list[str] = []
    for entry in (item.strip() for item in listed.split(",")):
        if not entry or entry.startswith("-") or (entry.isdigit() and int(entry) >= len(present)):
            break
        chosen.append(entry)
    return chosen
