"""The self-tests' judgement on runs made by hand: what passes, what is noted, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.workers.engine import InputPlan
from headrace.workers.model_io import UNBATCHED
from headrace.workers.onnx_model import DYNAMIC
from headrace.workers.self_test import Array, Rows, Subject, examine, probe_row

PLANS = (InputPlan("x", "uint8", (4, 4, 3), True),)


def _subject(batch: int = DYNAMIC, shape: tuple[int, ...] | None = (DYNAMIC, 3)) -> Subject:
    return Subject("m:1", batch, (("out", shape),), PLANS)


def _means(rows: Rows) -> Array:
    return rows["x"].astype(np.float32).mean(axis=(1, 2))


def test_an_honest_model_passes_without_a_note() -> None:
    """Rows equal single runs: the wanted batch is granted."""
    batching = examine(_subject(), lambda rows: [_means(rows)], 8)

    assert (batching.largest, batching.is_split, batching.notes) == (8, (True,), ())


def test_small_differences_of_batched_kernels_are_no_mix_up() -> None:
    """A part in a million is another order of additions; float16 may differ more."""
    for dtype, difference in (("float32", 1e-5), ("float16", 5e-3)):

        def run(rows: Rows, dtype: str = dtype, difference: float = difference) -> list[Array]:
            return [(_means(rows) * (1 + difference * (len(rows["x"]) > 1))).astype(dtype)]

        assert examine(_subject(), run, 8).largest == 8


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda rows: [_means(rows)[::-1]], id="rows-swapped"),
        pytest.param(lambda rows: [np.repeat(_means(rows)[:1], len(rows["x"]), axis=0)], id="first-for-all"),
        pytest.param(lambda rows: [_means(rows) + _means(rows).mean()], id="shifted-by-the-batch"),
        pytest.param(lambda rows: [(_means(rows)[::-1] * 100).astype(np.int64)], id="whole-numbers-swapped"),
        pytest.param(
            lambda rows: [np.where([[len(rows["x"]) > 1]], np.nan, _means(rows))], id="nan-in-batches"
        ),
    ],
)
def test_rows_that_depend_on_their_neighbours_are_refused(run: Callable[[Rows], list[Array]]) -> None:
    """ORT-12: whatever the mix-up, the model does not start with batches."""
    with pytest.raises(ModelError, match="max_batch_size = 1"):
        examine(_subject(), run, 8)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(np.zeros((1, 5), np.int64), id="labels"),
        pytest.param(np.zeros((1, 0, 6), np.float32), id="empty-list"),
        pytest.param(np.zeros((1, 100, 6), np.float32), id="table-of-zeros"),
    ],
)
def test_outputs_that_may_rightly_be_equal_are_noted(output: Array) -> None:
    """A detector that finds nothing in noise is not broken; that nothing was proven is said."""
    batching = examine(_subject(), lambda rows: [np.repeat(output, len(rows["x"]), axis=0)], 8)

    assert "could not tell" in batching.notes[0]
    assert batching.largest == 8


def test_one_telling_probe_is_enough() -> None:
    """A model that answers noise with the same number but light and dark differently looks at its input."""

    def run(rows: Rows) -> list[Array]:
        means = rows["x"].astype(np.float32).mean(axis=(1, 2, 3))
        return [np.where(means < 50, 1.0, 2.0).astype(np.float32)[:, None]]

    assert examine(_subject(shape=(DYNAMIC, 1)), run, 4).notes == ()


@pytest.mark.parametrize("constant", [1.0, np.nan])
def test_the_same_answer_to_everything_is_refused(constant: float) -> None:
    """ORT-03: a session that answers with an old result never starts to serve."""

    def run(rows: Rows) -> list[Array]:
        return [np.full((len(rows["x"]), 3), constant, np.float32)]

    with pytest.raises(ModelError, match="5 different inputs gave the same output"):
        examine(_subject(), run, 8)


def test_rows_of_a_length_that_the_batch_decides_are_not_batched() -> None:
    """Lists of boxes padded to the longest of the batch: batches of one, and the output is still per row."""

    def run(rows: Rows) -> list[Array]:
        return [np.repeat(_means(rows)[:, None], 1 + len(rows["x"]), axis=1)]

    batching = examine(_subject(), run, 8)

    assert (batching.largest, batching.is_split) == (1, (True,))
    assert "out can't be split" in batching.notes[0]


def test_two_outputs_are_judged_each_for_itself() -> None:
    """One output per row beside one for the whole batch: batches of one, each read as what it is."""
    subject = Subject("m:1", DYNAMIC, (("mean", None), ("count", None)), PLANS)

    batching = examine(subject, lambda rows: [_means(rows), np.float32(len(rows["x"])).reshape(())], 8)

    assert (batching.largest, batching.is_split) == (1, (True, False))


def test_a_model_without_a_batch_axis_serves_whole_outputs() -> None:
    """Nothing is cut off an output that no axis of frames runs through."""
    batching = examine(_subject(UNBATCHED), lambda rows: [_means(rows)[0]], 8)

    assert (batching.largest, batching.is_split) == (1, (False,))


@pytest.mark.parametrize(("shape", "is_split"), [((1, 3), True), ((DYNAMIC, 3), False)])
def test_with_a_fixed_batch_of_one_the_declared_shape_decides(shape: tuple[int, ...], is_split: bool) -> None:
    """A first axis that is not the batch belongs to the frame as a whole."""
    run = lambda rows: [np.repeat(_means(rows), 1 if is_split else 7, axis=0)]  # noqa: E731

    batching = examine(_subject(1, shape), run, 8)

    assert (batching.largest, batching.is_split) == (1, (is_split,))


def test_a_fixed_batch_that_cannot_be_split_is_refused() -> None:
    """BAT-13: four frames in, one list out: there is no way to serve it."""
    with pytest.raises(ModelError, match=r"fixed batch of 4, but output out has shape \[7, 3\]"):
        examine(_subject(4), lambda rows: [np.zeros((7, 3), np.float32)], 8)


def test_probe_rows_are_the_same_every_time_and_differ_by_kind() -> None:
    """Seeded: a refusal can be reproduced; the five kinds are five different inputs."""
    rows = [probe_row(PLANS, kind)["x"] for kind in range(5)]

    assert all(np.array_equal(row, probe_row(PLANS, kind)["x"]) for kind, row in enumerate(rows))
    assert len({row.tobytes() for row in rows}) == 5


def test_probe_rows_of_index_inputs_stay_small() -> None:
    """Whole numbers may index a table of unknown length: only 0 and 1 are tried; open axes get a length."""
    row = probe_row((InputPlan("ids", "int64", (DYNAMIC, 2), False),), 0, open_length=5)["ids"]

    assert row.shape == (1, 5, 2)
    assert set(np.unique(row)) <= {0, 1}
