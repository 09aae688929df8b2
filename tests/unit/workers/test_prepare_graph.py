"""Reading, tidying and writing graphs, with weights inside and outside."""

from __future__ import annotations

from pathlib import Path

import hr_prepare
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.workers.onnx_model import read_model
from headrace.workers.prepare import graph
from headrace.workers.prepare.fp16_search import make_fp16
from headrace.workers.prepare.graph import load_proto, read_source, save, sort_nodes, tensor_types

FEED = {"x": np.random.default_rng(3).normal(size=(2, 3, 16, 16)).astype(np.float32)}


def run(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, FEED)[0])


@pytest.mark.parametrize("is_external", [False, True])
def test_a_saved_graph_answers_as_its_source(tmp_path: Path, is_external: bool) -> None:
    """Wherever the weights lay before, they are in the one file afterwards: even shapes, with which ONNX
    Runtime can't run the source itself."""
    whole = hr_prepare.write(hr_prepare.small_net("n"), tmp_path / "whole.onnx")
    path = hr_prepare.write(hr_prepare.small_net("n"), tmp_path / "m.onnx", is_external=is_external)
    (tmp_path / "out").mkdir()

    files = save(read_source(path).proto, tmp_path / "out" / "new.onnx", tmp_path)

    assert [file.name for file in files] == ["new.onnx"]
    np.testing.assert_array_equal(run(files[0]), run(whole))


def test_weights_beyond_one_protobuf_message_go_into_a_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 2 GB, here above 1000 bytes: every step works by path, and FP16 has its weights apart, too."""
    monkeypatch.setattr(graph, "EXTERNAL_BYTES", 1000)
    monkeypatch.setattr(graph, "SMALL_BYTES", 100)
    source = hr_prepare.write(hr_prepare.small_net("n"), tmp_path / "m.onnx", is_external=True)
    whole = hr_prepare.write(hr_prepare.small_net("n"), tmp_path / "whole.onnx")
    out = tmp_path / "out"
    out.mkdir()

    master, weights = save(read_source(source).proto, out / "full.onnx", tmp_path)
    types = tensor_types(read_model(str(master)))
    rows = [{"x": FEED["x"][:1]}]
    make_fp16(master, out / "half.onnx", types, lambda: rows, lambda _path: ())

    assert weights.stat().st_size > 1000 > master.stat().st_size - 1000
    assert sorted(p.name for p in out.iterdir()) == [
        "full.onnx",
        "full.onnx.weights",
        "half.onnx",
        "half.onnx.weights",
    ]
    np.testing.assert_array_equal(run(master), run(whole))
    np.testing.assert_allclose(run(out / "half.onnx"), run(whole), atol=0.05)


def test_nothing_serialises_a_graph_with_weights_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """protobuf refuses 2 GB: so does this stand-in, far below."""
    monkeypatch.setattr(graph, "EXTERNAL_BYTES", 1000)
    monkeypatch.setattr(graph, "SMALL_BYTES", 100)
    source = hr_prepare.write(hr_prepare.small_net("n"), tmp_path / "m.onnx", is_external=True)
    real = onnx.ModelProto.SerializeToString

    def limited(proto: onnx.ModelProto) -> bytes:
        data = real(proto)
        assert len(data) < 4000, "a message beyond protobuf's limit"
        return bytes(data)

    proto = read_source(source).proto
    monkeypatch.setattr(graph.onnx.ModelProto, "SerializeToString", limited, raising=False)
    files = save(proto, tmp_path / "full.onnx", tmp_path)

    assert len(files) == 2
    assert tensor_types(read_model(str(files[0])))["logits"].shape == (-1, 10)


def test_a_source_is_tidied(tmp_path: Path) -> None:
    """Constants in nodes become initializers; each node has a name of its own; old inputs are no inputs."""
    model = hr_prepare.chain(("Relu", "same", None), ("Mul", "same", 2.0), ("Relu", "", None))
    values = {"value_float": 3.0, "value_ints": [1, 2]}
    for number, (key, value) in enumerate(values.items()):
        model.graph.node.append(helper.make_node("Constant", [], [f"k{number}"], **{key: value}))
    tensor = numpy_helper.from_array(np.float32(5.0))
    model.graph.node.append(helper.make_node("Constant", [], ["k2"], value=tensor))
    model.graph.input.append(helper.make_tensor_value_info("c1", TensorProto.FLOAT, []))
    path = hr_prepare.write(model, tmp_path / "m.onnx")

    tidy = read_source(path).proto

    assert [info.name for info in tidy.graph.input] == ["x"]
    assert [node.name for node in tidy.graph.node] == ["same", "same_", "Relu_2"]
    found = {t.name: numpy_helper.to_array(t).tolist() for t in tidy.graph.initializer}
    assert found == {"c1": 2.0, "k0": 3.0, "k1": [1, 2], "k2": 5.0}


def test_functions_are_inlined(tmp_path: Path) -> None:
    """The steps look at nodes, not into functions."""
    double = helper.make_function(
        "own",
        "Double",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    body = helper.make_graph(
        [helper.make_node("Double", ["x"], ["y"], domain="own")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = helper.make_model(body, opset_imports=opsets, functions=[double], ir_version=8)

    tidy = read_source(hr_prepare.write(model, tmp_path / "m.onnx")).proto

    assert [node.op_type for node in tidy.graph.node] == ["Add"]


def test_nodes_are_put_in_an_order_that_can_be_run() -> None:
    """Converters append at the end what belongs before."""
    model = hr_prepare.chain(("Relu", "a", None), ("Relu", "b", None), ("Relu", "c", None))
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in reversed(model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)

    sort_nodes(model.graph)

    assert [node.name for node in model.graph.node] == ["a", "b", "c"]


def test_unused_weights_are_not_written(tmp_path: Path) -> None:
    """They would be fetched by every worker for nothing."""
    model = hr_prepare.chain(("Relu", "a", None))
    model.graph.initializer.append(hr_prepare.constant("unused", [1.0, 2.0]))

    (file,) = save(model, tmp_path / "m.onnx")

    assert not load_proto(file).graph.initializer
