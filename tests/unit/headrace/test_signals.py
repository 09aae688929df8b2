"""Signals that ask to stop: the first in good order, its echo nothing, a later one at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from headrace.signals import SAME_REQUEST_NS, STOP_SIGNALS, StopRequests, stopped_by_signals


def test_a_request_at_the_same_moment_is_no_second_one() -> None:
    """timeout(1) signals a process and then its group."""
    requests = StopRequests()

    assert not requests.is_second(0)
    assert requests.is_first(100)
    assert not requests.is_first(101)
    assert not requests.is_second(100 + SAME_REQUEST_NS - 1)
    assert requests.is_second(100 + SAME_REQUEST_NS)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_echo_and_second(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Each does what it is for; afterwards the signals are handled as before."""
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    calls: list[object] = []
    now_ns = 5
    monkeypatch.setattr("headrace.signals.time.monotonic_ns", lambda: now_ns)

    with stopped_by_signals(lambda: calls.append("asked"), calls.append):
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        after_echo = list(calls)
        now_ns += SAME_REQUEST_NS
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)

    assert after_echo == ["asked"]
    assert calls == ["asked", number, signal.SIGINT]
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


def test_outside_the_main_thread_nothing_is_handled() -> None:
    """Python would refuse to; a broker run in a thread is stopped by a call."""
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def body() -> None:
        with stopped_by_signals(lambda: None, lambda _number: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)

    assert seen == [before]


ENDING = """
import os, signal, sys
from headrace.signals import ignore_echoes, stopped_by_signals

with stopped_by_signals(lambda: None, lambda number: None):
    if sys.argv[1] == "asked":
        signal.raise_signal(signal.SIGTERM)
ignore_echoes()
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(("how", "code"), [("asked", 0), ("not asked", -signal.SIGTERM)])
def test_the_echo_does_not_kill_a_process_that_has_ended_well(how: str, code: int) -> None:
    """It comes when the handlers are gone already; a process that nobody asked yet still obeys."""
    done = subprocess.run([sys.executable, "-P", "-c", ENDING, how], timeout=60)

    assert done.returncode == code
