"""Helpers to drive the broker's core: short constructors, and a driver that keeps the time.

Routing ids are short bytes (b"p1", b"w1"); times are milliseconds in tests and nanoseconds in the core.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.protocol.messages import (
    BadFrame,
    Batch,
    ClassProfile,
    Credit,
    Done,
    Failed,
    Frame,
    FrameResult,
    Hello,
    ImageInput,
    Keep,
    ModelProfile,
    ModelSpec,
    Outcome,
    Ready,
    Reject,
    SizeClassSpec,
    Status,
    WorkerHello,
)

MS = 1_000_000
BOOT = 77
EPOCH = 1

SMALL = SizeClassSpec("small", 64, 64, max_batch_size=4)
LARGE = SizeClassSpec("large", 256, 256, max_batch_size=2)

_A = TypeVar("_A")


def make_spec(
    name: str = "mean", version: str = "1", classes: tuple[SizeClassSpec, ...] = (SMALL, LARGE)
) -> ModelSpec:
    """Return an image model with the given size classes."""
    return ModelSpec(name, version, image=ImageInput(), size_classes=classes)


def make_settings(*specs: ModelSpec, policy: ClassPolicy | None = None, **changes: object) -> CoreSettings:
    """Return settings for the given models (one with a small and a large class by default)."""
    policies = {} if policy is None else {"": policy}
    models = tuple(ModelSettings(spec, policies) for spec in specs or (make_spec(),))
    return replace(CoreSettings(models=models), **changes)  # type: ignore[arg-type]


def frame(
    stream: str = "cam-1",
    seq: int | None = 0,
    *,
    size: int = 32,
    epoch: int | None = EPOCH,
    priority: int = 0,
    ttl_ms: int | None = None,
    keep: Keep = Keep.ALL,
    model: str = "",
    nbytes: int | None = None,
) -> Frame:
    """Return a square gray frame of ``size`` pixels a side."""
    return Frame(
        stream=stream,
        payload=b"",
        nbytes=size * size if nbytes is None else nbytes,
        shape=(size, size, 1),
        seq=seq,
        epoch=epoch,
        model=model,
        priority=priority,
        ttl_ms=ttl_ms,
        keep=keep,
    )


def ok(value: int = 0) -> FrameResult:
    """Return a good result."""
    return FrameResult(Status.OK, outputs=value)


def hello(worker: str, instance: int = 1) -> WorkerHello:
    """Return a worker's first word."""
    return WorkerHello(worker, instance, "host", "cpu", "cpu", "0.1", pid=instance)


def profile(
    spec: ModelSpec, *, per_batch_ms: float = 10.0, per_frame_ms: float = 0.0, limit: int | None = None
) -> ModelProfile:
    """Return a profile of all classes of a model: T(b) = per_batch_ms + per_frame_ms * b."""
    classes = []
    for size_class in spec.size_classes:
        largest = size_class.max_batch_size if limit is None else limit
        sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < largest] + [largest]
        buckets = tuple((size, per_batch_ms + per_frame_ms * size) for size in sizes)
        classes.append(ClassProfile(size_class, buckets))
    return ModelProfile(spec.name, spec.version, tuple(classes), ())


