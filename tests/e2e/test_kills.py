"""kill -9 of a worker and of the broker in mid-run: every frame keeps exactly one end."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hr_processes import LIMIT_S, BrokerProcess, Processes, Status, emulated_config

import headrace
from headrace.clients.records import Missed, MissedReason

IMAGE = np.zeros((32, 32, 3), np.uint8)

#: A batch of four takes 14 ms: slow enough that a kill always meets frames in flight and in the queue.
CONFIG = emulated_config(base_ms=10, per_frame_ms=1, max_batch_size=4)


def push(producer: headrace.Producer, stream: str, count: int) -> None:
    for _ in range(count):
        producer.push(IMAGE, stream=stream, timeout=LIMIT_S)


def read_until(
    subscriber: headrace.Subscriber, seen: list[headrace.Outcome | Missed], outcomes_count: int
) -> None:
    """Read on until so many outcomes were seen in all."""
    while sum(isinstance(item, headrace.Outcome) for item in seen) < outcomes_count:
        seen.append(subscriber.get(timeout=LIMIT_S))


def seqs(items: Iterable[headrace.Outcome | Missed], stream: str) -> list[int]:
    return [item.seq for item in items if isinstance(item, headrace.Outcome) and item.stream == stream]


def in_mid_run(broker: BrokerProcess, finished_count: int) -> Status:
    """Wait until work is done, in flight and waiting, all three."""

    def is_busy(status: Status) -> bool:
        return (
            status["account"]["ok"] >= finished_count
            and bool(status["workers"])
            and all(worker["in_flight"] for worker in status["workers"])
            and any(entry["waiting"] for entry in status["classes"])
        )

    return broker.wait_status(is_busy)


def test_killing_a_worker_loses_no_frame_and_repeats_none(tmp_path: Path) -> None:
    """Must-show 7, PRC-01: kill -9 one of two workers under load; producer and subscriber count each once."""
    count = 320
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        doomed, _ = processes.workers(broker, 2)
        seen: list[headrace.Outcome | Missed] = []
        with (
            headrace.Subscriber(broker.address, streams=["a", "b"]) as subscriber,
            headrace.Producer(broker.address, max_unfinished_frames=2 * count) as producer,
        ):
            push(producer, "a", count)
            push(producer, "b", count)
            in_mid_run(broker, 50)
            doomed.kill()
            read_until(subscriber, seen, 2 * count)
            account = producer.flush(LIMIT_S)
        status = broker.wait_drained()

    assert seqs(seen, "a") == list(range(count))
    assert seqs(seen, "b") == list(range(count))
    assert len(seen) == 2 * count
    assert Counter(item.status for item in seen) == {"ok": 2 * count}
    assert (account.sent, account.finished, account.by_status) == (2 * count, 2 * count, {"ok": 2 * count})
    assert (status["account"]["accepted"], status["account"]["ok"]) == (2 * count, 2 * count)
    assert status["workers_lost"] == 1
    assert status["requeued"] >= 1, "the kill met no frame in flight: the test shows nothing"
    retried = [item for item in seen if item.attempt == 2]
    assert len(retried) == status["requeued"]
    assert {item.worker for item in retried} == {"w1"}


def test_killing_the_broker_loses_no_frame_and_repeats_none(tmp_path: Path) -> None:
    """Must-show 7: kill -9 the broker under load and start it on the same ports: every frame of two
    producers ends, and each of two subscribers gets each once, or is told which it can't have."""
    count = 320
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        processes.workers(broker, 2)
        everything: list[headrace.Outcome | Missed] = []
        only_a: list[headrace.Outcome | Missed] = []
        with (
            headrace.Subscriber(broker.address) as all_streams,
            headrace.Subscriber(broker.address, stream="a") as one_stream,
            headrace.Producer(broker.address, max_unfinished_frames=count) as first,
            headrace.Producer(broker.address, max_unfinished_frames=count) as second,
        ):
            push(first, "a", count)
            push(second, "b", count)
            in_mid_run(broker, 100)

            broker.running.kill()
            broker.restart()

            accounts = [producer.flush(LIMIT_S) for producer in (first, second)]
            broker.wait_drained()
            read_to_the_end(all_streams, everything, dict.fromkeys("ab", count - 1))
            read_to_the_end(one_stream, only_a, {"a": count - 1})
        status = broker.status()

    for account in accounts:
        assert (account.sent, account.finished, account.unfinished) == (count, count, 0)
        assert account.resent > 0, "the kill met no unfinished frame: the test shows nothing"
        assert set(account.by_status) == {"ok"}
        assert not account.rejected
    assert 0 < status["account"]["accepted"] < 2 * count
    for items, streams in ((everything, "ab"), (only_a, "a")):
        for stream in streams:
            check_each_once(items, stream, count)


