"""The worker as a process: settings to parts, signals, exit code. ``headrace worker`` calls ``run``."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from headrace import __version__, addresses
from headrace.arena import reclaim
from headrace.descriptors import raise_limit
from headrace.errors import HeadraceError
from headrace.exit_codes import ExitCode, exit_code_of
from headrace.host import host_key
from headrace.orphans import end_with_parent
from headrace.protocol.messages import WorkerHello
from headrace.signals import stopped_by_signals
from headrace.workers.arenas import ArenaMappings
from headrace.workers.decode import silence_codecs
from headrace.workers.devices import Device, GpuOptions, choose_device
from headrace.workers.engine import Engine
from headrace.workers.model_cache import default_cache_folder
from headrace.workers.pipeline import Pipeline
from headrace.workers.shell import WorkerShell
from headrace.workers.telemetry import Poller
from headrace.workers.threads import threads_per_worker
from headrace.workers.worker_events import Event
from headrace.workers.worker_session import SessionSettings, WorkerSession
from headrace.workers.worker_settings import WorkerSettings

__all__ = ["WorkerSettings", "make_shell", "replicas_of", "run", "run_all"]

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
    shells = [make_shell(each) for each in replicas_of(settings)]

    def request_stop() -> None:
        for shell in shells:
            shell.request_stop()

    with stopped_by_signals(request_stop, lambda number: os._exit(128 + number)):
        try:
            return shells[0].run() if len(shells) == 1 else run_all(shells)
        except HeadraceError:
            raise
        except Exception:
            log.exception("worker failed")
            return int(ExitCode.INTERNAL)


def replicas_of(settings: WorkerSettings) -> list[WorkerSettings]:
    """Return the settings of each session: of all that serve in this process."""
    count = settings.replicas
    if count == 1:
        return [settings]
    worker_id, memory_mb = settings.worker_id or _new_id(), settings.gpu_memory_mb
    shared = replace(
        settings,
        replicas=1,
        workers_on_host=settings.workers_on_host * count,
        gpu_memory_mb=None if memory_mb is None else max(1, memory_mb // count),
    )
    return [replace(shared, worker_id=f"{worker_id}-{number}") for number in range(1, count + 1)]


def run_all(shells: list[WorkerShell]) -> int:
    """Run every session until it ends, the first one in this thread. When one ends all are asked to: a
    process that serves with a part of its sessions would look whole to whoever supervises it.

    Returns the exit code of the first that did not end well."""
    codes: list[int] = []

    def serve(shell: WorkerShell) -> None:
        try:
            code = shell.run()
        except HeadraceError as error:
            log.error("worker failed", reason=str(error))  # noqa: TRY400 - our own words say it all
            code = exit_code_of(error)
        except Exception:
            log.exception("worker failed")
            code = int(ExitCode.INTERNAL)
        codes.append(code)
        for other in shells:
            if other is not shell:
                other.request_stop()

    first, *others = shells
    threads = [threading.Thread(target=serve, args=(shell,), name="headrace-replica") for shell in others]
    for thread in threads:
        thread.start()
    serve(first)
    for thread in threads:
        thread.join()
    return next((code for code in codes if code), int(ExitCode.OK))


def make_shell(settings: WorkerSettings, device: Device | None = None) -> WorkerShell:
    """Put the parts of one session together. ``device`` is chosen by ``settings.device`` when left out."""
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
        return _WatchedPipeline(make_engine, tell, arenas=arenas, pins=device.pins, figures=figures)

    return WorkerShell(
        WorkerSession(hello, session_settings, jitter),
        address,
        cache,
        make_pipeline,
    )


class _WatchedPipeline(Pipeline):
    """A pipeline that is polled for its figures, and its device for those it has, for as long as it lives."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        tell: Callable[[Event], None],
        *,
        figures: Callable[[], dict[str, float]] | None,
        **options: Any,
    ) -> None:
        super().__init__(make_engine, tell, **options)

        def all_figures() -> dict[str, float]:
            return self.drift.figures() | (figures() if figures is not None else {})

        self._poller = Poller(all_figures, tell)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads; see Pipeline."""
        self._poller.close(timeout_s)
        super().close(timeout_s)


def _new_id() -> str:
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(2)}"
