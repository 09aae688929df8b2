"""Addresses: reading, checking, replacing wildcard hosts, finding a broker."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from headrace import addresses
from headrace.errors import ConfigError, RemoteError, UnreachableError
from headrace.protocol import codec
from headrace.protocol.messages import Discover, Endpoints, Limits, Message, Refused


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("cam-host", "tcp://cam-host:5555"),
        ("cam-host:7", "tcp://cam-host:7"),
        ("tcp://cam-host:65535", "tcp://cam-host:65535"),
        ("tcp://cam-host", "tcp://cam-host:5555"),
        ("127.0.0.1", "tcp://127.0.0.1:5555"),
        ("::1", "tcp://[::1]:5555"),
        ("[::1]", "tcp://[::1]:5555"),
        ("[::1]:5559", "tcp://[::1]:5559"),
        ("tcp://[fe80::1%eth0]:5559", "tcp://[fe80::1%eth0]:5559"),
        ("ipc:///run/headrace/frames", "ipc:///run/headrace/frames"),
        ("  localhost ", "tcp://localhost:5555"),
    ],
)
def test_an_address_is_read_in_every_form(text: str, normal: str) -> None:
    """Host alone, with port, with transport, IPv6 with and without brackets, ipc."""
    assert addresses.normalise(text) == normal


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "host is missing"),
        (":5555", "host is missing"),
        ("host:", "port ''"),
        ("host:0", "port '0'"),
        ("host:65536", "port '65536'"),
        ("host:x", "port 'x'"),
        ("host:-1", "port '-1'"),
        ("a:b:c", "HOST:PORT"),
        ("[::1", "IPv6"),
        ("[::1]5", "IPv6"),
        ("[cam]:5", "IPv6"),
        ("ho st:5", "HOST:PORT"),
        ("5555", "127.0.0.1:5555"),
        ("*", "name a host"),
        ("0.0.0.0:5555", "name a host"),
        ("http://host", "'http'"),
        ("ipc://", "path is missing"),
    ],
)
def test_a_wrong_address_is_refused_with_its_remedy(text: str, named: str) -> None:
    """The error names what is wrong; nothing reaches ZeroMQ's own 'invalid argument'."""
    with pytest.raises(ConfigError, match="address") as caught:
        addresses.parse(text)

    assert named in str(caught.value)


def test_binding_takes_a_wildcard_host_and_port_0() -> None:
    """What can be bound is more than what can be connected to."""
    address = addresses.parse("*:0", for_binding=True)

    assert address.is_wildcard
    assert str(address) == "tcp://*:0"


@pytest.mark.parametrize(
    ("path", "is_right"),
    [("/" + "a" * 106, True), ("/" + "a" * 107, False), ("é" * 60, False)],
    ids=["107-bytes", "108-bytes", "60-characters-of-120-bytes"],
)
def test_an_ipc_path_is_limited_in_bytes(path: str, is_right: bool) -> None:
    """ZMQ-15: 107 bytes are right; more are refused with path, length and limit named."""
    if is_right:
        assert addresses.parse(f"ipc://{path}").path == path
        return

    with pytest.raises(ConfigError) as caught:
        addresses.parse(f"ipc://{path}")

    for part in (path, str(len(path.encode())), "107"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1:5", True),
        ("[::1]:5", True),
        ("localhost", True),
        ("ipc:///tmp/x", True),
        ("*", False),
        ("[::]:5555", False),
        ("192.168.1.5", False),
        ("cam-host", False),
    ],
)
def test_loopback_is_told_from_the_rest(text: str, expected: bool) -> None:
    """Only what can't be reached from another machine counts as loopback."""
    assert addresses.is_loopback(text) is expected


@pytest.mark.parametrize(
    ("bound", "host", "expected"),
    [
        ("tcp://0.0.0.0:5557", "10.0.0.9", "tcp://10.0.0.9:5557"),
        ("tcp://[::]:5557", "fe80::1", "tcp://[fe80::1]:5557"),
        ("tcp://*:5557", "10.0.0.9", "tcp://10.0.0.9:5557"),
        ("tcp://127.0.0.1:5557", "10.0.0.9", "tcp://127.0.0.1:5557"),
        ("http://0.0.0.0:9555", "10.0.0.9", "http://10.0.0.9:9555"),
        ("ipc:///tmp/x", "10.0.0.9", "ipc:///tmp/x"),
        ("", "10.0.0.9", ""),
    ],
)
def test_a_wildcard_host_is_replaced_by_the_one_that_was_reached(
    bound: str, host: str, expected: str
) -> None:
    """A broker bound to every interface is used under the address that worked."""
    assert addresses.reachable(bound, host) == expected


class OneAnswer:
    """A ROUTER that gives every Discover one answer."""

    def __init__(self, bind: str, answer: Message | bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.IPV6, 1)
        self._router.bind(bind)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._answer = answer
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_stopped.is_set():
            if not self._router.poll(20):
                continue
            peer, *parts = self._router.recv_multipart()
            assert isinstance(codec.decode(parts, Limits()), Discover)
            answer = [self._answer] if isinstance(self._answer, bytes) else codec.encode(self._answer)
            self._router.send_multipart([peer, *answer])

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join(5)
        self._router.close(0)
        self._context.term()


