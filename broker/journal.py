"""Published outcomes on disk, so that a broker's restart and a power cut lose none (ADR 6).

Not here: the file, its lock and its layout (journal_file.py), how one outcome is written down
(journal_body.py), when the shell appends (shell.py).

Theory of operation. The shell hands over all outcomes of a turn before it publishes any: one transaction,
one commit, one fsync. So what anybody was told is on disk, and what is not on disk was told to nobody, and
its frame is sent again by its producer. Kept are three things with a bound each. Outcomes themselves, for
replay: per stream and in bytes as ``[retention]`` says, whatever boot they are of. Finished seqs per epoch as
runs, to recognise frames sent again: as ``admission.duplicate_window`` says. Per stream and boot the next
pub_seq, so that a subscriber learns where an earlier boot ended even when its outcomes have left.

A boot is complete while nothing that names its streams was dropped: then a stream without an entry had no
outcome in it. Streams beyond ``admission.max_streams`` go, the one written to longest ago first.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from headrace.broker.counters import JournalCounts
from headrace.broker.journal_body import pack, unpack
from headrace.broker.journal_file import damaged_journal, open_journal_file, signed, unsigned
from headrace.broker.records import Refusal
from headrace.broker.restored import FinishedSeqs, RestoredEpoch, RestoredStream
from headrace.broker.settings import CoreSettings
from headrace.broker.stream_table import EPOCHS_PER_STREAM
from headrace.errors import JournalError
from headrace.protocol.messages import Limits, Outcome, Status

#: Earlier boots whose outcomes are kept. A broker that starts again and again must not fill the table.
MAX_EARLIER_BOOTS = 16

#: What a row costs in the file beside its body: its columns and two index entries, rounded up.
ROW_OVERHEAD_BYTES = 128

#: Outcomes in one replay answer. Reading and decoding one takes some 50 microseconds of the broker's loop.
MAX_REPLAY_COUNT = 32

#: Rows dropped at once when the bytes are exceeded.
_DROP_COUNT = 64

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Epoch:
    id: int
    finished: FinishedSeqs
    changes: dict[int, int | None] = field(default_factory=dict)  # runs that the file does not have yet


@dataclass(slots=True, eq=False)
class _Span:
    """The outcomes of one stream in one boot: pub_seq ``oldest`` to ``next - 1`` are kept."""

    oldest: int
    next: int


@dataclass(slots=True, eq=False)
class _Stream:
    id: int
    name: str
    row_count: int = 0
    epochs: dict[int, _Epoch] = field(default_factory=dict)
    spans: dict[int, _Span] = field(default_factory=dict)  # by the boot's number, ascending


class Journal:
    """An open journal; belongs to the thread that opened it. A context manager.

    Invariants: at most ``retention_frames`` outcomes per stream and ``retention_bytes`` in all (bodies and
    ROW_OVERHEAD_BYTES each) lie in the file after every commit; spans of a stream ascend with the boots.
    """

    def __init__(self, path: Path, boot: int, settings: CoreSettings) -> None:
        """Open the file, drop what is beyond the bounds, and begin a new boot.

        Raises ConfigError when the file can't be used.
        """
        self.path = path
        self.counts = JournalCounts(max_bytes=settings.retention_bytes)
        self._boot = boot
        self._limits: Limits = settings.limits
        self._max_rows = settings.retention_frames
        self._max_streams = settings.max_streams
        self._max_runs = settings.duplicate_window
        self._max_rejects = settings.credits_per_producer
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._by_id: dict[int, _Stream] = {}
        self._boots: dict[int, int] = {}  # earlier ones: boot id -> number, ascending
        self._complete: dict[int, None] = {}  # numbers of boots of which no stream was dropped
        self._db = open_journal_file(path)
        try:
            self._number = self._begin_boot(boot)
            self._load()
            self._trim()
        except JournalError:
            self._db.close()
            raise
        except (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError) as error:
            self._db.close()
            raise damaged_journal(path, repr(error)) from error

    def close(self) -> None:
        """Fold the write-ahead log into the file and let others have it."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # -- writing ------------------------------------------------------------------------------------

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Write outcomes of this boot; when this returns they survive a power cut.

        Raises JournalError: none of them is written, and none may be published.
        """
        began_ns = time.monotonic_ns()
        with self._transaction():
            touched: dict[str, _Stream] = {}
            self._db.executemany(
                "INSERT INTO outcomes (stream, boot, pub_seq, epoch, is_reject, nbytes, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                # One by one: a new stream may drop another, rows of this very turn included.
                (self._row(outcome, touched) for outcome in outcomes),
            )
            for stream in touched.values():
                self._write_stream(stream)
            self._drop_beyond_bytes()
        took_ns = time.monotonic_ns() - began_ns
        self.counts.commit_count += 1
        self.counts.busy_ns += took_ns
        self.counts.longest_ns = max(self.counts.longest_ns, took_ns)

    def _row(self, outcome: Outcome, touched: dict[str, _Stream]) -> tuple[int | bytes, ...]:
        stream = self._stream_of(outcome.stream)
        touched[stream.name] = stream
        if outcome.epoch != self._boot:
            # A frame without an epoch of its own has this boot's id and can't be sent again under it.
            epoch = self._epoch_of(stream, outcome.epoch)
            epoch.finished.add(outcome.seq, epoch.changes)
        span = stream.spans.get(self._number)
        if span is None:
            span = stream.spans[self._number] = _Span(outcome.pub_seq, outcome.pub_seq)
        span.next = outcome.pub_seq + 1
        body = pack(outcome)
        nbytes = len(body) + ROW_OVERHEAD_BYTES
        stream.row_count += 1
        self.counts.kept_count += 1
        self.counts.kept_bytes += nbytes
        is_reject = outcome.status is Status.REJECTED
        return stream.id, self._number, outcome.pub_seq, signed(outcome.epoch), is_reject, nbytes, body

    def _stream_of(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            if len(self._streams) >= self._max_streams:
                self._forget(next(iter(self._streams.values())))
            row_id = self._db.execute("INSERT INTO streams (name) VALUES (?)", (name,)).lastrowid
            stream = self._add_stream(row_id or 0, name)
        self._streams.move_to_end(name)
        return stream

    def _epoch_of(self, stream: _Stream, epoch: int) -> _Epoch:
        found = stream.epochs.get(epoch)
        if found is None:
            if len(stream.epochs) >= EPOCHS_PER_STREAM:
                self._forget_epoch(stream, next(iter(stream.epochs)))
            sql = "INSERT INTO epochs (stream, epoch) VALUES (?, ?)"
            row_id = self._db.execute(sql, (stream.id, signed(epoch))).lastrowid
            found = stream.epochs[epoch] = _Epoch(row_id or 0, FinishedSeqs(self._max_runs))
        return found

    def _write_stream(self, stream: _Stream) -> None:
        if self._streams.get(stream.name) is not stream:
            return  # the same turn brought so many new streams that this one had to go again
        execute = self._db.execute
        execute(
            "INSERT OR REPLACE INTO spans VALUES (?, ?, ?)",
            (stream.id, self._number, stream.spans[self._number].next),
        )
        for epoch in stream.epochs.values():
            for first, last in epoch.changes.items():
                key = (epoch.id, signed(first))
                if last is None:
                    execute("DELETE FROM runs WHERE epoch = ? AND first = ?", key)
                else:
                    execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (*key, signed(last)))
            epoch.changes.clear()
        if stream.row_count > self._max_rows:
            self._drop_rows(
                "SELECT id, stream, boot, pub_seq, nbytes FROM outcomes WHERE stream = ?"
                " ORDER BY boot, pub_seq LIMIT ?",
                (stream.id, stream.row_count - self._max_rows),
            )

    # -- bounds -------------------------------------------------------------------------------------

    def _drop_beyond_bytes(self) -> None:
        while self.counts.kept_bytes > self.counts.max_bytes:
            self._drop_rows(
                "SELECT id, stream, boot, pub_seq, nbytes FROM outcomes ORDER BY id LIMIT ?",
                (_DROP_COUNT,),
                down_to_bytes=self.counts.max_bytes,
            )

    def _drop_rows(self, sql: str, values: tuple[int, ...], down_to_bytes: int = -1) -> None:
        dropped = []
        for row_id, stream_id, number, pub_seq, nbytes in self._db.execute(sql, values).fetchall():
            if self.counts.kept_bytes <= down_to_bytes:
                break
            dropped.append((row_id,))
            stream = self._by_id[stream_id]
            stream.spans[number].oldest = pub_seq + 1
            stream.row_count -= 1
            self.counts.kept_count -= 1
            self.counts.kept_bytes -= nbytes
        self._db.executemany("DELETE FROM outcomes WHERE id = ?", dropped)

    def _forget(self, stream: _Stream) -> None:
        """Drop all of a stream. Nobody can tell any more that its boots had no outcomes of it."""
        execute = self._db.execute
        for number in stream.spans:
            if number in self._complete:
                del self._complete[number]
                execute("UPDATE boots SET is_complete = 0 WHERE id = ?", (number,))
        for epoch in list(stream.epochs):
            self._forget_epoch(stream, epoch)
        (nbytes,) = execute(
            "SELECT coalesce(sum(nbytes), 0) FROM outcomes WHERE stream = ?", (stream.id,)
        ).fetchone()
        self.counts.kept_bytes -= nbytes
        self.counts.kept_count -= stream.row_count
        for table, key in (("outcomes", "stream"), ("spans", "stream"), ("streams", "id")):
            execute(f"DELETE FROM {table} WHERE {key} = ?", (stream.id,))  # noqa: S608 - our own words
        del self._streams[stream.name], self._by_id[stream.id]

    def _forget_epoch(self, stream: _Stream, epoch: int) -> None:
        row_id = stream.epochs.pop(epoch).id
        self._db.execute("DELETE FROM runs WHERE epoch = ?", (row_id,))
        self._db.execute("DELETE FROM epochs WHERE id = ?", (row_id,))

    # -- reading ------------------------------------------------------------------------------------

    @property
    def earlier_boots(self) -> dict[int, bool]:
        """Return the earlier boots, the oldest first, and whether each is complete."""
        return {boot: number in self._complete for boot, number in self._boots.items()}

    def positions(self, topics: Iterable[str]) -> dict[str, list[list[int]]]:
        """Return [boot, oldest kept pub_seq, next pub_seq] of each earlier boot, the oldest first, for every
        stream that the topics cover and that has any ("cam-1" + NUL exactly, any other text as a prefix)."""
        found: dict[str, list[list[int]]] = {}
        for topic in topics:
            if topic.endswith("\0"):
                names = [topic[:-1]] if topic[:-1] in self._streams else []
            else:
                names = [name for name in self._streams if name.startswith(topic)]
            for name in names:
                spans = self._streams[name].spans
                entries = [
                    [boot, spans[number].oldest, spans[number].next]
                    for boot, number in self._boots.items()
                    if number in spans
                ]
                if entries:
                    found[name] = entries
        return found

    def replay(
        self, name: str, boot: int, first: int, last: int, max_bytes: int
    ) -> tuple[list[Outcome], list[tuple[int, int]], bool]:
        """Return outcomes of an earlier boot; arguments and result are those of BrokerCore.replay. What can't
        be read is missed, counted and logged: a bad sector is no reason to take no frames."""
        number = self._boots.get(boot)
        stream = self._streams.get(name)
        span = None if stream is None or number is None else stream.spans.get(number)
        if stream is None or span is None:
            return [], [] if number in self._complete else [(first, last + 1)], False
        stop = min(last + 1, span.next)
        outcomes: list[Outcome] = []
        missed: list[tuple[int, int]] = []
        expected = first
        left_bytes = max_bytes
        for index, (pub_seq, body) in enumerate(self._bodies(stream, number, first, stop)):
            left_bytes -= len(body)
            if index >= MAX_REPLAY_COUNT or (outcomes and left_bytes < 0):
                if expected < pub_seq:
                    missed.append((expected, pub_seq))
                return outcomes, missed, True
            outcome = unpack(body, self._limits)
            if outcome is None:
                self.counts.damaged_count += 1
                log.error("journal row damaged", stream=name, boot=boot, pub_seq=pub_seq)
                continue
            if expected < pub_seq:
                missed.append((expected, pub_seq))
            expected = pub_seq + 1
            outcomes.append(outcome)
        if expected < stop:
            missed.append((expected, stop))
        return outcomes, missed, False

    def _bodies(
        self, stream: _Stream, number: int | None, first: int, stop: int
    ) -> Iterator[tuple[int, bytes]]:
        sql = (
            "SELECT pub_seq, body FROM outcomes WHERE stream = ? AND boot = ? AND pub_seq >= ?"
            " AND pub_seq < ? ORDER BY pub_seq LIMIT ?"
        )
        try:
            yield from self._db.execute(sql, (stream.id, number, first, stop, MAX_REPLAY_COUNT + 1))
        except sqlite3.Error as error:
            self.counts.damaged_count += 1
            log.error("journal can't be read", stream=stream.name, reason=str(error))  # noqa: TRY400 - no bug

    def restored(self) -> list[RestoredStream]:
        """Return what the core must know of earlier boots; the stream written to longest ago comes first."""
        rejects = self._latest_rejects()
        return [
            RestoredStream(
                stream.name,
                tuple(
                    RestoredEpoch(
                        epoch,
                        FinishedSeqs(self._max_runs, kept.finished.runs),
                        tuple(reversed(rejects.get((stream.id, epoch), ()))),
                    )
                    for epoch, kept in stream.epochs.items()
                ),
            )
            for stream in self._streams.values()
        ]

    def _latest_rejects(self) -> dict[tuple[int, int], list[tuple[int, Refusal]]]:
        found: dict[tuple[int, int], list[tuple[int, Refusal]]] = {}
        sql = "SELECT stream, epoch, body FROM outcomes WHERE is_reject ORDER BY id DESC"
        for stream_id, epoch, body in self._db.execute(sql):
            of_epoch = found.setdefault((stream_id, unsigned(epoch)), [])
            if len(of_epoch) >= self._max_rejects:
                continue
            outcome = unpack(body, self._limits)
            if outcome is not None:
                refusal = Refusal(outcome.code, outcome.message, outcome.retry_after_ms)
                of_epoch.append((outcome.seq, refusal))
        return found

    # -- opening ------------------------------------------------------------------------------------

    def _begin_boot(self, boot: int) -> int:
        execute = self._db.execute
        with self._transaction():
            rows = execute("SELECT id, boot, is_complete FROM boots ORDER BY id").fetchall()
            for number, *_ in rows[:-MAX_EARLIER_BOOTS]:
                execute("DELETE FROM outcomes WHERE boot = ?", (number,))
                execute("DELETE FROM spans WHERE boot = ?", (number,))
                execute("DELETE FROM boots WHERE id = ?", (number,))
            own = execute("INSERT INTO boots (boot) VALUES (?)", (signed(boot),)).lastrowid or 0
        for number, value, is_complete in rows[-MAX_EARLIER_BOOTS:]:
            self._boots[unsigned(value)] = number
            if is_complete:
                self._complete[number] = None
        self._complete[own] = None
        return own

    def _add_stream(self, row_id: int, name: str) -> _Stream:
        stream = self._streams[name] = self._by_id[row_id] = _Stream(row_id, name)
        return stream

    def _load(self) -> None:
        execute = self._db.execute
        by_use = (
            "SELECT streams.id, name FROM streams LEFT JOIN outcomes ON outcomes.stream = streams.id"
            " GROUP BY streams.id ORDER BY coalesce(max(outcomes.id), 0), streams.id"
        )
        for row_id, name in execute(by_use):
            self._add_stream(row_id, name)
        for stream_id, number, after in execute("SELECT * FROM spans ORDER BY boot"):
            self._by_id[stream_id].spans[number] = _Span(after, after)
        kept = "SELECT stream, boot, min(pub_seq), count(*), sum(nbytes) FROM outcomes GROUP BY stream, boot"
        for stream_id, number, oldest, count, nbytes in execute(kept):
            stream = self._by_id[stream_id]
            stream.spans[number].oldest = oldest
            stream.row_count += count
            self.counts.kept_count += count
            self.counts.kept_bytes += nbytes
        runs: dict[int, list[tuple[int, int]]] = {}
        for epoch_id, first, last in execute("SELECT * FROM runs"):
            runs.setdefault(epoch_id, []).append((unsigned(first), unsigned(last)))
        for epoch_id, stream_id, epoch in execute("SELECT * FROM epochs ORDER BY id"):
            finished = FinishedSeqs(self._max_runs, runs.get(epoch_id, ()))
            dropped = sorted(runs.get(epoch_id, ()))[: -self._max_runs]
            changes: dict[int, int | None] = {first: None for first, _ in dropped}
            self._by_id[stream_id].epochs[unsigned(epoch)] = _Epoch(epoch_id, finished, changes)

    def _trim(self) -> None:
        """Keep to bounds that were set lower since the file was written."""
        with self._transaction():
            while len(self._streams) > self._max_streams:
                self._forget(next(iter(self._streams.values())))
            for stream in self._streams.values():
                if stream.row_count > self._max_rows:
                    self._drop_rows(
                        "SELECT id, stream, boot, pub_seq, nbytes FROM outcomes WHERE stream = ?"
                        " ORDER BY boot, pub_seq LIMIT ?",
                        (stream.id, stream.row_count - self._max_rows),
                    )
            self._drop_beyond_bytes()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            # What memory holds is ahead of the file now: nobody may go on with this object.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise JournalError(
                f"journal {self.path}: can't be written ({error}); nothing of this turn was published. Free"
                " space on its disk, or name another place with broker.journal"
            ) from error
