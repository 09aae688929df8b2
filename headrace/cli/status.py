"""``headrace status``: what a broker is doing."""

from __future__ import annotations

import click

from headrace.cli.common import connect_option, json_option, set_up_logs, write_json
from headrace.cli.tables import status_text

_EPILOG = """\b
Examples:
  headrace status
  headrace status --connect gpu-host --json | jq .account
"""


@click.command("status", epilog=_EPILOG, short_help="What a broker is doing.")
@connect_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 3600, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@json_option("Print the whole answer as one JSON object on stdout.")
def command(*, address: str, timeout_s: float, as_json: bool) -> int:
    """Show the account of all frames, the size classes, workers and streams of a broker."""
    set_up_logs()
    from headrace.clients.control import Control

    with Control(address, timeout=timeout_s) as control:
        status = control.status()
    if as_json:
        write_json(status)
    else:
        click.echo(status_text(status))
    return 0
