"""Admission: what is refused, what is known, who owns a stream, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import admission, events
from headrace.broker.settings import ClassPolicy
from headrace.protocol.messages import BadFrame, Credit, Keep, Limits, Reject, ShmRef, TensorSpec

SMALL_QUEUE = ClassPolicy(max_queue_size=3)


@pytest.fixture
def driver() -> Iterator[hr.CoreDriver]:
    """A core without workers whose invariants hold at the end."""
    driver = hr.CoreDriver()
    yield driver
    driver.core.check_invariants()


def make(**changes: object) -> hr.CoreDriver:
    """A core with other settings."""
    return hr.CoreDriver(hr.make_settings(**changes))  # type: ignore[arg-type]


def snapshot(driver: hr.CoreDriver) -> object:
    """What a refused frame must leave as it is."""
    status = driver.core.status(driver.now_ns)
    status["account"] = {
        key: value
        for key, value in status["account"].items()  # type: ignore[union-attr]
        if key not in ("received", "rejected", "duplicates")
    }
    kept = ("account", "unfinished_bytes", "classes", "workers", "models")
    return {key: status[key] for key in kept}


REFUSED = [
    pytest.param(hr.frame(model="nope"), "unknown_model", "nope", None, id="unknown model"),
    pytest.param(hr.frame(model="mean:9"), "unknown_model", "mean:9", None, id="unknown version"),
    pytest.param(hr.frame(priority=10), "out_of_range", "10", None, id="priority too high"),
    pytest.param(hr.frame(priority=-1), "out_of_range", "-1", None, id="priority negative"),
    pytest.param(hr.frame(nbytes=2_001), "frame_too_large", "2001", None, id="above the frame limit"),
    pytest.param(replace(hr.frame(), dtype="float32"), "wrong_dtype", "float32", None, id="wrong dtype"),
    pytest.param(replace(hr.frame(), shape=(4, 4, 2)), "wrong_channels", "2", None, id="wrong channels"),
    pytest.param(replace(hr.frame(), shape=(4,)), "wrong_shape", "[4]", None, id="wrong shape"),
    pytest.param(
        replace(hr.frame(), payload=ShmRef("a", 0, 1, 1)), "lane_unavailable", "inline", None, id="shm lane"
    ),
    pytest.param(
        BadFrame("bad_image", "PNG header cut", "cam-1", 0, 1), "bad_image", "PNG", None, id="bad frame"
    ),
]


@pytest.mark.parametrize(("one", "code", "words", "retry_ms"), REFUSED)
def test_refused_frame_is_published_and_told_and_changes_nothing(
    one: object, code: str, words: str, retry_ms: int | None
) -> None:
    """A refused frame is an outcome `rejected` and a reject with code and value, and nothing else."""
    driver = make(limits=Limits(max_frame_bytes=2_000))
    before = snapshot(driver)

    actions = driver.push(one)  # type: ignore[arg-type]

    assert hr.ends(actions) == [("cam-1", 0, "rejected", code)]
    published = hr.outcomes(actions)[0]
    assert words in published.message
    reject = Reject(code, published.message, "cam-1", hr.EPOCH, 0, retry_ms)
    assert actions[1:] == [act.SendReject(b"p1", reject)]
    assert published.retry_after_ms == retry_ms
    assert snapshot(driver) == before
    driver.core.check_invariants()


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_class_queue_bound_is_reached_exactly(limit: int) -> None:
    """BAT-10: exactly ``max_queue_size`` frames wait; the next is refused with value and limit."""
    driver = make(policy=ClassPolicy(max_queue_size=limit))

    actions = driver.push(*[hr.frame(f"s{n}", 0) for n in range(limit + 1)])

    assert hr.ends(actions) == [(f"s{limit}", 0, "rejected", "queue_full")]
    assert f"{limit} frames" in hr.outcomes(actions)[0].message
    assert hr.outcomes(actions)[0].retry_after_ms == admission.UNKNOWN_RETRY_MS
    driver.core.check_invariants()


def test_no_class_bound_means_only_the_byte_budget() -> None:
    """``max_queue_size`` 0 switches the class's own bound off."""
    driver = make(policy=ClassPolicy(max_queue_size=0))

    driver.push(*[hr.frame(f"s{n}", 0) for n in range(2_000)])

    assert driver.core.account.accepted == 2_000
    driver.core.check_invariants()


