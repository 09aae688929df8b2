"""INT8: a graph that holds its tolerance or none, the layers to blame left out, one frame at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.prepared import read_manifest
from headrace.protocol.messages import ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.front_end import add_front_end
from headrace.workers.onnx_model import read_model
from headrace.workers.prepare.calibration import CalibrationFrames, load_frames
from headrace.workers.prepare.folder import PrepareOptions, prepare
from headrace.workers.prepare.judge import FrameJudge
from headrace.workers.prepare.metrics import Tolerance
from headrace.workers.prepare.quantise import (
    QuantReport,
    QuantSettings,
    front_end_nodes,
    has_vnni,
    quantise,
    time_in_turn,
)
from headrace.workers.prepare.ranges import find_ranges
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

CHANNELS = 8
CLASS = SizeClassSpec("c", 16, 16)
IMAGE = ImageInput(scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
QUICK = QuantSettings(timed_runs=2, noise_frames=2)


def _master(folder: Path, *, is_spoilt: bool = False, opset: int = 17) -> Path:
    """Write conv, relu, conv, conv, mean behind a uint8 front end.

    ``is_spoilt``: one channel is made 3,000 times larger between the second and the third convolution, and
    as much smaller in the weights of the third: exact in float32, ruinous with one step for all channels.
    """
    rng = np.random.default_rng(5)
    gains = np.ones((1, CHANNELS, 1, 1), np.float32)
    if is_spoilt:
        gains[0, 0] = 3000.0
    weights = {
        "w1": rng.normal(0, 0.2, (CHANNELS, 3, 3, 3)),
        "w2": rng.normal(0, 0.1, (CHANNELS, CHANNELS, 3, 3)),
        "w3": rng.normal(0, 0.1, (CHANNELS, CHANNELS, 3, 3)) / gains,
        "gains": gains,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], "second", pads=[1, 1, 1, 1]),
        helper.make_node("Mul", ["c", "gains"], ["d"], "gain"),
        helper.make_node("Conv", ["d", "w3"], ["e"], "third", pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["e"], ["y"], "mean"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", CHANNELS, 1, 1])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (folder / "plain.onnx").write_bytes(proto.SerializeToString())
    model = add_front_end(read_model(str(folder / "plain.onnx")), IMAGE).model
    (folder / "master.onnx").write_bytes(model.proto.SerializeToString())
    return folder / "master.onnx"


FEED = "x_uint8_nhwc"


@pytest.fixture(scope="module")
def frames() -> CalibrationFrames:
    return load_frames([], ModelSpec("m", "1", image=IMAGE), CLASS, 12)


def _run(
    master: Path, frames: CalibrationFrames, tolerance: Tolerance, settings: QuantSettings = QUICK
) -> QuantReport:
    first, second = frames.split(6)
    judge = FrameJudge(master, second.feeds(FEED), second.placements, "tensors", {}, 1)
    return quantise(master, master.with_name("int8.onnx"), first.feeds(FEED), judge, tolerance, settings)


def _op_types(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


@pytest.mark.parametrize("opset", [9, 17])
def test_a_well_behaved_model_becomes_int8(tmp_path: Path, frames: CalibrationFrames, opset: int) -> None:
    """Also of an old opset, which has no scales per channel: the graph is lifted to one that has."""
    master = _master(tmp_path, opset=opset)

    report = _run(master, frames, Tolerance(min_sqnr_db=20.0, min_cosine=0.99))

    assert report.comparison.sqnr_db > 20.0
    assert report.kinds.endswith("per channel")
    assert report.excluded == ()
    assert {trial.method for trial in report.trials} == {"minmax", "entropy", "percentile"}
    assert min(report.fp32_ms, report.int8_ms, report.speed_ratio) > 0
    assert (report.fp32_bytes, report.int8_bytes) == (
        master.stat().st_size,
        (tmp_path / "int8.onnx").stat().st_size,
    )
    assert "DequantizeLinear" in _op_types(tmp_path / "int8.onnx")


def test_the_front_end_is_left_out(tmp_path: Path, frames: CalibrationFrames) -> None:
    """Pixels go in as uint8 [n, h, w, 3] and reach the first convolution by float arithmetic."""
    report = _run(_master(tmp_path), frames, Tolerance())

    graph = onnx.load(str(tmp_path / "int8.onnx")).graph
    writers = {name: node for node in graph.node for name in node.output}
    assert len(report.front_end) == 4
    for node in graph.node:
        if node.name in report.front_end:
            assert all(
                writers[name].op_type not in {"QuantizeLinear", "DequantizeLinear"}
                for name in node.input
                if name in writers
            )
    assert graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8


def test_a_gelu_of_five_nodes_becomes_one(tmp_path: Path, frames: CalibrationFrames) -> None:
    """x * (1 + erf(x / sqrt 2)) / 2 with conversions between its nodes would be slower than float32."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["a"], "first", pads=[1, 1, 1, 1]),
        node("Div", ["a", "root"], ["b"], "div"),
        node("Erf", ["b"], ["c"], "erf"),
        node("Add", ["c", "one"], ["d"], "add"),
        node("Mul", ["a", "d"], ["e"], "mul"),
        node("Mul", ["e", "half"], ["f"], "half"),
        node("Conv", ["f", "v"], ["y"], "second"),
    ]
    rng = np.random.default_rng(5)
    values = {
        "w": rng.normal(0, 0.3, (CHANNELS, 3, 3, 3)),
        "v": rng.normal(0, 0.3, (2, CHANNELS, 1, 1)),
        "root": np.sqrt(2.0),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 16, 16])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in values.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "plain.onnx").write_bytes(proto.SerializeToString())
    model = add_front_end(read_model(str(tmp_path / "plain.onnx")), IMAGE).model
    (tmp_path / "master.onnx").write_bytes(model.proto.SerializeToString())

    report = _run(tmp_path / "master.onnx", frames, Tolerance(min_sqnr_db=20.0))

    assert report.comparison.sqnr_db > 20.0
    op_types = _op_types(tmp_path / "int8.onnx")
    assert op_types.count("Gelu") == 1
    assert "Erf" not in op_types


