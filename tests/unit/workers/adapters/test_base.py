"""Rules that hold for every adapter: one result per frame, each frame alone, plain values only."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from headrace.errors import Code, ConfigError
from headrace.protocol.messages import Status, Value
from headrace.workers.adapters import check_adapter, load_adapter
from headrace.workers.adapters.values import MAX_VALUE_BYTES, MAX_VALUE_DEPTH, to_value
from headrace.workers.geometry import Placement

WHOLE = Placement(32, 32, 32, 32, top=0, left=0, height=32, width=32)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        pytest.param("texts", {}, r"'texts' is unknown: known are tensors, classify", id="unknown-adapter"),
        pytest.param(
            "text", {"treshold": 0.3}, "unknown option treshold: known options are thresh", id="typo"
        ),
        pytest.param("text", {"thresh": 1.5}, "thresh = 1.5: expected a number from 0.0 to 1.0", id="range"),
        pytest.param("text", {"thresh": True}, "thresh = True: expected a number", id="bool-is-no-number"),
        pytest.param("text", {"max_candidates": 2.5}, "max_candidates = 2.5: expected a whole", id="integer"),
        pytest.param("text", {"dilation": 1}, "dilation = 1: expected true or false", id="flag"),
        pytest.param("classify", {"labels": ["a", 1]}, "expected a list of texts", id="labels"),
        pytest.param("classify", {"activation": "relu"}, "one of softmax, sigmoid, none", id="choice"),
        pytest.param("detect", {"layout": "v9"}, "one of auto, v5, v8, nms", id="layout"),
        pytest.param("tensors", {"outputs": "a"}, "expected a list of texts", id="outputs"),
        pytest.param("classify", {"output": 3}, "expected a text", id="text"),
        pytest.param(":x", {}, "unknown", id="no-module"),
    ],
)
def test_a_bad_adapter_configuration_is_refused(name: str, options: dict[str, Value], message: str) -> None:
    """The error names the adapter, the key, the value and what is expected."""
    with pytest.raises(ConfigError, match=message):
        load_adapter(name, options)
    with pytest.raises(ConfigError, match=message):
        check_adapter(name, options)


def test_checking_an_adapter_loads_nothing_heavy() -> None:
    """A broker's machine may lack OpenCV and the user's module; what is a worker's business is left to it."""
    code = (
        "import sys; sys.modules['cv2'] = None; from headrace.workers.adapters import check_adapter;"
        "check_adapter('text', {'thresh': 0.5}); check_adapter('no_such.module:function', {'any': 1});"
        "print([m for m in ('torch', 'onnxruntime', 'onnx', 'zmq') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)

    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_tensors_are_sent_as_they_are() -> None:
    """Each output of a frame is one payload, little-endian, described by dtype and shape; scalars too."""
    outputs: dict[str, Any] = {
        "scores": np.arange(6, dtype=">f4").reshape(2, 3),
        "mask": np.array([[True], [False]]),
        "count": np.array([7, 8]),
    }

    first, second = load_adapter("tensors").process(outputs, [WHOLE, None])

    assert first.status is Status.OK
    assert [(t.name, t.dtype, t.shape) for t in second.tensors] == [
        ("scores", "float32", (3,)),
        ("mask", "bool", (1,)),
        ("count", "int64", ()),
    ]
    assert second.payloads == (
        np.array([3, 4, 5], "<f4").tobytes(),
        b"\x00",
        np.array(8, "<i8").tobytes(),
    )


def test_tensors_can_be_chosen() -> None:
    """Only the named outputs are sent, in that order; a name the model lacks is an error of each frame."""
    outputs: dict[str, Any] = {"a": np.zeros((1, 1)), "b": np.ones((1, 2)), "c": np.ones((1, 2))}

    (chosen,) = load_adapter("tensors", {"outputs": ["c", "a"]}).process(outputs, [WHOLE])
    (missing,) = load_adapter("tensors", {"outputs": ["d"]}).process(outputs, [WHOLE])

    assert [tensor.name for tensor in chosen.tensors] == ["c", "a"]
    assert (missing.code, missing.message) == (
        Code.POST_PROCESS_FAILED,
        "adapter tensors: the model has no output d: it has a, b, c",
    )


def test_output_types_that_cannot_travel_are_an_error_of_the_frame() -> None:
    """A string tensor is refused by name, not found out by the encoder."""
    (result,) = load_adapter("tensors").process({"s": np.array([["x"]])}, [WHOLE])

    assert result.code == Code.POST_PROCESS_FAILED
    assert "output s has dtype" in result.message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["tensors", "classify"])
