"""Self-tests of a model before it serves: is its batch axis one, and does it look at its input at all?

Two failures seen in the field are silent without them: a session that answers every frame with the result
of the first, and a batch in which the rows are mixed up or all but the first are noise. Whoever can run rows
can be tested: the functions here know nothing of sessions or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.workers.engine import InputPlan
from headrace.workers.model_io import UNBATCHED
from headrace.workers.onnx_model import DYNAMIC

Array: TypeAlias = NDArray[np.generic]
#: Input name to [rows, ...].
Rows: TypeAlias = dict[str, Array]
#: Runs rows and gives the outputs in the graph's order; raises ModelError when the run fails.
Run: TypeAlias = Callable[[Rows], list[Array]]

#: Largest difference between a row of a batch and the same row alone, as a share of the output's largest
#: magnitude. Batched float32 kernels add in another order (differences near 1e-6); float16 has 11 bits.
_TOLERANCE = {"float16": 2e-2, "float32": 1e-3, "float64": 1e-6}

#: Lengths tried for an open axis of a tensor model, the likeliest to run first.
OPEN_AXIS_LENGTHS = (4, 1, 16, 32)

_SEED = 20240607


@dataclass(frozen=True, slots=True)
class Batching:
    """How a model may be batched. ``is_split[i]``: output i has one row per frame; otherwise the whole
    output belongs to the one frame of a batch of one. ``notes`` are for people."""

    largest: int
    is_split: tuple[bool, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test. ``batch`` as in ModelIO; ``outputs`` are names with the graph's declared shapes."""

    label: str
    batch: int
    outputs: tuple[tuple[str, tuple[int, ...] | None], ...]
    plans: tuple[InputPlan, ...]
    open_length: int = OPEN_AXIS_LENGTHS[0]

    def probe(self, kind: int) -> Rows:
        """Return one row of test input; see ``probe_row``."""
        return probe_row(self.plans, kind, self.open_length)


def examine(subject: Subject, run: Run, wanted: int) -> Batching:
    """Find the largest batch, up to ``wanted`` rows, whose rows equal single runs.

    A model whose outputs can't be split by row gets batches of one, with a note. Raises ModelError when
    rows of a batch differ from single runs, when every input gives the same output, or when a fixed batch
    can't be split.
    """
    first, second = subject.probe(0), subject.probe(1)
    if subject.batch > 1:
        return _examine_fixed(subject, run, first, second)
    singles = run(first), run(second)
    notes = _check_distinct(subject, run, *singles)
    if subject.batch == UNBATCHED:
        is_split = tuple(False for _ in subject.outputs)
        return Batching(1, is_split, (*notes, "no batch axis: served with batches of one"))
    if subject.batch == 1 or wanted == 1:
        is_split = tuple(
            _is_row(shape, [single[i] for single in singles]) for i, (_, shape) in enumerate(subject.outputs)
        )
        fixed = ("fixed batch of 1: served with batches of one",) if subject.batch == 1 else ()
        return Batching(1, is_split, (*notes, *fixed))
    try:
        pair = run(join_rows([first, second]))
    except ModelError as error:
        is_split = tuple(_is_row(None, [single[i] for single in singles]) for i in range(len(singles[0])))
        return Batching(1, is_split, (*notes, f"served with batches of one: a batch of two failed: {error}"))
    is_split, unsplit = _split_by_rows(subject, singles, pair)
    if unsplit:
        why = f"served with batches of one: output {', '.join(unsplit)} can't be split by frame"
        return Batching(1, is_split, (*notes, why))
    for row, single in enumerate(singles):
        for (name, _), alone, together in zip(subject.outputs, single, pair, strict=True):
            _check_row(subject.label, name, alone[0], together[row])
    return Batching(wanted, is_split, notes)


def probe_row(plans: Sequence[InputPlan], kind: int, open_length: int = OPEN_AXIS_LENGTHS[0]) -> Rows:
    """Return one row of test input, the same for the same arguments.

    Kinds 0 and 1 are different noise, 2 is all low, 3 all high, 4 a ramp. Whole numbers that are no pixels
    stay 0 or 1: they may be indexes into a table of unknown length.
    """
    rng = np.random.default_rng([_SEED, kind])
    rows: Rows = {}
    for plan in plans:
        shape = tuple(open_length if axis == DYNAMIC else axis for axis in plan.shape)
        dtype = np.dtype(plan.dtype)
        low, high = (0, 255) if plan.is_image else (0, 1)
        if kind == 4:
            size = int(np.prod(shape, dtype=np.int64))
            values: Array = np.linspace(low, high, size).reshape(shape)
        elif kind >= 2:
            values = np.full(shape, low if kind == 2 else high)
        elif dtype.kind == "f":
            values = rng.standard_normal(shape)
        else:
            values = rng.integers(low, high + 1, shape)
        rows[plan.name] = values.astype(dtype)[np.newaxis]
    return rows