def test_a_prepared_folder_tells_how_its_int8_was_made(tmp_path: Path) -> None:
    """Method, layers left out, trials and speed are in the manifest, which is JSON."""
    _master(tmp_path)

    made = prepare(
        PrepareOptions(
            tmp_path / "plain.onnx",
            tmp_path / "out",
            "m",
            image=IMAGE,
            size_classes=(CLASS,),
            has_fp16=False,
            has_int8=True,
            frame_count=8,
        )
    )

    variant = made.variants["int8"]
    assert variant.files[0].name == "model.int8.onnx"
    assert variant.notes["method"] in {"minmax", "entropy", "percentile"}
    assert variant.notes["excluded_layers"] == []
    assert variant.measured["sqnr_db"] >= variant.tolerance["min_sqnr_db"] == 20.0
    assert read_manifest(tmp_path / "out").variants["int8"] == variant


def test_the_best_method_is_kept(tmp_path: Path, frames: CalibrationFrames) -> None:
    """No other method of the trials has a better rank than the one of the report."""
    report = _run(_master(tmp_path), frames, Tolerance())

    best = max(report.trials[:3], key=lambda trial: trial.figures["sqnr_db"])
    assert report.method == best.method
    assert report.comparison.sqnr_db == best.figures["sqnr_db"]


def test_layers_that_spoil_it_are_found_and_left_in_fp32(tmp_path: Path, frames: CalibrationFrames) -> None:
    """One channel takes all steps of the others. The layer that reads it is named, with those around it."""
    report = _run(_master(tmp_path, is_spoilt=True), frames, Tolerance(min_sqnr_db=20.0))

    assert report.trials[0].breaches
    assert report.excluded[0].name == "third"
    assert report.excluded[0].neighbours == ("second",)  # which the gain is folded into
    assert report.excluded[0].sqnr_db < 20.0 < report.comparison.sqnr_db
    assert report.quantised_count >= 2


def test_what_can_not_be_repaired_is_refused_with_its_figures(
    tmp_path: Path, frames: CalibrationFrames
) -> None:
    """No file is left, and the text has what was reached and what was asked for."""
    master = _master(tmp_path, is_spoilt=True)

    with pytest.raises(PrepareRefusedError, match=r"sqnr_db .* is below 20") as caught:
        _run(master, frames, Tolerance(min_sqnr_db=20.0), QuantSettings(max_rounds=0, timed_runs=2))

    assert caught.value.reason is Reason.INT8_TOLERANCE
    assert not (tmp_path / "int8.onnx").exists()


def test_a_file_that_is_int8_by_name_alone_is_refused(tmp_path: Path, frames: CalibrationFrames) -> None:
    """With every layer in FP32 any tolerance would hold: the search ends before, with whatever bound."""
    master = _master(tmp_path)

    with pytest.raises(PrepareRefusedError) as caught:
        _run(master, frames, Tolerance(min_sqnr_db=150.0), QuantSettings(max_rounds=50, timed_runs=2))

    assert caught.value.reason is Reason.INT8_TOLERANCE


