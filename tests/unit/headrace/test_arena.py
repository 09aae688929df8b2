"""Arenas of shared memory: what can be read, what is stale, and who may remove the file."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.arena import (
    HEADER_BYTES,
    MIN_ARENA_BYTES,
    ArenaFile,
    ArenaReader,
    ArenaWriter,
    reclaim,
    reclaim_one,
)
from headrace.errors import ArenaError, InvalidFrameError
from headrace.protocol.messages import ShmRef

NBYTES = 256 * 1024


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ArenaWriter]:
    made = ArenaWriter.create(NBYTES, 7, tmp_path)
    yield made
    made.close()


def put(writer: ArenaWriter, data: bytes) -> ShmRef:
    ref = writer.take(len(data))
    assert ref is not None
    writer.view(ref)[:] = data
    return ref


def is_stale(reader: ArenaReader, ref: ShmRef) -> bool:
    try:
        reader.copy(ref)
    except InvalidFrameError as error:
        return error.code == "stale_slot"
    return False


# -- slots ----------------------------------------------------------------------------------------------


def test_a_reader_finds_what_was_written(writer: ArenaWriter, tmp_path: Path) -> None:
    """The epoch, and each payload at its aligned place."""
    reader = ArenaReader.open(writer.name, tmp_path)
    refs = [put(writer, bytes([number]) * (1_000 + number)) for number in range(20)]

    assert reader.epoch == 7
    assert reader.nbytes == writer.nbytes
    assert [reader.copy(ref) for ref in refs] == [bytes([n]) * (1_000 + n) for n in range(20)]
    assert all(ref.offset % 64 == 0 for ref in refs)
    assert writer.taken_bytes >= 20 * 1_000
    with pytest.raises(TypeError):
        reader.view(refs[0])[0] = 1
    reader.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9_000), st.integers(0, 255)), max_size=60))
def test_a_slot_reads_as_itself_or_as_stale(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int, int]]
) -> None:
    """Never as another frame's bytes, in whatever order slots are taken and freed."""
    folder = tmp_path_factory.mktemp("shm")
    writer = ArenaWriter.create(MIN_ARENA_BYTES, 1, folder)
    reader = ArenaReader.open(writer.name, folder)
    alive: dict[ShmRef, bytes] = {}
    dead: list[ShmRef] = []
    for is_free, nbytes, value in steps:
        if is_free and alive:
            ref = list(alive)[value % len(alive)]
            del alive[ref]
            writer.free(ref)
            dead.append(ref)
        else:
            had_room = writer.has_room(nbytes)
            ref = writer.take(nbytes)
            assert (ref is not None) == had_room
            if ref is not None:
                alive[ref] = bytes([value]) * nbytes
                writer.view(ref)[:] = alive[ref]
    assert all(reader.copy(ref) == data for ref, data in alive.items())
    assert all(is_stale(reader, ref) for ref in dead)
    reader.close()
    writer.close()


def test_a_slot_reused_during_the_copy_is_stale(writer: ArenaWriter, tmp_path: Path) -> None:
    """The generation is compared again behind the copy."""
    reader = ArenaReader.open(writer.name, tmp_path)
    old = put(writer, b"old" * 100)
    view = reader.view(old)
    writer.free(old)
    new = put(writer, b"new" * 100)
    copied = bytes(view)

    assert new.offset == old.offset
    assert copied == b"new" * 100
    with pytest.raises(InvalidFrameError, match="stale_slot"):
        reader.check(old)
    reader.close()


