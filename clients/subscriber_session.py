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
pub_seq start at 0, and frames that it runs a second time are recognised. Before its outcomes are yielded it
is asked which earlier boots its journal can serve: the rest of those is fetched and yielded first.

    AWAY --> Connect --> CONNECTING --Connected--> CONFIRMING --topics, positions--> OPEN
      ^                      |                         |                              |
      +--------- Disconnected, or a request without an answer for REQUEST_TIMEOUT ----+

In mode ``latest`` a gap is skipped and counted, never fetched, except for the newest outcome itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from headrace.clients.backoff import Backoff
from headrace.clients.positions import read_positions, spans_since
from headrace.clients.records import Missed, MissedReason
from headrace.clients.stream_state import MAX_HELD_COUNT, Counts, StreamState, outcome_bytes
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
    Fetch,
    Mode,
    PositionsAsked,
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

#: Boots of the broker that a session remembers to have seen.
MAX_BOOTS = 64

#: Topics of one subscriber: what one positions request may name.
MAX_TOPICS = 1_024


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
        self._pending: dict[int, Fetch | PositionsAsked] = {}
        self._last_id = 0
        self._has_begun = False
        self._has_room = True
        self._boots: dict[int, None] = {}  # seen so far, in order
        self._is_settled = False  # whether the broker has said what its journal has of earlier boots
        self._earlier: dict[str, dict[int, int]] = {}  # gathered page by page until then
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

    def needs_tick(self, has_room: bool, now_ns: int) -> bool:
        """Tell whether a Tick would do something: it need not come with every message."""
        is_same = has_room is self._has_room and self.state is State.OPEN and not self._gaps
        return not is_same or now_ns >= (self.next_wakeup_ns() or 0)

    def check_invariants(self) -> None:
        """Raise AssertionError when the session contradicts itself (a bug of ours)."""
        held = [outcome for state in self._streams.values() for outcome in state.all_held()]
        if len(held) != self.counts.held or outcome_bytes(held) != self.counts.held_bytes:
            raise AssertionError(f"{len(held)} outcomes held, {self.counts.held} counted")
        fetches = [each for each in self._pending.values() if isinstance(each, Fetch)]
        if len(fetches) > MAX_FETCHES or self.counts.held > MAX_HELD_COUNT:
            raise AssertionError(f"{len(fetches)} fetches, {self.counts.held} held: over the bound")
        for state in self._streams.values():
            if state.next_pub_seq is not None and any(seq <= state.next_pub_seq for seq in state.held):
                raise AssertionError(f"stream {state.stream} holds what it could yield")

    # -- the mutator ---------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take a past fact; return what has to be done, in order."""
        match event:
            case Published(topic, message):
                return self._take_published(topic, message, now_ns)
            case Tick(has_room):
                self._has_room = has_room
                return self._tick(now_ns)
            case Connected():
                return self._confirm(now_ns)
            case Disconnected(reason):
                return self._go_away(reason, now_ns, is_closed=True)
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
        self._unconfirmed, self._pending = {}, {}
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
                actions = self._see_boot(boot, now_ns)
                if not self._unconfirmed and self.state is State.CONFIRMING:
                    actions.append(self._ask_positions("", now_ns))
                return actions
            case Outcomes(outcomes):
                known = self._streams.get(outcomes[0].stream)
                if known is not None and (run := known.take_run(outcomes)) is not None:
                    known.heard_ns = now_ns
                    return _deliver(run)
                actions = []
                for outcome in outcomes:
                    actions += self._see_boot(outcome.boot, now_ns)
                    state = self._state_of(outcome.stream, now_ns)
                    state.heard_ns = now_ns
                    if outcome.boot == state.boot:
                        actions += self._take_outcome(state, outcome)
                    else:
                        state.hold(outcome)
                return actions
            case _:
                assert_never(message)

    def _take_outcome(self, state: StreamState, outcome: Outcome) -> list[Action]:
        """Take an outcome of the boot that the stream is read in."""
        pub_seq = outcome.pub_seq
        state.note_end(outcome.boot, pub_seq + 1)
        next_pub_seq = state.next_pub_seq
        if next_pub_seq is not None and pub_seq < next_pub_seq:
            return []
        if next_pub_seq is None or (pub_seq > next_pub_seq and not self._is_latest):
            self._gaps[state.stream] = None
            state.hold(outcome)
            return []
        if pub_seq > next_pub_seq:
            self.counts.skipped += pub_seq - next_pub_seq
            state.drop_held_below(pub_seq + 1)
        return [*_deliver(state.take(outcome)), *self._go_on(state)]

    def _go_on(self, state: StreamState) -> list[Action]:
        """Go on with what was held, and with the next boot when this one is read to its end."""
        return self._yield(state, [*state.take_held(), *state.advance()])

    def _yield(self, state: StreamState, items: list[Outcome | Missed]) -> list[Action]:
        for item in items:
            if isinstance(item, Missed):
                self.counts.missed += item.count or 0
                self.counts.missed_unknown += item.last is None
        if state.gap is not None:
            self._gaps[state.stream] = None
        return _deliver(items)

    def _miss(self, state: StreamState, end: int, reason: MissedReason) -> list[Action]:
        """Give up what is next up to ``end`` (excluded), and go on with what was held behind it."""
        missed = state.miss(end, reason)
        if not self._is_latest:
            return [*self._yield(state, [missed]), *self._go_on(state)]
        self.counts.skipped += missed.count or 0
        return self._go_on(state)

    def _state_of(self, stream: str, now_ns: int) -> StreamState:
        state = self._streams.get(stream)
        if state is None:
            is_known = (self._is_settled or self._is_latest) and not self._is_from_now
            state = StreamState(
                stream,
                self.boot or 0,
                0 if is_known else None,
                now_ns,
                self.counts,
                is_told=not self._is_latest,
            )
            self._streams[stream] = state
        return state

    @property
    def _is_from_now(self) -> bool:
        return self._start is Start.NOW and not self._has_begun

    # -- boots ---------------------------------------------------------------------------------------

    def _see_boot(self, boot: int, now_ns: int) -> list[Action]:
        """Notice a new broker: what is to be read before its outcomes has to be found out first."""
        if boot == self.boot:
            return []
        had_boot, self.boot = self.boot is not None, boot
        self._boots[boot] = None
        if len(self._boots) > MAX_BOOTS:
            del self._boots[next(iter(self._boots))]
        self._is_settled = False
        self._earlier = {}
        if not had_boot:
            return []
        # Requests to the old broker can only be answered by the new one, about something else.
        self._pending, self._gaps = {}, {}
        actions: list[Action] = []
        for state in self._streams.values():
            state.see_boot(boot)
            if self._is_latest and state.next_pub_seq is not None:
                actions += self._yield(state, state.settle({}, {}, ()))
        if self._is_latest:
            return actions
        return [self._ask_positions("", now_ns)] if self.state is State.OPEN else []

    def _settle(self, boots: dict[int, bool]) -> list[Action]:
        """Read what the journal has of earlier boots, and then the newest one."""
        self._is_settled = True
        seen = list(self._boots)
        actions: list[Action] = []
        for stream, state in self._streams.items():
            spans = self._earlier.get(stream, {})
            if state.next_pub_seq is None:
                if self._start is Start.NOW:
                    # A stream that came up after this subscriber did: all of it, but nothing from before.
                    spans = {} if self._is_from_now else spans_since(spans, boots, self._boots)
                left = []
            else:
                left = seen[: seen.index(state.boot)] if state.boot in self._boots else []
            actions += self._yield(state, state.settle(spans, boots, left))
        self._earlier = {}
        return actions

    # -- control -------------------------------------------------------------------------------------

    def _ask(self, method: str, params: dict[str, Value], pending: Fetch | PositionsAsked) -> Ask:
        self._last_id += 1
        self._pending[self._last_id] = pending
        return Ask(Request(self._last_id, method, params))

    def _ask_positions(self, after: str, now_ns: int) -> Ask:
        params: dict[str, Value] = {"topics": [topic.decode() for topic in self.topics]}
        has_earlier = not (self._is_settled or self._is_latest)
        if has_earlier:
            params["earlier"] = True
        if after:
            params["streams_after"] = after
        return self._ask("positions", params, PositionsAsked(now_ns, has_earlier))

    def _poll_quiet_streams(self, now_ns: int) -> list[Action]:
        quiet_ns = max(QUIET_NS, POLL_PER_STREAM_NS * len(self._streams))
        self._next_poll_ns = now_ns + quiet_ns
        if any(isinstance(pending, PositionsAsked) for pending in self._pending.values()):
            return []
        if self._streams and all(now_ns - s.heard_ns < quiet_ns for s in self._streams.values()):
            return []
        return [self._ask_positions("", now_ns)]

    def _fetch_gaps(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        fetch_count = sum(isinstance(each, Fetch) for each in self._pending.values())
        for stream in tuple(self._gaps):
            if fetch_count >= MAX_FETCHES:
                break
            state = self._streams[stream]
            gap = state.gap
            if gap is None or state.fetch_id is not None or not state.is_fetchable:
                if gap is None and state.next_pub_seq is not None:
                    del self._gaps[stream]
                continue
            first, end = gap[0], min(gap[1], gap[0] + FETCH_COUNT)
            params: dict[str, Value] = {"stream": stream, "boot": state.boot, "first": first}
            params |= {"last": end - 1, "max_bytes": FETCH_BYTES}
            actions.append(self._ask("replay", params, Fetch(stream, state.boot, first, end, now_ns)))
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
            case Fetch(), ReplayReply():
                return self._take_replay(pending, message, now_ns)
            case Fetch(), Reply():
                return self._give_up(pending)
            case PositionsAsked(), Reply(code=""):
                return self._take_positions(pending, message.result, now_ns)
            case PositionsAsked(), _:
                return self._go_away("the broker did not tell its positions", now_ns, is_closed=False)
            case _:
                # The answer to a request of an earlier connection or boot.
                return []

    def _take_replay(self, fetch: Fetch, reply: ReplayReply, now_ns: int) -> list[Action]:
        state = self._streams[fetch.stream]
        state.fetch_id = None
        state.heard_ns = now_ns
        before = (state.boot, state.next_pub_seq)
        actions: list[Action] = []
        gone: list[tuple[int, Outcome | int]] = [(first, end) for first, end in reply.missed]
        had: list[tuple[int, Outcome | int]] = [(outcome.pub_seq, outcome) for outcome in reply.outcomes]
        for first, what in sorted(gone + had, key=lambda entry: entry[0]):
            if isinstance(what, int):
                if (
                    state.next_pub_seq is not None
                    and fetch.boot == state.boot
                    and first <= state.next_pub_seq < what
                ):
                    actions += self._miss(state, min(what, fetch.end), MissedReason.LEFT_RING)
            elif what.stream == state.stream and what.boot == state.boot:
                self.counts.fetched += 1
                actions += self._take_outcome(state, what)
        if (state.boot, state.next_pub_seq) == before:
            # An answer that moves nothing would be asked for again for ever.
            actions += self._give_up(fetch)
        return actions

    def _give_up(self, fetch: Fetch) -> list[Action]:
        """Yield what the broker would not tell as missed."""
        state = self._streams[fetch.stream]
        state.fetch_id = None
        gap = state.gap
        if gap is None or gap[0] >= fetch.end or state.boot != fetch.boot:
            return []
        return self._miss(state, min(fetch.end, gap[1]), MissedReason.NO_ANSWER)

    def _take_positions(self, asked: PositionsAsked, result: dict[str, Value], now_ns: int) -> list[Action]:
        try:
            page = read_positions(result)
        except RemoteProtocolError as error:
            return self._go_away(str(error), now_ns, is_closed=False)
        is_new = self.boot not in {None, page.boot}
        actions = self._see_boot(page.boot, now_ns)
        if is_new and not self._is_latest:
            # What was asked before was asked of another boot: begin again.
            return actions or [self._ask_positions("", now_ns)]
        self._earlier |= page.earlier
        for stream, next_pub_seq in page.streams.items():
            actions += self._take_position(stream, next_pub_seq, now_ns)
        if page.after:
            actions.append(self._ask_positions(page.after, now_ns))
            return actions
        if asked.has_earlier and not self._is_settled:
            actions += self._settle(page.earlier_boots)
        for state in self._streams.values():
            if state.next_pub_seq is None:
                # A stream that came up after the positions were told begins at its beginning.
                actions += self._yield(state, state.settle({}, {}, ()))
        if self.state is State.CONFIRMING:
            self.state = State.OPEN
            self.counts.sessions += 1
            self._has_begun = True
            self._next_poll_ns = now_ns + QUIET_NS
        return actions

    def _take_position(self, stream: str, next_pub_seq: int, now_ns: int) -> list[Action]:
        state = self._state_of(stream, now_ns)
        if state.next_pub_seq is None and self._is_from_now:
            return self._yield(state, [*state.begin(next_pub_seq)])
        state.note_end(self.boot or 0, next_pub_seq)
        if state.next_pub_seq is None or state.boot != self.boot or state.next_pub_seq >= next_pub_seq:
            return []
        if self._is_latest:  # only the newest is worth fetching
            self.counts.skipped += next_pub_seq - 1 - state.next_pub_seq
            state.next_pub_seq = next_pub_seq - 1
        self._gaps[stream] = None
        return []


def _deliver(items: Iterable[Outcome | Missed]) -> list[Action]:
    return [Deliver(item) for item in items]
