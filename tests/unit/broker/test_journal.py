"""The journal's file: what it keeps, what it refuses, and what a power cut leaves of it."""

from __future__ import annotations

import random
import shutil
import sqlite3
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.broker import journal as journal_module
from headrace.broker.journal import ROW_OVERHEAD_BYTES, Journal
from headrace.broker.journal_body import pack, unpack
from headrace.broker.journal_file import FORMAT_VERSION, signed, unsigned
from headrace.broker.records import Refusal
from headrace.broker.settings import CoreSettings
from headrace.errors import ConfigError, JournalError
from headrace.protocol import codec
from headrace.protocol.messages import Heartbeat, Limits, Outcome, Status, TensorSpec, Timing

SETTINGS = CoreSettings(())
U64 = 2**64 - 1
EPOCH = U64 - 5

HEARTBEAT = bytes(codec.encode(Heartbeat())[0])

WAL_HEADER_BYTES = 32
WAL_FRAME_BYTES = 24 + 4096


def outcome(
    pub_seq: int,
    *,
    stream: str = "cam",
    boot: int = 1,
    seq: int | None = None,
    epoch: int = EPOCH,
    status: Status = Status.OK,
    nbytes: int = 0,
) -> Outcome:
    tensors = (TensorSpec("scores", "uint8", (nbytes,)),) if nbytes else ()
    return Outcome(
        stream,
        epoch,
        pub_seq if seq is None else seq,
        boot,
        pub_seq,
        status,
        code="queue_full" if status is Status.REJECTED else "",
        message="full" if status is Status.REJECTED else "",
        retry_after_ms=50 if status is Status.REJECTED else None,
        timing=Timing(queued_us=0, published_us=7),
        outputs={"boxes": [[1.0, 2.0]]},
        tensors=tensors,
        payloads=(bytes(nbytes),) if nbytes else (),
    )


def outcomes(first: int, stop: int, boot: int = 1, stream: str = "cam") -> list[Outcome]:
    """Outcomes of one boot whose seqs go on from boot to boot."""
    return [outcome(n, boot=boot, stream=stream, seq=1_000 * boot + n) for n in range(first, stop)]


def read_all(journal: Journal, stream: str, boot: int, stop: int) -> list[Outcome]:
    """Everything of a boot, page by page, without a hole."""
    found: list[Outcome] = []
    has_more = True
    while has_more:
        page, missed, has_more = journal.replay(stream, boot, len(found), stop - 1, 1 << 20)
        assert missed == []
        found += page
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


# -- what it keeps ------------------------------------------------------------------------------------


def test_a_later_boot_reads_what_was_appended(path: Path) -> None:
    """Payloads, u64 ids and all fields come back as they were; the file is the only thing handed on."""
    written = [
        outcome(0, nbytes=5_000, boot=U64),
        outcome(1, boot=U64, seq=U64),
        outcome(2, boot=U64, status=Status.REJECTED),
    ]
    with Journal(path, U64, SETTINGS) as first:
        first.append(written[:2])
        first.append(written[2:])

    with Journal(path, 2, SETTINGS) as second:
        assert read_all(second, "cam", U64, 3) == written
        assert second.earlier_boots == {U64: True}
        assert second.positions(["cam\0"]) == second.positions(["c"]) == {"cam": [[U64, 0, 3]]}
        second.append([outcome(0, stream="new", boot=2)])
        assert second.positions(["ca\0", "n"]) == {}


def test_pages_end_at_their_bytes_and_their_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one outcome a page; no page holds the broker's loop for long."""
    monkeypatch.setattr(journal_module, "MAX_REPLAY_COUNT", 3)
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 5))

    with Journal(path, 2, SETTINGS) as second:
        assert [len(second.replay("cam", 1, 0, 4, size)[0]) for size in (1, 1 << 20)] == [1, 3]
        assert second.replay("cam", 1, 0, 4, 1 << 20)[2] is True
        assert second.replay("cam", 1, 3, 9, 1 << 20) == (outcomes(3, 5), [], False)


