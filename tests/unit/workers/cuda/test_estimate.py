"""What a model would take of a GPU, told from its file."""

from __future__ import annotations

from pathlib import Path

import hr_models
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.protocol.messages import ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.cuda.estimate import ModelNeed, estimate
from headrace.workers.cuda.graphs import ESTIMATED_GRAPH_BYTES, Budget, choose
from headrace.workers.onnx_model import read_model

SMALL = SizeClassSpec("small", 32, 48, 4)
LARGE = SizeClassSpec("large", 64, 64, 2, traffic_share=3.0)


def need_of(
    folder: Path, graph: onnx.ModelProto, *classes: SizeClassSpec, image: ImageInput | None = None
) -> ModelNeed:
    path = Path(hr_models.write(folder, graph))
    spec = ModelSpec("m", "1", size_classes=classes, image=image)
    return estimate(spec, read_model(str(path)), path)


def test_buckets_are_those_the_engine_makes(tmp_path: Path) -> None:
    """Inputs are uint8, one byte a value; outputs as the graph gives them."""
    need = need_of(tmp_path, hr_models.mean_color(), SMALL, LARGE, image=ImageInput())

    assert [(b.label, b.input_bytes, b.output_bytes, b.share) for b in need.buckets] == [
        ("m:1 small x4", 4 * 32 * 48 * 3, 4 * 3 * 4, 1.0),
        ("m:1 small x2", 2 * 32 * 48 * 3, 2 * 3 * 4, 1.0),
        ("m:1 small x1", 32 * 48 * 3, 3 * 4, 1.0),
        ("m:1 large x2", 2 * 64 * 64 * 3, 2 * 3 * 4, 3.0),
        ("m:1 large x1", 64 * 64 * 3, 3 * 4, 3.0),
    ]
    assert need.graph_bytes == sum(b.io_bytes for b in need.buckets) + 5 * ESTIMATED_GRAPH_BYTES
    assert need.slot_bytes(3) == 3 * (2 * 64 * 64 * 3 + 4 * 3 * 4)


def test_a_fixed_batch_has_one_bucket(tmp_path: Path) -> None:
    """Smaller batches are padded to it."""
    need = need_of(tmp_path, hr_models.mean_color(4, 32, 48), SMALL, image=ImageInput())

    assert [b.label for b in need.buckets] == ["m:1 small x4"]


def test_results_count_while_a_node_still_needs_them(tmp_path: Path) -> None:
    """A chain holds two results at once; a branch that is kept for the end holds a third."""
    value = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.ones((100, 100), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [value("x", TensorProto.FLOAT, ["n", 100])],
        [value("y", TensorProto.FLOAT, ["n", 100])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    need = need_of(tmp_path, model, SizeClassSpec("tensor", 0, 0, 8))

    assert need.result_bytes == 3 * 8 * 100 * 4
    assert need.weight_bytes > 100 * 100 * 4
    assert need.arena_bytes == need.weight_bytes + need.result_bytes


@pytest.mark.parametrize(
    ("graph", "image", "words"),
    [
        pytest.param(hr_models.built_in_nms(), ImageInput(), "known only after a run", id="data-dependent"),
        pytest.param(hr_models.tensor_sum("length"), None, "open axes", id="open-axis"),
    ],
)
def test_a_model_without_graphs_says_why(
    tmp_path: Path, graph: onnx.ModelProto, image: ImageInput | None, words: str
) -> None:
    """Its weights are all that can be told."""
    need = need_of(tmp_path, graph, *((SMALL,) if image else ()), image=image)

    assert words in need.why_loose
    assert (need.result_bytes, need.graph_bytes, need.slot_bytes(3)) == (None, 0, 0)
    assert need.arena_bytes == need.weight_bytes > 0


def test_what_a_limit_leaves_out_is_what_the_engine_would_leave_out(tmp_path: Path) -> None:
    """The same choice: the larger share of traffic first, of equal shares the larger bucket."""
    need = need_of(tmp_path, hr_models.mean_color(), SMALL, LARGE, image=ImageInput())
    limit = 3 * ESTIMATED_GRAPH_BYTES + 2**20

    chosen, left_out = choose(need.buckets, Budget(limit))

    assert [b.label.removeprefix("m:1 ") for b in chosen] == ["large x2", "small x4", "large x1"]
    assert [b.label.removeprefix("m:1 ") for b in left_out] == ["small x2", "small x1"]
