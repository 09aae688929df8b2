"""Known networks, prepared and served: a real broker hands the folder's files to a real CPU worker.

What comes back is compared with the source in plain ONNX Runtime, one float32 row at a time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import hr_detector
import hr_plant as hp
import hr_prepare
import hr_worker
import numpy as np
import onnx
import onnxruntime
import pytest

from headrace import config, config_settings
from headrace.cli import run
from headrace.demo.caption import draw_caption
from headrace.prepared import read_manifest
from headrace.protocol.messages import Frame, Outcome, Status
from headrace.workers.prepare.boxes import Boxes, BoxMeter

#: The two large ones take half a minute of one core to prepare: FULL_TESTS=1 runs them.
SHIPPED = ["squeezenet", "shufflenet"]
if os.environ.get("FULL_TESTS", "") not in {"", "0"}:
    SHIPPED += ["resnet50", "densenet121"]

#: Of the largest value of the output, as the folders' `fp16.max_rel` has it.
TOLERANCE = 2e-2

BATCH_SIZES = (1, 2, 4)

#: Size classes of the detector: the smallest of the demo's, and two that the test's pictures fit exactly. All
#: small, since every one is run some twenty times.
SIZES = ("96x192", "160x192", "160x256")

#: The detector in PyTorch's words: BGR, (pixel / 255 - 0.5) / 0.5.
DETECTOR = ["--adapter", "text", "--color", "bgr", "--mean", "0.5", "--std", "0.5", "--calibration", "demo"]


def prepared(source: Path, out: Path, *arguments: str) -> Path:
    code = run(["prepare", str(source), "--out", str(out), "--threads", "2", *arguments])
    assert code == 0
    return out


def plant_model(folder: Path, precision: str) -> hp.PlantModel:
    """The folder as a configuration names it."""
    text = f'[[models]]\nname = "m"\npath = "{folder}"\nprecision = "{precision}"\n'
    shell = config_settings.to_shell_settings(config.load("test", text=text, environment={}))
    return hp.PlantModel(replace(shell.core.models[0], policies={"": hp.WINDOW}), shell.local_models[0])


def in_plain_onnx_runtime(source: Path, rows: list[np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [np.asarray(session.run(None, {name: row})[0])[0] for row in rows]


def pictures() -> list[np.ndarray]:
    """Four coarse patterns, each of another colour: to a network of random weights noise is alike."""
    rng = np.random.default_rng(9)
    colours = np.array([(255, 20, 20), (20, 255, 20), (20, 20, 255), (255, 255, 20)])
    small = [rng.integers(0, 2, (4, 4, 1)) * colour for colour in colours]
    return [image.repeat(56, axis=0).repeat(56, axis=1).astype(np.uint8) for image in small]


def frames(images: list[np.ndarray]) -> list[Frame]:
    return [hr_worker.raw_frame(image) for image in images]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_network_of_batch_one_serves_batches_in_both_precisions(
    tmp_path_factory: pytest.TempPathFactory, name: str, precision: str
) -> None:
    """Its file takes one float image; prepared, it takes batches of 1, 2 and 4 uint8 frames. FP16 runs on the
    CPU by casts. Each network is prepared once, which takes some seconds."""
    base = tmp_path_factory.getbasetemp() / f"shipped-{name}"
    source, folder = base / "net.onnx", base / "prepared"
    if not folder.exists():
        base.mkdir()
        hr_prepare.write_shipped(name, source)
        prepared(source, folder, "--frames", "2", "--adapter", "tensors")
    images = pictures()
    rows = [(image.astype(np.float32) / 255).transpose(2, 0, 1)[np.newaxis] for image in images]
    expected = in_plain_onnx_runtime(source, rows)
    limit = TOLERANCE * np.abs(expected).max()
    if precision == "fp32":
        # Half of the way to the next row at most: rows that went astray show.
        limit = min(limit, min(np.abs(row - other).max() for row, other in combinations(expected, 2)) / 2)

    with hp.running_plant(base / precision, plant_model(folder, precision)) as plant:
        answered = [plant.outcomes(*frames(images[:size])) for size in BATCH_SIZES]

    for size, outcomes in zip(BATCH_SIZES, answered, strict=True):
        assert {outcome.batch_size for outcome in outcomes} == {size}
        for outcome, row in zip(outcomes, expected, strict=False):
            found = hp.tensor(outcome).astype(np.float64)
            assert np.abs(found - row).max() <= limit


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained text detector, prepared for three size classes with frames of the demo's clips."""
    arguments = [part for size in SIZES for part in ("--size-class", size)]
    out = tmp_path_factory.mktemp("detector") / "prepared"
    return prepared(hr_detector.detector_path(), out, "--frames", "6", *DETECTOR, *arguments)


