"""Captures one CUDA graph per bucket, compares each with plain runs, and keeps to a memory budget.

Not here: the order of a batch's copies (``slots``), what is served (``engine``).

Captured is the largest bucket first: some buffers inside ONNX Runtime are freed and made anew when a larger
one is asked for, and a graph captured before would go on reading the old one. A graph can't be given back
while its session lives, so a budget is kept by not capturing: the buckets with most of the expected traffic
are chosen, what does not fit runs plain and is named.

A capture that fails, or whose answers differ from a plain run, costs that bucket its graph, not the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from headrace.workers.cuda.device import PLAIN, CudaFaultError, Device, OutOfMemoryError, RunFailedError
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.slots import Bucket, Slots
from headrace.workers.self_test import difference, join_rows

log = structlog.get_logger()

#: What one captured graph is taken to cost beside its inputs and outputs, until one was measured. Not
#: measured on a GPU: ONNX Runtime keeps the executable graph, cuBLAS may keep a workspace of 32 MiB for it.
ESTIMATED_GRAPH_BYTES = 32 * 1024 * 1024

#: Replays of each input after the first that agreed: the second and third go another way through a runtime.
EXTRA_REPLAYS = 2

Rows = dict[str, NDArray[np.generic]]
Outputs = list[NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bucket that could be captured. ``share`` is its part of the expected traffic, in any unit.

    ``singles`` are two different rows, ``expected`` what plain runs answered to the two batches that
    ``alternate`` makes of them."""

    bucket: Bucket
    share: float
    singles: tuple[Rows, Rows]
    expected: tuple[Outputs, Outputs]

    @property
    def io_bytes(self) -> int:
        return self.bucket.io_bytes


class Choosable(Protocol):
    """What ``choose`` looks at: the part of the expected traffic, and the bytes of inputs and outputs."""

    @property
    def share(self) -> float: ...
    @property
    def io_bytes(self) -> int: ...


