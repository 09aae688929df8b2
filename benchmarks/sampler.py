"""Where a broker's CPU time goes: a broker that samples itself.

The kernel sends SIGPROF once per so much CPU time of the whole process, not of the clock: what waits costs
nothing, on a busy machine too, which a sampler from outside gets wrong. A sample while the main thread
waits in its poll is ZeroMQ's own thread at work: copying to and from the network.
"""

from __future__ import annotations

import collections
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.broker.shell import Shell
from headrace.cli import main as headrace_main

#: The kernel's own tick is some milliseconds; asking for less gets no more.
INTERVAL_S = 0.001

_CORE, _OUTER = "finish frames", "rest of the loop"

#: Stage -> the function that begins it: file and beginning of the name.
STAGES: dict[str, tuple[str, str]] = {
    "network (ZeroMQ's thread), poll": ("poll.py", "Poller.poll"),
    "receive parts": ("sockets.py", "receive"),
    "decode": ("codec.py", "decode"),
    "admit and queue": ("admission.py", "Admission.admit"),
    "close and dispatch batches": ("core.py", "BrokerCore._on_tick"),
    _CORE: ("core.py", "BrokerCore.handle"),
    "encode": ("codec.py", "encode"),
    "send parts": ("sockets.py", "send"),
    _OUTER: ("shell.py", "Shell._turn"),
}


def run_broker(output: str, arguments: list[str]) -> None:
    """Be ``headrace broker ARGUMENTS``; write the samples to ``output`` when it ends."""
    samples: collections.Counter[tuple[str, str]] = collections.Counter()

    def take(_number: int, frame: FrameType | None) -> None:
        innermost = "" if frame is None else _name(frame)
        samples[_stage_of(frame), innermost] += 1

    run = Shell.run

    def run_sampled(shell: Shell) -> None:
        signal.signal(signal.SIGPROF, take)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        try:
            run(shell)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            rows = [(*key, count) for key, count in samples.items()]
            Path(output).write_text(json.dumps(rows), encoding="utf-8")

    Shell.run = run_sampled  # type: ignore[method-assign, assignment]
    sys.argv = ["headrace", *arguments]
    headrace_main()


def read_samples(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the shares (0 to 1) by stage and by innermost function."""
    rows: list[tuple[str, str, int]] = json.loads(path.read_text(encoding="utf-8"))
    total = sum(count for _, _, count in rows) or 1
    by_stage: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    by_function: collections.Counter[str] = collections.Counter()
    for stage, function, count in rows:
        by_stage[stage] += count / total
        by_function[function] += count
    return by_stage, {name: count / total for name, count in by_function.most_common()}


def _stage_of(frame: FrameType | None) -> str:
    """Return the innermost stage of a stack; the loop and the core's ``handle`` hold the others."""
    found = _OUTER
    while frame is not None:
        stage = _stage_at(frame)
        if stage not in {"", _OUTER, _CORE}:
            return stage
        if stage == _CORE:
            found = _CORE
        frame = frame.f_back
    return found


def _stage_at(frame: FrameType) -> str:
    code: Any = frame.f_code
    file, name = code.co_filename.rpartition("/")[2], code.co_qualname
    return next((stage for stage, (f, n) in STAGES.items() if file == f and name.startswith(n)), "")


def _name(frame: FrameType) -> str:
    code: Any = frame.f_code
    return f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])} {code.co_qualname}"
