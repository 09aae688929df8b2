"""``headrace plan-classes``: the size classes that waste least padding over recorded traffic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.common import json_option, load_config, set_up_logs, write_json
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.planner.size_plan import Shape, SizePlan

_EPILOG = """\b
Examples:
  headrace record --seconds 3600 --out monday.jsonl
  headrace plan-classes monday.jsonl -k 3
  headrace plan-classes monday.jsonl -k 3 --config pool.toml --model detector >> pool.toml

What is printed is TOML for the model's table; what was found is said in its comments.
"""

_FAMILIES = {
    "any": "the least of any rectangles",
    "nested": "the least of all chains of rectangles, each inside the next",
    "by orientation": "the least of all pairs of chains of rectangles, one chain for landscape and one for"
    " portrait frames",
}


@click.command("plan-classes", epilog=_EPILOG, short_help="Size classes that waste least, from a trace.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("-k", "--count", type=click.IntRange(1, 64), required=True, help="Size classes at most.")
@click.option(
    "--model", help="Frames of this model only. Default: all frames that have a height and a width."
)
@click.option(
    "--multiple",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Both sides of a class are multiples of this: the stride of a convolutional network.",
)
@click.option(
    "--config",
    "config_name",
    metavar="FILE|PRESET",
    help="Compare with the size classes of this configuration. Default: HEADRACE_CONFIG, else no comparison.",
)
@json_option("Print one JSON object on stdout.")
def command(
    *, trace: Path, count: int, model: str | None, multiple: int, config_name: str | None, as_json: bool
) -> int:
    """Find the size classes for the frames of TRACE that pad least.

    A frame takes the smallest class that contains it, unscaled. Every class costs a queue of its own and
    splits batches: more classes pad less and batch less. `headrace simulate` with two configurations tells
    which counts for more.
    """
    set_up_logs()
    from headrace.planner.size_plan import plan_classes

    present = _Present.of(config_name, model)
    shapes = _read_shapes(trace, model, present)
    plan = plan_classes(shapes, count, multiple)
    frames = sum(shapes.values())
    now = None if present is None else present.waste(shapes)
    if as_json:
        write_json(_as_object(plan, frames, len(shapes), now))
    else:
        click.echo(_as_toml(plan, frames, len(shapes), trace, now, present))
    return 0


@dataclass(frozen=True, slots=True)
class _Present:
    """The size classes that a configuration has for the model."""

    source: str
    name: str
    is_default: bool
    model: Any

    @classmethod
    def of(cls, config_name: str | None, model: str | None) -> _Present | None:
        from headrace.config_settings import to_model_spec

        loaded = load_config(config_name, {})
        models = loaded.config.models
        if not models:
            return None
        default = loaded.config.admission.default_model.partition(":")[0] or models[0].name
        name = model or default
        for section in models:
            if section.name == name:
                return cls(loaded.source, name, name == default, to_model_spec(section))
        known = ", ".join(section.name for section in models)
        raise ConfigError(f"{loaded.source}: has no model {name!r}: there are {known}")

    def waste(self, shapes: dict[Shape, int]) -> tuple[float, int] | None:
        """Return the share of padding today, and how many frames fit no class; None without classes."""
        from headrace.broker.records import Refusal
        from headrace.broker.size_class import SizeClasses, padding_waste
        from headrace.protocol.messages import Frame

        if not self.model.size_classes:
            return None
        placer = SizeClasses(self.model, self.model.size_classes)
        padding = area = 0.0
        unplaced = 0
        for (height, width), frames in shapes.items():
            placed = placer.place(Frame("s", b"", 0, (height, width)))
            if isinstance(placed, Refusal):
                unplaced += frames
                continue
            padded = placed.height * placed.width * frames
            padding += padding_waste((height, width), placed) * padded
            area += padded
        return (padding / area if area else 0.0), unplaced


def _read_shapes(trace: Path, model: str | None, present: _Present | None) -> dict[Shape, int]:
    from headrace.planner.trace_file import read_trace

    names = None if model is None else {model}
    if names is not None and (present is None or present.is_default):
        names.add("")  # frames that name no model are the default's
    shapes: dict[Shape, int] = {}
    for frame in read_trace(trace):
        shape = frame.kind.shape
        if len(shape) not in (2, 3) or frame.kind.dtype != "uint8":
            continue  # a tensor, which nobody pads
        if names is None or frame.kind.model.partition(":")[0] in names:
            key = (shape[0], shape[1])
            shapes[key] = shapes.get(key, 0) + 1
    return shapes


def _as_toml(
    plan: SizePlan,
    frames: int,
    sizes: int,
    trace: Path,
    now: tuple[float, int] | None,
    present: _Present | None,
) -> str:
    lines = [
        f"# {len(plan.classes)} size classes for {frames} frames of {sizes} sizes in {trace.name}:",
        f"# {100 * plan.waste:.1f} % of what is computed is padding, {_FAMILIES[plan.family]}.",
    ]
    if now is not None and present is not None:
        share, unplaced = now
        lines.append(f"# With the classes of {present.source} ({present.name}) it is {100 * share:.1f} %.")
        if unplaced:
            lines.append(f"# {unplaced} frames fit none of those.")
    for height, width in plan.classes:
        lines += ["", "[[models.size_classes]]", f"height = {height}", f"width = {width}"]
    return "\n".join(lines)


def _as_object(plan: SizePlan, frames: int, sizes: int, now: tuple[float, int] | None) -> dict[str, Any]:
    return {
        "classes": [{"height": height, "width": width} for height, width in plan.classes],
        "family": plan.family,
        "waste": plan.waste,
        "frame_area": plan.frame_area,
        "padded_area": plan.padded_area,
        "frames": frames,
        "sizes": sizes,
        "present_waste": None if now is None else now[0],
        "present_unplaced": None if now is None else now[1],
    }
