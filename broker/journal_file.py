"""The journal's file: a SQLite database that is ours alone, checked before anything is believed.

Not here: what is written to it and when (journal.py).

One process holds the file, by SQLite's own exclusive lock, which the kernel drops however the process ends.
With ``synchronous = FULL`` in WAL mode each commit writes its pages to ``PATH-wal`` and fsyncs that file once
before it returns; the database itself is written and fsynced when the WAL is folded into it (every
CHECKPOINT_PAGES pages, and when the broker ends). A WAL's pages carry checksums: after a power cut everything
up to the last whole commit is there and nothing of a torn one.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from headrace.errors import ConfigError

#: "hdrc": what `file` and we know a journal by.
APPLICATION_ID = 0x68647263

#: The layout below. A later one is refused, so that an old broker never writes into what it can't read.
FORMAT_VERSION = 1

#: Pages (4 KiB) in the WAL before it is folded into the database. SQLite's own default: 4 MiB bound what a
#: start has to recover and what one commit in a thousand pays on top.
CHECKPOINT_PAGES = 1_000

#: The WAL file is cut to this when it is begun anew, should one huge turn have made it grow.
WAL_LIMIT_BYTES = 16 * 1024 * 1024

# Integers of 64 bits without sign are kept as SQLite's own, with sign (see signed()).
_SCHEMA = """
CREATE TABLE format (version INTEGER NOT NULL);
CREATE TABLE boots (id INTEGER PRIMARY KEY, boot INTEGER NOT NULL UNIQUE,
  is_complete INTEGER NOT NULL DEFAULT 1);
CREATE TABLE streams (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE spans (stream INTEGER NOT NULL, boot INTEGER NOT NULL, next_pub_seq INTEGER NOT NULL,
  PRIMARY KEY (stream, boot)) WITHOUT ROWID;
CREATE TABLE epochs (id INTEGER PRIMARY KEY, stream INTEGER NOT NULL, epoch INTEGER NOT NULL,
  UNIQUE (stream, epoch));
CREATE TABLE runs (epoch INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
  PRIMARY KEY (epoch, first)) WITHOUT ROWID;
CREATE TABLE outcomes (id INTEGER PRIMARY KEY, stream INTEGER NOT NULL, boot INTEGER NOT NULL,
  pub_seq INTEGER NOT NULL, epoch INTEGER NOT NULL, is_reject INTEGER NOT NULL, nbytes INTEGER NOT NULL,
  body BLOB NOT NULL);
CREATE UNIQUE INDEX outcomes_by_pub_seq ON outcomes (stream, boot, pub_seq);
CREATE INDEX outcomes_rejected ON outcomes (id) WHERE is_reject;
"""


def open_journal_file(path: Path) -> sqlite3.Connection:
    """Open the file, made now if it is not there, and lock it until the connection is closed.

    Raises ConfigError when it is not ours, damaged, of a later format, in use, or can't be opened.
    """
    if not path.parent.is_dir():
        raise _refusal(path, f"the folder {path.parent} is not there: make it, or name another place")
    try:
        database = sqlite3.connect(path, timeout=0, isolation_level=None)
    except sqlite3.Error as error:
        raise _refusal(path, f"can't be opened ({error}): it must be a file in a writable folder") from error
    try:
        _set_up(path, database)
    except sqlite3.Error as error:
        database.close()
        raise _explain(path, error) from error
    except BaseException:
        database.close()
        raise
    return database


def signed(value: int) -> int:
    """Return a u64 as SQLite's 64-bit integer, by its bit pattern."""
    return value if value < 2**63 else value - 2**64


def unsigned(value: int) -> int:
    """Return what signed() was given."""
    return value if value >= 0 else value + 2**64


def _set_up(path: Path, database: sqlite3.Connection) -> None:
    execute = database.execute
    # Before the first read: in this mode SQLite keeps the WAL's index in memory, not in a third file.
    execute("PRAGMA locking_mode = EXCLUSIVE")
    (application_id,) = execute("PRAGMA application_id").fetchone()
    is_new = execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    if application_id != APPLICATION_ID and not (is_new and application_id == 0):
        raise _refusal(path, "is a SQLite database of another program: name another file")
    (mode,) = execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise _refusal(path, f"its file system allows no write-ahead log (mode {mode}): name a local disk")
    execute("PRAGMA synchronous = FULL")
    # On macOS fsync() leaves data in the drive's cache; elsewhere these two change nothing.
    execute("PRAGMA fullfsync = ON")
    execute("PRAGMA checkpoint_fullfsync = ON")
    execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    if is_new:
        # One transaction: a start that is killed here leaves an empty file, which the next one takes.
        execute("BEGIN EXCLUSIVE")
        for statement in _SCHEMA.split(";"):
            execute(statement)
        execute("INSERT INTO format VALUES (?)", (FORMAT_VERSION,))
        execute(f"PRAGMA application_id = {APPLICATION_ID}")
        execute("COMMIT")
        return
    (verdict,) = execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, verdict)
    (version,) = execute("SELECT version FROM format").fetchone() or (None,)
    if version != FORMAT_VERSION:
        raise _refusal(
            path,
            f"has format {version}, this headrace writes format {FORMAT_VERSION}: use the headrace that wrote"
            " it, or name another file",
        )


def _explain(path: Path, error: sqlite3.Error) -> ConfigError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return _refusal(path, "is in use by another broker: each broker needs a journal of its own")
    if code == sqlite3.SQLITE_NOTADB:
        return _refusal(path, "is not a journal, or its beginning is damaged: name another file")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return _refusal(path, f"can't be written ({error}): make the file and its folder writable")
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return _refusal(path, f"can't be written ({error}): free space on its disk, or name another place")
    return _damaged(path, str(error))


def damaged_journal(path: Path, what: str) -> ConfigError:
    """Return the error for a file whose content contradicts itself."""
    return _damaged(path, what)


def _damaged(path: Path, what: str) -> ConfigError:
    return _refusal(
        path,
        f"is damaged ({what}): restore it from a backup, or move it and its -wal file away and start with an"
        " empty one; subscribers are then told what they miss",
    )


def _refusal(path: Path, text: str) -> ConfigError:
    return ConfigError(f"broker.journal = {str(path)!r}: {text}")