def test_pixels_are_no_header(writer: ArenaWriter, tmp_path: Path) -> None:
    """Small numbers, of which dark pictures are full, are never a generation."""
    reader = ArenaReader.open(writer.name, tmp_path)
    wide = put(writer, bytes(4_096))
    writer.free(wide)
    cover = writer.take(8_192)
    assert cover is not None
    for number in range(256):
        np.frombuffer(writer.view(cover), np.uint64)[:] = number
        assert is_stale(reader, replace(wide, offset=cover.offset + 128, generation=number))
    assert wide.generation > 2**32
    reader.close()


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 0},
        {"offset": 64},
        {"offset": HEADER_BYTES},
        {"offset": HEADER_BYTES + 65},
        {"offset": NBYTES},
        {"offset": NBYTES + 64},
        {"offset": 2**63},
        {"nbytes": 0},
        {"nbytes": 99},
        {"nbytes": NBYTES},
        {"nbytes": 2**63},
        {"generation": 0},
        {"generation": 1},
    ],
    ids=str,
)
def test_numbers_of_a_peer_are_checked(writer: ArenaWriter, tmp_path: Path, change: dict[str, int]) -> None:
    """None reaches memory outside of the arena, or a header of none."""
    reader = ArenaReader.open(writer.name, tmp_path)
    ref = put(writer, bytes(100))

    assert is_stale(reader, replace(ref, **change))
    assert not is_stale(reader, ref)
    reader.close()


def test_a_slot_is_freed_once(writer: ArenaWriter) -> None:
    """The second time is a bug of ours."""
    ref = put(writer, b"x")
    writer.free(ref)

    with pytest.raises(ValueError, match="not taken"):
        writer.free(ref)


def test_threads_never_share_a_slot(tmp_path: Path) -> None:
    """Eight threads take, fill, read and free."""
    writer = ArenaWriter.create(NBYTES, 7, tmp_path)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            ref = writer.take(2_000)
            if ref is not None:
                writer.view(ref)[:] = bytes([number]) * 2_000
                if bytes(writer.view(ref)) != bytes([number]) * 2_000:
                    wrong.append(number)
                writer.free(ref)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert wrong == []
    assert writer.taken_bytes == 0
    writer.close()


# -- making ---------------------------------------------------------------------------------------------


def test_a_file_is_this_users_alone_and_reserved(writer: ArenaWriter, tmp_path: Path) -> None:
    """Mode 0600 whatever the umask; all its blocks are there, so that no write can fail."""
    about = (tmp_path / writer.name).stat()

    assert about.st_mode & 0o777 == 0o600
    assert about.st_size == NBYTES
    assert about.st_blocks * 512 >= NBYTES
    assert [path.name for path in tmp_path.iterdir()] == [writer.name]


def test_a_small_folder_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MB, as a container may have."""
    about = os.statvfs(tmp_path)
    blocks = 16 * 1024 * 1024 // about.f_frsize
    small = os.statvfs_result((*about[:4], blocks, *about[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: small)

    with pytest.raises(ArenaError, match=rf"{2**26} bytes are needed, {blocks * about.f_frsize} are free"):
        ArenaWriter.create(2**26, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_fills_up_meanwhile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reserving fails, not a later write."""

    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(ArenaError, match="No space left"):
        ArenaWriter.create(NBYTES, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="No such file"):
        ArenaWriter.create(NBYTES, 1, tmp_path / "nowhere")


def test_a_reclaim_in_the_making_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may find the file in the instant before it is locked: another name is drawn."""
    real, calls = fcntl.flock, []

    def interfere(fd: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            assert len(reclaim(tmp_path)) == 1
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", interfere)
    writer = ArenaWriter.create(NBYTES, 1, tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [writer.name]
    writer.close()


def test_a_file_that_is_removed_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded: somebody cleans the folder."""
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: [p.unlink() for p in tmp_path.iterdir()])

    with pytest.raises(ArenaError, match="its file removed in the making"):
        ArenaWriter.create(NBYTES, 1, tmp_path)