class CoreDriver:
    """A core, its time, and everything it has asked for so far."""

    def __init__(self, settings: CoreSettings | None = None, boot: int = BOOT) -> None:
        self.settings = make_settings() if settings is None else settings
        self.core = BrokerCore(self.settings, boot)
        self.now_ns = 1_000 * MS
        self.actions: list[act.Action] = []

    # -- events -------------------------------------------------------------------------------------

    def send(self, event: events.Event) -> list[act.Action]:
        """Hand over one event now; return what the core asks for."""
        done = self.core.handle(event, self.now_ns)
        self.actions += done
        return done

    def tick(self) -> list[act.Action]:
        """End the turn."""
        return self.send(events.Tick())

    def push(self, *frames: Frame | BadFrame, peer: bytes | None = b"p1") -> list[act.Action]:
        """Hand over frames of one peer, without a Tick."""
        done: list[act.Action] = []
        for one in frames:
            done += self.send(events.FrameArrived(peer, one))
        return done

    def join_producer(self, peer: bytes = b"p1", epoch: int = EPOCH) -> list[act.Action]:
        """A producer says Hello."""
        return self.send(events.ProducerArrived(peer, Hello(epoch, peer.decode())))

    def join_worker(
        self,
        peer: bytes = b"w1",
        *,
        slots: int = 2,
        instance: int = 1,
        worker: str | None = None,
        profiles: Iterable[ModelProfile] | None = None,
        per_batch_ms: float = 10.0,
        per_frame_ms: float = 0.0,
        limit: int | None = None,
    ) -> list[act.Action]:
        """A worker says WorkerHello and READY (without a Tick)."""
        name = peer.decode() if worker is None else worker
        done = self.send(events.WorkerArrived(peer, hello(name, instance)))
        if profiles is None:
            profiles = [
                profile(model.spec, per_batch_ms=per_batch_ms, per_frame_ms=per_frame_ms, limit=limit)
                for model in self.settings.models
            ]
        ready = Ready(name, instance, slots, tuple(profiles))
        return done + self.send(events.WorkerReady(peer, ready))

    def done(
        self, sent: act.SendBatch, *, results: Iterable[FrameResult] | None = None, ran_ms: float = 10.0
    ) -> list[act.Action]:
        """The worker answers a batch; by default each frame's result is its seq."""
        if results is None:
            results = [ok(one.seq or 0) for one in sent.batch.frames]
        message = Done(sent.batch.batch, tuple(results), staged_us=100, ran_us=int(ran_ms * 1000), total_us=0)
        return self.send(events.BatchDone(sent.peer, message))

    def fail(self, sent: act.SendBatch, code: str = "batch_failed") -> list[act.Action]:
        """The worker fails a batch as a whole."""
        return self.send(events.BatchFailed(sent.peer, Failed(sent.batch.batch, code, "it broke")))

    # -- time ---------------------------------------------------------------------------------------

    def wait(self, ms: float) -> list[act.Action]:
        """Let time pass as the shell would: a Tick at every wake-up on the way, and one at the end."""
        until_ns = self.now_ns + int(ms * MS)
        done: list[act.Action] = []
        while True:
            wakeup_ns = self.core.next_wakeup_ns()
            if wakeup_ns is None or wakeup_ns >= until_ns:
                break
            self.now_ns = max(wakeup_ns, self.now_ns)
            done += self.tick()
            after_ns = self.core.next_wakeup_ns()
            assert after_ns is None or after_ns > self.now_ns, "the core spins"
        self.now_ns = until_ns
        return done + self.tick()

    def hear(self, *peers: bytes) -> None:
        """Heartbeats of peers."""
        for peer in peers:
            self.send(events.PeerHeard(peer, is_heartbeat=True))


def only(actions: Iterable[act.Action], kind: type[_A]) -> list[_A]:
    """Return the actions of one kind, in order."""
    return [action for action in actions if isinstance(action, kind)]


def batches(actions: Iterable[act.Action]) -> list[act.SendBatch]:
    """Return the batches sent."""
    return only(actions, act.SendBatch)


def outcomes(actions: Iterable[act.Action]) -> list[Outcome]:
    """Return the outcomes published."""
    return [action.outcome for action in only(actions, act.PublishOutcome)]


def ends(actions: Iterable[act.Action]) -> list[tuple[str, int, str, str]]:
    """Return (stream, seq, status, code) of the outcomes published."""
    return [(one.stream, one.seq, one.status.value, str(one.code)) for one in outcomes(actions)]


def rejects(actions: Iterable[act.Action]) -> list[Reject]:
    """Return the rejects sent."""
    return [action.reject for action in only(actions, act.SendReject)]


def grants(actions: Iterable[act.Action]) -> list[tuple[bytes, Credit]]:
    """Return the credit granted."""
    return [(action.peer, action.credit) for action in only(actions, act.GrantCredit)]


def seqs(batch: Batch) -> list[int | None]:
    """Return the seqs in a batch."""
    return [one.seq for one in batch.frames]
