"""Peers that send nonsense: counted, answered where possible, and nobody else notices."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import hr_broker as hb
import msgpack
import psutil
import pytest
import zmq

from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Discover,
    Done,
    Endpoints,
    Failed,
    FrameResult,
    Hello,
    Limits,
    Refused,
    Reject,
    Request,
    SizeClassSpec,
    Status,
    Welcome,
    WorkerHello,
)

pytestmark = pytest.mark.timeout(60)

ROLES = ("frames", "intake", "results", "workers", "control")

#: The greeting of ZMTP 3.1 with the NULL mechanism, as in 23/ZMTP of the ZeroMQ RFCs.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def assert_serves(broker: hb.BrokerThread) -> None:
    """Send one frame all the way round."""
    with (
        hb.Listener(broker.endpoints, b"check\0") as listener,
        hb.Worker(broker.endpoints, "checker", instance=99) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame("check", priority=9)))
        while not listener.socket.poll(0):  # frames of the test before may be waiting as well
            worker.finish(worker.expect(Batch))
            listener.socket.poll(50)

        assert listener.outcomes(1)[0].status is Status.OK


@pytest.mark.parametrize("socket_name", ["frames", "workers", "control"])
@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([b"\xc1"], "bad_msgpack"),
        ([b""], None),
        ([b"\x91" * 10_000 + b"\xc0"], None),
        ([msgpack.packb({"v": 99, "type": "hello"})], "bad_version"),
        ([msgpack.packb({"v": 1, "type": "no-such"})], "unknown_type"),
        ([msgpack.packb({"v": 1, "type": "hello"}) + b"x"], None),
    ],
    ids=["not msgpack", "empty", "deep", "version", "type", "trailing"],
)
def test_an_unreadable_message_is_answered(socket_name: str, parts: list[bytes], code: str | None) -> None:
    """The sender hears a code; its connection and everybody else's go on."""
    with hb.running_broker() as broker:
        with hb.Peer(zmq.DEALER, getattr(broker.endpoints, socket_name)) as peer:
            peer.send_parts(*parts)
            refused = peer.expect(Refused)

        assert code is None or refused.code == code
        assert_serves(broker)


def test_garbage_on_the_unanswered_sockets_is_swallowed() -> None:
    """PULL can't answer and XPUB takes subscriptions only: both go on."""
    with hb.running_broker() as broker:
        with (
            hb.Peer(zmq.PUSH, broker.endpoints.intake) as script,
            hb.Peer(zmq.XSUB, broker.endpoints.results) as subscriber,
        ):
            script.send_parts(b"\xc1")
            script.send_parts(msgpack.packb({"v": 1, "type": "hello", "epoch": 1}))
            subscriber.send_parts(b"\x02not a subscription")
            subscriber.send_parts(b"\x01\xff\xfe")  # a topic that is no text
            subscriber.receive_parts()

        assert_serves(broker)


def test_random_bytes_on_every_port_hurt_nobody() -> None:
    """SEC-03: scanners, other protocols, half a greeting, a greeting and then garbage."""
    rng = random.Random(3)
    openings = [
        rng.randbytes(200),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(32),
        GREETING[:10],
        GREETING + rng.randbytes(500),
        b"",
    ]
    with hb.running_broker() as broker:
        assert_serves(broker)
        process = psutil.Process()
        before = process.num_fds()
        for _ in range(10):
            for role in ROLES:
                address = getattr(broker.endpoints, role).rpartition(":")
                for opening in openings:
                    with socket.create_connection(("127.0.0.1", int(address[2])), timeout=5) as raw:
                        raw.sendall(opening)

        assert_serves(broker)
        wait_for(lambda: process.num_fds() <= before + 5)


