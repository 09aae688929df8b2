"""``headrace push``: send a video source to a broker and wait for the outcomes."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import click

from headrace.cli.common import connect_option, json_option, say, set_up_logs, write_json
from headrace.cli.progress import ProgressLine
from headrace.errors import NotDeliveredError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Encoding, Keep, Reject
from headrace.signals import stopped_by_signals

if TYPE_CHECKING:
    from headrace.clients.producer import Producer
    from headrace.clients.records import ProducerAccount
    from headrace.clients.video.push_loop import PushOptions, PushReport

#: How long the last outcomes are waited for while no broker is there: time enough for one that restarts.
LINGER_S = 10.0

_EPILOG = """\b
Examples:
  headrace push video.mp4 --stream cam-1           at the video's own pace
  headrace push video.mp4 --stream cam-1 --fast    as fast as the workers are
  headrace push images/ --stream test              a folder of images
  headrace push 0 --stream desk                    the first camera of this machine
  headrace push rtsp://camera/stream --stream gate --connect gpu-host

Exit code 0: every frame has its outcome and none was rejected or failed. 1: some were, or were not
delivered, or all of the source was damaged; the last line says how many.
"""


@click.command("push", epilog=_EPILOG, short_help="Send a video, images or a camera.")
@click.argument("source")
@click.option("--stream", help="Name of the stream, the topic of its results. Default: the source's name.")
@connect_option
@click.option("--model", default="", help="Model to run, NAME or NAME:VERSION. Default: the broker's.")
@click.option("--priority", type=click.IntRange(0, 255), default=0, help="Larger is more urgent. Default 0.")
@click.option(
    "--ttl-ms",
    type=click.IntRange(1, 86_400_000),
    help="A frame not run within this many milliseconds ends as `expired`.",
)
@click.option(
    "--keep",
    type=click.Choice(["all", "latest"]),
    help="latest: a newer frame replaces one that still waits. Default: latest for cameras and live"
    " addresses, all for files.",
)
@click.option(
    "--encoding",
    type=click.Choice(["raw", "jpeg", "png"]),
    default="raw",
    show_default=True,
    help="How frames travel: jpeg is small and loses a little, raw is fastest on one machine.",
)
@click.option("--fast", is_flag=True, help="Do not wait for the source's own timestamps.")
@click.option(
    "--fps",
    type=click.FloatRange(0, 10_000, min_open=True),
    help="Send about this many a second; of a video no more than it has.",
)
@click.option("--loop", is_flag=True, help="Start again at the end of a file.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after this much time.")
@click.option("--max-frames", type=click.IntRange(1), help="Stop after this many frames.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds to wait for the last outcomes. Default: as long as the broker is there.",
)
@json_option("Print one JSON object with the account on stdout at the end.")
def command(
    *,
    source: str,
    stream: str | None,
    address: str,
    model: str,
    priority: int,
    ttl_ms: int | None,
    keep: str | None,
    encoding: str,
    fast: bool,
    fps: float | None,
    loop: bool,
    seconds: float | None,
    max_frames: int | None,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Send SOURCE, frame by frame, and wait until each frame has its outcome.

    SOURCE is a video file, an image, a folder of images, a camera number, or an address (rtsp://,
    http:// ...).
    """
    set_up_logs()
    from headrace.clients.video.push_loop import PushOptions

    options = PushOptions(
        stream=stream_name(source) if stream is None else stream,
        model=model,
        priority=priority,
        ttl_ms=ttl_ms,
        keep=Keep(keep) if keep else None,
        encoding=Encoding(encoding),
        is_fast=fast,
        is_looping=loop,
        fps=fps,
        max_frames=max_frames,
        max_seconds=seconds,
        flush_timeout_s=timeout_s,
    )
    return _push(source, address, options, as_json=as_json)


