"""``headrace broker``: the broker alone, in the foreground."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click

from headrace.cli.common import (
    broker_options,
    config_options,
    json_option,
    load_config,
    parent_option,
    say,
    write_json,
)
from headrace.config import LoadedConfig
from headrace.protocol.messages import Endpoints

_EPILOG = """\b
Examples:
  headrace broker --model model.onnx                            one model, no file needed
  headrace broker --config my.toml
  headrace broker --config my.toml --host 0.0.0.0 --insecure    reachable from other machines
"""


@click.command("broker", epilog=_EPILOG, short_help="The broker alone.")
@config_options
@broker_options
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the addresses to this file, as JSON, once the broker is ready.",
)
@json_option("Print one JSON object with the addresses on stdout when ready.")
@parent_option
def command(
    *,
    config_name: str | None,
    log_level: str | None,
    log_format: str | None,
    host: str | None,
    port: int | None,
    http_port: int | None,
    insecure: bool | None,
    model_path: Path | None,
    sizes: tuple[str, ...],
    adapter: str | None,
    ready_file: Path | None,
    as_json: bool,
    parent_pid: int | None,
) -> int:
    """Run a broker until it is stopped (Ctrl-C or SIGTERM drains, a second one ends at once).

    It listens on this machine only unless --host says otherwise, and that needs --insecure until peers
    are authenticated. Workers join with `headrace worker --connect ADDRESS`.
    """
    if parent_pid is not None:
        from headrace.orphans import end_with_parent

        end_with_parent(parent_pid)
    flags: dict[str, object] = {
        "log.level": log_level,
        "log.format": log_format,
        "broker.host": host,
        "broker.port": port,
        "broker.http_port": http_port,
        "broker.insecure": insecure or None,
    }
    loaded = with_model(load_config(config_name, flags), model_path, sizes, adapter)
    from headrace.broker.process import run
    from headrace.config_settings import to_shell_settings

    def announce(endpoints: Endpoints) -> None:
        if ready_file is not None:
            _write_atomically(ready_file, json.dumps(ready_object(endpoints)) + "\n")
        if as_json:
            write_json(ready_object(endpoints))
        else:
            say(ready_line(endpoints))

    return run(to_shell_settings(loaded), on_ready=announce)


def with_model(
    loaded: LoadedConfig, path: Path | None, sizes: tuple[str, ...], adapter: str | None
) -> LoadedConfig:
    """Return the configuration with the model of --model added."""
    if path is None:
        if sizes or adapter:
            raise click.UsageError("--size and --adapter describe the model of --model, which is not given")
        return loaded
    from headrace.quick_model import model_section

    section = model_section(path, sizes=sizes, adapter=adapter)
    models = (*loaded.config.models, section)
    return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"models": models}))


def ready_object(endpoints: Endpoints) -> dict[str, object]:
    """Return what --json and --ready-file say: scripts with --port 0 read the ports here."""
    return {"event": "ready", "pid": os.getpid(), "endpoints": dataclasses.asdict(endpoints)}


def ready_line(endpoints: Endpoints) -> str:
    """Return the same for a person."""
    http = f", metrics {endpoints.http}/metrics" if endpoints.http else ""
    return f"headrace: broker ready at {endpoints.frames} (results {endpoints.results}{http})"


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
