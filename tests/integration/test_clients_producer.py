"""Producer against a real broker over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hr_broker import BrokerThread, broker_settings, emulated_model, running_broker
from hr_clients import AutoWorker, echo, image, run_script, settings_at, unused_port, wait_for
from hr_stand_in import StandIn

import headrace
from headrace import Outcome, Producer, Status, Subscriber
from headrace.errors import (
    ClosedError,
    InvalidFrameError,
    NotDeliveredError,
    RequestTimeoutError,
    UnreachableError,
)
from headrace.protocol.messages import Limits, Reject, SizeClassSpec


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    with running_broker() as running:
        yield running


@pytest.fixture
def worker(broker: BrokerThread) -> Iterator[AutoWorker]:
    with AutoWorker(broker.endpoints) as running:
        yield running


def test_every_frame_is_accounted_for(broker: BrokerThread, worker: AutoWorker) -> None:
    """Sent = finished + unfinished, by status; several streams through one producer."""
    with Producer(broker.endpoints.frames, name="p") as producer:
        for value in range(60):
            pushed = producer.push(image(value), stream=f"cam-{value % 3}")
        account = producer.flush(10)

        assert pushed == headrace.FrameId("cam-2", producer.epoch, 19)
        assert account.by_status == {"ok": 60}
        assert (account.sent, account.finished, account.unfinished, account.unknown) == (60, 60, 0, 0)
        assert producer.is_connected
        assert producer.models[0].name == "m"


def test_a_producer_that_leaves_at_once_loses_nothing() -> None:
    """VID-07: 250 frames of 200 kB pushed as fast as it goes, then the block ends: 250 results."""
    settings = broker_settings(emulated_model("m", SizeClassSpec("hd", 260, 260, 4)))
    with (
        running_broker(settings) as big,
        AutoWorker(big.endpoints),
        Subscriber(big.endpoints.frames, stream="file") as subscriber,
    ):
        with Producer(big.endpoints.frames) as producer:
            for value in range(250):
                producer.push(image(value, side=258), stream="file")

        items = [subscriber.get(5) for _ in range(250)]
        got = [item.seq for item in items if isinstance(item, Outcome) and item.status is Status.OK]

    assert got == list(range(250))
    assert producer.account.by_status == {"ok": 250}


def test_the_array_may_change_right_after_push() -> None:
    """ZMQ-20: header and body carry the same number although the one array is reused for every frame."""
    settings = broker_settings(emulated_model("m", SizeClassSpec("hd", 224, 224, 4)))
    with (
        running_broker(settings) as big,
        AutoWorker(big.endpoints, answer=echo),
        Subscriber(big.endpoints.frames, stream="cam") as subscriber,
    ):
        with Producer(big.endpoints.frames) as producer:
            array = np.empty((224, 224, 3), np.uint8)
            for seq in range(120):
                array[:] = seq
                producer.push(array, stream="cam", meta={"seq": seq})
            array[:] = 255

        for seq in range(120):
            item = subscriber.get(10)
            assert isinstance(item, Outcome)
            values = headrace.tensors_of(item)["echo"]
            assert item.meta == {"seq": seq}
            assert values.min() == values.max() == item.seq == seq


def test_one_producer_serves_many_threads(broker: BrokerThread, worker: AutoWorker) -> None:
    """ZMQ-13: eight threads share one object, also within a stream; every frame is whole and counted."""
    with Subscriber(broker.endpoints.frames, prefix="t/") as subscriber:
        with Producer(broker.endpoints.frames) as producer:

            def push(thread: int) -> None:
                for value in range(150):
                    producer.push(
                        image(thread), stream=f"t/{thread % 4}", meta={"thread": thread, "n": value}
                    )

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(push, range(8)))
            assert producer.flush(20).by_status == {"ok": 1_200}

        seen: dict[int, list[object]] = {thread: [] for thread in range(8)}
        for _ in range(1_200):
            item = subscriber.get(5)
            assert isinstance(item, Outcome)
            assert isinstance(item.meta, dict)
            assert isinstance(item.outputs, dict)
            thread = item.meta["thread"]
            assert isinstance(thread, int)
            assert item.outputs["first"] == thread
            seen[thread].append(item.meta["n"])
    assert all(numbers == list(range(150)) for numbers in seen.values())


def test_push_waits_for_room_and_says_when_there_is_none(broker: BrokerThread, worker: AutoWorker) -> None:
    """The window is bounded; a time limit turns the wait into an error that names the bound."""
    worker.gate.clear()
    with Producer(broker.endpoints.frames, max_unfinished_frames=3) as producer:
        for value in range(3):
            producer.push(image(value), stream="cam")

        with pytest.raises(RequestTimeoutError, match="3 of 3 frames"):
            producer.push(image(9), stream="cam", timeout=0.05)
        with pytest.raises(RequestTimeoutError, match="3 of 3 frames have no known end"):
            producer.flush(0.05)

        pushed = threading.Event()

        def push_one_more() -> None:
            producer.push(image(3), stream="cam")
            pushed.set()

        thread = threading.Thread(target=push_one_more)
        thread.start()
        assert not pushed.wait(0.1)
        worker.gate.set()
        assert pushed.wait(5)
        thread.join(5)
    assert producer.account.by_status == {"ok": 4}


def test_a_frame_larger_than_the_window_is_refused_at_once(broker: BrokerThread) -> None:
    """It would wait for ever."""
    with (
        Producer(broker.endpoints.frames, max_unfinished_bytes=100) as producer,
        pytest.raises(InvalidFrameError, match="max_unfinished_bytes is 100"),
    ):
        producer.push(image(1), stream="cam")


def test_a_frame_above_the_brokers_limit_is_an_error_not_a_cut_connection() -> None:
    """ZMQ-14: size and limit are named; frames within the limit pass on the same connection."""
    settings = broker_settings(core={"limits": Limits(max_frame_bytes=1_000, max_message_bytes=128 * 1024)})
    with (
        running_broker(settings) as small,
        AutoWorker(small.endpoints),
        Producer(small.endpoints.frames) as producer,
    ):
        producer.wait_connected(5)
        with pytest.raises(InvalidFrameError, match=r"120000 bytes.*1000"):
            producer.push(image(1, side=200), stream="cam")
        producer.push(image(1), stream="cam")

        account = producer.flush(5)

    assert account.by_status == {"ok": 1}
    assert account.sessions == 1


def test_rejects_are_counted_and_called_back(broker: BrokerThread, worker: AutoWorker) -> None:
    """An unknown model ends one frame, its neighbours pass; a failing callback harms nobody."""
    rejects: list[Reject] = []

    def on_reject(reject: Reject) -> None:
        rejects.append(reject)
        raise ValueError("a mistake of the caller")

    with Producer(broker.endpoints.frames, on_reject=on_reject) as producer:
        producer.push(image(0), stream="cam")
        producer.push(image(1), stream="cam", model="nobody")
        producer.push(image(2), stream="cam")
        account = producer.flush(5)

    assert account.by_status == {"ok": 2}
    assert account.rejected == {"unknown_model": 1}
    assert [(r.code, r.stream, r.seq) for r in rejects] == [("unknown_model", "cam", 1)]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"stream": ""}, "bad_stream"),
        ({"stream": "a" * 129}, "bad_stream"),
        ({"stream": "a\0b"}, "bad_stream"),
        ({"stream": "\ud800"}, "bad_stream"),
        ({"stream": 7}, "bad_stream"),
        ({"priority": 10}, "out_of_range"),
        ({"priority": -1}, "out_of_range"),
        ({"priority": True}, "bad_field"),
        ({"ttl_ms": 0}, "out_of_range"),
        ({"pts_ns": 2**63}, "out_of_range"),
        ({"color": "yuv"}, "bad_color"),
        ({"keep": "some"}, "bad_field"),
        ({"model": 3}, "bad_field"),
        ({"seq": -1}, "out_of_range"),
        ({"seq": 2**64}, "out_of_range"),
        ({"meta": {"id": 2**64}}, "out_of_range"),
        ({"encoding": "gif"}, "bad_encoding"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(fields: dict[str, object], code: str) -> None:
    """ZMQ-19, PAY-09: the error has the wire's own code; nothing was counted, nothing left the process."""
    with Producer("127.0.0.1:1") as producer:
        with pytest.raises(InvalidFrameError) as caught:
            producer.push(image(0), **({"stream": "cam"} | fields))  # type: ignore[arg-type]

        assert caught.value.code == code
        assert producer.account.sent == 0


