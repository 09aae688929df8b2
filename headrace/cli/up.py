"""``headrace up``: broker and workers of one machine, supervised."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import click

from headrace.cli.broker import ready_line, ready_object, with_model
from headrace.cli.common import broker_options, config_options, json_option, load_config, say, write_json

_EPILOG = """\b
Examples:
  headrace up --model model.onnx                 a model with a fixed input size
  headrace up --model model.onnx --size 640x640  one that takes any size
  headrace up --config my.toml --workers 4       everything from a file, four workers
"""


@click.command("up", epilog=_EPILOG, short_help="Broker and workers of this machine, supervised.")
@config_options
@broker_options
@click.option(
    "--workers", type=click.IntRange(1, 1024), help="Workers to start (default: one per GPU, or 1)."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "emulated"]),
    help="What the workers run on (default auto: a GPU when there is one).",
)
@json_option("Print one JSON object with the addresses on stdout when the broker is ready.")
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
    workers: int | None,
    device: str | None,
    as_json: bool,
) -> int:
    """Start a broker and its workers on this machine and keep them running.

    A process that dies is started again, with growing pauses, and given up after some quick failures in
    a row. Ctrl-C or SIGTERM lets admitted frames finish and then ends everything; a second one ends it
    at once.
    """
    flags: dict[str, object] = {
        "log.level": log_level,
        "log.format": log_format,
        "broker.host": host,
        "broker.port": port,
        "broker.http_port": http_port,
        "broker.insecure": insecure or None,
        "worker.device": device,
        "worker.count": workers,
    }
    loaded = with_model(load_config(config_name, flags), model_path, sizes, adapter)
    from headrace.config_settings import to_shell_settings
    from headrace.supervisor import Supervisor, SupervisorError

    to_shell_settings(loaded)  # what the broker would refuse is refused here, before anything is started
    supervisor = Supervisor(loaded)

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        supervisor.request_stop()

    handled = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, ask_to_stop) for number in handled]
    try:
        endpoints = supervisor.start()
        if as_json:
            started: Mapping[str, object] = {"workers": supervisor.worker_count, "pids": supervisor.pids}
            write_json({**ready_object(endpoints), **started})
        else:
            say(ready_line(endpoints))
            say(f"headrace: {supervisor.worker_count} worker(s) starting; `headrace status` shows them")
        code = supervisor.wait()
    finally:
        for number, handler in zip(handled, previous, strict=True):
            signal.signal(number, handler)
    if supervisor.reason:
        raise SupervisorError(supervisor.reason, code or 0)
    return code or 0
