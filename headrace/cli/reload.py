"""``headrace reload``: put another file in the place of a model's, and take it back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headrace.cli.common import connect_option, json_option, set_up_logs, write_json
from headrace.errors import Code, ConfigError, RemoteError
from headrace.exit_codes import ExitCode

#: How often the broker is asked how far it is.
POLL_S = 0.1

#: Phases in which a reload has ended, one way or the other.
_ENDED = frozenset({"live", "committed", "rolled_back", "failed"})

_EPILOG = """\b
Examples:
  headrace reload --model detector --path detector-v2.onnx --tolerance 0.05
  headrace reload --model detector --rollback
  headrace reload --model detector --commit
  headrace reload --status

The old version serves until every worker has loaded, tested and compared the new one. Whatever goes
wrong on the way leaves it serving. docs/reload.md says what is compared.
"""


@click.command("reload", epilog=_EPILOG, short_help="Exchange a model while it serves.")
@connect_option
@click.option("--model", default="", help="The model, as frames ask for it. Default: the broker's default.")
@click.option(
    "--path",
    metavar="FILE|FOLDER",
    help="The new ONNX file, as it is called on the broker's machine; or a (prepared) folder.",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "fp16", "int8"]),
    default="auto",
    show_default=True,
    help="Which files of a prepared folder: as in the configuration.",
)
@click.option("--version", default="", help="Name of the new version. Default: made from its content.")
@click.option(
    "--frames",
    type=click.IntRange(0, 100_000),
    default=32,
    show_default=True,
    help="Live frames that are run on both versions before the switch; 0 compares nothing.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="Largest absolute difference of any output value. Left out: reported only.",
)
@click.option(
    "--agreement",
    type=click.FloatRange(0, 1),
    help="Share of the frames whose largest output value must be at the same place. Left out: reported only.",
)
@click.option("--force", is_flag=True, help="Switch whatever the comparison shows.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 86_400, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds for loading and comparing.",
)
@click.option(
    "--rollback", is_flag=True, help="Bring the version before back, or give up a reload under way."
)
@click.option("--commit", is_flag=True, help="Let go of the version before.")
@click.option("--status", "is_status", is_flag=True, help="Show what was reloaded, and how far it is.")
@json_option("Print the result as one JSON object on stdout.")
def command(
    *,
    address: str,
    model: str,
    path: str | None,
    rollback: bool,
    commit: bool,
    is_status: bool,
    as_json: bool,
    **wishes: Any,
) -> int:
    """Put another ONNX file in the place of a model's while frames are served."""
    set_up_logs()
    if sum([path is not None, rollback, commit, is_status]) != 1:
        raise click.UsageError("name one of --path, --rollback, --commit and --status")
    from headrace.clients.control import Control

    with Control(address) as control:
        if path is not None:
            number = control.reload(_params(model, path, wishes))
            found = _wait_for(control, number)
            _show(found, as_json=as_json)
            return int(ExitCode.FAILED if found["reload"]["phase"] == "failed" else ExitCode.OK)
        if is_status:
            models = [one for one in _models(control) if one["reload"] is not None]
            if as_json:
                write_json({"models": models})
            elif not models:
                click.echo("no model was reloaded since this broker started")
            for one in models if not as_json else ():
                _show(one, as_json=False)
            return 0
        result = control.roll_back(model) if rollback else control.commit(model)
    if as_json:
        write_json(result)
    else:
        click.echo(what_was_done(result))
    return 0


def what_was_done(result: Mapping[str, Any]) -> str:
    """Return a sentence about an answer to ``rollback`` or ``commit``."""
    ends = {
        "failed": "the reload was given up; serving version {} as before",
        "rolled_back": "rolled back: serving version {}",
        "committed": "committed: serving version {}, the one before was let go",
    }
    phase = str(result.get("phase"))
    return ends.get(phase, phase + ": serving version {}").format(result.get("serving"))


def _params(model: str, path: str, wishes: dict[str, Any]) -> dict[str, Any]:
    graph, extra_files, gpu_files = _find_files(Path(path).expanduser().absolute(), wishes["precision"])
    params: dict[str, Any] = {
        "model": model,
        "path": str(graph),
        "extra_files": extra_files,
        "gpu_files": gpu_files,
        "version": wishes["version"],
        "frames": wishes["frames"],
        "force": wishes["force"],
        "timeout_ms": max(1, round(wishes["timeout_s"] * 1000)),
    }
    for name in ("tolerance", "agreement"):
        if wishes[name] is not None:
            params[name] = wishes[name]
    return params


def _find_files(path: Path, precision: str) -> tuple[Path, list[str], list[str]]:
    """Return the graph, its external weights, and the files that GPUs run instead.

    A path that is not there is one of the broker's machine."""
    from headrace.prepared import MANIFEST_NAME, read_manifest

    if (path / MANIFEST_NAME).is_file():
        manifest = read_manifest(path)
        chosen = {engine: manifest.choose(precision, engine) for engine in ("cpu", "cuda")}
        names = {
            engine: [file.name for file in manifest.variants[one].files] for engine, one in chosen.items()
        }
        gpu_files = names["cuda"] if chosen["cuda"] != chosen["cpu"] else []
        return path / names["cpu"][0], names["cpu"][1:], gpu_files
    if path.is_dir():
        graphs = sorted(path.glob("*.onnx"))
        if len(graphs) != 1:
            raise ConfigError(f"--path {path}: holds {len(graphs)} ONNX files: name one of them")
        path = graphs[0]
    if not path.is_file():
        return path, [], []
    from headrace.workers.onnx_model import read_model

    return path, sorted(read_model(str(path), label=str(path)).weights), []


def _models(control: Any) -> list[dict[str, Any]]:
    models = control.call("status", {"max_streams": 0}).result["models"]
    return [one for one in models if isinstance(one, dict)]


def _wait_for(control: Any, number: int) -> dict[str, Any]:
    pause = threading.Event()  # never set: only waited on
    phase = ""
    while True:
        found = next((m for m in _models(control) if (m["reload"] or {}).get("number") == number), None)
        if found is None:
            text = "the broker was restarted meanwhile and serves the version of its configuration"
            raise RemoteError(Code.NOT_FOUND, text)
        if found["reload"]["phase"] != phase:
            phase = found["reload"]["phase"]
            if phase == "comparing":
                text = "headrace: comparing, on live frames as they come; --frames 0 compares nothing"
                click.echo(text, err=True)
            elif phase not in _ENDED:
                click.echo(f"headrace: {phase}", err=True)
        if phase in _ENDED:
            return found
        pause.wait(POLL_S)


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(found)
        return
    reload = found["reload"]
    line = f"{found['name']}: {reload['phase']}, serving version {found['live_version']}"
    if reload["code"]:
        line += f"; {reload['code']}: {reload['message']}"
    click.echo(line)
    if reload["frames"]:
        click.echo(
            f"compared {reload['frames']} frames: {reload['agreement']:.1%} agree, largest difference"
            f" {reload['max_abs']:.4g} ({reload['max_rel']:.2%} of the largest value)"
        )
    if found["kept_version"]:
        kept = found["kept_version"]
        click.echo(f"version {kept} stays in memory: --rollback brings it back, --commit lets it go")
