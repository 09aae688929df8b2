"""The baseline of latency: the same four legs as a frame's way through headrace, and nothing else.

A DEALER sends each frame when it is due; a loop over two ROUTERs hands it to the one worker, whose DEALER
runs W1's function and answers; the loop publishes the answer to a SUB beside the sender. What this takes over
the bare function is what ZeroMQ, the interpreter and waking four processes cost on the machine, before any
frame is checked, queued, batched, counted or kept.

``has_payload`` False: the frame's number alone travels and the worker has the pixels already, as in a lane of
shared memory.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.arrivals import draw
from benchmarks.graphs import session
from benchmarks.results import probe_result

_NUMBER = struct.Struct("<Q")

#: Distinct frames, known to both ends.
_IMAGES_COUNT = 8


def relay(announce: Callable[[dict[str, str]], None]) -> None:
    """Forward frames to the worker that spoke last, and publish answers, until the process ends."""
    context: zmq.Context[Any] = zmq.Context()
    front, back, results = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    for socket in (front, back, results):
        socket.bind("tcp://127.0.0.1:*")
    announce(
        {name: socket.getsockopt_string(zmq.LAST_ENDPOINT) for name, socket in
         (("front", front), ("back", back), ("results", results))}
    )  # fmt: skip
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    worker = b""
    while True:
        for socket, _ in poller.poll():
            if socket is front:
                _, number, payload = front.recv_multipart(copy=False)
                back.send_multipart([worker, number, payload], copy=False)
            else:
                worker, *answer = back.recv_multipart()
                if answer != [b""]:
                    results.send_multipart(answer)


def work(address: str, model: str, size: int, announce: Callable[[dict[str, str]], None]) -> None:
    """Run the function on each frame until the process ends."""
    run = session(Path(model), 1).run
    images = _images(size)
    run(None, {"frames": images[0]})
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"")
    announce({})
    while True:
        number, payload = socket.recv_multipart(copy=False)
        if len(payload):
            image = np.frombuffer(payload.buffer, np.uint8).reshape(1, size, size, 3)
        else:
            image = images[_NUMBER.unpack(number.bytes)[0] % _IMAGES_COUNT]
        means = run(None, {"frames": image})[0]
        socket.send_multipart([number.bytes, means.tobytes()])


class ChainLoop:
    """Sends frames when they are due; a thread of its own reads the answers, as headrace's clients do."""

    def __init__(self, *, front: str, results: str, size: int, has_payload: bool) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self._sender, self._reader = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self._reader.subscribe(b"")
        self._reader.connect(results)
        self._sender.connect(front)
        self._images = _images(size)
        self._has_payload = has_payload
        self._sent_count = 0
        self._ended_s: dict[int, float] = {}
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def probe(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one run of arrivals, wait for the answers, return its figures."""
        times_s = draw(
            question["pattern"], question["rate"], question["duration_s"], question["seed"]
        ).times_s
        first = self._sent_count
        began_s = time.monotonic() + 0.05
        for due_s in times_s:
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            image = self._images[self._sent_count % _IMAGES_COUNT] if self._has_payload else b""
            self._sender.send_multipart([_NUMBER.pack(self._sent_count), image], copy=False)
            self._sent_count += 1
        with self._arrived:
            self._arrived.wait_for(lambda: self._sent_count - 1 in self._ended_s, question["drain_s"])
            ended_s = [self._ended_s.pop(first + index, None) for index in range(len(times_s))]
        latencies = [
            None if ended is None else (ended - began_s - due_s) * 1e3
            for ended, due_s in zip(ended_s, times_s, strict=True)
        ]
        return probe_result(question, times_s, latencies, largest_lag_s=0.0)

    def _read(self) -> None:
        while True:
            number, _ = self._reader.recv_multipart()
            with self._arrived:
                self._ended_s[_NUMBER.unpack(number)[0]] = time.monotonic()
                self._arrived.notify_all()


def _images(size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (1, size, size, 3), dtype=np.uint8) for _ in range(_IMAGES_COUNT)]
