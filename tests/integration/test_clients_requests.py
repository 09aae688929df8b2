"""Control, Client and the asyncio twins against a real broker, or against a peer that answers late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
import pytest
import zmq
from hr_broker import BrokerThread, broker_settings, emulated_model, running_broker
from hr_clients import AutoWorker, image, settings_at, unused_port, wait_for

import headrace
from headrace import AsyncClient, AsyncProducer, AsyncSubscriber, Client, Control, Missed, Outcome, Status
from headrace.broker.status import MAX_STREAMS_PER_PAGE
from headrace.clients.records import FrameId, MissedReason
from headrace.errors import (
    ClosedError,
    FrameError,
    InvalidFrameError,
    NotDeliveredError,
    RemoteError,
    RequestTimeoutError,
    UnreachableError,
)
from headrace.protocol import codec
from headrace.protocol.messages import Discover, Endpoints, Frame, FrameResult, Limits, Reply, Request


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    with running_broker() as running:
        yield running


@pytest.fixture
def worker(broker: BrokerThread) -> Iterator[AutoWorker]:
    with AutoWorker(broker.endpoints) as running:
        yield running


# -- control -------------------------------------------------------------------------------------------


class LateAnswers:
    """A control socket that keeps its answers back until ``gate`` is set, then gives all of them, late
    ones first, each twice."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.requests: list[Request] = []
        self._is_stopped = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind("tcp://127.0.0.1:*")
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        kept: list[list[bytes]] = []
        while not self._is_stopped.is_set():
            if self._router.poll(10):
                peer, *parts = self._router.recv_multipart()
                message = codec.decode(parts, Limits())
                if isinstance(message, Discover):
                    answer = codec.encode(Endpoints(1, "", "", "", "", self.address, "", ""))
                    self._router.send_multipart([peer, *answer])
                elif isinstance(message, Request):
                    self.requests.append(message)
                    answer = codec.encode(Reply(message.id, {"echo": message.params["number"]}))
                    kept.append([peer, *answer])
            while kept and self.gate.is_set():
                late = kept.pop(0)
                self._router.send_multipart(late)
                self._router.send_multipart(late)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._is_stopped.set()
        self._thread.join(5)
        self._router.close(0)
        self._context.term()


def test_a_late_answer_is_never_taken_for_another() -> None:
    """ZMQ-10: the first call times out; ten later calls get each their own answer."""
    with LateAnswers() as peer, Control(peer.address) as control:
        with pytest.raises(RequestTimeoutError, match=r"status: no answer .* within 0\.3 s"):
            control.call("status", {"number": -1}, timeout=0.3)
        peer.gate.set()

        answers = [control.call("status", {"number": number}, timeout=5) for number in range(10)]

    assert [answer.result for answer in answers if isinstance(answer, Reply)] == [
        {"echo": number} for number in range(10)
    ]
    assert len({request.id for request in peer.requests}) == 11


def test_control_calls_every_method(broker: BrokerThread, worker: AutoWorker) -> None:
    """Status, positions, replay, drain; a refusal has the broker's code."""
    with headrace.Producer(broker.endpoints.frames) as producer:
        for value in range(5):
            producer.push(image(value), stream="cam")
        producer.flush(5)
        with Control(broker.endpoints.control) as control:
            boot, positions = control.positions(["cam\0", "nobody\0"])
            outcomes, missed, has_more = control.replay("cam", boot, 1, 3)

            assert positions == {"cam": 5}
            assert [outcome.seq for outcome in outcomes] == [1, 2, 3]
            assert (missed, has_more) == ((), False)
            account = control.status()["account"]
            assert isinstance(account, dict)
            assert account["ok"] == 5
            with pytest.raises(RemoteError, match="not_found"):
                control.fetch("0" * 64, 0, 100)
            with pytest.raises(RemoteError, match="unknown_method"):
                control.call("dance", {})
            assert control.drain() == 0


def test_control_finds_a_broker_that_restarted() -> None:
    """The connection is made again within the call."""
    with running_broker() as first:
        endpoints = first.endpoints
        control = Control(endpoints.control)
        boot = control.positions()[0]
    with running_broker(settings_at(endpoints)):
        assert control.positions(timeout=5)[0] != boot
    control.close()
    with pytest.raises(ClosedError):
        control.status()


