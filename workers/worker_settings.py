"""What a worker process is told at its start; everything else comes from the broker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.arena import SHM_FOLDER


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``address`` is any address of the broker. ``device``: auto, cpu, cuda or emulated.

    ``threads`` None means: the CPUs this process may use, divided by ``workers_on_host``. ``worker_id`` ""
    means: host, pid and a random number. ``cache_dir`` "" means: HEADRACE_CACHE or ~/.cache/headrace.
    ``shm_folder`` is where the producers' arenas are; None: frames come inline.
    ``parent_pid`` is the process to end with. ``give_up_ms`` without a broker end the worker (None: never).
    ``replicas`` sessions serve in this process, each as a worker of its own: ``slots`` and ``threads`` are
    those of one, ``gpu_memory_mb``, which bounds what graphs and sessions take of a GPU (None: no bound of
    ours), is shared out.
    """

    address: str = "127.0.0.1:5555"
    device: str = "auto"
    worker_id: str = ""
    threads: int | None = None
    slots: int = 2
    replicas: int = 1
    cache_dir: str = ""
    shm_folder: Path | None = SHM_FOLDER
    workers_on_host: int = 1
    parent_pid: int | None = None
    grace_ms: int = 30_000
    give_up_ms: int | None = None
    gpu_memory_mb: int | None = None
