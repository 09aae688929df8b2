"""The result of a load: tables and curves for people, one JSON object for machines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from headrace.clients.load.figures import Counts, Group, Latency, Second, StepResult, finite
from headrace.clients.load.generator import LoadPlan
from headrace.plots import Chart, Part, Series, Table

#: Version of the JSON object: rises when a field changes its meaning.
FORMAT = 1

_PERCENTILES = ("p50", "p95", "p99", "p99.9")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run of one or more steps. ``pool`` is one line about who was measured; ``messages`` holds the
    broker's first words for each code; ``problems`` are of the whole run, beside those of its steps."""

    address: str
    plan: LoadPlan
    pool: str
    steps: tuple[StepResult, ...]
    messages: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    is_interrupted: bool = False

    def all_problems(self) -> list[str]:
        """Return everything that does not add up, with the rate at which it was."""
        return [*(f"{_rate(s)}: {text}" for s in self.steps for text in s.problems), *self.problems]

    def as_json(self) -> dict[str, object]:
        """Return the report as JSON values; figures that were not measured are null."""
        plan = asdict(self.plan)
        plan["sizes"] = [{"size": size.name, "share": share} for size, share in self.plan.sizes]
        plan["priorities"] = [{"priority": value, "share": share} for value, share in self.plan.priorities]
        return {
            "headrace_bench": FORMAT,
            "address": self.address,
            "pool": self.pool,
            "plan": plan,
            "is_interrupted": self.is_interrupted,
            "steps": [_step_json(step) for step in self.steps],
            "messages": dict(self.messages),
            "problems": self.all_problems(),
        }

    def text(self) -> str:
        """Return the report for a terminal."""
        parts = [self.headline(), self.pool]
        parts += [_text(table) for table in self.tables()]
        parts += [f"{code}: {text}" for code, text in self.messages.items() if text]
        parts += self.findings()
        return "\n".join(parts)

    def headline(self) -> str:
        """Return one line about what was sent."""
        plan = self.plan
        sizes = ", ".join(size.name for size, _ in plan.sizes)
        ttl = "" if plan.ttl_ms is None else f", ttl {plan.ttl_ms} ms"
        return (
            f"{plan.streams_count} streams ({plan.pattern}) of {sizes} {plan.encoding} frames{ttl} to"
            f" {self.address}, {plan.warm_up_s:g} s of warm-up and {plan.seconds:g} s measured at each rate"
        )

    def findings(self) -> list[str]:
        """Return notices and problems, one line each."""
        lines = [self._lanes()]
        lines += [f"note: {_rate(s)}: {n.code}: {n.message}" for s in self.steps for n in s.notices]
        lines += [f"problem: {text}" for text in self.all_problems()]
        if self.is_interrupted:
            lines.append("interrupted: the figures are of the part that ran")
        if not self.all_problems():
            sent = sum(step.counts.sent for step in self.steps)
            lines.append(f"the account adds up: each of {sent:,} frames sent has exactly one end")
        return lines

    def _lanes(self) -> str:
        lanes = Counter[str]()
        for step in self.steps:
            lanes.update(step.by_lane)
        return "payloads: " + (", ".join(f"{count:,} {lane}" for lane, count in lanes.items()) or "none")

    # -- tables --------------------------------------------------------------------------------------

    def tables(self) -> list[Table]:
        """Return the tables: rates and latency, the account, and what differs by priority and size."""
        found = [self._rates(), self._account()]
        if len(self.plan.priorities) > 1:
            found.append(self._groups("by priority", "priority", [s.priorities for s in self.steps]))
        if len(self.plan.sizes) > 1:
            found.append(self._groups("by size", "size", [s.sizes for s in self.steps]))
        return found

    def _rates(self) -> Table:
        columns = (
            "rate/s",
            "offered/s",
            "achieved/s",
            "p50 ms",
            "p95",
            "p99",
            "p99.9",
            "max",
            "in the pool p99",
        )
        rows = tuple(
            (
                f"{step.rate:,.10g}",
                _figure(step.offered_per_s),
                _figure(step.achieved_per_s),
                *_latency_cells(step.latency),
                _figure(step.pool.by_name["p99"]),
            )
            for step in self.steps
        )
        return Table("latency of ok frames, from the time each was due", columns, rows)

    def _account(self) -> Table:
        ends = ("accepted", "ok", "error", "expired", "superseded", "rejected", "missed", "unfinished")
        rows = []
        for step in self.steps:
            counts = step.counts.as_json()
            codes = [
                f"{count:,} {code}" for code, count in {**step.rejected_by_code, **step.ended_by_code}.items()
            ]
            unsent = sum(step.unsent.values())
            rows.append(
                (
                    f"{step.rate:,.10g}",
                    f"{counts['sent']:,}",
                    *(f"{counts[name]:,}" for name in ends),
                    f"{unsent:,}",
                    ", ".join(codes) or "-",
                )
            )
        columns = ("rate/s", "sent", *ends, "not sent", "by code")
        return Table("account: sent = accepted + rejected + missed + unfinished", columns, tuple(rows))

    def _groups(self, title: str, what: str, groups: Sequence[Sequence[Group]]) -> Table:
        rows = tuple(
            (
                f"{step.rate:,.10g}",
                each.name,
                f"{each.streams}",
                f"{each.counts.sent:,}",
                f"{each.counts.ok:,}",
                f"{each.counts.sent - each.counts.ok:,}",
                *_latency_cells(each.latency),
            )
            for step, step_groups in zip(self.steps, groups, strict=True)
            for each in step_groups
        )
        columns = ("rate/s", what, "streams", "sent", "ok", "other", "p50 ms", "p95", "p99", "p99.9", "max")
        return Table(title, columns, rows)

    # -- curves --------------------------------------------------------------------------------------

    def page(self) -> list[Part]:
        """Return the parts of the plot: curves over the rates, or over time when there is one rate."""
        parts: list[Part] = [self.headline(), self.pool]
        parts += self._over_rates() if len(self.steps) > 1 else self._over_time()
        return [*parts, *self.tables(), *self.findings()]

    def _over_rates(self) -> list[Part]:
        rates = [step.offered_per_s for step in self.steps]
        latency = tuple(
            Series(name, tuple((s.offered_per_s, s.latency.by_name[name]) for s in self.steps))
            for name in _PERCENTILES
        )
        ideal = Series("offered", tuple((rate, rate) for rate in rates), is_reference=True)
        achieved = Series("achieved (ok)", tuple((s.offered_per_s, s.achieved_per_s) for s in self.steps))
        x_label = "offered rate (frames/s)"
        return [
            Chart("Latency against offered rate", x_label, "latency (ms)", latency, is_log_y=True),
            Chart("Achieved rate", x_label, "ended ok (frames/s)", (achieved, ideal)),
        ]

    def _over_time(self) -> list[Part]:
        seconds: Sequence[Second] = self.steps[0].seconds if self.steps else ()
        latency = tuple(
            Series(name, tuple((s.at_s + 0.5, s.latency.by_name[name]) for s in seconds))
            for name in ("p50", "p99")
        )
        sent = Series("sent", tuple((s.at_s + 0.5, float(s.due)) for s in seconds))
        ended = Series("of these ended ok", tuple((s.at_s + 0.5, float(s.ok)) for s in seconds))
        x_label = "time a frame was due (s)"
        return [
            Chart("Latency over time", x_label, "latency (ms)", latency, is_log_y=True),
            Chart("Frames over time", x_label, "frames/s", (sent, ended)),
        ]