ChoosableT = TypeVar("ChoosableT", bound=Choosable)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that graphs may take together (None: no bound) and what they have taken."""

    limit_bytes: int | None
    used_bytes: int = 0

    def has_room(self, nbytes: int) -> bool:
        """Tell whether ``nbytes`` more stay within the limit."""
        return self.limit_bytes is None or self.used_bytes + nbytes <= self.limit_bytes


class Capturer:
    """Captures for one device. ``first_id`` counts on: ids are unique in the process, so that none is ever
    taken for another's."""

    def __init__(
        self,
        device: Device,
        slots: Slots,
        gate: Gate,
        budget: Budget,
        *,
        note_attempt: Callable[[str], None] = lambda label: None,
        forget_attempt: Callable[[str], None] = lambda label: None,
    ) -> None:
        self._device = device
        self._slots = slots
        self._gate = gate
        self.budget = budget
        self._next_id = 1
        self._note_attempt = note_attempt
        self._forget_attempt = forget_attempt

    def capture_all(self, candidates: Sequence[Candidate]) -> list[str]:
        """Capture what the budget holds, largest first; return a note for every bucket left plain.

        Raises CudaFaultError when the device did not survive."""
        chosen, left_out = choose(candidates, self.budget)
        notes = [self._leave_plain(each.bucket, "gpu_memory_mb holds no more graphs") for each in left_out]
        for each in chosen:
            if not self.budget.has_room(0):
                notes.append(self._leave_plain(each.bucket, "gpu_memory_mb is spent"))
                continue
            reason = self._capture(each)
            if reason:
                notes.append(self._leave_plain(each.bucket, reason))
        return notes

    def _capture(self, candidate: Candidate) -> str:
        """Capture one bucket; return why it must run plain, or nothing."""
        bucket, graph_id = candidate.bucket, self._next_id
        self._next_id += 1
        self._note_attempt(bucket.key)
        with self._gate.quiet(), self._device.range(f"capture {bucket.label}"):
            begun_ns, free_bytes = time.perf_counter_ns(), self._device.memory().free_bytes
            try:
                reason = self._capture_and_compare(candidate, graph_id)
            except (RunFailedError, OutOfMemoryError) as error:
                reason = str(error) or type(error).__name__
            except CudaFaultError as error:
                # An operation that can't be captured says "CUDA error" too; whether the context survived
                # shows when the session is asked again.
                reason = str(error)
            bucket.graph_bytes = max(0, free_bytes - self._device.memory().free_bytes)
            bucket.capture_ns = time.perf_counter_ns() - begun_ns
            self.budget = Budget(
                self.budget.limit_bytes,
                self.budget.used_bytes + bucket.graph_bytes + bucket.io_bytes,
            )
            if reason:
                bucket.graph_id, bucket.captured = PLAIN, ()
                self._check_alive(candidate, reason)
        self._forget_attempt(bucket.key)
        return reason

    def _capture_and_compare(self, candidate: Candidate, graph_id: int) -> str:
        bucket, run = candidate.bucket, self._slots.run_once
        first, second = (alternate(candidate.singles, bucket.rows, start) for start in (0, 1))
        for_first, for_second = candidate.expected
        found = run(bucket, first, graph_id).outputs
        bucket.graph_id, bucket.captured = graph_id, bucket.bound
        steps = [(found, for_first)]
        for probe, expected in ((second, for_second), (first, for_first)) * (1 + EXTRA_REPLAYS // 2):
            steps.append((run(bucket, probe, graph_id).outputs, expected))
        for number, (outputs, expected) in enumerate(steps):
            what = compare(outputs, expected)
            if what:
                return f"replay {number} of the captured graph is not the plain run: {what}"
        return ""

    def _check_alive(self, candidate: Candidate, reason: str) -> None:
        """Raise CudaFaultError unless the session still answers rightly."""
        try:
            probe = alternate(candidate.singles, candidate.bucket.rows, 0)
            found = self._slots.run_once(candidate.bucket, probe, PLAIN).outputs
        except (RunFailedError, OutOfMemoryError) as error:
            raise CudaFaultError(
                f"{candidate.bucket.label}: after a failed capture ({reason}) plain runs fail too: {error}"
            ) from error
        what = compare(found, candidate.expected[0])
        if what:
            raise CudaFaultError(
                f"{candidate.bucket.label}: after a failed capture ({reason}) a plain run is wrong: {what}"
            )

    @staticmethod
    def _leave_plain(bucket: Bucket, reason: str) -> str:
        bucket.why_plain = reason
        log.warning("bucket runs without a CUDA graph", bucket=bucket.label, reason=reason)
        return f"{bucket.label} runs without a CUDA graph: {reason}"


def alternate(singles: tuple[Rows, Rows], rows: int, start: int) -> Rows:
    """Return a batch in which the two rows take turns, so that rows which are mixed up show."""
    return join_rows([singles[(start + row) % 2] for row in range(rows)])


def choose(candidates: Sequence[ChoosableT], budget: Budget) -> tuple[list[ChoosableT], list[ChoosableT]]:
    """Return what to capture, largest first, and what a budget leaves out.

    When not all fit, those with the larger share of traffic come first, and of equal ones the larger: it has
    more to lose by the time between its kernels only when it is small, but it bounds the peak rate."""
    left_bytes = None if budget.limit_bytes is None else budget.limit_bytes - budget.used_bytes
    chosen: list[ChoosableT] = []
    left_out: list[ChoosableT] = []
    for each in sorted(candidates, key=lambda c: (-c.share, -c.io_bytes)):
        cost = each.io_bytes + ESTIMATED_GRAPH_BYTES
        if left_bytes is not None:
            if cost > left_bytes:
                left_out.append(each)
                continue
            left_bytes -= cost
        chosen.append(each)
    return sorted(chosen, key=lambda c: -c.io_bytes), left_out


def compare(found: Outputs, expected: Outputs) -> str:
    """Return in what way outputs differ beyond rounding, or nothing."""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return (
                f"output {number} is {mine.dtype} {list(mine.shape)}, not {theirs.dtype} {list(theirs.shape)}"
            )
        what = difference(theirs, mine)
        if what:
            return f"output {number}: {what}"
    return ""
