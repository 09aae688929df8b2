"""The main path over real sockets: producers, a worker by hand, subscribers, control calls."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import hr_broker as hb
import msgpack
import pytest
import zmq

from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Credit,
    Discover,
    Done,
    Endpoints,
    Failed,
    FrameResult,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Outcome,
    Refused,
    Reject,
    Request,
    Setup,
    SizeClassSpec,
    Status,
    TensorSpec,
    Value,
    Welcome,
    WorkerHello,
)

pytestmark = pytest.mark.timeout(60)


def test_a_frame_becomes_one_published_outcome() -> None:
    """Hello, frame, batch, DONE, outcome, credit: the whole way round, once."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(Hello(epoch=7))
        welcome = producer.expect(Welcome)
        producer.send(hb.frames(hb.frame("cam", 0, epoch=7, pts_ns=5, meta={"k": [1]})))
        batch = worker.expect(Batch)
        worker.finish(batch)
        (outcome,) = listener.outcomes(1)
        credit = producer.expect(Credit)

    assert welcome.boot == broker.endpoints.boot
    assert welcome.endpoints == broker.endpoints
    assert [model.files for model in welcome.models] == [()]
    assert (batch.model, batch.size_class, len(batch.frames)) == ("m", "small", 1)
    assert outcome.status is Status.OK
    assert (outcome.stream, outcome.epoch, outcome.seq, outcome.pub_seq) == ("cam", 7, 0, 0)
    assert (outcome.pts_ns, outcome.meta, outcome.worker) == (5, {"k": [1]}, "w1")
    assert outcome.outputs == {"seq": 0}
    assert credit.finished == 1


def test_outcomes_of_a_stream_leave_in_the_order_of_its_frames() -> None:
    """Two workers finish in the wrong order; the stream's outcomes do not."""
    settings = hb.broker_settings(hb.emulated_model("m", SizeClassSpec("small", 16, 16, max_batch_size=1)))
    with (
        hb.running_broker(settings) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints, "w1", slots=1) as first,
        hb.Worker(broker.endpoints, "w2", instance=2, slots=1) as second,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame(seq=0), hb.frame(seq=1)))
        batches = {worker: worker.expect(Batch) for worker in (first, second)}
        later, earlier = sorted(batches, key=lambda worker: -(batches[worker].frames[0].seq or 0))
        later.finish(batches[later])
        assert listener.has_nothing(0.1)
        earlier.finish(batches[earlier])

        outcomes = listener.outcomes(2)

    assert [(outcome.seq, outcome.pub_seq) for outcome in outcomes] == [(0, 0), (1, 1)]


def test_every_router_tells_all_addresses() -> None:
    """Discover: any of the broker's addresses is enough to find the others."""
    with hb.running_broker() as broker:
        for address in (broker.endpoints.frames, broker.endpoints.workers, broker.endpoints.control):
            with hb.Peer(zmq.DEALER, address) as peer:
                peer.send(Discover())

                assert peer.expect(Endpoints) == broker.endpoints


@pytest.mark.parametrize(
    ("socket_name", "message", "home"),
    [
        ("frames", WorkerHello("w", 1, "", "cpu", "cpu", "0"), "workers"),
        ("workers", Hello(epoch=1), "frames"),
        ("workers", hb.frames(hb.frame()), "frames"),
        ("control", hb.frames(hb.frame()), "frames"),
        ("frames", Request(1, "status"), "control"),
    ],
    ids=["worker on frames", "producer on workers", "frame on workers", "frame on control", "call on frames"],
)
def test_a_message_on_the_wrong_socket_is_told_the_right_one(
    socket_name: str, message: Message, home: str
) -> None:
    """The refusal names what this socket takes, and the right socket with its address."""
    with (
        hb.running_broker() as broker,
        hb.Peer(zmq.DEALER, getattr(broker.endpoints, socket_name)) as peer,
    ):
        peer.send(message)
        refused = peer.expect(Refused)

    assert refused.code == "unexpected_type"
    assert "has no place here, which takes " in refused.message
    assert "discover, " in refused.message
    assert f"belongs on the {home} socket" in refused.message
    assert getattr(broker.endpoints, home) in refused.message


