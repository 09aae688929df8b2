"""The producers' arenas as a worker sees them: mapped when a frame names one, unmapped when it is gone.

Not here: the layout of an arena (``headrace.arena``), what is done with the pixels (``staging``).

An arena's file goes with its producer, its memory only with the last mapping: so a worker looks every now and
then which of its mappings have no file any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from headrace.arena import SHM_FOLDER, ArenaReader
from headrace.errors import ArenaError, Code, InvalidFrameError
from headrace.protocol.messages import ShmRef

#: Mappings kept at once; the one that was opened first goes when another is needed. As many as a broker takes
#: producers (``admission.max_producers``): a mapping costs address space and two descriptors.
MAX_MAPPINGS = 1_000

#: How often mappings are looked through for files that are gone.
SWEEP_S = 1.0


def _ignore(_reader: ArenaReader) -> None:
    """Do nothing: the engines without a device have no use for a mapping as such."""


class ArenaMappings:
    """All mapped arenas by name. Owned by one thread, the one that stages.

    ``on_open`` is told of each new mapping and ``on_close`` of each that is about to go, in that thread: an
    engine can register the memory with its device between the two.
    """

    def __init__(
        self,
        folder: Path | None = SHM_FOLDER,
        *,
        on_open: Callable[[ArenaReader], None] = _ignore,
        on_close: Callable[[ArenaReader], None] = _ignore,
    ) -> None:
        """Map nothing yet. ``folder`` None: this worker takes no payloads in shared memory."""
        self._folder = folder
        self._on_open = on_open
        self._on_close = on_close
        self._readers: dict[str, ArenaReader] = {}
        self._next_sweep_s = 0.0

    @property
    def count(self) -> int:
        return len(self._readers)

    def reader(self, ref: ShmRef) -> ArenaReader:
        """Return the mapped arena of a payload.

        Raises InvalidFrameError ``stale_slot`` when it can't be opened: its producer has removed it."""
        reader = self._readers.get(ref.arena)
        return self._map(ref.arena) if reader is None else reader

    def sweep(self) -> None:
        """Unmap what has no file any more, if it is time to look."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + SWEEP_S
        for name in [name for name, reader in self._readers.items() if reader.is_removed()]:
            self._unmap(name)

    def close(self) -> None:
        """Unmap all."""
        for name in list(self._readers):
            self._unmap(name)

    def _map(self, name: str) -> ArenaReader:
        if self._folder is None:
            raise InvalidFrameError(
                Code.STALE_SLOT, "this worker reads no shared memory: shm.folder is empty"
            )
        try:
            reader = ArenaReader.open(name, self._folder)
        except ArenaError as error:
            raise InvalidFrameError(Code.STALE_SLOT, str(error)) from None
        if len(self._readers) >= MAX_MAPPINGS:
            self._unmap(next(iter(self._readers)))
        self._readers[name] = reader
        self._on_open(reader)
        return reader

    def _unmap(self, name: str) -> None:
        reader = self._readers.pop(name)
        self._on_close(reader)
        reader.close()
