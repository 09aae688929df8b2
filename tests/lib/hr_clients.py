"""What client tests need beside a broker: a worker that answers by itself, a relay that can be cut."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
from hr_broker import LIMITS, TIMEOUT_S, Worker, broker_settings

from headrace.broker.shell_settings import ShellSettings
from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Done,
    Endpoints,
    Frame,
    FrameResult,
    Heartbeat,
    Status,
    TensorSpec,
)

Answer = Callable[[Frame], FrameResult]


def first_value(frame: Frame) -> FrameResult:
    """Answer with the frame's seq and its first payload byte."""
    return FrameResult(Status.OK, outputs={"seq": frame.seq, "first": memoryview(frame.payload).cast("B")[0]})


def echo(frame: Frame) -> FrameResult:
    """Answer with the frame's own bytes as a tensor."""
    payload = bytes(frame.payload)  # type: ignore[arg-type]
    return FrameResult(
        Status.OK, tensors=(TensorSpec("echo", frame.dtype, frame.shape),), payloads=(payload,)
    )


class AutoWorker:
    """A worker in a thread that answers every batch with ``answer``, after ``gate`` was set."""

    def __init__(self, endpoints: Endpoints, *, worker: str = "w1", answer: Answer = first_value) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._endpoints = endpoints
        self._worker_id = worker
        self._answer = answer
        self._is_ready = threading.Event()
        self._is_stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"worker-{worker}", daemon=True)

    def _main(self) -> None:
        try:
            with Worker(self._endpoints, self._worker_id, instance=hash(self._worker_id) % 2**32) as worker:
                self._is_ready.set()
                self._serve(worker)
        except BaseException as error:
            self._error = error
            self._is_ready.set()

    def _serve(self, worker: Worker) -> None:
        waiting: list[Batch] = []
        beat_at = 0.0
        while not self._is_stopped.is_set():
            if time.monotonic() >= beat_at:
                worker.send(Heartbeat())
                beat_at = time.monotonic() + 0.2
            if worker.socket.poll(10):
                message = codec.decode(worker.socket.recv_multipart(), LIMITS)
                if isinstance(message, Batch):
                    waiting.append(message)
            while waiting and self.gate.is_set():
                batch = waiting.pop(0)
                results = tuple(self._answer(frame) for frame in batch.frames)
                worker.send(Done(batch.batch, results, staged_us=1, ran_us=2, total_us=3))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(TIMEOUT_S), "the worker did not get its set-up in time"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        self._thread.join(TIMEOUT_S)
        if kind is None and self._error is not None:
            raise self._error


def settings_at(endpoints: Endpoints, **overrides: Any) -> ShellSettings:
    """Return the settings of a broker that is started again where an earlier one was."""
    names = ("frames", "intake", "results", "workers", "control")
    return broker_settings(**{name: getattr(endpoints, name) for name in names}, **overrides)


def run_script(code: str, *arguments: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a user's script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def image(value: int, side: int = 8) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return a uint8 image [side, side, 3], every byte ``value`` (mod 256)."""
    return np.full((side, side, 3), value % 256, np.uint8)


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """Hold a TCP port on which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def wait_for(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition of another thread holds, looking often; fail after the limit."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true within {timeout_s} s"
        pause.wait(0.005)


class Relay:
    """A TCP relay to one port that can cut every connection, or swallow all bytes without a word."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_swallowing = threading.Event()
        self.cut_count = 0
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Cut what is connected; a new connection is relayed again."""
        with self._lock:
            cut, self._open = self._open, []
        self.cut_count += bool(cut)
        for connection in cut:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_stopped.is_set():
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(0.05)
        with contextlib.suppress(OSError):
            while not self._is_stopped.is_set():
                try:
                    data = source.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    break
                if not self.is_swallowing.is_set():
                    sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._is_stopped.set()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
