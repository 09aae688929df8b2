"""Links and wakers on real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from hr_clients import unused_port, wait_for

from headrace.clients.sockets import CONTROL, PRODUCER, SUBSCRIBER, Context, Link, Role, Waker, snapshot
from headrace.errors import UnreachableError


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_link_says_once_and_for_ever_that_it_is_lost(context: Context) -> None:
    """It does not reconnect: what was sent on it is a prefix of what was meant."""
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = Link(context, PRODUCER, f"tcp://127.0.0.1:{port}", max_message_bytes=10**6)
    assert link.send([b"hello"])
    assert router.poll(5_000)
    assert not link.is_lost()

    router.close(linger=0)

    wait_for(link.is_lost)
    assert link.is_lost()
    assert link.receive() is None
    link.close()


def test_a_link_to_nothing_is_lost(context: Context) -> None:
    """A refused connection is noticed by the monitor, not by a time limit."""
    with unused_port() as port:
        link = Link(context, CONTROL, f"tcp://127.0.0.1:{port}", max_message_bytes=10**6)

        wait_for(link.is_lost)
        link.close()


def test_an_address_zeromq_refuses_is_unreachable(context: Context) -> None:
    """The endpoint is in the error and no socket is left."""
    with pytest.raises(UnreachableError, match="frames at tcp://nowhere"):
        Link(context, PRODUCER, "tcp://nowhere", max_message_bytes=10**6)

    context.term()


@pytest.mark.parametrize("role", [PRODUCER, SUBSCRIBER, CONTROL], ids=lambda role: role.name)
def test_every_role_gets_the_options_of_the_table(context: Context, role: Role, tmp_path: Path) -> None:
    """One place sets them for all."""
    link = Link(context, role, f"ipc://{tmp_path}/x", max_message_bytes=1_234)

    for option, expected in (
        (zmq.TYPE, role.kind),
        (zmq.LINGER, 0),
        (zmq.RCVHWM, role.receive_hwm),
        (zmq.SNDHWM, role.send_hwm),
        (zmq.MAXMSGSIZE, 1_234),
        (zmq.RECONNECT_IVL, -1),
        (zmq.IPV6, 1),
    ):
        assert link.socket.getsockopt(option) == expected
    link.close()


def test_a_snapshot_is_sent_again_and_again(context: Context) -> None:
    """ZMQ-20: its bytes are those of the moment it was taken, however often it is sent."""
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = Link(context, PRODUCER, f"tcp://127.0.0.1:{port}", max_message_bytes=10**7)
    array = np.full(300_000, 7, np.uint8)
    taken = snapshot(array.data)
    array[:] = 9

    for _ in range(3):
        assert link.send([b"header", taken])
    del taken

    for _ in range(3):
        assert router.poll(5_000)
        _, header, payload = router.recv_multipart()
        assert header == b"header"
        assert payload == bytes([7]) * 300_000
    link.close()
    router.close(linger=0)


def test_a_waker_wakes_from_any_thread() -> None:
    """Many calls are one wake-up; after drain it is quiet; after close it does nothing."""
    with Waker() as waker:
        poller = zmq.Poller()
        poller.register(waker.fileno(), zmq.POLLIN)
        threads = [threading.Thread(target=waker.wake) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)

        assert poller.poll(1_000)
        waker.drain()
        assert not poller.poll(0)
    waker.wake()
