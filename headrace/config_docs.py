"""Print docs/configuration.md from the schema: ``python -m headrace.config_docs [FILE]``.

The document can't drift from the code: a tidy test compares it with what this module prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace import config, exit_codes
from headrace.config_models import (
    AutoOrNumber,
    EmulatedSection,
    ImageSection,
    ModelSection,
    SizeClassSection,
)
from headrace.config_schema import Config

_INTRODUCTION = """\
# Configuration

<!-- Made by `make docs` from headrace/config_schema.py; change it there. -->

headrace reads one TOML file, given with `--config FILE` or the variable `HEADRACE_CONFIG`. `--config` also
takes the bare name of a preset that headrace ships: {presets}. Broker, workers and `headrace up` read the
same file and take from it what concerns them.

Later sources override earlier ones, key by key: defaults, the file, environment variables, command-line
options. The variable of a key is `HEADRACE_<SECTION>__<KEY>`, for instance `{example}=5600`. Unknown keys
and unknown `HEADRACE_` variables are refused by name. Units stand last in a key's name: `_ms` milliseconds,
`_bytes` bytes.

A quick start needs no file: `headrace up --model model.onnx` serves one model. Its size classes are read
from the graph. A 4-dimensional input with 1 or 3 channels is taken for an image: pixels in RGB order
(gray for one channel) scaled to 0..1, or as they are when the graph takes uint8. Anything else is served
as plain tensors. A model that wants other colours or normalisation needs a file with `[models.image]`.
"""


def render() -> str:
    """Return the whole document."""
    parts = [_INTRODUCTION.format(presets=_presets(), example=config.variable_name("broker", "port"))]
    for name, model in config.sections().items():
        parts.append(_section(f"[{name}]", model))
    parts.append(_section("[[models]]", ModelSection))
    parts.append(_section("[models.image]", ImageSection))
    parts.append(_section("[[models.size_classes]]", SizeClassSection))
    parts.append(_section("[models.emulated]", EmulatedSection))
    parts.append(_variables())
    parts.append(_exit_codes())
    return "\n".join(parts)


def _presets() -> str:
    folder = config.preset("video").parent
    return ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.toml")))


def _section(title: str, model: type[BaseModel]) -> str:
    lines = [f"## {title}", "", (model.__doc__ or "").strip(), ""]
    lines += ["| key | default | unit | range | meaning |", "|---|---|---|---|---|"]
    for name, info in model.model_fields.items():
        lines.append(
            f"| `{name}` | {_default(info)} | {_unit(info)} | {_range(info)} | {info.description or ''} |"
        )
    return "\n".join(lines) + "\n"


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "(required)"
    if info.default is None:
        return "(left out)"
    if info.default == "":
        return "(empty)"
    return f"`{json.dumps(info.default)}`"


def _unit(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def _range(info: FieldInfo) -> str:
    choices = _choices(info.annotation)
    constraints = [*info.metadata, *_constraints(info.annotation)]
    or_auto = [', `"auto"`' for item in constraints if isinstance(item, AutoOrNumber)]
    if choices and not or_auto:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    bounds = {
        name: getattr(item, name)
        for item in constraints
        for name in ("ge", "gt", "le", "lt")
        if hasattr(item, name)
    }
    low = bounds.get("ge", bounds.get("gt"))
    high = bounds.get("le", bounds.get("lt"))
    if low is None or high is None:
        return ""
    is_open = "gt" in bounds or "lt" in bounds
    return f"{low:,} to {high:,}" + (" (ends excluded)" if is_open else "") + "".join(or_auto)


def _constraints(annotation: Any) -> list[Any]:
    """Return what stands beside the types inside a union, such as ``Annotated[float, ...] | None``."""
    return [
        item for part in get_args(annotation) if get_origin(part) is Annotated for item in get_args(part)[1:]
    ]


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for item in get_args(annotation) if (found := _choices(item))), ())


def _variables() -> str:
    lines = ["## Environment variables beside the keys", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in config.OTHER_VARIABLES.items()]
    return "\n".join(lines) + "\n"


def _exit_codes() -> str:
    lines = ["## Exit codes", "", "| code | meaning | restarted by `headrace up` |", "|---|---|---|"]
    lines += [
        f"| {entry.value} | {meaning} | {'no' if entry in exit_codes.NEVER_RESTARTED else 'yes'} |"
        for entry, meaning in exit_codes.MEANINGS.items()
    ]
    return "\n".join(lines) + "\n"


def every_key() -> list[str]:
    """Return all keys as they are written, for tests: "broker.port", "models.image.scale" ..."""
    return _keys_of(Config, "")


def _keys_of(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        table = config.table_of(info.annotation)
        keys += _keys_of(table, f"{prefix}{name}.") if table else [f"{prefix}{name}"]
    return keys


def main() -> None:
    """Write the document to the file named on the command line, or to stdout."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main()
