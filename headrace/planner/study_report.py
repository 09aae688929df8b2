"""What a study says: its table, its sentence, its charts, its JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headrace.planner.study import Row, Study
from headrace.planner.world import Run
from headrace.plots import Chart, Part, Series, Table
from headrace.protocol.messages import Status


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and one row of text for each alternative."""
    columns = (
        "configuration",
        "policy",
        "workers",
        "cost",
        "p50 ms",
        "p99 ms",
        "good %",
        "good/s",
        "busy %",
        "mean batch",
        "padding %",
        "expired",
        "rejected",
        "meets",
    )
    return columns, [_cells(row) for row in rows]


def _cells(row: Row) -> tuple[str, ...]:
    run = row.run
    counts = run.tally.by_status
    rejected = counts.get(Status.REJECTED, 0)
    codes = run.tally.rejected_by_code
    reason = f" {max(codes, key=lambda code: codes[code])}" if codes else ""
    return (
        row.plan,
        row.policy,
        str(run.workers),
        f"{row.cost:.2f}",
        _ms(run, 0.50),
        _ms(run, 0.99),
        f"{100 * run.good_share:.2f}",
        f"{run.goodput_per_s:.1f}",
        f"{100 * run.utilisation:.0f}",
        f"{run.mean_batch:.1f}",
        f"{100 * run.padding_waste:.0f}",
        str(counts.get(Status.EXPIRED, 0)),
        f"{rejected}{reason}",
        "yes" if row.meets else "no",
    )


def _ms(run: Run, share: float) -> str:
    value = run.tally.latency.quantile_ms(share)
    return "-" if math.isnan(value) else f"{value:.1f}"


def verdict(rows: Sequence[Row], best: Row | None, study: Study) -> str:
    """Return the answer in one sentence."""
    wanted = f"{study.objective_ms:g} ms for {100 * study.share:g} % of the frames"
    if best is not None:
        workers = "1 worker" if best.run.workers == 1 else f"{best.run.workers} workers"
        return (
            f"Cheapest that meets {wanted}: {workers} with {best.plan} and policy {best.policy}"
            f" ({100 * best.run.good_share:.2f} % good, p99 {_ms(best.run, 0.99)} ms,"
            f" {100 * best.run.utilisation:.0f} % busy)."
        )
    closest = max(rows, key=lambda row: (row.run.good_share, row.run.tally.by_status.get(Status.OK, 0)))
    run = closest.run
    return (
        f"None meets {wanted}; closest: {run.workers} workers with {closest.plan} and policy"
        f" {closest.policy} ({100 * run.good_share:.2f} % good, {100 * run.utilisation:.0f} % busy);"
        f" {_what_is_short(run)}."
    )


def _what_is_short(run: Run) -> str:
    """Say where the frames that are not good went."""
    counts = run.tally.by_status
    late = counts.get(Status.OK, 0) - run.tally.good
    ends = {"were late": late, "expired": counts.get(Status.EXPIRED, 0)}
    ends["were superseded"] = counts.get(Status.SUPERSEDED, 0)
    for code, count in run.tally.rejected_by_code.items():
        ends[f"were rejected {code}"] = count
    end = max(ends, key=lambda name: ends[name])
    return f"{ends[end]} of {run.tally.offered} frames {end}"


def as_object(rows: Sequence[Row], best: Row | None, study: Study, traffic: str) -> dict[str, Any]:
    """Return the whole study as an object for JSON."""
    return {
        "traffic": traffic,
        "objective_ms": study.objective_ms,
        "share": study.share,
        "seconds": study.seconds,
        "warm_up_s": study.warm_up_s,
        "overheads_us": {
            name: getattr(study.overheads, name) for name in study.overheads.__dataclass_fields__
        },
        "alternatives": [_row_object(row) for row in rows],
        "cheapest": None if best is None else _row_object(best),
        "verdict": verdict(rows, best, study),
    }


def _row_object(row: Row) -> dict[str, Any]:
    run = row.run
    quantiles = {
        f"p{100 * share:g}_ms": run.tally.latency.quantile_ms(share) for share in (0.5, 0.9, 0.99, 0.999)
    }
    return {
        "configuration": row.plan,
        "policy": row.policy,
        "workers": run.workers,
        "cost": row.cost,
        "meets": row.meets,
        "offered": run.tally.offered,
        "good": run.tally.good,
        "good_share": run.good_share,
        "goodput_per_s": run.goodput_per_s,
        **{name: None if math.isnan(value) else value for name, value in quantiles.items()},
        "utilisation": run.utilisation,
        "mean_batch": run.mean_batch,
        "padding_waste": run.padding_waste,
        "by_status": {str(status): count for status, count in run.tally.by_status.items()},
        "rejected_by_code": {str(code): count for code, count in run.tally.rejected_by_code.items()},
        "unfinished": run.unfinished,
        "classes": [
            {
                "model": use.model,
                "size_class": use.size_class,
                "frames": use.frames,
                "batches": use.batches,
                "padding_waste": use.padding_waste,
            }
            for use in run.classes
        ],
        "frame_events": run.frame_events,
        "events": run.events,
    }


def plot_parts(rows: Sequence[Row], study: Study, traffic: str, answer: str) -> list[Part]:
    """Return the charts over the number of workers, and the table."""
    by_name: dict[str, list[Row]] = {}
    has_several = len({row.plan for row in rows}) > 1
    for row in rows:
        by_name.setdefault(f"{row.plan}, {row.policy}" if has_several else row.policy, []).append(row)
    counts = [row.run.workers for row in rows]
    ends = (float(min(counts)), float(max(counts)))

    def chart(title: str, unit: str, limit: float, value: Any) -> Chart:
        series = [
            Series(name, tuple((float(row.run.workers), value(row.run)) for row in some))
            for name, some in by_name.items()
        ]
        series.append(Series("objective", tuple((end, limit) for end in ends), is_reference=True))
        return Chart(title, "workers", unit, tuple(series))

    columns, cells = table(rows)
    return [
        answer,
        f"Traffic: {traffic}.",
        chart("Good frames", "good frames (%)", 100 * study.share, lambda run: 100 * run.good_share),
        chart(
            "Latency of ok frames",
            "p99 (ms)",
            study.objective_ms,
            lambda run: run.tally.latency.quantile_ms(0.99),
        ),
        Table("Alternatives", columns, tuple(cells)),
    ]
