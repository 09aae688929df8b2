"""``headrace demo``: three cameras, two CPU workers, one account at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from headrace.cli.common import json_option, set_up_logs

_EPILOG = """\b
Examples:
  headrace demo                            12 seconds, 2 frames a second of each camera
  headrace demo --fps native --seconds 30  more than two cores can do: the latest frames win
  headrace demo --json | jq .outcomes
"""


def _fps(_context: click.Context, _option: click.Parameter, value: str) -> float | Literal["native"]:
    if value == "native":
        return "native"
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1_000:
        raise click.BadParameter(f"{value!r} is neither a number above 0 and up to 1000 nor 'native'")
    return number


@click.command("demo", epilog=_EPILOG, short_help="See it work on three videos.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=12.0,
    show_default=True,
    help="How long the cameras run.",
)
@click.option(
    "--fps",
    metavar="N|native",
    callback=_fps,
    default="2",
    show_default=True,
    help="Frames analysed per second and camera; native = every frame, which overloads two cores on purpose.",
)
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="CPU workers.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="headrace-demo",
    show_default=True,
    help="Folder for the annotated videos and the log.",
)
@json_option("Print one JSON object on stdout at the end, and nothing else there.")
def command(*, seconds: float, fps: float | Literal["native"], workers: int, out: Path, as_json: bool) -> int:
    """Find text in three videos that play as cameras, with everything running on this machine.

    Starts a broker and CPU workers, plays three clips of different sizes in real time, shows what
    happens, writes one annotated video per camera and prints the account of all frames. Exit code 1 when
    a frame is unaccounted for. Needs `pip install 'headrace[demo]'`.
    """
    set_up_logs()
    from headrace.demo.runner import run_demo

    return run_demo(seconds=seconds, fps=fps, out_dir=out, as_json=as_json, workers=workers)