@pytest.mark.parametrize(
    ("stream", "boot", "missed"),
    [("cam", 9, [(0, 4)]), ("other", 9, [(0, 4)]), ("other", 1, []), ("cam", 2, [(0, 4)])],
    ids=["unknown boot", "unknown both", "complete boot without the stream", "the present boot"],
)
def test_what_it_does_not_have_is_lost_unless_it_never_was(
    path: Path, stream: str, boot: int, missed: list[tuple[int, int]]
) -> None:
    """A complete boot without the stream had no outcome of it; of any other nobody can tell."""
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 4))

    with Journal(path, 2, SETTINGS) as second:
        assert second.replay(stream, boot, 0, 3, 1 << 20) == ([], missed, False)


def test_what_was_finished_is_restored_as_runs(path: Path) -> None:
    """Per epoch, over several boots; frames that had the broker's boot for an epoch can't come again."""
    with Journal(path, 1, SETTINGS) as first:
        first.append([outcome(n, seq=seq) for n, seq in enumerate([0, 1, 2, 7, 5, 9])])
        first.append([outcome(6, seq=0, epoch=1)])
    with Journal(path, 2, SETTINGS) as second:
        second.append([outcome(0, boot=2, seq=3), outcome(1, boot=2, seq=6), outcome(2, boot=2, epoch=8)])

    with Journal(path, 3, SETTINGS) as third:
        (stream,) = third.restored()

    assert stream.name == "cam"
    assert [(one.epoch, one.finished.runs) for one in stream.epochs] == [
        (EPOCH, [(0, 3), (5, 7), (9, 9)]),
        (8, [(2, 2)]),
    ]


def test_the_latest_rejects_are_restored_with_their_reason(path: Path) -> None:
    """As many as a producer can send again."""
    settings = replace(SETTINGS, credits_per_producer=2)
    with Journal(path, 1, settings) as first:
        first.append([outcome(n, status=Status.REJECTED) for n in range(3)] + [outcome(3)])

    with Journal(path, 2, settings) as second:
        (stream,) = second.restored()

    refusal = Refusal("queue_full", "full", 50)
    assert stream.epochs[0].rejects == ((1, refusal), (2, refusal))


# -- bounds -------------------------------------------------------------------------------------------


def test_outcomes_per_stream_are_bounded_over_all_boots(path: Path) -> None:
    """The oldest go, whichever boot they are of; where a boot ended stays known."""
    settings = replace(SETTINGS, retention_frames=5)
    with Journal(path, 1, settings) as first:
        first.append(outcomes(0, 4))
        assert first.counts.kept_count == 4
    with Journal(path, 2, settings) as second:
        second.append(outcomes(0, 3, boot=2))
        assert second.counts.kept_count == 5
        assert second.positions([""]) == {"cam": [[1, 2, 4]]}
        assert second.replay("cam", 1, 0, 3, 1 << 20) == (outcomes(2, 4), [(0, 2)], False)
        second.append(outcomes(3, 9, boot=2))
        assert second.positions([""]) == {"cam": [[1, 4, 4]]}

    with Journal(path, 3, settings) as third:
        assert third.positions([""]) == {"cam": [[1, 4, 4], [2, 4, 9]]}
        (stream,) = third.restored()
        assert stream.epochs[0].finished.runs == [(1_000, 1_003), (2_000, 2_008)]


