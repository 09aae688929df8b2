"""How the outputs of two versions differ: every figure on known arrays."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.workers.compare import MAX_DIFFERENCE, Difference, compare

NAN = float("nan")


def rows(*values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (rows([1, 4], [3, 2]), rows([1, 4], [3, 2]), Difference(2)),
        (rows([1, 4], [3, 2]), rows([1, 4.5], [2, 2.5]), Difference(1, 1.0, 0.25)),
        (rows([0, 0]), rows([0, 0.5]), Difference(0, 0.5, MAX_DIFFERENCE)),
        (rows([1, NAN], [3, 2]), rows([1, 2], [3, 2]), Difference(1, 0.0, 0.0, 1)),
        (rows([1, NAN]), rows([1, NAN]), Difference(1)),
        (np.array([[1], [2]]), np.array([[1], [2]]), Difference(2)),
        (np.array([[1], [2]]), np.array([[1], [3]]), Difference(0, 1.0, 0.5)),
        (rows([1, 2]), rows([1, 2, 3]), Difference(error="output y of a frame has shape [3], not [2]")),
    ],
    ids=[
        "same",
        "other",
        "against zero",
        "NaN in one",
        "NaN in both",
        "same labels",
        "other labels",
        "shape",
    ],
)
def test_figures_are_those_of_the_arrays(first, second, expected):
    """Largest difference, relative to the largest magnitude; where the largest value stands; NaN apart."""
    assert compare({"y": first}, {"other name": second}, len(first)) == expected


def test_only_the_rows_that_both_have_are_compared():
    """The other version may run smaller batches."""
    assert compare({"y": rows([1], [2])}, {"y": rows([1])}, 1) == Difference(1)


def test_the_number_of_outputs_must_be_the_same():
    """What is not there can't be compared."""
    assert compare({"y": rows([1])}, {}, 1).error == "it has 0 outputs, not 1"


def test_an_output_of_the_whole_batch_is_compared_as_a_whole():
    """It has one row, however many frames there are."""
    found = compare({"all": rows([5]), "y": rows([1], [2])}, {"all": rows([6]), "y": rows([1], [2])}, 2)

    assert (found.agreed, found.max_abs) == (2, 1.0)
