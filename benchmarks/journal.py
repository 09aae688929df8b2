"""What `broker.journal` costs: one commit by outcomes in it, a paced 1,000 results a second, start, replay.

Measured on the disk of the current folder, beside a bare write and fsync of one 4 KiB block there: that is
the part of a commit that no software can take away.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Budget, Cell, Report, Table
from headrace.broker.journal import Journal
from headrace.broker.settings import CoreSettings
from headrace.protocol.messages import Outcome, Status, TensorSpec, Timing

#: Outcomes in one commit: an idle broker has few per turn, a busy one a batch or several.
PER_COMMIT = (1, 8, 32, 128)

#: Bytes of an output tensor beside five boxes; 0 = boxes alone, about 300 bytes on disk.
TENSOR_BYTES = (0, 4_000)

STREAMS = 8
RATE = 1_000

#: CPU time per outcome in commits of 8, kernel included: what the broker's one thread has less for frames.
#: About twice what an idle two-core machine needs.
MAX_CPU_US = 80.0

FIGURES = ("p50_us", "p99_us", "fsync_p50_us", "fsync_p99_us", "cpu_us_per_outcome")

BOXES = {"boxes": [[10.5, 20.5, 110.5, 220.5, 0.9]] * 5, "labels": ["person"] * 5}


def run(*, quick: bool = False) -> Report:
    """Measure on the disk of the current folder."""
    commits = 40 if quick else 300
    rows: list[tuple[Cell, ...]] = []
    raw: list[dict[str, float]] = []
    with _folder() as folder:
        for number in range(1 if quick else 3):
            for nbytes in TENSOR_BYTES:
                for count in PER_COMMIT:
                    path = folder / f"{number}-{nbytes}-{count}.db"
                    figures = _commit(path, count, nbytes, commits)
                    raw.append({"tensor_bytes": nbytes, "outcomes": count, **figures})
                    rows.append((number, nbytes, count, *figures.values()))
            raw.append(
                {"paced_busy_share": _busy_share(folder / f"paced-{number}.db", 2.0 if quick else 8.0)}
            )
        start_ms, replay_us, kept, megabytes = _start(folder / "start.db", 2_000 if quick else 20_000)
    cpu_us = min(each["cpu_us_per_outcome"] for each in raw if each.get("outcomes") == 8)
    shares = [each["paced_busy_share"] for each in raw if "paced_busy_share" in each]
    return Report(
        "journal",
        tuple(raw),
        (
            Table(
                "One commit, in microseconds, and bare fsyncs of 4 KiB made in turn with it",
                ("round", "tensor bytes", "outcomes", *(name.replace("_", " ") for name in FIGURES)),
                tuple(rows),
            ),
            Table(
                f"{RATE} results a second in turns of 4 ms: share of the time in commits, waiting included",
                ("round", "share"),
                tuple(enumerate(shares)),
            ),
            Table(
                "A full journal of outcomes with 4,000 bytes each",
                ("outcomes", "MiB", "start ms", "replay us per outcome"),
                ((kept, megabytes, start_ms, replay_us),),
            ),
        ),
        (Budget("CPU us per outcome in commits of 8", cpu_us, MAX_CPU_US, "max", cpu_us <= MAX_CPU_US),),
    )


def _outcome(boot: int, number: int, nbytes: int) -> Outcome:
    tensors = (TensorSpec("features", "uint8", (nbytes,)),) if nbytes else ()
    return Outcome(
        f"camera-{number % STREAMS}",
        7,
        number // STREAMS,
        boot,
        number // STREAMS,
        Status.OK,
        model="detector",
        version="1",
        size_class="small",
        worker="host-1234-abcd",
        attempt=1,
        batch_size=8,
        shape=(480, 640, 3),
        timing=Timing(0, 100, 900, 5_000, 5_100),
        outputs=BOXES,
        tensors=tensors,
        payloads=(os.urandom(nbytes),) if nbytes else (),
    )


def _commit(path: Path, count: int, nbytes: int, commits: int) -> dict[str, float]:
    """Append and fsync in turn, so that both meet the same disk and the same neighbours."""
    turns = [[_outcome(1, turn * count + n, nbytes) for n in range(count)] for turn in range(commits)]
    commit_us: list[float] = []
    fsync_us: list[float] = []
    cpu_s = 0.0
    descriptor = os.open(path.with_suffix(".bare"), os.O_CREAT | os.O_WRONLY)
    try:
        with Journal(path, 1, CoreSettings(())) as journal:
            for number, turn in enumerate(turns):
                began, cpu_began = time.perf_counter(), time.thread_time()
                journal.append(turn)
                commit_us.append((time.perf_counter() - began) * 1e6)
                cpu_s += time.thread_time() - cpu_began
                began = time.perf_counter()
                os.pwrite(descriptor, bytes(4_096), number * 4_096)
                os.fsync(descriptor)
                fsync_us.append((time.perf_counter() - began) * 1e6)
    finally:
        os.close(descriptor)
    values = (
        *(_at(commit_us, share) for share in (0.5, 0.99)),
        *(_at(fsync_us, share) for share in (0.5, 0.99)),
        cpu_s * 1e6 / commits / count,
    )
    return dict(zip(FIGURES, values, strict=True))


def _busy_share(path: Path, seconds: float) -> float:
    """Append 4 results every 4 ms; return the share of the time that was spent in append()."""
    pace = threading.Event()  # never set: waiting for it is waiting for the next turn
    with Journal(path, 1, CoreSettings(())) as journal:
        began = time.perf_counter()
        number = 0
        while (now := time.perf_counter() - began) < seconds:
            journal.append([_outcome(1, number + n, 0) for n in range(4)])
            number += 4
            pace.wait(max(0.0, began + number / RATE - time.perf_counter()))
        return journal.counts.busy_ns / 1e9 / now


def _start(path: Path, count: int) -> tuple[float, float, int, float]:
    settings = CoreSettings((), retention_frames=count)
    with Journal(path, 1, settings) as journal:
        for first in range(0, count, 128):
            journal.append([_outcome(1, first + n, TENSOR_BYTES[-1]) for n in range(128)])
    megabytes = path.stat().st_size / 2**20
    began = time.perf_counter()
    with Journal(path, 2, settings) as journal:
        journal.restored()
        start_ms = (time.perf_counter() - began) * 1e3
        began = time.perf_counter()
        outcomes, _, _ = journal.replay("camera-0", 1, 0, count, 1 << 30)
        replay_us = (time.perf_counter() - began) * 1e6 / len(outcomes)
        return start_ms, replay_us, journal.counts.kept_count, megabytes


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="journal-", dir=Path.cwd()) as name:
        yield Path(name)
