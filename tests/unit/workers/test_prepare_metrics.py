"""A candidate's outputs against FP32's: figures by hand, what tolerances allow, what adapters add."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.protocol.messages import Oversize, SizeClassSpec
from headrace.workers.geometry import place
from headrace.workers.prepare.metrics import (
    MAX_SQNR_DB,
    Comparer,
    Comparison,
    TensorMeter,
    Tolerance,
    default_tolerance,
)

CLASS = SizeClassSpec("c", 64, 64)
PLACEMENT = place((64, 64, 3), CLASS, Oversize.LETTERBOX)


def test_tensor_figures_by_hand() -> None:
    """Two frames: the figures are those of all their values together."""
    meter = TensorMeter("y")

    meter.add(np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 3.0]], np.float32))
    meter.add(np.array([[0.0, -12.0]], np.float32), np.array([[0.0, -12.0]], np.float32))

    figures = meter.figures()
    assert figures.max_abs == 1.0
    assert figures.max_rel == pytest.approx(1 / 12)
    assert figures.sqnr_db == pytest.approx(10 * math.log10(169 / 1))
    assert figures.cosine == pytest.approx((9 + 12 + 144) / math.sqrt(169 * (9 + 9 + 144)))
    assert figures.non_finite_count == 0


def test_equal_outputs_have_the_highest_ratio_and_not_an_infinite_one() -> None:
    """Figures go into JSON, which has no infinity; an output of zeros has no signal to compare with."""
    same, zeros, noise = TensorMeter("y"), TensorMeter("y"), TensorMeter("y")

    same.add(np.ones(3), np.ones(3))
    zeros.add(np.zeros(3), np.zeros(3))
    noise.add(np.zeros(3), np.ones(3))

    assert (same.figures().sqnr_db, same.figures().cosine) == (MAX_SQNR_DB, 1.0)
    assert (zeros.figures().sqnr_db, zeros.figures().cosine, zeros.figures().max_rel) == (MAX_SQNR_DB, 1, 0)
    assert (noise.figures().sqnr_db, noise.figures().cosine, noise.figures().max_rel) == (-MAX_SQNR_DB, 0, 1)


def test_values_that_are_not_finite_are_counted_and_never_tolerated() -> None:
    """An FP16 model that overflows has figures, and a breach whatever the limits are."""
    comparer = Comparer("tensors", {}, ["y"])

    comparer.add([np.array([[1.0, 2.0, np.inf]])], [np.array([[1.0, np.nan, np.inf]])], None)

    comparison = comparer.result()
    assert comparison.figures()["non_finite"] == 1.0
    assert comparison.figures()["max_abs"] == 0.0
    assert Tolerance().breaches(comparison) == ("1 values are not finite where FP32's are",)
    assert comparison.rank < Comparison(1, (), {"box_f1": 0.0}).rank


def test_an_output_of_another_shape_is_all_noise() -> None:
    """A candidate that lost values is as wrong as can be, instead of an error of numpy's."""
    meter = TensorMeter("y")

    meter.add(np.ones(4), np.ones(3))

    assert meter.figures().sqnr_db == 0.0
    assert meter.figures().cosine == 0.0


def test_top_1_and_top_5_agree_with_fp32() -> None:
    """The best class stays, moves to the third place, or drops out of the best five."""
    comparer = Comparer("classify", {"output": "logits"}, ["other", "logits"])
    reference = np.arange(8.0)[np.newaxis]
    for scores in (np.arange(8.0), [0, 1, 2, 3, 4, 9, 8, 7], [9, 8, 7, 6, 5, 0, 1, 2]):
        comparer.add([np.zeros(1), reference], [np.zeros(1), np.array([scores])], None)

    assert comparer.result().task == {"top1_agreement": 1 / 3, "top5_agreement": 2 / 3}


def test_boxes_of_a_detector_are_compared_through_its_adapter() -> None:
    """One detection of two is lost: F1 2/3."""
    comparer = Comparer("detect", {"layout": "nms"}, ["boxes"])
    rows = np.array([[[0, 0, 20, 20, 0.9, 1], [30, 30, 50, 50, 0.8, 2]]], np.float32)

    comparer.add([rows], [rows * np.array([[[1.0], [0.0]]])], PLACEMENT)

    task = comparer.result().task
    assert (task["reference_boxes"], task["candidate_boxes"]) == (2.0, 1.0)
    assert task["box_f1"] == pytest.approx(2 / 3)


def test_text_boxes_are_compared_through_their_adapter() -> None:
    """A map with one region against the same and against nothing; NaN counts as no box."""
    score_map = np.zeros((1, 1, 64, 64), np.float32)
    score_map[..., 20:36, 8:56] = 0.9
    same, none, bad = (Comparer("text", {}, ["map"]) for _ in range(3))

    same.add([score_map], [score_map], PLACEMENT)
    none.add([score_map], [np.zeros_like(score_map)], PLACEMENT)
    bad.add([score_map], [np.full_like(score_map, np.nan)], PLACEMENT)

    assert [each.result().task["box_f1"] for each in (same, none, bad)] == [1.0, 0.0, 0.0]
    assert same.result().task["reference_boxes"] == 1.0


@pytest.mark.parametrize(
    ("tolerance", "breach"),
    [
        (Tolerance(max_abs=0.5), "max_abs 1 is above 0.5"),
        (Tolerance(max_rel=0.01), "max_rel 0.25 is above 0.01"),
        (Tolerance(min_sqnr_db=40), "sqnr_db 14.15 is below 40"),
        (Tolerance(min_cosine=0.9999), "cosine 0.9806 is below 0.9999"),
        (Tolerance(min_top1_agreement=0.9), ""),
        (Tolerance(), ""),
    ],
    ids=["abs", "rel", "sqnr", "cosine", "no such figure", "no limits"],
)
def test_a_breach_names_figure_and_limit(tolerance: Tolerance, breach: str) -> None:
    """Each limit by itself; one for a task that the model does not have limits nothing."""
    comparer = Comparer("tensors", {}, ["y"])
    comparer.add([np.array([[3.0, 4.0, 1.0]])], [np.array([[3.0, 4.0, 0.0]])], None)

    assert tolerance.breaches(comparer.result()) == ((breach,) if breach else ())


def test_candidates_are_ranked_by_their_task_and_then_by_their_noise() -> None:
    """Boxes count more than decibels; equal boxes leave the choice to the decibels."""
    meter = TensorMeter("y")
    meter.add(np.ones(4), np.ones(4) * 0.9)
    noisy, perfect = (meter.figures(),), ()

    better_boxes = Comparison(1, noisy, {"box_f1": 0.99})
    fewer_boxes = Comparison(1, perfect, {"box_f1": 0.9})
    same_boxes = Comparison(1, perfect, {"box_f1": 0.9901})

    assert fewer_boxes.rank < better_boxes.rank < same_boxes.rank


def test_defaults_limit_what_users_of_an_adapter_see() -> None:
    """Boxes for detectors, classes for classifiers, numbers where nothing is known of them."""
    assert set(default_tolerance("int8", "text").as_dict()) == {"min_box_f1"}
    assert set(default_tolerance("int8", "classify").as_dict()) == {"min_top1_agreement"}
    assert set(default_tolerance("int8", "tensors").as_dict()) == {"min_sqnr_db", "min_cosine"}
    assert set(default_tolerance("fp16", "detect").as_dict()) == {"min_cosine", "min_box_f1"}
    assert set(default_tolerance("fp16", "classify").as_dict()) == {"min_cosine", "min_top1_agreement"}
    assert set(default_tolerance("fp16", "tensors").as_dict()) == {"max_rel", "min_cosine"}