def test_stream_bounds_hold_per_class_and_over_all() -> None:
    """One stream can't fill a class, nor hold more than its share of unfinished frames."""
    driver = make(max_queued_per_stream=2, max_unfinished_per_stream=3)

    actions = driver.push(
        hr.frame(seq=0),
        hr.frame(seq=1),
        hr.frame(seq=2),
        hr.frame(seq=3, size=100),
        hr.frame(seq=4, size=100),
        hr.frame("cam-2", 0),
    )

    assert hr.ends(actions) == [
        ("cam-1", 2, "rejected", "stream_queue_full"),
        ("cam-1", 4, "rejected", "stream_queue_full"),
    ]
    assert "max_queued_per_stream" in hr.outcomes(actions)[0].message
    assert "max_unfinished_per_stream" in hr.outcomes(actions)[1].message
    driver.core.check_invariants()


def test_byte_budget_counts_unfinished_frames_only() -> None:
    """BAT-09: the payload bytes of unfinished frames never exceed max_bytes; finished ones give room."""
    driver = make(max_bytes=2_500)
    driver.join_worker()

    first = driver.push(hr.frame(seq=0), hr.frame(seq=1), hr.frame(seq=2))
    sent = hr.batches(driver.tick())
    driver.done(sent[0])
    second = driver.push(hr.frame(seq=3))

    assert hr.ends(first) == [("cam-1", 2, "rejected", "bytes_full")]
    assert "2500" in hr.outcomes(first)[0].message
    assert second == []
    driver.core.check_invariants()


def test_retry_after_comes_from_the_cost_table() -> None:
    """``retry_after_ms`` is the time in which the workers run one batch of the class."""
    driver = make(policy=SMALL_QUEUE)
    driver.join_worker(slots=1, per_batch_ms=40)
    driver.push(hr.frame(seq=0))
    driver.tick()
    driver.push(*[hr.frame(seq=seq) for seq in range(1, 4)])

    actions = driver.push(hr.frame(seq=4))

    assert hr.outcomes(actions)[0].retry_after_ms == 40
    driver.core.check_invariants()


def test_frame_without_stream_is_told_but_not_published(driver: hr.CoreDriver) -> None:
    """A frame whose stream can't be read has no topic: its sender is told, and it is counted."""
    driver.join_producer()

    actions = driver.push(BadFrame("bad_stream", "empty", None, 3, 1))
    told = driver.tick()

    assert actions == [act.SendReject(b"p1", Reject("bad_stream", "empty", None, 1, 3))]
    assert hr.grants(told) == [(b"p1", Credit(1, {}, {"rejected": 1}))]
    assert driver.core.account.rejected == 1


def test_empty_stream_id_is_refused(driver: hr.CoreDriver) -> None:
    """ZMQ-19: an empty stream would be everybody's topic."""
    actions = driver.push(hr.frame(""), peer=None)

    assert actions == []
    assert driver.core.status(0)["rejected_by_code"] == {"bad_stream": 1}


def test_intake_frames_are_numbered_and_answered_only_by_their_outcome(driver: hr.CoreDriver) -> None:
    """A plain script without seq and epoch gets numbers from the broker, under the broker's boot id."""
    driver.push(hr.frame(seq=None, epoch=None), peer=None)
    driver.push(hr.frame(seq=None, epoch=None), peer=None)
    bad = driver.push(hr.frame(seq=None, epoch=None, priority=99), peer=None)
    driver.join_worker()
    sent = hr.batches(driver.tick())
    done = driver.done(sent[0])

    assert [(one.epoch, one.seq) for one in hr.outcomes(bad)] == [(hr.BOOT, 2)]
    assert hr.rejects(bad) == []
    assert [(one.epoch, one.seq, one.pub_seq) for one in hr.outcomes(done)] == [
        (hr.BOOT, 0, 1),
        (hr.BOOT, 1, 2),
    ]


