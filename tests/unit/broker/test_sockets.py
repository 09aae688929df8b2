"""The option table, and how parts cross a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from headrace.broker.settings import CoreSettings
from headrace.broker.shell_settings import MIN_MESSAGE_BYTES, ShellSettings, check
from headrace.broker.sockets import (
    LINGER_MS,
    ROUTED,
    ZERO_COPY_BYTES,
    Role,
    Socket,
    make_socket,
    options_for,
    receive,
    receive_routed,
    send,
)
from headrace.errors import ConfigError
from headrace.protocol.messages import Limits


def settings(**limits: int) -> ShellSettings:
    return ShellSettings(core=CoreSettings(models=(), limits=Limits(**limits)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context() as made:
        yield made


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_every_socket_has_its_options_set(role: Role, context: zmq.Context[Socket]) -> None:
    """What the table says is what the socket has; linger, queue and message are bounded on each."""
    table = options_for(role, settings())

    with make_socket(context, role, settings()) as socket:
        readable = {o: v for o, v in table.items() if o not in {zmq.XPUB_VERBOSER, zmq.XPUB_NODROP}}
        unreadable = {zmq.ROUTER_MANDATORY, zmq.ROUTER_HANDOVER}  # ZeroMQ lets nobody read these back
        found = {option: socket.getsockopt(option) for option in readable.keys() - unreadable}

    assert found == {option: value for option, value in readable.items() if option not in unreadable}
    assert table[zmq.LINGER] == LINGER_MS
    assert table[zmq.RCVHWM] > 0
    assert table[zmq.MAXMSGSIZE] > 0
    assert table[zmq.IPV6] == 1


@pytest.mark.parametrize("role", sorted(ROUTED, key=lambda role: role.value), ids=lambda role: role.value)
def test_routers_notice_peers_that_are_gone(role: Role) -> None:
    """ZMQ-06, ZMQ-08: every ROUTER is mandatory, and hands a name over to the newer connection."""
    table = options_for(role, settings())

    assert table[zmq.ROUTER_MANDATORY] == 1
    assert table[zmq.ROUTER_HANDOVER] == 1


@pytest.mark.parametrize("size", [100, MIN_MESSAGE_BYTES - 1])
def test_a_message_limit_that_cuts_the_handshake_is_refused(size: int) -> None:
    """ZMQ-14: the smallest limit is named instead of a broker that nobody can reach."""
    with pytest.raises(ConfigError, match=rf"max_message_bytes = {size}.*at least {MIN_MESSAGE_BYTES}"):
        check(settings(max_message_bytes=size))


@pytest.mark.parametrize(
    ("field", "value"), [("results_queue_messages", 0), ("grace_ms", -1)], ids=["no bound", "negative"]
)
def test_a_setting_that_cannot_work_is_refused(field: str, value: int) -> None:
    """The error names the key and its value."""
    broken = ShellSettings(core=CoreSettings(models=()), **{field: value})  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=f"broker.{field} = {value}"):
        check(broken)


def test_large_parts_pass_through_without_a_copy(context: zmq.Context[Socket]) -> None:
    """A received payload goes out again as the very same ZeroMQ message, small parts as bytes."""
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.bind("inproc://through")
        dealer.connect("inproc://through")
        large = bytes(range(256)) * (ZERO_COPY_BYTES // 256)
        dealer.send_multipart([b"header", b"", large])

        assert router.poll(5_000)
        routing_id, parts = receive_routed(router)
        send(router, [routing_id, *parts])
        echoed = dealer.recv_multipart()

    assert [type(part) for part in parts] == [bytes, bytes, memoryview]
    assert isinstance(parts[2], memoryview)
    assert isinstance(parts[2].obj, zmq.Frame)
    assert echoed == [b"header", b"", large]


def test_a_slice_of_a_received_part_is_sent_as_the_slice(context: zmq.Context[Socket]) -> None:
    """Only a whole received part may be sent by reference: of a slice its own bytes go out."""
    with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://slice")
        push.connect("inproc://slice")
        push.send(b"a" * ZERO_COPY_BYTES + b"b" * ZERO_COPY_BYTES)
        assert pull.poll(5_000)
        (whole,) = receive(pull)
        assert isinstance(whole, memoryview)

        send(push, [whole[ZERO_COPY_BYTES:]])
        assert pull.poll(5_000)

        assert pull.recv() == b"b" * ZERO_COPY_BYTES


def test_receiving_from_an_empty_socket_says_so(context: zmq.Context[Socket]) -> None:
    """Nothing waits: the drain ends with zmq.Again."""
    with context.socket(zmq.PULL) as pull:
        pull.bind("inproc://empty")

        with pytest.raises(zmq.Again):
            receive(pull)


def test_sending_to_an_unknown_peer_takes_nothing(context: zmq.Context[Socket]) -> None:
    """A ROUTER without such a peer refuses at the first part, and the next message is whole."""
    with make_socket(context, Role.WORKERS, settings()) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"here")
        assert router.poll(5_000)
        routing_id, _ = receive_routed(router)

        with pytest.raises(zmq.ZMQError) as caught:
            send(router, [b"nobody", b"header", b"payload"])
        send(router, [routing_id, b"header", b"payload"])
        assert dealer.poll(5_000)
        received = dealer.recv_multipart()

    assert caught.value.errno == zmq.EHOSTUNREACH
    assert received == [b"header", b"payload"]
