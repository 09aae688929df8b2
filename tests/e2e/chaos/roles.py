"""The producers and subscribers of a chaos run, as processes that write down all they do.

``python -m chaos.roles producer|subscriber --name N --connect ADDRESS --log FILE ...``. The log is the
evidence that ``checks`` reads; one line is one write, so that a kill leaves whole lines:

    pushed STREAM EPOCH SEQ MONOTONIC_NS     before the push, so that no pushed frame is unknown
    finished STREAM EPOCH SEQ CODE           its end is known; CODE is - or that of the reject
    outcome STREAM BOOT PUB_SEQ EPOCH SEQ STATUS CODE DUPLICATES
    missed STREAM BOOT FIRST LAST REASON DUPLICATES        LAST is - when nobody can tell
    end ...                                  it was asked to stop and had nothing left to do

DUPLICATES is how many second runs of frames the subscriber has recognised so far.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import hr_fault_hooks
import numpy as np

from headrace import Outcome, Producer, Subscriber
from headrace.clients.records import FrameId
from headrace.errors import HeadraceError, RequestTimeoutError
from headrace.orphans import end_with_parent
from headrace.protocol.messages import Reject

#: How long a stopping role waits for what it is owed.
DRAIN_S = 60.0

#: A subscriber asks the broker about quiet streams twice a second: silence of this length, with nothing
#: known to be missing, means that nothing is left.
QUIET_S = 2.0

SIZES = ((24, 32), (32, 48), (64, 96), (60, 90))

#: Frames are painted with their seq, so that a subscriber sees whose pixels a result was made of. One size is
#: left out: its first pixel is border.
SHADES = 200
BORDERED = (24, 32)

#: Shared memory of a producer: small enough that some frames find no slot.
SHM_BYTES = 256 * 1024


class Log:
    """Lines in a file, each written at once and whole."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        os.write(self._descriptor, (" ".join(map(str, words)) + "\n").encode())


# -- producer ----------------------------------------------------------------------------------------


def produce(
    name: str, address: str, log: Log, rng: random.Random, stop: threading.Event, shm_folder: Path
) -> int:
    """Push frames of every kind until told to stop; then wait until the end of each is known."""
    codes: dict[tuple[str, int], str] = {}

    def rejected(reject: Reject) -> None:
        codes[reject.stream or "", reject.seq or 0] = reject.code

    def finished(frame: FrameId) -> None:
        code = codes.pop((frame.stream, frame.seq), "-")
        log.write("finished", frame.stream, frame.epoch, frame.seq, code)

    producer = Producer(
        address, name=name, max_unfinished_frames=128, on_reject=rejected, on_finished=finished,
        shm_bytes=SHM_BYTES, shm_folder=shm_folder,
    )  # fmt: skip
    streams = [f"{name}/a", f"{name}/b", f"{name}/latest"]
    next_seq = dict.fromkeys(streams, 0)
    try:
        burst = 0
        while not stop.is_set():
            stream = rng.choice(streams)
            seq = next_seq[stream]
            next_seq[stream] += 1
            log.write("pushed", stream, producer.epoch, seq, time.monotonic_ns())
            if not push_one(producer, stream, seq, rng, stop):
                log.write("unpushed", stream, producer.epoch, seq)
                break
            burst = burst - 1 if burst else (rng.randrange(10, 60) if rng.random() < 0.01 else 0)
            if not burst:
                stop.wait(rng.uniform(0.01, 0.06))
        account = producer.flush(DRAIN_S)
    except RequestTimeoutError as error:
        sys.stderr.write(f"not drained: {error}\n")
        return 1
    lanes = " ".join(f"{lane}={count}" for lane, count in sorted(account.by_lane.items()))
    log.write(
        "end", f"sent={account.sent}", f"resent={account.resent}", f"sessions={account.sessions}", lanes
    )
    producer.close()
    return 0


