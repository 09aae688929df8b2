"""The demo's account: it adds up, or says in words what does not."""

from __future__ import annotations

import pytest

from headrace.demo.account import DemoAccount

SENT = {"a": 5, "b": 3}
OUTCOMES = {"a": {"ok": 3, "superseded": 1, "rejected": 1}, "b": {"ok": 1, "error": 1, "expired": 1}}
BROKER = {
    "received": 8,
    "accepted": 7,
    "ok": 4,
    "error": 1,
    "expired": 1,
    "superseded": 1,
    "rejected": 1,
    "unfinished": 0,
}


def test_an_account_that_adds_up_has_no_problems():
    account = DemoAccount(SENT, OUTCOMES, BROKER)

    assert account.problems() == []
    assert account.totals == {"ok": 4, "error": 1, "expired": 1, "superseded": 1, "rejected": 1}
    assert (account.sent_count, account.accepted_count) == (8, 7)
    assert account.line() == (
        "8 frames sent = 7 accepted (4 ok + 1 error + 1 expired + 1 superseded) + 1 rejected"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"sent": {"a": 6, "b": 3}}, "a: 6 frames sent but 5 outcomes seen", id="lost"),
        pytest.param({"sent": {"a": 4, "b": 3}}, "a: 4 frames sent but 5 outcomes seen", id="one-too-many"),
        pytest.param({"sent": {**SENT, "c": 0}}, "c: no frame ended ok", id="silent-stream"),
        pytest.param(
            {"outcomes": {**OUTCOMES, "b": {"error": 2, "expired": 1}}}, "b: no frame ended ok", id="no-ok"
        ),
        pytest.param({"outcomes": {**OUTCOMES, "x": {"ok": 1}}}, "x: outcomes of a stream nobody", id="x"),
        pytest.param({"broker": None}, "could not be read", id="no-broker"),
        pytest.param({"broker": {**BROKER, "ok": 5}}, "broker counts ok = 5, this side 4", id="broker-ok"),
        pytest.param({"broker": {**BROKER, "unfinished": 1}}, "unfinished = 1, this side 0", id="unfinished"),
        pytest.param({"broker": {**BROKER, "accepted": 8}}, "accepted = 8, this side 7", id="accepted"),
        pytest.param({"broker": {}}, "accepted = 0, this side 7", id="empty-broker"),
        pytest.param({"duplicate_count": 2}, "2 outcomes came twice", id="twice"),
        pytest.param({"missed_count": 1}, "1 outcomes were reported as missed", id="missed"),
    ],
)
def test_what_does_not_add_up_is_said(changes, words):
    values = {"sent": SENT, "outcomes": OUTCOMES, "broker": BROKER, **changes}

    assert any(words in problem for problem in DemoAccount(**values).problems())
