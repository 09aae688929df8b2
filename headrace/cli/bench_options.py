"""The options of ``headrace bench`` that say what is sent, and the plan they make.

Whatever can be told before the first frame is told before it: a model that is not there, a size that fits
nowhere, shares without a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.common import say

if TYPE_CHECKING:
    from headrace.clients.load.generator import LoadPlan
    from headrace.clients.load.payloads import Size
    from headrace.protocol.messages import Limits, ModelSpec, Value

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_FPS = 15.0

_SIZE = re.compile(r"(?P<height>\d{1,5})x(?P<width>\d{1,5})(?::(?P<share>[\d.]+))?")
_PRIORITY = re.compile(r"(?P<priority>\d{1,3})(?::(?P<share>[\d.]+))?")

_OPTIONS = (
    click.option("--rate", type=click.FloatRange(0, min_open=True), help="Frames a second, of all streams."),
    click.option("--rates", metavar="A,B,C", help="Several rates, one after the other."),
    click.option("--ramp", metavar="FROM:TO:STEP", help="Rates from FROM up to TO."),
    click.option(
        "--fps",
        type=click.FloatRange(0, 10_000, min_open=True),
        help=f"Instead of a rate: frames a second of each stream. Default {DEFAULT_FPS:g}.",
    ),
    click.option(
        "--pattern",
        type=click.Choice(["cameras", "poisson", "bursts", "ramp"]),
        default="cameras",
        show_default=True,
        help="cameras: each stream steady, with its own phase; poisson: at random; bursts: at random, three"
        " times as many for 0.2 s at a time; ramp: at random, rising from zero to the rate.",
    ),
    click.option(
        "--streams", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Cameras."
    ),
    click.option(
        "--sizes",
        "--size",
        "sizes",
        multiple=True,
        metavar="HEIGHTxWIDTH[:SHARE],...",
        help="Sizes of the frames, with shares for a mix; each stream has one. Default: the size classes of"
        " the model, in equal shares.",
    ),
    click.option(
        "--priorities",
        "--priority",
        "priorities",
        multiple=True,
        metavar="PRIORITY[:SHARE],...",
        help="Priorities, with shares for a mix; each stream has one. Default 0.",
    ),
    click.option("--ttl-ms", type=click.IntRange(1, 86_400_000), help="Time to live of each frame."),
    click.option(
        "--keep",
        type=click.Choice(["all", "latest"]),
        default="all",
        show_default=True,
        help="latest: a newer frame of a stream replaces one that still waits.",
    ),
    click.option(
        "--seconds",
        type=click.FloatRange(0.1, 86_400),
        default=10.0,
        show_default=True,
        help="Time measured at each rate.",
    ),
    click.option(
        "--warm-up",
        "warm_up_s",
        type=click.FloatRange(0, 3_600),
        default=1.0,
        show_default=True,
        help="Seconds sent before it at each rate, without being measured.",
    ),
    click.option(
        "--drain-limit",
        "drain_limit_s",
        type=click.FloatRange(0.1, 3_600),
        default=30.0,
        show_default=True,
        help="Seconds to wait for the last outcomes; what is not back then is `unfinished`.",
    ),
    click.option("--model", default="", metavar="NAME[:VERSION]", help="Default: the broker's."),
    click.option(
        "--encoding",
        type=click.Choice(["raw", "jpeg", "png"]),
        default="raw",
        show_default=True,
        help="How frames travel. jpeg and png need `pip install 'headrace[video]'`.",
    ),
    click.option(
        "--content",
        type=click.Choice(["auto", "noise", "scene"]),
        default="auto",
        show_default=True,
        help="noise: random pixels; scene: shapes and writing. auto: a scene for models that detect, and for"
        " encoded frames.",
    ),
    click.option(
        "--lane",
        type=click.Choice(["auto", "inline", "shm"]),
        default="auto",
        show_default=True,
        help="How payloads get to the broker: in messages, or by shared memory; auto: so on one host.",
    ),
    click.option(
        "--producers",
        "producers_count",
        type=click.IntRange(1, 256),
        default=4,
        show_default=True,
        help="About how many connections the streams share, none with another priority's; each has the"
        " broker's credits.",
    ),
)


def load_options(function: Command) -> Command:
    """Add what is sent, when, and how."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class Pool:
    """What a broker says of itself: its models, limits and status."""

    models: tuple[ModelSpec, ...]
    limits: Limits
    status: Mapping[str, Value]

    def model(self, name: str) -> ModelSpec:
        """Return a model by NAME or NAME:VERSION, the broker's default for "". Raises UsageError."""
        for spec in self.models:
            if name in {"", spec.name, f"{spec.name}:{spec.version}"}:
                return spec
        names = ", ".join(spec.name for spec in self.models) or "none"
        raise click.UsageError(f"--model {name}: the broker has no such model; it has: {names}")

    def class_sizes(self, spec: ModelSpec) -> list[Size]:
        """Return the sizes of a model's classes; empty for tensors, or before a worker described them."""
        from headrace.clients.load.payloads import Size

        found = [Size(each.height, each.width) for each in spec.size_classes]
        listed = self.status.get("classes")
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, dict) and each.get("model") == spec.name:
                height, width = each.get("height"), each.get("width")
                if isinstance(height, int) and isinstance(width, int):
                    found.append(Size(height, width))
        return [size for size in dict.fromkeys(found) if size.height and size.width]


