"""Prometheus text and readiness, made from one snapshot of the loop.

Not here: histograms of stages, a metric per stream (streams come and go by the thousand; ``headrace status``
shows them). Every figure of the core comes from ``BrokerCore.status``, so that both always agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.broker.counters import Counters, JournalCounts
from headrace.broker.figures import DRIFT
from headrace.broker.http import PLAIN, Answer
from headrace.broker.snapshot import Snapshot, Snapshots

#: How long a scrape waits for the loop. Prometheus gives up after 10 s by default; a loop that does not turn
#: within this is overloaded, and its last figures with their age say more than an error.
SNAPSHOT_TIMEOUT_S = 2.0

#: The format that generate_latest() writes. Older releases of prometheus_client have no name for it.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: status() of the core is nested plain data; what each part holds is written in broker/status.py.
Status: TypeAlias = "dict[str, Any]"

_OUTCOMES = ("ok", "error", "expired", "superseded", "rejected")
_CLASS_LABELS = ("model", "version", "size_class")


def render_metrics(snapshots: Snapshots) -> Answer:
    """Answer /metrics: 503 when the loop has never turned, else the text."""
    snapshot = snapshots.get(SNAPSHOT_TIMEOUT_S)
    if snapshot is None:
        return 503, PLAIN, b"the loop has not turned yet\n"
    registry = CollectorRegistry()
    registry.register(_SnapshotCollector(snapshot))
    return 200, _CONTENT_TYPE, generate_latest(registry)


def render_readiness(snapshots: Snapshots) -> Answer:
    """Answer /readyz: 200 when every model has a worker that serves it and no drain has begun."""
    snapshot = snapshots.get(SNAPSHOT_TIMEOUT_S)
    if snapshot is None:
        return 503, PLAIN, b"the loop has not turned yet\n"
    status: Status = snapshot.status
    if status["is_draining"]:
        return 503, PLAIN, b"draining\n"
    missing = [f"{model['name']}:{model['version']}" for model in status["models"] if not model["workers"]]
    if missing:
        return 503, PLAIN, f"no worker is ready for {', '.join(missing)}\n".encode()
    return 200, PLAIN, b"ready\n"


class _SnapshotCollector(Collector):
    """Turns one snapshot into metric families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry would otherwise collect once more to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        status: Status = self._snapshot.status
        age_s = (time.monotonic_ns() - self._snapshot.taken_ns) / 1e9
        yield _gauge("snapshot_age_seconds", "How old these figures are.", age_s)
        yield from _frame_metrics(status)
        yield from _bound_metrics(status)
        yield from _class_metrics(status["classes"])
        yield _counters("reloads", "Reloads by how they ended.", "phase", status["reloads"])
        yield from _model_metrics(status["models"])
        yield from _worker_metrics(status)
        yield from _shell_metrics(self._snapshot.counters)
        yield from _figure_metrics(self._snapshot)
        if self._snapshot.counters.journal is not None:
            yield from _journal_metrics(self._snapshot.counters.journal)


def _frame_metrics(status: Status) -> Iterator[Metric]:
    account = status["account"]
    yield _counter("frames_received", "Frames that could be read.", account["received"])
    yield _counter("frames_accepted", "Frames that were admitted.", account["accepted"])
    yield _counter("frames_duplicate", "Frames sent again and recognised.", account["duplicates"])
    outcomes = {name: account[name] for name in _OUTCOMES}
    yield _counters("outcomes", "Published ends of frames.", "status", outcomes)
    yield _gauge("frames_unfinished", "Admitted frames without an outcome.", account["unfinished"])
    yield _counters("rejects", "Frames that were not admitted.", "code", status["rejected_by_code"])
    yield _counters("errors", "Frames that ended as error.", "code", status["error_by_code"])
    of_models = CounterMetricFamily(
        "headrace_model_errors", "Frames that ended as error, by model.", labels=["model", "code"]
    )
    for model, codes in status["error_by_model"].items():
        for code, count in codes.items():
            of_models.add_metric([model, code], count)
    yield of_models
    yield _counters("misbehaved", "Messages that can't be read.", "code", status["misbehaved_by_code"])
    yield _counter("frames_requeued", "Frames put back after their worker was lost.", status["requeued"])
    hedges = status["hedges"]
    yield _counter("hedged_batches", "Overdue batches sent a second time.", hedges["batches"])
    yield _counter("hedged_frames", "Frames in them.", hedges["frames"])
    yield _counter("hedges_won", "Second copies that were done first.", hedges["won"])
    yield _counter("hedges_suppressed", "Answers for copies that had lost.", hedges["suppressed"])
    yield _gauge("hedge_budget_frames", "Frames that may be hedged now.", hedges["budget_frames"])
    yield _gauge("quarantined_contents", "Contents of poison frames refused for now.", status["quarantined"])
    yield _counter("late_done", "Results that came too late to count.", status["late_done"])