def push_one(producer: Producer, stream: str, seq: int, rng: random.Random, stop: threading.Event) -> bool:
    """Push a frame drawn at random; False when there was no room for it until the stop."""
    height, width = rng.choice(SIZES)
    image = np.full((height, width, 3), seq % SHADES, np.uint8)
    if rng.random() < 0.01:
        hr_fault_hooks.mark(image, "raise")
    if rng.random() < 0.0004:
        hr_fault_hooks.mark(image, "abort")
    model = "no-such-model" if rng.random() < 0.01 else ""
    priority = rng.choice((0, 0, 0, 3, 9))
    ttl_ms = rng.choice((None, None, None, None, 30, 300, 2_000))
    keep = "latest" if stream.endswith("latest") else "all"
    while True:
        try:
            producer.push(
                image, stream=stream, seq=seq, model=model, priority=priority, ttl_ms=ttl_ms, keep=keep,
                timeout=0.2,
            )  # fmt: skip
        except RequestTimeoutError:
            if stop.is_set():
                return False
            continue
        return True


# -- subscriber --------------------------------------------------------------------------------------


def subscribe(address: str, log: Log, prefix: str | None, pause_s: float, stop: threading.Event) -> int:
    """Write down every item until told to stop and nothing is left to come."""
    subscriber = _connect(address, prefix, stop)
    if subscriber is None:
        log.write("end", "never connected")
        return 0
    slow = threading.Event()  # never set: only waited on
    with subscriber:
        stopped_s = quiet_since_s = 0.0
        while True:
            now_s = time.monotonic()
            if stop.is_set():
                stopped_s = stopped_s or now_s
                quiet_since_s = quiet_since_s or now_s
                if subscriber.account.behind:
                    quiet_since_s = now_s
                if now_s - quiet_since_s > QUIET_S:
                    break
                if now_s - stopped_s > DRAIN_S:
                    sys.stderr.write(f"not drained: {subscriber.account}\n")
                    return 1
            try:
                item = subscriber.get(0.1)
            except RequestTimeoutError:
                continue
            quiet_since_s = 0.0
            _write(log, item, subscriber.account.duplicates)
            if pause_s and not stop.is_set():
                slow.wait(pause_s)
        account = subscriber.account
    log.write(
        "end", f"duplicates={account.duplicates}", f"missed={account.missed}", f"fetched={account.fetched}"
    )
    return 0


def _connect(address: str, prefix: str | None, stop: threading.Event) -> Subscriber | None:
    while not stop.is_set():
        try:
            return Subscriber(address, prefix=prefix, timeout=5.0, max_queued=64)
        except HeadraceError as error:
            sys.stderr.write(f"{error}\n")
    return None


def _write(log: Log, item: object, duplicates: int) -> None:
    if isinstance(item, Outcome):
        if (
            item.status == "ok"
            and item.shape[:2] != BORDERED
            and item.outputs != {"first": item.seq % SHADES}
        ):
            raise RuntimeError(f"frame {item.seq} of {item.stream} has the pixels of another: {item.outputs}")
        if item.code == "stale_slot":
            raise RuntimeError(f"the slot of frame {item.seq} of {item.stream} was freed before its end")
        log.write(
            "outcome", item.stream, item.boot, item.pub_seq, item.epoch, item.seq, item.status,
            item.code or "-", duplicates,
        )  # fmt: skip
    else:
        last = "-" if item.last is None else item.last
        log.write("missed", item.stream, item.boot, item.first, last, item.reason, duplicates)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["producer", "subscriber"])
    parser.add_argument("--name", required=True)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--prefix")
    parser.add_argument("--shm-folder", type=Path)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()

    end_with_parent(arguments.parent_pid)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    log = Log(arguments.log)
    if arguments.role == "producer":
        rng = random.Random(arguments.seed)
        return produce(arguments.name, arguments.connect, log, rng, stop, arguments.shm_folder)
    return subscribe(arguments.connect, log, arguments.prefix, arguments.pause_ms / 1000, stop)


if __name__ == "__main__":
    sys.exit(main())