@pytest.mark.parametrize("role", ROLES)
def test_a_part_over_the_limit_is_cut_off(role: str) -> None:
    """SEC-04: a part that announces 1 GiB, or 2^63 bytes, closes the connection before memory is taken."""
    with hb.running_broker() as broker:
        port = int(getattr(broker.endpoints, role).rpartition(":")[2])
        for announced in (2**30, 2**63 - 1):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.settimeout(10)
                raw.sendall(GREETING + ready_command(role))
                raw.sendall(b"\x02" + announced.to_bytes(8, "big") + b"x" * 100)
                while raw.recv(4_096):  # the broker's own greeting, then the end
                    pass

        assert_serves(broker)


def ready_command(role: str) -> bytes:
    """Return the READY command of a peer of the right kind."""
    kind = {"intake": b"PUSH", "results": b"SUB"}.get(role, b"DEALER")
    body = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes([len(body)]) + body


def test_a_frame_over_the_limit_is_named_and_its_neighbours_run() -> None:
    """PAY-08, ZMQ-14: small, too large, small, small on one connection: one reject, three results."""
    mib = 1024 * 1024
    limits = Limits(max_frame_bytes=mib, max_message_bytes=2 * mib)
    model = hb.emulated_model("m", SizeClassSpec("large", 1024, 1024, 4))
    with (
        hb.running_broker(hb.broker_settings(model, core={"limits": limits})) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        exact = hb.Frame("cam", bytes(mib), mib, (1024, 1024, 1), seq=0)
        over = hb.Frame("cam", bytes(mib + 1024), mib + 1024, (1025, 1024, 1), seq=1)
        for frame in (exact, over, hb.frame("cam", 2), hb.frame("cam", 3)):
            producer.send(hb.frames(frame))
        server = threading.Thread(target=hb.serve, args=(worker, 3))
        server.start()
        reject = producer.expect(Reject)
        outcomes = listener.outcomes(4)
        server.join()

    assert (reject.code, reject.seq) == ("frame_too_large", 1)
    assert str(mib) in reject.message
    assert {o.seq: o.status for o in outcomes} == {
        0: Status.OK,
        1: Status.REJECTED,
        2: Status.OK,
        3: Status.OK,
    }


def test_a_named_peer_that_comes_back_takes_its_place() -> None:
    """ZMQ-06: a producer with a routing id of its own reconnects while its old connection is still open."""
    with hb.running_broker() as broker:
        # The first one never reconnects: it stands for a process that was killed and not noticed yet.
        named = {"ROUTING_ID": b"named", "RECONNECT_IVL": -1}
        with hb.Peer(zmq.DEALER, broker.endpoints.frames, **named) as first:
            first.send(Hello(epoch=1))
            first.expect(Welcome)
            with hb.Peer(zmq.DEALER, broker.endpoints.frames, **named) as second:
                second.send(Hello(epoch=2))
                second.expect(Welcome)

        assert_serves(broker)


def test_the_same_name_on_two_sockets_is_two_peers() -> None:
    """A producer that calls itself what a worker calls itself is not taken for it."""
    with (
        hb.running_broker() as broker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames, ROUTING_ID=b"w1") as producer,
        hb.Worker(broker.endpoints, "w1") as worker,
    ):
        producer.send(Hello(epoch=1))
        producer.expect(Welcome)
        producer.send(hb.frames(hb.frame("cam", 0, epoch=1)))

        assert worker.expect(Batch).frames[0].stream == "cam"


def test_the_limits_hold_on_ipc_as_well(tmp_path: Path) -> None:
    """An unreadable message over ipc:// is answered the same way."""
    with (
        hb.running_broker(hb.broker_settings(**hb.ipc_addresses(tmp_path))) as broker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as peer,
    ):
        peer.send_parts(b"\xc1")

        assert peer.expect(Refused).code == "bad_msgpack"


