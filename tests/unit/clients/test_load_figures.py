"""Figures of a load: counts that add up or say what is missing, and who was the limit."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hr_bench import PLAN, Played, told
from hr_repo import ROOT
from hypothesis import given
from hypothesis import strategies as st

from headrace.clients.load.figures import BEHIND_MS, Counts, NoticeCode, latency_of, percentile
from headrace.clients.load.generator import Cause
from headrace.clients.load.report import LoadReport
from headrace.protocol.messages import Status


def codes(played: Played, **changes: object) -> list[NoticeCode]:
    return [notice.code for notice in played.result(**changes).notices]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0.001, 1.0))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[float], share: float
) -> None:
    """Nearest rank: a value that was measured."""
    found = percentile(values, share)

    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-3
    assert sum(value < found for value in values) < share * len(values) + 1e-3


def test_a_percentile_of_nothing_is_not_a_number() -> None:
    """Not zero, which would look like a very good figure."""
    assert math.isnan(percentile([], 0.5))
    assert latency_of([]).count == 0
    assert latency_of([]).as_json()["p99_ms"] is None


def test_a_quiet_run_adds_up() -> None:
    """Counts of the whole step, rates and latencies of the measured span."""
    played = Played()
    played.run(50, latency_s=0.02)

    result = played.result()

    assert result.counts == Counts(sent=50, ok=50)
    assert result.counts.accepted == 50
    assert result.measured_s == 4.0
    assert result.offered_per_s == 10.0
    assert result.achieved_per_s == 10.0
    assert result.latency.count == 40
    assert result.latency.by_name["p50"] == pytest.approx(20.0)
    assert result.pool.by_name["p99"] == 2.0
    assert result.outside.by_name["p50"] == pytest.approx(18.0)
    assert result.problems == ()


def test_warm_up_and_late_ends_do_not_count_as_achieved() -> None:
    """Slow frames of the warm-up are left out; what ends after the schedule was not achieved in its time."""
    played = Played()
    first = played.send(0, 0.5)
    last = played.send(0, 4.9)
    played.end(0, first, 0.9)
    played.end(0, last, 5.2)

    result = played.result()

    assert result.achieved_per_s == 0.0
    assert result.latency.count == 1
    assert result.latency.max_ms == pytest.approx(300.0)


def test_every_end_has_its_own_count_and_code() -> None:
    """The account by status, rejects and other ends by code."""
    played = Played()
    ends = [
        (Status.OK, ""),
        (Status.ERROR, "batch_failed"),
        (Status.EXPIRED, "deadline"),
        (Status.SUPERSEDED, "newer_frame"),
        (Status.REJECTED, "queue_full"),
        (Status.REJECTED, "queue_full"),
    ]
    for number, (status, code) in enumerate(ends):
        seq = played.send(number % 4, 2.0)
        played.end(number % 4, seq, 2.1, status, code)

    result = played.result()

    assert result.counts == Counts(sent=6, ok=1, error=1, expired=1, superseded=1, rejected=2)
    assert result.counts.accepted == 4
    assert result.rejected_by_code == {"queue_full": 2}
    assert result.ended_by_code == {"batch_failed": 1, "deadline": 1, "newer_frame": 1}
    assert result.problems == ()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([*Status, None, "unfinished"])), min_size=1, max_size=60
    )
)
def test_the_account_adds_up_for_any_ends(ends: list[tuple[int, Status | str | None]]) -> None:
    """sent = accepted + rejected + missed + unfinished, in whole and over priorities and sizes."""
    played = Played()
    unfinished = set()
    for number, (stream, status) in enumerate(ends):
        seq = played.send(stream, number * 5.0 / len(ends))
        if isinstance(status, Status):
            played.end(stream, seq, number * 5.0 / len(ends) + 0.01, status, "why")
        elif status == "unfinished":
            unfinished.add(number)

    result = played.result(unfinished_lines=frozenset(unfinished))

    counts = result.counts
    assert counts.sent == len(ends)
    assert counts.sent == counts.accepted + counts.rejected + counts.missed + counts.unfinished
    assert counts.unfinished == len(unfinished)
    for groups in (result.priorities, result.sizes):
        total: Counter[str] = Counter()
        for group in groups:
            total.update(group.counts.as_json())
        assert total == Counter(counts.as_json())
        assert sum(group.streams for group in groups) == 4
    assert sum(second.due for second in result.seconds) == len(ends)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"unfinished_lines": frozenset({50})},
            "1 of 51 frames have no outcome 30 s after the last was sent",
        ),
        ({}, "1 frame ended but no outcome was seen; 0 were reported as missed"),
        ({"sent": 52, "missed": 1}, "the producers sent 52 frames, 51 are in the list"),
        ({"missed": 1, "duplicates": 2}, "2 outcomes came twice"),
        ({"missed": 1, "strangers": 3}, "3 outcomes came for frames that were never sent"),
    ],
)
def test_what_does_not_add_up_is_said(changes: dict[str, object], words: str) -> None:
    """One frame of 51 has no outcome here: only a reported gap explains it."""
    played = Played()
    played.run(50)
    played.send(0, 4.99)

    assert played.result(**changes).problems == (words,)


@pytest.mark.parametrize("changes", [{"missed": 1}, {"is_missed_unknown": True}])
def test_a_reported_gap_adds_up(changes: dict[str, object]) -> None:
    """The broker said that it had the outcomes no more: they are missed, not lost in silence."""
    played = Played()
    played.run(50)
    played.send(0, 4.99)

    result = played.result(**changes)

    assert result.counts.missed == 1
    assert result.problems == ()


def test_two_tellings_of_the_same_frames_must_agree() -> None:
    """What the broker told the producers and what it published are compared."""
    played = Played()
    played.run(50)

    ended = played.result(by_status=told(ok=49, error=1)).problems
    refused = played.result(rejected=told(queue_full=1)).problems

    assert ended == (
        "the broker told the producers of 49 ok, 50 were seen",
        "the broker told the producers of 1 error, 0 were seen",
    )
    assert refused == ("the producers got 1 reject, 0 were seen as outcomes",)


def test_a_run_in_which_nothing_ended_ok_has_failed() -> None:
    """A wrong size or a dead model makes an account that adds up and measures nothing."""
    played = Played()
    played.run(20, status=Status.REJECTED)

    assert played.result().problems == ("no frame ended ok",)
    assert played.result(is_interrupted=True).problems == ()


def test_a_stopped_step_is_measured_up_to_there() -> None:
    """Half of a step has the same rate as the whole."""
    played = Played()
    for number in range(30):
        seq = played.send(number % 4, number / 10)
        played.end(number % 4, seq, number / 10 + 0.001)

    result = played.result(is_interrupted=True, sending_s=3.0)

    assert result.measured_s == pytest.approx(2.0)
    assert result.offered_per_s == pytest.approx(10.0)
    assert math.isnan(played.result(is_interrupted=True, sending_s=0.5).offered_per_s)


def test_frames_not_sent_count_as_offered() -> None:
    """A generator that leaves frames out must not look as if less had been asked of it."""
    played = Played()
    played.run(40)

    result = played.result(unsent=[(102.0, Cause.SENDER), (103.0, Cause.WINDOW), (100.2, Cause.WINDOW)])

    assert result.unsent == {"sender": 1, "window": 2}
    assert result.offered_per_s == pytest.approx((32 + 2) / 4.0)


# -- who was the limit ------------------------------------------------------------------------------------


def test_a_sender_that_is_late_by_itself_says_so() -> None:
    """With how late and how busy it was: the pool is not to blame."""
    played = Played()
    played.run(50, lag_s=BEHIND_MS / 1e3 + 0.001, latency_s=0.02)

    result = played.result(process_cpu_s=4.9, sender_cpu_s=2.5)

    assert [notice.code for notice in result.notices] == [NoticeCode.SENDER_BEHIND]
    message = result.notices[0].message
    for words in ("up to 11 ms", "p99 11.0 ms", "98% of a core (50% for sending)", "Do not blame the pool"):
        assert words in message


def test_frames_left_out_are_the_sender_s_fault() -> None:
    """Also when those that were sent left in time."""
    played = Played()
    played.run(50)

    assert codes(played, unsent=[(101.5, Cause.SENDER)]) == [NoticeCode.SENDER_BEHIND]


def test_frames_held_up_by_the_pool_are_not_the_sender_s_fault() -> None:
    """No room in the producers: the pool took less than was offered."""
    played = Played()
    for number in range(50):
        seq = played.send(0, number / 10, lag_s=0.5, is_held_up=True)
        played.end(0, seq, number / 10 + 0.501)

    assert codes(played, held_up=3, unsent=[(101.5, Cause.WINDOW)]) == [NoticeCode.WINDOW_FULL]


def test_a_busy_generator_says_so() -> None:
    """In time, but with all that one process has: its own waits are in the figures."""
    played = Played()
    played.run(50)

    assert codes(played, process_cpu_s=4.8) == [NoticeCode.GENERATOR_BUSY]
    assert codes(played, process_cpu_s=2.0) == []


def test_frames_that_wait_for_credits_are_told_from_a_slow_pool() -> None:
    """2 ms in the broker and 50 ms outside: more producers would help, more workers would not."""
    played = Played()
    played.run(50, latency_s=0.052)

    assert codes(played) == [NoticeCode.WAITED_OUTSIDE]


def test_the_operations_guide_explains_every_notice() -> None:
    """What it says and what to do about it."""
    guide = (ROOT / "docs" / "operations.md").read_text()

    assert [code for code in NoticeCode if f"| `{code}` |" not in guide] == []


# -- the report -------------------------------------------------------------------------------------------


def report(*played: Played, **fields: object) -> LoadReport:
    steps = tuple(replace(each.result(), rate=10.0 * n) for n, each in enumerate(played, start=1))
    return LoadReport("tcp://host:5555", PLAN, "pool: one", steps, **fields)  # type: ignore[arg-type]


def test_the_report_says_that_the_account_adds_up() -> None:
    """In words for people, as JSON without NaN for machines."""
    played = Played()
    played.run(50)

    text, value = report(played).text(), json.loads(json.dumps(report(played).as_json(), allow_nan=False))

    assert "the account adds up: each of 50 frames sent has exactly one end" in text
    assert value["steps"][0]["account"]["sent"] == 50
    assert value["problems"] == []
    assert value["plan"]["sizes"] == [{"size": "48x64", "share": 0.5}, {"size": "96x128", "share": 0.5}]


def test_the_report_names_what_is_missing() -> None:
    """With the rate at which it was; and it does not say that all is well."""
    good, bad = Played(), Played()
    good.run(50)
    bad.run(50)
    bad.send(0, 4.9)

    shown = report(good, bad, messages={"queue_full": "64 wait"}, is_interrupted=True)

    assert shown.all_problems() == ["20/s: 1 frame ended but no outcome was seen; 0 were reported as missed"]
    text = shown.text()
    assert "problem: 20/s: 1 frame ended" in text
    assert "queue_full: 64 wait" in text
    assert "interrupted" in text
    assert "adds up" not in text.splitlines()[-1]


def test_tables_have_a_column_for_each_cell() -> None:
    """Also in a step in which nothing was measured."""
    played = Played()

    for table in report(played, played).tables():
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert len(table.rows) >= 2
