"""``headrace watch``: see the outcomes of streams as they are published."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from headrace.cli.common import connect_option, json_option, say, set_up_logs, write_json, write_line
from headrace.cli.lines import missed_line, missed_object, outcome_line, outcome_object
from headrace.errors import RequestTimeoutError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Outcome

if TYPE_CHECKING:
    from headrace.clients.records import Missed
    from headrace.clients.subscriber import Subscriber

_EPILOG = """\b
Examples:
  headrace watch cam-1                     one stream
  headrace watch cam-1 cam-2               two
  headrace watch site-a/                   every stream whose name begins with site-a/
  headrace watch                           all streams
  headrace watch cam-1 --json | jq .outputs
"""


@click.command("watch", epilog=_EPILOG, short_help="See results as they come.")
@click.argument("streams", nargs=-1, metavar="[STREAM|PREFIX/]...")
@connect_option
@click.option(
    "--mode",
    type=click.Choice(["every", "latest"]),
    default="every",
    show_default=True,
    help="latest: when this reader is slower than the stream, show the newest and count the rest.",
)
@click.option(
    "--start",
    type=click.Choice(["now", "earliest"]),
    default="now",
    show_default=True,
    help="earliest: begin with the outcomes that the broker still keeps.",
)
@click.option("--count", type=click.IntRange(1), help="End after this many outcomes.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="End after this much time.")
@json_option("Print one JSON object a line on stdout.")
def command(
    *,
    streams: tuple[str, ...],
    address: str,
    mode: str,
    start: str,
    count: int | None,
    seconds: float | None,
    as_json: bool,
) -> int:
    """Print one line for each outcome, and one for each range that can't be had any more.

    Exit code 1 when --seconds are over before --count outcomes have come.
    """
    set_up_logs()
    wanted = _Wanted(count, None if seconds is None else time.monotonic() + seconds)
    with _subscriber(address, streams, mode, start) as subscriber, contextlib.suppress(KeyboardInterrupt):
        say(f"headrace: watching {', '.join(streams) or 'all streams'} at {subscriber.address}, Ctrl-C ends")
        while not wanted.is_over:
            try:
                _show(subscriber.get(timeout=wanted.left_s), wanted, as_json=as_json)
            except RequestTimeoutError:
                break
    return int(ExitCode.FAILED if wanted.is_short else ExitCode.OK)


@dataclass(slots=True)
class _Wanted:
    """How many outcomes until when; None for no bound. ``deadline_s`` is on the monotonic clock."""

    count: int | None
    deadline_s: float | None
    seen_count: int = 0

    @property
    def left_s(self) -> float | None:
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0 or (self.count is not None and self.seen_count >= self.count)

    @property
    def is_short(self) -> bool:
        return self.count is not None and self.seen_count < self.count


def _show(item: Outcome | Missed, wanted: _Wanted, *, as_json: bool) -> None:
    if isinstance(item, Outcome):
        wanted.seen_count += 1
        write_json(outcome_object(item)) if as_json else write_line(outcome_line(item))
    else:
        write_json(missed_object(item)) if as_json else write_line(missed_line(item))


def _subscriber(address: str, streams: tuple[str, ...], mode: str, start: str) -> Subscriber:
    from headrace import addresses
    from headrace.clients.subscriber import Subscriber

    prefixes = [stream for stream in streams if stream.endswith("/")]
    if prefixes and len(streams) > 1:
        raise click.UsageError(f"{prefixes[0]!r} is a prefix: give one prefix alone, or streams alone")
    addresses.discover(address)  # a wrong address is told soon; later losses are waited out
    if prefixes:
        return Subscriber(address, prefix=prefixes[0], mode=mode, start=start)
    if streams:
        return Subscriber(address, streams=streams, mode=mode, start=start)
    return Subscriber(address, prefix="", mode=mode, start=start)