def test_seq_must_rise_within_a_stream() -> None:
    """A number that was used, also by counting, is not used again."""
    producer = Producer("127.0.0.1:1", linger_s=0)
    assert producer.push(image(0), stream="cam", seq=5).seq == 5
    assert producer.push(image(0), stream="cam").seq == 6
    assert producer.push(image(0), stream="other").seq == 0

    with pytest.raises(InvalidFrameError, match=r"seq_backwards.*seq 6.*follows 6"):
        producer.push(image(0), stream="cam", seq=6)

    with pytest.raises(NotDeliveredError) as lost:
        producer.close()
    assert lost.value.unfinished == 3


def test_a_broker_that_restarts_gets_the_unfinished_frames_again() -> None:
    """Every frame has one outcome per subscriber although the first broker dies with half of them."""
    with running_broker() as first, AutoWorker(first.endpoints) as worker:
        endpoints = first.endpoints
        producer = Producer(endpoints.frames)
        subscriber = Subscriber(endpoints.frames, stream="cam")
        for value in range(20):
            producer.push(image(value), stream="cam")
        producer.flush(5)
        got = [subscriber.get(5) for _ in range(20)]
        worker.gate.clear()
        for value in range(20, 40):
            producer.push(image(value), stream="cam")
        wait_for(lambda: first.broker is not None and producer.account.unfinished == 20)

    with running_broker(settings_at(endpoints)), AutoWorker(endpoints):
        account = producer.close(timeout=20)
        while sum(isinstance(item, Outcome) for item in got) < 40:
            got.append(subscriber.get(10))
        subscriber.close()

    assert account.by_status == {"ok": 40}
    assert account.sessions == 2
    assert [item.seq for item in got if isinstance(item, Outcome)] == list(range(40))
    assert subscriber.account.missed == 0


