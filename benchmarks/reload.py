"""A model is exchanged and taken back under an open-loop load: what that does to latency, and what is lost.

ResNet-50 on one CPU worker of one thread, at less than half of what it can do. The new file is the same
network in another file: loading, testing, measuring and comparing cost what they always do, the switch itself
nothing. Latency runs from the time a frame was due. Three spans: before the order, from the order until the
new version serves alone (with a second after it), and after the rollback.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import graphs
from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.processes import Processes
from benchmarks.report import Budget, Cell, Report, Table, median
from benchmarks.stats import percentile, spread
from headrace.clients.control import Control
from headrace.clients.producer import Producer
from headrace.clients.subscriber import Subscriber
from headrace.errors import RequestTimeoutError
from headrace.protocol.messages import Outcome, Status

SIDE = 224

#: Frames a second: a run of one frame takes 60 to 100 ms on a core of the machine this was written on.
FPS = 5

#: Frames that are compared before the switch.
COMPARED = 8

#: Issue budget: p99 while a model is exchanged, over p99 before.
P99_RATIO = 2.0

LIMIT_S = 120.0

SPANS = ("before", "during", "after")


def run(*, quick: bool) -> Report:
    """Measure rounds of one reload and one rollback each."""
    span_s = 5.0 if quick else 20.0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        old = graphs.write_resnet50(Path(name))
        proto = onnx.load_model(str(old))
        proto.producer_name = "another file"
        new = old.with_name("new.onnx")
        onnx.save_model(proto, str(new))
        rounds = [_measure(old, new, span_s) for _ in range(1 if quick else 3)]
    ratios = [each["during p99_ms"] / each["before p99_ms"] for each in rounds]
    rows: list[tuple[Cell, ...]] = []
    for span in SPANS:
        values = [
            spread([each[f"{span} {key}"] for each in rounds], 1) for key in ("p50_ms", "p99_ms", "max_ms")
        ]
        frames = sum(each[f"{span} frames"] for each in rounds)
        rows.append((span, int(frames), *values))
    took = spread([each["took_s"] for each in rounds], 1)
    title = f"Reload of ResNet-50 at {FPS} frames/s, {took} s from the order until it served alone"
    lost = sum(each["lost"] for each in rounds)
    return Report(
        "reload",
        tuple(rounds),
        (Table(title, ("span", "frames", "p50 ms", "p99 ms", "longest ms"), tuple(rows)),),
        (
            Budget.at_most("p99 during the reload over p99 before", median(ratios), P99_RATIO),
            Budget.at_most("frames lost, doubled or out of order", lost, 0.0),
        ),
    )


def _measure(old: Path, new: Path, span_s: float) -> dict[str, float]:
    with Processes() as processes:
        address = processes.broker(broker_config(Model((SquareClass(SIDE, 4),), path=old)))
        processes.workers(address, 1, "cpu")
        with _load(address) as frames, Control(address) as control:
            time.sleep(span_s)
            marks = [0.0, time.monotonic()]
            _reload(control, new)
            took_s = time.monotonic() - marks[1]
            time.sleep(1.0)
            marks.append(time.monotonic())
            control.roll_back()
            time.sleep(span_s)
            marks.append(time.monotonic())
    figures: dict[str, float] = {"took_s": took_s, "lost": frames.wrong_count()}
    for span, begin_s, end_s in zip(SPANS, marks, marks[1:], strict=False):
        # The first second is warm-up.
        first_s = begin_s or frames.began_s + 1.0
        values = [ms for due_s, ms in frames.latencies if first_s <= due_s < end_s]
        figures[f"{span} frames"] = len(values)
        figures[f"{span} p50_ms"] = percentile(values, 0.5)
        figures[f"{span} p99_ms"] = percentile(values, 0.99)
        figures[f"{span} max_ms"] = max(values)
    return figures


def _reload(control: Control, path: Path) -> None:
    number = control.reload({"path": str(path), "frames": COMPARED, "tolerance": 1e-3})
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        status: dict[str, Any] = dict(control.call("status", {"max_streams": 0}).result)  # type: ignore[union-attr]
        found = status["models"][0]["reload"]
        if found["number"] == number and found["phase"] in {"live", "failed"}:
            break
        time.sleep(0.05)
    if found["phase"] != "live":
        raise RuntimeError(f"the reload ended as {found}")


class _Frames:
    """Frames pushed when they are due, and what came of each."""

    def __init__(self, address: str) -> None:
        self.latencies: list[tuple[float, float]] = []
        self.began_s = time.monotonic() + 0.5
        self._due_s: list[float] = []
        self._seqs: list[int | None] = []
        self._stop = threading.Event()
        self._image = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        self._subscriber = Subscriber(address, start="now")
        self._producer = Producer(address, max_unfinished_frames=1_000)
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._push, self._read)]

    def start(self) -> None:
        self._producer.wait_connected(LIMIT_S)
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop pushing, wait for the ends of all frames."""
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        self._producer.close()
        self._subscriber.close()

    def wrong_count(self) -> int:
        """Return how many frames have no OK outcome in their place."""
        expected = range(len(self._due_s))
        wrong = sum(seq != wanted for seq, wanted in zip(self._seqs, expected, strict=False))
        return wrong + abs(len(self._seqs) - len(self._due_s))

    def _push(self) -> None:
        rng = np.random.default_rng(2)
        due_s = self.began_s
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._due_s.append(due_s)
            self._producer.push(self._image, stream="camera", timeout=LIMIT_S)
            due_s += float(rng.exponential(1.0 / FPS))
        self._producer.flush(LIMIT_S)

    def _read(self) -> None:
        until_s = None
        while until_s is None or (len(self._seqs) < len(self._due_s) and time.monotonic() < until_s):
            if self._stop.is_set() and until_s is None:
                until_s = time.monotonic() + 10.0
            with contextlib.suppress(RequestTimeoutError):
                item = self._subscriber.get(timeout=0.2)
                if isinstance(item, Outcome) and item.status is Status.OK:
                    self._seqs.append(item.seq)
                    due_s = self._due_s[item.seq or 0]
                    self.latencies.append((due_s, (time.monotonic() - due_s) * 1e3))


@contextlib.contextmanager
def _load(address: str) -> Iterator[_Frames]:
    frames = _Frames(address)
    frames.start()
    try:
        yield frames
    finally:
        frames.end()