def test_last_possible_seq_is_followed_by_a_refusal_not_by_silence(driver: hr.CoreDriver) -> None:
    """After seq 2**64 - 1 the broker can't number any further: the frame is refused aloud."""
    driver.push(hr.frame(seq=2**64 - 1, epoch=None))

    actions = driver.push(hr.frame(seq=None, epoch=None))

    assert hr.ends(actions) == [("cam-1", 2**64 - 1, "rejected", "seq_backwards")]


def test_session_epoch_names_frames_without_one(driver: hr.CoreDriver) -> None:
    """A producer that said Hello need not repeat its epoch."""
    driver.join_producer(epoch=9)

    driver.push(hr.frame(epoch=None, seq=4))

    assert driver.core.story("cam-1", 9, 4) != []


class TestAgain:
    """Frames sent again."""

    def test_unfinished_frame_is_taken_over_by_the_new_session(self, driver: hr.CoreDriver) -> None:
        """After a reconnect the new connection is credited for the frame that the old one sent."""
        driver.join_producer(b"p1")
        driver.push(hr.frame(seq=0), peer=b"p1")
        driver.join_producer(b"p2")

        again = driver.push(hr.frame(seq=0), peer=b"p2")
        driver.join_worker()
        done = driver.done(hr.batches(driver.tick())[0])

        assert again == []
        assert hr.grants(done) == [(b"p2", Credit(1, {"cam-1": 0}, {"ok": 1}))]
        assert driver.core.account.duplicates == 1
        assert driver.core.status(driver.now_ns)["producers"][0]["streams"] == ["cam-1"]  # type: ignore[index,call-overload]

    def test_copy_within_a_session_is_concluded_at_once(self, driver: hr.CoreDriver) -> None:
        """The same frame twice on one connection uses two credits and gives both back."""
        driver.join_producer()
        driver.push(hr.frame(seq=0), hr.frame(seq=0))

        told = driver.tick()

        assert hr.grants(told) == [(b"p1", Credit(1, {}, {}))]

    def test_finished_frame_counts_at_once(self, driver: hr.CoreDriver) -> None:
        """A frame whose outcome is out is credited, told up to its own seq alone, and not run again."""
        driver.join_producer(b"p1")
        driver.join_worker()
        driver.push(hr.frame(seq=0), hr.frame(seq=1))
        driver.done(hr.batches(driver.tick())[0])
        driver.join_producer(b"p2")

        driver.push(hr.frame(seq=0), peer=b"p2")
        told = driver.tick()

        assert hr.grants(told) == [(b"p2", Credit(1, {"cam-1": 0}, {}))]
        assert hr.batches(told) == []

    def test_credit_for_frames_sent_again_never_runs_ahead_of_a_reject(self, driver: hr.CoreDriver) -> None:
        """Simulator seed 1796070764053: 0 and 2 have outcomes, 1 was rejected and its reject was lost. When 0
        is sent again alone, the credit must not cover 1: its reject is still to be said again."""
        driver.join_producer(b"p1")
        driver.join_worker()
        driver.push(hr.frame(seq=0), hr.frame(seq=1, model="nobody"), hr.frame(seq=2))
        driver.done(hr.batches(driver.tick())[0])
        driver.join_producer(b"p2")

        driver.push(hr.frame(seq=0), peer=b"p2")
        first = driver.tick()
        again = driver.push(hr.frame(seq=1, model="nobody"), peer=b"p2")
        driver.push(hr.frame(seq=2), peer=b"p2")
        last = driver.tick()

        assert hr.grants(first) == [(b"p2", Credit(1, {"cam-1": 0}, {}))]
        assert [a.reject.seq for a in again if isinstance(a, act.SendReject)] == [1]
        assert [credit.streams for _, credit in hr.grants(last)] == [{"cam-1": 2}]

    def test_refused_frame_is_refused_again_in_the_same_words(self, driver: hr.CoreDriver) -> None:
        """A reject that was lost with its connection is sent again; nothing is published twice."""
        driver.join_producer()
        first = driver.push(hr.frame(model="nope"))

        again = driver.push(hr.frame(model="nope"))

        assert again == first[1:]
        assert hr.grants(driver.tick()) == [(b"p1", Credit(2, {}, {"rejected": 1}))]

    def test_plain_peers_are_known_too(self, driver: hr.CoreDriver) -> None:
        """Without a session there is nobody to credit, but the frame is recognised all the same."""
        driver.push(hr.frame(seq=0), peer=None)
        driver.push(hr.frame(seq=1, model="nope"), peer=None)
        driver.join_worker()
        driver.done(hr.batches(driver.tick())[0])

        again = driver.push(hr.frame(seq=0), hr.frame(seq=1), peer=None)
        other = driver.push(hr.frame(seq=2), hr.frame(seq=2), peer=b"x")

        assert again == other == []
        assert driver.core.account.duplicates == 3

    def test_seq_that_was_never_sent_goes_backwards(self, driver: hr.CoreDriver) -> None:
        """A seq below the last one that was never seen is the producer's fault, once."""
        driver.push(hr.frame(seq=5))

        actions = driver.push(hr.frame(seq=3))
        again = driver.push(hr.frame(seq=3))

        assert hr.ends(actions) == [("cam-1", 3, "rejected", "seq_backwards")]
        assert "seq 3" in hr.outcomes(actions)[0].message
        assert "seq 5" in hr.outcomes(actions)[0].message
        assert hr.outcomes(again) == []
        assert len(hr.rejects(again)) == 1

    def test_remembered_rejects_are_bounded(self) -> None:
        """No more rejects are remembered than a producer can have unfinished."""
        driver = make(credits_per_producer=2)

        driver.push(*[hr.frame(seq=seq, model="nope") for seq in range(5)])

        history = driver.core.streams.by_name["cam-1"].epochs[hr.EPOCH]
        assert list(history.rejects) == [3, 4]
        assert history.last_seq == 4
        driver.core.check_invariants()


