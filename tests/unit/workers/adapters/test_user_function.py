"""User functions as adapters: loaded by name, called with copies, their faults kept to the guilty frame."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.errors import Code, ConfigError
from headrace.protocol.messages import FrameResult, Status, Value
from headrace.workers.adapters import Adapter, load_adapter
from headrace.workers.geometry import Placement

WHOLE = Placement(8, 8, 8, 8, top=0, left=0, height=8, width=8)
_names = itertools.count()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Adapter]:
    """Put a function into a module of its own and load it as an adapter by name."""

    def install_function(function: Any, **options: Value) -> Adapter:
        module = types.ModuleType(f"hr_user_module_{next(_names)}")
        module.__dict__["function"] = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return load_adapter(f"{module.__name__}:function", options)

    return install_function


def _run(adapter: Adapter, values: list[float]) -> list[FrameResult]:
    return adapter.process({"x": np.array(values, np.float32).reshape(-1, 1)}, [WHOLE] * len(values))


def test_a_batch_function_gives_one_result_per_frame(install: Callable[..., Adapter]) -> None:
    """It sees the whole batch and the placements; numpy scalars in its results are converted (PAY-10)."""
    adapter = install(
        lambda outputs, placements: [
            {"v": v[0], "w": p.width} for v, p in zip(*_both(outputs, placements), strict=True)
        ]
    )

    results = _run(adapter, [1.5, 2.5])

    assert [result.outputs for result in results] == [{"v": 1.5, "w": 8}, {"v": 2.5, "w": 8}]


def _both(outputs: dict[str, Any], placements: list[Any]) -> tuple[Any, list[Any]]:
    return outputs["x"], placements


@pytest.mark.parametrize("returned", [1, 4, 6, 0])
def test_another_number_of_results_fails_all_frames(install: Callable[..., Adapter], returned: int) -> None:
    """BAT-04: all five get an error naming expected and actual; nothing is matched up by luck."""
    adapter = install(lambda outputs, placements: list(range(returned)))

    results = _run(adapter, [1, 2, 3, 4, 5])

    assert [result.code for result in results] == [Code.RESULT_COUNT] * 5
    assert f"expected 5 results for 5 frames, got {returned}" in results[0].message


@pytest.mark.parametrize("answer", [None, {"a": 1}, "text", 5])
def test_what_is_no_list_fails_all_frames(install: Callable[..., Adapter], answer: object) -> None:
    """A dict has a length too: it is not taken for a list."""
    results = _run(install(lambda outputs, placements: answer), [1, 2])

    assert [result.code for result in results] == [Code.POST_PROCESS_FAILED] * 2


def test_only_the_guilty_frame_fails(install: Callable[..., Adapter]) -> None:
    """A function that raises for a batch is called again frame by frame, with unchanged arrays."""

    def function(outputs: dict[str, Any], placements: list[Any]) -> list[Any]:
        answers = outputs["x"][:, 0].tolist()
        outputs["x"] *= 100  # PAY-03: it may write, and must not see it in the next call
        if 2.0 in answers:
            raise RuntimeError("secret path /home/somebody")
        return answers

    results = _run(install(function), [1, 2, 3])

    assert [result.outputs for result in results] == [1.0, None, 3.0]
    assert results[1].code == Code.POST_PROCESS_FAILED
    assert "RuntimeError" in results[1].message
    assert "secret" not in results[1].message


@pytest.mark.parametrize("per_frame", [True, False])
def test_functions_get_writable_copies(install: Callable[..., Adapter], per_frame: bool) -> None:
    """PAY-03: writing into the arrays changes nobody else's data, also when the outputs are read-only."""

    def function(outputs: dict[str, Any], placements: Any) -> Any:
        outputs["x"] *= 2
        return float(outputs["x"][0]) if per_frame else outputs["x"][:, 0].tolist()

    adapter = install(function, per_frame=per_frame)
    array = np.float32([[1], [2]])
    array.flags.writeable = False

    for _ in range(2):
        results = adapter.process({"x": array}, [WHOLE, WHOLE])
        assert [result.outputs for result in results] == [2.0, 4.0]


def test_per_frame_functions_see_one_row(install: Callable[..., Adapter]) -> None:
    """per_frame = true: no batch axis, one placement, one result; each failure is its own."""

    def function(outputs: dict[str, Any], placement: Any) -> Any:
        assert outputs["x"].shape == (1,)
        return 1 / int(outputs["x"][0])

    results = _run(install(function, per_frame=True), [1, 0, 2])

    assert [result.status for result in results] == [Status.OK, Status.ERROR, Status.OK]
    assert "ZeroDivisionError" in results[1].message


def test_options_become_keywords(install: Callable[..., Adapter]) -> None:
    """Every other option reaches the function by its name, also when it is called frame by frame."""
    adapter = install(lambda outputs, placements, *, factor: [factor] * len(placements), factor=3)

    assert [result.outputs for result in _run(adapter, [1, 2])] == [3, 3]


def test_tensors_beside_a_value(install: Callable[..., Adapter]) -> None:
    """A pair of a value and a dict of arrays sends the arrays as tensors."""
    adapter = install(lambda outputs, placements: [("ok", {"m": np.ones((2, 2), np.uint8)}), ("a", "b")])

    first, second = _run(adapter, [1, 2])

    assert first.outputs == "ok"
    assert [(t.name, t.dtype, t.shape) for t in first.tensors] == [("m", "uint8", (2, 2))]
    assert first.payloads == (b"\x01\x01\x01\x01",)
    assert second.outputs == ["a", "b"]


def test_results_that_cannot_travel_fail_alone(install: Callable[..., Adapter]) -> None:
    """PAY-10: an object in one result is an error of its frame, named by place and type."""
    results = _run(install(lambda outputs, placements: [1, {"a": object()}, 3]), [1, 2, 3])

    assert [result.status for result in results] == [Status.OK, Status.ERROR, Status.OK]
    assert "result.a is of type object" in results[1].message


def test_non_finite_frames_never_reach_the_function(install: Callable[..., Adapter]) -> None:
    """The function gets the other frames, in order, and their results go to the right ones."""
    adapter = install(lambda outputs, placements: outputs["x"][:, 0].tolist())

    results = _run(adapter, [1, np.nan, 3])
    all_bad = _run(adapter, [np.inf])

    assert [result.outputs for result in results] == [1.0, None, 3.0]
    assert results[1].code == all_bad[0].code == Code.NON_FINITE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package_x:f", "module no_such_package_x can't be imported here: ModuleNotFoundError"),
        ("math:no_such_function", "module math has no function no_such_function"),
        ("math:pi", "module math has no function pi"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name: str, message: str) -> None:
    """The error says whether the module or the function is missing."""
    with pytest.raises(ConfigError, match=message):
        load_adapter(name)


def test_options_the_function_does_not_take_are_refused(install: Callable[..., Adapter]) -> None:
    """Found out at start, not by the first frame."""
    with pytest.raises(ConfigError, match="given: factor"):
        install(lambda outputs, placements: [], factor=3)
