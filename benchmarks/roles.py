"""Child processes of the benchmarks: `python -m benchmarks.roles ROLE JSON`.

Each line on stdin is a question, answered with one JSON line: what was counted so far, and when (the
monotonic clock, which all processes of one machine share). A role ends when its stdin closes.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks import chain, forwarder, graphs
from benchmarks.inprocess import BareFunction, InProcessLoop, run_mean
from benchmarks.lanes import producer_options
from benchmarks.open_loop import HeadraceLoop
from headrace.clients import producer_session
from headrace.clients.producer import Producer
from headrace.clients.subscriber import Subscriber
from headrace.protocol.messages import Outcome

#: Distinct frames a producer sends in turn: more than a cache holds, as a camera's are.
DISTINCT_BYTES = 32 * 1024 * 1024


def main() -> None:
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    _ROLES[role](**arguments)


# -- headrace ---------------------------------------------------------------------------------------------


def _producer(address: str, shape: list[int], in_flight: int, streams: int, bundle: str, lane: str) -> None:
    """Push as fast as frames end. ``bundle`` is "auto" or "1"."""
    if bundle == "1":
        producer_session.BUNDLE_BYTES = 1
    count = [0]
    _answer_questions(lambda: {"count": count[0]})
    images = _frames(shape, in_flight)
    color = "rgb" if shape[2] == 3 else "gray"
    options: dict[str, Any] = producer_options(lane)
    names = [f"camera-{number}" for number in range(streams)]
    with Producer(address, max_unfinished_frames=in_flight, **options) as producer:
        for number in itertools.count():
            image = images[number % len(images)]
            producer.push(image, stream=names[number % streams], color=color)
            count[0] += 1


def _subscriber(address: str) -> None:
    """Count outcomes that are ok, and all others."""
    counts = {"count": 0, "other": 0}
    with Subscriber(address) as subscriber:
        _answer_questions(lambda: dict(counts))
        for item in subscriber:
            counts["count" if isinstance(item, Outcome) and item.status == "ok" else "other"] += 1


def _headrace_loop(**settings: Any) -> None:
    _serve(HeadraceLoop(**settings).probe)


def _sampled_broker(output: str, arguments: list[str]) -> None:
    from benchmarks.sampler import run_broker

    run_broker(output, arguments)


# -- baselines --------------------------------------------------------------------------------------------


def _forwarder(payload_bytes: int) -> None:
    _answer_questions(lambda: {"count": 0}, is_announced=False)
    forwarder.forward(zmq.Context(), _announce, payload_bytes)


def _proxy() -> None:
    _answer_questions(lambda: {"count": 0}, is_announced=False)
    forwarder.proxy(zmq.Context(), _announce)


def _plain_worker(address: str, kind: str, payload_bytes: int, model: str = "", size: int = 0) -> None:
    function: forwarder.Function = forwarder.no_work
    if model:
        function = forwarder.mean_function(graphs.session(Path(model), 1), size)
    _answer_questions(lambda: {"count": 0})
    serve = {"forwarder": forwarder.serve_batches, "proxy": forwarder.serve_single}[kind]
    serve(zmq.Context(), address, function, payload_bytes)


def _plain_producer(address: str, shape: list[int], in_flight: int) -> None:
    count = [0]
    _answer_questions(lambda: {"count": count[0]})
    payloads = [image.tobytes() for image in _frames(shape, in_flight)]
    forwarder.produce(zmq.Context(), address, payloads, in_flight, count)


def _chain_relay() -> None:
    chain.relay(_say)


def _chain_worker(address: str, model: str, size: int) -> None:
    chain.work(address, model, size, _say)


def _chain_loop(**settings: Any) -> None:
    _serve(chain.ChainLoop(**settings).probe)


def _in_process_mean(model: str, size: int, max_batch_size: int) -> None:
    count = [0]
    _answer_questions(lambda: {"count": count[0]})
    images = _frames([size, size, 3], 64)
    run_mean(graphs.session(Path(model), 1), images, max_batch_size, count)


def _in_process_model(model: str, batch: int, shape: list[int]) -> None:
    count = [0]
    session = graphs.session(Path(model), 1)
    name = session.get_inputs()[0].name
    inputs = np.random.default_rng(graphs.SEED).random((batch, *shape), dtype=np.float32)
    session.run(None, {name: inputs})
    _answer_questions(lambda: {"count": count[0]})
    while True:
        session.run(None, {name: inputs})
        count[0] += batch


def _bare_function(**settings: Any) -> None:
    _serve(BareFunction(**settings).probe)


def _in_process_loop(**settings: Any) -> None:
    _serve(InProcessLoop(**settings).probe)


# -- helpers ----------------------------------------------------------------------------------------------


def _frames(shape: list[int], in_flight: int) -> list[np.ndarray]:
    """Return different frames, at least as many as are in flight unless that is too many bytes."""
    nbytes = int(np.prod(shape))
    count = max(4, min(max(in_flight, 64), DISTINCT_BYTES // nbytes))
    rng = np.random.default_rng(graphs.SEED)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def _answer_questions(counts: Callable[[], dict[str, Any]], *, is_announced: bool = True) -> None:
    """Answer from a thread of its own, so that a busy role need not look."""

    def answer() -> None:
        for _ in sys.stdin:
            _say({"at_s": time.monotonic(), **counts()})
        os._exit(0)  # the parent is done with us, or gone

    if is_announced:
        _say({"ready": True})
    threading.Thread(target=answer, daemon=True).start()


def _serve(probe: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each question with what a probe of it brings."""
    _say({"ready": True})
    for line in sys.stdin:
        _say(probe(json.loads(line)))
    os._exit(0)


def _announce(front: str, back: str) -> None:
    _say({"front": front, "back": back})


def _say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


_ROLES: dict[str, Callable[..., None]] = {
    "producer": _producer,
    "subscriber": _subscriber,
    "headrace-loop": _headrace_loop,
    "sampled-broker": _sampled_broker,
    "forwarder": _forwarder,
    "proxy": _proxy,
    "plain-worker": _plain_worker,
    "plain-producer": _plain_producer,
    "chain-relay": _chain_relay,
    "chain-worker": _chain_worker,
    "chain-loop": _chain_loop,
    "in-process-mean": _in_process_mean,
    "in-process-model": _in_process_model,
    "bare-function": _bare_function,
    "in-process-loop": _in_process_loop,
}

if __name__ == "__main__":
    main()