class TestOwnership:
    """Who may send on a stream."""

    def test_two_producers_on_one_stream(self, driver: hr.CoreDriver) -> None:
        """The second producer is refused as long as the first lives, and taken when it has left."""
        driver.join_producer(b"p1", 1)
        driver.join_producer(b"p2", 2)
        driver.push(hr.frame(seq=0, epoch=1), peer=b"p1")

        refused = driver.push(hr.frame(seq=0, epoch=2), peer=b"p2")
        driver.send(events.ProducerLeft(b"p1"))
        taken = driver.push(hr.frame(seq=1, epoch=2), peer=b"p2")

        assert hr.ends(refused) == [("cam-1", 0, "rejected", "stream_owned")]
        assert hr.outcomes(refused)[0].retry_after_ms == 3_000
        assert taken == []

    def test_same_epoch_on_a_new_connection_takes_over(self, driver: hr.CoreDriver) -> None:
        """A reconnect is not another producer."""
        driver.join_producer(b"p1", 1)
        driver.push(hr.frame(seq=0), peer=b"p1")
        driver.join_producer(b"p2", 1)

        assert driver.push(hr.frame(seq=1), peer=b"p2") == []
        assert driver.core.streams.by_name["cam-1"].owner_peer == b"p2"

    def test_stream_moves_between_living_connections_of_one_epoch(self, driver: hr.CoreDriver) -> None:
        """Frames that name an epoch carry the stream to the connection that sends them."""
        driver.join_producer(b"p1", 1)
        driver.join_producer(b"p2", 2)
        driver.push(hr.frame(seq=0, epoch=1), peer=b"p1")

        assert driver.push(hr.frame(seq=1, epoch=1), peer=b"p2") == []

        assert driver.core.producers.by_peer[b"p1"].streams == {}
        assert list(driver.core.producers.by_peer[b"p2"].streams) == ["cam-1"]

    def test_plain_owner_keeps_its_stream_until_it_is_silent(self, driver: hr.CoreDriver) -> None:
        """Without Hello the stream is free when nothing came on it for the time of silence."""
        driver.push(hr.frame(seq=0, epoch=1), peer=b"x")
        driver.wait(1_000)

        early = driver.push(hr.frame(seq=0, epoch=2), peer=b"y")
        driver.wait(2_000)
        later = driver.push(hr.frame(seq=1, epoch=2), peer=b"y")

        assert hr.outcomes(early)[0].retry_after_ms == 2_000
        assert later == []

    def test_repeated_frame_of_a_former_owner_does_not_take_the_stream_back(
        self, driver: hr.CoreDriver
    ) -> None:
        """A frame sent again is credited to its sender, whoever owns the stream by now."""
        driver.push(hr.frame(seq=0, epoch=1), peer=b"x")
        driver.wait(3_000)
        driver.push(hr.frame(seq=0, epoch=2), peer=b"y")
        driver.join_producer(b"p1", 1)

        driver.push(hr.frame(seq=0, epoch=1), peer=b"p1")

        assert driver.core.streams.by_name["cam-1"].owner_epoch == 2