def endpoints(host: str = "0.0.0.0") -> Endpoints:
    tcp = {n: f"tcp://{host}:{5555 + i}" for i, n in enumerate(("frames", "intake", "results", "workers"))}
    return Endpoints(boot=3, control=f"tcp://{host}:5559", http="", host_key="key", **tcp)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "tcp://[::1]:*"], ids=["ipv4", "ipv6"])
def test_localhost_reaches_a_broker_on_one_family_only(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ-17: every address behind the name is tried, and the one that answered is used."""
    if "::1" in bind and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: both)
    broker = OneAnswer(bind, endpoints("[::]"))
    try:
        port = broker.endpoint.rpartition(":")[2]

        found = addresses.discover(f"localhost:{port}", 5)
    finally:
        broker.stop()

    literal = "[::1]" if "::1" in bind else "127.0.0.1"
    assert found.results == f"tcp://{literal}:5557"
    assert found.boot == 3


def test_localhost_is_both_families_where_the_machine_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ-17: a table of hosts without ::1 does not hide a broker that listens there."""
    one = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: one)

    assert [a.host for a in addresses.resolve(addresses.parse("localhost"))] == ["127.0.0.1", "::1"]
    assert [a.host for a in addresses.resolve(addresses.parse("camera-host"))] == ["127.0.0.1"]


def test_discovery_works_over_ipc(tmp_path: Path) -> None:
    """A path is an address like any other; wildcard hosts behind it are this machine's."""
    broker = OneAnswer(f"ipc://{tmp_path}/frames", endpoints())
    try:
        found = addresses.discover(f"ipc://{tmp_path}/frames", 5)
    finally:
        broker.stop()

    assert found.control == "tcp://127.0.0.1:5559"


def test_nothing_there_is_unreachable_within_the_limit() -> None:
    """The error names the address and the limit."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        started = time.monotonic()

        with pytest.raises(UnreachableError, match=rf"tcp://127.0.0.1:{port}.*0.3 s"):
            addresses.discover(f"127.0.0.1:{port}", 0.3)

    assert time.monotonic() - started < 2


def test_an_unknown_name_is_looked_up_until_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not exist yet may exist at the next attempt; the error says what was wrong."""
    lookups = []

    def unknown(*args: object, **_kwargs: object) -> None:
        lookups.append(args)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(addresses, "FIRST_ATTEMPT_S", 0.05)

    with pytest.raises(UnreachableError, match="Name or service not known"):
        addresses.discover("nowhere.invalid", 0.3)

    assert len(lookups) > 1


def test_a_refusal_is_told_as_such() -> None:
    """A broker that says no is not 'unreachable'."""
    broker = OneAnswer("tcp://127.0.0.1:*", Refused("draining", "the broker is stopping"))
    try:
        with pytest.raises(RemoteError, match="draining"):
            addresses.discover(broker.endpoint, 5)
    finally:
        broker.stop()


def test_a_broker_of_another_version_is_told_as_such() -> None:
    """SCL-03: it would refuse for ever; what is said names the versions of both."""
    other = msgpack.packb({"v": 2, "type": "refused", "code": "bad_version", "message": "no"})
    broker = OneAnswer("tcp://127.0.0.1:*", other)
    try:
        with pytest.raises(RemoteError, match="protocol version 1, got 2"):
            addresses.discover(broker.endpoint, 5)
    finally:
        broker.stop()


def test_a_stranger_on_the_port_is_not_a_broker() -> None:
    """Bytes that are no message of ours are ignored, not believed and not fatal."""
    stranger = OneAnswer("tcp://127.0.0.1:*", b"\xc1garbage")
    try:
        with pytest.raises(UnreachableError):
            addresses.discover(stranger.endpoint, 0.3)
    finally:
        stranger.stop()


class SocketWithoutPeer(zmq.Socket[bytes]):
    """A socket that can't send: its connection was given up, as ZeroMQ does where sockets don't match."""

    def send(self, data: object, flags: int = 0, *args: object, **options: object) -> None:
        assert flags & zmq.NOBLOCK, "this send would wait for ever"
        raise zmq.Again


class ContextWithoutPeer(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = SocketWithoutPeer


def test_a_socket_of_another_kind_does_not_hold_discovery_up() -> None:
    """A broker's results or intake address, given by mistake, ends in time like any wrong one."""
    with ContextWithoutPeer() as context, pytest.raises(UnreachableError):
        addresses.discover("tcp://127.0.0.1:9", 0.3, context=context)


def test_a_discovery_can_be_stopped() -> None:
    """PRC-11: closing a client that waits for a broker does not wait for the time limit."""
    stop = threading.Event()
    stop.set()
    started = time.monotonic()

    with pytest.raises(UnreachableError):
        addresses.discover("127.0.0.1:1", 60, should_stop=stop.is_set)

    assert time.monotonic() - started < 5
