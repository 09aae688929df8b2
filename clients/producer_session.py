"""The producer's side of the frames socket as a pure state machine.

Not here: sockets, threads, clocks, arrays; ``producer`` has those. The simulator drives this class too.

Theory of operation. Every pushed frame is kept until its end is known: a Credit whose watermark for
the frame's stream has reached its seq, or a Reject that names it. A session is one connection to one
broker, from Hello on. When it ends, every frame still kept is sent again in the order of its push, so
that the broker sees each stream's seqs ascend; it recognises those it already has. Credit counts are
of the session, so what they say is added up when a session ends.

    AWAY --(retry time)--> Connect --> CONNECTING --Connected--> GREETING --Welcome--> OPEN
      ^                                    |                        |                    |
      +------------- Disconnected, silence of three heartbeats, a broker's Goodbye ------+
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias, assert_never

from headrace.clients.backoff import Backoff
from headrace.errors import Code
from headrace.protocol.messages import (
    Credit,
    Frame,
    Frames,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Message,
    Refused,
    Reject,
    ShmRef,
    Status,
    Welcome,
)
from headrace.protocol.per_frame import per_frame

MS = 1_000_000

#: A session that lasted this long was a good one: the next attempt after it comes at once again. A shorter
#: one (a broker that refuses us) must not reset the delay, or a refusal would become a busy loop.
GOOD_SESSION_NS = 1_000 * MS

#: Silence allowed before Welcome, when the broker's own heartbeat is not known yet.
GREETING_TIMEOUT_NS = 3_000 * MS
HEARTBEATS_MISSED = 3

#: A bundle saves the per-message cost of small frames. Beyond this size there is nothing left to save
#: and a larger message only keeps its first frame waiting for its last.
BUNDLE_BYTES = 1024 * 1024

#: What a frame's header takes beside its meta: 24 keys and a stream of 128 bytes, rounded up.
FRAME_HEADER_BYTES = 640


class State(Enum):
    """Where the session stands (see the drawing above)."""

    AWAY = "away"
    CONNECTING = "connecting"
    GREETING = "greeting"
    OPEN = "open"
    CLOSED = "closed"


# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FramesPushed:
    """Frames with stream, epoch and seq set, seqs ascending within each stream. ``header_bytes``: the
    room each one's header takes in a bundle, at most."""

    frames: tuple[Frame, ...]
    header_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Connected:
    """What Connect asked for has been done. ``arena``: this producer's shared memory, "" when the broker
    found can't read it."""

    arena: str = ""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection has gone, or could not be made."""

    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The broker said something."""

    message: Message


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """No more frames will be pushed and nobody waits any longer: say goodbye."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = FramesPushed | Connected | Disconnected | MessageReceived | CloseRequested | Tick


# -- actions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Find the broker and connect to it anew; answer with Connected or Disconnected."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection without waiting."""

    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send on the connection, in the order of the actions."""

    message: Message


@per_frame(frozen=True, slots=True)
class Finished:
    """The frame's end is known and its payload is no longer needed. ``reject`` tells why it was not
    admitted; None means that its outcome was published."""

    frame: Frame
    reject: Reject | None


Action: TypeAlias = Connect | Disconnect | Send | Finished


@dataclass(slots=True)
class _Kept:
    frame: Frame
    header_bytes: int
    pushed_ns: int
    is_finished: bool = False


@dataclass(slots=True)
class _Session:
    """Counts of one session, which the broker counts too."""

    sent_count: int = 0
    finished_count: int = 0
    credits: int = 0
    by_status: dict[str, int] = field(default_factory=dict)


def _as_it_is(frame: Frame) -> Frame:
    return frame


class ProducerSession:
    """See the module. Invariants: a frame is kept until Finished is returned for it, once; in a session
    at most ``finished + credits`` frames were sent; the seqs of a stream are sent in ascending order.
    """

    def __init__(
        self,
        *,
        epoch: int,
        name: str = "",
        host_key: str = "",
        jitter: float = 0.5,
        inlined: Callable[[Frame], Frame] = _as_it_is,
    ) -> None:
        """Args:
        epoch: the random u64 that names this run of the producer.
        jitter: 0..1, drawn by the caller: spreads the retries of many producers.
        inlined: copies a payload out of shared memory, for a broker that can't read it there.
        """
        self.state = State.AWAY
        self.boot: int | None = None
        self.limits = Limits()
        self.away_reason = "not connected yet"
        self.resent_count = 0
        self.sessions_count = 0
        self._hello = Hello(epoch=epoch, name=name, host_key=host_key)
        self._inlined = inlined
        self._is_shm_open = False
        self._backoff = Backoff(jitter)
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._by_stream: dict[str, dict[int, _Kept]] = {}
        self._unsent: deque[_Kept] = deque()
        self._session = _Session()
        self._earlier_by_status: Counter[str] = Counter()
        self._retry_ns: int | None = 0
        self._silence_ns = GREETING_TIMEOUT_NS
        self._heartbeat_ns = 0
        self._opened_ns = 0
        self._heard_ns = 0
        self._said_ns = 0

    # -- questions -----------------------------------------------------------------------------------

    @property
    def unfinished_count(self) -> int:
        return len(self._kept)

    def by_status(self) -> dict[str, int]:
        """Count published outcomes of admitted frames by status, over all sessions."""
        total = self._earlier_by_status + Counter(self._session.by_status)
        total.pop(Status.REJECTED, None)
        return {str(status): count for status, count in total.items()}

    def next_wakeup_ns(self) -> int | None:
        """Return when Tick is due at the latest; None for no time known."""
        match self.state:
            case State.AWAY:
                return self._retry_ns
            case State.GREETING:
                return self._heard_ns + self._silence_ns
            case State.OPEN:
                return min(self._heard_ns + self._silence_ns, self._said_ns + self._heartbeat_ns)
            case State.CONNECTING | State.CLOSED:
                return None
            case _:
                assert_never(self.state)

    def check_invariants(self) -> None:
        """Raise AssertionError when the session contradicts itself (a bug of ours)."""
        session = self._session
        if session.sent_count > session.finished_count + session.credits:
            raise AssertionError(
                f"{session.sent_count} sent, {session.finished_count} finished, {session.credits} credits"
            )
        listed_count = sum(len(seqs) for seqs in self._by_stream.values())
        if len(self._kept) != listed_count or not all(self._by_stream.values()):
            raise AssertionError(f"{len(self._kept)} frames kept, {listed_count} listed by stream")
        if any(kept.is_finished for kept in self._kept.values()):
            raise AssertionError("a finished frame is still kept")
        for stream, seqs in self._by_stream.items():
            if list(seqs) != sorted(seqs):
                raise AssertionError(f"stream {stream} keeps its seqs out of order")

    # -- the mutator ---------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take a past fact; return what has to be done, in order."""
        if self.state is State.CLOSED:
            return []
        match event:
            case FramesPushed():
                return [*self._keep(event, now_ns), *self._send_frames(now_ns)]
            case Connected(arena):
                return self._greet(arena, now_ns)
            case Disconnected(reason):
                return self._go_away(reason, now_ns, is_closed=True)
            case MessageReceived(message):
                self._heard_ns = now_ns
                return self._read(message, now_ns)
            case CloseRequested():
                was_open = self.state is State.OPEN
                self.state = State.CLOSED
                return [Send(Goodbye("closed"))] if was_open else []
            case Tick():
                return self._tick(now_ns)
            case _:
                assert_never(event)

    def _keep(self, event: FramesPushed, now_ns: int) -> list[Action]:
        refused: list[Action] = []
        limits = self.limits
        safe_bytes = min(
            limits.max_frame_bytes, limits.max_message_bytes - max(event.header_bytes, default=0)
        )
        for frame, header_bytes in zip(event.frames, event.header_bytes, strict=True):
            kept = _Kept(frame, header_bytes, now_ns)
            stream, seq = key = _key(frame)
            self._kept[key] = kept
            seqs = self._by_stream.get(stream)
            if seqs is None:
                seqs = self._by_stream[stream] = {}
            seqs[seq] = kept
            # The limits may have become known only after the frame was pushed.
            too_large = None if frame.nbytes <= safe_bytes else self._too_large(kept)
            if too_large is not None:
                refused.append(self._finish(kept, too_large))
            else:
                self._unsent.append(kept)
        return refused

    def _too_large(self, kept: _Kept) -> Reject | None:
        limit = min(self.limits.max_frame_bytes, self.limits.max_message_bytes - kept.header_bytes)
        if kept.frame.nbytes <= limit:
            return None
        text = f"a frame of {kept.frame.nbytes} bytes; the broker's limit is {limit}"
        return _reject_of(kept.frame, Code.FRAME_TOO_LARGE, text)

    def _greet(self, arena: str, now_ns: int) -> list[Action]:
        if self.state is not State.CONNECTING:
            return []
        self.state = State.GREETING
        self._heard_ns = self._said_ns = now_ns
        self._silence_ns = GREETING_TIMEOUT_NS
        return [Send(replace(self._hello, arena=arena))]

    def _go_away(self, reason: str, now_ns: int, *, is_closed: bool) -> list[Action]:
        if self.state is State.AWAY:
            return []
        if self.state is State.OPEN and now_ns - self._opened_ns >= GOOD_SESSION_NS:
            self._backoff.reset()
        self._earlier_by_status.update(self._session.by_status)
        self._session = _Session()
        self._unsent = deque()
        self.state = State.AWAY
        self.away_reason = reason
        self._retry_ns = now_ns + self._backoff.next_delay_ns()
        return [] if is_closed else [Disconnect(reason)]

    def _tick(self, now_ns: int) -> list[Action]:
        if self.state is State.AWAY and self._retry_ns is not None and now_ns >= self._retry_ns:
            self.state = State.CONNECTING
            self._retry_ns = None
            return [Connect()]
        if self.state in {State.GREETING, State.OPEN} and now_ns >= self._heard_ns + self._silence_ns:
            silent_ms = (now_ns - self._heard_ns) // MS
            return self._go_away(f"the broker was silent for {silent_ms} ms", now_ns, is_closed=False)
        if self.state is not State.OPEN:
            return []
        actions = self._send_frames(now_ns)
        if now_ns >= self._said_ns + self._heartbeat_ns:
            self._said_ns = now_ns
            actions.append(Send(Heartbeat()))
        return actions

    # -- what the broker says ------------------------------------------------------------------------

    def _read(self, message: Message, now_ns: int) -> list[Action]:
        match message:
            case Welcome() if self.state is State.GREETING:
                return self._open(message, now_ns)
            case Credit() if self.state is State.OPEN:
                return [*self._take_credit(message), *self._send_frames(now_ns)]
            case Reject() if self.state is State.OPEN:
                return self._take_reject(message)
            case Refused(code, text):
                return self._go_away(f"refused by the broker: {code}: {text}", now_ns, is_closed=False)
            case Goodbye(reason):
                return self._go_away(f"the broker said goodbye ({reason})", now_ns, is_closed=False)
            case _:
                # A heartbeat, or a message of a later protocol revision: the peer is alive.
                return []

    def _open(self, welcome: Welcome, now_ns: int) -> list[Action]:
        self.state = State.OPEN
        self.boot = welcome.boot
        self.limits = welcome.limits
        self.sessions_count += 1
        self._opened_ns = now_ns
        self._heartbeat_ns = welcome.heartbeat_ms * MS
        self._silence_ns = self._heartbeat_ns * HEARTBEATS_MISSED
        self._session = _Session(credits=welcome.credits)
        self._is_shm_open = welcome.is_shm_possible
        actions: list[Action] = []
        self._unsent = deque()
        for kept in tuple(self._kept.values()):
            too_large = self._too_large(kept)
            if too_large is not None:
                actions.append(self._finish(kept, too_large))
            else:
                self._unsent.append(kept)
        if self.sessions_count > 1:
            self.resent_count += len(self._unsent)
        return [*actions, *self._send_frames(now_ns)]

    def _take_credit(self, credit: Credit) -> list[Action]:
        self._session.finished_count = max(self._session.finished_count, credit.finished)
        self._session.by_status.update(credit.by_status)
        actions: list[Action] = []
        for stream, watermark in credit.streams.items():
            seqs = self._by_stream.get(stream, {})
            finished = []
            for seq in seqs:
                if seq > watermark:
                    break
                finished.append(seq)
            for seq in finished:
                kept = seqs.pop(seq)
                kept.is_finished = True
                del self._kept[stream, seq]
                actions.append(Finished(kept.frame, None))
            if finished and not seqs:
                del self._by_stream[stream]
        return actions

    def _take_reject(self, reject: Reject) -> list[Action]:
        if reject.stream is None or reject.seq is None:
            return []
        kept = self._kept.get((reject.stream, reject.seq))
        if kept is None or reject.epoch not in {None, kept.frame.epoch}:
            return []
        return [self._finish(kept, reject)]

    def _finish(self, kept: _Kept, reject: Reject | None) -> Finished:
        stream, seq = _key(kept.frame)
        kept.is_finished = True
        del self._kept[stream, seq]
        seqs = self._by_stream[stream]
        del seqs[seq]
        if not seqs:
            del self._by_stream[stream]
        return Finished(kept.frame, reject)

    # -- sending -------------------------------------------------------------------------------------

    def _send_frames(self, now_ns: int) -> list[Action]:
        if self.state is not State.OPEN:
            return []
        session = self._session
        ready: list[_Kept] = []
        while self._unsent and session.sent_count < session.finished_count + session.credits:
            kept = self._unsent.popleft()
            # Sent on an earlier connection, and its end became known while it waited here.
            if kept.is_finished:
                continue
            session.sent_count += 1
            ready.append(kept)
        if ready:
            self._said_ns = now_ns
        actions: list[Action] = []
        for bundle in _bundles(ready, self.limits, is_shm_open=self._is_shm_open):
            frames = [kept.frame if kept.frame.ttl_ms is None else _aged(kept, now_ns) for kept in bundle]
            if not self._is_shm_open:
                frames = [
                    self._inlined(frame) if type(frame.payload) is ShmRef else frame for frame in frames
                ]
            actions.append(Send(Frames(tuple(frames))))
        return actions


