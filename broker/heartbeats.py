"""When each peer is owed a heartbeat, and when its silence has lasted too long.

Theory of operation: one heap entry per living peer, due at its next heartbeat or at the end of its
patience, whichever is sooner. Hearing from a peer writes one attribute; the heap is touched once per peer
and interval, never per message. A broker that was itself stopped (SIGSTOP, a suspended laptop) finds every
peer silent for as long as it slept; that says nothing about the peers, so after oversleeping nobody is
declared silent for one more interval, in which what they sent meanwhile is read.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class Pulse:
    """Life signs of one connection. Any message counts as one."""

    peer: bytes
    is_worker: bool
    last_heard_ns: int
    is_stopped: bool = False


class Heartbeats:
    """All living peers. Invariant: every pulse that is not stopped has exactly one heap entry."""

    def __init__(self, interval_ns: int, missed_count: int) -> None:
        self.interval_ns = interval_ns
        self.silence_ns = interval_ns * missed_count
        self._heap: list[tuple[int, int, Pulse]] = []
        self._tickets = count()
        self.grace_until_ns = 0  # nobody is taken for dead before

    def start(self, peer: bytes, is_worker: bool, now_ns: int) -> Pulse:
        """Begin to watch a connection: first heartbeat one interval from now."""
        pulse = Pulse(peer, is_worker, now_ns)
        self._push(pulse, now_ns + self.interval_ns)
        return pulse

    def stop(self, pulse: Pulse) -> None:
        """Stop watching. Its heap entry goes when it comes up, within one interval."""
        pulse.is_stopped = True

    def pop_due(self, now_ns: int) -> tuple[list[Pulse], list[Pulse]]:
        """Return who is owed a heartbeat now, and who has been silent for too long.

        The silent stay watched until they are stopped: the caller declares them lost."""
        owed: list[Pulse] = []
        silent: list[Pulse] = []
        if self._heap and now_ns - self._heap[0][0] > self.interval_ns:
            self.grace_until_ns = now_ns + self.interval_ns
        while self._heap and self._heap[0][0] <= now_ns:
            pulse = heapq.heappop(self._heap)[2]
            if pulse.is_stopped:
                continue
            lapse_ns = max(pulse.last_heard_ns + self.silence_ns, self.grace_until_ns)
            if now_ns >= lapse_ns:
                silent.append(pulse)
                self._push(pulse, now_ns + self.interval_ns)
            else:
                owed.append(pulse)
                self._push(pulse, min(now_ns + self.interval_ns, lapse_ns))
        return owed, silent

    def next_ns(self) -> int | None:
        """Return when pop_due has something to say, None when nobody is watched."""
        while self._heap and self._heap[0][2].is_stopped:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _push(self, pulse: Pulse, due_ns: int) -> None:
        heapq.heappush(self._heap, (due_ns, next(self._tickets), pulse))
