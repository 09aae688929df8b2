"""The classify adapter on logits with known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import Code
from headrace.protocol.messages import FrameResult, Value
from headrace.workers.adapters import load_adapter


def _classify(logits: Any, **options: Value) -> FrameResult:
    array = np.asarray(logits, np.float32)[np.newaxis]
    (result,) = load_adapter("classify", options).process({"logits": array}, [None])
    return result


def _outputs(result: FrameResult) -> dict[str, Any]:
    assert isinstance(result.outputs, dict), result.message
    return result.outputs


def test_softmax_and_labels() -> None:
    """The best classes come first with their probability and label."""
    outputs = _outputs(_classify([0.0, np.log(3.0), 0.0], top_k=2, labels=["cat", "dog", "cow"]))

    assert outputs == {
        "classes": [1, 0],
        "scores": pytest.approx([0.6, 0.2], abs=1e-5),
        "labels": ["dog", "cat"],
    }


@pytest.mark.parametrize(
    ("activation", "scores"),
    [("none", [2.0, -1.0]), ("sigmoid", [0.880797, 0.268941]), ("softmax", [0.952574, 0.047426])],
)
def test_activations(activation: str, scores: list[float]) -> None:
    """What the graph left out is applied, and nothing twice."""
    assert _outputs(_classify([-1.0, 2.0], activation=activation))["scores"] == pytest.approx(
        scores, abs=1e-5
    )


def test_large_logits_do_not_overflow() -> None:
    """Scores stay numbers for any finite logits."""
    assert _outputs(_classify([3e38, -3e38]))["scores"] == [1.0, 0.0]
    assert _outputs(_classify([3e38, -3e38], activation="sigmoid"))["scores"] == [1.0, 0.0]


def test_equal_scores_come_in_class_order() -> None:
    """The same frame gives the same answer every time."""
    assert _outputs(_classify(np.zeros(9), top_k=4))["classes"] == [0, 1, 2, 3]


def test_trailing_axes_of_one_are_fine() -> None:
    """Some exports keep [classes, 1, 1]."""
    assert _outputs(_classify(np.float32([1, 5, 2]).reshape(3, 1, 1)))["classes"] == [1, 2, 0]


def test_a_wrong_number_of_labels_is_told() -> None:
    """Labels of another model would name every class wrongly."""
    result = _classify([1.0, 2.0], labels=["only one"])

    assert result.code == Code.POST_PROCESS_FAILED
    assert "1 labels for the 2 classes" in result.message


def test_an_empty_output_is_told() -> None:
    """No classes is an error of the frame."""
    assert "no classes" in _classify([]).message