def test_the_detectors_manifest_says_what_was_found(detector: Path) -> None:
    """FP16 finds the boxes of FP32 on real frames, and nothing had to stay in FP32 for that."""
    manifest = read_manifest(detector)

    half = manifest.variants["fp16"]
    assert half.measured["box_f1"] >= half.tolerance["min_box_f1"] == 0.98
    assert half.measured["reference_boxes"] > 0
    assert half.notes["kept_in_fp32"] == []
    assert "real frames" in manifest.frames
    assert run(["prepare", "--check", str(detector)]) == 0


def boxes_of(outcome: Outcome) -> Boxes:
    assert outcome.status is Status.OK, outcome.message
    assert isinstance(outcome.outputs, dict)
    boxes = np.array(outcome.outputs["boxes"], np.float64).reshape(-1, 4, 2)
    scores = np.array(outcome.outputs["scores"], np.float64)
    return Boxes(boxes, scores, np.zeros(len(scores), np.int64))


def test_the_detector_serves_three_size_classes_in_both_precisions(detector: Path, tmp_path: Path) -> None:
    """FP16, emulated, finds the boxes that FP32 finds in each size class."""
    clip = hr_detector.clip_frames("carphone_pristine", 2, step=30)
    wide = [np.ascontiguousarray(np.hstack([image, image])[:160, :256]) for image in clip]
    small = [np.ascontiguousarray(image[:96]) for image in clip]
    images = [draw_caption(image, "GATE 7") for image in (*clip, *wide, *small)]
    found = {}
    for precision in ("fp32", "fp16"):
        with hp.running_plant(tmp_path / precision, plant_model(detector, precision)) as plant:
            found[precision] = plant.outcomes(*frames(images))

    assert {outcome.size_class for outcome in found["fp32"]} == set(SIZES)
    meter = BoxMeter()
    for full, half in zip(found["fp32"], found["fp16"], strict=True):
        meter.add(boxes_of(full), boxes_of(half))
    assert meter.figures()["reference_boxes"] >= len(images)
    assert meter.figures()["box_f1"] >= 0.98


def test_an_overflow_is_repaired_named_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report on the screen names every node that stays in FP32."""
    source = hr_prepare.write(hr_prepare.repairable(), tmp_path / "net.onnx")

    prepared(source, tmp_path / "out")

    said = capsys.readouterr().err
    assert "FP16: 3 nodes stay in FP32, values too large for FP16: grow (Mul" in said


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (hr_prepare.beyond_repair, ["fp16_overflow: ", "--no-fp16"]),
        (lambda: hr_prepare.small_net(size="s"), ["no_size: ", "--size-class"]),
    ],
    ids=["beyond repair", "open size"],
)
def test_a_refusal_is_one_line_with_a_stable_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: object, words: list[str]
) -> None:
    """Exit code 65, as for any model that can't be served; no folder."""
    source = hr_prepare.write(model(), tmp_path / "net.onnx")  # type: ignore[operator]

    code = run(["prepare", str(source), "--out", str(tmp_path / "out")])

    said = capsys.readouterr().err
    assert code == 65
    assert all(word in said for word in words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx"]


def test_a_check_of_a_tampered_folder_ends_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named."""
    source = hr_prepare.write(hr_prepare.small_net(), tmp_path / "net.onnx")
    out = prepared(source, tmp_path / "out")
    path = out / "model.fp32.onnx"
    model = onnx.load(str(path))
    model.doc_string = "changed"
    path.write_bytes(model.SerializeToString())

    assert run(["prepare", "--check", str(out)]) == 1
    assert "FAULT model.fp32.onnx" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out DIR is missing"),
        (["--out", "x.onnx"], "may not end in .onnx"),
        (["--out", "x", "--size-class", "8"], "HEIGHTxWIDTH"),
        (["--out", "x", "--mean", "1,2"], "3 numbers are needed"),
        (["--out", "x", "--std", "0"], "3 numbers are needed"),
        (["--out", "x", "--tolerance", "fp16.no_such=1"], "max_rel"),
        (["--out", "x", "--tensors", "--scale", "2"], "no image"),
    ],
)
def test_a_wrong_option_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Before anything is read or made."""
    source = hr_prepare.write(hr_prepare.small_net(), tmp_path / "net.onnx")

    assert run(["prepare", str(source), *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