class TestCredit:
    """What a producer may have unfinished."""

    def test_credits_are_exact_and_come_back(self) -> None:
        """A producer with 2 credits has its third frame refused, and its fourth taken after a result."""
        driver = make(credits_per_producer=2)
        driver.join_producer()
        driver.join_worker()

        actions = driver.push(hr.frame(seq=0), hr.frame(seq=1), hr.frame(seq=2))
        ticked = driver.tick()
        done = driver.done(hr.batches(ticked)[0])
        after = driver.push(hr.frame(seq=3))

        assert hr.ends(actions) == [("cam-1", 2, "rejected", "credit_exceeded")]
        assert hr.grants(ticked) == [(b"p1", Credit(1, {}, {"rejected": 1}))]
        assert hr.grants(done) == [(b"p1", Credit(3, {"cam-1": 1}, {"rejected": 1, "ok": 2}))]
        assert after == []
        driver.core.check_invariants()

    def test_peers_without_hello_have_no_credits(self) -> None:
        """A plain script is held by the queues' bounds alone."""
        driver = make(credits_per_producer=1)

        assert driver.push(hr.frame(seq=0), hr.frame(seq=1), peer=b"x") == []
        driver.core.check_invariants()


class TestStreams:
    """The stream table's bound."""

    def test_full_table_refuses_new_streams_but_publishes(self) -> None:
        """A stream without a place is refused with a number of its own, and again in the same words."""
        driver = make(max_streams=1)
        driver.join_producer()
        driver.push(hr.frame("a", 0))

        first = driver.push(hr.frame("b", 0))
        again = driver.push(hr.frame("b", 0))
        second = driver.push(hr.frame("b", 1), peer=None)
        unnamed = driver.push(hr.frame("b", None), peer=None)
        known = driver.push(hr.frame("b", 0), peer=None)

        assert hr.ends(first) == [("b", 0, "rejected", "too_many_streams")]
        assert [one.pub_seq for one in hr.outcomes(first + second + unnamed)] == [0, 1, 2]
        assert again == first[1:]
        assert known == []
        assert driver.core.positions(["b\0"])["streams"] == {"b": [3, 3]}
        driver.core.check_invariants()

    def test_remembered_strays_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Refused frames of streams without a place are remembered up to a bound."""
        monkeypatch.setattr(admission, "MAX_STRAYS", 2)
        driver = make(max_streams=1)
        driver.push(hr.frame("a", 0))

        driver.push(*[hr.frame("b", seq) for seq in range(4)])

        assert list(driver.core.admission._strays) == [("b", 1, 2), ("b", 1, 3)]
        driver.core.check_invariants()

    def test_idle_stream_goes_for_a_new_one_and_its_numbers_continue(self) -> None:
        """The longest idle stream makes room; when it returns its pub_seq goes on."""
        driver = make(max_streams=2)
        driver.join_producer()
        driver.push(hr.frame("a", 0, model="nope"), hr.frame("b", 0))
        driver.hear(b"p1")
        driver.wait(2_500)
        driver.hear(b"p1")
        driver.wait(500)

        assert driver.push(hr.frame("c", 0)) == []
        assert "a" not in driver.core.streams.by_name
        driver.wait(3_000)
        refused = driver.push(hr.frame("a", 1))
        assert hr.ends(refused) == [("a", 1, "rejected", "too_many_streams")]
        assert hr.outcomes(refused)[0].pub_seq == 1
        driver.core.check_invariants()

    def test_forgotten_stream_leaves_its_owner(self) -> None:
        """A stream that goes is no longer listed with the producer that owned it."""
        driver = make(stream_idle_ms=1_000)
        driver.join_producer()
        driver.join_worker()
        driver.push(hr.frame("a", 0))
        driver.done(hr.batches(driver.tick())[0])

        driver.hear(b"p1")
        driver.wait(999)
        assert list(driver.core.streams.by_name) == ["a"]
        driver.wait(1)

        assert driver.core.streams.by_name == {}
        assert driver.core.producers.by_peer[b"p1"].streams == {}
        assert driver.core.outcomes.retained_count == 0
        driver.core.check_invariants()


class TestLatest:
    """Frames that supersede."""

    def latest(self, seq: int, **changes: object) -> object:
        """A frame of which only the newest matters."""
        return hr.frame(seq=seq, keep=Keep.LATEST, **changes)  # type: ignore[arg-type]

    def test_newer_frame_takes_the_place_of_the_waiting_one(self, driver: hr.CoreDriver) -> None:
        """Same class and priority: the old one is superseded, and the new one keeps its place."""
        driver.push(self.latest(0), hr.frame("cam-2", 0))  # type: ignore[arg-type]

        actions = driver.push(self.latest(1))  # type: ignore[arg-type]
        driver.join_worker()
        sent = hr.batches(driver.tick())

        assert hr.ends(actions) == [("cam-1", 0, "superseded", "newer_frame")]
        assert [(one.stream, one.seq) for one in sent[0].batch.frames] == [("cam-1", 1), ("cam-2", 0)]

    @pytest.mark.parametrize("changes", [{"priority": 3}, {"size": 100}], ids=["priority", "size class"])
    def test_newer_frame_may_wait_elsewhere(self, driver: hr.CoreDriver, changes: dict[str, object]) -> None:
        """VID-03: another size or priority moves the stream's waiting frame, and still supersedes."""
        driver.push(self.latest(0))  # type: ignore[arg-type]

        actions = driver.push(self.latest(1, **changes))  # type: ignore[arg-type]

        assert hr.ends(actions) == [("cam-1", 0, "superseded", "newer_frame")]
        assert driver.core.account.unfinished == 1

    def test_frames_of_which_all_matter_are_never_superseded(self, driver: hr.CoreDriver) -> None:
        """`keep = all` frames of the same stream stay."""
        driver.push(hr.frame(seq=0))

        assert driver.push(self.latest(1)) == []  # type: ignore[arg-type]
        assert driver.core.account.unfinished == 2

    def test_frame_that_is_with_a_worker_is_not_superseded(self, driver: hr.CoreDriver) -> None:
        """What runs is finished."""
        driver.join_worker()
        driver.push(self.latest(0))  # type: ignore[arg-type]
        driver.tick()

        assert driver.push(self.latest(1)) == []  # type: ignore[arg-type]

    def test_superseding_needs_no_room(self) -> None:
        """Full queue, full stream, full budget: the newest frame of a `latest` stream still gets in."""
        driver = make(policy=ClassPolicy(max_queue_size=1), max_queued_per_stream=1, max_bytes=1_100)

        driver.push(self.latest(0))  # type: ignore[arg-type]
        actions = driver.push(self.latest(1), self.latest(2))  # type: ignore[arg-type]

        assert hr.ends(actions) == [
            ("cam-1", 0, "superseded", "newer_frame"),
            ("cam-1", 1, "superseded", "newer_frame"),
        ]
        driver.core.check_invariants()

    def test_bytes_held_back_behind_another_frame_still_count(self) -> None:
        """A superseded frame whose turn has not come holds its bytes: the budget is kept."""
        driver = make(max_bytes=2_100)

        driver.push(hr.frame(seq=0), self.latest(1))  # type: ignore[arg-type]
        actions = driver.push(self.latest(2))  # type: ignore[arg-type]

        assert hr.ends(actions) == [("cam-1", 2, "rejected", "bytes_full")]
        driver.core.check_invariants()


