"""Shared memory of the lane ``shm``: a producer's arena, which brokers and workers of the same host read.

Not here: when a slot may be freed (the producer knows: when the frame's outcome is known), who may read an
arena (``host.host_key``), messages.

Theory of operation. An arena is one file in the shared-memory folder. Its owner reserves all of it at the
start, so that no later write can fail for want of memory (such a failure is a SIGBUS, not an exception), and
hands out slots (``slot_allocator``). Layout, all numbers unsigned 64-bit in the host's byte order::

    0       magic, version, bytes of the file, epoch of the producer
    4096    blocks: 64 bytes of header (generation, payload bytes), then the payload, at a multiple of 64

A slot is named by its place and its generation. The generation stands in front of the payload exactly as
long as the slot is taken; it is set to 0 when the slot is freed. A reader compares it before *and* after it
has copied the payload: equal both times means that no other frame's bytes are in the copy. Generations
ascend from a number that is drawn at random, so that pixels which lie where once a header was are no
header of anything. (The order of the stores is that of the program on x86-64; on AArch64 a store of the
next payload may be seen before that of its header. There it is the interpreter between the two that
orders them, by far more than any store buffer holds.)

Who may remove the file. Everybody who needs the name holds a shared lock (flock) on the file: the owner for
its life, a broker while frames that lie there are unfinished. The kernel drops the locks of the dead. So
the file is an orphan exactly when an exclusive lock can be had, and whoever gets it removes it. A file is
made and locked under a temporary name: nothing that can be opened by a frame's word is ever unlocked.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import sys
import threading
import weakref
from pathlib import Path
from typing import Final, Self

from headrace.errors import ArenaError, Code, InvalidFrameError
from headrace.free_memory import free_memory_bytes
from headrace.protocol.messages import ShmRef
from headrace.slot_allocator import ALIGNMENT, SlotAllocator

try:
    import fcntl
except ImportError:  # Windows; there ``host.host_key`` is empty, so that no arena is ever made or opened
    fcntl = None  # type: ignore[assignment]

#: Where Linux keeps shared memory: a file system in memory that all processes of a host see.
SHM_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - a folder of memory, not of temporary files

#: Bytes before the first block: one page, so that blocks begin on a page.
HEADER_BYTES: Final = 4096
#: Bytes of a block before its payload: a cache line, so that payloads are aligned to one.
BLOCK_HEADER_BYTES: Final = ALIGNMENT

#: Smallest and largest arena. Below it nothing worth sharing fits; above it is a unit mistaken.
MIN_ARENA_BYTES: Final = 64 * 1024
MAX_ARENA_BYTES: Final = 2**40

_MAGIC: Final = int.from_bytes(b"headrace", "little")
_VERSION: Final = 1
_WORD_BYTES: Final = 8

#: The folder is anybody's to write to, and the name comes from a peer: only names made by us are opened.
_NAME: Final = re.compile(r"headrace-[0-9a-f]{16}\.arena")
_ANY_NAME: Final = re.compile(r"headrace-[0-9a-f]{16}\.arena(\.new)?")

#: Whatever lies under such a name: a link is not followed, and a FIFO, which any user of the host can make
#: in that folder, does not keep its reader waiting for a writer.
_READ_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

#: Names drawn before giving up: one may be taken, and a reclaim may remove a file in the instant between its
#: making and its lock.
_ATTEMPTS: Final = 8

#: For a forked child, which inherits the locks of its parent and must not keep them alive.
_ALL_WRITERS: weakref.WeakSet[ArenaWriter] = weakref.WeakSet()


class ArenaWriter:
    """A producer's own arena. Thread-safe.

    Invariants: a slot that was taken and not freed overlaps no other; its header holds its generation; no
    generation is given twice.
    """

    def __init__(self, folder: Path, name: str, lock_fd: int, memory: mmap.mmap) -> None:
        """Use ``create``."""
        self.folder = folder
        self.name = name
        self.nbytes = len(memory)
        self._lock_fd = lock_fd
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._allocator = SlotAllocator(len(memory) - HEADER_BYTES)
        self._mutex = threading.Lock()
        self._generation = secrets.randbits(62)
        self._is_closed = False
        _ALL_WRITERS.add(self)

    @classmethod
    def create(cls, nbytes: int, epoch: int, folder: Path = SHM_FOLDER) -> ArenaWriter:
        """Make an arena of about ``nbytes`` (rounded up to pages), all of it reserved.

        Raises ArenaError, with what was needed and what is free, when the folder is too small or can't be
        used; nothing is left behind then.
        """
        size = -(-min(max(nbytes, MIN_ARENA_BYTES), MAX_ARENA_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            _check_room(folder, size)
            for _ in range(_ATTEMPTS):
                made = _make_file(folder, size, epoch)
                if made is not None:
                    return cls(folder, *made)
        except OSError as error:
            raise ArenaError(f"no arena of {size} bytes in {folder}: {error.strerror}") from None
        raise ArenaError(
            f"no arena in {folder}: {_ATTEMPTS} times its name was taken or its file removed in the making"
        )

    def take(self, nbytes: int) -> ShmRef | None:
        """Take a slot of ``nbytes`` (1 or more); None when none so large is free."""
        with self._mutex:
            block = None if self._is_closed else self._allocator.take(BLOCK_HEADER_BYTES + nbytes)
            if block is None:
                return None
            self._generation += 1
            generation = self._generation
        start = HEADER_BYTES + block
        word = start // _WORD_BYTES
        self._words[word] = generation
        self._words[word + 1] = nbytes
        return ShmRef(self.name, start + BLOCK_HEADER_BYTES, nbytes, generation)

    def has_room(self, nbytes: int) -> bool:
        """Tell whether a slot of ``nbytes`` is free now."""
        return self._allocator.has_room(BLOCK_HEADER_BYTES + nbytes)

    def view(self, ref: ShmRef) -> memoryview:
        """Return the payload of a slot that is taken, to be written or read."""
        return self._bytes[ref.offset : ref.offset + ref.nbytes]

    def free(self, ref: ShmRef) -> None:
        """Give a slot back. Raises ValueError when it is not taken: a bug of ours."""
        start = ref.offset - BLOCK_HEADER_BYTES
        with self._mutex:
            if self._is_closed:
                return
            if self._words[start // _WORD_BYTES] != ref.generation:
                raise ValueError(f"slot {ref} is not taken")
            self._words[start // _WORD_BYTES] = 0
            self._allocator.give_back(start - HEADER_BYTES)

    @property
    def taken_bytes(self) -> int:
        """Return how many bytes of blocks are taken."""
        return self._allocator.taken_bytes

    def close(self, *, is_abandoned: bool = False) -> None:
        """End it and remove the file. ``is_abandoned``: frames that lie there are unfinished, so a broker
        that holds the file keeps it, and removes it when they are done."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
        _ALL_WRITERS.discard(self)
        if not is_abandoned:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / self.name).unlink()
        self.drop_lock()
        if is_abandoned:
            reclaim_one(self.folder, self.name)
        self._words.release()
        # An array of the user's (Producer.slot) may still view the memory: then it goes with the array.
        with contextlib.suppress(BufferError):
            self._bytes.release()
            self._memory.close()

    def drop_lock(self) -> None:
        """Hold the file no longer. In a forked child: the lock is the parent's, and must not outlive it."""
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd >= 0:
            os.close(lock_fd)


