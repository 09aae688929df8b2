"""The baselines of transport and mean: what a person writes with pyzmq in an afternoon.

``forward`` is a ROUTER/ROUTER forwarder: a worker with a free slot gets up to 32 waiting frames as one
message; the answers go back to their producers, bundled by producer. ``proxy`` is zmq.proxy between a
ROUTER and a DEALER, one message a frame. Neither checks, orders, retries or counts anything.

Messages. Producer to forwarder: [number, payload]. Forwarder to worker: [routing ids and numbers, payload
...]; worker to forwarder: [the same, results]; forwarder to producer: [number, result, number, result ...].
Proxied: the worker gets [routing id, number, payload] and answers [routing id, number, result].
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

MAX_BATCH = 32

#: Batches a worker holds, as ours does by default.
SLOTS = 2

#: Messages taken in one turn.
TURN = 256

#: Payloads up to here are copied out of ZeroMQ: that is cheaper than an object for each.
COPY_BYTES = 64 * 1024

_NUMBER = struct.Struct("<Q")

Function = Callable[[list[Any]], list[bytes]]


def forward(context: zmq.Context[Any], announce: Callable[[str, str], None], payload_bytes: int) -> None:
    """Forward until the context is terminated. ``announce`` is told both addresses."""
    front, back = _bound(context, zmq.ROUTER), _bound(context, zmq.ROUTER)
    announce(_address(front), _address(back))
    is_copied = payload_bytes <= COPY_BYTES
    waiting: deque[tuple[bytes, bytes, Any]] = deque()
    free: deque[bytes] = deque()
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if back in ready:
            _take_answers(front, back, free)
        if front in ready:
            _take_frames(front, waiting, is_copied)
        while free and waiting:
            count = min(MAX_BATCH, len(waiting))
            batch = [waiting.popleft() for _ in range(count)]
            head = b"".join([routing_id + number for routing_id, number, _ in batch])
            parts = [free.popleft(), head, *(payload for _, _, payload in batch)]
            back.send_multipart(parts, copy=is_copied)


def _take_frames(front: Any, waiting: deque[tuple[bytes, bytes, Any]], is_copied: bool) -> None:
    try:
        for _ in range(TURN):
            routing_id, number, payload = front.recv_multipart(zmq.NOBLOCK, copy=is_copied)
            if is_copied:
                waiting.append((routing_id, number, payload))
            else:
                waiting.append((routing_id.bytes, number.bytes, payload))
    except zmq.Again:
        pass


def _take_answers(front: Any, back: Any, free: deque[bytes]) -> None:
    try:
        for _ in range(TURN):
            worker, head, *results = back.recv_multipart(zmq.NOBLOCK)
            free.append(worker)
            if not head:
                continue
            size = len(head) // len(results)
            by_producer: dict[bytes, list[bytes]] = {}
            for start, result in zip(range(0, len(head), size), results, strict=True):
                named = head[start : start + size]
                by_producer.setdefault(named[:-8], []).extend((named[-8:], result))
            for routing_id, answers in by_producer.items():
                front.send_multipart([routing_id, *answers])
    except zmq.Again:
        pass


def serve_batches(context: zmq.Context[Any], address: str, function: Function, payload_bytes: int) -> None:
    """Be the forwarder's worker until the context is terminated."""
    socket = _socket(context, zmq.DEALER)
    socket.connect(address)
    for _ in range(SLOTS):
        socket.send_multipart([b""])
    is_copied = payload_bytes <= COPY_BYTES
    while True:
        head, *payloads = socket.recv_multipart(copy=is_copied)
        results = function(payloads if is_copied else [payload.buffer for payload in payloads])
        socket.send_multipart([head if is_copied else head.bytes, *results])


def proxy(context: zmq.Context[Any], announce: Callable[[str, str], None]) -> None:
    """Run zmq.proxy until the context is terminated."""
    front, back = _bound(context, zmq.ROUTER), _bound(context, zmq.DEALER)
    announce(_address(front), _address(back))
    zmq.proxy(front, back)


def serve_single(context: zmq.Context[Any], address: str, function: Function, payload_bytes: int) -> None:
    """Be the proxy's worker until the context is terminated."""
    socket = _socket(context, zmq.DEALER)
    socket.connect(address)
    is_copied = payload_bytes <= COPY_BYTES
    while True:
        routing_id, number, payload = socket.recv_multipart(copy=is_copied)
        results = function([payload if is_copied else payload.buffer])
        socket.send_multipart([routing_id, number, *results])


def produce(
    context: zmq.Context[Any], address: str, payloads: list[bytes], in_flight: int, count: list[int]
) -> None:
    """Keep ``in_flight`` frames under way until the context is terminated; ``count[0]`` counts answers."""
    socket = _socket(context, zmq.DEALER)
    socket.connect(address)
    # Sent as many times as needed without a copy of ours, as headrace's producer sends.
    is_copied = len(payloads[0]) <= COPY_BYTES
    frames = [zmq.Frame(payload) for payload in payloads]
    sent = 0
    while True:
        while sent - count[0] < in_flight:
            which = sent % len(payloads)
            number = _NUMBER.pack(sent)
            parts = [number, payloads[which]] if is_copied else [number, frames[which]]
            socket.send_multipart(parts, copy=is_copied)
            sent += 1
        count[0] += len(socket.recv_multipart()) // 2


def no_work(payloads: list[Any]) -> list[bytes]:
    """Answer with the first byte of each frame: T = 0."""
    return [bytes(payload[:1]) for payload in payloads]


def mean_function(session: Any, size: int) -> Function:
    """Return W1's function for frames of ``size`` squares: gather them into one buffer, run the graph."""
    buffer = np.empty((MAX_BATCH, size, size, 3), dtype=np.uint8)
    flat = buffer.reshape(MAX_BATCH, -1)

    def run(payloads: list[Any]) -> list[bytes]:
        for row, payload in zip(flat, payloads, strict=False):
            row[:] = np.frombuffer(payload, dtype=np.uint8)
        means = session.run(None, {"frames": buffer[: len(payloads)]})[0]
        return [mean.tobytes() for mean in means]

    return run


def _socket(context: zmq.Context[Any], kind: int) -> Any:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    return socket


def _bound(context: zmq.Context[Any], kind: int) -> Any:
    socket = _socket(context, kind)
    socket.bind("tcp://127.0.0.1:*")
    return socket


def _address(socket: Any) -> str:
    address: str = socket.last_endpoint.decode().rstrip("\0")
    return address
