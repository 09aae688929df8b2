"""Clients that send nonsense, vanish at the wrong moment, or send far more than can be served."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hr_faults as hf
import msgpack
import numpy as np
import pytest
import zmq
from hr_processes import LIMIT_S, BrokerProcess, Processes, elapsed

import headrace
from headrace.errors import RequestTimeoutError
from headrace.protocol.messages import Reject

MIB = 2**20


def dealer(context: zmq.Context[zmq.Socket[bytes]], broker: BrokerProcess) -> zmq.Socket[bytes]:
    """Return a bare socket connected to the broker's frames."""
    connected = context.socket(zmq.DEALER)
    connected.setsockopt(zmq.LINGER, 0)
    connected.connect(broker.endpoints["frames"])
    return connected


def bare_frame(stream: str, **fields: object) -> bytes:
    """Return a frame as a plain script packs it."""
    data = bytes(32 * 32 * 3)
    return msgpack.packb({"stream": stream, "shape": [32, 32, 3], "data": data, **fields})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a worker that must outlive all bad frames."""
    with Processes(tmp_path_factory.mktemp("served")) as processes:
        broker = processes.broker(hf.config(base_ms=1))
        hf.start_workers(processes, broker, 1)
        yield broker


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        pytest.param({"shape": None}, "missing_field", id="no-shape"),
        pytest.param({"priority": "high"}, "bad_field", id="priority-as-text"),
        pytest.param({"model": "m", "shape": [1, 1, 1, 3072]}, "wrong_shape", id="a-shape-of-no-image"),
        pytest.param({"model": "nobody"}, "unknown_model", id="unknown-model"),
    ],
)
def test_a_frame_that_can_not_be_sized_ends_and_the_next_is_served(
    served: BrokerProcess, fields: dict[str, Any], code: str
) -> None:
    """BAT-02: an answer for the bad one, a result for the good one within a second, ten times in a row."""
    ok_count = served.status()["account"]["ok"]
    good = f"good beside {code}"
    with (
        headrace.Subscriber(served.address, stream=good) as subscriber,
        zmq.Context() as context,
        dealer(context, served) as bare,
    ):
        for _ in range(10):
            took_s = elapsed()
            bare.send(bare_frame(f"bad by {code}", **fields))
            bare.send(bare_frame(good))
            (outcome,) = hf.read(subscriber, 1)
            assert outcome.status == "ok"
            assert took_s() < 1.0
            assert bare.poll(1_000), "no answer to the bad frame"
            answer = msgpack.unpackb(bare.recv_multipart()[0])
            assert (answer["type"], answer["code"]) == ("reject", code), answer

    assert served.status()["account"]["ok"] == ok_count + 10


def test_clients_that_vanish_leave_nothing_occupied(tmp_path: Path) -> None:
    """BAT-03: 40 clients at a time send and close after 0 to 20 ms, for two seconds; then one that behaves
    is served in normal time, and queue, slots, producers and descriptors are as before."""
    rng = random.Random(3)
    with Processes(tmp_path) as processes:
        broker = processes.broker(hf.config(base_ms=2, max_batch_size=8))
        hf.start_workers(processes, broker, 2)
        descriptors = hf.descriptor_count(broker.pid)
        vanish_for(2.0, broker, rng)

        status = broker.wait_status(
            lambda status: (
                status["account"]["unfinished"] == 0
                and not status["producers"]
                and not any(worker["in_flight"] for worker in status["workers"])
            )
        )
        with headrace.Client(broker.address) as client:
            client.infer(hf.image(), timeout=LIMIT_S)
            took_s = elapsed()
            outcome = client.infer(hf.image(), timeout=LIMIT_S)
            assert took_s() < 0.5
        # pyzmq's collector begins with the first large message sent without a copy: 7 descriptors, once.
        broker.wait_status(lambda _: hf.descriptor_count(broker.pid) <= descriptors + 1 + 7, 10.0)

    assert outcome.status == "ok"
    assert status["account"]["ok"] > 200
    assert all(entry["waiting"] == 0 for entry in status["classes"])


def vanish_for(seconds: float, broker: BrokerProcess, rng: random.Random) -> None:
    """Have bare clients, with and without a hello, send frames and close at once or a little later."""
    hello = {"v": 1, "type": "hello", "name": "vanishing"}
    pause = threading.Event()
    end_s = time.monotonic() + seconds
    number = 0
    with zmq.Context() as context:
        while time.monotonic() < end_s:
            clients = [dealer(context, broker) for _ in range(40)]
            for client in clients:
                number += 1
                if number % 2:
                    client.send(msgpack.packb({**hello, "epoch": number}))
                for seq in range(rng.randrange(1, 4)):
                    client.send(bare_frame(f"vanishing/{number}", seq=seq, epoch=number))
            for client in sorted(clients, key=lambda _: rng.random()):
                pause.wait(rng.uniform(0, 0.001))
                client.close(linger=0)


def test_a_flood_without_workers_is_bounded_and_fresh_frames_are_served_after_it(tmp_path: Path) -> None:
    """BAT-09: six cameras send frames of 1 MB that nobody serves: the broker stays within its budget,
    producers are told to wait, frames expire; a worker that comes then serves fresh ones."""
    frames_bytes, outcomes_bytes = 32 * MIB, 8 * MIB
    budget = frames_bytes + outcomes_bytes
    big = np.zeros((576, 600, 3), np.uint8)
    rejects: list[Reject] = []
    ends: list[str] = []
    config = hf.config(
        base_ms=1,
        size=608,
        max_batch_size=1,
        admission={"max_bytes": frames_bytes},
        retention={"max_bytes": outcomes_bytes},
    )
    with Processes(tmp_path) as processes:
        broker = processes.broker(config)
        idle = hf.memory_bytes(broker.pid)
        with contextlib.ExitStack() as stack:
            subscriber = stack.enter_context(headrace.Subscriber(broker.address))
            producers = [
                stack.enter_context(headrace.Producer(broker.address, on_reject=rejects.append))
                for _ in range(6)
            ]
            end_s = time.monotonic() + 4.0
            pause = threading.Event()
            while time.monotonic() < end_s:
                for number, producer in enumerate(producers):
                    with contextlib.suppress(RequestTimeoutError):
                        producer.push(big, stream=f"cam-{number}", ttl_ms=1_500, timeout=0)
                pause.wait(0.03)
            flooded = hf.memory_bytes(broker.pid, "VmHWM")

            hf.start_worker(processes, broker).read_log("ready")
            broker.wait_status(lambda status: status["unfinished_bytes"] < frames_bytes / 2)
            came_ns = time.monotonic_ns()
            for number, producer in enumerate(producers):
                producer.push(big, stream=f"cam-{number}", pts_ns=came_ns, timeout=LIMIT_S)
            fresh = 0
            while fresh < 6:
                item = subscriber.get(LIMIT_S)
                if isinstance(item, headrace.Outcome):
                    ends.append(str(item.status))
                    fresh += item.pts_ns == came_ns
                    assert item.pts_ns != came_ns or item.status == "ok", item
        status = broker.status()

    assert flooded - idle < 1.2 * budget, f"{flooded / MIB:.0f} MiB, {idle / MIB:.0f} when idle"
    assert {reject.code for reject in rejects} <= {"bytes_full", "wont_make_it", "queue_full"}
    assert rejects
    assert all(reject.retry_after_ms for reject in rejects)
    assert status["account"]["expired"] > 20
    assert ends.count("ok") < 60  # what waits longer than 1.5 s is not served any more