# -- opening --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "../etc/passwd",
        "/etc/passwd",
        "headrace-0123.arena",
        "headrace-0123456789abcdef.arena/../x",
        "headrace-0123456789abcdef.arena\n",
        "headrace-0123456789abcdeF.arena",
        "headrace-0123456789abcdef.arena.new",
    ],
)
def test_only_names_of_ours_are_opened(tmp_path: Path, name: str) -> None:
    """The name comes from a peer."""
    with pytest.raises(ArenaError, match="no name"):
        ArenaReader.open(name, tmp_path)


def test_only_arenas_of_this_user_are_opened(writer: ArenaWriter, tmp_path: Path) -> None:
    """No link, no folder, no file that others may write to, none that is shorter than it says."""
    name = "headrace-0123456789abcdef.arena"
    path = tmp_path / name
    whole = (tmp_path / writer.name).read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(ArenaError, match=words):
            ArenaReader.open(name, tmp_path)
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)

    refused("No such file")
    path.symlink_to(tmp_path / writer.name)
    refused("symbolic")
    path.mkdir(mode=0o600)
    refused("not a file")
    os.mkfifo(path, 0o600)
    refused("not a file")
    path.write_bytes(whole)
    path.chmod(0o666)
    refused("this user alone")
    odd = whole[:16] + (NBYTES + 1).to_bytes(8, sys.byteorder) + whole[24:] + b"x"
    for content in (b"", bytes(NBYTES), whole[:-4096], b"x" + whole[1:], odd):
        path.write_bytes(content)
        path.chmod(0o600)
        refused("no arena of version")


def test_an_arena_beyond_the_memory_that_is_left_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of memory may promise more than there is: writing there would be a SIGBUS, or a kill."""
    monkeypatch.setattr("headrace.arena.free_memory_bytes", lambda: NBYTES - 1)

    with pytest.raises(ArenaError, match=f"{NBYTES} bytes .* are needed, {NBYTES - 1} bytes"):
        ArenaWriter.create(NBYTES, 1, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_left_to_its_owner(
    writer: ArenaWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second arena under that name gets another one; where there is none to be had, it says so."""
    ref = put(writer, b"abc")
    taken = writer.name.removeprefix("headrace-").removesuffix(".arena")
    names = [taken, "0123456789abcdef"]
    monkeypatch.setattr("headrace.arena.secrets.token_hex", lambda _nbytes: names.pop(0) if names else taken)

    other = ArenaWriter.create(NBYTES, 8, tmp_path)
    with pytest.raises(ArenaError, match="8 times its name was taken"):
        ArenaWriter.create(NBYTES, 9, tmp_path)

    assert other.name == "headrace-0123456789abcdef.arena"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([writer.name, other.name])
    assert ArenaFile.open(writer.name, tmp_path).copy(ref) == b"abc"
    other.close()


def test_a_copy_out_of_a_file_that_was_cut_short_is_stale(tmp_path: Path) -> None:
    """Whatever is cut off, the broker, which copies, gets an error of one frame and no SIGBUS."""
    for left_bytes in (HEADER_BYTES + 4096, HEADER_BYTES, 0):
        writer = ArenaWriter.create(NBYTES, 7, tmp_path)
        ref = put(writer, bytes(range(256)) * 64)
        reader = ArenaReader.open(writer.name, tmp_path)
        assert reader.is_whole()
        os.truncate(tmp_path / writer.name, left_bytes)
        assert is_stale(reader, ref)
        assert not reader.is_whole()
        reader.close()
        writer.close()


# -- removing -------------------------------------------------------------------------------------------


def test_live_arenas_are_left_alone_and_orphans_go(tmp_path: Path) -> None:
    """PRC-08: an orphan is a file that nobody holds; what is none of ours is not touched."""
    alive, dead = (ArenaWriter.create(NBYTES, epoch, tmp_path) for epoch in (1, 2))
    for name in ("other", "headrace-1.arena", "headrace-0123456789abcdef.arena.txt"):
        (tmp_path / name).touch()
    (tmp_path / "headrace-0123456789abcdef.arena.new").touch()  # its maker was killed
    dead.drop_lock()

    assert reclaim(tmp_path) == sorted([dead.name, "headrace-0123456789abcdef.arena.new"])
    assert (tmp_path / alive.name).exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != alive.name) == [
        "headrace-0123456789abcdef.arena.txt",
        "headrace-1.arena",
        "other",
    ]
    assert reclaim(tmp_path / "nowhere") == []
    assert not reclaim_one(tmp_path, dead.name)
    alive.close()


