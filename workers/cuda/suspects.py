"""Remembers, over the end of the process, which buckets a device failed with: they run plain the next time.

A CUDA error takes its process with it, so the next one has to be told. The worker writes a small file into
its cache folder, for no supervisor knows what was running, and workers are started by other things than
``headrace up``. Before a capture its bucket is noted, and taken out when the capture is done: a process that
CUDA aborts in the middle leaves the note behind.

Entries name the model file's hash, the size class and the bucket, and the runtime's version: another model
or release is tried again. So is everything after a day, since a fault may have had another cause.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

log = structlog.get_logger()

#: How long a bucket stays plain. A real fault comes back within minutes of the next try, at the price of one
#: restart a day.
KEPT_S = 24 * 3600

#: Most entries kept; a model has some tens of buckets.
MAX_ENTRIES = 1000


class Suspects:
    """The file. ``path`` None keeps nothing. A file that can't be read or written costs the memory, not the
    worker: it is logged."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def reason(self, key: str) -> str:
        """Return why a bucket must run plain, or nothing."""
        entry = self._read().get(key)
        return str(entry[1]) if entry else ""

    def add(self, key: str, reason: str) -> None:
        """Remember a bucket; on disk when this returns."""
        entries = self._read()
        entries[key] = [self._clock(), reason[:300]]
        self._write(entries)

    def remove(self, key: str) -> None:
        """Forget a bucket."""
        entries = self._read()
        if entries.pop(key, None) is not None:
            self._write(entries)

    def _read(self) -> dict[str, list[float | str]]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return {
                str(key): [float(at), str(reason)]
                for key, (at, reason) in found.items()
                if 0 <= self._clock() - float(at) < KEPT_S
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("list of suspect buckets not read", path=str(self._path), reason=str(error))
            return {}

    def _write(self, entries: dict[str, list[float | str]]) -> None:
        if self._path is None:
            return
        newest = sorted(entries.items(), key=lambda item: float(item[1][0]))[-MAX_ENTRIES:]
        temporary = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(dict(newest), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            log.warning("list of suspect buckets not written", path=str(self._path), reason=str(error))