def test_status_has_every_stream() -> None:
    """Also those beyond the first of the broker's pages."""
    names = {f"cam-{number}" for number in range(MAX_STREAMS_PER_PAGE + 2)}
    settings = broker_settings(core={"credits_per_producer": len(names)})
    with running_broker(settings) as broker, Control(broker.endpoints.control) as control:
        producer = headrace.Producer(broker.endpoints.frames, max_unfinished_frames=len(names))
        try:
            for name in names:
                producer.push(image(1), stream=name)
            wait_for(lambda: control.status()["streams_count"] == len(names))

            status = control.status(timeout=5)
        finally:
            with pytest.raises(NotDeliveredError):
                producer.close(timeout=0)

    assert status["streams"].keys() == names  # type: ignore[union-attr]
    assert "streams_next" not in status


def test_control_without_a_broker_is_unreachable() -> None:
    """In the time given, with the address named."""
    with unused_port() as port, Control(f"127.0.0.1:{port}") as control, pytest.raises(UnreachableError):
        control.status(timeout=0.2)


# -- client --------------------------------------------------------------------------------------------


def slower_for_early_frames(frame: Frame) -> FrameResult:
    """Answer with the frame's first pixel; the higher it is, the sooner."""
    value = memoryview(frame.payload).cast("B")[0]  # type: ignore[arg-type]
    threading.Event().wait((255 - value) / 255 * 0.003)
    return FrameResult(Status.OK, outputs={"first": value})


def test_every_answer_belongs_to_its_question(broker: BrokerThread) -> None:
    """BAT-14: two workers whose run time falls with the frame's number, 16 threads, 800 requests: pixel,
    meta and caller agree in each."""
    with (
        AutoWorker(broker.endpoints, worker="w1", answer=slower_for_early_frames),
        AutoWorker(broker.endpoints, worker="w2", answer=slower_for_early_frames),
        Client(broker.endpoints.frames) as client,
    ):

        def ask(thread: int) -> list[bool]:
            rights = []
            for number in range(50):
                value = (thread * 50 + number) % 256
                outcome = client.infer(image(value), meta={"thread": thread, "number": number}, timeout=20)
                rights.append(
                    outcome.outputs == {"first": value}
                    and outcome.meta == {"thread": thread, "number": number}
                )
            return rights

        with ThreadPoolExecutor(16) as pool:
            rights = [right for part in pool.map(ask, range(16)) for right in part]

    assert rights == [True] * 800


def test_infer_many_keeps_the_order_of_its_arguments(broker: BrokerThread, worker: AutoWorker) -> None:
    """However many are in flight at once."""
    with Client(broker.endpoints.frames, max_in_flight=20) as client:
        outcomes = client.infer_many([image(value) for value in range(100)], timeout=20)

    assert [o.outputs["first"] for o in outcomes if isinstance(o.outputs, dict)] == list(range(100))


def test_an_outcome_without_a_result_is_returned_and_can_be_raised(
    broker: BrokerThread, worker: AutoWorker
) -> None:
    """The status says how it ended; raise_for_status makes an error of it, with the code."""
    with Client(broker.endpoints.frames) as client:
        outcome = client.infer(image(0), model="nobody")

        assert (outcome.status, outcome.code) == (Status.REJECTED, "unknown_model")
        with pytest.raises(FrameError) as caught:
            headrace.raise_for_status(outcome)
        assert (caught.value.status, caught.value.code) == ("rejected", "unknown_model")
        assert headrace.raise_for_status(client.infer(image(1))).status is Status.OK
        with pytest.raises(InvalidFrameError, match="bad_dtype"):
            client.infer(np.array([True]))


def test_a_request_without_an_answer_times_out(broker: BrokerThread, worker: AutoWorker) -> None:
    """And harms no later one, whose answer is its own."""
    worker.gate.clear()
    with Client(broker.endpoints.frames) as client:
        with pytest.raises(RequestTimeoutError, match=r"0\.1 s"):
            client.infer(image(1), timeout=0.1)
        worker.gate.set()

        outcome = client.infer(image(2))

    assert isinstance(outcome.outputs, dict)
    assert outcome.outputs["first"] == 2


