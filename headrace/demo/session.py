"""The demo's own traffic against a running broker: three cameras, one subscriber, one writer of videos.

Theory of operation: each camera is a thread with its own producer and plays its clip in real time; the
subscriber's thread sees outcomes and hands frames with results to the writer's thread, which draws them into
one MP4 per stream; the calling thread asks the broker for its status and shows the moment. At the end every
camera waits for its outcomes, then the subscriber for what is still on its way, then the account is made.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.clients.control import Control
from headrace.clients.producer import Producer
from headrace.clients.records import Missed
from headrace.clients.subscriber import Subscriber
from headrace.clients.video.frames import SourceOptions
from headrace.clients.video.push_loop import PushOptions, SentFrame, push_source
from headrace.clients.video.sinks import Mp4Writer, annotate
from headrace.clients.video.sources import open_source
from headrace.demo.account import DemoAccount
from headrace.demo.broker_status import account_of
from headrace.demo.cameras import CAMERAS, Camera, clip_path
from headrace.demo.caption import CaptionedSource
from headrace.demo.live_table import DemoView, view_of
from headrace.demo.tracker import AnalysedFrame, FrameTracker
from headrace.errors import HeadraceError
from headrace.protocol.messages import Keep, Value

#: How often the broker is asked for its status and the table redrawn.
SHOW_INTERVAL_S = 0.5

#: Analysed frames that may wait for the writer. Results come at a few a second and drawing one takes some
#: 20 ms, so a longer queue means that the disk is stuck.
MAX_UNDRAWN = 64

#: How long the last outcomes may take after the last frame. At `native` some 50 frames a camera are
#: unfinished at the end, nearly all of them superseded: seconds on two cores, more on a busy machine.
LAST_OUTCOMES_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``fps`` None analyses every frame of the cameras (native), overloading the workers on purpose."""

    seconds: float
    fps: float | None
    out_dir: Path


class DemoSession:
    """One run of the cameras. Owns its threads, which have all ended when ``run`` returns."""

    def __init__(self, address: str, options: DemoOptions) -> None:
        self.annotated: list[Path] = []
        self.status: Mapping[str, Value] = {}
        self.tracker = FrameTracker([camera.stream for camera in CAMERAS])
        self.problems: list[str] = []
        self._address = address
        self._options = options
        self._stop = threading.Event()
        self._undrawn: queue.Queue[AnalysedFrame | None] = queue.Queue(MAX_UNDRAWN)
        self._start_s = time.monotonic()

    def run(self, show: Callable[[DemoView], None]) -> DemoAccount:
        """Run the cameras to their end and return the account; an interrupt ends them early.

        Args:
            show: called every half second with the moment, and once at the end.
        """
        subscriber = Subscriber(self._address)
        watcher = self._thread("outcomes", lambda: self._watch(subscriber))
        writer = self._thread("writer", self._write)
        cameras = [self._thread(c.stream, partial(self._play, c)) for c in CAMERAS]
        self._start_s = time.monotonic()
        with Control(self._address) as control:
            try:
                self._show_until_done(cameras, control, show)
            except KeyboardInterrupt:
                self._stop.set()
                self._show_until_done(cameras, control, show)
            self.tracker.wait_complete(LAST_OUTCOMES_TIMEOUT_S)
            has_status = self._refresh(control)
            show(self._view())
        subscriber.close()
        watcher.join()
        self._undrawn.put(None)
        writer.join()
        return self._account(account_of(self.status) if has_status else None)

    def _show_until_done(
        self, cameras: list[threading.Thread], control: Control, show: Callable[[DemoView], None]
    ) -> None:
        while any(camera.is_alive() for camera in cameras):
            self._refresh(control)
            show(self._view())
            until_s = time.monotonic() + SHOW_INTERVAL_S
            for camera in cameras:
                camera.join(max(0.0, until_s - time.monotonic()))

    def _refresh(self, control: Control) -> bool:
        """Ask the broker for its status; on failure the last one stays."""
        try:
            self.status = control.status()
        except HeadraceError:
            return False
        return True

    def _view(self) -> DemoView:
        return view_of(
            time.monotonic() - self._start_s,
            self._options.seconds,
            {camera.stream: camera.size for camera in CAMERAS},
            self.tracker.progress(time.monotonic_ns()),
            self.status,
        )

    def _play(self, camera: Camera) -> None:
        """Be one camera: its clip in a loop, in real time; a newer frame replaces one that still waits."""
        options = PushOptions(
            stream=camera.stream,
            keep=Keep.LATEST,
            is_looping=True,
            fps=self._options.fps,
            max_seconds=self._options.seconds,
            stall_limit_s=LAST_OUTCOMES_TIMEOUT_S,
        )
        clip = open_source(str(clip_path(camera)), SourceOptions(decode_threads=1))
        source = CaptionedSource(clip, camera.stream.upper().replace("-", " "))
        with Producer(self._address, name=camera.stream) as producer:
            push_source(source, producer, options, on_sent=self._note_sent, stop=self._stop)

    def _note_sent(self, sent: SentFrame) -> None:
        key = (sent.id.stream, sent.id.epoch, sent.id.seq)
        self._hand_over(self.tracker.add_sent(key, sent.frame, sent.intended_ns))

    def _watch(self, subscriber: Subscriber) -> None:
        for item in subscriber:
            seen_ns = time.monotonic_ns()
            if isinstance(item, Missed):
                self.tracker.add_missed(item.count or 1)
            else:
                self._hand_over(self.tracker.add_outcome(item, seen_ns))

    def _hand_over(self, analysed: AnalysedFrame | None) -> None:
        if analysed is not None:
            self._undrawn.put(analysed)

    def _write(self) -> None:
        """Draw analysed frames into one MP4 per stream until told that there are no more."""
        frames = iter(self._undrawn.get, None)
        try:
            self.annotated = write_videos(frames, self._options.out_dir)
        finally:
            for _ in frames:  # after a failure (a full disk) the others must not wait for this thread
                pass

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a thread whose failure becomes a problem of the account instead of a traceback."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  (a thread's edge: told in the account)
                self.problems.append(f"{name}: {error or type(error).__name__}")

        thread = threading.Thread(target=guarded, name=f"demo {name}", daemon=True)
        thread.start()
        return thread

    def _account(self, broker: Mapping[str, int] | None) -> DemoAccount:
        progress = self.tracker.progress(time.monotonic_ns())
        return DemoAccount(
            sent={stream: seen.sent_count for stream, seen in progress.items()},
            outcomes={stream: dict(seen.by_status) for stream, seen in progress.items()},
            broker=broker,
            duplicate_count=self.tracker.duplicate_count,
            missed_count=self.tracker.missed_count,
        )


def write_videos(frames: Iterable[AnalysedFrame], out_dir: Path) -> list[Path]:
    """Draw each frame's own outcome on it and write one MP4 per stream; returns the files in order of stream.

    The videos run at the analysis rate in real time: each picture stays until the next analysed one.
    """
    writers: dict[str, Mp4Writer] = {}
    try:
        for analysed in frames:
            outcome = analysed.outcome
            writer = writers.get(outcome.stream)
            if writer is None:
                writer = writers[outcome.stream] = Mp4Writer(out_dir / f"{outcome.stream}.mp4")
            writer.write(annotate(analysed.frame.image, outcome), outcome.pts_ns or 0)
    finally:
        for writer in writers.values():
            writer.close()
    return [writers[stream].path for stream in sorted(writers)]
