"""Signals that ask to stop: the first in good order, its echo nothing, a later one at once."""

from __future__ import annotations

import signal
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