class ArenaFile:
    """Another process's arena, read by way of its file: one descriptor and no mapping. Belongs to one thread.

    ``epoch`` is the producer's."""

    def __init__(self, folder: Path, name: str, fd: int, nbytes: int) -> None:
        """Use ``open``."""
        self.folder = folder
        self.name = name
        self.nbytes = nbytes
        self._fd = fd
        self.epoch = _read_word(fd, 3)

    @classmethod
    def open(cls, name: str, folder: Path = SHM_FOLDER, *, is_held: bool = False) -> Self:
        """Open the arena ``name``. ``is_held``: nobody removes it while this is open.

        Raises ArenaError for a name that is none of ours, a file that is not there, is no arena, or is not
        this user's alone.
        """
        if _NAME.fullmatch(name) is None:
            raise ArenaError(f"{name!r} is no name of an arena")
        try:
            fd = os.open(folder / name, _READ_FLAGS)
        except OSError as error:
            raise ArenaError(f"arena {name}: {error.strerror}") from None
        try:
            if is_held:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return cls(folder, name, fd, _checked_size(name, fd))
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"arena {name} can't be opened: {error.strerror}") from None
        except ArenaError:
            os.close(fd)
            raise

    def _check_place(self, ref: ShmRef) -> None:
        start = ref.offset - BLOCK_HEADER_BYTES
        if start < HEADER_BYTES or start % ALIGNMENT or not 0 < ref.nbytes <= self.nbytes - ref.offset:
            raise InvalidFrameError(
                Code.STALE_SLOT, f"no slot of {ref.nbytes} bytes at {ref.offset} of {self.name}"
            )

    def _read_header(self, ref: ShmRef) -> tuple[int, int]:
        header = os.pread(self._fd, 2 * _WORD_BYTES, ref.offset - BLOCK_HEADER_BYTES)
        generation, nbytes = header[:_WORD_BYTES], header[_WORD_BYTES:]
        return int.from_bytes(generation, sys.byteorder), int.from_bytes(nbytes, sys.byteorder)

    def _stale(self, ref: ShmRef) -> InvalidFrameError:
        return InvalidFrameError(
            Code.STALE_SLOT, f"slot {ref.offset} of {self.name} is no longer that of this frame"
        )

    def copy(self, ref: ShmRef) -> bytes:
        """Return the payload of a slot. Raises InvalidFrameError ``stale_slot`` when the slot is no longer
        that of this frame. Every number of ``ref`` comes from a peer.

        Where the file was cut short meanwhile, there is less to read, but no SIGBUS."""
        self._check_place(ref)
        before = self._read_header(ref)
        copied = os.pread(self._fd, ref.nbytes, ref.offset)
        is_same = before == self._read_header(ref) == (ref.generation, ref.nbytes)
        if not is_same or not ref.generation or len(copied) != ref.nbytes:
            raise self._stale(ref)
        return copied

    def is_whole(self) -> bool:
        """Tell whether the file has the size that it had: nobody has cut it short."""
        return os.fstat(self._fd).st_size == self.nbytes

    def reclaim(self) -> bool:
        """Remove the file if nobody else holds it, and tell whether it is gone; else go on holding it."""
        if self.is_removed():
            return True
        try:
            # This drops the shared lock first: another process may be faster, and that is as good.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.folder / self.name).unlink()
        except FileNotFoundError:
            return True
        except OSError:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return self.is_removed()
        return True

    def is_removed(self) -> bool:
        """Tell whether the file has no name any more: no frame will name it again."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Close it, and drop the hold on the file."""
        os.close(self._fd)


