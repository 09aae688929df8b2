"""The producer's state machine: exact actions, and random schedules against a toy broker."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hr_toy_broker import ENDPOINTS, ToyBroker

from headrace.clients import producer_session as ps
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
    Welcome,
)

MS = 1_000_000
EPOCH = 77


def frame(seq: int, stream: str = "cam", nbytes: int = 10, **fields: object) -> Frame:
    return Frame(stream, bytes(nbytes), nbytes, (nbytes,), seq=seq, epoch=EPOCH, **fields)  # type: ignore[arg-type]


def pushed(*frames: Frame) -> ps.FramesPushed:
    return ps.FramesPushed(frames, (640,) * len(frames))


def welcome(credit_count: int = 4, boot: int = 1, **limits: int) -> ps.MessageReceived:
    return received(Welcome(boot, credit_count, 1_000, replace(Limits(), **limits), (), ENDPOINTS))


def received(message: Message) -> ps.MessageReceived:
    return ps.MessageReceived(message)


def sent(*seqs: int, stream: str = "cam") -> ps.Send:
    return ps.Send(Frames(tuple(frame(seq, stream) for seq in seqs)))


@pytest.fixture
def session() -> Iterator[ps.ProducerSession]:
    made = ps.ProducerSession(epoch=EPOCH, name="n", host_key="h", jitter=0.5)
    yield made
    made.check_invariants()


@pytest.fixture
def opened(session: ps.ProducerSession) -> ps.ProducerSession:
    session.handle(ps.Tick(), 0)
    session.handle(ps.Connected(), 0)
    session.handle(welcome(), 0)
    return session


def test_a_session_begins_with_connect_hello_welcome(session: ps.ProducerSession) -> None:
    """Frames pushed meanwhile are kept and go out, bundled, with the welcome."""
    assert session.next_wakeup_ns() == 0
    assert session.handle(ps.Tick(), 0) == [ps.Connect()]
    assert session.handle(pushed(frame(0), frame(1)), 1) == []
    assert session.handle(ps.Connected(), 2) == [ps.Send(Hello(EPOCH, "n", "h"))]

    assert session.handle(welcome(), 3) == [sent(0, 1)]
    assert session.state is ps.State.OPEN
    assert session.boot == 1


def test_credits_are_never_exceeded(opened: ps.ProducerSession) -> None:
    """What has no credit waits; a credit lets exactly as many go as it grants."""
    frames = [frame(seq) for seq in range(7)]

    assert opened.handle(pushed(*frames), 1) == [sent(0, 1, 2, 3)]
    assert opened.handle(received(Credit(2, {"cam": 1}, {"ok": 2})), 2) == [
        ps.Finished(frames[0], None),
        ps.Finished(frames[1], None),
        sent(4, 5),
    ]
    assert opened.unfinished_count == 5
    assert opened.by_status() == {"ok": 2}


def test_a_reject_finishes_the_frame_it_names(opened: ps.ProducerSession) -> None:
    """Its neighbours stay; a reject of another epoch, or of nothing kept, changes nothing."""
    opened.handle(pushed(frame(0), frame(1), frame(2)), 1)
    reject = Reject("queue_full", "full", "cam", EPOCH, 1, 20)

    assert opened.handle(received(Reject("x", "", "cam", 5, 1)), 2) == []
    assert opened.handle(received(Reject("x", "", None, None, None)), 2) == []
    assert opened.handle(received(reject), 2) == [ps.Finished(frame(1), reject)]
    assert opened.handle(received(reject), 3) == []
    assert opened.handle(received(Credit(3, {"cam": 2}, {"ok": 2})), 4) == [
        ps.Finished(frame(0), None),
        ps.Finished(frame(2), None),
    ]


def test_unfinished_frames_are_sent_again_in_order(opened: ps.ProducerSession) -> None:
    """After a lost connection the new session gets what is left, by ascending seq, once."""
    opened.handle(pushed(*(frame(seq) for seq in range(6))), 1)
    opened.handle(received(Credit(1, {"cam": 0}, {"ok": 1})), 2)

    assert opened.handle(ps.Disconnected("gone"), 3) == []
    assert opened.state is ps.State.AWAY
    assert opened.handle(ps.Disconnected("gone"), 3) == []
    assert opened.handle(ps.Tick(), 4) == [ps.Connect()]
    opened.handle(ps.Connected(), 5)
    assert opened.handle(welcome(boot=2), 6) == [sent(1, 2, 3, 4)]
    assert opened.handle(received(Credit(2, {"cam": 2}, {"ok": 1})), 7) == [
        ps.Finished(frame(1), None),
        ps.Finished(frame(2), None),
        sent(5),
    ]
    assert opened.by_status() == {"ok": 2}
    assert opened.resent_count == 5
    assert opened.sessions_count == 2


def test_a_watermark_finishes_a_frame_that_waits_to_be_sent_again(opened: ps.ProducerSession) -> None:
    """Its outcome was published between the connections: it is not sent a second time."""
    opened.handle(pushed(*(frame(seq) for seq in range(6))), 1)
    opened.handle(ps.Disconnected("gone"), 2)
    opened.handle(ps.Tick(), 3)
    opened.handle(ps.Connected(), 4)
    assert opened.handle(welcome(credit_count=2), 5) == [sent(0, 1)]

    finished = [ps.Finished(frame(seq), None) for seq in range(4)]
    assert opened.handle(received(Credit(2, {"cam": 3}, {})), 6) == [*finished, sent(4, 5)]


def test_a_silent_broker_is_left_after_three_heartbeats(opened: ps.ProducerSession) -> None:
    """Anything it says counts as a heartbeat; ours goes out once a second."""
    assert opened.next_wakeup_ns() == 1_000 * MS
    assert opened.handle(ps.Tick(), 1_000 * MS) == [ps.Send(Heartbeat())]
    opened.handle(received(Heartbeat()), 1_500 * MS)
    assert opened.handle(ps.Tick(), 4_499 * MS) == [ps.Send(Heartbeat())]

    assert opened.handle(ps.Tick(), 4_500 * MS) == [ps.Disconnect("the broker was silent for 3000 ms")]
    assert opened.state is ps.State.AWAY


def test_a_broker_that_never_welcomes_is_left(session: ps.ProducerSession) -> None:
    """A peer that accepts connections and says nothing is not waited for without end."""
    session.handle(ps.Tick(), 0)
    session.handle(ps.Connected(), 0)

    assert session.next_wakeup_ns() == ps.GREETING_TIMEOUT_NS
    assert isinstance(session.handle(ps.Tick(), ps.GREETING_TIMEOUT_NS)[0], ps.Disconnect)


@pytest.mark.parametrize("message", [Refused("draining", "stopping"), Goodbye("stopping")])
def test_a_refusal_is_no_busy_loop(session: ps.ProducerSession, message: Message) -> None:
    """Sessions that end at once are tried again ever more slowly, up to a second."""
    now = 0
    delays = []
    for _ in range(8):
        session.handle(ps.Tick(), now)
        session.handle(ps.Connected(), now)
        session.handle(welcome(), now)
        assert isinstance(session.handle(received(message), now)[-1], ps.Disconnect)
        wakeup_ns = session.next_wakeup_ns()
        assert wakeup_ns is not None
        assert session.handle(ps.Tick(), wakeup_ns - 1) == []
        delays.append((wakeup_ns - now) // MS)
        now = wakeup_ns

    assert delays == [0, 50, 100, 200, 400, 800, 1_000, 1_000]


def test_a_good_session_resets_the_delay(opened: ps.ProducerSession) -> None:
    """After a session of a second the next attempt comes at once."""
    opened.handle(received(Heartbeat()), 2_000 * MS)
    opened.handle(ps.Disconnected("gone"), 2_000 * MS)

    assert opened.next_wakeup_ns() == 2_000 * MS


def test_bundles_respect_every_limit(session: ps.ProducerSession) -> None:
    """Frames a message, header bytes, message bytes; a frame larger than a bundle goes alone."""
    session.handle(ps.Tick(), 0)
    session.handle(ps.Connected(), 0)
    large = ps.BUNDLE_BYTES + 1
    frames = [frame(0), frame(1), frame(2), frame(3, nbytes=large), frame(4), frame(5)]
    session.handle(ps.FramesPushed(tuple(frames), (640,) * 6), 1)

    actions = session.handle(welcome(credit_count=99, max_frames_per_message=2), 2)

    sizes = [[f.seq for f in a.message.frames] for a in actions if isinstance(a, ps.Send)]  # type: ignore[union-attr]
    assert sizes == [[0, 1], [2], [3], [4, 5]]


def test_headers_bound_a_bundle_too(session: ps.ProducerSession) -> None:
    """Frames with much meta are split before the header passes its limit."""
    session.handle(ps.Tick(), 0)
    session.handle(ps.Connected(), 0)
    session.handle(ps.FramesPushed(tuple(frame(n) for n in range(4)), (4_000,) * 4), 1)

    actions = session.handle(welcome(credit_count=99, max_header_bytes=8_000), 2)

    assert actions == [sent(0, 1), sent(2, 3)]


def test_a_frame_above_the_brokers_limit_is_refused_here(session: ps.ProducerSession) -> None:
    """ZMQ-14: the limit became known after the push; the frame ends with size and limit named, and is
    not sent into a connection that would be cut."""
    session.handle(ps.Tick(), 0)
    session.handle(pushed(frame(0, nbytes=101), frame(1)), 0)
    session.handle(ps.Connected(), 0)

    finished, send = session.handle(welcome(max_frame_bytes=100), 1)

    assert isinstance(finished, ps.Finished)
    assert finished.reject is not None
    assert finished.reject.code == "frame_too_large"
    assert "101" in finished.reject.message
    assert "100" in finished.reject.message
    assert send == sent(1)
    assert isinstance(session.handle(pushed(frame(2, nbytes=101)), 2)[0], ps.Finished)


def test_time_spent_waiting_is_taken_off_the_ttl(session: ps.ProducerSession) -> None:
    """A frame that waited for a broker has less time left; with none left it goes out to expire."""
    session.handle(ps.Tick(), 0)
    session.handle(pushed(frame(0, ttl_ms=500), frame(1, ttl_ms=20)), 0)
    session.handle(ps.Connected(), 100 * MS)

    (send,) = session.handle(welcome(), 100 * MS)

    assert isinstance(send, ps.Send)
    assert isinstance(send.message, Frames)
    assert [f.ttl_ms for f in send.message.frames if isinstance(f, Frame)] == [400, 1]


def test_closing_says_goodbye_and_ends(opened: ps.ProducerSession) -> None:
    """After it nothing is done any more, whatever comes."""
    assert opened.handle(ps.CloseRequested(), 1) == [ps.Send(Goodbye("closed"))]
    assert opened.next_wakeup_ns() is None
    assert opened.handle(pushed(frame(0)), 2) == []
    assert opened.handle(ps.Tick(), 10**12) == []


@pytest.mark.parametrize(
    "event",
    [ps.Connected(), welcome(), received(Credit(9, {"cam": 9}, {})), received(Heartbeat())],
    ids=["connected", "welcome", "credit", "heartbeat"],
)
def test_events_out_of_place_change_nothing(session: ps.ProducerSession, event: ps.Event) -> None:
    """A late message of a connection that is gone is no reason to act."""
    session.handle(pushed(frame(0)), 0)

    assert session.handle(event, 1) == []
    assert session.state is ps.State.AWAY
    assert session.unfinished_count == 1


@pytest.mark.parametrize("seed", range(60))
def test_every_frame_finishes_exactly_once_whatever_fails(seed: int) -> None:
    """Random losses of connections and brokers, random rejects: at the end each frame has one end, the
    broker never saw a seq out of order or a frame beyond the credits."""
    rng = random.Random(seed)
    session = ps.ProducerSession(epoch=EPOCH, jitter=rng.random())
    broker = ToyBroker(1, credit_count=rng.choice([1, 3, 8]))
    to_broker: deque[Message] = deque()
    to_producer: deque[Message] = deque()
    finished: Counter[tuple[str, int | None]] = Counter()
    next_seq: Counter[str] = Counter()
    total = rng.randrange(5, 60)
    now = 0

    def handle(event: ps.Event) -> None:
        for action in session.handle(event, now):
            match action:
                case ps.Finished(done):
                    finished[done.stream, done.seq] += 1
                case ps.Send(message):
                    to_broker.append(message)
                case ps.Connect():
                    to_broker.clear()
                    to_producer.clear()
                    handle(ps.Connected() if rng.random() < 0.8 else ps.Disconnected("no answer"))
                case ps.Disconnect():
                    to_broker.clear()
                    to_producer.clear()
        session.check_invariants()

    def push() -> None:
        stream = rng.choice(["a", "b", "c"])
        seq = next_seq[stream]
        next_seq[stream] += rng.choice([1, 1, 1, 4])
        handle(pushed(frame(seq, stream)))
        pushed_frames.append((stream, seq))

    pushed_frames: list[tuple[str, int]] = []
    for step in range(4_000):
        now += rng.randrange(1, 30) * MS
        is_healed = step > 2_000
        roll = rng.random()
        if len(pushed_frames) < total and roll < 0.2:
            push()
        elif roll < 0.25 and not is_healed:
            to_broker.clear()
            to_producer.clear()
            handle(ps.Disconnected("cut"))
        elif roll < 0.27 and not is_healed:
            broker = ToyBroker(broker.boot + 1, credit_count=rng.choice([1, 3, 8]))
            broker.reject_seqs = frozenset(rng.sample(range(40), 3))
            to_broker.clear()
            to_producer.clear()
            handle(ps.Disconnected("broker died"))
        elif roll < 0.5 and to_broker:
            to_producer.extend(broker.receive(to_broker.popleft()))
        elif roll < 0.7 and to_producer:
            handle(received(to_producer.popleft()))
        elif roll < 0.8:
            to_producer.extend(broker.finish(rng.randrange(1, 4)))
        handle(ps.Tick())
        if is_healed and len(pushed_frames) == total and not session.unfinished_count:
            break

    assert session.unfinished_count == 0, f"seed {seed}: {session.unfinished_count} never ended"
    assert finished == Counter(pushed_frames)
