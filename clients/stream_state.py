"""One stream as a subscriber sees it: what comes next, what is held back, what was had before.

Part of ``subscriber_session``, which decides when a gap is fetched. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.clients.records import Missed, MissedReason
from headrace.clients.seq_runs import SeqRuns
from headrace.protocol.messages import Outcome

#: Epochs of earlier boots remembered per stream: the producer that lived through the broker's restart,
#: and a few that came after it.
MAX_EPOCHS = 4


class StreamState:
    """Invariants: what was yielded of a boot is exactly pub_seq ``first .. next_pub_seq - 1``, as
    outcomes, Missed ranges or recognised duplicates, in order; held outcomes lie above that.

    ``next_pub_seq`` is None until it is known where this subscriber begins. ``known_end`` is one above
    the highest pub_seq that is known to exist.
    """

    def __init__(self, stream: str, boot: int, next_pub_seq: int | None, now_ns: int) -> None:
        self.stream = stream
        self.boot = boot
        self.next_pub_seq = next_pub_seq
        self.known_end = 0
        self.heard_ns = now_ns
        self.held: dict[int, Outcome] = {}
        self.fetch_id: int | None = None
        self._had_now: dict[int, SeqRuns] = {}
        self._had_before: dict[int, SeqRuns] = {}

    @property
    def gap(self) -> tuple[int, int] | None:
        """Return the first missing range as (first, end), end excluded; None when nothing is missing."""
        if self.next_pub_seq is None:
            return None
        end = min(self.held) if self.held else self.known_end
        return (self.next_pub_seq, end) if self.next_pub_seq < end else None

    @property
    def behind_count(self) -> int:
        return 0 if self.next_pub_seq is None else max(0, self.known_end - self.next_pub_seq)

    def take(self, outcome: Outcome) -> list[Outcome]:
        """Count the outcome that is next, and all held ones that follow it; return them."""
        taken = [outcome]
        after = outcome.pub_seq + 1
        while after in self.held:
            taken.append(self.held.pop(after))
            after += 1
        self.next_pub_seq = after
        self.known_end = max(self.known_end, after)
        return taken

    def miss(self, end: int, reason: MissedReason) -> Missed:
        """Give up everything up to ``end`` (excluded)."""
        first = self.next_pub_seq or 0
        self.next_pub_seq = end
        self.known_end = max(self.known_end, end)
        return Missed(self.stream, self.boot, first, end - 1, reason)

    def drop_held_below(self, pub_seq: int) -> list[Outcome]:
        """Forget held outcomes below ``pub_seq``; return them, for the caller's bookkeeping."""
        return [self.held.pop(old) for old in sorted(self.held) if old < pub_seq]

    def leave_boot(self, boot: int, *, is_told: bool) -> list[Outcome | Missed]:
        """Begin a new boot; return the rest of the old one: what is held, and what will never come.

        ``is_told``: whether Missed ranges are wanted (mode ``every``).
        """
        rest: list[Outcome | Missed] = []
        while self.next_pub_seq is not None and self.held:
            lowest = min(self.held)
            if self.next_pub_seq < lowest:
                missed = self.miss(lowest, MissedReason.NEW_BOOT)
                rest += [missed] if is_told else []
            rest += [each for each in self.take(self.held.pop(lowest)) if self.is_new(each)]
        if is_told and self.next_pub_seq is not None:
            # How many outcomes there were after that only the old broker knew.
            rest.append(Missed(self.stream, self.boot, self.next_pub_seq, None, MissedReason.NEW_BOOT))
        self._remember(self._had_now)
        self._had_now = {}
        self.held = {}
        self.boot = boot
        self.next_pub_seq = 0
        self.known_end = 0
        self.fetch_id = None
        return rest

    def is_new(self, outcome: Outcome) -> bool:
        """Note an outcome; tell a frame's first one from that of its second run under a later boot.

        Within one boot the broker publishes one outcome per frame, so only earlier boots are asked.
        """
        before = self._had_before.get(outcome.epoch)
        if before is not None and outcome.seq in before:
            return False
        runs = self._had_now.get(outcome.epoch)
        if runs is None:
            runs = self._had_now[outcome.epoch] = SeqRuns()
            _keep_newest(self._had_now)
        runs.add(outcome.seq)
        return True

    def _remember(self, had: dict[int, SeqRuns]) -> None:
        for epoch, runs in had.items():
            merged = self._had_before.pop(epoch, None) or SeqRuns()
            for first, last in runs.runs:
                merged.add(first, last)
            self._had_before[epoch] = merged
        _keep_newest(self._had_before)


def outcome_bytes(outcomes: Iterable[Outcome]) -> int:
    """Return the payload bytes of outcomes (their headers are small beside them)."""
    return sum(memoryview(payload).nbytes for outcome in outcomes for payload in outcome.payloads)


def _keep_newest(by_epoch: dict[int, SeqRuns]) -> None:
    while len(by_epoch) > MAX_EPOCHS:
        del by_epoch[next(iter(by_epoch))]
