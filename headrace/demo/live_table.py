"""How the demo shows itself while it runs: a live table on a terminal, plain lines elsewhere.

``DemoView`` is one moment of the demo as plain values, ``view_of`` makes it from the tracker's counts and the
broker's status; ``table_of`` and ``line_of`` render it. Nothing here reads a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.demo.broker_status import ClassRow, WorkerRow, class_rows, worker_rows
from headrace.demo.tracker import WINDOW_NS, StreamProgress
from headrace.protocol.messages import Status, Value

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One camera. ``fps`` and ``latency_ms`` are means of the last seconds, ``boxes`` of its last frame."""

    stream: str
    size: str
    sent: int
    ok: int
    superseded: int
    other: int
    fps: float
    latency_ms: float | None
    boxes: int


@dataclass(frozen=True, slots=True)
class DemoView:
    """One moment of the demo."""

    elapsed_s: float
    seconds: float
    streams: tuple[StreamRow, ...]
    classes: tuple[ClassRow, ...]
    workers: tuple[WorkerRow, ...]


def view_of(
    elapsed_s: float,
    seconds: float,
    sizes: Mapping[str, str],
    progress: Mapping[str, StreamProgress],
    status: Mapping[str, Value],
) -> DemoView:
    """Put one moment together.

    Args:
        elapsed_s: seconds since the cameras started, of ``seconds``.
        seconds: how long the cameras run.
        sizes: what to show as the size of each stream.
        progress: from FrameTracker.progress.
        status: the broker's answer to ``status``; empty while it is not known.
    """
    rows = []
    for stream, size in sizes.items():
        seen = progress.get(stream, StreamProgress())
        window_s = min(WINDOW_NS / 1e9, max(elapsed_s, 1.0))
        latencies = [latency_ns for _, latency_ns, _ in seen.recent]
        ok, superseded = seen.by_status[Status.OK], seen.by_status[Status.SUPERSEDED]
        rows.append(
            StreamRow(
                stream=stream,
                size=size,
                sent=seen.sent_count,
                ok=ok,
                superseded=superseded,
                other=sum(seen.by_status.values()) - ok - superseded,
                fps=len(seen.recent) / window_s,
                latency_ms=sum(latencies) / len(latencies) / 1e6 if latencies else None,
                boxes=seen.recent[-1][2] if seen.recent else 0,
            )
        )
    return DemoView(elapsed_s, seconds, tuple(rows), class_rows(status), worker_rows(status))


def line_of(view: DemoView) -> str:
    """Return one moment as one line of plain text, for logs and pipes."""
    streams = "; ".join(
        f"{row.stream} {row.fps:.1f} fps {_ms(row.latency_ms)} {row.boxes} boxes" for row in view.streams
    )
    classes = "; ".join(f"{row.name} {row.queued} queued, batch {row.mean_batch:.1f}" for row in view.classes)
    workers = "; ".join(f"{row.worker} {row.load:.0%} busy" for row in view.workers)
    return f"{view.elapsed_s:5.1f} s of {view.seconds:g} | {streams} | {classes} | {workers}"


def table_of(view: DemoView) -> Group:
    """Return one moment as three tables for a terminal."""
    from rich.console import Group
    from rich.table import Table

    streams = Table(title=f"headrace demo: {view.elapsed_s:.0f} of {view.seconds:g} s", title_justify="left")
    for name in ("stream", "size", "sent", "ok", "superseded", "other", "fps", "latency", "boxes"):
        streams.add_column(name, justify="left" if name in ("stream", "size") else "right")
    for row in view.streams:
        counts = (row.sent, row.ok, row.superseded, row.other)
        streams.add_row(
            row.stream,
            row.size,
            *map(str, counts),
            f"{row.fps:.1f}",
            _ms(row.latency_ms),
            str(row.boxes),
        )
    classes = Table()
    for name in ("size class", "queued", "batches", "mean batch", "padding"):
        classes.add_column(name, justify="left" if name == "size class" else "right")
    for size_class in view.classes:
        classes.add_row(
            size_class.name,
            str(size_class.queued),
            str(size_class.batches),
            f"{size_class.mean_batch:.2f}",
            f"{size_class.padding_waste:.0%}",
        )
    workers = Table()
    for name in ("worker", "device", "state", "in flight", "frames", "load"):
        workers.add_column(name, justify="left" if name in ("worker", "device", "state") else "right")
    for worker in view.workers:
        workers.add_row(
            worker.worker,
            worker.device,
            worker.state,
            str(worker.in_flight),
            str(worker.frames),
            f"{worker.load:.0%}",
        )
    return Group(streams, classes, workers)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