def test_a_thread_that_died_is_told_at_the_next_call(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of our own ends the producer or subscriber aloud: no call waits for a dead thread."""

    def fail(*_args: object) -> None:
        raise ZeroDivisionError("a bug")

    producer = Producer(broker.endpoints.frames)
    subscriber = Subscriber(broker.endpoints.frames, stream="cam")
    monkeypatch.setattr(producer._loop, "_session", StandIn(producer._loop._session, handle=fail))
    monkeypatch.setattr(subscriber._loop, "_session", StandIn(subscriber._loop._session, handle=fail))
    with contextlib.suppress(ClosedError):
        producer.push(image(0), stream="cam")

    with pytest.raises(ClosedError, match="a bug"):
        producer.flush(5)
    with pytest.raises(ClosedError, match="a bug"):
        subscriber.get(5)
    with contextlib.suppress(NotDeliveredError):
        producer.close()
    subscriber.close()
    assert "ended by an error of its own" in caplog.text


def test_closing_twice_and_using_it_after_is_clear(broker: BrokerThread) -> None:
    """Close is idempotent; everything else says closed."""
    producer = Producer(broker.endpoints.frames)
    producer.wait_connected(5)
    producer.close()
    producer.close()

    with pytest.raises(ClosedError):
        producer.push(image(0), stream="cam")
    with pytest.raises(ClosedError):
        producer.flush()


def test_an_error_in_the_block_is_not_masked(broker: BrokerThread, worker: AutoWorker) -> None:
    """What was not delivered is added to it as a note."""
    worker.gate.clear()

    def fail_with_a_frame_under_way() -> None:
        with Producer(broker.endpoints.frames, linger_s=0.1) as producer:
            producer.push(image(0), stream="cam")
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        fail_with_a_frame_under_way()
    assert any("1 of 1 frames were not delivered" in note for note in caught.value.__notes__)


def test_close_with_a_limit_reports_what_is_left(broker: BrokerThread, worker: AutoWorker) -> None:
    """The numbers are in the error."""
    worker.gate.clear()
    producer = Producer(broker.endpoints.frames)
    producer.push(image(0), stream="cam")
    producer.push(image(0), stream="cam", model="nobody")
    wait_for(lambda: producer.account.finished == 1)

    with pytest.raises(NotDeliveredError) as caught:
        producer.close(timeout=0.05)

    assert (caught.value.unfinished, caught.value.delivered) == (1, 1)


def test_waiting_for_a_broker_that_is_not_there() -> None:
    """The error names address, limit and what was tried."""
    with (
        unused_port() as port,
        Producer(f"127.0.0.1:{port}") as producer,
        pytest.raises(UnreachableError, match=r"no welcome within 0\.2 s"),
    ):
        producer.wait_connected(0.2)


@pytest.mark.parametrize(
    "code",
    [
        """
        import sys, numpy, headrace
        with headrace.Producer(sys.argv[1]) as producer:
            producer.push(numpy.zeros((4, 4, 3), numpy.uint8), stream="cam")
        """,
        """
        import sys, numpy, headrace
        producer = headrace.Producer(sys.argv[1])
        producer.push(numpy.zeros((4, 4, 3), numpy.uint8), stream="cam")
        """,
    ],
    ids=["with-block", "never-closed"],
)
def test_a_script_without_a_broker_ends_and_says_what_was_lost(code: str) -> None:
    """ZMQ-09: it exits within the linger and says how many frames were not delivered; the block makes the
    exit code non-zero."""
    with unused_port() as port:
        started = time.monotonic()

        done = run_script(code, f"127.0.0.1:{port}")

        assert time.monotonic() - started < 2 + 5
    assert "1 of 1 frames" in done.stderr
    assert "not delivered" in done.stderr
    assert done.returncode == (1 if "with" in code else 0)


def test_a_fork_gets_a_clear_error_and_the_parent_goes_on(broker: BrokerThread, worker: AutoWorker) -> None:
    """ZMQ-12: after a 1 MB frame the child uses the parent's objects: no abort, no hang."""
    code = """
    import multiprocessing, os, sys, numpy, headrace
    producer = headrace.Producer(sys.argv[1])
    subscriber = headrace.Subscriber(sys.argv[1], stream="cam")
    big = numpy.zeros((590, 590, 3), numpy.uint8)
    producer.push(big, stream="big")
    small = numpy.zeros((4, 4, 3), numpy.uint8)

    def child():
        for use in (lambda: producer.push(small, stream="cam"), lambda: subscriber.get(1), producer.close):
            try:
                use()
            except headrace.ForkedError as error:
                assert str(os.getppid()) in str(error)
            else:
                os._exit(3)
        with headrace.Producer(sys.argv[1]) as own:
            own.push(small, stream="child")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    producer.push(small, stream="cam")
    account = producer.close(10)
    print(process.exitcode, account.sent, account.finished)
    """
    done = run_script(code, broker.endpoints.frames)

    assert done.stdout.split() == ["0", "2", "2"], done.stderr
    assert done.returncode == 0
