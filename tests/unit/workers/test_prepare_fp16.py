"""FP16: what it can't hold is found, kept in FP32 and named; what can't be mended is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hr_prepare
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace.workers.onnx_model import read_model
from headrace.workers.prepare.batch_axis import relative_difference
from headrace.workers.prepare.fp16_graph import clamped_weights, convert, rounded_copy
from headrace.workers.prepare.fp16_search import Fp16Report, KeptNode, make_fp16
from headrace.workers.prepare.graph import load_proto, read_source, save, tensor_types
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

TOLERANCE = 0.01


def rows() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    for _ in range(4):
        yield {"x": rng.uniform(0.25, 1.0, (1, hr_prepare.WIDTH)).astype(np.float32)}


def run(path: Path, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


def master_of(folder: Path, model: onnx.ModelProto) -> Path:
    source = read_source(hr_prepare.write(model, folder / "source.onnx"))
    return save(source.proto, folder / "master.onnx", folder)[0]


def search(folder: Path, model: onnx.ModelProto) -> Fp16Report:
    master = master_of(folder, model)

    def judge(path: Path) -> tuple[str, ...]:
        worst = max(relative_difference(run(master, feed), run(path, feed)) for feed in rows())
        return () if worst <= TOLERANCE else (f"max_rel {worst:.3g} is above {TOLERANCE}",)

    return make_fp16(master, folder / "half.onnx", tensor_types(read_model(str(master))), rows, judge)


def names(report: Fp16Report) -> list[str]:
    return [node.name for node in report.kept]


def test_nodes_that_overflow_stay_in_fp32_and_are_named(tmp_path: Path) -> None:
    """Givers and readers of a value beyond 65504 are kept, the others converted; the result is right."""
    report = search(tmp_path, hr_prepare.repairable())

    assert names(report) == ["grow", "more", "shrink"]
    assert {node.why for node in report.kept} == {"overflow"}
    assert max(node.value for node in report.kept) == pytest.approx(300_000, rel=0.1)
    assert report.converted_count == 6
    for feed in rows():
        half = run(tmp_path / "half.onnx", feed)
        assert relative_difference(run(tmp_path / "master.onnx", feed), half) <= TOLERANCE


def test_a_model_that_overflows_up_to_its_output_is_refused(tmp_path: Path) -> None:
    """All nodes would have to be kept: FP16 by name only."""
    with pytest.raises(PrepareRefusedError, match="grow") as caught:
        search(tmp_path, hr_prepare.beyond_repair())

    assert caught.value.reason is Reason.FP16_OVERFLOW
    assert not (tmp_path / "half.onnx").exists()


def test_nothing_is_cast_to_fp16_between_two_nodes_that_stay_in_fp32(tmp_path: Path) -> None:
    """The converter alone puts casts there, and 300 000 becomes infinite on the way."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    kept = ["grow", "more", "shrink"]
    master = master_of(tmp_path, hr_prepare.repairable())
    types = tensor_types(read_model(str(master)))
    alone = convert_float_to_float16(load_proto(master), keep_io_types=True, node_block_list=kept)
    hr_prepare.write(alone, tmp_path / "alone.onnx")
    save(convert(load_proto(master), types, kept), tmp_path / "half.onnx")

    feed = next(rows())
    assert np.isinf(run(tmp_path / "alone.onnx", feed)).any()
    assert np.isfinite(run(tmp_path / "half.onnx", feed)).all()


def test_rounding_is_seen_that_a_cpu_does_not_do(tmp_path: Path) -> None:
    """ONNX Runtime computes an FP16 file in FP32 on a CPU and lets 300 000 pass; the copy does not."""
    master = master_of(tmp_path, hr_prepare.repairable())
    types = tensor_types(read_model(str(master)))
    save(convert(load_proto(master), types, []), tmp_path / "half.onnx")
    save(rounded_copy(load_proto(master), types, []), tmp_path / "rounded.onnx")

    feed = next(rows())
    assert np.isfinite(run(tmp_path / "half.onnx", feed)).all()
    assert np.isinf(run(tmp_path / "rounded.onnx", feed)).all()


def test_values_near_the_end_of_fp16_count_as_beyond_it(tmp_path: Path) -> None:
    """The frames are a sample: one that is twice as strong must not overflow in service."""
    report = search(tmp_path, hr_prepare.chain(("Mul", "near", 50_000.0), ("Mul", "back", 1e-4), tail=4))

    assert names(report) == ["near", "back"]


