"""A subscriber slower than its stream is told of everything it does not get, and slows nobody else."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from pathlib import Path

import numpy as np
from hr_processes import LIMIT_S, Processes, emulated_config

import headrace
from headrace.clients.records import Missed

IMAGE = np.zeros((32, 32, 3), np.uint8)

PUSHED_PER_S, READ_PER_S = 200, 10
FRAMES_COUNT = 800

#: Makes an outcome 20 KB large: all of them are 16 MB, more than the system's and ZeroMQ's buffers take, so
#: that being slow really loses some.
BALLAST = "x" * 20_000

#: The broker keeps the outcomes of one second, so that a fast reader has time on a busy machine.
RETAINED = 200

CONFIG = emulated_config(
    base_ms=1,
    per_frame_ms=0.1,
    max_batch_size=8,
    broker={"results_queue_messages": 20},
    limits={"max_meta_bytes": 32_768},
    retention={"frames_per_stream": RETAINED},
)


def push_at_a_steady_rate(producer: headrace.Producer, stream: str, per_s: float = PUSHED_PER_S) -> None:
    """Push FRAMES_COUNT frames at a rate, each at its own time."""
    producer.wait_connected(LIMIT_S)  # from then on it knows how large meta may be
    pace = threading.Event()
    began_s = time.monotonic()
    for number in range(FRAMES_COUNT):
        pace.wait(max(0.0, began_s + number / per_s - time.monotonic()))
        producer.push(IMAGE, stream=stream, meta={"ballast": BALLAST}, timeout=LIMIT_S)


def read_slowly(
    subscriber: headrace.Subscriber, items: list[headrace.Outcome | Missed], is_over: threading.Event
) -> None:
    """Read READ_PER_S items a second until ``is_over``, then what is left."""
    while not items or covered(items[-1])[1] < FRAMES_COUNT - 1:
        items.append(subscriber.get(timeout=LIMIT_S))
        is_over.wait(1 / READ_PER_S)


def covered(item: headrace.Outcome | Missed) -> tuple[int, int]:
    """Return the first and last pub_seq that an item accounts for."""
    if isinstance(item, headrace.Outcome):
        return item.pub_seq, item.pub_seq
    assert item.last is not None
    return item.first, item.last


def test_a_slow_subscriber_is_told_of_every_hole(tmp_path: Path) -> None:
    """Must-show 8: 10 results a second at 200 a second: outcomes and missed ranges together tile the whole
    range, without a hole and without an overlap; the fast one beside it has no gap."""
    slow_items: list[headrace.Outcome | Missed] = []
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        processes.workers(broker, 1)
        fast = processes.start("watch", "cam", "--connect", broker.address, "--json")
        fast.read_line(lambda line: "watching cam" in line, "stderr")
        with (
            headrace.Subscriber(broker.address, stream="cam", max_queued=8) as slow,
            headrace.Producer(broker.address) as producer,
        ):
            is_over = threading.Event()
            reader = threading.Thread(target=read_slowly, args=(slow, slow_items, is_over), daemon=True)
            reader.start()
            push_at_a_steady_rate(producer, "cam")
            account = producer.flush(LIMIT_S)
            read_count = len(slow_items)
            is_over.set()
            reader.join(LIMIT_S)
            assert not reader.is_alive(), slow.account
            counts = slow.account
        fast.read_line(lambda line: f'"seq": {FRAMES_COUNT - 1},' in line)
        fast.stop()
        status = broker.wait_drained()

    assert account.by_status == {"ok": FRAMES_COUNT}
    assert status["account"]["ok"] == FRAMES_COUNT
    fast_items = [json.loads(line) for line in fast.stdout]
    assert [item["event"] for item in fast_items] == ["outcome"] * FRAMES_COUNT
    assert [item["seq"] for item in fast_items] == list(range(FRAMES_COUNT))

    ranges = [covered(item) for item in slow_items]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == FRAMES_COUNT - 1
    for (_, last), (first, _) in itertools.pairwise(ranges):
        assert first == last + 1
    missed = [item for item in slow_items if isinstance(item, Missed)]
    assert read_count < FRAMES_COUNT / 4
    assert missed, "the slow one was not slow enough: the test shows nothing"
    assert counts.missed == sum(item.count or 0 for item in missed)
    assert counts.delivered == len(slow_items)


def test_a_subscriber_slower_for_a_while_gets_everything_when_the_broker_keeps_it(tmp_path: Path) -> None:
    """What the broker still keeps is had in the end, live or fetched again: no hole, in order, each once."""
    config = CONFIG.replace(f"frames_per_stream = {RETAINED}", f"frames_per_stream = {2 * FRAMES_COUNT}")
    with Processes(tmp_path) as processes:
        broker = processes.broker(config)
        processes.workers(broker, 1)
        with (
            headrace.Subscriber(broker.address, stream="cam", max_queued=8) as late,
            headrace.Producer(broker.address) as producer,
        ):
            push_at_a_steady_rate(producer, "cam", 800)
            producer.flush(LIMIT_S)
            items = [late.get(timeout=LIMIT_S) for _ in range(FRAMES_COUNT)]
            fetched_count = late.account.fetched

    assert [item.seq for item in items if isinstance(item, headrace.Outcome)] == list(range(FRAMES_COUNT))
    assert fetched_count, "everything came live: the test shows nothing"


def test_a_stopped_subscriber_process_holds_nobody_up(tmp_path: Path) -> None:
    """A subscriber that is stopped dead (SIGSTOP) and goes on later catches up or is told; others see all."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        processes.workers(broker, 1)
        frozen, fast = (
            processes.start("watch", "cam", "--connect", broker.address, "--json") for _ in range(2)
        )
        for watch in (frozen, fast):
            watch.read_line(lambda line: "watching cam" in line, "stderr")
        frozen.popen.send_signal(signal.SIGSTOP)
        with headrace.Producer(broker.address) as producer:
            push_at_a_steady_rate(producer, "cam")
            producer.flush(LIMIT_S)
        fast.read_line(lambda line: f'"seq": {FRAMES_COUNT - 1},' in line)
        frozen.popen.send_signal(signal.SIGCONT)
        frozen.read_line(lambda line: f'"seq": {FRAMES_COUNT - 1},' in line)

    assert [json.loads(line)["seq"] for line in fast.stdout] == list(range(FRAMES_COUNT))
    assert '"event": "missed"' in "".join(frozen.stdout), "it lost nothing: the test shows nothing"
    next_pub_seq = 0
    for item in map(json.loads, frozen.stdout):
        first, last = (item["first"], item["last"]) if item["event"] == "missed" else (item["pub_seq"],) * 2
        assert first == next_pub_seq
        next_pub_seq = last + 1
    assert next_pub_seq == FRAMES_COUNT