def join_rows(rows: Sequence[Rows]) -> Rows:
    """Stack rows into one batch."""
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _examine_fixed(subject: Subject, run: Run, first: Rows, second: Rows) -> Batching:
    size = subject.batch
    low, high = subject.probe(2), subject.probe(3)
    # The second row of one batch is the first of another, among other neighbours: a mix-up shows.
    one = run(join_rows([first, second, *[low] * (size - 2)]))
    other = run(join_rows([second, *[high] * (size - 1)]))
    for (name, _), output in zip(subject.outputs, one, strict=True):
        if output.ndim == 0 or output.shape[0] != size:
            raise ModelError(
                f"model {subject.label}: fixed batch of {size}, but output {name} has shape"
                f" {list(output.shape)} and can't be split by frame: export the model with a batch of 1"
            )
    for (name, _), mine, theirs in zip(subject.outputs, one, other, strict=True):
        _check_row(subject.label, name, mine[1], theirs[0])
    rows = [[output[i] for output in one] for i in range(2)]
    notes = _check_distinct(subject, None, *rows)
    note = f"fixed batch of {size}: smaller batches are padded to {size}"
    return Batching(size, tuple(True for _ in subject.outputs), (*notes, note))


def _split_by_rows(
    subject: Subject, singles: Sequence[list[Array]], pair: list[Array]
) -> tuple[tuple[bool, ...], list[str]]:
    is_split, unsplit = [], []
    for i, (name, _) in enumerate(subject.outputs):
        shapes = [single[i].shape for single in singles]
        is_row_first = pair[i].shape[:1] == (2,) and all(shape[:1] == (1,) for shape in shapes)
        # Rows whose length depends on their neighbours (padded lists of boxes) can't be compared or trusted.
        has_own_length = all(shape[1:] == pair[i].shape[1:] for shape in shapes)
        is_split.append(is_row_first or all(shape[:1] == (1,) for shape in shapes))
        if not (is_row_first and has_own_length):
            unsplit.append(name)
    return tuple(is_split), unsplit


def _is_row(declared: tuple[int, ...] | None, outputs: Sequence[Array]) -> bool:
    if declared and declared[0] == 1:
        return True
    return all(output.shape[:1] == (1,) for output in outputs)


def _check_distinct(
    subject: Subject, run: Run | None, first: list[Array], second: list[Array]
) -> tuple[str, ...]:
    """Raise ModelError unless some two inputs give different outputs; a note where that can't be told."""
    seen = [first, second]
    if not _is_same(first, second):
        return ()
    if run is not None:
        for kind in (2, 3, 4):
            seen.append(run(subject.probe(kind)))
            if not _is_same(first, seen[-1]):
                return ()
    # Labels, empty lists and all-zero tables of boxes may rightly be the same for different noise.
    if all(_says_little(output) for outputs in seen for output in outputs):
        return ("the self-test could not tell different inputs apart by their outputs",)
    raise ModelError(
        f"model {subject.label}: {len(seen)} different inputs gave the same output: the model does not look"
        " at its input, or the runtime answers with an old result"
    )


def _is_same(first: list[Array], second: list[Array]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _says_little(output: Array) -> bool:
    return output.dtype.kind != "f" or output.size == 0 or (output.size > 1 and bool((output == 0).all()))


def _check_row(label: str, name: str, alone: Array, together: Array) -> None:
    what = difference(alone, together)
    if what:
        raise ModelError(
            f"model {label}: output {name} of a frame depends on the other frames of its batch:"
            f" {what} against the frame run alone; set max_batch_size = 1 for this model"
        )


def difference(expected: Array, found: Array) -> str:
    """Return in what way ``found`` differs from ``expected`` (same shape) beyond rounding, or nothing."""
    tolerance = _TOLERANCE.get(expected.dtype.name)
    if tolerance is None:
        return "" if np.array_equal(expected, found) else "another value"
    a, b = expected.astype(np.float64), found.astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    limit = tolerance * max(1e-6, float(finite.max()) if finite.size else 0.0)
    if np.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True):
        return ""
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = np.abs(a - b)
    largest = float(np.max(differences, initial=0.0, where=np.isfinite(differences)))
    return f"a difference of {largest:.3g} (limit {limit:.3g})"