def test_a_message_that_only_brokers_send_is_refused() -> None:
    """A peer that plays the broker is told so and changes nothing."""
    with hb.running_broker() as broker, hb.Peer(zmq.DEALER, broker.endpoints.frames) as peer:
        peer.send(Credit(1, {}, {}))

        assert peer.expect(Refused).code == "unexpected_type"


def test_a_plain_push_script_needs_one_line() -> None:
    """PUSH and one map a frame: no hello, no epoch, no seq; the broker numbers the frames."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"plain\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.PUSH, broker.endpoints.intake) as script,
    ):
        for _ in range(3):
            script.send_parts(
                msgpack.packb({"stream": "plain", "shape": [2, 2, 3], "dtype": "uint8", "data": bytes(12)})
            )
        hb.serve(worker, 3)
        outcomes = listener.outcomes(3)

    assert [(outcome.status, outcome.seq) for outcome in outcomes] == [(Status.OK, n) for n in range(3)]


def test_a_rejected_frame_is_answered_and_published() -> None:
    """A frame that can't be admitted gets its reject and its outcome, with the same code."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame("cam", 4, model="no-such")))
        reject = producer.expect(Reject)
        (outcome,) = listener.outcomes(1)

    assert (reject.code, reject.stream, reject.seq) == ("unknown_model", "cam", 4)
    assert (outcome.status, outcome.code, outcome.seq) == (Status.REJECTED, "unknown_model", 4)


def test_topics_end_and_prefixes_do_not() -> None:
    """ZMQ-19: cam1 is not cam10 nor cam1/left; a prefix subscription gets what begins so; no empty stream."""
    streams = ["cam1", "cam10", "cam1/left"]
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam1\0") as exact,
        hb.Listener(broker.endpoints, b"cam1/") as prefix,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        for seq in range(10):
            producer.send(hb.frames(*(hb.frame(stream, seq) for stream in streams)))
        server = threading.Thread(target=hb.serve, args=(worker, 30))
        server.start()
        found, found_below = exact.outcomes(10), prefix.outcomes(10)
        server.join()
        producer.send(hb.frames(hb.frame("", 0)))
        refused = producer.expect(Refused)
        assert exact.has_nothing(0.1)

    assert {outcome.stream for outcome in found} == {"cam1"}
    assert {outcome.stream for outcome in found_below} == {"cam1/left"}
    assert refused.code == "bad_stream"


def test_each_subscription_is_confirmed_even_to_a_known_topic() -> None:
    """Three subscribers to one topic: each gets its own confirmation (the constructor waits for it)."""
    with hb.running_broker() as broker:
        for _ in range(3):
            hb.Listener(broker.endpoints, b"cam\0").close()


def test_a_slow_subscriber_costs_a_fast_one_nothing() -> None:
    """ZMQ-02: a subscriber that does not read loses outcomes and sees the gap; one that reads has none."""
    total, side = 400, 64
    settings = hb.broker_settings(
        hb.emulated_model("m", SizeClassSpec("small", side, side, 4)),
        results_queue_messages=10,
        core={"retention_frames": 1_024, "max_queued_per_stream": 1_000},
    )
    with (
        hb.running_broker(settings) as broker,
        hb.Listener(broker.endpoints, b"cam\0", RCVHWM=10, RCVBUF=4096) as slow,
        hb.Listener(broker.endpoints, b"cam\0", RCVHWM=0) as fast,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hb.Caller(broker.endpoints) as caller,
    ):
        big = {"fill": "x" * 50_000}
        server = threading.Thread(target=finish_with, args=(worker, total, big))
        server.start()
        received: list[Outcome] = []
        for seq in range(total):
            producer.send(hb.frames(hb.frame("cam", seq, side=side)))
            received += fast.outcomes(1)
        server.join()
        # The slow one reads only now: what its queue and the kernel held, then the rest from control.
        kept = []
        while slow.socket.poll(200):
            kept += slow.outcomes(1)
        numbers = {outcome.pub_seq for outcome in kept}
        lost = sorted(set(range(total)) - numbers)
        replayed = caller.replay(
            stream="cam", boot=broker.endpoints.boot, first=lost[0], last=lost[-1], max_bytes=2**22
        )

    assert [outcome.pub_seq for outcome in received] == list(range(total))
    assert lost, "the slow subscriber was meant to lose something"
    assert replayed.outcomes[0].pub_seq == lost[0]
    assert replayed.missed == ()


