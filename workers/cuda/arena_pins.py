"""Producers' arenas that the GPU reads itself: registered with the device for as long as anything uses them.

Theory of operation. A row that stands in an arena as the model takes it needs no copy by the host. The arena
is registered when its first such row is staged, and a row holds its arena until the batch is done. When the
last holder has gone (rows, and ``ArenaMappings``, which forgets an arena whose file is gone) it is
unregistered: drained, unregistered, and only then unmapped, in this order, by the thread that stages.

A mapping that can't be registered (a container's limit, a device that does not take read-only memory) is
copied from as before, and said once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import structlog

from headrace.arena import ArenaReader
from headrace.errors import DeviceError, InvalidFrameError
from headrace.protocol.messages import ShmRef
from headrace.workers.cuda.device import CudaFaultError, Device, HostBlock
from headrace.workers.cuda.gate import GATE, Gate
from headrace.workers.engine import DirectRow

log = structlog.get_logger()

#: Smallest row that the device reads itself. Enqueueing a copy takes the host some 10 us, in which it copies
#: 100 KB by itself: smaller rows are dearer this way.
MIN_ROW_BYTES = 512 * 1024


class _Arena:
    """A registered arena; ends when nothing refers to it any more."""

    def __init__(self, block: HostBlock) -> None:
        self.block = block


@dataclass(frozen=True, slots=True)
class _Slot:
    """A payload of an arena. Holds the arena, and with it the mapping."""

    arena: _Arena
    reader: ArenaReader
    ref: ShmRef

    def is_valid(self) -> bool:
        """Tell whether the slot is still that of its frame."""
        try:
            self.reader.check(self.ref)
        except InvalidFrameError:
            return False
        except ValueError:
            # The reader was closed: its producer is gone, and with it whoever could fill the slot anew.
            return True
        return True


class ArenaPins:
    """See the module. Owned by the thread that stages; rows may be dropped by any thread."""

    def __init__(self, device: Device, gate: Gate = GATE, min_row_bytes: int = MIN_ROW_BYTES) -> None:
        self._device = device
        self._gate = gate
        self._min_row_bytes = min_row_bytes
        self._arenas: dict[ArenaReader, _Arena | None] = {}
        self._ended: list[HostBlock] = []

    @property
    def registered_count(self) -> int:
        return sum(arena is not None for arena in self._arenas.values())

    def figures(self) -> dict[str, float]:
        """Return what is registered now; from any thread."""
        blocks = [arena.block for arena in list(self._arenas.values()) if arena is not None]
        return {
            "registered_arenas": len(blocks),
            "registered_arena_bytes": sum(block.nbytes for block in blocks),
        }

    def row(self, row: int, reader: ArenaReader, ref: ShmRef) -> DirectRow | None:
        """Return a payload as a row that the device reads, None when the host must copy it.

        Raises InvalidFrameError ``stale_slot``."""
        self._unregister_ended()
        if ref.nbytes < self._min_row_bytes:
            return None
        if reader not in self._arenas:
            self._arenas[reader] = self._register(reader)
        arena = self._arenas[reader]
        if arena is None:
            return None
        reader.check(ref)
        return DirectRow(row, arena.block, ref.offset, ref.nbytes, _Slot(arena, reader, ref).is_valid)

    def release(self, reader: ArenaReader) -> None:
        """Let go of an arena that is about to be unmapped; the mapping stays for rows on their way."""
        self._arenas.pop(reader, None)
        self._unregister_ended()

    def _register(self, reader: ArenaReader) -> _Arena | None:
        try:
            with self._gate.use():
                block = self._device.register_host(reader.memory)
        except DeviceError as error:
            log.warning("arena is copied by the host", arena=reader.name, reason=str(error))
            return None
        arena = _Arena(block)
        # The block keeps the mapping alive until it is unregistered. Not at exit: the process takes its pins
        # along.
        weakref.finalize(arena, self._ended.append, block).atexit = False
        return arena

    def _unregister_ended(self) -> None:
        while self._ended:
            block = self._ended.pop()
            try:
                with self._gate.use():
                    self._device.drain()
                    self._device.unregister_host(block)
            except CudaFaultError:
                return  # the worker ends, for the same reason
            except DeviceError as error:
                log.warning("arena not unregistered", reason=str(error))
