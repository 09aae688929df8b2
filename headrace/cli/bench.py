"""``headrace bench``: load on a running pool, and what it made of it."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.bench_options import Pool, build_plan, load_options
from headrace.cli.common import connect_option, put, say, set_up_logs, write_line
from headrace.cli.progress import ProgressLine
from headrace.exit_codes import ExitCode
from headrace.signals import stopped_by_signals

if TYPE_CHECKING:
    from headrace.clients.load.figures import StepResult
    from headrace.clients.load.generator import Generator, LoadPlan
    from headrace.clients.load.report import LoadReport
    from headrace.protocol.messages import Value

#: How long a thread may keep the others waiting for the interpreter while a load is sent. Python's own 5 ms
#: would show up as latency.
SWITCH_INTERVAL_S = 0.0005

CONNECT_TIMEOUT_S = 10.0

_EPILOG = """\b
Examples:
  headrace bench --streams 20 --fps 15                    20 cameras at 15 frames a second
  headrace bench --ramp 200:2000:200 --plot curve.html    where does the latency rise?
  headrace bench --rate 800 --pattern bursts --sizes 224x224:0.6,416x416:0.3,640x640:0.1
  headrace bench --rate 500 --priorities 0:0.9,5:0.1 --ttl-ms 200 --json run.json
  headrace bench --connect gpu-host --encoding jpeg --seconds 60