def test_weights_that_fp16_would_cut_keep_their_node(tmp_path: Path) -> None:
    """Counted, named, and used as they are."""
    model = hr_prepare.chain(("Mul", "tiny", 1e-3), ("Mul", "huge", 1e5), ("Mul", "back", 1e-2), tail=5)
    report = search(tmp_path, model)

    assert KeptNode("huge", "Mul", "weights", 100_000.0) in report.kept
    assert [(each.name, each.large, each.tiny) for each in report.clamped] == [("c1", 1, 0)]


def test_nodes_that_lose_too_much_stay_in_fp32(tmp_path: Path) -> None:
    """A value below FP16's smallest is no overflow, and yet nothing is left of it."""
    model = hr_prepare.chain(("Mul", "vanish", 1e-9), ("Mul", "back", 6e4), ("Mul", "more", 1e4), tail=5)
    report = search(tmp_path, model)

    assert "vanish" in names(report)
    assert {node.why for node in report.kept} == {"precision"}


def test_nodes_that_turn_out_not_to_be_needed_are_converted_after_all(tmp_path: Path) -> None:
    """The groups kept for precision double: most of the last one is there by accident."""
    steps = [("Mul", f"step{i}", 1.0 + i / 7) for i in range(12)]
    wanted = {"step5", "step6"}
    master = master_of(tmp_path, hr_prepare.chain(*steps, tail=20))

    def judge(path: Path) -> tuple[str, ...]:
        proto = load_proto(path)
        if path.name == "half.onnx":
            return ()
        makers = {node.name for node in proto.graph.node if node.op_type == "Cast"}
        rounded = {name for name in wanted if any(f"v{name[4:]}_" in maker for maker in makers)}
        return tuple(f"{name} is rounded" for name in sorted(rounded))

    report = make_fp16(master, tmp_path / "half.onnx", tensor_types(read_model(str(master))), rows, judge)

    assert wanted <= set(names(report))
    assert len(report.kept) < sum(2**i for i in range(report.rounds - 1))


def test_a_master_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """There is nothing to compare with."""
    model = hr_prepare.chain(("Mul", "zero", 0.0), ("Log", "log", None), tail=3)

    with pytest.raises(PrepareRefusedError, match=r"node log \(Log\)") as caught:
        search(tmp_path, model)

    assert caught.value.reason is Reason.NOT_FINITE


def test_a_model_without_float32_has_nothing_to_convert(tmp_path: Path) -> None:
    """One that is in FP16 already, or in whole numbers."""
    model = hr_prepare.chain(("Relu", "only", None))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16

    with pytest.raises(PrepareRefusedError) as caught:
        search(tmp_path, model)

    assert caught.value.reason is Reason.NOTHING_TO_CONVERT


def test_a_weight_read_by_both_kinds_of_node_is_not_rounded_for_both(tmp_path: Path) -> None:
    """The node that stays in FP32 has the weight as it was."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"], name="kept"),
        helper.make_node("Mul", ["a", "w"], ["y"], name="converted"),
    ]
    shape: list[int | str] = ["n", hr_prepare.WIDTH]
    model = hr_prepare.graph(nodes, [hr_prepare.constant("w", 1 / 3)], {"x": shape}, {"y": shape})
    master = master_of(tmp_path, model)

    made = convert(load_proto(master), tensor_types(read_model(str(master))), ["kept"])

    types = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert types == {"w": TensorProto.FLOAT16, "w_in_fp32": TensorProto.FLOAT}


def test_clamped_weights_are_counted() -> None:
    """Too large ones and those that FP16 would lift; zeros are neither."""
    model = hr_prepare.chain(("Mul", "only", None))
    model.graph.initializer.append(hr_prepare.constant("w", [1e6, -7e4, 1e-9, 0.0, 1.0]))

    (found,) = clamped_weights(model)

    assert (found.large, found.tiny, found.peak) == (2, 1, 1e6)


def test_inputs_of_resize_that_must_be_float_stay_so(tmp_path: Path) -> None:
    """The scales of a Resize are float32 in any case; its image is converted."""
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["a"], name="resize", mode="linear"),
        helper.make_node("Relu", ["a"], ["y"], name="relu"),
    ]
    model = hr_prepare.graph(
        nodes,
        [hr_prepare.constant("scales", [1, 1, 2, 2])],
        {"x": ["n", 1, 2, 2]},
        {"y": ["n", 1, 4, 4]},
    )
    master = master_of(tmp_path, model)
    types = tensor_types(read_model(str(master)))
    feed = {"x": np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)}

    save(convert(load_proto(master), types, []), tmp_path / "half.onnx")
    save(rounded_copy(load_proto(master), types, []), tmp_path / "rounded.onnx")

    for name in ("half.onnx", "rounded.onnx"):
        np.testing.assert_allclose(run(tmp_path / name, feed), run(master, feed), atol=2e-3)
