"""The tensors adapter: batches as a whole, with the results that rows alone would have."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import Code
from headrace.protocol.messages import FrameResult, Status
from headrace.workers.adapters import load_adapter
from headrace.workers.adapters.base import Adapter, Outputs


def both_ways(given: Outputs, count: int, **options: list[str]) -> list[FrameResult]:
    """Return the results of a batch, after comparing them with those of its rows one by one."""
    adapter = load_adapter("tensors", dict(options))  # type: ignore[arg-type]
    results = adapter.process(given, [None] * count)
    alone = Adapter.process(adapter, given, [None] * count)
    assert [(r.status, r.code, r.message, r.tensors) for r in results] == [
        (r.status, r.code, r.message, r.tensors) for r in alone
    ]
    assert [list(map(bytes, r.payloads)) for r in results] == [list(map(bytes, r.payloads)) for r in alone]
    return results


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param({"a": np.arange(12, dtype=np.float32).reshape(3, 4)}, id="vectors"),
        pytest.param({"a": np.arange(3, dtype=np.int64)}, id="scalars"),
        pytest.param(
            {"a": np.arange(24, dtype=np.uint8).reshape(3, 2, 4), "b": np.array([True, False, True])},
            id="two",
        ),
        pytest.param({"a": np.arange(24, dtype=np.float32).reshape(4, 6)[:3, ::2]}, id="strided"),
        pytest.param({"a": np.arange(6, dtype=">f4").reshape(3, 2)}, id="big-endian"),
        pytest.param({"a": np.zeros((3, 0, 4), np.float32)}, id="nothing-found"),
        pytest.param({"a": np.array([[1.0], [np.nan], [2.0]], np.float32)}, id="not-finite"),
        pytest.param({"a": np.array(["x", "y", "z"])}, id="no-numbers"),
    ],
)
def test_a_batch_gives_what_its_rows_would(outputs: Outputs) -> None:
    """Described once and cut up, or row by row where something is not plain: no difference shows."""
    both_ways(outputs, 3)


def test_each_row_gets_its_own_bytes() -> None:
    results = both_ways({"a": np.arange(6, dtype=np.float32).reshape(3, 2)}, 3)

    assert [np.frombuffer(result.payloads[0], "<f4").tolist() for result in results] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_names_choose_and_order_the_outputs() -> None:
    outputs = {"a": np.zeros((2, 1), np.float32), "b": np.ones((2, 1), np.float32), "c": np.zeros(2)}

    results = both_ways(outputs, 2, outputs=["b", "a"])

    assert [spec.name for spec in results[0].tensors] == ["b", "a"]


def test_a_name_that_the_model_lacks_is_an_error_of_each_frame() -> None:
    results = both_ways({"a": np.zeros((2, 1), np.float32)}, 2, outputs=["b"])

    assert [(result.status, result.code) for result in results] == [
        (Status.ERROR, Code.POST_PROCESS_FAILED)
    ] * 2


def test_a_result_outlives_the_buffer_it_was_made_of() -> None:
    """An engine may write its next batch over the outputs of this one."""
    array = np.ones((2, 3), np.float32)
    results = load_adapter("tensors", {}).process({"a": array}, [None, None])

    array[:] = 7

    assert np.frombuffer(results[1].payloads[0], "<f4").tolist() == [1, 1, 1]