def test_bytes_are_bounded_over_all_streams(path: Path) -> None:
    """The oldest outcome of all goes first, and no more than needed."""
    nbytes = len(pack(outcome(0, nbytes=1_000))) + ROW_OVERHEAD_BYTES
    settings = replace(SETTINGS, retention_bytes=3 * nbytes + 50)
    with Journal(path, 1, settings) as first:
        for number in range(5):
            first.append([outcome(number // 2, stream="ab"[number % 2], nbytes=1_000)])
            assert first.counts.kept_bytes <= settings.retention_bytes

        assert first.counts.kept_count == 3
    with Journal(path, 2, settings) as second:
        assert second.positions([""]) == {"a": [[1, 1, 3]], "b": [[1, 1, 2]]}


def test_streams_are_bounded_and_the_loss_is_known(path: Path) -> None:
    """The one written to longest ago goes with all it had, and its boots are not complete any more: nobody
    can tell a dropped stream from one that had no outcome."""
    settings = replace(SETTINGS, max_streams=2)
    with Journal(path, 1, settings) as first:
        first.append([outcome(0, stream="a"), outcome(0, stream="b"), outcome(1, stream="a")])
        first.append([outcome(0, stream="c"), outcome(2, stream="a")])

    with Journal(path, 2, settings) as second:
        assert second.positions([""]) == {"c": [[1, 0, 1]], "a": [[1, 0, 3]]}
        assert second.earlier_boots == {1: False}
        assert second.replay("b", 1, 0, 0, 1 << 20) == ([], [(0, 1)], False)
        assert [stream.name for stream in second.restored()] == ["c", "a"]


def test_one_turn_may_bring_more_streams_than_there_is_room_for(path: Path) -> None:
    """A stream that comes and goes within one transaction leaves nothing behind."""
    settings = replace(SETTINGS, max_streams=2)
    with Journal(path, 1, settings) as first:
        first.append([outcome(n, stream=f"s{n % 5}") for n in range(10)])
        assert first.counts.kept_count == 2

    with Journal(path, 2, settings) as second:
        assert list(second.positions([""])) == ["s3", "s4"]
        assert second.counts.kept_count == 2


def test_boots_and_epochs_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts again and again, and producers that do, fill no table."""
    monkeypatch.setattr(journal_module, "MAX_EARLIER_BOOTS", 3)
    for boot in range(1, 12):
        with Journal(path, boot, SETTINGS) as journal:
            journal.append([outcome(0, boot=boot, epoch=100 + boot, seq=boot)])

    with Journal(path, 12, SETTINGS) as last:
        assert list(last.earlier_boots) == [9, 10, 11]
        assert last.positions([""]) == {"cam": [[9, 0, 1], [10, 0, 1], [11, 0, 1]]}
        (stream,) = last.restored()
    assert [one.epoch for one in stream.epochs] == list(range(104, 112))


def test_finished_runs_are_bounded(path: Path) -> None:
    """A producer that leaves out seqs costs a run each; the oldest are forgotten, on disk as well."""
    settings = replace(SETTINGS, duplicate_window=3)
    with Journal(path, 1, settings) as first:
        first.append([outcome(n, seq=2 * n) for n in range(6)])

    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (3,)
    database.close()
    with Journal(path, 2, replace(SETTINGS, duplicate_window=2)) as second:
        (stream,) = second.restored()
        assert stream.epochs[0].finished.runs == [(8, 8), (10, 10)]


def test_bounds_set_lower_hold_from_the_next_start(path: Path) -> None:
    """What the file has too much of goes when it is opened."""
    with Journal(path, 1, SETTINGS) as first:
        first.append([*outcomes(0, 6, stream="a"), *outcomes(0, 6, stream="b"), *outcomes(0, 2, stream="c")])

    with Journal(path, 2, replace(SETTINGS, max_streams=2, retention_frames=4)) as second:
        assert second.positions([""]) == {"b": [[1, 2, 6]], "c": [[1, 0, 2]]}
        assert second.counts.kept_count == 6
    with Journal(path, 3, replace(SETTINGS, retention_bytes=1)) as third:
        assert third.counts.kept_count == 0
        assert third.counts.kept_bytes == 0


# -- what it refuses ----------------------------------------------------------------------------------


def test_two_brokers_on_one_journal_are_refused(path: Path) -> None:
    """The second is told why; the first is not disturbed; when it is gone the file is free."""
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 1))
        with pytest.raises(ConfigError, match="in use by another broker"):
            Journal(path, 2, SETTINGS)
        first.append(outcomes(1, 2))

    with Journal(path, 2, SETTINGS) as second:
        assert read_all(second, "cam", 1, 2) == outcomes(0, 2)


def test_a_file_of_somebody_else_is_left_alone(path: Path) -> None:
    """A text file, and another program's database: refused by name, not a byte changed."""
    path.write_text("not a database, and rather long for one " * 100)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="is not a journal"):
        Journal(path, 1, SETTINGS)
    assert path.read_bytes() == before

    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE streams (name TEXT)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another program"):
        Journal(path, 1, SETTINGS)
    assert path.read_bytes() == before


def test_a_later_format_is_refused(path: Path) -> None:
    """An old broker must not write into what it can't read."""
    Journal(path, 1, SETTINGS).close()
    database = sqlite3.connect(path)
    database.execute("UPDATE format SET version = ?", (FORMAT_VERSION + 1,))
    database.commit()
    database.close()

    with pytest.raises(ConfigError, match=rf"has format {FORMAT_VERSION + 1}, this headrace writes format"):
        Journal(path, 2, SETTINGS)


@pytest.mark.parametrize("kind", ["missing folder", "a folder"])
def test_a_place_that_can_not_be_is_refused_with_the_remedy(tmp_path: Path, kind: str) -> None:
    """The error names the key, the path and what to do."""
    path = tmp_path / "none" / "journal.db" if kind == "missing folder" else tmp_path

    with pytest.raises(ConfigError, match=r"broker\.journal = '.*': .*(make it|writable)"):
        Journal(path, 1, SETTINGS)


def test_damaged_rows_are_missed_and_the_rest_is_served(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a whole page of them is damaged: the next one is asked for."""
    monkeypatch.setattr(journal_module, "MAX_REPLAY_COUNT", 2)
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 6))
        first._db.execute("UPDATE outcomes SET body = x'00' WHERE pub_seq IN (1, 2, 3)")

    with Journal(path, 2, SETTINGS) as second:
        assert second.replay("cam", 1, 0, 5, 1 << 20) == (outcomes(0, 1), [(1, 2)], True)
        assert second.replay("cam", 1, 2, 5, 1 << 20) == ([], [(2, 4)], True)
        assert second.replay("cam", 1, 3, 5, 1 << 20) == (outcomes(4, 5), [(3, 4)], True)
        assert second.replay("cam", 1, 3, 3, 1 << 20) == ([], [(3, 4)], False)
        assert second.counts.damaged_count == 5


def test_a_reject_that_can_not_be_read_is_finished_all_the_same(path: Path) -> None:
    """Its reason is lost, not that it ended."""
    with Journal(path, 1, SETTINGS) as first:
        first.append([outcome(0, status=Status.REJECTED)])
        first._db.execute("UPDATE outcomes SET body = x'00'")

    with Journal(path, 2, SETTINGS) as second:
        (stream,) = second.restored()
    assert (stream.epochs[0].finished.runs, stream.epochs[0].rejects) == ([(0, 0)], ())


def test_a_file_that_can_not_be_read_any_more_is_missed(path: Path) -> None:
    """A disk that fails while the broker runs: told, counted, and the broker goes on."""
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 3))
    with Journal(path, 2, SETTINGS) as second:
        second._db.execute("DROP TABLE outcomes")

        assert second.replay("cam", 1, 0, 2, 1 << 20) == ([], [(0, 3)], False)
        assert second.counts.damaged_count == 1


def test_tables_that_contradict_each_other_are_damage(path: Path) -> None:
    """A row without its stream: refused with the remedy, and the lock is given back."""
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 3))
        first._db.execute("DELETE FROM streams")

    for boot in (2, 3):
        with pytest.raises(ConfigError, match=r"is damaged \(KeyError.*move it and its -wal file away"):
            Journal(path, boot, SETTINGS)


def test_a_start_that_can_not_write_gives_the_lock_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops it, the next start may try."""

    def fail(_journal: Journal) -> None:
        raise JournalError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_load", fail)
        with pytest.raises(JournalError):
            Journal(path, 1, SETTINGS)

    Journal(path, 2, SETTINGS).close()


def test_a_file_system_without_a_log_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems: without the log a commit would not mean what is promised."""

    class NoLog(sqlite3.Connection):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            return super().execute("SELECT 'delete'" if "journal_mode" in sql else sql, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **options: connect(path, factory=NoLog, **options))

    with pytest.raises(ConfigError, match="name a local disk"):
        Journal(path, 1, SETTINGS)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (sqlite3.SQLITE_READONLY, "make the file and its folder writable"),
        (sqlite3.SQLITE_CANTOPEN, "make the file and its folder writable"),
        (sqlite3.SQLITE_FULL, "free space on its disk"),
        (sqlite3.SQLITE_IOERR, "free space on its disk"),
        (sqlite3.SQLITE_CORRUPT, "restore it from a backup"),
        (sqlite3.SQLITE_BUSY, "each broker needs a journal of its own"),
    ],
)
def test_each_error_of_the_library_has_its_remedy(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """By the library's own code, not by its words."""

    class Broken(sqlite3.Connection):
        def execute(self, _sql: str, *_values: object) -> sqlite3.Cursor:
            error = sqlite3.OperationalError("planted")
            error.sqlite_errorcode = code
            raise error

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **options: connect(path, factory=Broken, **options))

    with pytest.raises(ConfigError, match=words):
        Journal(path, 1, SETTINGS)


def test_an_empty_file_is_taken(path: Path) -> None:
    """What a start that was killed at once leaves, or `touch`."""
    path.touch()

    with Journal(path, 1, SETTINGS) as journal:
        journal.append(outcomes(0, 1))


@pytest.mark.parametrize("seed", range(25))
def test_a_damaged_file_is_refused_or_what_is_damaged_is_missed(
    path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page overwritten or a file cut short: a clear error at the start, or rows that are missed; never a
    wrong outcome and never a crash."""
    monkeypatch.setattr(journal_module, "MAX_REPLAY_COUNT", 200)
    with Journal(path, 1, SETTINGS) as first:
        first.append([outcome(n, nbytes=300) for n in range(100)])
    rng = random.Random(seed)
    content = bytearray(path.read_bytes())
    if seed % 5 == 4:
        del content[rng.randrange(100, len(content)) :]
    else:
        at = rng.randrange(100, len(content) - 64)
        content[at : at + 64] = rng.randbytes(64)
    path.write_bytes(content)

    try:
        second = Journal(path, 2, SETTINGS)
    except ConfigError as error:
        refusal = str(error)
        second = None
    if second is None:
        assert "damaged" in refusal or "not a journal" in refusal
        return
    with second:
        expected = [outcome(n, nbytes=300) for n in range(100)]
        span = second.positions(["cam\0"]).get("cam", [[1, 0, 0]])[0]
        found, missed, _ = second.replay("cam", 1, 0, 99, 1 << 30)
        assert all(one in expected for one in found)
        assert len(found) + sum(stop - start for start, stop in missed) == min(100, max(span[2], 0))


def test_a_full_disk_ends_it_with_nothing_half_written(path: Path) -> None:
    """A turn that can't be recorded leaves the file as it was; the error says what to do."""
    with Journal(path, 1, SETTINGS) as first:
        first.append(outcomes(0, 2))
        (pages,) = first._db.execute("PRAGMA page_count").fetchone()
        first._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(JournalError, match=r"can't be written \(database or disk is full\)"):
            first.append([outcome(n, nbytes=4_000) for n in range(2, 9)])

    with Journal(path, 2, SETTINGS) as second:
        assert second.positions([""]) == {"cam": [[1, 0, 2]]}
        assert read_all(second, "cam", 1, 2) == outcomes(0, 2)


# -- power cut ----------------------------------------------------------------------------------------


def _cuts(nbytes: int) -> dict[str, int]:
    """Every kind of place at which a write-ahead log can end."""
    frames = (nbytes - WAL_HEADER_BYTES) // WAL_FRAME_BYTES
    middle = WAL_HEADER_BYTES + (frames // 2) * WAL_FRAME_BYTES
    return {
        "gone": 0,
        "in the log's header": 17,
        "after the log's header": WAL_HEADER_BYTES,
        "in the first frame's header": WAL_HEADER_BYTES + 11,
        "after the first frame's header": WAL_HEADER_BYTES + 24,
        "in the first page": WAL_HEADER_BYTES + 24 + 1_000,
        "after the first frame": WAL_HEADER_BYTES + WAL_FRAME_BYTES,
        "at a frame in the middle": middle,
        "one byte short of it": middle - 1,
        "in the frame after it": middle + 12,
        "in the page after it": middle + 24 + 2_048,
        "before the last frame": nbytes - WAL_FRAME_BYTES,
        "one byte short": nbytes - 1,
        "whole": nbytes,
    }


@pytest.mark.parametrize("damage", ["cut", "zeroes", "noise"])
@pytest.mark.parametrize("where", list(_cuts(WAL_HEADER_BYTES + 40 * WAL_FRAME_BYTES)))
def test_a_power_cut_leaves_whole_turns(tmp_path: Path, path: Path, where: str, damage: str) -> None:
    """Files copied while the broker runs, and the log cut (or garbage from there on, as when a disk wrote its
    blocks in another order): what opens is a prefix of the turns, each whole or not at all."""
    turn = 3
    with Journal(path, 1, SETTINGS) as first:
        for number in range(12):
            first.append([outcome(number * turn + n, nbytes=700) for n in range(turn)])
        copy = tmp_path / "copy.db"
        shutil.copyfile(path, copy)
        log = Path(f"{path}-wal").read_bytes()
    cut = _cuts(len(log))[where]
    rest = {
        "cut": b"",
        "zeroes": bytes(len(log) - cut),
        "noise": random.Random(cut).randbytes(len(log) - cut),
    }
    Path(f"{copy}-wal").write_bytes(log[:cut] + rest[damage])

    with Journal(copy, 2, SETTINGS) as second:
        spans = second.positions(["cam\0"]).get("cam", [[1, 0, 0]])
        (_, oldest, stop) = spans[0]
        found = read_all(second, "cam", 1, stop) if stop else []
        finished = [one.finished.runs for stream in second.restored() for one in stream.epochs]
        second.append([outcome(0, boot=2, seq=500)])

    assert oldest == 0
    assert stop % turn == 0
    assert found == [outcome(n, nbytes=700) for n in range(stop)]
    assert finished == ([[(0, stop - 1)]] if stop else [])
    if where == "whole":
        assert stop == 12 * turn


def test_a_committed_turn_is_in_the_files_at_once(tmp_path: Path, path: Path) -> None:
    """When append() returns, a copy of the two files has it: nothing waits in the process's own memory."""
    with Journal(path, 1, SETTINGS) as first:
        for number in range(5):
            first.append([outcome(number)])
            copy = tmp_path / f"copy-{number}.db"
            shutil.copyfile(path, copy)
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")

    for number in range(5):
        with Journal(tmp_path / f"copy-{number}.db", 2, SETTINGS) as second:
            assert second.positions([""]) == {"cam": [[1, 0, number + 1]]}


def test_it_is_told_to_sync_at_every_commit(path: Path) -> None:
    """synchronous = FULL (2) with a write-ahead log is what the promise rests on."""
    with Journal(path, 1, SETTINGS) as journal:
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._db.execute("PRAGMA locking_mode").fetchone() == ("exclusive",)


# -- one outcome as bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_damaged_bytes_are_no_outcome(seed: int) -> None:
    """Any flipped bit and any length: None, never another outcome."""
    rng = random.Random(seed)
    body = pack(outcome(3, nbytes=50))
    changed = bytearray(body)
    changed[rng.randrange(len(body))] ^= 1 << rng.randrange(8)

    assert unpack(body, Limits()) == outcome(3, nbytes=50)
    assert unpack(bytes(changed), Limits()) is None
    assert unpack(body[: rng.randrange(len(body))], Limits()) is None


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<I", 2**31),
        struct.pack("<IQ", 1, 5),
        struct.pack("<IQ", 1, 1) + b"\x80",
        struct.pack("<I", 0),
        struct.pack("<IQ", 1, len(HEARTBEAT)) + HEARTBEAT,
    ],
)
def test_bytes_with_a_right_checksum_may_still_be_wrong(content: bytes) -> None:
    """Lengths that do not fit, no part at all, another message."""
    assert unpack(struct.pack("<I", zlib.crc32(content)) + content, Limits()) is None


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, U64])
def test_u64_fit_into_the_file(value: int) -> None:
    """By bit pattern, there and back."""
    assert -(2**63) <= signed(value) < 2**63
    assert unsigned(signed(value)) == value
