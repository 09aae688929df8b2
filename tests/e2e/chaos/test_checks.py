"""The checks of a chaos run see what they are there to see: each is shown a run that went wrong."""

from __future__ import annotations

import pytest

from chaos import checks
from chaos.checks import FinalStatus, ProducerLife, SubscriberLife

ACCOUNT = {"accepted": 3, "ok": 2, "error": 0, "expired": 1, "superseded": 0, "rejected": 0, "unfinished": 0}

PRODUCER = """\
pushed p/a 7 0 100
pushed p/a 7 1 101
pushed p/a 7 2 102
finished p/a 7 0 -
finished p/a 7 1 -
finished p/a 7 2 -
end sent=3
"""

SUBSCRIBER = """\
outcome p/a 1 0 7 0 ok - 0
missed p/a 1 1 - new_boot 0
outcome p/a 2 1 7 1 ok - 1
outcome p/a 2 2 7 2 expired deadline 1
end duplicates=1 missed=0 fetched=0
"""


def final(**changes: int) -> FinalStatus:
    return FinalStatus(2, {**ACCOUNT, **changes}, {"p/a": 3}, ready_ns=0)


def judged(producer: str = PRODUCER, subscriber: str = SUBSCRIBER, **account: int) -> list[str]:
    lives = [checks.read_producer("producer-0.1", producer)]
    others = [checks.read_subscriber("subscriber-0.1", subscriber)]
    return checks.check_all(lives, others, final(**account))


def test_a_run_that_went_well_passes() -> None:
    """A broker that restarted, one frame run twice and yielded once, an open end of the first boot."""
    assert judged() == []


@pytest.mark.parametrize(
    ("changed", "to", "word"),
    [
        pytest.param("finished p/a 7 1 -\n", "", "never concluded", id="a-frame-without-an-end"),
        pytest.param(
            "finished p/a 7 1 -\n", "finished p/a 7 1 -\nfinished p/a 7 1 -\n", "2 times", id="an-end-twice"
        ),
        pytest.param("finished p/a 7 1 -", "finished p/a 7 9 -", "never pushed", id="an-end-of-nothing"),
        pytest.param(
            "pushed p/a 7 2 102\n", "pushed p/a 7 2 102\npushed p/a 7 3 103\nfinished p/a 7 3 -\n",
            "seen by nobody", id="a-conclusion-without-an-outcome",
        ),
    ],
)  # fmt: skip
def test_what_a_producer_was_denied_is_seen(changed: str, to: str, word: str) -> None:
    """Every frame of a producer that lived is concluded once, and its outcome can be seen."""
    assert changed in PRODUCER

    faults = judged(producer=PRODUCER.replace(changed, to))

    assert any(word in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("changed", "to", "word"),
    [
        pytest.param("p/a 2 1 7 1", "p/a 2 2 7 1", "was expected", id="a-number-twice"),
        pytest.param("2 2 7 2", "2 2 7 1", "ended 2 times", id="a-frame-twice"),
        pytest.param("p/a 2 2 7 2", "p/a 2 3 7 2", "holes", id="a-silent-hole"),
        pytest.param("missed p/a 1 1 - new_boot 0\n", "", "without a word", id="a-boot-left-silently"),
        pytest.param("outcome p/a 2 2 7 2 expired deadline 1\n", "", "holes at the end", id="a-lost-tail"),
        pytest.param("duplicates=1", "duplicates=2", "second runs", id="a-wrong-count-of-second-runs"),
        pytest.param("outcome p/a 1 0", "outcome p/a 1 1", "holes", id="a-lost-beginning"),
    ],
)
def test_what_a_subscriber_was_denied_is_seen(changed: str, to: str, word: str) -> None:
    """No duplicate, and no hole that is neither missed nor a recognised second run."""
    assert changed in SUBSCRIBER

    faults = judged(subscriber=SUBSCRIBER.replace(changed, to))

    assert any(word in fault for fault in faults), faults


def test_a_killed_subscriber_is_judged_by_what_it_wrote() -> None:
    """Half a line and a missing end are no fault; a hole before them is."""
    killed = SUBSCRIBER.partition("outcome p/a 2 2")[0]

    assert checks.check_no_holes(checks.read_subscriber("s", killed + "outcome p/a 2"), final()) == []

    holed = checks.read_subscriber("s", killed.replace("p/a 2 1 7 1 ok - 1", "p/a 2 1 7 1 ok - 0"))
    assert len(checks.check_no_holes(holed, final())) == 1


def test_an_account_that_does_not_add_up_is_seen() -> None:
    """accepted = ok + error + expired + superseded, and the subscribers saw as many of each."""
    assert any("3 ended" in fault for fault in judged(accepted=4))
    assert any("1 ok seen of 5" in fault for fault in judged(ok=5, accepted=6))
    assert any("1 expired seen of 0" in fault for fault in judged(expired=0, accepted=2))


def test_subscribers_that_disagree_are_seen() -> None:
    """A number of a boot means one outcome, and a frame has one number in a boot."""
    lives = [
        checks.read_subscriber("s1", "outcome p/a 2 0 7 0 ok - 0\n"),
        checks.read_subscriber("s2", "outcome p/a 2 0 7 0 error x 0\n"),
        checks.read_subscriber("s3", "outcome p/a 2 1 7 0 ok - 0\n"),
    ]

    faults = checks.check_boots_agree(lives)

    assert len(faults) == 2


def test_many_faults_of_a_kind_are_cut_short() -> None:
    """A run that is thoroughly wrong still has a report that can be read."""
    life = ProducerLife("p", {checks.FrameName("s", 1, seq): 0 for seq in range(100)}, has_ended=True)

    faults = checks.check_all([life], [SubscriberLife("s")], final(accepted=3))

    assert len(faults) < 10
    assert any("95 more" in fault for fault in faults)
