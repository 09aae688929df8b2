"""What the shell counts about itself; the core counts frames.

One writer, the loop; others read copies (``snapshot``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.figures import WorkerFigures

#: Kinds kept apart in one table of counts. All keys are our own fixed words; the bound guards against a
#: mistake.
MAX_KINDS = 256


@dataclass(slots=True)
class JournalCounts:
    """What the journal holds and what it did in this run. ``busy_ns``: time in appends, fsync included."""

    max_bytes: int
    kept_count: int = 0
    kept_bytes: int = 0
    commit_count: int = 0
    busy_ns: int = 0
    longest_ns: int = 0
    damaged_count: int = 0  # rows that could not be read for a replay


@dataclass(slots=True)
class ArenaCounts:
    """The producers' shared memory: arenas open now, orphans removed in this run, payloads that were read for
    workers of other hosts."""

    open_count: int = 0
    reclaimed_count: int = 0
    inlined_count: int = 0


@dataclass(slots=True)
class Counters:
    """Monotonic counts, but for ``subscription_count``, which goes down as well."""

    turn_count: int = 0
    busy_ns: int = 0  # time in turns, waiting left out
    longest_turn_ns: int = 0
    received_count: dict[str, int] = field(default_factory=dict)  # messages by socket
    misbehaved_count: dict[str, int] = field(default_factory=dict)  # unreadable messages by code
    unreachable_count: int = 0  # sends that found their peer gone or its queue full
    published_count: int = 0  # outcomes
    published_message_count: int = 0
    subscription_count: int = 0  # standing now
    reports: dict[str, int] = field(default_factory=dict)  # changes of state by name
    connected_count: dict[str, int] = field(default_factory=dict)  # handshakes completed by socket
    disconnected_count: dict[str, int] = field(default_factory=dict)
    handshake_failed_count: dict[str, int] = field(default_factory=dict)
    journal: JournalCounts | None = None  # None without a journal
    arenas: ArenaCounts = field(default_factory=ArenaCounts)
    figures: WorkerFigures = field(default_factory=WorkerFigures)  # what workers tell of their devices


def count(table: dict[str, int], key: str, amount: int = 1) -> None:
    """Add to one count of a table."""
    if key in table or len(table) < MAX_KINDS:
        table[key] = table.get(key, 0) + amount
