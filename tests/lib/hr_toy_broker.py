"""A broker of a few lines for the client sessions: no queues, no workers, the same promises.

It checks what a good producer owes (seqs ascend within a connection and an epoch, credits are kept) and
gives a subscriber what it needs (pub_seq, a ring, positions, replay).
"""

from __future__ import annotations

from collections import deque

from headrace.protocol.messages import (
    Credit,
    Endpoints,
    Frame,
    Frames,
    Heartbeat,
    Hello,
    Limits,
    Message,
    Outcome,
    Outcomes,
    Reject,
    ReplayReply,
    Reply,
    Request,
    Status,
    Welcome,
)

ENDPOINTS = Endpoints(1, "tcp://b:1", "tcp://b:2", "tcp://b:3", "tcp://b:4", "tcp://b:5", "", "")


class ToyBroker:
    """One life of a broker with one producer connection."""

    def __init__(
        self, boot: int, *, credit_count: int = 4, ring: int = 1_000, before: ToyBroker | None = None
    ) -> None:
        """``before`` is the broker whose journal this one goes on with; None = no journal."""
        self.earlier: dict[int, ToyBroker] = {} if before is None else before.earlier | {before.boot: before}
        self.boot = boot
        self.published: list[Outcome] = []
        self.reject_seqs: frozenset[int] = frozenset()
        self._credits = credit_count
        self._limits = Limits()
        self._ring = ring
        self._rings: dict[str, deque[Outcome]] = {}
        self._next_pub_seq: dict[str, int] = {}
        self._admitted: deque[Frame] = deque()
        self._last_seq: dict[str, int] = {}
        self._done: dict[tuple[str, int], Status] = {}
        self._released: dict[str, int] = {}
        self._received = self._finished = 0
        self._by_status: dict[str, int] = {}

    # -- the producer's side -------------------------------------------------------------------------

    def receive(self, message: Message) -> list[Message]:
        match message:
            case Hello():
                self._received = self._finished = 0
                self._by_status = {}
                return [Welcome(self.boot, self._credits, 1_000, self._limits, (), ENDPOINTS)]
            case Frames(frames):
                assert len(frames) <= self._limits.max_frames_per_message
                answers: list[Message] = []
                for frame in frames:
                    assert isinstance(frame, Frame)
                    answers += self._take(frame)
                return answers
            case Heartbeat():
                return [Heartbeat()]
            case _:
                return []

    def _take(self, frame: Frame) -> list[Message]:
        assert frame.seq is not None
        self._received += 1
        assert self._received <= self._finished + self._credits, "the producer exceeded its credits"
        key = (frame.stream, frame.seq)
        last = self._last_seq.get(frame.stream, -1)
        if frame.seq in self.reject_seqs:
            self._last_seq[frame.stream] = max(last, frame.seq)
            self._finished += 1
            if key not in self._done:
                self._done[key] = Status.REJECTED
                self._publish(frame, Status.REJECTED)
            return [Reject("queue_full", "full", *_name(frame)), self._credit({})]
        if key in self._done:
            self._finished += 1
            return [self._credit({frame.stream: self._released[frame.stream]})]
        if frame.seq <= last:
            return []  # admitted and unfinished: sent again
        assert frame.seq > last, "the producer sent its seqs out of order"
        self._last_seq[frame.stream] = frame.seq
        self._admitted.append(frame)
        return []

    def finish(self, count: int) -> list[Message]:
        """Publish the outcomes of the oldest admitted frames."""
        moved: dict[str, int] = {}
        for _ in range(min(count, len(self._admitted))):
            frame = self._admitted.popleft()
            assert frame.seq is not None
            self._done[frame.stream, frame.seq] = Status.OK
            self._released[frame.stream] = moved[frame.stream] = frame.seq
            self._finished += 1
            self._by_status["ok"] = self._by_status.get("ok", 0) + 1
            self._publish(frame, Status.OK)
        return [self._credit(moved)] if moved else []

    @property
    def unfinished_count(self) -> int:
        return len(self._admitted)

    def _credit(self, moved: dict[str, int]) -> Credit:
        return Credit(self._finished, moved, dict(self._by_status))

    # -- the subscriber's side -----------------------------------------------------------------------

    def _publish(self, frame: Frame, status: Status) -> None:
        stream, epoch, seq = frame.stream, frame.epoch or 0, frame.seq or 0
        pub_seq = self._next_pub_seq.get(stream, 0)
        self._next_pub_seq[stream] = pub_seq + 1
        outcome = Outcome(stream, epoch, seq, self.boot, pub_seq, status)
        self._rings.setdefault(stream, deque(maxlen=self._ring)).append(outcome)
        self.published.append(outcome)

    def publish(self, stream: str, seq: int, epoch: int = 9) -> Outcomes:
        """Publish an outcome out of nothing."""
        self._publish(Frame(stream, b"x", 1, (1,), seq=seq, epoch=epoch), Status.OK)
        return Outcomes((self.published[-1],))

    def answer(self, request: Request) -> Message:
        params = request.params
        if request.method == "positions":
            streams = {s: [self._rings[s][0].pub_seq, n] for s, n in self._next_pub_seq.items()}
            result = {"boot": self.boot, "streams": streams, "streams_next": ""}
            if params.get("earlier") and self.earlier:
                result["earlier_boots"] = [[boot, True] for boot in self.earlier]
                spans: dict[str, list[list[int]]] = {}
                for boot, broker in self.earlier.items():
                    for stream, end in broker._next_pub_seq.items():
                        spans.setdefault(stream, []).append([boot, broker._rings[stream][0].pub_seq, end])
                result["earlier"] = spans
            return Reply(request.id, result)  # type: ignore[arg-type]
        assert request.method == "replay"
        stream, first, last = params["stream"], params["first"], params["last"]
        assert isinstance(stream, str)
        assert isinstance(first, int)
        assert isinstance(last, int)
        boot = params["boot"]
        if boot in self.earlier:
            return self.earlier[boot].answer(request)
        if boot != self.boot:
            return ReplayReply(request.id, (), ((first, last + 1),))
        ring = self._rings.get(stream, deque())
        oldest = ring[0].pub_seq if ring else self._next_pub_seq.get(stream, 0)
        missed = ((first, min(last + 1, oldest)),) if first < oldest else ()
        return ReplayReply(request.id, tuple(o for o in ring if first <= o.pub_seq <= last), missed)


def _name(frame: Frame) -> tuple[str, int | None, int | None]:
    return frame.stream, frame.epoch, frame.seq
