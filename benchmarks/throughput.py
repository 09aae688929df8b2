"""Throughput of a set of processes under a closed loop, and the CPU that each of them takes per frame."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.configs import Model, SquareClass, broker_config
from benchmarks.processes import Child, Processes

#: What the broker, the worker and the clients do in "no model work": T(b) = 0.
NO_WORK_MS = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """``cpu_us``: microseconds of CPU per frame by process."""

    per_s: float
    cpu_us: dict[str, float]

    def cpu_of(self, *beginnings: str) -> float:
        """Return the sum over processes whose names begin so."""
        return sum(value for name, value in self.cpu_us.items() if name.startswith(beginnings))


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds: what is cut, what is measured."""

    warm_up_s: float
    measure_s: float

    @classmethod
    def of(cls, *, quick: bool) -> Window:
        return cls(0.7, 1.5) if quick else cls(2.0, 6.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Frames of one shape, ``in_flight`` of them unfinished at any time."""

    shape: tuple[int, int, int]
    in_flight: int
    streams: int = 4

    @property
    def nbytes(self) -> int:
        height, width, channels = self.shape
        return height * width * channels


def measure(processes: Processes, counters: list[Child], window: Window) -> Measured:
    """Measure running processes; what ``counters`` count together is the frames."""
    time.sleep(window.warm_up_s)
    cpu_before = processes.cpu_s()
    before = [counter.ask() for counter in counters]
    time.sleep(window.measure_s)
    after = [counter.ask() for counter in counters]
    cpu_after = processes.cpu_s()
    count = sum(last["count"] - first["count"] for first, last in zip(before, after, strict=True))
    elapsed_s = after[0]["at_s"] - before[0]["at_s"]
    other = sum(last.get("other", 0) for last in after)
    if count <= 0 or other:
        raise RuntimeError(f"{count} frames were measured and {other} had no result: {processes.children}")
    per_frame = {name: (cpu_after[name] - cpu_before[name]) / count * 1e6 for name in cpu_after}
    return Measured(count / elapsed_s, per_frame)


def headrace_throughput(
    load: Load, window: Window, *, bundle: str = "auto", lane: str = "inline", config: str | None = None,
    device: str = "emulated",
) -> Measured:  # fmt: skip
    """Measure headrace: a producer, a broker, one worker and a subscriber, each a process."""
    height, width, channels = load.shape
    if config is None:
        model = Model((SquareClass(max(height, width)),), channels=channels, emulated_ms=NO_WORK_MS)
        config = broker_config(model, credits_count=max(64, load.in_flight))
    with Processes() as processes:
        address = processes.broker(config)
        processes.workers(address, 1, device)
        subscriber = processes.role("subscriber", address=address)
        subscriber.read()
        processes.role(
            "producer", address=address, shape=load.shape, in_flight=load.in_flight, streams=load.streams,
            bundle=bundle, lane=lane,
        ).read()  # fmt: skip
        return measure(processes, [subscriber], window)


def plain_throughput(load: Load, window: Window, kind: str, *, model: str = "") -> Measured:
    """Measure a baseline of ``benchmarks.forwarder``: kind "forwarder" or "proxy"."""
    with Processes() as processes:
        arguments = {"payload_bytes": load.nbytes} if kind == "forwarder" else {}
        addresses = processes.role(kind, "broker", **arguments).read()
        worker = processes.role(
            "plain-worker", "worker", address=addresses["back"], kind=kind, payload_bytes=load.nbytes,
            model=model, size=load.shape[0],
        )  # fmt: skip
        worker.read()
        producer = processes.role(
            "plain-producer",
            "producer",
            address=addresses["front"],
            shape=load.shape,
            in_flight=load.in_flight,
        )
        producer.read()
        return measure(processes, [producer], window)
