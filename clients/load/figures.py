"""What one step of a load brought: counts that must add up, rates, latencies, and who was the limit.

Counts are of the whole step. Rates and latencies are of the measured span alone, which begins after the
warm-up and ends with the schedule; latency runs from the time a frame was due to the time its outcome was
seen, of frames that ended ``ok``. Pure arithmetic over the ledger; no clock in here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.clients.load.generator import MAX_LAG_S, WINDOW_BYTES, WINDOW_FRAMES, Cause, LoadPlan, Step
from headrace.clients.load.ledger import Ledger
from headrace.protocol.messages import Status

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}

#: The sender is behind when one frame in a hundred leaves this late by its own fault: as much as a short
#: batch.
BEHIND_MS = 10.0

#: One Python process does little beyond one core: from here on its own threads wait for each other.
BUSY_SHARE = 0.9

#: Frames wait outside the broker when half of them spend this long there, and longer than in it.
OUTSIDE_MS = 10.0


class NoticeCode(StrEnum):
    """What a reader must know before believing the figures."""

    SENDER_BEHIND = "sender_behind"
    GENERATOR_BUSY = "generator_busy"
    WINDOW_FULL = "window_full"
    WAITED_OUTSIDE = "waited_outside"


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice and its figures in words."""

    code: NoticeCode
    message: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How frames ended. ``sent = accepted + rejected + missed + unfinished``: ``missed`` ended without this
    side seeing how, ``unfinished`` had not ended within the limit."""

    sent: int = 0
    ok: int = 0
    error: int = 0
    expired: int = 0
    superseded: int = 0
    rejected: int = 0
    missed: int = 0
    unfinished: int = 0

    @property
    def accepted(self) -> int:
        return self.ok + self.error + self.expired + self.superseded

    def as_json(self) -> dict[str, int]:
        return {
            "sent": self.sent, "accepted": self.accepted, "ok": self.ok, "error": self.error,
            "expired": self.expired, "superseded": self.superseded, "rejected": self.rejected,
            "missed": self.missed, "unfinished": self.unfinished,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles in milliseconds by name, NaN without frames; ``count`` frames were measured."""

    count: int
    mean_ms: float
    max_ms: float
    by_name: dict[str, float]

    def as_json(self) -> dict[str, object]:
        named = {f"{name}_ms": finite(value) for name, value in self.by_name.items()}
        return {"count": self.count, "mean_ms": finite(self.mean_ms), **named, "max_ms": finite(self.max_ms)}


@dataclass(frozen=True, slots=True)
class Group:
    """Frames of one priority, or of one size."""

    name: str
    streams: int
    counts: Counts
    latency: Latency


@dataclass(frozen=True, slots=True)
class Second:
    """One second of a step, by the time frames were due: ``due`` were sent, ``ok`` of them ended so."""

    at_s: float
    due: int
    ok: int
    latency: Latency


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything about one rate. ``problems`` say in words what does not add up."""

    rate: float
    seed: int
    scheduled: int
    unsent: dict[str, int]
    counts: Counts
    rejected_by_code: dict[str, int]
    ended_by_code: dict[str, int]
    by_lane: dict[str, int]
    measured_s: float
    offered_per_s: float
    achieved_per_s: float
    latency: Latency
    pool: Latency
    outside: Latency
    lag: Latency
    cpu_share: float
    sender_cpu_share: float
    drain_s: float
    is_interrupted: bool
    priorities: tuple[Group, ...]
    sizes: tuple[Group, ...]
    seconds: tuple[Second, ...]
    problems: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` (0 to 1) of the values do not exceed; NaN for no values."""
    return _ranked(sorted(values), share)


def latency_of(values: Iterable[float]) -> Latency:
    """Return the percentiles of latencies in milliseconds."""
    ordered = sorted(values)
    by_name = {name: _ranked(ordered, share) for name, share in SHARES.items()}
    if not ordered:
        return Latency(0, math.nan, math.nan, by_name)
    return Latency(len(ordered), math.fsum(ordered) / len(ordered), ordered[-1], by_name)


def finite(value: float) -> float | None:
    """Return a number as JSON can hold it, to the microsecond of a millisecond."""
    return round(value, 3) if math.isfinite(value) else None


