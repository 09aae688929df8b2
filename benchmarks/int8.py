"""INT8 of the demo's text detector on real frames: boxes against FP32's, size and speed; FP16 beside it.

264 frames of the demo's three clips, captions burned in, fitted to 192x320: 64 to calibrate with, the other
200 to judge by. F1 and average precision of the boxes have FP32's boxes as the truth. Times are CPU
milliseconds a frame on one thread, the files run in turn.

FP16 is judged on the same frames. A CPU runs it by casting to FP32, so its time says nothing of a GPU.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from benchmarks.report import Budget, Cell, Report, Table
from headrace.protocol.messages import Color, Fit, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.front_end import add_front_end
from headrace.workers.onnx_model import read_model
from headrace.workers.prepare.batch_axis import open_batch_axis
from headrace.workers.prepare.calibration import DEMO, load_frames
from headrace.workers.prepare.fp16_search import make_fp16
from headrace.workers.prepare.graph import read_source, save, tensor_types
from headrace.workers.prepare.judge import FrameJudge
from headrace.workers.prepare.metrics import Comparison, default_tolerance
from headrace.workers.prepare.quantise import QuantReport, QuantSettings, quantise, time_in_turn

SPEC = ModelSpec(
    "text",
    "PP-OCRv6",
    image=ImageInput(color=Color.BGR, scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    adapter="text",
)
SIZE_CLASS = SizeClassSpec("small", 192, 320, fit=Fit.LETTERBOX)

CALIBRATION_FRAMES = 64
JUDGED_FRAMES = 200

#: FP16 is searched on so few, node by node; it is judged on all.
FP16_FRAMES = 8

_FIGURES = ("box_f1", "box_ap", "box_map", "box_mean_iou", "sqnr_db", "cosine", "max_abs")


def detector() -> Path:
    """Return the detector that the package rapidocr ships."""
    spec = importlib.util.find_spec("rapidocr")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("rapidocr is not installed: pip install 'headrace[demo]'")
    return Path(next(iter(spec.submodule_search_locations))) / "models/PP-OCRv6_det_small.onnx"


def run(*, quick: bool = False) -> Report:
    """Make the three files and compare them."""
    calibration, judged = (8, 24) if quick else (CALIBRATION_FRAMES, JUDGED_FRAMES)
    frames = load_frames([DEMO], SPEC, SIZE_CLASS, calibration + judged)
    first, second = frames.split(calibration)
    with tempfile.TemporaryDirectory(prefix="headrace-int8-bench-") as folder:
        master, fp16, int8 = (Path(folder) / f"model.{each}.onnx" for each in ("fp32", "fp16", "int8"))
        assert SPEC.image is not None
        model = add_front_end(open_batch_axis(read_source(detector())), SPEC.image)
        save(model.model.proto, master)
        judge = FrameJudge(master, second.feeds(model.feed_name), second.placements, SPEC.adapter, {})
        report = quantise(
            master,
            int8,
            first.feeds(model.feed_name),
            judge,
            default_tolerance("int8", SPEC.adapter),
            QuantSettings(timed_runs=5 if quick else 60),
        )
        limits = default_tolerance("fp16", SPEC.adapter)
        few = first.split(FP16_FRAMES)[0].feeds(model.feed_name)
        make_fp16(
            master,
            fp16,
            tensor_types(read_model(str(master))),
            few,
            lambda path: limits.breaches(judge(path)),
        )
        times = time_in_turn((master, fp16), first.feeds(model.feed_name), 5 if quick else 20)
        half = judge(fp16)
        rows: tuple[tuple[Cell, ...], ...] = (
            ("FP32", _mega(master), round(report.fp32_ms, 2), 1.0, *[""] * len(_FIGURES)),
            ("FP16", _mega(fp16), round(times[1], 2), round(times[0] / times[1], 2), *_cells(half)),
            (
                f"INT8 ({report.method})",
                _mega(int8),
                round(report.int8_ms, 2),
                round(report.speed_ratio, 2),
                *_cells(report.comparison),
            ),
        )
    title = f"The text detector, judged on {second.describe()}; INT8: {report.kinds}"
    table = Table(title, ("file", "MB", "ms a frame", "speed", *_FIGURES), rows)
    return Report(
        "int8",
        (_flat(report, half),),
        (table, _trials(report)),
        (
            Budget.at_least("INT8: F1 of the boxes", report.comparison.task["box_f1"], 0.95),
            Budget.at_least("INT8: speed against FP32", report.speed_ratio, 1.0),
        ),
    )


def _trials(report: QuantReport) -> Table:
    rows = tuple(
        (
            trial.method,
            trial.excluded_count,
            int(trial.figures["frames"]),
            *(round(trial.figures[key], 4) for key in _FIGURES[:5]),
        )
        for trial in report.trials
    )
    left = ", ".join(f"{each.name} ({each.sqnr_db:.1f} dB)" for each in report.excluded) or "none"
    title = f"What was tried; {report.quantised_count} nodes in INT8, layers left in FP32: {left}"
    return Table(title, ("method", "left out", "frames", *_FIGURES[:5]), rows)


def _cells(comparison: Comparison) -> list[Cell]:
    figures = comparison.figures()
    return [round(figures[key], 4) for key in _FIGURES]


def _mega(path: Path) -> float:
    return round(path.stat().st_size / 1e6, 2)


def _flat(report: QuantReport, half: Comparison) -> dict[str, float]:
    found = {f"int8 {key}": value for key, value in report.comparison.figures().items()}
    found |= {f"fp16 {key}": value for key, value in half.figures().items()}
    return found | {
        "fp32_ms": report.fp32_ms,
        "int8_ms": report.int8_ms,
        "speed_ratio": report.speed_ratio,
        "fp32_bytes": float(report.fp32_bytes),
        "int8_bytes": float(report.int8_bytes),
    }
