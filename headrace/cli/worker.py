"""``headrace worker``: one worker, in the foreground."""

from __future__ import annotations

import click

from headrace.cli.common import config_options, load_config, parent_option

_EPILOG = """\b
Examples:
  headrace worker                                         for a broker on this machine
  headrace worker --connect tcp://10.0.0.5:5555           for a broker elsewhere
  headrace worker --connect gpu-host --device cuda        or end with a reason if there is no GPU

Exit codes beside the usual: 65 a model can't be served, 69 no broker or no such device.
"""


@click.command("worker", epilog=_EPILOG, short_help="One worker, for a broker anywhere.")
@config_options
@click.option(
    "--connect",
    "address",
    metavar="ADDRESS",
    help="Any address of the broker: HOST, HOST:PORT, tcp://HOST:PORT or ipc://PATH (default"
    " 127.0.0.1:5555).",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "emulated"]),
    help="auto: a GPU when there is one, else the CPU, said aloud (default). emulated: sleep instead.",
)
@click.option(
    "--id", "worker_id", default="", help="Name in status and results. Default: host, pid and a number."
)
@click.option(
    "--threads", type=click.IntRange(1, 4096), help="CPU threads. Default: what this process may use."
)
@click.option("--slots", type=click.IntRange(1, 16), help="Batches held at once (default 2).")
@click.option(
    "--replicas", type=click.IntRange(1, 16), help="Sessions of each model, each with its slots (default 1)."
)
@parent_option
def command(
    *,
    config_name: str | None,
    log_level: str | None,
    log_format: str | None,
    address: str | None,
    device: str | None,
    worker_id: str,
    threads: int | None,
    slots: int | None,
    replicas: int | None,
    parent_pid: int | None,
) -> int:
    """Run one worker until it is stopped (Ctrl-C or SIGTERM finishes its batches first).

    It needs no model files and no configuration: models, sizes and limits come from the broker, and
    files it lacks are fetched from there and kept (HEADRACE_CACHE, or ~/.cache/headrace).
    """
    flags: dict[str, object] = {
        "log.level": log_level,
        "log.format": log_format,
        "worker.connect": address,
        "worker.device": device,
        "worker.threads": threads,
        "worker.slots": slots,
        "worker.replicas": replicas,
    }
    loaded = load_config(config_name, flags)
    from headrace.config_settings import to_worker_settings
    from headrace.workers.process import run

    return run(to_worker_settings(loaded.config, worker_id=worker_id, parent_pid=parent_pid))