def _push(text: str, address: str, options: PushOptions, *, as_json: bool) -> int:
    from headrace import addresses
    from headrace.clients.producer import Producer
    from headrace.clients.video.push_loop import PushReport, push_source
    from headrace.clients.video.sources import open_source

    source = open_source(text)
    addresses.discover(address)  # a wrong address is told before the first frame is read
    line = ProgressLine()
    stop = threading.Event()
    first_rejects: dict[str, str] = {}
    report = PushReport(options.stream)
    not_delivered = ""

    def note_reject(reject: Reject) -> None:
        first_rejects.setdefault(reject.code, reject.message)

    def progress(current: PushReport) -> None:
        nonlocal report
        report = current
        line.show(lambda: _progress_text(options.stream, producer))

    producer = Producer(address, name=options.stream, linger_s=LINGER_S, on_reject=note_reject)
    with _stopped_by_signals(stop):
        try:
            report = push_source(source, producer, options, on_progress=progress, stop=stop)
        except NotDeliveredError as error:
            not_delivered = str(error)
        finally:
            with contextlib.suppress(NotDeliveredError):
                producer.close(timeout=0)
    line.clear()
    summary = _Summary(options.stream, producer.account, report)
    if as_json:
        write_json(summary.as_json())
    else:
        say(summary.as_text())
    for code, message in first_rejects.items():
        say(f"headrace: rejected: {code}: {message}")
    if not_delivered:
        say(f"headrace: error: {not_delivered}")
    return int(ExitCode.FAILED if not_delivered or summary.has_failures else ExitCode.OK)


def stream_name(source: str) -> str:
    """Return the stream's name when none is given: the file's stem, camera-N, or the address without its
    user and password."""
    name = PurePath(source.rstrip("/")).stem if "://" not in source else source.partition("://")[2]
    name = name.rpartition("@")[2] or "stream"  # an address may carry a password before the @
    return f"camera-{name}" if name.isdecimal() else name


def _progress_text(stream: str, producer: Producer) -> str:
    account = producer.account
    return f"{stream}: {account.sent} sent, {account.finished} finished, {account.unfinished} under way"


@dataclass(frozen=True, slots=True)
class _Summary:
    """What became of the frames, in both forms."""

    stream: str
    account: ProducerAccount
    report: PushReport

    @property
    def has_failures(self) -> bool:
        account = self.account
        is_all_damaged = bool(self.report.damaged_count) and not account.sent
        return bool(
            is_all_damaged or account.unfinished or account.rejected or account.by_status.get("error")
        )

    def as_json(self) -> dict[str, object]:
        account, report = self.account, self.report
        return {
            "stream": self.stream,
            "sent": account.sent,
            "outcomes": account.by_status,
            "rejected": account.rejected,
            "unknown": account.unknown,
            "unfinished": account.unfinished,
            "overtaken": report.missed_count,
            "damaged": report.damaged_count,
            "reconnects": report.reconnect_count,
            "elapsed_s": round(report.elapsed_s, 3),
        }

    def as_text(self) -> str:
        account, report = self.account, self.report
        parts = [f"{count} {status}" for status, count in account.by_status.items()]
        parts += [f"{count} rejected ({code})" for code, count in account.rejected.items()]
        for count, words in (
            (account.unknown, "with an outcome that was not seen"),
            (account.unfinished, "without an outcome"),
            (report.missed_count, "overtaken before they were sent"),
            (report.damaged_count, "damaged"),
            (report.reconnect_count, "reconnects"),
        ):
            if count:
                parts.append(f"{count} {words}")
        ended = f": {', '.join(parts)}" if parts else ""
        return f"{self.stream}: {account.sent} frames sent in {report.elapsed_s:.1f} s{ended}"


def _stopped_by_signals(stop: threading.Event) -> contextlib.AbstractContextManager[None]:
    """The first Ctrl-C or SIGTERM ends the sending and waits for outcomes; the second ends at once."""

    def ask() -> None:
        stop.set()
        say("headrace: stopping; waiting for the last outcomes (again to end at once)")

    def insist(_number: int) -> None:
        raise KeyboardInterrupt

    return stopped_by_signals(ask, insist)
