"""The producers' arenas as a worker sees them: mapped when a frame names one, unmapped when it is gone.

Not here: the layout of an arena (``headrace.arena``), what is done with the pixels (``staging``).

An arena's file goes with its producer, its memory only with the last mapping: so a worker looks every now and
then which of its mappings have no file any more.

A mapping is read and not the file: ``preadv`` into the row takes more than twice as long (150,528 bytes: 8.3
us instead of 3.5; 2,764,800 bytes: 330 us instead of 105). The price: reading beyond the end of a file
that was cut short is a SIGBUS. So each arena is looked at once a batch, and one that is no longer whole is
let go: its frames end as ``stale_slot``. What is cut off between that look and the copy ends the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from headrace.arena import SHM_FOLDER, ArenaReader
from headrace.descriptors import limits
from headrace.errors import ArenaError, Code, InvalidFrameError
from headrace.protocol.messages import ShmRef

#: Mappings kept at once; the one that was opened first goes when another is needed. As many as a broker takes
#: producers (``admission.max_producers``): a mapping costs address space and two descriptors, Python's own
#: being the second. No more than half of the descriptors that this process may have are used for them.
MAX_MAPPINGS = 1_000
_DESCRIPTORS_PER_MAPPING = 2

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
        self._looked_at: set[str] = set()
        limit, _ = limits()
        self.max_count = max(1, min(MAX_MAPPINGS, limit // 2 // _DESCRIPTORS_PER_MAPPING))
        self._next_sweep_s = 0.0

    @property
    def count(self) -> int:
        return len(self._readers)

    def begin_batch(self) -> None:
        """Look anew at each arena that is asked for from here on."""
        self._looked_at.clear()

    def reader(self, ref: ShmRef) -> ArenaReader:
        """Return the mapped arena of a payload.

        Raises InvalidFrameError ``stale_slot`` when it can't be opened (its producer has removed it), and
        when its file was cut short."""
        name = ref.arena
        reader = self._readers.get(name)
        if name in self._looked_at and reader is not None:
            return reader
        if reader is None:
            reader = self._map(name)
        elif not reader.is_whole():
            self._unmap(name)
            raise InvalidFrameError(Code.STALE_SLOT, f"the file of arena {name} was cut short")
        self._looked_at.add(name)
        return reader

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
        if len(self._readers) >= self.max_count:
            self._unmap(next(iter(self._readers)))
        self._readers[name] = reader
        self._on_open(reader)
        return reader

    def _unmap(self, name: str) -> None:
        reader = self._readers.pop(name)
        self._on_close(reader)
        reader.close()