def build_plan(options: Mapping[str, Any], pool: Pool, seed: int) -> LoadPlan:
    """Return the plan that the options make for this pool. Raises UsageError."""
    from headrace.clients.lane import LaneChoice
    from headrace.clients.load.generator import LoadPlan
    from headrace.clients.load.payloads import Content, resolve
    from headrace.clients.load.schedule import MAX_FRAMES, Pattern
    from headrace.protocol.messages import Encoding, Keep

    spec = pool.model(options["model"])
    encoding = Encoding(options["encoding"])
    sizes = _sizes(options["sizes"], spec, pool)
    priorities = parse_priorities(options["priorities"])
    highest = pool.limits.priority_levels - 1
    if max(priority for priority, _ in priorities) > highest:
        raise click.UsageError(f"--priorities: the broker's priorities are 0 to {highest}")
    plan = LoadPlan(
        sizes=sizes,
        rates=parse_rates(options),
        pattern=Pattern(options["pattern"]),
        streams_count=options["streams"],
        priorities=priorities,
        ttl_ms=options["ttl_ms"],
        keep=Keep(options["keep"]),
        seconds=options["seconds"],
        warm_up_s=options["warm_up_s"],
        drain_limit_s=options["drain_limit_s"],
        model=options["model"],
        encoding=encoding,
        content=resolve(Content(options["content"]), encoding, spec),
        producers_count=options["producers_count"],
        lane=LaneChoice(options["lane"]),
        seed=seed,
    )
    frames = sum(plan.rates) * plan.step_s
    if frames > MAX_FRAMES:
        raise click.UsageError(
            f"the rates make {frames:,.0f} frames; what becomes of each is held in memory, so that at most"
            f" {MAX_FRAMES:,} make one run: give fewer --seconds or rates"
        )
    return plan


def parse_rates(options: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the rates of all steps. Raises UsageError."""
    from headrace.clients.load.schedule import ladder

    given = [name for name in ("rate", "rates", "ramp", "fps") if options[name] is not None]
    if len(given) > 1:
        raise click.UsageError(f"--{given[0]} and --{given[1]} both say how much is sent: give one")
    if options["rate"] is not None:
        return (options["rate"],)
    if options["rates"] is not None:
        rates = tuple(_number(text, "--rates") for text in options["rates"].split(","))
        if not all(rate > 0 for rate in rates):
            raise click.UsageError(f"--rates {options['rates']}: a rate is above 0")
        return rates
    if options["ramp"] is not None:
        ends = [_number(text, "--ramp") for text in options["ramp"].split(":")]
        try:
            first, last, step = ends
            return ladder(first, last, step)
        except ValueError:
            raise click.UsageError(
                f"--ramp {options['ramp']}: FROM:TO:STEP, rising from above 0, such as 100:1000:100"
            ) from None
    return ((options["fps"] or DEFAULT_FPS) * options["streams"],)


def parse_sizes(texts: tuple[str, ...]) -> tuple[tuple[Size, float], ...]:
    """Return sizes with their shares; none for no text. Raises UsageError."""
    from headrace.clients.load.payloads import Size

    sizes: dict[Size, float] = {}
    for text in _items(texts):
        match = _SIZE.fullmatch(text)
        if match is None:
            raise click.UsageError(f"--sizes {text}: HEIGHTxWIDTH or HEIGHTxWIDTH:SHARE, such as 480x640:0.5")
        size = Size(int(match["height"]), int(match["width"]))
        if not size.height or not size.width:
            raise click.UsageError(f"--sizes {text}: a frame has at least one pixel")
        sizes[size] = sizes.get(size, 0.0) + _share(match["share"], text, "--sizes")
    return tuple(sizes.items())


def parse_priorities(texts: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    """Return priorities with their shares, priority 0 alone for no text. Raises UsageError."""
    priorities: dict[int, float] = {}
    for text in _items(texts):
        match = _PRIORITY.fullmatch(text)
        if match is None:
            raise click.UsageError(f"--priorities {text}: PRIORITY or PRIORITY:SHARE, such as 0:0.9,5:0.1")
        priority = int(match["priority"])
        share = _share(match["share"], text, "--priorities")
        priorities[priority] = priorities.get(priority, 0.0) + share
    return tuple(priorities.items()) or ((0, 1.0),)


def _sizes(texts: tuple[str, ...], spec: ModelSpec, pool: Pool) -> tuple[tuple[Size, float], ...]:
    if spec.image is None:
        raise click.UsageError(f"model {spec.name} takes plain tensors: this command sends images")
    fits = pool.class_sizes(spec)
    sizes = parse_sizes(texts)
    if not sizes and not fits:
        raise click.UsageError(
            f"model {spec.name} names no size and no worker has described it yet: give --sizes"
        )
    for size, _ in sizes:
        if size.height * size.width > pool.limits.max_pixels:
            raise click.UsageError(
                f"--sizes {size.name}: {size.height * size.width:,} pixels; the broker takes at most"
                f" {pool.limits.max_pixels:,}"
            )
        if fits and not any(size.height <= fit.height and size.width <= fit.width for fit in fits):
            names = ", ".join(fit.name for fit in fits)
            end = "rejected `oversize`" if spec.oversize == "reject" else "scaled down"
            say(
                f"headrace: note: {size.name} is larger than every size class of model {spec.name} ({names}):"
                f" such frames are {end}"
            )
    return sizes or tuple((size, 1.0) for size in fits)


def _items(texts: tuple[str, ...]) -> list[str]:
    return [item.strip() for text in texts for item in text.split(",")]


def _share(text: str | None, item: str, option: str) -> float:
    share = 1.0 if text is None else _number(text, option)
    if share <= 0:
        raise click.UsageError(f"{option} {item}: a share is above 0")
    return share


def _number(text: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):
        raise click.UsageError(f"{option}: {text!r} is not a number")
    return number
