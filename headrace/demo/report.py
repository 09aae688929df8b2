"""The demo's result: one JSON object for machines, a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.demo.account import DemoAccount
from headrace.demo.broker_status import class_rows, worker_rows
from headrace.demo.tracker import FrameTracker, StreamProgress
from headrace.protocol.messages import Value


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything that is told at the end. ``problems`` is empty when the demo succeeded."""

    account: DemoAccount
    problems: Sequence[str]
    status: Mapping[str, Value]
    progress: Mapping[str, StreamProgress]
    latency_ms: Mapping[str, float | None]
    annotated: Sequence[Path]

    @classmethod
    def of(
        cls,
        account: DemoAccount,
        problems: Sequence[str],
        status: Mapping[str, Value],
        tracker: FrameTracker,
        annotated: Sequence[Path],
        now_ns: int,
    ) -> DemoReport:
        """Make the report of a finished run; ``problems`` are those beside the account's own."""
        latency_ms = {"p50": tracker.latency_ms(0.5), "p99": tracker.latency_ms(0.99)}
        return cls(
            account=account,
            problems=[*problems, *account.problems()],
            status=status,
            progress=tracker.progress(now_ns),
            latency_ms=latency_ms,
            annotated=annotated,
        )

    def as_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        workers = worker_rows(self.status)
        return {
            "ok": not self.problems,
            "frames_sent": self.account.sent_count,
            "accepted": self.account.accepted_count,
            "outcomes": self.account.totals,
            "streams": {
                stream: {
                    "sent": seen.sent_count,
                    "outcomes": dict(seen.by_status),
                    "boxes": seen.box_count,
                }
                for stream, seen in self.progress.items()
            },
            "size_classes": {
                row.name: {
                    "batches": row.batches,
                    "mean_batch": round(row.mean_batch, 3),
                    "padding_waste": round(row.padding_waste, 4),
                }
                for row in class_rows(self.status)
            },
            "workers": [
                {
                    "worker": row.worker,
                    "device": row.device,
                    "frames": row.frames,
                    "load": round(row.load, 3),
                }
                for row in workers
            ],
            "latency_ms": dict(self.latency_ms),
            "device": ", ".join(sorted({row.device for row in workers})),
            "annotated": [str(path) for path in self.annotated],
            "problems": list(self.problems),
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        lines = [f"annotated video: {path}" for path in self.annotated]
        latency = ", ".join(f"{name} {value or 0:.0f} ms" for name, value in self.latency_ms.items())
        lines.append(f"latency from the time a frame was due to its result: {latency}")
        lines.append(self.account.line())
        if self.problems:
            return lines + [f"problem: {problem}" for problem in self.problems]
        return [*lines, "every frame is accounted for, here and in the broker's own count"]
