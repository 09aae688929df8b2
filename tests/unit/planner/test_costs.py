"""What batches cost, and the files that say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.planner.costs import Costs, Formula, Measured, ProfileEntry, parse_formula, read_profile
from headrace.protocol.messages import EmulatedCost, ImageInput, ModelSpec, SizeClassSpec

SMALL = SizeClassSpec("s", 100, 100, 8)
MIDDLE = SizeClassSpec("m", 100, 200, 8)
LARGE = SizeClassSpec("l", 100, 300, 8)


def model(*classes: SizeClassSpec, emulated: EmulatedCost | None = None) -> ModelSpec:
    return ModelSpec("m", "1", image=ImageInput(), size_classes=classes, emulated=emulated)


def measured(ms: float) -> Measured:
    return Measured((1, 8), (ms, 2 * ms))


def test_a_formula_costs_what_it_says() -> None:
    """T(b) = base + per frame, and buckets up to the class's limit."""
    formula = Formula(2.0, 0.5)

    assert formula.run_ns(4) == 4_000_000
    assert formula.buckets(6) == ((1, 2.5), (2, 3.0), (4, 4.0), (6, 5.0))


def test_a_batch_takes_the_time_of_the_bucket_that_holds_it() -> None:
    """As captured graphs do; beyond the largest bucket in proportion."""
    cost = Measured((1, 4), (1.0, 3.0))

    assert [cost.run_ns(count) for count in (1, 2, 4, 8)] == [1_000_000, 3_000_000, 3_000_000, 6_000_000]
    assert cost.buckets(4) == ((1, 1.0), (4, 3.0))
    assert cost.buckets(2) == ((1, 1.0), (2, 3.0))


def test_a_class_that_was_not_measured_is_estimated_by_its_area() -> None:
    """Between two measured classes on the line between them, outside in proportion to the nearest."""
    costs = Costs([ProfileEntry("m", SMALL, measured(1.0)), ProfileEntry("", LARGE, measured(2.0))])

    between = costs.of(model(MIDDLE), MIDDLE)
    below = costs.of(model(), SizeClassSpec("x", 50, 100, 8))
    above = costs.of(model(), SizeClassSpec("x", 100, 600, 8))

    assert (between.run_ns(1), between.run_ns(8)) == (1_500_000, 3_000_000)
    assert below.run_ns(1) == 500_000
    assert [costs.is_estimated(model(), one) for one in (SMALL, MIDDLE, LARGE)] == [False, True, False]
    assert above.run_ns(1) == 4_000_000


def test_the_profile_comes_before_the_configuration_and_the_default_last() -> None:
    """What was measured is believed first."""
    emulated = model(SMALL, emulated=EmulatedCost(5.0, 0.0))
    default = Formula(9.0, 0.0)

    assert Costs([ProfileEntry("m", SMALL, measured(1.0))], default).of(emulated, SMALL).run_ns(1) == 10**6
    assert Costs((), default).of(emulated, SMALL).run_ns(1) == 5_000_000
    assert Costs((), default).of(model(SMALL), SMALL).run_ns(1) == 9_000_000


def test_an_unknown_cost_is_refused_with_the_ways_to_say_it() -> None:
    """A guess would be taken for an answer."""
    with pytest.raises(ConfigError, match="--profile"):
        Costs().of(model(SMALL), SMALL)
    with pytest.raises(ConfigError, match="size classes are not known"):
        Costs().classes_of(model())


def test_size_classes_may_come_from_the_profile() -> None:
    """A configuration that leaves them to the graph is served as the pool serves it."""
    costs = Costs([ProfileEntry("m", SMALL, measured(1.0)), ProfileEntry("other", LARGE, measured(1.0))])

    assert costs.classes_of(model()) == (SMALL,)


@pytest.mark.parametrize("text", ["", "x", "1+x", "-1+2", "0", "0+0", "nan+1", "1e9+1"])
def test_a_formula_that_cant_be_is_refused(text: str) -> None:
    """Two numbers from 0, not both 0."""
    with pytest.raises(ValueError, match=r".*"):
        parse_formula(text)


def test_formulas_are_read() -> None:
    """With or without the part per frame."""
    assert parse_formula("2.0+0.15") == Formula(2.0, 0.15)
    assert parse_formula("3") == Formula(3.0, 0.0)


def test_the_status_of_a_pool_is_a_profile(tmp_path: Path) -> None:
    """Classes that no worker serves yet are passed over."""
    entry = {"model": "m", "size_class": "s", "height": 100, "width": 100, "run_ms": [[1, 1.5], [8, 4.0]]}
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"account": {}, "classes": [entry, {**entry, "run_ms": []}]}))

    assert read_profile(path) == (ProfileEntry("m", SMALL, Measured((1, 8), (1.5, 4.0))),)


def test_a_profile_may_be_written_by_hand(tmp_path: Path) -> None:
    """TOML, with a formula or measured buckets."""
    path = tmp_path / "costs.toml"
    path.write_text(
        "[[costs]]\nheight = 100\nwidth = 100\nbase_ms = 2\nper_frame_ms = 0.5\n"
        '[[costs]]\nmodel = "m"\nheight = 100\nwidth = 200\nrun_ms = [[4, 2.0], [1, 1.0]]\n'
    )

    first, second = read_profile(path)

    assert (first.model, first.cost) == ("", Formula(2.0, 0.5))
    assert second == ProfileEntry("m", SizeClassSpec("100x200", 100, 200, 4), Measured((1, 4), (1.0, 2.0)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = ", "neither JSON nor TOML"),
        ("a = 1", "holds neither"),
        ('{"classes": []}', "no class in it"),
        ("[[costs]]\nheight = 1\nwidth = 1\nrun_ms = []", "expected"),
        ("[[costs]]\nheight = 1\nwidth = 1\nrun_ms = [[0, 1]]", "expected"),
        ("[[costs]]\nheight = 1\nwidth = 1\nbase_ms = 1", r"costs\[0\]: per_frame_ms is missing"),
        ("[[costs]]\nwidth = 1\nrun_ms = [[1, 1]]", r"costs\[0\]: height is missing"),
        ("[[costs]]\nheight = -1\nwidth = 1\nrun_ms = [[1, 1]]", "no size"),
    ],
)
def test_a_profile_that_cant_be_used_is_named(tmp_path: Path, text: str, reason: str) -> None:
    """With the entry and the reason."""
    path = tmp_path / "profile"
    path.write_text(text)

    with pytest.raises(ConfigError, match=reason):
        read_profile(path)


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    """One line."""
    with pytest.raises(ConfigError, match="can't be read"):
        read_profile(tmp_path / "none")