def _bound_metrics(status: Status) -> Iterator[Metric]:
    yield _gauge("unfinished_bytes", "Payload bytes of unfinished frames.", status["unfinished_bytes"])
    yield _gauge("unfinished_bytes_limit", "Their bound: admission.max_bytes.", status["max_bytes"])
    yield _gauge("retained_outcomes", "Outcomes kept for replay.", status["retained"])
    yield _gauge("retained_bytes", "Memory of outcomes kept for replay.", status["retained_bytes"])
    yield _gauge("retained_bytes_limit", "Its bound: retention.max_bytes.", status["retention_bytes"])
    yield _gauge("streams", "Streams that are remembered.", status["streams_count"])
    yield _counter("streams_stale", "Times that a stream fell silent.", status["streams_stale"])
    yield _gauge("producers", "Producers in a session.", status["producers_count"])


def _model_metrics(models: list[Status]) -> Iterator[Metric]:
    """Yield which version of each model serves, and how its last reload compared."""
    live = GaugeMetricFamily(
        "headrace_model_live", "1 for the version that serves.", labels=["model", "version"]
    )
    figures = {
        "frames": GaugeMetricFamily(
            "headrace_reload_compared_frames", "Frames compared by the last reload.", labels=["model"]
        ),
        "agreement": GaugeMetricFamily(
            "headrace_reload_agreement_ratio", "Share of them with one largest value.", labels=["model"]
        ),
        "max_abs": GaugeMetricFamily(
            "headrace_reload_max_difference", "Largest absolute difference of an output.", labels=["model"]
        ),
    }
    for model in models:
        name = f"{model['name']}:{model['version']}"
        live.add_metric([name, model["live_version"]], 1)
        for key, family in figures.items():
            if model["reload"] is not None:
                family.add_metric([name], model["reload"][key])
    yield live
    yield from figures.values()


def _class_metrics(classes: list[Status]) -> Iterator[Metric]:
    queued = GaugeMetricFamily(
        "headrace_queued_frames", "Waiting frames.", labels=[*_CLASS_LABELS, "priority"]
    )
    for one in classes:
        for priority, count in one["queued"].items():
            queued.add_metric([*_class_labels(one), str(priority)], count)
    yield queued
    gauges = {
        "in_flight": ("in_flight_frames", "Frames at workers."),
        "mean_batch": ("mean_batch_frames", "Mean frames of a batch since the start."),
        "padding_waste": ("padding_waste_ratio", "Share of batched pixels that is padding, 0 to 1."),
        "oldest_wait_ms": ("oldest_wait_milliseconds", "How long the longest waiting frame has waited."),
        "workers": ("class_workers", "Workers that serve the size class."),
        "window_ms": ("batch_window_milliseconds", "How long a frame may now wait for a fuller batch."),
        "batch_limit": ("batch_limit_frames", "Largest batch that the policy makes now."),
    }
    for key, (name, text) in gauges.items():
        family = GaugeMetricFamily(f"headrace_{name}", text, labels=_CLASS_LABELS)
        for one in classes:
            family.add_metric(_class_labels(one), one[key])
        yield family
    for key, (name, text) in {
        "batches": ("batches", "Batches sent to workers."),
        "frames_batched": ("batched_frames", "Frames sent to workers."),
        "promoted": ("promoted_frames", "Frames that rode in a batch of a larger size class."),
    }.items():
        total = CounterMetricFamily(f"headrace_{name}", text, labels=_CLASS_LABELS)
        for one in classes:
            total.add_metric(_class_labels(one), one[key])
        yield total