def _key(frame: Frame) -> tuple[str, int]:
    if frame.seq is None:
        raise ValueError(f"a frame of stream {frame.stream} was pushed without a seq")
    return frame.stream, frame.seq


def _aged(kept: _Kept, now_ns: int) -> Frame:
    """Take the time a frame waited here off its time to live. What has none left is sent all the same,
    with the shortest one there is: the broker then publishes its end."""
    frame = kept.frame
    if frame.ttl_ms is None or now_ns - kept.pushed_ns < MS:
        return frame
    return replace(frame, ttl_ms=max(1, frame.ttl_ms - (now_ns - kept.pushed_ns) // MS))


def _bundles(ready: Iterable[_Kept], limits: Limits, *, is_shm_open: bool) -> list[list[_Kept]]:
    """Split frames into messages that respect every limit, in order."""
    max_bytes = min(BUNDLE_BYTES, limits.max_message_bytes)
    bundles: list[list[_Kept]] = []
    count = total_bytes = header_bytes = 0
    for kept in ready:
        payload_bytes = kept.frame.nbytes
        if is_shm_open and isinstance(kept.frame.payload, ShmRef):
            payload_bytes = 0
        count += 1
        total_bytes += payload_bytes + kept.header_bytes
        header_bytes += kept.header_bytes
        if (
            not bundles
            or count > limits.max_frames_per_message
            or total_bytes > max_bytes
            or header_bytes > limits.max_header_bytes
        ):
            bundles.append([])
            count, header_bytes = 1, kept.header_bytes
            total_bytes = payload_bytes + kept.header_bytes
        bundles[-1].append(kept)
    return bundles


def _reject_of(frame: Frame, code: Code, text: str) -> Reject:
    return Reject(code=code, message=text, stream=frame.stream, epoch=frame.epoch, seq=frame.seq)
