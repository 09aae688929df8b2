"""The subscriber's side of results and control as a pure state machine.

Not here: sockets, threads, clocks, the reader's queue; ``subscriber`` has those. The simulator drives
this class too.

Theory of operation. A connection begins by subscribing and waiting until the broker has confirmed each
topic on that topic; from then on nothing is lost for want of a subscription. Then the broker is asked
for its positions. Outcomes of a stream are yielded by ascending pub_seq without a hole: a gap is seen
by an outcome that comes too early, or by positions (a lost tail), and fetched over control, page by
page and only while the reader has room; meanwhile later outcomes are held back, up to a bound, beyond
which they are dropped and become part of what is fetched. What the broker no longer has is yielded as
Missed. A stream that is quiet is asked about twice a second. A new boot id means a new broker: its
pub_seq start at 0, and frames that it runs a second time are recognised.

    AWAY --> Connect --> CONNECTING --Connected--> CONFIRMING --topics, positions--> OPEN
      ^                      |                         |                              |
      +--------- Disconnected, or a request without an answer for REQUEST_TIMEOUT ----+

In mode ``latest`` a gap is skipped and counted, never fetched, except for the newest outcome itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from headrace.clients.backoff import Backoff
from headrace.clients.positions import read_positions
from headrace.clients.records import Missed, MissedReason
from headrace.clients.stream_state import StreamState, outcome_bytes
from headrace.clients.subscriber_events import (
    Action,
    Answered,
    Ask,
    Connect,
    Connected,
    Deliver,
    Disconnect,
    Disconnected,
    Event,
    Mode,
    Published,
    Start,
    State,
    Subscribe,
    Tick,
)
from headrace.errors import RemoteProtocolError
from headrace.protocol.messages import (
    Message,
    Outcome,
    Outcomes,
    Refused,
    ReplayReply,
    Reply,
    Request,
    Subscribed,
    Value,
)

MS = 1_000_000

#: A topic that was not confirmed for so long is subscribed to again: the confirmation is published like
#: a result and can be lost like one.
CONFIRM_AGAIN_NS = 1_000 * MS

#: A broker that does not answer a request for so long is taken for dead.
REQUEST_TIMEOUT_NS = 5_000 * MS

#: A stream quiet for this long may have lost its last outcome: ask.
QUIET_NS = 500 * MS

#: Asking costs the broker a little per stream, so many streams are asked about less often.
POLL_PER_STREAM_NS = 1 * MS

#: One page of a replay and how many are under way at once: what a reader's memory may overshoot its
#: queue by.
FETCH_COUNT = 64
FETCH_BYTES = 1024 * 1024
MAX_FETCHES = 4

#: Outcomes held back behind gaps, all streams together.
MAX_HELD_COUNT = 1_024
MAX_HELD_BYTES = 64 * 1024 * 1024

#: Topics of one subscriber: what one positions request may name.
MAX_TOPICS = 1_024


@dataclass(frozen=True, slots=True)
class _Fetch:
    stream: str
    boot: int
    first: int
    end: int
    asked_ns: int


@dataclass(frozen=True, slots=True)
class _Positions:
    asked_ns: int


@dataclass(slots=True)
class Counts:
    """Cumulative counts of the session."""

    missed: int = 0
    missed_unknown: int = 0
    skipped: int = 0
    duplicates: int = 0
    fetched: int = 0
    sessions: int = 0


class SubscriberSession:
    """See the module. Invariants: per stream and boot, pub_seqs are yielded in order without a hole that
    is not a Missed range (mode ``every``); at most MAX_HELD_COUNT outcomes are held and MAX_FETCHES
    pages under way.
    """

    def __init__(
        self,
        topics: Iterable[bytes],
        *,
        mode: Mode = Mode.EVERY,
        start: Start = Start.EARLIEST,
        jitter: float = 0.5,
    ) -> None:
        """``topics``: stream + NUL for one stream, a prefix without NUL for all that begin so."""
        self.topics = tuple(topics)
        self.state = State.AWAY
        self.boot: int | None = None
        self.away_reason = "not connected yet"
        self.counts = Counts()
        self._is_latest = mode is Mode.LATEST
        self._start = start
        self._backoff = Backoff(jitter)
        self._streams: dict[str, StreamState] = {}
        self._gaps: dict[str, None] = {}
        self._unconfirmed: dict[bytes, int] = {}
        self._pending: dict[int, _Fetch | _Positions] = {}
        self._last_id = 0
        self._has_begun = False
        self._has_room = True
        self._held_count = 0
        self._held_bytes = 0
        self._retry_ns = 0
        self._next_poll_ns = 0

    # -- questions -----------------------------------------------------------------------------------

    @property
    def behind_count(self) -> int:
        return sum(state.behind_count for state in tuple(self._streams.values()))

    def next_wakeup_ns(self) -> int | None:
        """Return when Tick is due at the latest; None for no time known."""
        match self.state:
            case State.AWAY:
                return self._retry_ns
            case State.CONNECTING | State.CLOSED:
                return None
            case State.CONFIRMING | State.OPEN:
                times = [pending.asked_ns + REQUEST_TIMEOUT_NS for pending in self._pending.values()]
                times += [asked_ns + CONFIRM_AGAIN_NS for asked_ns in self._unconfirmed.values()]
                if self.state is State.OPEN and self._has_room:
                    times.append(self._next_poll_ns)
                return min(times, default=None)
            case _:
                assert_never(self.state)

    def check_invariants(self) -> None:
        """Raise AssertionError when the session contradicts itself (a bug of ours)."""
        held = [outcome for state in self._streams.values() for outcome in state.held.values()]
        if len(held) != self._held_count or outcome_bytes(held) != self._held_bytes:
            raise AssertionError(f"{len(held)} outcomes held, {self._held_count} counted")
        fetches = [each for each in self._pending.values() if isinstance(each, _Fetch)]
        if len(fetches) > MAX_FETCHES or self._held_count > MAX_HELD_COUNT:
            raise AssertionError(f"{len(fetches)} fetches, {self._held_count} held: over the bound")
        for state in self._streams.values():
            if state.next_pub_seq is not None and any(seq <= state.next_pub_seq for seq in state.held):
                raise AssertionError(f"stream {state.stream} holds what it could yield")

    # -- the mutator ---------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take a past fact; return what has to be done, in order."""
        match event:
            case Tick(has_room):
                self._has_room = has_room
                return self._tick(now_ns)
            case Connected():
                return self._confirm(now_ns)
            case Disconnected(reason):
                return self._go_away(reason, now_ns, is_closed=True)
            case Published(topic, message):
                return self._take_published(topic, message, now_ns)
            case Answered(message):
                return self._take_answer(message, now_ns)
            case _:
                assert_never(event)

    def _tick(self, now_ns: int) -> list[Action]:
        if self.state is State.AWAY and now_ns >= self._retry_ns:
            self.state = State.CONNECTING
            return [Connect()]
        if self.state not in {State.CONFIRMING, State.OPEN}:
            return []
        for pending in self._pending.values():
            if now_ns >= pending.asked_ns + REQUEST_TIMEOUT_NS:
                reason = f"no answer on control for {REQUEST_TIMEOUT_NS // MS} ms"
                return self._go_away(reason, now_ns, is_closed=False)
        actions: list[Action] = []
        for topic, asked_ns in tuple(self._unconfirmed.items()):
            if now_ns >= asked_ns + CONFIRM_AGAIN_NS:
                self._unconfirmed[topic] = now_ns
                actions.append(Subscribe(topic))
        if self.state is State.OPEN and self._has_room:
            actions += self._fetch_gaps(now_ns)
            if now_ns >= self._next_poll_ns:
                actions += self._poll_quiet_streams(now_ns)
        return actions

    def _confirm(self, now_ns: int) -> list[Action]:
        if self.state is not State.CONNECTING:
            return []
        self.state = State.CONFIRMING
        self._unconfirmed = dict.fromkeys(self.topics, now_ns)
        return [Subscribe(topic) for topic in self.topics]

    def _go_away(self, reason: str, now_ns: int, *, is_closed: bool) -> list[Action]:
        if self.state is State.AWAY:
            return []
        if self.state is State.OPEN:
            self._backoff.reset()
        self.state = State.AWAY
        self.away_reason = reason
        self._unconfirmed = {}
        self._pending = {}
        for state in self._streams.values():
            state.fetch_id = None
        self._retry_ns = now_ns + self._backoff.next_delay_ns()
        return [] if is_closed else [Disconnect(reason)]

    # -- results -------------------------------------------------------------------------------------

    def _take_published(self, topic: bytes, message: Outcomes | Subscribed, now_ns: int) -> list[Action]:
        if self.state not in {State.CONFIRMING, State.OPEN}:
            return []
        match message:
            case Subscribed(boot):
                # Others' confirmations under a prefix of ours come by as well.
                if self._unconfirmed.pop(topic, None) is None:
                    return []
                actions = self._see_boot(boot)
                if not self._unconfirmed and self.state is State.CONFIRMING:
                    actions.append(self._ask_positions("", now_ns))
                return actions
            case Outcomes(outcomes):
                actions = []
                for outcome in outcomes:
                    actions += self._see_boot(outcome.boot)
                    actions += self._take_outcome(outcome, now_ns)
                return actions
            case _:
                assert_never(message)

    def _take_outcome(self, outcome: Outcome, now_ns: int) -> list[Action]:
        state = self._state_of(outcome.stream, outcome.boot, now_ns)
        state.heard_ns = now_ns
        pub_seq = outcome.pub_seq
        state.known_end = max(state.known_end, pub_seq + 1)
        if state.next_pub_seq is None:
            return self._hold(state, outcome)
        if pub_seq < state.next_pub_seq:
            return []
        if pub_seq > state.next_pub_seq:
            if not self._is_latest:
                return self._hold(state, outcome)
            self.counts.skipped += pub_seq - state.next_pub_seq
            self._drop_held(state, pub_seq + 1)
        return self._yield_from(state, outcome)

    def _hold(self, state: StreamState, outcome: Outcome) -> list[Action]:
        """Keep an outcome that comes too early. Where there is no room it is dropped: it is then a part
        of the gap and fetched with it."""
        nbytes = outcome_bytes([outcome])
        self._gaps[state.stream] = None
        if (
            outcome.pub_seq in state.held
            or self._held_count >= MAX_HELD_COUNT
            or self._held_bytes + nbytes > MAX_HELD_BYTES
        ):
            return []
        state.held[outcome.pub_seq] = outcome
        self._held_count += 1
        self._held_bytes += nbytes
        return []

    def _yield_from(self, state: StreamState, outcome: Outcome) -> list[Action]:
        """Yield the outcome that is next and what was held behind it, but no frame's second run."""
        taken = state.take(outcome)
        self._held_count -= len(taken) - 1
        self._held_bytes -= outcome_bytes(taken[1:])
        fresh = [each for each in taken if state.is_new(each)]
        self.counts.duplicates += len(taken) - len(fresh)
        return [Deliver(each) for each in fresh]

    def _drop_held(self, state: StreamState, below: int) -> None:
        dropped = state.drop_held_below(below)
        self._held_count -= len(dropped)
        self._held_bytes -= outcome_bytes(dropped)

    def _yield_held(self, state: StreamState) -> list[Action]:
        if state.next_pub_seq is None:
            return []
        self._drop_held(state, state.next_pub_seq)
        following = state.held.pop(state.next_pub_seq, None)
        if following is None:
            return []
        self._held_count -= 1
        self._held_bytes -= outcome_bytes([following])
        return self._yield_from(state, following)

    def _miss(self, state: StreamState, end: int, reason: MissedReason) -> list[Action]:
        """Give up what is next up to ``end`` (excluded), and go on with what was held behind it."""
        missed = state.miss(end, reason)
        following = self._yield_held(state)
        if self._is_latest:
            self.counts.skipped += missed.count or 0
            return following
        self.counts.missed += missed.count or 0
        return [Deliver(missed), *following]

    def _state_of(self, stream: str, boot: int, now_ns: int) -> StreamState:
        state = self._streams.get(stream)
        if state is None:
            is_from_now = self._start is Start.NOW and not self._has_begun
            state = StreamState(stream, boot, None if is_from_now else 0, now_ns)
            self._streams[stream] = state
        return state

    def _see_boot(self, boot: int) -> list[Action]:
        """Notice a new broker: finish each stream under the old one."""
        if boot == self.boot:
            return []
        had_boot, self.boot = self.boot is not None, boot
        if not had_boot:
            return []
        # Requests to the old broker can only be answered by the new one, about something else.
        self._pending = {key: each for key, each in self._pending.items() if isinstance(each, _Positions)}
        self._gaps = {}
        actions: list[Action] = []
        for state in self._streams.values():
            for item in state.leave_boot(boot, is_told=not self._is_latest):
                if isinstance(item, Missed):
                    self.counts.missed += item.count or 0
                    self.counts.missed_unknown += item.last is None
                actions.append(Deliver(item))
        self._held_count = self._held_bytes = 0
        return actions

    # -- control -------------------------------------------------------------------------------------

    def _ask(self, method: str, params: dict[str, Value], pending: _Fetch | _Positions) -> Ask:
        self._last_id += 1
        self._pending[self._last_id] = pending
        return Ask(Request(self._last_id, method, params))

    def _ask_positions(self, after: str, now_ns: int) -> Ask:
        topics: list[Value] = [topic.decode() for topic in self.topics]
        params: dict[str, Value] = {"topics": topics}
        if after:
            params["streams_after"] = after
        return self._ask("positions", params, _Positions(now_ns))

    def _poll_quiet_streams(self, now_ns: int) -> list[Action]:
        quiet_ns = max(QUIET_NS, POLL_PER_STREAM_NS * len(self._streams))
        self._next_poll_ns = now_ns + quiet_ns
        if any(isinstance(pending, _Positions) for pending in self._pending.values()):
            return []
        if self._streams and all(now_ns - s.heard_ns < quiet_ns for s in self._streams.values()):
            return []
        return [self._ask_positions("", now_ns)]

    def _fetch_gaps(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        fetch_count = sum(isinstance(each, _Fetch) for each in self._pending.values())
        for stream in tuple(self._gaps):
            if fetch_count >= MAX_FETCHES:
                break
            state = self._streams[stream]
            gap = state.gap
            if gap is None or state.fetch_id is not None:
                if gap is None and state.next_pub_seq is not None:
                    del self._gaps[stream]
                continue
            first, end = gap[0], min(gap[1], gap[0] + FETCH_COUNT)
            params: dict[str, Value] = {
                "stream": stream,
                "boot": state.boot,
                "first": first,
                "last": end - 1,
                "max_bytes": FETCH_BYTES,
            }
            actions.append(self._ask("replay", params, _Fetch(stream, state.boot, first, end, now_ns)))
            state.fetch_id = self._last_id
            fetch_count += 1
        return actions

    def _take_answer(self, message: Message, now_ns: int) -> list[Action]:
        if isinstance(message, Refused):
            reason = f"refused by the broker: {message.code}: {message.message}"
            return self._go_away(reason, now_ns, is_closed=False)
        if not isinstance(message, Reply | ReplayReply):
            return []
        pending = self._pending.pop(message.id, None)
        match pending, message:
            case _Fetch(), ReplayReply():
                return self._take_replay(pending, message, now_ns)
            case _Fetch(), Reply():
                return self._give_up(pending)
            case _Positions(), Reply(code=""):
                return self._take_positions(message.result, now_ns)
            case _Positions(), _:
                return self._go_away("the broker did not tell its positions", now_ns, is_closed=False)
            case _:
                # The answer to a request of an earlier connection or boot.
                return []

    def _take_replay(self, fetch: _Fetch, reply: ReplayReply, now_ns: int) -> list[Action]:
        state = self._streams[fetch.stream]
        state.fetch_id = None
        state.heard_ns = now_ns
        before = state.next_pub_seq
        actions: list[Action] = []
        gone: list[tuple[int, Outcome | int]] = [(first, end) for first, end in reply.missed]
        had: list[tuple[int, Outcome | int]] = [(outcome.pub_seq, outcome) for outcome in reply.outcomes]
        for first, what in sorted(gone + had, key=lambda entry: entry[0]):
            if isinstance(what, int):
                if state.next_pub_seq is not None and first <= state.next_pub_seq < what:
                    actions += self._miss(state, min(what, fetch.end), MissedReason.LEFT_RING)
            elif what.stream == state.stream and what.boot == state.boot:
                self.counts.fetched += 1
                actions += self._take_outcome(what, now_ns)
            actions += self._yield_held(state)
        if state.next_pub_seq == before:
            # An answer that moves nothing would be asked for again for ever.
            actions += self._give_up(fetch)
        return actions

    def _give_up(self, fetch: _Fetch) -> list[Action]:
        """Yield what the broker would not tell as missed."""
        state = self._streams[fetch.stream]
        state.fetch_id = None
        gap = state.gap
        if gap is None or gap[0] >= fetch.end:
            return []
        return self._miss(state, min(fetch.end, gap[1]), MissedReason.NO_ANSWER)

    def _take_positions(self, result: dict[str, Value], now_ns: int) -> list[Action]:
        try:
            boot, streams, after = read_positions(result)
        except RemoteProtocolError as error:
            return self._go_away(str(error), now_ns, is_closed=False)
        actions = self._see_boot(boot)
        for stream, next_pub_seq in streams.items():
            actions += self._take_position(stream, next_pub_seq, now_ns)
        if after:
            actions.append(self._ask_positions(after, now_ns))
            return actions
        if self.state is State.CONFIRMING:
            self.state = State.OPEN
            self.counts.sessions += 1
            self._has_begun = True
            self._next_poll_ns = now_ns + QUIET_NS
            # A stream that came up after the positions were told begins at its beginning.
            for state in self._streams.values():
                if state.next_pub_seq is None:
                    state.next_pub_seq = 0
                    actions += self._yield_held(state)
        return actions

    def _take_position(self, stream: str, next_pub_seq: int, now_ns: int) -> list[Action]:
        state = self._state_of(stream, self.boot or 0, now_ns)
        state.known_end = max(state.known_end, next_pub_seq)
        if state.next_pub_seq is None:
            state.next_pub_seq = next_pub_seq
            return self._yield_held(state)
        if state.next_pub_seq >= next_pub_seq:
            return []
        if self._is_latest:
            # Only the newest is worth fetching.
            self.counts.skipped += next_pub_seq - 1 - state.next_pub_seq
            state.next_pub_seq = next_pub_seq - 1
        self._gaps[stream] = None
        return []
