"""The batch axis is opened where rows stay apart, and refused with the reason where they don't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.errors import ModelError
from headrace.workers.onnx_model import OnnxModel, read_model
from headrace.workers.prepare.batch_axis import PROOF_ROWS, open_batch_axis, prove_rows, relative_difference


def _model(
    folder: Path,
    nodes: list[onnx.NodeProto],
    output: list[int],
    constants: dict[str, np.ndarray] | None = None,
) -> OnnxModel:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return read_model(str(folder / "m.onnx"))


def _feed() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(7).normal(size=(PROOF_ROWS, 2, 3)).astype(np.float32)}


@pytest.mark.parametrize("shape", [[1, 6], [1, -1]])
def test_a_reshape_to_a_fixed_batch_is_opened(tmp_path: Path, shape: list[int]) -> None:
    """Rows of a batch equal the same rows alone afterwards."""
    reshape = helper.make_node("Reshape", ["x", "s"], ["y"])
    model = open_batch_axis(_model(tmp_path, [reshape], [1, 6], {"s": np.array(shape, np.int64)}))

    assert prove_rows(model, _feed(), 1e-6) == 0.0
    assert model.inputs[0].shape == (-1, 2, 3)


def test_a_batch_that_was_multiplied_into_the_first_axis_is_opened(tmp_path: Path) -> None:
    """[batch, 2, 3] to [2 * batch, 3] and back, as attention splits its heads."""
    nodes = [
        helper.make_node("Reshape", ["x", "apart"], ["heads"]),
        helper.make_node("Reshape", ["heads", "joined"], ["y"]),
    ]
    shapes = {"apart": np.array([2, 3], np.int64), "joined": np.array([1, 2, 3], np.int64)}
    model = open_batch_axis(_model(tmp_path, nodes, [1, 2, 3], shapes))

    assert prove_rows(model, _feed(), 1e-6) == 0.0


def test_a_constant_that_is_reshaped_keeps_its_shape(tmp_path: Path) -> None:
    """It has no batch: 0 would copy its own first axis."""
    nodes = [
        helper.make_node("Reshape", ["bias", "s"], ["wide"]),
        helper.make_node("Add", ["x", "wide"], ["y"]),
    ]
    constants = {"bias": np.arange(2, dtype=np.float32), "s": np.array([1, 2, 1], np.int64)}
    model = open_batch_axis(_model(tmp_path, nodes, [1, 2, 3], constants))

    assert prove_rows(model, _feed(), 1e-6) == 0.0


def test_a_row_that_is_longer_for_its_neighbours_is_refused(tmp_path: Path) -> None:
    """BAT-13: lists padded to the longest of the batch can't be compared or trusted."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["is"]),
        helper.make_node("Cast", ["is"], ["ones"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ones", "axes"], ["counts"], keepdims=0),
        helper.make_node("ReduceMax", ["counts"], ["most"], keepdims=1),
        helper.make_node("Slice", ["flat", "from", "most", "axis"], ["y"]),
        helper.make_node("Reshape", ["x", "s"], ["flat"]),
    ]
    constants = {
        "zero": np.array(0, np.float32),
        "axes": np.array([1, 2], np.int64),
        "from": np.array([0], np.int64),
        "axis": np.array([1], np.int64),
        "s": np.array([1, 6], np.int64),
    }
    model = open_batch_axis(_model(tmp_path, [*nodes[:4], nodes[5], nodes[4]], [1, 6], constants))

    with pytest.raises(ModelError, match="depends on its neighbours"):
        prove_rows(model, _feed(), 1e-6)


def test_a_shape_that_other_nodes_read_stays_as_it_was(tmp_path: Path) -> None:
    """Only the Reshape gets a constant of its own."""
    nodes = [
        helper.make_node("Reshape", ["x", "s"], ["flat"]),
        helper.make_node("ConstantOfShape", ["s"], ["zeros"]),
        helper.make_node("Add", ["flat", "zeros"], ["y"]),
    ]
    model = open_batch_axis(_model(tmp_path, nodes, [1, 6], {"s": np.array([1, 6], np.int64)}))

    assert prove_rows(model, _feed(), 1e-6) == 0.0


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [
        ("ReduceMean", {"keepdims": 0}, "can't be split by rows"),
        ("ReduceMean", {"axes": [1, 2], "keepdims": 1}, ""),
        ("CumSum", {}, "mixes the rows"),
    ],
    ids=["one value for the batch", "one value for each row", "rows that depend on others"],
)
def test_rows_that_do_not_stay_apart_are_refused(
    tmp_path: Path, op: str, attributes: dict[str, object], words: str
) -> None:
    """BAT-13: what is not one independent row for each input row is not batched."""
    inputs, constants = (["x", "axis"], {"axis": np.array(0, np.int64)}) if op == "CumSum" else (["x"], {})
    node = helper.make_node(op, inputs, ["y"], **attributes)
    output = {"CumSum": [1, 2, 3]}.get(op, [1, 1, 1] if "axes" in attributes else [])
    model = open_batch_axis(_model(tmp_path, [node], output, constants))

    if not words:
        assert prove_rows(model, _feed(), 1e-6) <= 1e-6
        return
    with pytest.raises(ModelError, match=words):
        prove_rows(model, _feed(), 1e-6)


def test_control_flow_is_refused_with_the_node(tmp_path: Path) -> None:
    """One condition can't choose for all rows."""
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])],
        "b",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 2, 3])],
    )
    node = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=branch, else_branch=branch)
    model = _model(tmp_path, [node], [1, 2, 3], {"c": np.array(True)})

    with pytest.raises(ModelError, match="node choose is If"):
        open_batch_axis(model)


def test_values_that_are_not_finite_never_count_as_equal() -> None:
    """NaN compares as nothing; it must not slip under a tolerance."""
    nan = np.array([np.nan], np.float32)

    assert relative_difference(nan, nan) == float("inf")