def _rate(step: StepResult) -> str:
    return f"{step.rate:,.10g}/s"


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.1f}"


def _latency_cells(latency: Latency) -> tuple[str, ...]:
    return (*(_figure(latency.by_name[name]) for name in _PERCENTILES), _figure(latency.max_ms))


def _text(table: Table) -> str:
    cells = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(["", table.title, *lines])


def _step_json(step: StepResult) -> dict[str, object]:
    return {
        "rate_per_s": step.rate,
        "seed": step.seed,
        "scheduled": step.scheduled,
        "unsent": step.unsent,
        "account": step.counts.as_json(),
        "rejected_by_code": step.rejected_by_code,
        "ended_by_code": step.ended_by_code,
        "by_lane": step.by_lane,
        "measured_s": finite(step.measured_s),
        "offered_per_s": finite(step.offered_per_s),
        "achieved_per_s": finite(step.achieved_per_s),
        "latency": step.latency.as_json(),
        "in_pool": step.pool.as_json(),
        "outside_pool": step.outside.as_json(),
        "sender_lag": step.lag.as_json(),
        "generator_cpu_share": finite(step.cpu_share),
        "sender_cpu_share": finite(step.sender_cpu_share),
        "drain_s": finite(step.drain_s),
        "is_interrupted": step.is_interrupted,
        "priorities": [_group_json(each) for each in step.priorities],
        "sizes": [_group_json(each) for each in step.sizes],
        "seconds": [
            {"at_s": s.at_s, "sent": s.due, "ok": s.ok, "latency": s.latency.as_json()} for s in step.seconds
        ],
        "problems": list(step.problems),
        "notices": [{"code": n.code.value, "message": n.message} for n in step.notices],
    }


def _group_json(group: Group) -> dict[str, object]:
    counts: Counts = group.counts
    return {
        "name": group.name,
        "streams": group.streams,
        "account": counts.as_json(),
        "latency": group.latency.as_json(),
    }