def test_closing_a_client_ends_its_waiting_requests(broker: BrokerThread, worker: AutoWorker) -> None:
    """Nobody waits for ever."""
    worker.gate.clear()
    client = Client(broker.endpoints.frames)
    future = client.submit(image(0))

    client.close()

    with pytest.raises(ClosedError):
        future.result(5)
    with pytest.raises(ClosedError):
        client.infer(image(0))


def test_requests_outlive_a_broker_that_restarts() -> None:
    """What was under way is answered by the next broker, each once; a request that the old one ended in its
    last moment, with an outcome that went down with it, is told so and not left waiting."""
    with running_broker() as first, AutoWorker(first.endpoints) as worker:
        endpoints = first.endpoints
        client = Client(endpoints.frames)
        client.infer_many([image(value) for value in range(5)])
        worker.gate.clear()
        futures = [client.submit(image(value)) for value in range(5)]

    with running_broker(settings_at(endpoints)), AutoWorker(endpoints):
        errors = [future.exception(20) for future in futures]
        answered = {value: futures[value].result() for value in range(5) if errors[value] is None}
        again = client.infer(image(9), timeout=20)
        client.close()

    assert all("missed: new_boot" in str(error) for error in errors if error is not None)
    assert answered
    assert [o.outputs["first"] for o in answered.values() if isinstance(o.outputs, dict)] == list(answered)
    assert isinstance(again.outputs, dict)
    assert again.outputs["first"] == 9


def test_what_an_earlier_broker_lost_does_not_end_a_request_of_the_next(
    broker: BrokerThread, worker: AutoWorker
) -> None:
    """The frame was sent again and ended under the new boot: its outcome is on its way, although the
    subscriber is told first that the old boot's end can't be had."""
    worker.gate.clear()
    with Client(broker.endpoints.frames) as client:
        future = client.submit(image(3))
        ((lane, seq), *_) = client._pending
        client._take_finished(FrameId(lane, client._producer.epoch, seq))
        client._take_item(Missed(lane, broker.endpoints.boot + 1, 0, None, MissedReason.NEW_BOOT))
        assert not future.done()

        worker.gate.set()
        assert future.result(20).status is Status.OK


def test_a_request_whose_outcome_can_not_be_had_is_told_so(broker: BrokerThread, worker: AutoWorker) -> None:
    """The producer knows that the frame ended, the subscriber that its outcome was missed."""
    worker.gate.clear()
    with Client(broker.endpoints.frames) as client:
        client._producer.wait_connected(10.0)
        future = client.submit(image(0))
        ((lane, seq), *_) = client._pending
        boot = broker.endpoints.boot
        client._take_item(Missed(lane, boot, 0, 0, MissedReason.LEFT_RING))
        assert not future.done(), "its frame is unfinished: the outcome may still come"

        client._take_finished(FrameId(lane, client._producer.epoch, seq))

        with pytest.raises(RequestTimeoutError, match="missed: left_ring"):
            future.result(5)
        worker.gate.set()
        assert client.infer(image(1)).status is Status.OK


# -- asyncio -------------------------------------------------------------------------------------------


async def test_the_asyncio_twins_do_the_same(broker: BrokerThread, worker: AutoWorker) -> None:
    """Push, flush, iterate, infer."""
    address = broker.endpoints.frames
    async with AsyncSubscriber(address, stream="cam") as subscriber:
        async with AsyncProducer(address) as producer:
            for value in range(30):
                await producer.push(image(value), stream="cam")
            account = await producer.flush(10)
            assert account.by_status == {"ok": 30}

        got = [item.seq async for item in subscriber.items(timeout=1) if isinstance(item, Outcome)]
        assert got == list(range(30))
    async with AsyncClient(address) as client:
        outcomes = await client.infer_many([image(value) for value in range(40)])
    assert [o.outputs["first"] for o in outcomes if isinstance(o.outputs, dict)] == list(range(40))


