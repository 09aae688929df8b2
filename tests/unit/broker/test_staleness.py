"""Streams that fall silent are reported once and stay as they were."""

from __future__ import annotations

from collections.abc import Iterator

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import events
from headrace.protocol.messages import Value


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """A core with a worker, and a producer that has sent one frame of cam-1 and got its outcome."""
    driver = hr.CoreDriver(hr.make_settings(stream_stale_ms=5_000, heartbeat_ms=60_000))
    driver.join_worker()
    driver.join_producer()
    serve(driver, 0)
    driver.actions.clear()
    yield driver
    driver.core.check_invariants()


def serve(driver: hr.CoreDriver, seq: int) -> list[act.Action]:
    """Push a frame and let the worker do it."""
    actions = driver.push(hr.frame(seq=seq))
    for sent in hr.batches(driver.tick()):
        driver.done(sent)
    return actions


def told(actions: list[act.Action]) -> list[tuple[str, dict[str, Value]]]:
    """The reports on streams."""
    reports = hr.only(actions, act.Report)
    return [(one.name, one.values) for one in reports if one.name.startswith("stream")]


def is_stale(driver: hr.CoreDriver) -> bool:
    """What status shows of cam-1."""
    streams = driver.core.status(driver.now_ns)["streams"]
    assert isinstance(streams, dict)
    stream = streams["cam-1"]
    assert isinstance(stream, dict)
    return bool(stream["is_stale"])


def test_silent_stream_is_reported_once_and_publishes_nothing(driver: hr.CoreDriver) -> None:
    """VID-06: the camera dies without closing. One report at the configured time; no outcome of its own."""
    before = driver.wait(4_999)
    at = driver.wait(1)
    after = driver.wait(25_000)

    assert told(before) == []
    assert told(at) == [("stream stale", {"stream": "cam-1", "quiet_ms": 5_000})]
    assert told(after) == []
    assert hr.outcomes(driver.actions) == []
    assert is_stale(driver)
    assert driver.core.status(driver.now_ns)["streams_stale"] == 1


def test_stream_that_goes_on_is_not_stale(driver: hr.CoreDriver) -> None:
    """Each frame begins the time anew, whatever the queue of looks says."""
    for seq in range(1, 6):
        driver.wait(4_000)
        serve(driver, seq)

    assert told(driver.actions) == []
    assert not is_stale(driver)
    assert told(driver.wait(5_000)) == [("stream stale", {"stream": "cam-1", "quiet_ms": 5_000})]


def test_stream_that_comes_back_is_watched_again(driver: hr.CoreDriver) -> None:
    """It resumes, is told so once, and may become stale a second time."""
    driver.wait(10_000)

    back = serve(driver, 1)
    resumed = is_stale(driver)
    serve(driver, 2)
    again = driver.wait(10_000)

    assert told(back) == [("stream resumed", {"stream": "cam-1"})]
    assert not resumed
    assert [name for name, _ in told(again)] == ["stream stale"]
    assert driver.core.staleness.stale_count == 2


@pytest.mark.parametrize("has_resumed", [False, True], ids=["ended", "another frame"])
def test_stream_whose_producer_said_goodbye_has_ended(driver: hr.CoreDriver, has_resumed: bool) -> None:
    """A file that was sent to its end is not a dead camera; who sends again after it is."""
    driver.wait(1_000)
    driver.send(events.ProducerLeft(b"p1"))
    if has_resumed:
        serve(driver, 1)

    silent = driver.wait(20_000)

    assert len(told(silent)) == has_resumed
    assert is_stale(driver) == has_resumed


def test_ended_stream_is_watched_when_it_begins_anew(driver: hr.CoreDriver) -> None:
    """Long after its end a stream of the same name comes again."""
    driver.send(events.ProducerLeft(b"p1"))
    driver.wait(20_000)

    begun = serve(driver, 1)

    assert told(begun) == []
    assert [name for name, _ in told(driver.wait(6_000))] == ["stream stale"]


def test_forgotten_stream_is_not_reported() -> None:
    """A stream that left the table has nobody to be reported to."""
    driver = hr.CoreDriver(hr.make_settings(stream_stale_ms=5_000, stream_idle_ms=1_000))
    driver.join_worker()
    serve(driver, 0)
    driver.hear(b"w1")

    actions = driver.wait(2_500)
    driver.hear(b"w1")
    actions += driver.wait(2_500)

    assert "cam-1" not in driver.core.streams.by_name
    assert told(actions) == []
    driver.core.check_invariants()
