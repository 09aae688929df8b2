"""What every benchmark returns, how it is printed and written as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """One printed table. ``rows`` have as many cells as ``columns``."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """A figure with its limit. ``kind`` "min": value must be at least limit; "max": at most."""

    name: str
    value: float
    limit: float
    kind: str
    holds: bool

    @classmethod
    def at_least(cls, name: str, value: float, limit: float) -> Budget:
        """Return a budget that holds when value >= limit."""
        return cls(name, value, limit, "min", value >= limit)

    @classmethod
    def at_most(cls, name: str, value: float, limit: float) -> Budget:
        """Return a budget that holds when value <= limit."""
        return cls(name, value, limit, "max", value <= limit)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _machine() -> dict[str, Cell]:
    return {
        "system": platform.system(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
    }


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one benchmark. ``rounds`` are the raw figures of each round, in order."""

    name: str
    rounds: tuple[dict[str, float], ...]
    tables: tuple[Table, ...]
    budgets: tuple[Budget, ...]
    commit: str = field(default_factory=_commit)
    machine: dict[str, Cell] = field(default_factory=_machine)


def print_report(report: Report) -> None:
    """Print tables and budgets for people."""
    for table in report.tables:
        print(f"\n{table.title}")
        cells = [table.columns, *(tuple(_text(cell) for cell in row) for row in table.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
        for row in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for budget in report.budgets:
        sign = ">=" if budget.kind == "min" else "<="
        verdict = "holds" if budget.holds else "FALLS SHORT"
        print(f"{budget.name}: {budget.value:.3g} {sign} {budget.limit:g}: {verdict}")


def write_json(report: Report, path: Path) -> None:
    """Write the report as one JSON object."""
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def _text(cell: Cell) -> str:
    return f"{cell:,.2f}" if isinstance(cell, float) else str(cell)


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