class ArenaReader(ArenaFile):
    """Another process's arena, mapped read-only. Belongs to one thread.

    ``memory`` is the whole mapping from its page-aligned base, for whoever wants to register it with a
    device. Reading it beyond the end of a file that was cut short is a SIGBUS: ask ``is_whole`` first. A copy
    out of the mapping takes a third of the time of one by way of the file.
    """

    def __init__(self, folder: Path, name: str, fd: int, nbytes: int) -> None:
        """Use ``open``. Raises OSError."""
        super().__init__(folder, name, fd, nbytes)
        self._mmap = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self.memory = memoryview(self._mmap)
        self._words = self.memory.cast("Q")

    def view(self, ref: ShmRef) -> memoryview:
        """Return the payload of a slot. Call ``check`` once it is copied.

        Raises InvalidFrameError ``stale_slot`` when the slot is no longer that of this frame.
        """
        self.check(ref)
        return self.memory[ref.offset : ref.offset + ref.nbytes]

    def check(self, ref: ShmRef) -> None:
        """Raise InvalidFrameError ``stale_slot`` unless the slot is this frame's. Every number of ``ref``
        comes from a peer."""
        self._check_place(ref)
        word = (ref.offset - BLOCK_HEADER_BYTES) // _WORD_BYTES
        if self._words[word] != ref.generation or self._words[word + 1] != ref.nbytes or not ref.generation:
            raise self._stale(ref)

    def close(self) -> None:
        """Unmap it, and drop the hold on the file."""
        super().close()
        self._words.release()
        # Where a view is left (the traceback of an error, say) the mapping goes with it.
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mmap.close()