def read_to_the_end(
    subscriber: headrace.Subscriber, seen: list[headrace.Outcome | Missed], end: dict[str, int]
) -> None:
    """Read until the last frame of each stream has come; frames of one stream come in order."""
    while any(last not in seqs(seen, stream) for stream, last in end.items()):
        seen.append(subscriber.get(timeout=LIMIT_S))


def check_each_once(items: list[headrace.Outcome | Missed], stream: str, count: int) -> None:
    """Check that outcomes came once each and in order, and that every one not seen was reported as missed.

    One stream whose every frame ends `ok` has pub_seq = seq in the first boot, so a missed range of that
    boot names frames.
    """
    seen = seqs(items, stream)
    assert seen == sorted(set(seen))
    lost = sorted(set(range(count)) - set(seen))
    told = [item for item in items if isinstance(item, Missed) and item.stream == stream]
    assert {item.reason for item in told} <= {MissedReason.NEW_BOOT}
    for seq in lost:
        assert any(item.first <= seq and (item.last is None or seq <= item.last) for item in told), (
            seq,
            told,
        )


def test_a_producer_waits_for_a_broker_that_comes_late(tmp_path: Path) -> None:
    """Frames pushed before the broker exists, or while it is away, are delivered once it is there."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        processes.workers(broker, 1)
        broker.running.kill()
        with headrace.Producer(broker.address) as producer:
            push(producer, "late", 100)
            assert not producer.is_connected
            broker.restart()
            account = producer.flush(LIMIT_S)
        status = broker.wait_drained()

    assert (account.finished, account.by_status) == (100, {"ok": 100})
    assert status["account"]["accepted"] == status["account"]["ok"] == 100


def test_a_broker_killed_again_and_again_still_ends_every_frame(tmp_path: Path) -> None:
    """Three kills in one run: frames are sent again each time, and each is seen once."""
    count, kills = 500, 3
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        processes.workers(broker, 2)
        seen: list[headrace.Outcome | Missed] = []
        with (
            headrace.Subscriber(broker.address, stream="a") as subscriber,
            headrace.Producer(broker.address, max_unfinished_frames=count) as producer,
        ):
            push(producer, "a", count)
            for _ in range(kills):
                in_mid_run(broker, 20)
                broker.running.kill()
                broker.restart()
            account = producer.flush(LIMIT_S)
            broker.wait_drained()
            read_to_the_end(subscriber, seen, {"a": count - 1})

    assert (account.sent, account.finished, account.by_status) == (count, count, {"ok": count})
    numbers = seqs(seen, "a")
    assert numbers == sorted(set(numbers))
    lost = count - len(numbers)
    assert not lost or any(isinstance(item, Missed) for item in seen), lost


def test_many_producers_and_many_streams_survive_both_kills(tmp_path: Path) -> None:
    """Eight producers of five streams each, a worker and the broker killed: each frame ends once."""
    producers_count, streams_count, count = 8, 5, 20
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        doomed, _ = processes.workers(broker, 2)
        seen: list[headrace.Outcome | Missed] = []
        with contextlib.ExitStack() as clients:
            subscriber = clients.enter_context(headrace.Subscriber(broker.address))
            producers = [
                clients.enter_context(headrace.Producer(broker.address)) for _ in range(producers_count)
            ]
            for number, producer in enumerate(producers):
                for _ in range(count):
                    for stream in range(streams_count):
                        producer.push(IMAGE, stream=f"p{number}/s{stream}", timeout=LIMIT_S)
            in_mid_run(broker, 50)
            doomed.kill()
            broker.running.kill()
            broker.restart()
            accounts = [producer.flush(LIMIT_S) for producer in producers]
            broker.wait_drained()
            names = [f"p{p}/s{s}" for p in range(producers_count) for s in range(streams_count)]
            read_to_the_end(subscriber, seen, dict.fromkeys(names, count - 1))

    assert [account.finished for account in accounts] == [streams_count * count] * producers_count
    for name in names:
        check_each_once(seen, name, count)


def test_a_lost_worker_is_noticed_within_the_stated_time(tmp_path: Path) -> None:
    """PRC-01: heartbeats missed x interval (here 600 ms) and one more interval at most."""
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        doomed, _ = processes.workers(broker, 2)

        doomed.kill()
        killed_s = time.monotonic()
        broker.wait_status(lambda status: status["workers_lost"] == 1)

        assert time.monotonic() - killed_s < 1.0
