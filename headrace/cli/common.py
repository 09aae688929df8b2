"""What several commands share: their options, reading the configuration, writing results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from headrace import config, logs
from headrace.config import LoadedConfig
from headrace.config_schema import LogSection

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_ADDRESS = "127.0.0.1:5555"


def config_options(function: Command) -> Command:
    """Add --config, --log-level and --log-format."""
    for option in (
        click.option(
            "--log-format", type=click.Choice(["auto", "human", "json"]), help="How logs look on stderr."
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="How much is logged.",
        ),
        click.option(
            "--config",
            "config_name",
            metavar="FILE|PRESET",
            help="A TOML file, the name of a preset (video, offline, edge, demo), or - for standard input."
            " Default: HEADRACE_CONFIG, else built-in defaults.",
        ),
    ):
        function = option(function)
    return function


def broker_options(function: Command) -> Command:
    """Add where the broker listens, and the model of a quick start."""
    for option in (
        click.option(
            "--adapter",
            help="What becomes of the model's outputs: tensors, classify, detect, text, or"
            " package.module:function. Default: tensors.",
        ),
        click.option(
            "--size",
            "sizes",
            multiple=True,
            metavar="HEIGHTxWIDTH",
            help="A size class for --model when its graph leaves height and width open; may be repeated.",
        ),
        click.option(
            "--model",
            "model_path",
            type=click.Path(path_type=Path),
            help="Serve this ONNX file without a configuration file (beside the models of --config, if any).",
        ),
        click.option(
            "--insecure",
            is_flag=True,
            default=None,
            help="Allow a --host that other machines can reach, although peers are not authenticated.",
        ),
        click.option("--http-port", type=int, help="Port of /metrics and /healthz; 0 = any free port."),
        click.option("--port", type=int, help="First of the five ports (default 5555); 0 = any free ports."),
        click.option("--host", help="Address to listen on (default 127.0.0.1: this machine only)."),
    ):
        function = option(function)
    return function


def connect_option(function: Command) -> Command:
    """Add --connect of a client."""
    option = click.option(
        "--connect",
        "address",
        default=DEFAULT_ADDRESS,
        show_default=True,
        metavar="ADDRESS",
        help="Any address of the broker: HOST, HOST:PORT, tcp://HOST:PORT or ipc://PATH.",
    )
    return option(function)


def json_option(meaning: str) -> Callable[[Command], Command]:
    """Add --json with what it prints."""
    return click.option("--json", "as_json", is_flag=True, help=meaning)


parent_option = click.option("--parent-pid", type=int, hidden=True, help="End when this process is gone.")


def load_config(name: str | None, flags: dict[str, object]) -> LoadedConfig:
    """Read the configuration that the command line means, and set up logging by it.

    Raises ConfigError."""
    name = name or os.environ.get("HEADRACE_CONFIG") or None
    if name == "-":
        loaded = config.load("standard input", text=sys.stdin.read(), flags=flags)
    else:
        loaded = config.load(config.find_config(name) if name else None, flags=flags)
    set_up_logs(loaded.config.log)
    return loaded


def set_up_logs(section: LogSection | None = None) -> None:
    """Log to stderr as the section says (None: warnings only, for clients)."""
    section = section or LogSection(level="warning")
    logs.configure(level=section.level, style=section.format, summary_ms=section.summary_ms)


def write_json(value: object) -> None:
    """Write one JSON object as one line to stdout, at once."""
    click.echo(json.dumps(value, default=_plain, ensure_ascii=False))
    sys.stdout.flush()


def write_line(text: str) -> None:
    """Write a line for a person to stdout, at once."""
    click.echo(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Write a line for a person to stderr."""
    put(text + "\n")


def put(text: str) -> None:
    """Write to stderr, at once. Nobody there to read it is no reason to stop."""
    try:
        click.echo(text, err=True, nl=False)
    except OSError:
        logs.quiet(sys.stderr)


def _plain(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    return str(value)
