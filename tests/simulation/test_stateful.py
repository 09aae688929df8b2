"""Hypothesis drives the core, and shrinks what breaks it; the simulator's referee judges every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hr_sim.models import core_settings
from hr_sim.options import draw
from hr_sim.referee import Referee
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.protocol.messages import (
    BadFrame,
    ClassProfile,
    Done,
    Failed,
    Frame,
    FrameResult,
    Hello,
    Keep,
    ModelProfile,
    Outcome,
    Ready,
    Status,
    WorkerHello,
)

MS = 1_000_000
BOOT = 7

SETTINGS = replace(
    core_settings(replace(draw(0), classes=2, max_batch_size=4, heartbeat_ms=100, stuck_ms=500)),
    credits_per_producer=8,
    max_bytes=2_000,
    max_queued_per_stream=6,
    max_unfinished_per_stream=8,
    ageing_ms=20,
    check_deadlines=False,
)


class CoreMachine(RuleBasedStateMachine):
    """A core with its referee, two producers, and workers that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.core = BrokerCore(SETTINGS, BOOT)
        self.referee = Referee(SETTINGS, BOOT, self)
        self.now_ns = 1_000 * MS
        self.last_id = 0
        self.last_peer = 0
        self.next_seq: dict[tuple[int, str], int] = {}
        self.sent: list[Frame] = []
        self.producers: dict[int, bytes] = {}
        self.held: dict[bytes, list[act.SendBatch]] = {}
        self.late: list[act.SendBatch] = []

    # -- what the referee asks ----------------------------------------------------------------------

    def published(self, _boot: int, _outcome: Outcome, _frame_id: int | None) -> None:
        """Nobody subscribes here."""

    def allowed_lateness_ns(self, _due_ns: int) -> int:
        """Time passes in steps of any size here."""
        return 10_000 * MS

    # -- driving ------------------------------------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        actions = self.core.handle(event, self.now_ns)
        self.referee.observe(event, actions, self.now_ns)
        for action in actions:
            match action:
                case act.SendBatch(peer):
                    self.held.setdefault(peer, []).append(action)
                case act.Report("worker lost"):
                    self.forget_lost()

    def forget_lost(self) -> None:
        for peer in tuple(self.held):
            if peer not in self.core.workers.by_peer:
                self.late += self.held.pop(peer)

    def new_peer(self, kind: bytes) -> bytes:
        self.last_peer += 1
        return kind + self.last_peer.to_bytes(2, "big")

    # -- producers ----------------------------------------------------------------------------------

    @rule(epoch=st.sampled_from((1, 2)))
    def say_hello(self, epoch: int) -> None:
        """A producer connects, or comes back; it sends again what is unfinished."""
        peer = self.producers[epoch] = self.new_peer(b"p")
        self.tell(events.ProducerArrived(peer, Hello(epoch)))
        unfinished = [f for f in self.sent if f.epoch == epoch and self.is_unfinished(f)]
        for frame in unfinished:
            self.tell(events.FrameArrived(peer, frame))

    def is_unfinished(self, frame: Frame) -> bool:
        seen = self.referee.frames.get(frame.pts_ns or 0)
        return seen is not None and seen.status is None

    @precondition(lambda self: self.producers)
    @rule(
        data=st.data(),
        stream=st.sampled_from(("a", "b")),
        side=st.sampled_from((3, 4, 8, 20)),
        priority=st.sampled_from((0, 0, 1)),
        ttl_ms=st.sampled_from((None, None, 5, 60)),
        keep=st.sampled_from((Keep.ALL, Keep.ALL, Keep.LATEST)),
        is_bad=st.integers(0, 9).map(lambda number: number == 9),
    )
    def push(
        self, data: Any, stream: str, side: int, priority: int, ttl_ms: int | None, keep: Keep, is_bad: bool
    ) -> None:
        """A producer that has credit sends a frame."""
        epoch = data.draw(st.sampled_from(sorted(self.producers)))
        peer = self.producers[epoch]
        session = self.referee.sessions.get(peer)
        is_full = session is not None and session.received_count - session.concluded_count >= 8
        if is_full or peer not in self.core.producers.by_peer:
            return
        name = f"{stream}{epoch}"
        seq = self.next_seq.get((epoch, name), 0)
        self.next_seq[epoch, name] = seq + 1
        self.last_id += 1
        content = bytes(side * side * 3)
        frame = Frame(
            name,
            content,
            len(content),
            (side, side, 3),
            seq=seq,
            epoch=epoch,
            priority=priority,
            ttl_ms=ttl_ms,
            keep=keep,
            pts_ns=self.last_id,
        )
        if is_bad:
            bad = BadFrame("bad_dtype", "bool", name, seq, epoch, self.last_id)
            self.tell(events.FrameArrived(peer, bad))
            return
        self.sent.append(frame)
        self.tell(events.FrameArrived(peer, frame))

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), is_goodbye=st.booleans())
    def lose_producer(self, data: Any, is_goodbye: bool) -> None:
        """A producer says goodbye, or its connection is found gone."""
        epoch = data.draw(st.sampled_from(sorted(self.producers)))
        peer = self.producers.pop(epoch)
        self.tell(events.ProducerLeft(peer) if is_goodbye else events.PeerUnreachable(peer))

    # -- workers ------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(("w1", "w2")), instance=st.integers(1, 2), slots=st.integers(1, 2))
    def join(self, name: str, instance: int, slots: int) -> None:
        """A worker connects, as the same process or another one under the same id."""
        peer = self.new_peer(b"w")
        self.tell(events.WorkerArrived(peer, WorkerHello(name, instance, "", "", "", "")))
        if peer not in self.core.workers.by_peer:
            return
        profiles = tuple(
            ModelProfile(
                spec.spec.name,
                spec.spec.version,
                tuple(ClassProfile(c, ((1, 5.0), (4, 10.0))) for c in spec.spec.size_classes),
                (),
            )
            for spec in SETTINGS.models
        )
        self.tell(events.WorkerReady(peer, Ready(name, instance, slots, profiles)))

    @precondition(lambda self: any(self.held.values()))
    @rule(
        data=st.data(), answer=st.sampled_from(("ok", "ok", "ok", "damaged", "short", "failed", "shutdown"))
    )
    def answer(self, data: Any, answer: str) -> None:
        """A worker answers one of its batches."""
        peer = data.draw(st.sampled_from(sorted(p for p, batches in self.held.items() if batches)))
        sent = data.draw(st.sampled_from(self.held[peer]))
        self.held[peer].remove(sent)
        number, frames = sent.batch.batch, sent.batch.frames
        if answer in {"failed", "shutdown"}:
            code = "batch_failed" if answer == "failed" else "shutdown"
            self.tell(events.BatchFailed(peer, Failed(number, code, "no")))
            return
        results = [FrameResult(Status.OK, outputs=frame.pts_ns) for frame in frames]
        if answer == "damaged":
            results[0] = FrameResult(Status.ERROR, "damaged_image", "cut")
        if answer == "short":
            results.pop()
        self.tell(events.BatchDone(peer, Done(number, tuple(results), 10, 5_000, 6_000)))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def answer_late(self, data: Any) -> None:
        """A worker that was taken for lost answers after all."""
        sent = data.draw(st.sampled_from(self.late))
        self.late.remove(sent)
        results = tuple(FrameResult(Status.OK, outputs=-1) for _ in sent.batch.frames)
        self.tell(events.BatchDone(sent.peer, Done(sent.batch.batch, results)))

    @precondition(lambda self: self.core.workers.by_peer)
    @rule(data=st.data(), is_goodbye=st.booleans())
    def lose_worker(self, data: Any, is_goodbye: bool) -> None:
        """A worker says goodbye, or its connection is found gone."""
        peer = data.draw(st.sampled_from(sorted(self.core.workers.by_peer)))
        self.tell(events.WorkerLeft(peer) if is_goodbye else events.PeerUnreachable(peer))
        self.forget_lost()

    # -- time ---------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from((0, 1, 5, 20, 70, 120)), is_heard=st.booleans())
    def wait(self, ms: int, is_heard: bool) -> None:
        """Time passes; who lives is heard from, or not."""
        self.now_ns += ms * MS
        if is_heard:
            for peer, worker in list(self.core.workers.by_peer.items()):
                claim = self.core.workers.claims.get(worker.id)
                probe = None if claim is None else claim.probe
                self.tell(events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe))
            for peer in list(self.core.producers.by_peer):
                self.tell(events.PeerHeard(peer, is_heartbeat=True))
        self.tell(events.Tick())

    @invariant()
    def everything_adds_up(self) -> None:
        """The core agrees with itself and with the referee."""
        self.core.check_invariants()
        self.referee.compare(self.core.account)

    def teardown(self) -> None:
        """Let the grace end: whatever was admitted has its outcome."""
        self.tell(events.DrainRequested())
        self.tell(events.GraceEnded())
        assert self.core.is_drained
        self.referee.demand_finished()
        self.everything_adds_up()


class TestCore(CoreMachine.TestCase):  # type: ignore[misc, name-defined]
    """Every schedule of up to 50 steps leaves each frame exactly one outcome."""

    settings = settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
