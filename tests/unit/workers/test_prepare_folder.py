"""A prepared folder: whole or not at all, what is in it, what is refused, and what a check finds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import hr_prepare
import hr_repo
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace.errors import ConfigError
from headrace.prepared import hash_file, read_manifest
from headrace.protocol.messages import Color, ImageInput, SizeClassSpec
from headrace.workers.prepare.check import check_folder
from headrace.workers.prepare.folder import PrepareOptions, prepare
from headrace.workers.prepare.metrics import Tolerance
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

IMAGE = ImageInput(Color.BGR, 3, 1 / 255, (0.5, 0.4, 0.3), (0.5, 0.5, 0.25))


def options(folder: Path, model: onnx.ModelProto, **fields: object) -> PrepareOptions:
    source = hr_prepare.write(model, folder / "net.onnx")
    given = {"image": IMAGE, "frame_count": 4, "threads": 1, **fields}
    return PrepareOptions(source=source, out=folder / "out", name="net", **given)


def run(path: Path, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


def test_a_folder_holds_both_precisions_and_says_what_they_are(tmp_path: Path) -> None:
    """A model of batch one takes batches of uint8 frames as they are, and all of it is in the manifest."""
    made = prepare(options(tmp_path, hr_prepare.small_net(), adapter="classify"))

    out = tmp_path / "out"
    frames = np.random.default_rng(1).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    pixels = ((frames / 255 - IMAGE.mean) / IMAGE.std).astype(np.float32).transpose(0, 3, 1, 2)
    expected = np.concatenate([run(tmp_path / "net.onnx", {"x": p[np.newaxis]}) for p in pixels])
    feed = {made.inputs[0].name: frames}
    np.testing.assert_allclose(run(out / "model.fp32.onnx", feed), expected, atol=1e-4)
    np.testing.assert_allclose(run(out / "model.fp16.onnx", feed), expected, atol=0.05)
    assert read_manifest(out) == made
    assert (made.inputs[0].dtype, made.inputs[0].shape) == ("uint8", (-1, 16, 16, 3))
    assert [(c.height, c.width) for c in made.size_classes] == [(16, 16)]
    assert made.image is not None
    assert (made.image.color, made.image.mean) == ("bgr", IMAGE.mean)
    assert made.source.sha256 == hash_file(tmp_path / "net.onnx")
    assert made.variants["fp16"].measured["top1_agreement"] == 1.0
    assert made.tools["onnxruntime"] == onnxruntime.__version__
    assert "synthetic" in made.frames
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "out"]


def test_nodes_kept_in_fp32_are_in_the_manifest_and_said(tmp_path: Path) -> None:
    """A model that overflows in FP16 is repaired by itself."""
    said: list[str] = []
    wanted = options(tmp_path, hr_prepare.repairable(), image=None)

    made = prepare(wanted, said.append)

    kept = made.variants["fp16"].notes["kept_in_fp32"]
    assert [node["name"] for node in kept] == ["grow", "more", "shrink"]
    assert any("grow (Mul" in line and "too large for FP16" in line for line in said)


def test_int8_is_made_and_checked_beside_the_others(tmp_path: Path) -> None:
    """Its method and speed are in the manifest; a check runs it, too."""
    wanted = options(tmp_path, hr_prepare.small_net(), adapter="classify", has_int8=True, frame_count=16)
    loose = {"int8": Tolerance(min_cosine=0.9)}

    made = prepare(replace(wanted, tolerances=loose))

    assert list(made.variants) == ["fp32", "fp16", "int8"]
    assert made.variants["int8"].notes["method"] in {"minmax", "entropy", "percentile"}
    assert made.variants["int8"].measured["cosine"] >= 0.9
    assert len(check_folder(tmp_path / "out").passed) == 6


@pytest.mark.parametrize("is_external", [False, True])
def test_several_inputs_and_external_weights(tmp_path: Path, is_external: bool) -> None:
    """Each input gets the batch axis; external weights are taken in and their hash is kept."""
    model = hr_prepare.two_inputs()
    model.graph.node.append(helper.make_node("Mul", ["y", "w"], ["z"], name="scale"))
    model.graph.initializer.append(hr_prepare.constant("w", np.arange(1, 4)))
    model.graph.output[0].name = "z"
    wanted = options(tmp_path, model, image=None)
    hr_prepare.write(model, wanted.source, is_external=is_external)

    made = prepare(wanted)

    assert [(t.name, t.shape) for t in made.inputs] == [("image", (-1, 3, 8, 8)), ("bias", (-1, 3))]
    assert list(made.source.weights) == (["net.data"] if is_external else [])
    assert not check_folder(tmp_path / "out").faults


def if_model() -> onnx.ModelProto:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])],
        "b",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 4])],
    )
    node = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=branch, else_branch=branch)
    shape: list[int | str] = [1, 4]
    return hr_prepare.graph([node], [hr_prepare.constant("c", True, bool)], {"x": shape}, {"y": shape})


def one_value() -> onnx.ModelProto:
    node = helper.make_node("ReduceMean", ["x"], ["y"], name="all", keepdims=0)
    return hr_prepare.graph([node], [], {"x": [1, 4]}, {"y": []})


def mixed() -> onnx.ModelProto:
    node = helper.make_node("CumSum", ["x", "axis"], ["y"], name="sum")
    constants = [hr_prepare.constant("axis", 0, np.int64)]
    return hr_prepare.graph([node], constants, {"x": ["n", 4]}, {"y": ["n", 4]})


def image_index() -> onnx.ModelProto:
    """Rows of (image, value) for what is above zero: the whole batch in one list."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["is"], name="is"),
        helper.make_node("NonZero", ["is"], ["places"], name="where"),
        helper.make_node("Transpose", ["places"], ["list"], name="list"),
        helper.make_node("Cast", ["list"], ["y"], name="cast", to=TensorProto.FLOAT),
    ]
    return hr_prepare.graph(nodes, [hr_prepare.constant("zero", 0.0)], {"x": ["n", 4]}, {"y": ["k", 2]})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (if_model, Reason.CONTROL_FLOW),
        (one_value, Reason.ROWS_NOT_SPLIT),
        (mixed, Reason.ROWS_MIXED),
        (image_index, Reason.ROWS_NOT_SPLIT),
        (hr_prepare.beyond_repair, Reason.FP16_OVERFLOW),
    ],
)
def test_what_can_not_be_prepared_is_refused_and_leaves_nothing(
    tmp_path: Path, model: object, reason: Reason
) -> None:
    """BAT-13: no folder, no half of one, and a reason that scripts can rely on."""
    with pytest.raises(PrepareRefusedError) as caught:
        prepare(options(tmp_path, model(), image=None))  # type: ignore[operator]

    assert caught.value.reason is reason
    assert str(caught.value).startswith(f"{reason}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_inputs_with_different_first_axes_have_no_batch(tmp_path: Path) -> None:
    """Each is named with its shape."""
    model = hr_prepare.two_inputs()
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 3

    with pytest.raises(PrepareRefusedError, match=r"image \[1, 3, 8, 8\], bias \[3, 3\]") as caught:
        prepare(options(tmp_path, model, image=None))

    assert caught.value.reason is Reason.BATCH_AXES_DIFFER


def test_an_open_size_needs_a_size_class(tmp_path: Path) -> None:
    """Nothing can be proven without a size."""
    with pytest.raises(PrepareRefusedError, match="--size-class") as caught:
        prepare(options(tmp_path, hr_prepare.small_net(size="s")))

    assert caught.value.reason is Reason.NO_SIZE


def test_three_size_classes_are_proven_each(tmp_path: Path) -> None:
    """A model of any size is prepared for the sizes that it will be served in."""
    classes = tuple(SizeClassSpec(f"{s}x{s}", s, s, 4) for s in (8, 16, 24))

    made = prepare(options(tmp_path, hr_prepare.small_net(size="s"), size_classes=classes))

    assert [each.label for each in made.size_classes] == ["8x8", "16x16", "24x24"]
    assert made.variants["fp16"].measured["frames"] >= 6


def test_over_tolerance_is_refused_with_the_figures(tmp_path: Path) -> None:
    """FP16 can't be exact, whatever stays in FP32 of half the nodes."""
    strict = {"fp16": Tolerance(max_abs=1e-9)}

    with pytest.raises(PrepareRefusedError, match=r"max_abs .* is above 1e-09") as caught:
        prepare(options(tmp_path, hr_prepare.small_net(), tolerances=strict))

    assert caught.value.reason is Reason.FP16_TOLERANCE


def test_a_folder_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    """And as a whole: nothing of the old one is left in it."""
    wanted = options(tmp_path, hr_prepare.small_net(), has_fp16=False)
    prepare(wanted)
    (tmp_path / "out" / "old").write_text("old")

    with pytest.raises(PrepareRefusedError, match="--force") as caught:
        prepare(wanted)
    prepare(replace(wanted, is_forced=True))

    assert caught.value.reason is Reason.OUT_EXISTS
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["manifest.json", "model.fp32.onnx"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "out"]


def test_an_adapter_that_does_not_take_its_options_is_told_first(tmp_path: Path) -> None:
    """Before minutes of work, not after."""
    with pytest.raises(ConfigError, match="no_such"):
        prepare(options(tmp_path, hr_prepare.small_net(), adapter="classify", adapter_options={"no_such": 1}))


def test_every_reason_is_in_the_documentation() -> None:
    """What it means and what to do, in the order of the code."""
    text = (hr_repo.ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("## What is refused")[1]

    assert re.findall(r"^\| `(\w+)` \| .{10,} \| .{5,} \|$", text.split("\n## ")[0], re.MULTILINE) == list(
        Reason
    )


# -- check --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(options(tmp_path, hr_prepare.small_net()))
    return tmp_path / "out"


def test_an_untouched_folder_passes(folder: Path) -> None:
    """Every file is named with what was found."""
    found = check_folder(folder)

    assert found.faults == []
    assert [line.partition(":")[0] for line in found.passed] == ["model.fp32.onnx", "model.fp16.onnx"] * 2


def test_a_tampered_file_is_named(folder: Path) -> None:
    """One byte, the length as before."""
    path = folder / "model.fp16.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    (fault,) = check_folder(folder).faults

    assert fault.startswith("model.fp16.onnx: sha256")


@pytest.mark.parametrize("change", ["missing", "longer"])
def test_a_file_that_is_missing_or_longer_is_named(folder: Path, change: str) -> None:
    """Hashes need not even be made."""
    path = folder / "model.fp32.onnx"
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"x")

    (fault,) = check_folder(folder).faults

    assert fault.startswith("model.fp32.onnx: ")


def put_in_another_model(folder: Path, precision: str, **changes: object) -> None:
    """Scale the last weights of a file and write its hash into the manifest."""
    path = folder / f"model.{precision}.onnx"
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        if tensor.name == "w3":
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array((values * 1.1).astype(values.dtype), "w3"))
    hr_prepare.write(model, path)
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {"name": path.name, "sha256": hash_file(path), "nbytes": path.stat().st_size}
    manifest["variants"][precision] |= {"files": [entry], **changes}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_that_answers_otherwise_is_found_though_its_hash_is_right(
    folder: Path, precision: str
) -> None:
    """Another model with a right hash, or a runtime that computes something else than it did."""
    put_in_another_model(folder, precision)

    faults = check_folder(folder).faults

    assert f"model.{precision}.onnx: output logits is not what it was" in faults[0]


def test_a_file_that_is_farther_from_fp32_than_it_was_is_found(folder: Path) -> None:
    """The figure of the manifest is the limit, with some room."""
    put_in_another_model(folder, "fp16", seeded_outputs=[])

    (fault,) = check_folder(folder).faults

    assert "differs from FP32 by 0." in fault