def test_a_frame_with_non_finite_outputs_is_an_error_alone(name: str, bad: float) -> None:
    """ORT-02: NaN and infinity are found per frame and never published as ordinary scores."""
    logits = np.ones((3, 4), np.float32)
    logits[1, 2] = bad

    results = load_adapter(name).process({"logits": logits}, [WHOLE] * 3)

    assert [result.status for result in results] == [Status.OK, Status.ERROR, Status.OK]
    assert results[1].code == Code.NON_FINITE
    assert "logits" in results[1].message


def test_no_outputs_is_an_error_of_the_frame() -> None:
    """A model without outputs can't be classified, and nothing breaks."""
    (result,) = load_adapter("classify").process({}, [WHOLE])

    assert result.code == Code.POST_PROCESS_FAILED


@pytest.mark.parametrize(
    ("given", "value"),
    [
        pytest.param(np.float32(0.5), 0.5, id="PAY-10-float32"),
        pytest.param(np.int64(-3), -3, id="PAY-10-int64"),
        pytest.param(np.bool_(True), True, id="PAY-10-bool"),
        pytest.param((np.int32(1), np.int32(2)), [1, 2], id="PAY-10-tuple"),
        pytest.param(np.arange(4, dtype=np.float16).reshape(2, 2), [[0.0, 1.0], [2.0, 3.0]], id="array"),
        pytest.param(np.array(5), 5, id="array-of-no-axes"),
        pytest.param({np.str_("a"): [None, b"x", bytearray(b"y")]}, {"a": [None, b"x", b"y"]}, id="nested"),
        pytest.param(2**64 - 1, 2**64 - 1, id="largest-integer"),
    ],
)
def test_values_are_converted(given: object, value: Value) -> None:
    """What comes out is made of exactly the types that msgpack holds."""
    converted = to_value(given)

    assert converted == value
    assert type(converted) is type(value)


def _nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"a": [{1, 2}]}, r"result\.a\[0\] is of type set", id="set"),
        pytest.param({1: "a"}, "key of type int", id="key"),
        pytest.param(2**64, "more than 64 bits", id="large-integer"),
        pytest.param([-(2**63) - 1], "more than 64 bits", id="small-integer"),
        pytest.param("\ud800", "UTF-8", id="surrogate"),
        pytest.param(1j, "type complex", id="complex"),
        pytest.param(np.array([1j]), "type complex", id="complex-array"),
        pytest.param(_nested(MAX_VALUE_DEPTH + 1), "nested deeper", id="deep"),
        pytest.param("x" * MAX_VALUE_BYTES, "larger than", id="large-text"),
        pytest.param(np.zeros((1000, 1000)), "larger than", id="large-array"),
        pytest.param(object(), "type object", id="object"),
    ],
)
def test_values_that_cannot_travel_are_refused(given: object, message: str) -> None:
    """The error names the place and the type, before the encoder sees anything."""
    with pytest.raises(ValueError, match=message):
        to_value(given)


def test_values_at_the_depth_limit_pass() -> None:
    """The limit itself is allowed."""
    assert to_value(_nested(MAX_VALUE_DEPTH)) == _nested(MAX_VALUE_DEPTH)
