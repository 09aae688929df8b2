"""``headrace record``: make a trace of what arrives at a running broker."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from headrace.cli.common import connect_option, json_option, say, set_up_logs, write_json
from headrace.cli.progress import ProgressLine
from headrace.exit_codes import ExitCode
from headrace.signals import stopped_by_signals

if TYPE_CHECKING:
    from headrace.clients.control import Control
    from headrace.planner.recorder import Recorder
    from headrace.planner.trace_file import TraceWriter

#: How often the broker is asked. It keeps 32,768 frames, so that nothing is lost up to 160,000 a second.
POLL_S = 0.2

#: Answers taken in one go: twice what the broker keeps, so that a flood can't hold the end up.
MAX_PAGES = 32

_EPILOG = """\b
Examples:
  headrace record --seconds 3600 --out monday.jsonl
  headrace record --connect gpu-host --seconds 60 --hash-streams --out trace.jsonl
  headrace simulate --config pool.toml --trace monday.jsonl
  headrace plan-classes monday.jsonl -k 3

Exit code 1: no frame came. Ctrl-C ends the recording and keeps what there is.
"""


@click.command("record", epilog=_EPILOG, short_help="Make a trace of what arrives.")
@connect_option
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="How long. Default: until Ctrl-C.")
@click.option(
    "--out",
    "path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TRACE",
    help="The file to write, JSON Lines; an existing one is replaced.",
)
@click.option("--hash-streams", is_flag=True, help="Write hashes in place of the names of streams.")
@json_option("Print one JSON object with the counts on stdout at the end.")
def command(*, address: str, seconds: float | None, path: Path, hash_streams: bool, as_json: bool) -> int:
    """Write when each frame came, its stream, size, model, priority and time to live; no pixels.

    Frames that were rejected are in it too: a trace says what was asked of the pool.
    """
    set_up_logs()
    from headrace import __version__
    from headrace.clients.control import Control
    from headrace.planner.recorder import Recorder
    from headrace.planner.trace_file import TraceWriter

    recorder = Recorder(secrets.token_bytes(32) if hash_streams else None)
    stop = threading.Event()
    with Control(address) as control:
        first = control.record({})  # an address that is wrong is told before the file is touched
        with path.open("w", encoding="utf-8") as file, stopped_by_signals(stop.set, _insist):
            writer = TraceWriter(file, {"release": __version__, "has_hashed_streams": hash_streams})
            recorder.take(first)
            _record(control, recorder, writer, file, stop, seconds)
    if as_json:
        write_json(
            {
                "frames": recorder.frames_count,
                "streams": recorder.streams_count,
                "lost": recorder.lost_count,
                "trace": str(path),
            }
        )
    else:
        lost = f"; {recorder.lost_count} were too fast to be recorded" if recorder.lost_count else ""
        say(f"headrace: {recorder.frames_count} frames of {recorder.streams_count} streams in {path}{lost}")
    return int(ExitCode.OK if recorder.frames_count else ExitCode.FAILED)


def _insist(_number: int) -> None:
    raise KeyboardInterrupt


def _record(
    control: Control,
    recorder: Recorder,
    writer: TraceWriter,
    file: TextIO,
    stop: threading.Event,
    seconds: float | None,
) -> None:
    end_s = None if seconds is None else time.monotonic() + seconds
    line = ProgressLine()
    is_over = False
    while not is_over:
        left_s = POLL_S if end_s is None else min(POLL_S, end_s - time.monotonic())
        is_over = stop.wait(max(0.0, left_s)) or left_s <= 0
        for _ in range(MAX_PAGES):
            for frame in recorder.take(control.record(recorder.params)):
                writer.write(frame)
            if not recorder.more:
                break
        file.flush()
        line.show(lambda: f"{recorder.frames_count} frames of {recorder.streams_count} streams")
    line.clear()