async def test_a_cancelled_push_was_not_sent(broker: BrokerThread, worker: AutoWorker) -> None:
    """And the producer goes on; other tasks run while a push waits for room."""
    worker.gate.clear()
    async with AsyncProducer(broker.endpoints.frames, max_unfinished_frames=2) as producer:
        await producer.push(image(0), stream="cam")
        await producer.push(image(1), stream="cam")
        waiting = asyncio.create_task(producer.push(image(2), stream="cam"))
        with pytest.raises(RequestTimeoutError):
            await producer.push(image(3), stream="cam", timeout=0.05)
        with pytest.raises(RequestTimeoutError):
            await producer.flush(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        worker.gate.set()
        assert (await producer.push(image(4), stream="cam")).seq == 2
        account = await producer.flush(10)

    assert (account.sent, account.finished) == (3, 3)


async def test_a_cancelled_get_has_taken_nothing(broker: BrokerThread, worker: AutoWorker) -> None:
    """The next get has the first item."""
    async with AsyncSubscriber(broker.endpoints.frames, stream="cam") as subscriber:
        with pytest.raises(RequestTimeoutError):
            await subscriber.get(0.02)
        waiting = asyncio.create_task(subscriber.get())
        await asyncio.sleep(0)
        waiting.cancel()
        async with AsyncProducer(broker.endpoints.frames) as producer:
            await producer.push(image(0), stream="cam")

        item = await subscriber.get(5)
        assert isinstance(item, Outcome)
        assert item.seq == 0


async def test_closing_ends_an_async_iteration(broker: BrokerThread) -> None:
    """PRC-11: a task that waits for items ends when another closes."""
    subscriber = await AsyncSubscriber(broker.endpoints.frames, stream="cam").open()

    async def read() -> int:
        return len([item async for item in subscriber])

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await subscriber.close()

    assert await asyncio.wait_for(reading, 5) == 0


async def test_a_cancelled_opening_leaves_nothing_behind() -> None:
    """The thread that was opening it closes it."""
    before = threading.active_count()
    with unused_port() as port:
        opening = asyncio.create_task(AsyncSubscriber(f"127.0.0.1:{port}", timeout=0.3).open())
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        # asyncio's own pool of threads stays; ours must go.
        await asyncio.to_thread(
            wait_for, lambda: not any(t.name.startswith("headrace-") for t in threading.enumerate())
        )
    assert threading.active_count() <= before + 4


async def test_an_async_infer_has_a_time_limit(broker: BrokerThread, worker: AutoWorker) -> None:
    """Its twin's error, not asyncio's."""
    worker.gate.clear()
    async with AsyncClient(broker.endpoints.frames) as client:
        started = time.monotonic()
        with pytest.raises(RequestTimeoutError, match=r"0\.1 s"):
            await client.infer(image(0), timeout=0.1)
        assert time.monotonic() - started < 2
        worker.gate.set()
        assert (await client.infer(image(1))).status is Status.OK


async def test_an_async_producer_reports_what_it_lost() -> None:
    """NotDeliveredError from the block, or as a note of the error that ended it."""
    with unused_port() as port:
        with pytest.raises(NotDeliveredError):
            await _push_one(port, None)
        with pytest.raises(KeyError) as caught:
            await _push_one(port, KeyError("mine"))

    assert any("not delivered" in note for note in caught.value.__notes__)


async def _push_one(port: int, error: Exception | None) -> None:
    async with AsyncProducer(f"127.0.0.1:{port}", linger_s=0.1) as producer:
        await producer.push(image(0), stream="cam")
        if error is not None:
            raise error


def test_using_a_twin_before_opening_it_is_clear() -> None:
    """An async with block opens it."""

    async def use() -> None:
        with pytest.raises(ClosedError, match="async with"):
            await AsyncClient("127.0.0.1:1").infer(image(0))
        with pytest.raises(ClosedError, match="async with"):
            await AsyncSubscriber("127.0.0.1:1").get()

    asyncio.run(use())


def test_a_worker_that_starts_late_is_waited_for() -> None:
    """Requests of a broker without workers wait; nothing is refused for it."""
    with (
        running_broker(broker_settings(emulated_model())) as broker,
        Client(broker.endpoints.frames) as client,
    ):
        future = client.submit(image(3))
        with AutoWorker(broker.endpoints):
            assert future.result(10).status is Status.OK