def result_of(
    step: Step, ledger: Ledger, plan: LoadPlan, size_of: Sequence[int], priority_of: Sequence[int]
) -> StepResult:
    """Return the figures of a finished step."""
    span = _Span.of(step, plan)
    lines = range(step.first, step.end)
    measured = [index for index in lines if span.has(ledger.due_s[index])]
    in_time = sum(
        ledger.status[index] is Status.OK and span.has(ledger.ended_s[index] or 0.0) for index in lines
    )
    unsent = sum(span.has(due_s) for due_s, _ in step.unsent)
    sizes = [size.name for size, _ in plan.sizes]
    priorities = [str(priority) for priority, _ in plan.priorities]
    result = StepResult(
        rate=step.rate,
        seed=step.seed,
        scheduled=step.scheduled,
        unsent=dict(Counter(cause.value for _, cause in step.unsent)),
        counts=_counts(lines, ledger, step),
        rejected_by_code=_codes(lines, ledger, {Status.REJECTED}),
        ended_by_code=_codes(lines, ledger, {Status.ERROR, Status.EXPIRED, Status.SUPERSEDED}),
        by_lane=dict(step.by_lane),
        measured_s=span.length_s,
        offered_per_s=_ratio(len(measured) + unsent, span.length_s),
        achieved_per_s=_ratio(in_time, span.length_s),
        latency=latency_of(_latencies(measured, ledger)),
        pool=latency_of(_pool_ms(measured, ledger)),
        outside=latency_of(_outside_ms(measured, ledger)),
        lag=latency_of(_own_lags_ms(measured, ledger)),
        cpu_share=_ratio(step.process_cpu_s, step.sending_s),
        sender_cpu_share=_ratio(step.sender_cpu_s, step.sending_s),
        drain_s=step.drain_s,
        is_interrupted=step.is_interrupted,
        priorities=_groups(priorities, priority_of, span, ledger, step),
        sizes=_groups(sizes, size_of, span, ledger, step),
        seconds=_seconds(step, ledger, plan.step_s),
    )
    return replace(
        result,
        problems=tuple(_problems(result, step, plan)),
        notices=tuple(_notices(result, step)),
    )


# -- counts and spans -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """The measured span on the ledger's clock: from ``from_s`` on, before ``to_s``."""

    from_s: float
    to_s: float

    @classmethod
    def of(cls, step: Step, plan: LoadPlan) -> _Span:
        # A step that was stopped is measured up to there; one that ended late, up to the end of its schedule.
        length_s = min(plan.step_s, step.sending_s) if step.is_interrupted else plan.step_s
        from_s = step.began_s + plan.warm_up_s
        return cls(from_s, max(from_s, step.began_s + length_s))

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s

    def has(self, time_s: float) -> bool:
        return self.from_s <= time_s < self.to_s


def _counts(lines: Iterable[int], ledger: Ledger, step: Step) -> Counts:
    ends: Counter[Status | None] = Counter()
    sent = unfinished = 0
    for index in lines:
        sent += 1
        status = ledger.status[index]
        ends[status] += 1
        unfinished += status is None and index in step.unfinished_lines
    return Counts(
        sent=sent,
        ok=ends[Status.OK],
        error=ends[Status.ERROR],
        expired=ends[Status.EXPIRED],
        superseded=ends[Status.SUPERSEDED],
        rejected=ends[Status.REJECTED],
        missed=ends[None] - unfinished,
        unfinished=unfinished,
    )


def _codes(lines: Iterable[int], ledger: Ledger, among: set[Status]) -> dict[str, int]:
    found = Counter(ledger.code[index] for index in lines if ledger.status[index] in among)
    return dict(found.most_common())


def _latencies(lines: Iterable[int], ledger: Ledger) -> Iterator[float]:
    for index in lines:
        ended_s = ledger.ended_s[index]
        if ended_s is not None and ledger.status[index] is Status.OK:
            yield (ended_s - ledger.due_s[index]) * 1e3


def _pool_ms(lines: Iterable[int], ledger: Ledger) -> Iterator[float]:
    """Yield what the broker itself says: milliseconds from receiving a frame to publishing its outcome."""
    for index in lines:
        pool_us = ledger.pool_us[index]
        if pool_us is not None and ledger.status[index] is Status.OK:
            yield pool_us / 1e3


def _outside_ms(lines: Iterable[int], ledger: Ledger) -> Iterator[float]:
    """Yield milliseconds from leaving the sender to the outcome, without those in the broker: the way there
    and back, and the wait for credits."""
    for index in lines:
        pool_us, ended_s = ledger.pool_us[index], ledger.ended_s[index]
        if pool_us is not None and ended_s is not None and ledger.status[index] is Status.OK:
            yield (ended_s - ledger.left_s[index]) * 1e3 - pool_us / 1e3


def _own_lags_ms(lines: Iterable[int], ledger: Ledger) -> Iterator[float]:
    return (
        (ledger.left_s[index] - ledger.due_s[index]) * 1e3 for index in lines if not ledger.is_held_up[index]
    )


def _groups(
    names: Sequence[str], group_of: Sequence[int], span: _Span, ledger: Ledger, step: Step
) -> tuple[Group, ...]:
    members: list[list[int]] = [[] for _ in names]
    for index in range(step.first, step.end):
        members[group_of[ledger.streams[index]]].append(index)
    return tuple(
        Group(
            name=name,
            streams=sum(group == number for group in group_of),
            counts=_counts(members[number], ledger, step),
            latency=latency_of(_latencies((i for i in members[number] if span.has(ledger.due_s[i])), ledger)),
        )
        for number, name in enumerate(names)
    )


