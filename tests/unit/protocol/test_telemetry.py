"""Figures are a peer's words: bounded in number, length and size."""

from __future__ import annotations

import msgpack
import pytest

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import MAX_FIGURE_CHARACTERS, MAX_FIGURES, Limits, Telemetry


def read(figures: object) -> object:
    header = {"v": 1, "type": "telemetry", "worker": "w", "figures": figures}
    return codec.decode([msgpack.packb(header)], Limits(), codec.FROM_WORKER)


def test_as_many_figures_as_there_may_be_are_taken() -> None:
    """Whole numbers come back as numbers."""
    figures = {f"n{number}": number for number in range(MAX_FIGURES)}

    assert read(figures) == Telemetry("w", {name: float(value) for name, value in figures.items()})


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({f"n{number}": 0.0 for number in range(MAX_FIGURES + 1)}, id="too-many"),
        pytest.param({"a" * (MAX_FIGURE_CHARACTERS + 1): 1.0}, id="long-name"),
        pytest.param({"": 1.0}, id="no-name"),
        pytest.param({"a": "1"}, id="text"),
        pytest.param({"a": float("nan")}, id="nan"),
        pytest.param({"a": 1e19}, id="too-large"),
        pytest.param([1.0], id="a-list"),
        pytest.param({1: 1.0}, id="number-as-name"),
    ],
)
def test_other_figures_are_refused(figures: object) -> None:
    """With the broker's usual codes."""
    with pytest.raises(RemoteProtocolError):
        read(figures)
