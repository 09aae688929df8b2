"""`python -m benchmarks NAME [--json FILE] [--quick] [--minutes N] [--rounds N]`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from benchmarks.report import print_report, write_json

#: Name -> module with ``run(quick: bool) -> Report`` and a docstring that says what it measures.
BENCHMARKS = (
    "transport",
    "core",
    "mean",
    "compute",
    "latency",
    "goodput",
    "soak",
    "scale",
    "profile",
    "journal",
    "agreement",
    "gpu",
    "reload",
    "int8",
)


def main() -> int:
    """Run one benchmark; exit 1 when a budget falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as one JSON object")
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it runs")
    parser.add_argument("--minutes", type=float, metavar="N", help="length of soak (default 60)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of goodput with real processes")
    args = parser.parse_args()
    if args.minutes is not None and args.name != "soak":
        parser.error("--minutes is the length of soak")
    # So that blocks that own processes end them when somebody stops the benchmark.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    options = {} if args.minutes is None else {"minutes": args.minutes}
    if args.rounds is not None:
        if args.name != "goodput":
            parser.error("--rounds is for goodput")
        options["rounds"] = args.rounds
    report = importlib.import_module(f"benchmarks.{args.name}").run(quick=args.quick, **options)
    print_report(report)
    if args.json is not None:
        write_json(report, args.json)
    return 0 if all(budget.holds for budget in report.budgets) else 1


if __name__ == "__main__":
    sys.exit(main())
