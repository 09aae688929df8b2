"""Run a real broker in a thread of the test, and talk to it with bare sockets."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
import zmq

from headrace.broker.process import Broker
from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.broker.shell_settings import ShellSettings
from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    ClassProfile,
    Done,
    EmulatedCost,
    Endpoints,
    Frame,
    FrameResult,
    Frames,
    ImageInput,
    Limits,
    Message,
    ModelProfile,
    ModelSpec,
    Outcome,
    Outcomes,
    Ready,
    ReplayReply,
    Reply,
    Request,
    Setup,
    SizeClassSpec,
    Status,
    Subscribed,
    TensorSpec,
    WorkerHello,
)

#: How long anything in a test may take before it counts as lost.
TIMEOUT_S = 10.0

#: Header limit and message limit of what tests read.
LIMITS = Limits()

SMALL = SizeClassSpec("small", 16, 16, max_batch_size=4)

AnyMessage = TypeVar("AnyMessage")


def emulated_model(
    name: str = "m", *classes: SizeClassSpec, base_ms: float = 0.1, policy: ClassPolicy | None = None
) -> ModelSettings:
    """Return a model without files. A worker of its engine needs no device."""
    spec = ModelSpec(
        name=name,
        version="1",
        image=ImageInput(),
        size_classes=classes or (SMALL,),
        emulated=EmulatedCost(base_ms, 0.01),
    )
    return ModelSettings(spec, {"": policy or ClassPolicy()})


def broker_settings(
    *models: ModelSettings, core: dict[str, Any] | None = None, **shell: Any
) -> ShellSettings:
    """Return settings with any free port for each socket and short heartbeats.

    ``core`` and ``shell`` override fields of CoreSettings and ShellSettings.
    """
    core_settings = CoreSettings(models=models or (emulated_model(),), heartbeat_ms=500)
    defaults: dict[str, Any] = {"port": 0, "http_port": None, "grace_ms": 2_000}
    return ShellSettings(core=replace(core_settings, **(core or {})), **(defaults | shell))


def ipc_addresses(folder: Path) -> dict[str, str]:
    """Return an ipc address for each socket, as overrides for broker_settings()."""
    return {name: f"ipc://{folder}/{name}" for name in ("frames", "intake", "results", "workers", "control")}


class BrokerThread:
    """A broker in a thread. ``endpoints`` are its addresses; leaving the block stops it and raises what it
    raised."""

    def __init__(self, settings: ShellSettings) -> None:
        self._settings = settings
        self._is_ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="broker", daemon=True)
        self._broker: Broker | None = None

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def endpoints(self) -> Endpoints:
        return self.broker.endpoints

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> Self:
        if not structlog.is_configured():  # its default writes every batch of a test
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
        self._thread.start()
        assert self._is_ready.wait(TIMEOUT_S), "the broker did not start in time"
        if self._error is not None:
            self._thread.join(TIMEOUT_S)
            raise self._error
        return self

    def stop(self) -> None:
        """Stop it now, without draining; frames may stay unfinished."""
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # it has just closed by itself
                self.broker.stop()
        self.join()

    def drain(self) -> None:
        """Ask it to drain, as a first SIGTERM does."""
        self.broker.request_drain()

    def join(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until it has ended; raise what it raised."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the broker did not end within {timeout_s} s"
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
            return
        try:
            self.stop()
        except BaseException as broker_error:
            # The test's own error is the one to see, but this is often its cause.
            error.add_note(f"the broker's loop had ended: {broker_error!r}")

    def _main(self) -> None:
        try:
            with Broker(self._settings) as self._broker:
                self._is_ready.set()
                self._broker.run()
        except BaseException as error:
            self._error = error
        finally:
            self._is_ready.set()


@contextlib.contextmanager
def running_broker(settings: ShellSettings | None = None) -> Iterator[BrokerThread]:
    """Run a broker for the length of the block."""
    with BrokerThread(settings or broker_settings()) as broker:
        yield broker


class Peer:
    """A bare socket of a given kind, connected to one address. Leaving the block closes it at once."""

    def __init__(self, kind: int, address: str, **options: Any) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(linger=0)

    def send(self, message: Message) -> None:
        self.socket.send_multipart(codec.encode(message))

    def send_parts(self, *parts: bytes) -> None:
        self.socket.send_multipart(list(parts))

    def receive_parts(self, timeout_s: float = TIMEOUT_S) -> list[bytes]:
        if not self.socket.poll(timeout_s * 1000):
            raise AssertionError(f"nothing arrived within {timeout_s} s")
        return self.socket.recv_multipart()

    def receive(self, timeout_s: float = TIMEOUT_S) -> Message:
        return codec.decode(self.receive_parts(timeout_s), LIMITS)

    def expect(self, kind: type[AnyMessage], timeout_s: float = TIMEOUT_S) -> AnyMessage:
        """Return the next message of this class; others (heartbeats, credits) are passed over."""
        while True:
            message = self.receive(timeout_s)
            if isinstance(message, kind):
                return message

    def has_nothing(self, wait_s: float) -> bool:
        return not self.socket.poll(wait_s * 1000)


class Caller(Peer):
    """Calls control methods."""

    def __init__(self, endpoints: Endpoints) -> None:
        super().__init__(zmq.DEALER, endpoints.control)
        self._next_id = 0

    def call(self, method: str, **params: Any) -> Reply:
        self._next_id += 1
        self.send(Request(self._next_id, method, params))
        reply = self.expect(Reply)
        assert reply.id == self._next_id
        return reply

    def replay(self, **params: Any) -> ReplayReply:
        self._next_id += 1
        self.send(Request(self._next_id, "replay", params))
        return self.expect(ReplayReply)


class Listener(Peer):
    """A subscriber to whole topics. The constructor returns once the subscription is confirmed."""

    def __init__(self, endpoints: Endpoints, topic: bytes = b"", **options: Any) -> None:
        super().__init__(zmq.SUB, endpoints.results, SUBSCRIBE=topic, **options)
        while True:
            parts = self.receive_parts()
            if parts[0] == topic and isinstance(codec.decode_published(parts, LIMITS), Subscribed):
                return

    def outcomes(self, count: int, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
        """Return the next outcomes, at least ``count``."""
        found: list[Outcome] = []
        while len(found) < count:
            message = codec.decode_published(self.receive_parts(timeout_s), LIMITS)
            if isinstance(message, Outcomes):
                found += message.outcomes
        return found


class Worker(Peer):
    """A worker by hand: says hello and READY in the constructor, then runs what the test tells it to."""

    def __init__(self, endpoints: Endpoints, worker: str = "w1", instance: int = 1, slots: int = 2) -> None:
        super().__init__(zmq.DEALER, endpoints.workers)
        self.worker = worker
        self.instance = instance
        self.send(WorkerHello(worker, instance, "", "cpu", "emulated", "0"))
        self.setup = self.expect(Setup)
        self.send(ready_for(self.setup.models, worker, instance, slots))

    def finish(self, batch: Batch) -> None:
        """Answer a batch: each frame's result holds its seq."""
        results = tuple(FrameResult(Status.OK, outputs={"seq": frame.seq or 0}) for frame in batch.frames)
        self.send(Done(batch.batch, results, staged_us=1, ran_us=2, total_us=3))


def serve(worker: Worker, count: int) -> None:
    """Finish batches until so many frames are done."""
    while count > 0:
        batch = worker.expect(Batch)
        worker.finish(batch)
        count -= len(batch.frames)


def ready_for(models: tuple[ModelSpec, ...], worker: str, instance: int, slots: int = 2) -> Ready:
    """Return a READY for every class of the models, buckets 1, 2, 4."""
    profiles = tuple(
        ModelProfile(
            spec.name,
            spec.version,
            tuple(ClassProfile(c, ((1, 1.0), (2, 1.5), (4, 2.0))) for c in spec.size_classes),
            (TensorSpec("images", "float32", (3, -1, -1)),),
        )
        for spec in models
    )
    return Ready(worker, instance, slots, profiles)


def frame(
    stream: str = "cam", seq: int | None = None, *, side: int = 8, fill: int = 0, **fields: Any
) -> Frame:
    """Return a raw uint8 frame [side, side, 3], every byte ``fill``."""
    payload = bytes([fill]) * (side * side * 3)
    return Frame(stream, payload, len(payload), (side, side, 3), seq=seq, **fields)


def frames(*items: Frame) -> Frames:
    return Frames(items)
