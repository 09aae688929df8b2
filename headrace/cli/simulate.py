"""``headrace simulate``: how many workers, which policy, which size classes, in simulated time."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from headrace.cli.common import json_option, load_config, say, write_json
from headrace.cli.tables import aligned
from headrace.errors import ConfigError
from headrace.exit_codes import ExitCode

if TYPE_CHECKING:
    from headrace.planner.costs import Costs, Formula
    from headrace.planner.streams import Source
    from headrace.planner.study import Plan, PolicyChoice, Row, Study
    from headrace.planner.trace_file import TraceKind

_EPILOG = """\b
Examples:
  headrace simulate --config pool.toml --streams 200 --fps 15 --size 640x640
                                     the fewest workers that meet the objective
  headrace simulate --config pool.toml --trace monday.jsonl --workers 2,4,8 --policies adaptive,deferred
  headrace simulate --config a.toml --config b.toml --trace monday.jsonl --profile status.json
                                     two sets of size classes, with the run times of a live pool
  headrace simulate --config pool.toml --streams 50 --fps 25 --size 416x416:0.7 --size 1080x1920:0.3 \\
      --cost 2.0+0.15 --plot study.html

Exit code 0: an alternative meets the objective. 1: none does.
"""

#: Objects made between two looks for cycles. A run makes millions, which go by themselves: at Python's own
#: 700 the looking takes a fifth of the time.
GC_THRESHOLD = 200_000

#: Share of the run whose frames count for nothing: queues fill and costs are learned.
_WARM_UP_SHARE = 0.1


@click.command("simulate", epilog=_EPILOG, short_help="How many workers are needed, and which policy.")
@click.option(
    "--config",
    "config_names",
    multiple=True,
    metavar="FILE|PRESET",
    help="A configuration with [[models]]; repeat it to compare several. Default: HEADRACE_CONFIG.",
)
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path),
    help="Traffic recorded with `headrace record`, instead of --streams.",
)
@click.option("--speed", type=click.FloatRange(0, 1000, min_open=True), default=1.0, help="Of the trace.")
@click.option("--streams", type=click.IntRange(1, 1_000_000), help="Streams that send at one rate.")
@click.option(
    "--fps",
    type=click.FloatRange(0, 10_000, min_open=True),
    default=15.0,
    show_default=True,
    help="Frames a second of each stream.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="HEIGHTxWIDTH[:SHARE]",
    help="Size of the frames; repeat it with shares for a mix. Default: the sizes of the first model's"
    " classes, in equal shares.",
)
@click.option(
    "--pattern",
    type=click.Choice(["cameras", "poisson", "bursts", "ramp"]),
    default="cameras",
    show_default=True,
    help="cameras: steady, each with its own phase; poisson: at random; bursts: at random, all streams"
    " together three times as many for 0.2 s at a time; ramp: at random, rising from nothing.",
)
@click.option("--ttl-ms", type=click.IntRange(1, 86_400_000), help="Time to live of the frames of --streams.")
@click.option("--keep", type=click.Choice(["all", "latest"]), default="all", help="As in `headrace push`.")
@click.option(
    "--workers",
    metavar="N[,N...]",
    help="Numbers of workers to compare. Default: search for the fewest that meet the objective.",
)
@click.option(
    "--policies",
    metavar="NAME[:DELAY_MS][,...]",
    help="Batching policies to compare, each with a max_queue_delay_ms if you like. Default: as configured.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="Run times: what `headrace status --json` printed, or TOML with [[costs]]. Default:"
    " models.emulated.",
)
@click.option("--cost", metavar="BASE+PER_FRAME", help="Run times by a formula, in ms, such as 2.0+0.15.")
@click.option(
    "--objective-ms",
    type=click.FloatRange(0, min_open=True),
    help="Latency to meet, from the time a frame is due to its result. Default: the largest objective_ms"
    " of the configuration.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.99,
    show_default=True,
    help="Share of all frames offered that must be ok within the objective.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 86_400),
    help="Simulated time. Default: 20, or the whole trace.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of phases and gaps.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.html|png", help="Draw the comparison.")
@json_option("Print one JSON object on stdout.")
def command(*, config_names: tuple[str, ...], plot: Path | None, as_json: bool, **options: Any) -> int:
    """Run the broker's own decisions against emulated workers and streams, faster than real time.

    Nothing is started and nothing is needed: no GPU, no broker. Each alternative is a configuration, a policy
    and a number of workers. Relative cost is in multiples of the fewest workers compared.
    """
    if plot is not None:
        from headrace import plots

        plots.check(plot)
    traffic = _Traffic.of(options)
    gc.set_threshold(GC_THRESHOLD)
    study, plans, choices = _prepare(config_names, traffic, options)
    numbers = _numbers(options["workers"])
    rows: list[Row] = []
    for plan in plans:
        for choice in choices:
            if numbers:
                for workers in numbers:
                    rows.append(study.measure(plan, choice, workers))
                    _say_done(rows[-1])
            else:
                rows += study.find_fewest(plan, choice, _say_done)
    return _report(rows, study, traffic.describe(study.seconds), plot=plot, as_json=as_json)


def _prepare(
    names: tuple[str, ...], traffic: _Traffic, options: dict[str, Any]
) -> tuple[Study, list[Plan], list[PolicyChoice]]:
    from headrace.planner.costs import Costs, read_profile
    from headrace.planner.study import Study, check_models
    from headrace.planner.world import Overheads

    path = options["profile_path"]
    costs = Costs(() if path is None else read_profile(path), _formula(options["cost"]))
    plans = [_plan(name, costs) for name in names or (None,)]
    for plan in plans:
        check_models(plan)
        _say_estimated(plan)
    objective_ms = options["objective_ms"]
    if objective_ms is None:
        objective_ms = max(_objectives_ms(plans))
    traffic.prepare(plans[0])
    seconds = traffic.seconds()
    study = Study(
        source=partial(traffic.source, seconds),
        seconds=seconds,
        warm_up_s=seconds * _WARM_UP_SHARE,
        objective_ms=objective_ms,
        share=options["share"],
        overheads=Overheads(),
    )
    return study, plans, _choices(options["policies"])


def _plan(name: str | None, costs: Costs) -> Plan:
    from headrace.config_settings import to_core_settings
    from headrace.planner.study import Plan

    loaded = load_config(name, {})
    config = loaded.config
    return Plan(loaded.source, to_core_settings(config), costs, config.worker.slots)


def _say_estimated(plan: Plan) -> None:
    for model in plan.settings.models:
        for size_class in plan.costs.classes_of(model.spec):
            if plan.costs.is_estimated(model.spec, size_class):
                say(
                    f"headrace: {plan.label}: the profile has no run times of {model.spec.name}"
                    f" {size_class.height}x{size_class.width}: estimated by area from those it has"
                )


def _objectives_ms(plans: list[Plan]) -> list[float]:
    return [
        policy.objective_ms
        for plan in plans
        for model in plan.settings.models
        for policy in model.policies.values()
    ]


# -- options -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Traffic:
    """What arrives, as the command line says."""

    options: dict[str, Any]
    kinds: tuple[tuple[TraceKind, float], ...] = ()

    @classmethod
    def of(cls, options: dict[str, Any]) -> _Traffic:
        if (options["trace_path"] is None) == (options["streams"] is None):
            raise click.UsageError("say what arrives: either --trace FILE or --streams N")
        return cls(options)

    def prepare(self, plan: Plan) -> None:
        """Find out what the frames of --streams are."""
        if self.options["trace_path"] is not None:
            return
        sizes = [_size(text) for text in self.options["sizes"]]
        if not sizes:
            spec = plan.settings.models[0].spec
            sizes = [((one.height, one.width), 1.0) for one in plan.costs.classes_of(spec)]
        self.kinds = tuple((self._kind(size), share) for size, share in sizes)

    def _kind(self, size: tuple[int, int]) -> TraceKind:
        from headrace.planner.trace_file import TraceKind
        from headrace.protocol.messages import Keep

        height, width = size
        return TraceKind(
            (height, width, 3),
            height * width * 3,
            ttl_ms=self.options["ttl_ms"],
            keep=Keep(self.options["keep"]),
        )

    def seconds(self) -> float:
        """Return the length of the run; the whole trace if none is asked for."""
        from headrace.planner.trace_file import read_trace

        asked = self.options["seconds"]
        path = self.options["trace_path"]
        if path is None:
            return float(asked or 20.0)
        last_s, count = 0.0, 0
        for frame in read_trace(path):
            last_s = frame.time_s
            count += 1
        if last_s == 0.0:
            raise ConfigError(f"{path}: holds no frames over any time: there is nothing to simulate")
        # The last frame has its gap too.
        whole_s = last_s * count / (count - 1) / float(self.options["speed"])
        return whole_s if asked is None else min(whole_s, float(asked))

    def source(self, seconds: float) -> Source:
        """Return the arrivals, anew."""
        from headrace.clients.load.schedule import Pattern
        from headrace.planner.streams import PatternSource, TraceSource
        from headrace.planner.trace_file import read_trace

        options = self.options
        if options["trace_path"] is not None:
            frames = read_trace(options["trace_path"])
            return TraceSource(frames, speed=options["speed"], seconds=seconds)
        try:
            return PatternSource(
                options["streams"],
                options["fps"],
                self.kinds,
                seconds,
                pattern=Pattern(options["pattern"]),
                seed=options["seed"],
            )
        except ValueError as error:  # fewer streams than sizes
            raise click.UsageError(f"--size: {error}") from None

    def describe(self, seconds: float) -> str:
        """Say in a line what arrives."""
        options = self.options
        if options["trace_path"] is not None:
            speed = f" at {options['speed']:g} times its speed" if options["speed"] != 1 else ""
            return f"{options['trace_path']}{speed}, {seconds:g} s"
        mix = ", ".join(f"{kind.shape[0]}x{kind.shape[1]}" for kind, _ in self.kinds)
        return (
            f"{options['streams']} streams ({options['pattern']}) at {options['fps']:g} frames/s of {mix},"
            f" {seconds:g} s, seed {options['seed']}"
        )


def _size(text: str) -> tuple[tuple[int, int], float]:
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})(?::([0-9.]+))?", text)
    if match is None or min(int(match[1]), int(match[2])) < 1:
        raise click.BadParameter(f"{text!r}: expected HEIGHTxWIDTH, such as 480x640, or 480x640:0.3")
    try:
        share = float(match[3] or 1.0)
    except ValueError:
        share = 0.0
    if share <= 0:
        raise click.BadParameter(f"{text!r}: a share is a number above 0")
    return (int(match[1]), int(match[2])), share


def _numbers(text: str | None) -> list[int]:
    from headrace.planner.study import MAX_WORKERS

    found: list[int] = []
    for part in text.split(",") if text else ():
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_WORKERS:
            raise click.BadParameter(f"--workers {text!r}: expected numbers from 1 to {MAX_WORKERS}: 2,4,8")
        found.append(int(part))
    return sorted(dict.fromkeys(found))


def _choices(text: str | None) -> list[PolicyChoice]:
    from typing import get_args

    from headrace.config_models import Policy
    from headrace.planner.study import PolicyChoice

    if not text:
        return [PolicyChoice()]
    known = get_args(Policy)
    choices = []
    for part in text.split(","):
        name, colon, delay = part.strip().partition(":")
        if name not in known:
            raise click.BadParameter(f"--policies {part!r}: there are {', '.join(known)}")
        choices.append(PolicyChoice(name, _delay_ms(part, delay) if colon else None))
    return choices


def _delay_ms(part: str, text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        delay_ms = float(text)
    except ValueError:
        delay_ms = -1.0
    if not 0 <= delay_ms < 1e7:
        raise click.BadParameter(f"--policies {part!r}: the delay is milliseconds from 0, or auto")
    return delay_ms


def _formula(text: str | None) -> Formula | None:
    from headrace.planner.costs import parse_formula

    if text is None:
        return None
    try:
        return parse_formula(text)
    except ValueError as error:
        raise click.BadParameter(f"--cost {error}") from None


# -- results -----------------------------------------------------------------------------------------------


def _say_done(row: Row) -> None:
    verdict = "meets" if row.meets else "falls short"
    workers = "1 worker" if row.run.workers == 1 else f"{row.run.workers} workers"
    say(f"headrace: {workers}, {row.policy}: {100 * row.run.good_share:.2f} % good, {verdict}")


def _report(rows: list[Row], study: Study, traffic: str, *, plot: Path | None, as_json: bool) -> int:
    from headrace.planner import study_report
    from headrace.planner.study import cheapest, with_costs_relative

    rows = with_costs_relative(rows)
    best = cheapest(rows)
    verdict = study_report.verdict(rows, best, study)
    if as_json:
        write_json(study_report.as_object(rows, best, study, traffic))
    else:
        columns, cells = study_report.table(rows)
        click.echo(
            f"{traffic}; objective {study.objective_ms:g} ms for {100 * study.share:g} % of the frames"
        )
        click.echo("\n".join(aligned([list(columns), *map(list, cells)])))
        click.echo(verdict)
    if plot is not None:
        from headrace import plots

        plots.write(plot, "headrace simulate", study_report.plot_parts(rows, study, traffic, verdict))
        say(f"headrace: drawn to {plot}")
    return int(ExitCode.FAILED if best is None else ExitCode.OK)
