"""Outcomes: order, numbers, timing, retention, replay, positions, and what the invariants catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import hr_core as hr
import msgpack
import pytest

from headrace.broker import events, outcomes
from headrace.broker.core import BrokerCore
from headrace.broker.records import FrameState
from headrace.broker.status import MAX_PRODUCER_STREAMS, MAX_PRODUCERS, MAX_STREAMS_PER_PAGE
from headrace.protocol.messages import FrameResult, Limits, Status, TensorSpec, Timing, Value


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """A core with one worker whose invariants hold at the end."""
    driver = hr.CoreDriver()
    driver.join_worker()
    yield driver
    driver.core.check_invariants()


def run(driver: hr.CoreDriver, *names: str, result: FrameResult | None = None) -> None:
    """One frame on each of the given streams, all done."""
    start = driver.core.account.accepted
    driver.push(*[hr.frame(name, start + n) for n, name in enumerate(names)])
    todo = hr.batches(driver.tick())
    while todo:
        sent = todo.pop(0)
        driver.done(sent, results=None if result is None else [result] * len(sent.batch.frames))
        todo += hr.batches(driver.tick())


def make(**changes: object) -> hr.CoreDriver:
    """A core with one worker and other settings."""
    driver = hr.CoreDriver(hr.make_settings(**changes))  # type: ignore[arg-type]
    driver.join_worker()
    return driver


class TestRelease:
    """When an outcome leaves."""

    def test_stream_waits_for_its_own_first_frame_and_no_other_stream(self) -> None:
        """In order per stream, no blocking across streams."""
        driver = make()
        driver.join_worker(b"w2")
        driver.push(hr.frame("a", 0), hr.frame("a", 1, size=100), hr.frame("b", 0, size=100))
        small, large = hr.batches(driver.tick())
        if small.batch.size_class != "small":
            small, large = large, small

        first = driver.done(large)
        second = driver.done(small)

        assert hr.ends(first) == [("b", 0, "ok", "")]
        assert hr.ends(second) == [("a", 0, "ok", ""), ("a", 1, "ok", "")]
        driver.core.check_invariants()

    def test_refused_frames_are_numbered_in_between(self, driver: hr.CoreDriver) -> None:
        """pub_seq ascends from 0 without a gap, whatever the status."""
        driver.push(hr.frame(seq=0), hr.frame(seq=1, model="nope"))
        sent = hr.batches(driver.tick())
        driver.done(sent[0])

        assert [(one.pub_seq, one.seq) for one in hr.outcomes(driver.actions)] == [(0, 1), (1, 0)]
        assert {one.boot for one in hr.outcomes(driver.actions)} == {hr.BOOT}

    def test_outcome_carries_frame_and_result(self, driver: hr.CoreDriver) -> None:
        """Everything a subscriber needs to know about the frame and what became of it."""
        one = replace(hr.frame(seq=7), pts_ns=5, meta={"lens": 2})
        driver.push(one)
        sent = hr.batches(driver.tick())[0]
        driver.now_ns += 20 * hr.MS
        spec = TensorSpec("boxes", "float32", (1,))
        result = FrameResult(Status.OK, "", "", {"label": "x"}, (spec,), (b"1234",), ("image_truncated",))

        outcome = hr.outcomes(driver.done(sent, results=[result], ran_ms=3))[0]

        assert (outcome.model, outcome.version, outcome.size_class, outcome.worker) == (
            "mean",
            "1",
            "small",
            "w1",
        )
        assert (outcome.pts_ns, outcome.meta, outcome.shape) == (5, {"lens": 2}, (32, 32, 1))
        assert (outcome.outputs, outcome.tensors, outcome.payloads) == ({"label": "x"}, (spec,), (b"1234",))
        assert (outcome.flags, outcome.attempt, outcome.batch_size) == (("image_truncated",), 1, 1)
        assert outcome.timing == Timing(0, 0, 100, 3_100, 20_000)

    def test_worker_that_measures_nonsense_places_no_stage_after_the_publication(
        self, driver: hr.CoreDriver
    ) -> None:
        """Its durations are cut at the time that really passed; predictions do not learn from them."""
        driver.push(hr.frame())
        sent = hr.batches(driver.tick())[0]
        driver.now_ns += 1 * hr.MS

        outcome = hr.outcomes(driver.done(sent, ran_ms=1e9))[0]

        assert outcome.timing == Timing(0, 0, 100, 1_000, 1_000)
        assert driver.core.workers.by_peer[b"w1"].ran_ns == 1 * hr.MS

    def test_frame_that_never_ran_has_no_stages(self, driver: hr.CoreDriver) -> None:
        """Expired in the queue: received and published. Lost with a worker: batched, too."""
        driver.send(events.WorkerLeft(b"w1"))
        driver.push(hr.frame("a", 0, ttl_ms=5))
        expired = hr.outcomes(driver.wait(5))[0]
        driver.join_worker(b"w2")
        driver.push(hr.frame("b", 0))
        driver.tick()
        ended = hr.outcomes(driver.send(events.GraceEnded()))[0]

        assert expired.timing == Timing(queued_us=0, published_us=5_000)
        assert ended.timing == Timing(queued_us=0, batched_us=0, published_us=0)

    def test_first_end_of_a_frame_wins(self, driver: hr.CoreDriver) -> None:
        """A second end (a hedge that came second) changes nothing."""
        driver.push(hr.frame(seq=0), hr.frame(seq=1))
        sent = hr.batches(driver.tick())[0]
        record = driver.core.streams.by_name["cam-1"].order[0]
        driver.done(sent)
        before = driver.core.account

        actions: list[hr.act.Action] = []
        assert record.end is not None
        driver.core.outcomes.finish(record, record.end, driver.now_ns, actions)

        assert actions == []
        assert driver.core.account == before


class TestRetention:
    """What is kept for replay."""

    def test_ring_of_a_stream_is_bounded(self) -> None:
        """retention_frames: the newest are kept; what left is reported as missed."""
        driver = make(retention_frames=3)
        for _ in range(5):
            run(driver, "a")

        kept, missed, has_more = driver.core.replay("a", hr.BOOT, 0, 99, 10**6)

        assert [one.pub_seq for one in kept] == [2, 3, 4]
        assert missed == [(0, 2)]
        assert not has_more
        assert driver.core.positions(["a\0"]) == {"boot": hr.BOOT, "streams": {"a": [2, 5]}}
        driver.core.check_invariants()

    def test_bytes_of_all_streams_are_bounded(self) -> None:
        """retention_bytes: beyond them the oldest outcome of all goes first, also for one that is too big."""
        driver = make(retention_bytes=3 * outcomes.OUTCOME_OVERHEAD_BYTES + 200)
        run(driver, "a")
        run(driver, "b")
        run(driver, "b")
        run(driver, "b")
        first = driver.core.positions([""])["streams"]
        run(driver, "c", result=FrameResult(Status.OK, payloads=(memoryview(bytes(10_000)),)))
        second = driver.core.positions([""])["streams"]

        assert first == {"a": [1, 1], "b": [0, 3]}
        assert second == {"a": [1, 1], "b": [3, 3], "c": [1, 1]}
        assert driver.core.replay("a", hr.BOOT, 0, 5, 10**6) == ([], [(0, 1)], False)
        driver.core.check_invariants()

    def test_order_of_publication_is_swept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Entries of outcomes that left by their stream's own bound do not pile up."""
        monkeypatch.setattr(outcomes, "_SWEEP_ABOVE", 4)
        driver = make(retention_frames=2)
        for _ in range(50):
            run(driver, "a")

        assert len(driver.core.outcomes._published) <= 6
        driver.core.check_invariants()

    def test_replay_is_cut_at_its_bytes_but_never_empty(self, driver: hr.CoreDriver) -> None:
        """has_more: the subscriber asks again from the next pub_seq."""
        for _ in range(4):
            run(driver, "a")

        first = driver.core.replay("a", hr.BOOT, 1, 3, 1)
        rest = driver.core.replay("a", hr.BOOT, 2, 3, 10**6)

        assert ([one.pub_seq for one in first[0]], first[1:]) == ([1], ([], True))
        assert ([one.pub_seq for one in rest[0]], rest[1:]) == ([2, 3], ([], False))

    @pytest.mark.parametrize(
        ("boot", "first", "last", "expected"),
        [
            pytest.param(hr.BOOT + 1, 2, 5, ([], [(2, 6)], False), id="another boot: all lost"),
            pytest.param(hr.BOOT + 1, 0, 2**64 - 1, ([], [(0, 2**64 - 1)], False), id="fits into a u64"),
            pytest.param(hr.BOOT, 1, 5, ([], [], False), id="not yet published: not lost"),
        ],
    )
    def test_replay_of_what_is_not_there(
        self, driver: hr.CoreDriver, boot: int, first: int, last: int, expected: object
    ) -> None:
        """Lost is said, not yet published is not lost."""
        run(driver, "a")

        assert driver.core.replay("a", boot, first, last, 10**6) == expected
        assert driver.core.replay("never", hr.BOOT, 0, 5, 10**6) == ([], [], False)

    def test_topics(self, driver: hr.CoreDriver) -> None:
        """ZMQ-19: NUL ends a stream's id; anything else is a prefix."""
        run(driver, "cam-1", "cam-10", "site/a")

        def names(*topics: str) -> list[str]:
            streams = driver.core.positions(list(topics))["streams"]
            assert isinstance(streams, dict)
            return list(streams)

        assert names("cam-1\0") == ["cam-1"]
        assert names("cam-1") == ["cam-1", "cam-10"]
        assert names("") == ["cam-1", "cam-10", "site/a"]
        assert names("cam\0", "site/") == ["site/a"]

    @pytest.mark.parametrize(
        ("value", "low", "high"),
        [
            pytest.param(None, 0, 0, id="nothing"),
            pytest.param([], 1, 100, id="empty list"),
            pytest.param([[1.5] * 6] * 100, 5_000, 40_000, id="boxes"),
            pytest.param(
                {"text": "x" * 1_000, "raw": b"y" * 1_000, "n": 3, "is": True}, 2_000, 3_000, id="map"
            ),
        ],
    )
    def test_estimate_of_an_outcome(self, driver: hr.CoreDriver, value: Value, low: int, high: int) -> None:
        """Bytes of outputs are estimated within a small factor."""
        run(driver, "a", result=FrameResult(Status.OK, outputs=value))

        nbytes = driver.core.outcomes.retained_bytes - outcomes.OUTCOME_OVERHEAD_BYTES

        assert low <= nbytes <= high


