"""The broker's side by hand: one ROUTER that is workers and control socket at once.

It answers Discover and ``fetch`` by itself and sends what the test tells it to, so a test sees each message
of the worker in its order.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq

from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Discover,
    Done,
    Endpoints,
    Heartbeat,
    Limits,
    Message,
    ModelSpec,
    Ready,
    Reply,
    Request,
    Setup,
    Value,
    WorkerHello,
)

#: How long anything in a test may take before it counts as lost.
TIMEOUT_S = 20.0

AnyMessage = TypeVar("AnyMessage")


class FakeBroker:
    """See the module. ``files`` maps sha256 to content. Leaving the block closes it at once."""

    def __init__(
        self,
        folder: Path,
        *models: ModelSpec,
        files: dict[str, bytes] | None = None,
        boot: int = 1,
        heartbeat_ms: int = 1_000,
    ) -> None:
        self.address = f"ipc://{folder}/broker"
        self.models, self.files = models, files or {}
        self.boot, self.heartbeat_ms = boot, heartbeat_ms
        self.peer = b""
        self.fetched_count = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()

    @property
    def endpoints(self) -> Endpoints:
        each = self.address
        return Endpoints(self.boot, each, each, each, each, each, "", "host")

    def send(self, message: Message, peer: bytes | None = None) -> None:
        self.socket.send_multipart([peer or self.peer, *codec.encode(message)])

    def receive(self, timeout_s: float = TIMEOUT_S) -> Message:
        """Return the next message that is not answered here; the peer of a worker is remembered."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise AssertionError(f"nothing but heartbeats arrived within {timeout_s} s")
            peer, *parts = self.socket.recv_multipart()
            message = codec.decode(parts, Limits())
            match message:
                case Discover():
                    self.send(self.endpoints, peer)
                case Request(number, "fetch", params):
                    self.fetched_count += 1
                    self.send(self._chunk(number, params), peer)
                case Heartbeat():
                    self.send(Heartbeat(), peer)
                case _:
                    self.peer = peer
                    return message

    def expect(self, kind: type[AnyMessage], timeout_s: float = TIMEOUT_S) -> AnyMessage:
        message = self.receive(timeout_s)
        assert isinstance(message, kind), message
        return message

    def welcome(self) -> Ready:
        """Take a worker in: hello, set-up, files, READY."""
        self.expect(WorkerHello)
        self.send(Setup(self.boot, self.heartbeat_ms, Limits(), self.models, self.endpoints))
        return self.expect(Ready)

    def run(self, batch: Batch) -> Done:
        self.send(batch)
        return self.expect(Done)

    def _chunk(self, number: int, params: dict[str, Value]) -> Reply:
        content = self.files.get(str(params["sha256"]))
        if content is None:
            return Reply(number, code="not_found", message="no such file")
        offset, nbytes = int(str(params["offset"])), int(str(params["nbytes"]))
        return Reply(number, {"total": len(content)}, payloads=(content[offset : offset + nbytes],))