def reclaim(folder: Path = SHM_FOLDER) -> list[str]:
    """Remove the arenas whose owners are dead and that no broker holds; return their names.

    Files of other users and anything that is no arena of ours are left alone.
    """
    try:
        found = sorted(entry.name for entry in os.scandir(folder) if _ANY_NAME.fullmatch(entry.name))
    except OSError:
        return []
    return [name for name in found if reclaim_one(folder, name)]


def reclaim_one(folder: Path, name: str) -> bool:
    """Remove one arena if nobody holds it; tell whether it was."""
    try:
        fd = os.open(folder / name, _READ_FLAGS)
    except OSError:
        return False
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or not about.st_nlink:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / name).unlink()
    except OSError:
        return False  # it is held, or another process was faster
    else:
        return True
    finally:
        os.close(fd)


def _check_room(folder: Path, size: int) -> None:
    # posix_fallocate would find out too, but only after it has filled the folder to the brim.
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    if free < size:
        raise ArenaError(
            f"{folder} is too small for shared memory: {size} bytes are needed, {free} are free; make it"
            " larger (Docker: --shm-size) or the arena smaller (shm_bytes)"
        )
    # The folder may be larger than what memory is left; filling it would then call the out-of-memory killer.
    left = free_memory_bytes()
    if left is not None and left < size:
        raise ArenaError(
            f"{size} bytes of shared memory are needed, {left} bytes of memory are left to this process: make"
            " the arena smaller (shm_bytes), or raise the container's limit"
        )


def _make_file(folder: Path, size: int, epoch: int) -> tuple[str, int, mmap.mmap] | None:
    """Make, reserve, fill in and name an arena's file; None when a reclaim took it in the making, or when
    another one has the name.

    Returns its name, the descriptor that holds its lock, and the mapping. Raises OSError.
    """
    name = f"headrace-{secrets.token_hex(8)}.arena"
    new = folder / f"{name}.new"
    with contextlib.ExitStack() as undo:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            undo.callback(new.unlink, missing_ok=True)
            # A descriptor of its own, as the mapping keeps the other: in a forked child it can be closed.
            try:
                lock_fd = os.open(new, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            undo.callback(os.close, lock_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_SH)
            if not os.fstat(lock_fd).st_nlink:
                return None
            os.fchmod(fd, 0o600)  # whatever the umask took away
            os.posix_fallocate(fd, 0, size)
            # Populated: a page that is touched for the first time costs a fault, and frames pay for it.
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(fd)
        memory[: 4 * _WORD_BYTES] = b"".join(
            number.to_bytes(_WORD_BYTES, sys.byteorder) for number in (_MAGIC, _VERSION, size, epoch)
        )
        # Not renamed: that would take the name away from another producer's arena, should it have it already.
        try:
            (folder / name).hardlink_to(new)
        except FileExistsError:
            memory.close()
            return None
        new.unlink()
        undo.pop_all()
    return name, lock_fd, memory


def _read_word(fd: int, index: int) -> int:
    return int.from_bytes(os.pread(fd, _WORD_BYTES, index * _WORD_BYTES), sys.byteorder)


def _checked_size(name: str, fd: int) -> int:
    """Return the size of an arena's file; raise ArenaError when it is none made by a process of this user."""
    about = os.fstat(fd)
    if (
        not stat.S_ISREG(about.st_mode)
        or about.st_uid != os.geteuid()
        or stat.S_IMODE(about.st_mode) != 0o600
    ):
        raise ArenaError(f"arena {name} is not a file of this user alone")
    if not about.st_nlink:
        raise ArenaError(f"arena {name} was removed")
    words = [_read_word(fd, index) for index in range(3)]
    is_whole = about.st_size >= MIN_ARENA_BYTES and about.st_size % mmap.PAGESIZE == 0
    if words[:2] != [_MAGIC, _VERSION] or words[2] != about.st_size or not is_whole:
        raise ArenaError(f"{name} is no arena of version {_VERSION}")
    return about.st_size


def _drop_locks_after_fork() -> None:
    for writer in tuple(_ALL_WRITERS):
        writer.drop_lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_drop_locks_after_fork)
