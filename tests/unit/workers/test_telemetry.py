"""The thread that polls a device's figures."""

from __future__ import annotations

import queue

from headrace.protocol.messages import MAX_FIGURES
from headrace.workers.telemetry import Poller, most_wanted
from headrace.workers.worker_events import Event, FiguresTaken


def test_figures_are_told_again_and_again() -> None:
    """Until the poller is closed; no figures are no event."""
    told: queue.SimpleQueue[Event] = queue.SimpleQueue()
    answers = iter([{}, {"b": 2.0, "a": 1.0}, {f"n{i}": 0.0 for i in range(MAX_FIGURES + 5)}])
    poller = Poller(lambda: next(answers, {}), told.put, interval_s=0.001)

    first, second = told.get(timeout=10), told.get(timeout=10)
    poller.close()

    assert first == FiguresTaken({"a": 1.0, "b": 2.0})
    assert isinstance(second, FiguresTaken)
    assert len(second.figures) == MAX_FIGURES
    assert not poller._thread.is_alive()


def test_a_device_that_can_not_be_asked_ends_the_polling() -> None:
    """Telemetry never ends a worker."""

    def broken() -> dict[str, float]:
        raise RuntimeError("no driver")

    poller = Poller(broken, lambda event: None, interval_s=0.001)

    poller._thread.join(10)

    assert not poller._thread.is_alive()


def test_figures_of_the_device_go_before_those_of_buckets() -> None:
    """A worker of many buckets has more to tell than a message holds."""
    buckets = {f"graph_bytes/bucket {number:04}": 1.0 for number in range(MAX_FIGURES)}

    told = most_wanted({**buckets, "torch_reserved_bytes": 2.0})

    assert len(told) == MAX_FIGURES
    assert next(iter(told)) == "torch_reserved_bytes"
