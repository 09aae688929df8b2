"""The figures that workers tell."""

from __future__ import annotations

from headrace.broker.figures import KEPT_NS, MAX_WORKERS, WorkerFigures
from headrace.protocol.messages import Telemetry


def test_the_latest_figures_of_each_worker_are_kept() -> None:
    """Labels stand behind a slash; a name that no metric can have is left out."""
    figures = WorkerFigures()
    figures.note(Telemetry("a", {"gpu_busy_ratio": 0.25}), 0)
    figures.note(Telemetry("b", {"graph_replays_total/m:1 small x4": 7.0, "Bad name": 1.0}), 1)
    figures.note(Telemetry("a", {"gpu_busy_ratio": 0.5}), 2)

    assert list(figures.current(2)) == [
        ("b", "graph_replays_total", "m:1 small x4", 7.0),
        ("a", "gpu_busy_ratio", "", 0.5),
    ]


def test_old_figures_are_not_shown() -> None:
    """A worker that ended leaves no frozen gauge."""
    figures = WorkerFigures()
    figures.note(Telemetry("a", {"x": 1.0}), 0)

    assert list(figures.current(KEPT_NS)) == [("a", "x", "", 1.0)]
    assert list(figures.current(KEPT_NS + 1)) == []


def test_workers_that_come_and_go_are_forgotten() -> None:
    """The oldest goes first."""
    figures = WorkerFigures()
    for number in range(MAX_WORKERS + 1):
        figures.note(Telemetry(f"w{number}", {"x": 1.0}), number)

    workers = [worker for worker, *_ in figures.current(MAX_WORKERS)]
    assert len(workers) == MAX_WORKERS
    assert workers[0] == "w1"


def test_drift_is_told_by_worker_and_model() -> None:
    """Other figures stay out of it."""
    figures = WorkerFigures()
    figures.note(
        Telemetry("a", {"model_drift_max_abs/m:1": 0.5, "model_drift_rows_total/m:1": 2.0, "x": 1.0}), 0
    )

    assert figures.drift(0) == [{"worker": "a", "model": "m:1", "max_abs": 0.5, "rows_total": 2.0}]