def _class_labels(one: Status) -> list[str]:
    return [str(one[label]) for label in _CLASS_LABELS]


def _worker_metrics(status: Status) -> Iterator[Metric]:
    states: dict[str, int] = {}
    busy = GaugeMetricFamily(
        "headrace_worker_busy_ratio", "Share of its time a worker has run batches.", labels=["worker"]
    )
    for worker in status["workers"]:
        states[worker["state"]] = states.get(worker["state"], 0) + 1
        busy.add_metric([worker["id"]], worker["busy_share"])
    workers = GaugeMetricFamily("headrace_workers", "Workers by state.", labels=["state"])
    for state in ("preparing", "ready", "leaving"):
        workers.add_metric([state], states.get(state, 0))
    yield workers
    yield busy
    yield _counter("workers_lost", "Workers that went without a goodbye.", status["workers_lost"])


def _figure_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield what workers tell of their devices, as gauges or, when the name says so, counters."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for worker, name, label, value in snapshot.counters.figures.current(snapshot.taken_ns):
        is_drift = name.startswith(DRIFT)
        family = families.get(name)
        if family is None:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            full_name = f"headrace_{name}" if is_drift else f"headrace_worker_{name}"
            text = f"Told by the worker; see docs/{'models' if is_drift else 'gpu'}.md."
            labels = ["model", "worker"] if is_drift else ["worker", "of"]
            family = families[name] = kind(full_name, text, labels=labels)
        family.add_metric([label, worker] if is_drift else [worker, label], value)
    yield from families.values()


def _shell_metrics(counters: Counters) -> Iterator[Metric]:
    yield _counter("published_outcomes", "Outcomes published.", counters.published_count)
    yield _counter("published_messages", "Messages they were bundled into.", counters.published_message_count)
    yield _gauge("subscriptions", "Standing subscriptions.", counters.subscription_count)
    yield _counter("sends_unreachable", "Sends that found their peer gone.", counters.unreachable_count)
    arenas = counters.arenas
    yield _gauge("arenas", "Producers' shared memory that is open.", arenas.open_count)
    yield _counter("arenas_reclaimed", "Shared memory of dead producers removed.", arenas.reclaimed_count)
    yield _counter(
        "payloads_inlined", "Payloads read from shared memory for other hosts.", arenas.inlined_count
    )
    yield _counters("messages_received", "Messages taken in.", "socket", counters.received_count)
    yield _counters("connections_made", "Handshakes completed.", "socket", counters.connected_count)
    yield _counters("connections_lost", "Connections ended.", "socket", counters.disconnected_count)
    yield _counters(
        "handshakes_failed",
        "Connections that broke the transport.",
        "socket",
        counters.handshake_failed_count,
    )
    yield _counters("reports", "Changes of state, as logged.", "name", counters.reports)
    yield _counter("loop_turns", "Turns of the broker's loop.", counters.turn_count)
    yield _counter("loop_busy_seconds", "Time in turns, waiting left out.", counters.busy_ns / 1e9)
    yield _gauge("loop_longest_turn_seconds", "The longest turn so far.", counters.longest_turn_ns / 1e9)


def _journal_metrics(counts: JournalCounts) -> Iterator[Metric]:
    yield _gauge("journal_outcomes", "Outcomes kept on disk.", counts.kept_count)
    yield _gauge("journal_bytes", "Their bytes.", counts.kept_bytes)
    yield _gauge("journal_bytes_limit", "Their bound: retention.max_bytes.", counts.max_bytes)
    yield _counter("journal_commits", "Commits, one fsync each.", counts.commit_count)
    yield _counter("journal_busy_seconds", "Time in appends, fsync included.", counts.busy_ns / 1e9)
    yield _gauge("journal_longest_append_seconds", "The longest append so far.", counts.longest_ns / 1e9)
    yield _counter("journal_damaged", "Kept outcomes that could not be read.", counts.damaged_count)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"headrace_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"headrace_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
