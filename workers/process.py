"""The worker as a process: settings to parts, signals, exit code. ``headrace worker`` calls ``run``."""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from headrace import __version__, addresses
from headrace.arena import reclaim
from headrace.descriptors import raise_limit
from headrace.errors import HeadraceError
from headrace.exit_codes import ExitCode
from headrace.host import host_key
from headrace.orphans import end_with_parent
from headrace.protocol.messages import WorkerHello
from headrace.signals import stopped_by_signals
from headrace.workers.arenas import ArenaMappings
from headrace.workers.decode import silence_codecs
from headrace.workers.devices import Device, GpuOptions, choose_device
from headrace.workers.model_cache import default_cache_folder
from headrace.workers.pipeline import Pipeline
from headrace.workers.shell import WorkerShell
from headrace.workers.telemetry import Poller
from headrace.workers.threads import threads_per_worker
from headrace.workers.worker_events import Event
from headrace.workers.worker_session import SessionSettings, WorkerSession
from headrace.workers.worker_settings import WorkerSettings

__all__ = ["WorkerSettings", "make_shell", "run"]

log = structlog.get_logger()


def run(settings: WorkerSettings) -> int:
    """Be a worker until told to stop; return the exit code (``headrace.exit_codes``).

    The first SIGTERM or SIGINT lets the batches inside finish, the second ends the process at once: run in
    the main thread, or they are not taken. Raises ConfigError and DeviceError for settings that can't be
    used.
    """
    if settings.parent_pid is not None:
        end_with_parent(settings.parent_pid)
    silence_codecs()
    shell = make_shell(settings)
    with stopped_by_signals(shell.request_stop, lambda number: os._exit(128 + number)):
        try:
            return shell.run()
        except HeadraceError:
            raise
        except Exception:
            log.exception("worker failed")
            return int(ExitCode.INTERNAL)


def make_shell(settings: WorkerSettings, device: Device | None = None) -> WorkerShell:
    """Put the parts of a worker together. ``device`` is chosen by ``settings.device`` when left out."""
    address = addresses.normalise(settings.address)
    threads = settings.threads or threads_per_worker(settings.workers_on_host)
    cache = Path(settings.cache_dir).expanduser() if settings.cache_dir else default_cache_folder()
    device = device or choose_device(
        settings.device, threads, GpuOptions(settings.slots, settings.gpu_memory_mb, cache)
    )
    hello = WorkerHello(
        worker=settings.worker_id or _new_id(),
        instance=secrets.randbits(64),
        host_key=host_key(settings.shm_folder),
        device=device.name,
        engine=device.engine,
        release=__version__,
        pid=os.getpid(),
    )
    # Not for secrets: only so that workers which lost the same broker do not come back in step.
    jitter = random.Random(hello.instance).random  # noqa: S311
    session_settings = SessionSettings(
        slots=settings.slots, grace_ms=settings.grace_ms, give_up_ms=settings.give_up_ms
    )
    raise_limit()
    if settings.shm_folder is not None:
        reclaim(settings.shm_folder)
    log.info(
        "worker started", worker=hello.worker, device=hello.device, threads_count=threads, broker=address
    )
    make_engine, figures = device.make_engine, device.figures

    def make_pipeline(tell: Callable[[Event], None]) -> Pipeline:
        if device.pins is None:
            arenas = ArenaMappings(settings.shm_folder)
        else:
            arenas = ArenaMappings(settings.shm_folder, on_close=device.pins.release)
        if figures is None:
            return Pipeline(make_engine, tell, arenas=arenas, pins=device.pins)
        return _WatchedPipeline(
            make_engine, tell, arenas=arenas, pins=device.pins, poller=Poller(figures, tell)
        )

    return WorkerShell(
        WorkerSession(hello, session_settings, jitter),
        address,
        cache,
        make_pipeline,
    )


class _WatchedPipeline(Pipeline):
    """A pipeline whose device is polled for its figures for as long as it lives."""

    def __init__(self, *arguments: Any, poller: Poller, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._poller = poller

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads; see Pipeline."""
        self._poller.close(timeout_s)
        super().close(timeout_s)


def _new_id() -> str:
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(2)}"
