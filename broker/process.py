"""The broker as a process: everything opened or nothing, signals, exit code.

Order of start: settings checked, model files hashed, all sockets and the HTTP port bound, and only then
``on_ready`` told the addresses. Order of stop: loop ended (drained, or stopped), HTTP closed, sockets closed
with their linger, files closed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import structlog

from headrace import __version__, logs
from headrace.addresses import bracketed
from headrace.broker.arenas import Arenas
from headrace.broker.binding import bind_sockets, is_exposed, refuse_exposed, resolve_hosts
from headrace.broker.core import BrokerCore
from headrace.broker.http import HttpServer, health
from headrace.broker.journal import Journal
from headrace.broker.metrics import render_metrics, render_readiness
from headrace.broker.model_store import ModelStore
from headrace.broker.shell import Shell
from headrace.broker.shell_settings import LocalModel, ShellSettings
from headrace.broker.sockets import Role
from headrace.descriptors import Descriptors, raise_limit
from headrace.errors import JournalError
from headrace.exit_codes import ExitCode
from headrace.host import host_key
from headrace.protocol.messages import Endpoints
from headrace.signals import stopped_by_signals

__all__ = ["Broker", "LocalModel", "ShellSettings", "run"]

#: New objects after which the youngest are walked: some thousand frames. One walk in 20 takes the next
#: generation with it, and one in 50 of those everything.
GC_THRESHOLDS = (50_000, 20, 50)

log = structlog.get_logger()


class Broker:
    """One broker in this process. Opened, run and closed by one thread; a context manager.

    ``request_drain`` and ``stop`` may be called from any thread.
    """

    def __init__(self, settings: ShellSettings) -> None:
        """Open files, sockets and ports. Raises ConfigError or ModelError and leaves nothing open."""
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(ModelStore.open(settings.local_models))
            core_settings = store.with_files(settings.core)
            boot = secrets.randbits(64)
            key = host_key(settings.shm_folder)
            descriptors = Descriptors()
            arenas = Arenas(settings.shm_folder, key, core_settings.max_producers, descriptors)
            stack.callback(arenas.close)
            core = BrokerCore(core_settings, boot, arenas.copy)
            journal = _open_journal(settings, core)
            if journal is not None:
                stack.enter_context(journal)
            bound = stack.enter_context(bind_sockets(settings))
            http = _bind_http(settings)
            if http is not None:
                stack.callback(http.close)
            self.endpoints = Endpoints(
                boot=boot,
                **{role.value: bound.addresses[role] for role in Role},
                http=_http_address(settings, http),
                host_key=key,
            )
            self._shell = Shell(settings, core, bound, store, self.endpoints, __version__, journal, arenas)
            stack.callback(self._shell.close)
            if http is not None:
                http.serve(_pages(self._shell))
            if is_exposed(bound):
                log.warning(
                    "reachable from other machines without authentication", frames=self.endpoints.frames
                )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def run(self) -> None:
        """Serve until drained after request_drain(), or stopped. Raises what the loop raises."""
        self._shell.run()

    def request_drain(self) -> None:
        """Admit nothing more; end run() when what was admitted is finished, or the grace time is over."""
        self._shell.request_drain()

    def stop(self) -> None:
        """End run() at once."""
        self._shell.stop()

    def close(self) -> None:
        """Close everything. No other method may be called after it."""
        self._stack.close()

    @contextlib.contextmanager
    def drained_by_signals(self) -> Iterator[None]:
        """While in the block: the first SIGTERM or SIGINT drains, the second ends the process at once."""
        with stopped_by_signals(self._shell.request_drain, lambda number: os._exit(128 + number)):
            # Python runs handlers between bytecodes: the byte written here wakes a poll that has just begun.
            previous_descriptor = signal.set_wakeup_fd(self._shell.wake_write, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(previous_descriptor)


def run(settings: ShellSettings, *, on_ready: Callable[[Endpoints], None] | None = None) -> int:
    """Run a broker until a signal or a control request ends it; return the process's exit code.

    ``on_ready`` is told the addresses once all are bound. Signals are handled in the main thread only.
    Raises ConfigError or ModelError when it can't start.
    """
    if not structlog.is_configured():
        logs.configure()
    raise_limit()
    with Broker(settings) as broker:
        is_main = threading.current_thread() is threading.main_thread()
        with broker.drained_by_signals() if is_main else contextlib.nullcontext():
            log.info("broker ready", frames=broker.endpoints.frames, http=broker.endpoints.http)
            if on_ready is not None:
                on_ready(broker.endpoints)
            collect_seldom()
            try:
                broker.run()
            except JournalError as error:
                # No bug: the disk. What could not be recorded was published to nobody.
                log.critical("journal failed", reason=str(error))
                return ExitCode.FAILED
            except Exception:
                # A process edge: whatever the loop raised is a bug of ours. The process ends, so that a
                # supervisor starts a whole one.
                log.critical("broker loop failed", exc_info=True)
                return ExitCode.INTERNAL
            log.info("broker stopped")
    return ExitCode.OK


def collect_seldom() -> None:
    """Let the collector of reference cycles run seldom, for the rest of this process.

    Frames leave no cycles behind (a test sees to it), and what is kept for replay would be walked again and
    again: by default every 700 objects, which took a tenth of the core's time of a frame, and all of them
    every few seconds, which would stop the loop for as long as it takes to walk a full ring."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _open_journal(settings: ShellSettings, core: BrokerCore) -> Journal | None:
    """Open the journal, if there is to be one, and tell the core what earlier boots finished."""
    if settings.journal is None:
        return None
    journal = Journal(settings.journal, core.boot, core.settings)
    restored = journal.restored()
    core.restore(restored, time.monotonic_ns())
    log.info(
        "journal open",
        path=str(settings.journal),
        streams=len(restored),
        outcomes=journal.counts.kept_count,
        nbytes=journal.counts.kept_bytes,
    )
    return journal


def _bind_http(settings: ShellSettings) -> HttpServer | None:
    if settings.http_port is None:
        return None
    hosts = resolve_hosts("broker.host", settings.host)
    refuse_exposed("broker.host", settings.host, hosts, is_insecure=settings.insecure)
    return HttpServer(hosts[0], settings.http_port)


def _http_address(settings: ShellSettings, http: HttpServer | None) -> str:
    if http is None:
        return ""
    host = resolve_hosts("broker.host", settings.host)[0]
    return f"http://{bracketed(host)}:{http.port}"


def _pages(shell: Shell) -> dict[str, Callable[[], tuple[int, str, bytes]]]:
    return {
        "/metrics": lambda: render_metrics(shell.snapshots),
        "/healthz": lambda: health(shell.snapshots.last_turn_ns),
        "/readyz": lambda: render_readiness(shell.snapshots),
    }
