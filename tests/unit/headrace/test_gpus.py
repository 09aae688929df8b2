"""Visible GPUs are counted the way CUDA does it, without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.gpus import visible_gpus


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("1", ["1"]),
        ("2,0", ["2", "0"]),
        (" 0 , 1 ", ["0", "1"]),
        ("0,7,1", ["0"]),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("GPU-8f2a,GPU-77", ["GPU-8f2a", "GPU-77"]),
    ],
)
def test_cuda_visible_devices_is_obeyed(tmp_path: Path, listed: str | None, expected: list[str]) -> None:
    """The list ends at the first entry that names no GPU, as CUDA reads it."""
    for number in range(3):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    assert visible_gpus(environment, tmp_path) == expected


def test_without_a_driver_there_is_no_gpu(tmp_path: Path) -> None:
    """Whatever the variable says."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == []
