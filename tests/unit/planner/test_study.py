"""Comparing alternatives: the search, the choice, the sentence."""

from __future__ import annotations

import json
from functools import partial

import pytest

from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.errors import ConfigError
from headrace.planner import study_report
from headrace.planner.costs import Costs, Formula
from headrace.planner.streams import PatternSource
from headrace.planner.study import Plan, PolicyChoice, Row, Study, cheapest, check_models, with_costs_relative
from headrace.planner.trace_file import TraceKind
from headrace.planner.world import Overheads
from headrace.plots import Chart
from headrace.protocol.messages import ImageInput, ModelSpec, SizeClassSpec, Status


def plan(**bounds: int) -> Plan:
    spec = ModelSpec("m", "1", image=ImageInput(), size_classes=(SizeClassSpec("c", 8, 8, 4),))
    models = (ModelSettings(spec, {"": ClassPolicy(), "c": ClassPolicy(max_queue_size=64)}),)
    return Plan("pool.toml", CoreSettings(models=models, **bounds), Costs(default=Formula(10.0, 1.0)))


def study(*, streams: int = 40, objective_ms: float = 100.0) -> Study:
    kinds = [(TraceKind((8, 8, 3), 192), 1.0)]
    return Study(
        source=partial(PatternSource, streams, 15.0, kinds, 2.0),
        seconds=2.0,
        warm_up_s=0.2,
        objective_ms=objective_ms,
        share=0.99,
        overheads=Overheads(600.0, 250.0, 60.0, 15.0, 350.0, 500.0, 200.0),
    )


def test_the_search_ends_at_the_fewest_workers() -> None:
    """One worker less does not meet the objective; 600 frames/s need at least 3 at 286 frames/s each."""
    rows = study().find_fewest(plan(), PolicyChoice())

    best = cheapest(rows)
    assert best is not None
    assert best.run.workers == 3
    assert [row.run.workers for row in rows] == sorted(row.run.workers for row in rows)
    assert not study().measure(plan(), PolicyChoice(), 2).meets


def test_the_search_gives_up_when_workers_are_not_what_is_short() -> None:
    """A bound of the broker is met by no number of workers; the sentence names it."""
    rows = study().find_fewest(plan(max_streams=10), PolicyChoice())

    assert cheapest(rows) is None
    assert len(rows) <= 4
    sentence = study_report.verdict(rows, None, study())
    assert "None meets" in sentence
    assert "too_many_streams" in sentence


def test_of_alternatives_without_a_good_frame_the_one_that_ran_most_is_the_closest() -> None:
    rows = [study(objective_ms=1.0).measure(plan(), PolicyChoice(), workers) for workers in (1, 2)]
    served = [row.run.tally.by_status[Status.OK] for row in rows]
    assert [row.run.good_share for row in rows] == [0.0, 0.0]
    assert served[0] < served[1]

    assert "closest: 2 workers" in study_report.verdict(rows, None, study(objective_ms=1.0))


def test_an_objective_shorter_than_a_batch_is_not_searched_for_ever() -> None:
    """More workers can't make a run shorter."""
    rows = study(objective_ms=5.0).find_fewest(plan(), PolicyChoice())

    assert cheapest(rows) is None
    assert len(rows) <= 6
    assert "were late" in study_report.verdict(rows, None, study(objective_ms=5.0))


def test_the_search_goes_on_while_devices_are_short() -> None:
    """Near the shortest latency that there is, twice the workers of full batches change nothing yet."""
    rows = study(objective_ms=14.5).find_fewest(plan(), PolicyChoice())

    best = cheapest(rows)
    assert best is not None
    assert best.run.workers > 2 * study().guess(plan())


def test_a_policy_is_applied_to_every_class() -> None:
    """Other keys of each class stay as configured."""
    changed = PolicyChoice("window", 7.0).apply(plan().settings).models[0].policies

    assert {name: (one.policy, one.max_queue_delay_ms) for name, one in changed.items()} == {
        "": ("window", 7.0),
        "c": ("window", 7.0),
    }
    assert changed["c"].max_queue_size == 64
    settings = plan().settings
    assert PolicyChoice().apply(settings) is settings
    labels = [PolicyChoice("window", delay).label for delay in (None, "auto", 5.0)]
    assert labels == ["window", "window:auto", "window:5"]


def test_costs_are_multiples_of_the_fewest_workers() -> None:
    """The fewest cost 1; of equal numbers the one with more good frames is the cheapest."""
    rows = with_costs_relative([study().measure(plan(), PolicyChoice(), workers) for workers in (4, 8)])

    assert [row.cost for row in rows] == [1.0, 2.0]


def test_a_study_is_told_as_table_object_and_charts() -> None:
    """All three hold every alternative."""
    asked = study()
    rows: list[Row] = [asked.measure(plan(), PolicyChoice(name), 4) for name in ("adaptive", "window")]
    best = cheapest(rows)

    columns, cells = study_report.table(rows)
    told = study_report.as_object(rows, best, asked, "some traffic")
    parts = study_report.plot_parts(rows, asked, "some traffic", "the answer")

    assert len(cells) == 2
    assert all(len(row) == len(columns) for row in cells)
    assert json.loads(json.dumps(told))["cheapest"]["workers"] == 4
    assert {series.name for part in parts if isinstance(part, Chart) for series in part.series} == {
        "adaptive",
        "window",
        "objective",
    }
    assert "4 workers" in study_report.verdict(rows, best, asked)


def test_a_configuration_without_models_is_refused() -> None:
    """Before anything is simulated."""
    with pytest.raises(ConfigError, match="nothing to simulate"):
        check_models(Plan("empty.toml", CoreSettings(models=()), Costs()))