def test_frames_of_the_search_are_not_the_last_word(tmp_path: Path, frames: CalibrationFrames) -> None:
    """What holds on the few frames of the search is judged on all before it is written."""
    master = _master(tmp_path)
    first, second = frames.split(6)
    judge = FrameJudge(master, second.feeds(FEED), second.placements, "tensors", {}, 1)
    limits: list[int | None] = []

    def spy(path: Path, limit: int | None = None) -> object:
        limits.append(limit)
        return judge(path, limit)

    report = quantise(
        master,
        tmp_path / "int8.onnx",
        first.feeds(FEED),
        spy,
        Tolerance(),
        QuantSettings(search_frames=2, timed_runs=2),
    )

    assert limits == [2, 2, 2, None]
    assert report.comparison.frame_count == 6


def test_a_graph_without_anything_to_quantise_is_refused(tmp_path: Path, frames: CalibrationFrames) -> None:
    """There is no INT8 form of a square root."""
    graph = helper.make_graph(
        [helper.make_node("Sqrt", ["x"], ["y"], "root")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "master.onnx").write_bytes(proto.SerializeToString())

    with pytest.raises(PrepareRefusedError) as caught:
        _run(tmp_path / "master.onnx", frames, Tolerance())

    assert caught.value.reason is Reason.NOTHING_TO_CONVERT


def test_the_front_end_ends_where_the_model_begins() -> None:
    """A second Mul is the model's own, and so is anything that reads two tensors."""
    node = helper.make_node
    nodes = [
        node("Transpose", ["x"], ["a"], "t", perm=[0, 3, 1, 2]),
        node("Cast", ["a"], ["b"], "c", to=TensorProto.FLOAT),
        node("Mul", ["b", "k"], ["d"], "m"),
        node("Mul", ["d", "k"], ["e"], "own"),
        node("Add", ["e", "d"], ["y"], "both"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 2, 2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 2, 2])],
        [numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "k")],
    )

    assert front_end_nodes(graph) == ["t", "c", "m"]


def test_ranges_take_frames_one_at_a_time_and_of_any_size(tmp_path: Path) -> None:
    """Two sizes in one pass; a first frame of black sets no width; percentiles lie inside the bounds."""
    master = _master(tmp_path)
    rng = np.random.default_rng(1)
    black = np.zeros((1, 16, 16, 3), np.uint8)
    noise = rng.integers(0, 256, (1, 24, 16, 3), dtype=np.uint8)
    alive = 0

    def feeds() -> Iterator[dict[str, np.ndarray]]:
        nonlocal alive
        for image in (black, noise, noise[:, :16]):
            alive += 1
            yield {FEED: image}

    found = find_ranges(master, feeds, ["Conv"], ("minmax", "entropy", "percentile"), 99.0)

    low, high = (float(np.asarray(v).item()) for v in found["minmax"]["x"].range_value)
    inner = [float(np.asarray(v).item()) for v in found["percentile"]["c"].range_value]
    outer = [float(np.asarray(v).item()) for v in found["minmax"]["c"].range_value]
    assert (low, high) == (-1.0, 1.0)
    assert outer[0] <= inner[0] < inner[1] <= outer[1]
    assert inner[1] - inner[0] < outer[1] - outer[0]
    assert set(found) == {"minmax", "entropy", "percentile"}
    assert alive == 6  # one pass for the bounds, one for both histograms


def test_minmax_alone_needs_one_pass(tmp_path: Path) -> None:
    """Nothing is counted that nobody asked for."""
    passes = []

    def feeds() -> Iterator[dict[str, np.ndarray]]:
        passes.append(1)
        yield {FEED: np.zeros((1, 16, 16, 3), np.uint8)}

    assert set(find_ranges(_master(tmp_path), feeds, ["Conv"], ("minmax",), 99.0)) == {"minmax"}
    assert len(passes) == 1


def test_nothing_of_onnx_runtime_reaches_the_terminal(
    tmp_path: Path, frames: CalibrationFrames, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its tools print as they go; what a command prints is a command's own."""
    _run(_master(tmp_path), frames, Tolerance())

    assert capfd.readouterr() == ("", "")


def test_files_are_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine which slows down does so for both."""
    master = _master(tmp_path)
    order: list[str] = []
    real: Callable[..., object] = onnxruntime.InferenceSession.run

    def spy(session: object, names: object, feed: object) -> object:
        order.append(str(id(session)))
        return real(session, names, feed)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", spy)

    times = time_in_turn((master, master), lambda: iter([{FEED: np.zeros((1, 16, 16, 3), np.uint8)}]), 3)

    assert all(each > 0 for each in times)
    assert order == [order[0], order[1]] * 5
    assert order[0] != order[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni\n", True),
        ("flags\t\t: fpu avx_vnni\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("model name\t: avx512_vnni\n", False),
        ("", False),
    ],
    ids=["avx512", "avx", "neither", "another line", "nothing"],
)
def test_vnni_is_read_from_the_flags(text: str, expected: bool) -> None:
    """Without it weights get 7 bits."""
    assert has_vnni(text) is expected