def test_story_tells_the_way_of_a_frame(driver: hr.CoreDriver) -> None:
    """Each transition of the frame, with the time since the first."""
    driver.push(hr.frame(seq=4))
    sent = hr.batches(driver.tick())[0]
    driver.now_ns += 10 * hr.MS
    driver.done(sent)

    assert driver.core.story("cam-1", hr.EPOCH, 4) == [
        "+0.000 ms queued small",
        "+0.000 ms batch 1 at w1",
        "+10.000 ms ok",
        "+10.000 ms published 0",
    ]
    driver.push(hr.frame(seq=5, model="nope"))
    assert driver.core.story("cam-1", hr.EPOCH, 5) == ["+0.000 ms rejected unknown_model"]
    assert driver.core.story("cam-1", hr.EPOCH, 6) == []


def test_status_comes_in_pages_and_names_few_of_many() -> None:
    """However many streams and producers there are, one answer fits a header; the counts are of all."""
    driver = make(credits_per_producer=MAX_STREAMS_PER_PAGE + 5)
    producers_count, streams_count = MAX_PRODUCERS + 3, MAX_STREAMS_PER_PAGE + 5
    for number in range(producers_count):
        driver.join_producer(f"p{number}".encode(), epoch=number + 1)
    for number in range(streams_count):
        name = f"{number:0128}"
        driver.send(events.FrameArrived(b"p0", replace(hr.frame(name, 0), epoch=1)))

    first = driver.core.status(driver.now_ns)
    after = str(first["streams_next"])
    second = driver.core.status(driver.now_ns, streams_after=after)

    names = [f"{number:0128}" for number in range(streams_count)]
    assert after == names[MAX_STREAMS_PER_PAGE - 1]
    assert [*first["streams"], *second["streams"]] == names  # type: ignore[misc]
    assert second["streams_next"] == ""
    assert (first["streams_count"], first["producers_count"]) == (streams_count, producers_count)
    assert isinstance(first["producers"], list)
    assert len(first["producers"]) == MAX_PRODUCERS
    owner = first["producers"][0]
    assert isinstance(owner, dict)
    assert (owner["streams_count"], owner["streams"]) == (streams_count, names[:MAX_PRODUCER_STREAMS])
    assert len(msgpack.packb(first)) < Limits().max_header_bytes / 2


