"""A step of a load by hand: frames with the ends that a test says, on a clock that a test turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.clients.load.figures import StepResult, result_of
from headrace.clients.load.generator import LoadPlan, Step
from headrace.clients.load.ledger import Ledger
from headrace.clients.load.payloads import Size
from headrace.protocol.messages import Outcome, Status, Timing

NAMES = ("b/cam-0", "b/cam-1", "b/cam-2", "b/cam-3")

#: Two sizes and two priorities over four streams; 1 s of warm-up, 4 s measured.
PLAN = LoadPlan(
    sizes=((Size(48, 64), 0.5), (Size(96, 128), 0.5)),
    rates=(10.0,),
    streams_count=4,
    priorities=((0, 0.75), (5, 0.25)),
    seconds=4.0,
    warm_up_s=1.0,
)
SIZE_OF = (0, 1, 0, 1)
PRIORITY_OF = (0, 0, 0, 1)


def outcome(stream: int, seq: int, status: Status = Status.OK, code: str = "", **fields: Any) -> Outcome:
    return Outcome(
        stream=NAMES[stream], epoch=1, seq=seq, boot=1, pub_seq=seq, status=status, code=code, **fields
    )


@dataclass
class Played:
    """A ledger whose clock is ``now_s``, and the step it is of. The producers know what the ledger knows,
    unless a test changes ``step``."""

    now_s: float = 100.0
    plan: LoadPlan = PLAN
    step: Step = field(default_factory=lambda: Step(10.0, 0, 50, 100.0, 0, sending_s=5.0))

    def __post_init__(self) -> None:
        self.ledger = Ledger(NAMES, clock=lambda: self.now_s)
        self._next_seq = [0] * len(NAMES)

    def send(self, stream: int, due_s: float, *, lag_s: float = 0.0, is_held_up: bool = False) -> int:
        """Send a frame that is due so long after the begin; return its seq."""
        due_s += self.step.began_s
        self.ledger.open(stream, due_s, due_s + lag_s, is_held_up=is_held_up)
        self._next_seq[stream] += 1
        self.step.sent += 1
        return self._next_seq[stream] - 1

    def end(self, stream: int, seq: int, at_s: float, status: Status = Status.OK, code: str = "") -> None:
        """Let an outcome come so long after the begin; the broker says it took 2 ms."""
        self.now_s = self.step.began_s + at_s
        timing = Timing(published_us=2_000)
        self.ledger.put([outcome(stream, seq, status, code, message=f"because of {code}", timing=timing)])
        if status is Status.REJECTED:
            self.step.rejected[code] += 1
        else:
            self.step.by_status[status.value] += 1

    def run(
        self, count: int, *, latency_s: float = 0.01, lag_s: float = 0.0, status: Status = Status.OK
    ) -> None:
        """Send ``count`` frames evenly over the step, each of which ends after ``latency_s``."""
        for number in range(count):
            due_s = number * self.plan.step_s / count
            seq = self.send(number % 4, due_s, lag_s=lag_s)
            self.end(number % 4, seq, due_s + latency_s, status, "" if status is Status.OK else "why")

    def result(self, **changes: Any) -> StepResult:
        """Return the figures, with fields of the step changed."""
        step = replace(self.step, end=len(self.ledger), **changes)
        return result_of(step, self.ledger, self.plan, SIZE_OF, PRIORITY_OF)


def told(**counts: int) -> Counter[str]:
    return Counter(counts)