def test_what_else_lies_there_stops_no_reclaim(tmp_path: Path) -> None:
    """Anybody can make a FIFO in that folder: to wait for its writer would stop whoever starts."""
    os.mkfifo(tmp_path / "headrace-0123456789abcde0.arena", 0o666)
    (tmp_path / "headrace-0123456789abcde1.arena").mkdir()
    (tmp_path / "headrace-0123456789abcde2.arena").symlink_to(tmp_path / "headrace-0123456789abcde0.arena")
    dead = tmp_path / "headrace-0123456789abcdef.arena"
    dead.touch(0o600)

    assert reclaim(tmp_path) == [dead.name]


def test_a_broker_holds_a_dead_producers_arena(tmp_path: Path) -> None:
    """Until it lets go, whoever reclaims."""
    writer = ArenaWriter.create(NBYTES, 1, tmp_path)
    held = ArenaReader.open(writer.name, tmp_path, is_held=True)
    writer.drop_lock()

    assert reclaim(tmp_path) == []
    assert not held.is_removed()
    held.close()
    assert reclaim(tmp_path) == [writer.name]


def test_an_abandoned_arena_is_removed_by_whoever_lets_go_last(tmp_path: Path) -> None:
    """A producer that ends with unfinished frames leaves it to the broker; without one it goes at once."""
    held_by_none, held = (ArenaWriter.create(NBYTES, 1, tmp_path) for _ in range(2))
    reader = ArenaReader.open(held.name, tmp_path, is_held=True)
    held_by_none.close(is_abandoned=True)
    held.close(is_abandoned=True)

    assert [path.name for path in tmp_path.iterdir()] == [held.name]
    reader.close()
    assert reclaim(tmp_path) == [held.name]


def test_a_closed_arena_gives_no_slots_and_closes_again(tmp_path: Path) -> None:
    """Frames may end after it, and arrays of the user's may still be there."""
    writer = ArenaWriter.create(NBYTES, 1, tmp_path)
    ref = put(writer, b"abc")
    array = np.frombuffer(writer.view(ref), np.uint8)
    writer.close()
    writer.close()

    assert writer.take(1) is None
    writer.free(ref)
    assert bytes(array) == b"abc"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_sees_that_the_file_is_gone(writer: ArenaWriter, tmp_path: Path) -> None:
    """Its memory would stay as long as the mapping does."""
    reader = ArenaReader.open(writer.name, tmp_path)
    ref = put(writer, b"abc")
    view = reader.view(ref)
    assert not reader.is_removed()

    writer.close()

    assert reader.is_removed()
    reader.close()
    assert bytes(view) == b"abc"


CHILD = """
import os, sys
from pathlib import Path
from headrace.arena import ArenaWriter
writer = ArenaWriter.create(262144, 7, Path(sys.argv[1]))
child = os.fork() if sys.argv[2] == "fork" else 0
os.write(1, b"%d\\n" % child)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_a_killed_owners_arena_is_an_orphan(tmp_path: Path, kind: str) -> None:
    """The kernel drops its lock, and a forked child that lives on has none of its own."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(tmp_path), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        lines = [int(owner.stdout.readline()) for _ in range(2 if kind == "fork" else 1)]
        assert reclaim(tmp_path) == []
        owner.kill()
        owner.wait(10)
        assert len(reclaim(tmp_path)) == 1
        for child in lines:
            if child:
                os.kill(child, signal.SIGKILL)