def test_status_can_be_packed_and_adds_up(driver: hr.CoreDriver) -> None:
    """What `headrace status` shows is plain data; without streams it stays small."""
    driver.join_producer()
    run(driver, "a", "b")
    driver.push(hr.frame("a", 50, priority=3), hr.frame("a", 51, model="nope"))
    driver.now_ns += 5_000 * hr.MS

    status = driver.core.status(driver.now_ns)
    packed = msgpack.unpackb(msgpack.packb(status))
    short = driver.core.status(driver.now_ns, max_streams=0)

    assert packed["account"]["accepted"] == 3
    assert packed["account"]["unfinished"] == 1
    assert packed["classes"][0]["queued"] == {"3": 1}
    assert packed["classes"][0]["mean_batch"] == 2.0
    assert packed["classes"][0]["padding_waste"] == 0.75
    assert packed["classes"][0]["oldest_wait_ms"] == 5_000.0
    assert not packed["streams"]["a"]["is_stale"]
    assert packed["streams"]["a"]["last_frame_ms"] == 5_000.0
    assert packed["streams"]["a"]["counts"] == {"ok": 1, "rejected": 1}
    assert packed["workers"][0]["state"] == "ready"
    assert packed["models"] == [
        {
            "name": "mean",
            "version": "1",
            "is_described": True,
            "size_classes": ["small", "large"],
            "workers": 1,
            "live_version": "1",
            "kept_version": "",
            "reload": None,
        }
    ]
    assert short["streams"] == {}
    assert short["streams_count"] == 2


