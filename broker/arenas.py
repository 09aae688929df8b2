"""Producers' arenas as the broker sees them: opened at HELLO, read where somebody can't, removed at the end.

Not here: whether a frame may name a slot (admission), the layout and the locks (``headrace.arena``).

Theory of operation. The broker holds the file of each arena that it has opened, so that nobody removes it
when its producer is killed: accepted frames finish, also at a worker that opens the arena only then. Once no
connected producer and no unfinished frame needs an arena and its owner is dead, the file is removed. While
the owner lives it stays open: a producer that was taken for dead may have sent frames before it noticed. All
that is looked at in ``sweep``, once per upkeep and not per frame.

The payloads themselves are not read here but for two cases: a worker of another host gets them inline, and
the quarantine of poison frames compares contents. So the broker maps nothing: an arena costs it one
descriptor, and none is opened when half of all descriptors are in use: the rest is for connections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import structlog

from headrace.arena import ArenaFile, reclaim
from headrace.broker.counters import ArenaCounts
from headrace.descriptors import Descriptors
from headrace.errors import ArenaError, InvalidFrameError
from headrace.protocol.messages import Batch, Frame, Hello, ShmRef

log = structlog.get_logger()


class Arenas:
    """All open arenas by name. Owned by the loop's thread."""

    def __init__(
        self,
        folder: Path | None,
        host_key: str,
        max_count: int = 1_000,
        descriptors: Descriptors | None = None,
    ) -> None:
        """Remove what dead producers have left. ``folder`` None: the lane is off. At most ``max_count``
        arenas are open at once, and fewer when descriptors are short; producers beyond it send inline."""
        self._max_count = max_count
        self.descriptors = descriptors or Descriptors()
        self._folder = folder
        self._host_key = host_key if folder is not None else ""
        self._open: dict[str, ArenaFile] = {}
        self.counts = ArenaCounts()
        if folder is not None:
            self._count_reclaimed(reclaim(folder))

    def open(self, hello: Hello) -> int:
        """Open the arena that a producer names; return its size, 0 when its frames can't lie there."""
        if self._folder is None or not hello.arena or not self.is_here(hello.host_key):
            return 0
        reader = self._open.get(hello.arena)
        if reader is None:
            reason = self._why_no_more()
            if reason:
                log.warning("arena not usable", producer=hello.name, reason=reason)
                return 0
            try:
                reader = ArenaFile.open(hello.arena, self._folder, is_held=True)
            except ArenaError as error:
                log.warning("arena not usable", producer=hello.name, reason=str(error))
                return 0
            self.descriptors.note_opened()
        if reader.epoch != hello.epoch:
            log.warning("arena not usable", producer=hello.name, reason="it is another producer's")
            if hello.arena not in self._open:
                reader.close()
            return 0
        self._open[hello.arena] = reader
        self.counts.open_count = len(self._open)
        return reader.nbytes

    def _why_no_more(self) -> str:
        if len(self._open) >= self._max_count:
            return f"{self._max_count} are open already"
        open_count, limit = self.descriptors.open_count(), self.descriptors.limit
        if open_count >= limit // 2:
            return (
                f"{open_count} of {limit} descriptors are in use: raise the limit on open files (ulimit -n)"
            )
        return ""

    def is_here(self, host_key: str) -> bool:
        """Tell whether a peer can share memory with this broker."""
        return bool(host_key) and host_key == self._host_key

    def copy(self, ref: ShmRef) -> bytes | None:
        """Return the payload of an unfinished frame, None when its slot is no longer the frame's.

        A copy by way of the file: who reads a mapping dies of a file that was cut short."""
        reader = self._open.get(ref.arena)
        if reader is None:
            return None
        try:
            return reader.copy(ref)
        except InvalidFrameError:
            return None

    def with_payloads(self, batch: Batch) -> Batch:
        """Return the batch with its payloads inline.

        One whose slot is gone stays as it is: the worker can't find it either and says so of this frame."""
        if not any(isinstance(frame.payload, ShmRef) for frame in batch.frames):
            return batch
        return replace(batch, frames=tuple(self._with_payload(frame) for frame in batch.frames))

    def _with_payload(self, frame: Frame) -> Frame:
        ref = frame.payload
        if not isinstance(ref, ShmRef) or ref.arena not in self._open:
            return frame
        try:
            payload = self._open[ref.arena].copy(ref)
        except InvalidFrameError:
            return frame
        self.counts.inlined_count += 1
        return replace(frame, payload=payload)

    def sweep(self, find_used: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        """Let go of the arenas whose owners are gone, but for those that ``find_used`` returns; return their
        names. The file of an owner that could not remove it is removed."""
        if not self._open:
            return []
        used = find_used(self._open.keys())
        unused = [name for name in self._open if name not in used]
        closed = [name for name in unused if self._open[name].is_removed()]
        reclaimed = [name for name in unused if name not in closed and self._open[name].reclaim()]
        for name in closed + reclaimed:
            self._open.pop(name).close()
        self.counts.open_count = len(self._open)
        self._count_reclaimed(reclaimed)
        return closed + reclaimed

    def close(self) -> None:
        """Let go of all, and remove those whose owners are dead."""
        self.sweep(lambda _names: ())
        for reader in self._open.values():
            reader.close()
        self._open.clear()

    def _count_reclaimed(self, names: list[str]) -> None:
        self.counts.reclaimed_count += len(names)
        if names:
            log.info("arenas reclaimed", arenas=names)
