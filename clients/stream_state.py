"""One stream as a subscriber sees it: what comes next, what is held back, what was had before.

Part of ``subscriber_session``, which decides when a gap is fetched. Pure.

Theory of operation. A stream is read boot by boot. While one boot's outcomes are read, those of later boots
are held back beside it. When a new boot is seen, the broker is asked which earlier boots its journal can
still serve; until its answer settles what is to be read before the new boot, nothing of that is yielded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.clients.records import Missed, MissedReason
from headrace.clients.seq_runs import SeqRuns
from headrace.protocol.messages import Outcome

#: Epochs of earlier boots remembered per stream: the producer that lived through the broker's restart,
#: and a few that came after it.
MAX_EPOCHS = 4

#: Outcomes held back behind gaps, all streams together.
MAX_HELD_COUNT = 1_024
MAX_HELD_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Counts:
    """Counts of a session: cumulative, but for the two of what is held now."""

    missed: int = 0
    missed_unknown: int = 0
    skipped: int = 0
    duplicates: int = 0
    fetched: int = 0
    sessions: int = 0
    held: int = 0
    held_bytes: int = 0


class StreamState:
    """Invariants: what was yielded of a boot is exactly pub_seq ``first .. next_pub_seq - 1``, as
    outcomes, Missed ranges or recognised duplicates, in order; held outcomes lie above that.

    ``boot`` is the one that is being read, ``newest_boot`` the one that the broker is in. ``next_pub_seq``
    is None until it is known where this subscriber begins. ``known_end`` is one above the highest pub_seq
    that is known to exist.
    """

    def __init__(
        self, stream: str, boot: int, next_pub_seq: int | None, now_ns: int, counts: Counts, *, is_told: bool
    ) -> None:
        """``is_told``: whether Missed ranges are wanted (mode ``every``)."""
        self.stream = stream
        self.boot = self.newest_boot = boot
        self.next_pub_seq = next_pub_seq
        self.known_end = 0
        self.heard_ns = now_ns
        self.held: dict[int, Outcome] = {}
        self.fetch_id: int | None = None
        self._counts = counts
        self._is_told = is_told
        self._is_settled = True
        self._later: deque[int] = deque()  # boots to be read after this one, the newest last
        self._lost: set[int] = set()  # those of them that nobody can tell the rest of
        self._held_later: dict[int, dict[int, Outcome]] = {}
        self._later_ends: dict[int, int] = {}
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
        own = 0 if self.next_pub_seq is None else max(0, self.known_end - self.next_pub_seq)
        return own + sum(tuple(self._later_ends.values()))

    @property
    def is_fetchable(self) -> bool:
        """Whether the broker can be asked for the gap: not before it said which boots it can serve."""
        return self._is_settled or self.boot == self.newest_boot

    def all_held(self) -> list[Outcome]:
        """Return every outcome that is held back."""
        later = [outcome for held in self._held_later.values() for outcome in held.values()]
        return [*self.held.values(), *later]

    # -- what comes ----------------------------------------------------------------------------------

    def hold(self, outcome: Outcome) -> None:
        """Keep an outcome that comes too early. Where there is no room it is dropped: it is then a part of
        the gap and fetched with it."""
        self.note_end(outcome.boot, outcome.pub_seq + 1)
        held = self.held if outcome.boot == self.boot else self._held_later.setdefault(outcome.boot, {})
        nbytes = outcome_bytes([outcome])
        counts = self._counts
        if (
            outcome.pub_seq in held
            or counts.held >= MAX_HELD_COUNT
            or counts.held_bytes + nbytes > MAX_HELD_BYTES
        ):
            return
        held[outcome.pub_seq] = outcome
        counts.held += 1
        counts.held_bytes += nbytes

    def note_end(self, boot: int, end: int) -> None:
        """Note that outcomes below ``end`` exist in a boot that is read now or later."""
        if boot == self.boot:
            self.known_end = max(self.known_end, end)
        else:
            self._later_ends[boot] = max(self._later_ends.get(boot, 0), end)

    def take(self, outcome: Outcome) -> list[Outcome]:
        """Count the outcome that is next, and all held ones that follow it; return those that are new."""
        taken = [outcome]
        after = outcome.pub_seq + 1
        while after in self.held:
            taken.append(self._unhold(after))
            after += 1
        self.next_pub_seq = after
        self.known_end = max(self.known_end, after)
        fresh = [each for each in taken if self._is_new(each)]
        self._counts.duplicates += len(taken) - len(fresh)
        return fresh

    def take_run(self, outcomes: Sequence[Outcome]) -> list[Outcome] | None:
        """Count outcomes that are all next, one after another, and return those that are new; None, with
        nothing counted, when they are not or when something is held or missing.

        It does for a whole message what ``take`` does for one outcome."""
        boot, following = self.boot, self.next_pub_seq
        if following is None or self.held or self._later or self._had_before:
            return None
        epoch, seq = outcomes[0].epoch, outcomes[0].seq
        is_counting_on = True
        for outcome in outcomes:
            if outcome.pub_seq != following or outcome.boot != boot:
                return None
            is_counting_on = is_counting_on and outcome.seq == seq and outcome.epoch == epoch
            following += 1
            seq += 1
        if self.known_end > following:
            return None
        self.next_pub_seq = self.known_end = following
        if not is_counting_on:
            return [outcome for outcome in outcomes if self._is_new(outcome)]
        self._runs_of(epoch).add(outcomes[0].seq, seq - 1)
        return list(outcomes)

    def take_held(self) -> list[Outcome]:
        """Return what was held and is next now; drop what lies below."""
        if self.next_pub_seq is None:
            return []
        self.drop_held_below(self.next_pub_seq)
        return self.take(self._unhold(self.next_pub_seq)) if self.next_pub_seq in self.held else []

    def miss(self, end: int, reason: MissedReason) -> Missed:
        """Give up everything up to ``end`` (excluded)."""
        first = self.next_pub_seq or 0
        self.next_pub_seq = end
        self.known_end = max(self.known_end, end)
        return Missed(self.stream, self.boot, first, end - 1, reason)

    def drop_held_below(self, pub_seq: int) -> None:
        """Forget held outcomes below ``pub_seq``."""
        for old in [old for old in self.held if old < pub_seq]:
            self._unhold(old)

    def _unhold(self, pub_seq: int) -> Outcome:
        outcome = self.held.pop(pub_seq)
        self._counts.held -= 1
        self._counts.held_bytes -= outcome_bytes([outcome])
        return outcome

    # -- boots ---------------------------------------------------------------------------------------

    def see_boot(self, boot: int) -> None:
        """Note that the broker is in a new boot: nothing of it is yielded before settle()."""
        self.newest_boot = boot
        self.fetch_id = None
        self._is_settled = False
        self._later.append(boot)

    def begin(self, next_pub_seq: int) -> list[Outcome]:
        """Begin in the newest boot, leaving out all before; return what is next already."""
        self._put_back()
        self._later.clear()
        self._is_settled = True
        self.boot = self.newest_boot
        self._drop_all_but({self.boot})
        self.held = self._held_later.pop(self.boot, {})
        self.known_end = self._later_ends.pop(self.boot, 0)
        self.next_pub_seq = next_pub_seq
        self.known_end = max(self.known_end, next_pub_seq)
        return self.take_held()

    def settle(
        self, spans: Mapping[int, int], boots: Mapping[int, bool], left: Container[int]
    ) -> list[Outcome | Missed]:
        """Learn what is to be read before the newest boot; return what can be yielded at once.

        Args:
            spans: this stream's earlier boots that the journal can serve, and where each ends.
            boots: all earlier boots that the journal knows, the oldest first, and whether it holds every
                stream of them, so that one without a span had no outcome in it.
            left: boots that were read to their end before the present one.
        """
        self._is_settled = True
        begins = self.next_pub_seq is None
        if not begins and self.boot == self.newest_boot:
            return []
        known = list(boots)
        if begins:
            # Nothing was read yet: what is held is of a boot that is now one to come.
            self._put_back()
        elif self.boot in boots:
            known = known[known.index(self.boot) + 1 :]
        readable = [boot for boot in known if boot in spans and boot not in left]
        lost = [
            boot
            for boot in dict.fromkeys((*self._held_later, *self._later_ends, *self._later))
            if boot != self.newest_boot and boot not in spans and not boots.get(boot, False)
        ]
        self._lost = set(lost)
        self._later = deque([*lost, *readable, self.newest_boot])
        self._drop_all_but({*self._later})
        for boot in self._later:
            self._later_ends[boot] = max(self._later_ends.get(boot, 0), spans.get(boot, 0))
        if not begins:
            self.note_end(self.boot, spans.get(self.boot, 0))
        items: list[Outcome | Missed] = []
        if begins:
            items = self._enter(self._later.popleft())
        elif self.boot not in spans and not boots.get(self.boot, False):
            items = self._give_up_boot()
        return items + self.advance()

    def advance(self) -> list[Outcome | Missed]:
        """Go on to the next boot once this one is read to its end; return what can be yielded at once."""
        items: list[Outcome | Missed] = []
        while self._later and self._is_settled and self.next_pub_seq is not None and self.gap is None:
            items += self._enter(self._later.popleft())
        return items

    def _put_back(self) -> None:
        if self.held or self.known_end:
            self._held_later[self.boot] = self.held
            self._later_ends[self.boot] = self.known_end
        self.held = {}
        self.known_end = 0

    def _drop_all_but(self, boots: Container[int]) -> None:
        """Forget what is held of later boots that will not be read."""
        for boot in [boot for boot in self._held_later if boot not in boots]:
            dropped = self._held_later.pop(boot)
            self._counts.held -= len(dropped)
            self._counts.held_bytes -= outcome_bytes(dropped.values())
        self._later_ends = {boot: end for boot, end in self._later_ends.items() if boot in boots}

    def _enter(self, boot: int) -> list[Outcome | Missed]:
        self._remember(self._had_now)
        self._had_now = {}
        self.boot = boot
        self.next_pub_seq = 0
        self.held = self._held_later.pop(boot, {})
        self.known_end = self._later_ends.pop(boot, 0)
        if boot in self._lost:
            return self._give_up_boot()
        return [*self.take_held()]

    def _give_up_boot(self) -> list[Outcome | Missed]:
        """Return the rest of a boot that nobody can tell about: what is held, and what will never come."""
        rest: list[Outcome | Missed] = []
        while self.next_pub_seq is not None and self.held:
            lowest = min(self.held)
            if self.next_pub_seq < lowest:
                missed = self.miss(lowest, MissedReason.NEW_BOOT)
                rest += [missed] if self._is_told else []
            rest += self.take(self._unhold(lowest))
        if self._is_told and self.next_pub_seq is not None:
            # How many outcomes there were after that only the old broker knew.
            rest.append(Missed(self.stream, self.boot, self.next_pub_seq, None, MissedReason.NEW_BOOT))
        self.known_end = self.next_pub_seq or 0
        return rest

    # -- frames run twice ----------------------------------------------------------------------------

    def _is_new(self, outcome: Outcome) -> bool:
        """Note an outcome; tell a frame's first one from that of its second run under a later boot.

        Within one boot the broker publishes one outcome per frame, so only earlier boots are asked.
        """
        before = self._had_before.get(outcome.epoch)
        if before is not None and outcome.seq in before:
            return False
        self._runs_of(outcome.epoch).add(outcome.seq)
        return True

    def _runs_of(self, epoch: int) -> SeqRuns:
        runs = self._had_now.get(epoch)
        if runs is None:
            runs = self._had_now[epoch] = SeqRuns()
            _keep_newest(self._had_now)
        return runs

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