def _corrupt(name: str) -> Callable[[BrokerCore], None]:
    """A way to break a core that holds a queued frame (a), one in flight (b) and a retained outcome (c)."""

    def apply(core: BrokerCore) -> None:
        stream = core.streams.by_name["a"]
        in_flight = core.streams.by_name["b"].order[0]
        done = core.streams.by_name["c"]
        worker = core.workers.by_peer[b"w1"]
        batch = next(iter(core.ledger.batches.values()))
        session = core.producers.by_peer[b"p1"]
        match name:
            case "received":
                core.outcomes.account.received += 1
            case "unfinished":
                core.outcomes.account.ok += 1
            case "bytes":
                core.outcomes.unfinished_bytes += 1
            case "unreleased":
                core.streams.by_name["b"].order[0].end = outcomes.End(Status.OK)
            case "retained":
                core.outcomes.retained_count += 1
            case "retained bytes":
                core.outcomes._max_bytes = 1
            case "ring":
                core.outcomes._max_frames = 0
            case "table":
                core.streams._max_streams = 1
            case "order":
                stream.unfinished.clear()
            case "idle":
                core.streams.mark_idle(stream, 0)
            case "epochs":
                stream.epochs[hr.EPOCH].unfinished_count += 1
            case "pub_seq":
                done.next_pub_seq += 1
            case "epoch index":
                core.producers.by_epoch.clear()
            case "credit":
                session.finished = session.received + 1
            case "workers":
                core.workers.by_id.clear()
            case "slots":
                worker.slots = 0
            case "alone":
                worker.is_alone = True
            case "neighbours":
                worker.is_alone = batch.is_alone = True
                worker.in_flight[99] = batch
            case "claim":
                core.workers.claims["x"] = None  # type: ignore[assignment]
            case "ledger":
                worker.in_flight.clear()
            case "state":
                in_flight.state = FrameState.QUEUED
            case "budget":
                core.settings = replace(core.settings, max_bytes=1)
            case "places":
                core.models.classes[0].queue.remove(stream.order[0])
            case "orphan":
                record = stream.order.pop()
                stream.unfinished.clear()
                stream.epochs[hr.EPOCH].unfinished_count = 0
                core.streams.mark_idle(stream, 0)
                core.outcomes.account.expired += 1
                core.outcomes.unfinished_bytes -= record.nbytes
            case _:
                raise AssertionError(name)

    return apply


CORRUPTIONS = (
    *(
        "received",
        "unfinished",
        "bytes",
        "unreleased",
        "retained",
        "retained bytes",
        "ring",
        "table",
        "order",
    ),
    *(
        "idle",
        "epochs",
        "pub_seq",
        "epoch index",
        "credit",
        "workers",
        "slots",
        "alone",
        "neighbours",
        "claim",
    ),
    *("ledger", "state", "budget", "places", "orphan"),
)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_invariants_catch_every_kind_of_corruption(name: str) -> None:
    """A check that can't fail is a defect: each one is seen to fail."""
    driver = make()
    driver.join_producer()
    run(driver, "c")
    driver.push(hr.frame("b", 10))
    driver.tick()
    driver.push(hr.frame("a", 20))
    driver.tick()
    driver.core.check_invariants()

    _corrupt(name)(driver.core)

    with pytest.raises(AssertionError):
        driver.core.check_invariants()