def random_value(rng: random.Random, depth: int = 0) -> object:
    """Return something that a field may hold: extremes of each type, and now and then a nest."""
    scalars: list[object] = [None, True, False, 0, 1, -1, 255, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)]
    scalars += [0.5, float("nan"), float("inf"), "", "cam", "m", "small", "w1", "x" * 300, "\0", b"", b"123"]
    if depth < 3 and rng.random() < 0.3:
        if rng.random() < 0.5:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return {str(rng.choice(FIELDS)): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(scalars)


#: Words that mean something in one message or another.
FIELDS = [
    "type",
    "v",
    "stream",
    "seq",
    "epoch",
    "boot",
    "pub_seq",
    "model",
    "version",
    "shape",
    "dtype",
    "encoding",
    "color",
    "priority",
    "ttl_ms",
    "keep",
    "pts_ns",
    "meta",
    "data",
    "frames",
    "inputs",
    "name",
    "worker",
    "instance",
    "host_key",
    "device",
    "engine",
    "release",
    "pid",
    "slots",
    "models",
    "classes",
    "size_class",
    "buckets",
    "batch",
    "results",
    "status",
    "code",
    "message",
    "outputs",
    "tensors",
    "flags",
    "staged_us",
    "ran_us",
    "total_us",
    "reason",
    "id",
    "method",
    "params",
    "topics",
    "first",
    "last",
    "max_bytes",
    "sha256",
    "offset",
    "nbytes",
    "stop",
    "streams_after",
    "max_streams",
    "lane",
    "arena",
    "generation",
    "height",
    "width",
    "max_batch_size",
    "fit",
    "notes",
]

#: Messages that are right, for the fuzzer to spoil one field of.
SEEDS = (
    Hello(epoch=1, name="p"),
    hb.frames(hb.frame("fuzz", 1, epoch=1)),
    hb.frames(hb.frame("fuzz", 2, epoch=1), hb.frame("fuzz", 3, epoch=1)),
    WorkerHello("w", 1, "", "cpu", "cpu", "0"),
    hb.ready_for((hb.emulated_model().spec,), "w", 1),
    Done(1, (FrameResult(Status.OK, outputs=1),)),
    Failed(1, "x", "y"),
    Request(1, "status", {"max_streams": 5, "streams_after": "a"}),
    Request(1, "positions", {"topics": ["", "fuzz\0"]}),
    Request(1, "replay", {"stream": "fuzz", "boot": 1, "first": 0, "last": 9}),
    Request(1, "fetch", {"sha256": "0" * 64, "offset": 0, "nbytes": 5}),
)


def spoiled(rng: random.Random) -> list[bytes]:
    """Return a right message with one thing wrong, somewhere."""
    header, *payloads = (bytes(part) for part in codec.encode(rng.choice(SEEDS)))
    fields = msgpack.unpackb(header)
    place = fields
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        below = place[key]
        if isinstance(below, dict | list) and below and rng.random() < 0.7:
            place = below
        else:
            place[key] = random_value(rng)
            break
    if rng.random() < 0.1:
        payloads = payloads[1:] if rng.random() < 0.5 else [*payloads, b"more"]
    return [msgpack.packb(fields), *payloads]


@pytest.mark.parametrize("seed", range(3))
def test_no_message_ends_the_broker(seed: int) -> None:
    """Thousands of nearly right messages on every socket: whatever they say, the loop goes on."""
    rng = random.Random(seed)
    with hb.running_broker() as broker:
        peers = [
            hb.Peer(zmq.PUSH if name == "intake" else zmq.DEALER, getattr(broker.endpoints, name))
            for name in ("frames", "intake", "workers", "control")
        ]
        for peer in peers:
            for _ in range(500):
                peer.send_parts(*spoiled(rng))
        for peer in peers:
            if peer.socket.type == zmq.DEALER:
                peer.send_parts(*codec.encode(Discover()))
                peer.expect(Endpoints)
            peer.close()

        assert broker.is_alive
        assert_serves(broker)


def wait_for(condition: object, timeout_s: float = hb.TIMEOUT_S) -> None:
    """Poll a condition that only the operating system can tell."""
    done = threading.Event()
    end = timeout_s / 0.02
    count = 0
    while not condition():  # type: ignore[operator]
        count += 1
        assert count < end, "the condition did not come true in time"
        done.wait(0.02)
