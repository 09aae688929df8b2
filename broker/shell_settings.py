"""What the broker's shell needs to know beside the core's settings: addresses, files, time limits.

``headrace.config`` fills these dataclasses from TOML, environment and flags; nothing here reads either.
:func:`check` holds the rules that only the shell knows (what ZeroMQ needs in order to work at all).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.arena import SHM_FOLDER
from headrace.broker.settings import CoreSettings
from headrace.errors import ConfigError

#: Smallest ``max_message_bytes``. ZeroMQ applies the limit to its own handshake too, so that a broker with a
#: limit of 100 bytes could be reached by nobody (zeromq/libzmq#4436). The handshake needs less than 1 KiB
#: with NULL and CURVE security; 64 KiB leaves room for every message of ours that describes models.
MIN_MESSAGE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The files of one model on the broker's disk. ``extra_files`` are the graph's external weights; they
    lie in the graph's folder or below it, since the graph names them relative to itself. ``gpu_files`` are
    the graph for a GPU and its weights, in the same folder; empty = the same as everywhere. ``fp32_files``
    are what batches are compared with."""

    name: str
    version: str
    path: Path
    extra_files: tuple[Path, ...] = ()
    gpu_files: tuple[Path, ...] = ()
    fp32_files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ShellSettings:
    """Settings of one broker process.

    ``port`` is the port of the frames socket; intake, results, workers and control take the next four; 0
    means any free port for each. An address of its own (``tcp://HOST:PORT`` or ``ipc://PATH``) overrides
    both for one socket. ``http_port`` None switches HTTP off, 0 means any free port.
    """

    core: CoreSettings
    host: str = "127.0.0.1"
    port: int = 5555
    frames: str = ""
    intake: str = ""
    results: str = ""
    workers: str = ""
    control: str = ""
    http_port: int | None = 9555
    insecure: bool = False
    grace_ms: int = 10_000
    results_queue_messages: int = 10_000
    local_models: tuple[LocalModel, ...] = ()
    shm_folder: Path | None = SHM_FOLDER  # where producers' arenas are; None = the lane is off
    journal: Path | None = None  # published outcomes are kept in this file; None = in memory alone
    reload_folders: tuple[Path, ...] = ()  # where files for a reload may lie, beside the models' own folders

    def folders_of_models(self) -> tuple[Path, ...]:
        """Return where files for a reload may be read from."""
        own = [model.path.parent.resolve() for model in self.local_models]
        return tuple(dict.fromkeys([*own, *(folder.resolve() for folder in self.reload_folders)]))


def check(settings: ShellSettings) -> None:
    """Raise ConfigError for a value with which the broker would start and not work."""
    size = settings.core.limits.max_message_bytes
    if size < MIN_MESSAGE_BYTES:
        raise ConfigError(
            f"limits.max_message_bytes = {size}: must be at least {MIN_MESSAGE_BYTES}, since ZeroMQ applies"
            " it to its own handshake as well"
        )
    if settings.results_queue_messages < 1:
        raise ConfigError(
            f"broker.results_queue_messages = {settings.results_queue_messages}: must be at least 1, since 0"
            " would mean no bound"
        )
    if settings.grace_ms < 0:
        raise ConfigError(f"broker.grace_ms = {settings.grace_ms}: must be 0 or more")