def finish_with(worker: hb.Worker, count: int, outputs: Value) -> None:
    """Finish batches with given outputs until so many frames are done."""
    while count > 0:
        batch = worker.expect(Batch)
        results = tuple(FrameResult(Status.OK, outputs=outputs) for _ in batch.frames)
        worker.send(Done(batch.batch, results))
        count -= len(batch.frames)


def test_header_and_payload_of_a_result_belong_together() -> None:
    """ZMQ-20: large tensors followed by a small part; each body is filled with its own number."""
    total, nbytes = 300, 100_000
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam\0", RCVHWM=0) as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        for seq in range(total):
            producer.send(hb.frames(hb.frame("cam", seq)))
            batch = worker.expect(Batch)
            number = batch.frames[0].seq or 0
            tensors = (TensorSpec("a", "uint8", (nbytes,)), TensorSpec("b", "uint8", (1,)))
            payloads = (bytes([number % 256]) * nbytes, bytes([number % 256]))
            result = FrameResult(Status.OK, outputs=number, tensors=tensors, payloads=payloads)
            worker.send(Done(batch.batch, (result,)))
        outcomes = listener.outcomes(total)

    for outcome in outcomes:
        large, small = (bytes(payload) for payload in outcome.payloads)
        assert outcome.outputs == outcome.seq
        assert large == bytes([outcome.seq % 256]) * nbytes
        assert small == bytes([outcome.seq % 256])


def test_a_batch_for_a_worker_that_is_gone_goes_to_another() -> None:
    """ZMQ-08: the worker's connection is cut between choice and send; every frame still gets its result.

    A frame that was sent to two dying workers would be taken for their killer; one that never left would not.
    """
    rounds, together = 100, 4
    settings = hb.broker_settings(core={"heartbeat_ms": 200})
    with (
        hb.running_broker(settings) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints, "steady", instance=1, slots=1) as steady,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        stop = threading.Event()
        server = threading.Thread(target=serve_and_beat, args=(steady, stop))
        server.start()
        try:
            outcomes = []
            for first in range(0, rounds * together, together):
                hb.Worker(broker.endpoints, "mortal", instance=10 + first, slots=1).close()
                producer.send(hb.frames(*(hb.frame("cam", first + n) for n in range(together))))
                # One mortal worker at a time: ZeroMQ takes what is sent before it sees the connection end.
                outcomes += listener.outcomes(together)
        finally:
            stop.set()
            server.join()

    assert sorted(outcome.seq for outcome in outcomes) == list(range(rounds * together))
    assert {outcome.status for outcome in outcomes} == {Status.OK}


def serve_and_beat(worker: hb.Worker, stop: threading.Event) -> None:
    """Serve batches and send heartbeats until told to stop."""
    while not stop.is_set():
        if worker.socket.poll(50):
            message = worker.receive()
            if isinstance(message, Batch):
                worker.finish(message)
        worker.send(Heartbeat())


def test_a_worker_that_does_not_read_is_noticed() -> None:
    """A silent worker is lost after three heartbeats, and its frame runs elsewhere."""
    settings = hb.broker_settings(core={"heartbeat_ms": 100})
    with (
        hb.running_broker(settings) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints, "mute", slots=1) as mute,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame("cam", 0)))
        mute.expect(Batch)
        with hb.Worker(broker.endpoints, "other", instance=2) as other:
            stop = threading.Event()
            server = threading.Thread(target=serve_and_beat, args=(other, stop))
            server.start()
            (outcome,) = listener.outcomes(1)
            stop.set()
            server.join()

    assert (outcome.status, outcome.worker, outcome.attempt) == (Status.OK, "other", 2)