def _seconds(step: Step, ledger: Ledger, length_s: float) -> tuple[Second, ...]:
    members: list[list[int]] = [[] for _ in range(math.ceil(length_s))]
    for index in range(step.first, step.end):
        members[min(len(members) - 1, int(ledger.due_s[index] - step.began_s))].append(index)
    return tuple(
        Second(
            at_s=float(number),
            due=len(each),
            ok=sum(ledger.status[index] is Status.OK for index in each),
            latency=latency_of(_latencies(each, ledger)),
        )
        for number, each in enumerate(members)
    )


def _ranked(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return math.nan
    # Nearest rank: always a value that was measured, never one between two.
    return ordered[min(len(ordered) - 1, max(0, -(-round(share * len(ordered) * 1e6) // 1_000_000) - 1))]


def _ratio(value: float, of: float) -> float:
    return value / of if of > 0 else math.nan


# -- findings ---------------------------------------------------------------------------------------------


def _problems(result: StepResult, step: Step, plan: LoadPlan) -> Iterator[str]:
    """Say what does not add up."""
    counts = result.counts
    if counts.unfinished:
        limit = f"{plan.drain_limit_s:g} s after the last was sent"
        yield f"{counts.unfinished:,} of {_many(counts.sent, 'frame')} have no outcome {limit}"
    if counts.missed > step.missed and not step.is_missed_unknown:
        missed = _many(counts.missed, "frame")
        yield f"{missed} ended but no outcome was seen; {step.missed:,} were reported as missed"
    if step.sent != counts.sent:
        yield f"the producers sent {_many(step.sent, 'frame')}, {counts.sent:,} are in the list"
    if not (counts.unfinished or counts.missed or step.unknown or step.is_missed_unknown):
        for name, seen in (
            ("ok", counts.ok), ("error", counts.error), ("expired", counts.expired),
            ("superseded", counts.superseded),
        ):  # fmt: skip
            told = step.by_status[name]
            if told != seen:
                yield f"the broker told the producers of {told:,} {name}, {seen:,} were seen"
        told = sum(step.rejected.values())
        if told != counts.rejected:
            yield f"the producers got {_many(told, 'reject')}, {counts.rejected:,} were seen as outcomes"
    if step.duplicates:
        yield f"{_many(step.duplicates, 'outcome')} came twice"
    if step.strangers:
        yield f"{_many(step.strangers, 'outcome')} came for frames that were never sent"
    if counts.sent and not counts.ok and not result.is_interrupted:
        yield "no frame ended ok"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _notices(result: StepResult, step: Step) -> Iterator[Notice]:
    """Say who was the limit, if it was not the pool alone."""
    lag, cpu = result.lag, result.cpu_share
    late, roomless = (result.unsent.get(cause, 0) for cause in (Cause.SENDER, Cause.WINDOW))
    if late or lag.by_name["p99"] > BEHIND_MS:
        reason = "all that one Python process can" if cpu > BUSY_SHARE else "more was not given to it in time"
        yield Notice(
            NoticeCode.SENDER_BEHIND,
            f"the generator itself was late: frames left up to {lag.max_ms:.0f} ms after they were due (p99"
            f" {lag.by_name['p99']:.1f} ms), and {late:,} were not sent since they were over {MAX_LAG_S:g} s"
            f" late; it used {cpu:.0%} of a core ({result.sender_cpu_share:.0%} for sending), {reason}. Do"
            " not blame the pool for these figures: lower the rate, or run the generator on another machine,"
            " or several of them",
        )
    elif cpu > BUSY_SHARE:
        yield Notice(
            NoticeCode.GENERATOR_BUSY,
            f"the generator used {cpu:.0%} of a core: its own waits are in the latencies",
        )
    if step.held_up:
        yield Notice(
            NoticeCode.WINDOW_FULL,
            f"{step.held_up:,} frames found no room in the producers ({WINDOW_FRAMES:,} frames or"
            f" {WINDOW_BYTES // 2**20:,} MiB without an end) and {roomless:,} were not sent for it: the pool"
            " took less than was offered",
        )
    pool_ms = result.pool.by_name["p50"]
    outside_ms = result.outside.by_name["p50"]
    if outside_ms > max(OUTSIDE_MS, pool_ms):
        yield Notice(
            NoticeCode.WAITED_OUTSIDE,
            f"half of the frames were {outside_ms:.0f} ms on the way or waiting for the broker's credits, and"
            f" {pool_ms:.1f} ms in the broker: if its workers are idle, use more --producers or raise"
            " admission.credits_per_producer",
        )
