"""The producers that introduced themselves: their sessions, and the credit each is owed.

Theory of operation: a session counts what it sent (``received``) and what of that is concluded
(``finished``: published, refused, or a frame sent again whose outcome is already out). The difference is
what the producer has unfinished and never exceeds its credits. Both only grow, so a lost or repeated Credit
does no harm. Changes are collected and told once per turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.actions import Action, GrantCredit
from headrace.broker.heartbeats import Pulse
from headrace.broker.records import FrameRecord
from headrace.protocol.messages import Credit, Hello, Status


@dataclass(slots=True, eq=False)
class ProducerSession:
    """One Hello of one connection. Invariant: finished <= received."""

    number: int
    peer: bytes
    epoch: int
    name: str
    pulse: Pulse
    arena: str = ""  # the arena that it named, if that can be read here
    received: int = 0
    finished: int = 0
    taken_over_count: int = 0  # unfinished frames of an earlier session that it sent again
    by_status: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)  # stream -> released seq, since the last Credit
    streams: dict[str, None] = field(default_factory=dict)  # owned, in the order of taking


@dataclass(frozen=True, slots=True)
class Arena:
    """Shared memory of the producer of an epoch."""

    epoch: int
    nbytes: int


class ProducerRegistry:
    """All sessions by connection. Invariant: at most one session per connection and per epoch."""

    def __init__(self) -> None:
        self.by_peer: dict[bytes, ProducerSession] = {}
        self.by_epoch: dict[int, ProducerSession] = {}
        #: Arenas that can be read here. They outlast a session: a producer that was taken for dead may have
        #: sent frames before it noticed. The shell bounds them and tells when one is gone.
        self.arenas: dict[str, Arena] = {}
        self._dirty: dict[bytes, ProducerSession] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self.by_peer)

    def open(self, peer: bytes, hello: Hello, pulse: Pulse, arena_bytes: int = 0) -> ProducerSession:
        """Begin a session. The connection and the epoch must have none."""
        self._last_number += 1
        epoch = hello.epoch
        session = ProducerSession(self._last_number, peer, epoch, hello.name, pulse)
        self.use_arena(session, hello.arena, arena_bytes)
        self.by_peer[peer] = session
        self.by_epoch[epoch] = session
        return session

    def use_arena(self, session: ProducerSession, name: str, nbytes: int) -> None:
        """Take note of the arena that a producer has named; ``nbytes`` 0: it can't be read here."""
        session.arena = name if nbytes else ""
        if nbytes:
            self.arenas[name] = Arena(session.epoch, nbytes)

    def close(self, session: ProducerSession) -> None:
        """End a session; credit that was not told yet is dropped with it."""
        del self.by_peer[session.peer]
        del self.by_epoch[session.epoch]
        self._dirty.pop(session.peer, None)

    def conclude(self, session: ProducerSession, status: Status | None) -> None:
        """Count one frame of a session as concluded. ``status`` is None when its outcome was counted
        before, in this session or an earlier one."""
        session.finished += 1
        if status is not None:
            session.by_status[status] = session.by_status.get(status, 0) + 1
        self._dirty[session.peer] = session

    def conclude_record(self, record: FrameRecord, status: Status) -> None:
        """Count the published outcome of an admitted frame, if its session still lives."""
        if not record.session:
            return
        session = self.by_peer.get(record.peer or b"")
        if session is None or session.number != record.session:
            return
        session.finished += 1
        session.by_status[status] = session.by_status.get(status, 0) + 1
        self._dirty[session.peer] = session
        if record.epoch == session.epoch:
            session.moved[record.frame.stream] = record.seq

    def flush(self, actions: list[Action]) -> None:
        """Append one GrantCredit per session that has something new."""
        if not self._dirty:
            return
        for session in self._dirty.values():
            credit = Credit(session.finished, session.moved, dict(session.by_status))
            session.moved = {}
            actions.append(GrantCredit(session.peer, credit))
        self._dirty.clear()

    def check_invariants(self, credits_count: int) -> None:
        """Raise AssertionError when a session's numbers can't be (a bug of ours)."""
        if len(self.by_peer) != len(self.by_epoch):
            raise AssertionError(f"{len(self.by_peer)} peers, {len(self.by_epoch)} epochs")
        for session in self.by_peer.values():
            unfinished = session.received - session.finished
            if not 0 <= unfinished <= credits_count + session.taken_over_count:
                raise AssertionError(
                    f"session {session.number}: {session.received} received, {session.finished} finished,"
                    f" {credits_count} credits"
                )