def test_a_worker_whose_answer_can_not_be_read_loses_its_batch_at_once() -> None:
    """It believes the batch to be over, so nobody would end it: it is told why, its frame goes to another
    worker, and it is served again once it has introduced itself anew."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hb.Worker(broker.endpoints, "odd", slots=1) as odd,
    ):
        producer.send(hb.frames(hb.frame("cam", 0)))
        batch = odd.expect(Batch)
        header, *_ = codec.encode(Done(batch.batch, (FrameResult(Status.OK, outputs=1),)))
        odd.socket.send_multipart([header, b"a payload that the header does not name"])

        refusals = [odd.expect(Refused) for _ in range(2)]
        with hb.Worker(broker.endpoints, "even", instance=2) as even:
            hb.serve(even, 1)
            (outcome,) = listener.outcomes(1)
        odd.send(WorkerHello("odd", 1, "", "cpu", "emulated", "0"))
        odd.expect(Setup)

    assert [refused.code for refused in refusals] == ["part_count", "unknown_peer"]
    assert (outcome.status, outcome.worker, outcome.attempt) == (Status.OK, "even", 2)


def test_peers_that_say_goodbye_are_let_go() -> None:
    """A producer's streams are free for the next one, a worker's batches go to another."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as first,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as second,
        hb.Caller(broker.endpoints) as caller,
    ):
        first.send(Hello(epoch=1))
        first.expect(Welcome)
        with hb.Worker(broker.endpoints) as worker:
            first.send(hb.frames(hb.frame("cam", 0, epoch=1)))
            hb.serve(worker, 1)
            listener.outcomes(1)
            worker.send(Goodbye())
            first.send(Goodbye())
            caller.send(Heartbeat())  # has no session there, and does no harm
            second.send(Hello(epoch=2))
            second.expect(Welcome)
            second.send(hb.frames(hb.frame("cam", 0, epoch=2)))
            with hb.Worker(broker.endpoints, "w2", instance=2) as other:
                batch = other.expect(Batch)
                other.send(Failed(batch.batch, "batch_failed", "planted"))
                (outcome,) = listener.outcomes(1)
        status = caller.call("status").result

    assert (outcome.epoch, outcome.status, outcome.code) == (2, Status.ERROR, "batch_failed")
    assert [worker["id"] for worker in status["workers"]] == ["w2"]  # type: ignore[index,call-overload,union-attr]


def test_a_drained_broker_says_goodbye_and_ends() -> None:
    """What was admitted is finished and published, peers are told, and the loop ends."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(Hello(epoch=1))
        producer.expect(Welcome)
        producer.send(hb.frames(hb.frame("cam", 0, epoch=1)))
        batch = worker.expect(Batch)
        broker.drain()
        assert broker.is_alive
        worker.finish(batch)
        (outcome,) = listener.outcomes(1)
        producer.expect(Goodbye)
        worker.expect(Goodbye)
        broker.join()

    assert outcome.status is Status.OK


def test_grace_ends_a_drain_that_nobody_finishes() -> None:
    """A worker that never answers can't keep the broker: its frame ends as error shutdown."""
    with (
        hb.running_broker(hb.broker_settings(grace_ms=200)) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame("cam", 0)))
        worker.expect(Batch)
        began = time.monotonic()
        broker.drain()
        (outcome,) = listener.outcomes(1)
        broker.join()

    assert (outcome.status, outcome.code) == (Status.ERROR, "shutdown")
    assert time.monotonic() - began < 5


def test_a_drain_over_control_may_end_the_broker() -> None:
    """drain with stop does what SIGTERM does."""
    with hb.running_broker() as broker, hb.Caller(broker.endpoints) as caller:
        assert caller.call("drain", stop=True).result == {"unfinished": 0, "stop": True}
        broker.join()


def test_a_broker_on_ipc_serves_all_roles(tmp_path: Path) -> None:
    """Every address can be ipc://."""
    with (
        hb.running_broker(hb.broker_settings(**hb.ipc_addresses(tmp_path))) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.PUSH, broker.endpoints.intake) as script,
    ):
        script.send(hb.frames(hb.frame("cam", 0)))
        hb.serve(worker, 1)

        assert listener.outcomes(1)[0].status is Status.OK

    assert list(tmp_path.iterdir()) == []
