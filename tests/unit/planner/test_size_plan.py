"""Size classes from recorded shapes: each method against all rectangles there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.planner import size_plan
from headrace.planner.size_plan import Shape

SHAPES = st.dictionaries(
    st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 9), min_size=1, max_size=6
)


def least_area(shapes: dict[Shape, int], choices: Iterable[tuple[Shape, ...]]) -> int:
    """Return the least padded area over all choices that contain every frame."""
    areas = []
    for classes in choices:
        try:
            areas.append(size_plan.padded_area(shapes, classes))
        except ValueError:
            continue
    return min(areas)


def all_choices(shapes: dict[Shape, int], count: int) -> Iterable[tuple[Shape, ...]]:
    heights = {height for height, _ in shapes}
    widths = {width for _, width in shapes}
    grid = sorted(itertools.product(heights, widths))
    for number in range(1, count + 1):
        yield from itertools.combinations(grid, number)


def is_chain(classes: tuple[Shape, ...]) -> bool:
    ordered = sorted(classes)
    return all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(ordered))


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, count=st.integers(1, 3))
def test_subsets_find_the_optimum_over_all_rectangles(shapes: dict[Shape, int], count: int) -> None:
    """No choice of rectangles pads less."""
    found = size_plan.best_subsets(shapes, count)

    assert len(found) <= count
    assert size_plan.padded_area(shapes, found) == least_area(shapes, all_choices(shapes, count))


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, count=st.integers(1, 3))
def test_chains_find_the_optimum_over_all_chains(shapes: dict[Shape, int], count: int) -> None:
    """No chain of rectangles pads less."""
    found = size_plan.best_chain(shapes, count)

    assert len(found) <= count
    assert is_chain(found)
    chains = filter(is_chain, all_choices(shapes, count))
    assert size_plan.padded_area(shapes, found) == least_area(shapes, chains)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, count=st.integers(2, 4))
def test_orientations_find_the_optimum_over_pairs_of_chains(shapes: dict[Shape, int], count: int) -> None:
    """No pair of chains, one for each orientation, pads less when each frame stays with its own."""
    wide = {shape: frames for shape, frames in shapes.items() if shape[1] >= shape[0]}
    high = {shape: frames for shape, frames in shapes.items() if shape[1] < shape[0]}

    found = size_plan.best_by_orientation(shapes, count)

    assert len(found) <= count
    if wide and high:
        best = min(
            least_area(wide, filter(is_chain, all_choices(wide, number)))
            + least_area(high, filter(is_chain, all_choices(high, count - number)))
            for number in range(1, count)
        )
        # Frames may also fit a class of the other orientation that is smaller: never worse.
        assert size_plan.padded_area(shapes, found) <= best
    else:
        assert found == size_plan.best_chain(shapes, count)


def test_sides_are_rounded_up_and_the_padding_is_counted() -> None:
    """A class is a multiple in both directions; the waste counts the rounding too."""
    plan = size_plan.plan_classes({(100, 200): 3}, 2, 32)

    assert plan.classes == ((128, 224),)
    assert plan.waste == pytest.approx(1 - 100 * 200 / (128 * 224))


def test_landscape_and_portrait_frames_get_classes_of_their_own() -> None:
    """Two cameras of one size, one of them turned: nothing is padded to a square."""
    plan = size_plan.plan_classes({(480, 640): 5, (640, 480): 5}, 2, 32)

    assert plan.classes == ((480, 640), (640, 480))
    assert plan.family == "any"
    assert plan.waste == 0.0


def test_many_shapes_are_planned_by_chains() -> None:
    """Beyond the shapes whose subsets can be counted, landscape and portrait each get a chain."""
    shapes = {(32 * n, 64 * n): 1 for n in range(1, 9)} | {(64 * n, 32 * n): 1 for n in range(1, 9)}

    plan = size_plan.plan_classes(shapes, 4, 32)

    assert plan.family == "by orientation"
    assert len(plan.classes) == 4
    assert size_plan.padded_area(shapes, size_plan.best_chain(shapes, 4)) > plan.padded_area


def test_too_many_candidates_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is bounded; a larger multiple brings the candidates down."""
    monkeypatch.setattr(size_plan, "MAX_CANDIDATES", 100)
    shapes = {(side, side + 1): 1 for side in range(1, 40)}

    with pytest.raises(ConfigError, match="larger --multiple"):
        size_plan.plan_classes(shapes, 2, 1)


def test_no_frames_are_refused() -> None:
    """A trace of tensors has nothing to pad."""
    with pytest.raises(ConfigError, match="nothing to plan"):
        size_plan.plan_classes({}, 2)