class TestModels:
    """Models and their size classes."""

    def test_names_versions_and_the_default(self) -> None:
        """ "" is the default, a name its newest version, digits compare as numbers."""
        specs = [hr.make_spec("a", "9"), hr.make_spec("a", "10"), hr.make_spec("b", "1")]
        driver = hr.CoreDriver(hr.make_settings(*specs))

        driver.push(hr.frame(seq=0), hr.frame(seq=1, model="a:9"), hr.frame(seq=2, model="b"))

        records = driver.core.streams.by_name["cam-1"].order
        assert [(one.model, one.version) for one in records] == [("a", "10"), ("a", "9"), ("b", "1")]
        driver.core.check_invariants()

    def test_default_model_can_be_configured(self) -> None:
        """``default_model`` names it."""
        specs = [hr.make_spec("a", "1"), hr.make_spec("b", "1"), hr.make_spec("b", "0.9")]
        driver = hr.CoreDriver(hr.make_settings(*specs, default_model="b"))

        driver.push(hr.frame())

        record = driver.core.streams.by_name["cam-1"].order[0]
        assert (record.model, record.version) == ("b", "1")

    def test_no_models_at_all(self) -> None:
        """A broker without models refuses every frame."""
        driver = hr.CoreDriver(replace(hr.make_settings(), models=()))

        assert hr.ends(driver.push(hr.frame())) == [("cam-1", 0, "rejected", "unknown_model")]

    def test_undescribed_model_learns_its_classes_from_the_first_worker(self) -> None:
        """Until a worker has described it, frames are refused with the advice to come back."""
        open_spec = replace(hr.make_spec(), size_classes=())
        driver = hr.CoreDriver(hr.make_settings(open_spec))

        early = driver.push(hr.frame(seq=0))
        driver.join_worker(profiles=[hr.profile(hr.make_spec(classes=(hr.SMALL,)))])
        welcome = driver.join_producer()
        later = driver.push(hr.frame(seq=1))
        driver.join_worker(b"w2", profiles=[hr.profile(hr.make_spec(classes=(hr.SMALL,)))])

        assert hr.ends(early) == [("cam-1", 0, "rejected", "unknown_model")]
        assert hr.outcomes(early)[0].retry_after_ms == admission.UNKNOWN_RETRY_MS
        assert later == []
        assert isinstance(welcome[0], act.WelcomeProducer)
        assert welcome[0].models[0].size_classes == (hr.SMALL,)
        assert len(driver.core.models.classes) == 1
        driver.core.check_invariants()

    def test_tensor_model_has_one_class(self) -> None:
        """A model of plain tensors takes any shape and wastes nothing."""
        spec = replace(hr.make_spec(classes=(hr.SMALL,)), image=None)
        driver = hr.CoreDriver(hr.make_settings(spec))
        driver.join_worker()

        driver.push(
            replace(hr.frame(), shape=(3,), dtype="float32", inputs=(TensorSpec("x", "float32", (3,)),))
        )
        sent = hr.batches(driver.tick())

        assert len(sent) == 1

    def test_video_that_changes_size_lands_in_the_class_of_each_frame(self, driver: hr.CoreDriver) -> None:
        """VID-03: small, far too large, small again: each frame in its own class, with its own shape."""
        driver.join_worker(b"w1")
        driver.join_worker(b"w2")

        driver.push(hr.frame(seq=0), hr.frame(seq=1, size=3_000), hr.frame(seq=2))
        sent = hr.batches(driver.tick())
        done = [one for batch in sent for one in hr.outcomes(driver.done(batch))]

        assert [(one.seq, one.size_class, one.shape) for one in done] == [
            (0, "small", (32, 32, 1)),
            (1, "large", (3_000, 3_000, 1)),
            (2, "small", (32, 32, 1)),
        ]


def test_draining_broker_admits_nothing_but_knows_its_frames(driver: hr.CoreDriver) -> None:
    """New frames are refused, frames sent again are recognised."""
    driver.push(hr.frame(seq=0))
    driver.send(events.DrainRequested())

    actions = driver.push(hr.frame(seq=0), hr.frame(seq=1))

    assert hr.ends(actions) == [("cam-1", 1, "rejected", "draining")]
    assert driver.core.account.duplicates == 1