Exit code 0: every frame sent has exactly one end, and some ended ok. 1: not so, the last lines say what is
missing. 130: stopped by Ctrl-C, with the figures of the part that ran.
"""


@click.command("bench", epilog=_EPILOG, short_help="Load on a running pool, with latency curves.")
@connect_option
@load_options
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of times and contents.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write everything as one JSON object; - for stdout, where nothing else is then printed.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html|png",
    help="Draw latency and achieved rate against the offered rate, or over time when there is one rate."
    " PNG needs `pip install 'headrace[plot]'`.",
)
def command(
    *, address: str, json_path: Path | None, plot_path: Path | None, seed: int, **options: Any
) -> int:
    """Send frames to a running pool at a rate that does not wait for it, and measure what becomes of them.

    Latency runs from the time a frame was due to the time its outcome came, so that a pool that can't keep up
    shows it. A generator that can't keep up says so: its figures are then not the pool's. The pool does real
    work for the load; other producers on it are slowed down.
    """
    set_up_logs()
    from headrace import plots

    if plot_path is not None:
        try:
            plots.check(plot_path)
        except plots.PlotError as error:
            raise click.UsageError(f"--plot {error}") from None
    if json_path is not None and str(json_path) != "-" and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_path}: the folder {json_path.absolute().parent} is not there")
    pool = _ask_pool(address)
    plan = build_plan(options, pool, seed)
    report = _run(address, plan, _pool_text(pool.status))
    return _publish(report, json_path, plot_path)


def _ask_pool(address: str) -> Pool:
    from headrace import addresses
    from headrace.clients.control import Control
    from headrace.clients.producer import Producer

    addresses.discover(address)  # a wrong address is told soon
    with Control(address) as control:
        status = control.status()
    with Producer(address, name="headrace bench", lane="inline") as producer:
        producer.wait_connected(CONNECT_TIMEOUT_S)
        return Pool(producer.models, producer.limits, status)


def _run(address: str, plan: LoadPlan, pool: str) -> LoadReport:
    from headrace.clients.load.figures import result_of
    from headrace.clients.load.generator import Generator
    from headrace.clients.load.report import LoadReport

    stop = threading.Event()
    results: list[StepResult] = []
    problems: list[str] = []
    line = ProgressLine()
    try:
        generator = Generator(address, plan)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with generator, _undisturbed(), stopped_by_signals(lambda: _ask(stop), _insist):
        for number, rate in enumerate(plan.rates, start=1):
            what = (
                f"{rate:,.10g}/s" if len(plan.rates) == 1 else f"{number}/{len(plan.rates)}: {rate:,.10g}/s"
            )
            progress = _Progress(generator, what, plan, line)
            step = generator.run(rate, plan.seed, progress.tick, stop)
            line.clear()
            results.append(result_of(step, generator.ledger, plan, generator.size_of, generator.priority_of))
            if len(plan.rates) > 1:
                say(f"headrace: {_step_text(results[-1])}")
            if stop.is_set():
                break
            left = len(plan.rates) - number
            if results[-1].counts.unfinished and left:
                problems.append(
                    f"the pool was not idle again: not measured were {left} of {len(plan.rates)} rates"
                )
                break
        messages = dict(generator.ledger.first_messages)
    return LoadReport(
        address=address,
        plan=plan,
        pool=pool,
        steps=tuple(results),
        messages=messages,
        problems=tuple(problems),
        is_interrupted=stop.is_set(),
    )


def _publish(report: LoadReport, json_path: Path | None, plot_path: Path | None) -> int:
    """Print and write the report; return the exit code."""
    text = json.dumps(report.as_json(), ensure_ascii=False)
    if json_path is not None and str(json_path) == "-":
        write_line(text)
        for finding in report.findings():
            say(f"headrace: {finding}")
    else:
        write_line(report.text())
        if json_path is not None:
            json_path.write_text(text + "\n", encoding="utf-8")
    if plot_path is not None:
        from headrace import plots

        plots.write(plot_path, "headrace bench", report.page())
        say(f"headrace: the curves are in {plot_path}")
    if report.is_interrupted:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.FAILED if report.all_problems() else ExitCode.OK)


# -- while it runs ----------------------------------------------------------------------------------------


class _Progress:
    """What the line on stderr says of one step."""

    def __init__(self, generator: Generator, what: str, plan: LoadPlan, line: ProgressLine) -> None:
        self._ledger = generator.ledger
        self._what = what
        self._step_s = plan.step_s
        self._line = line
        self._first = len(generator.ledger)
        self._before = generator.ledger.closed_by_status.copy()
        self._began_s = time.monotonic()

    def tick(self) -> None:
        """Show it if it is time to."""
        self._line.show(self._text)

    def _text(self) -> str:
        from headrace.clients.load.figures import percentile

        ledger = self._ledger
        closed = ledger.closed_by_status - self._before
        ends = ", ".join(f"{count:,} {status.value}" for status, count in closed.items())
        elapsed_s = min(time.monotonic() - self._began_s, self._step_s)
        recent = ledger.recent_ms()
        latency = f", lately p50 {percentile(recent, 0.5):.1f} p99 {percentile(recent, 0.99):.1f} ms"
        return (
            f"{self._what}: {elapsed_s:.0f} of {self._step_s:g} s, {len(ledger) - self._first:,} sent,"
            f" {ends or 'no outcome yet'}, {ledger.open_count:,} under way{latency if recent else ''}"
        )


class _undisturbed:  # noqa: N801 - used as a with statement, like contextlib's own
    """Keep this process's own pauses short while it measures: threads take turns sooner, and what lives by
    now (frames, modules) is not looked through for garbage."""

    def __enter__(self) -> None:
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()

    def __exit__(self, *_error: object) -> None:
        gc.unfreeze()
        sys.setswitchinterval(self._interval_s)


def _ask(stop: threading.Event) -> None:
    stop.set()
    put("\n" if sys.stderr.isatty() else "")
    say("headrace: stopping; waiting for the last outcomes (again to end at once)")


def _insist(_number: int) -> None:
    raise KeyboardInterrupt


# -- words ------------------------------------------------------------------------------------------------


def _step_text(result: StepResult) -> str:
    p50, p99 = (result.latency.by_name[name] for name in ("p50", "p99"))
    lost = result.counts.sent - result.counts.ok
    return (
        f"{result.rate:,.10g}/s: {result.achieved_per_s:,.1f}/s ended ok, p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        + (f", {lost:,} did not end ok" if lost else "")
    )


def _pool_text(status: Mapping[str, Value]) -> str:
    """Return one line about the pool: a figure without it says little."""
    broker = status.get("broker")
    release = broker.get("release") if isinstance(broker, dict) else None
    listed = status.get("workers")
    workers = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    ready = [each for each in workers if each.get("state") == "ready"]
    if not ready:
        return f"pool: broker {release!s} with no worker that is ready: frames wait until one comes"
    kinds = Counter(" on ".join(dict.fromkeys((str(w.get("engine")), str(w.get("device"))))) for w in ready)
    who = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    return f"pool: broker {release!s} with ready workers: {who}"
