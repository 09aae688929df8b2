"""The proxy of a chaos run: what it relays, writes over, holds back, swallows and cuts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from chaos.proxy import Proxy

BROKER_HOST = "127.0.0.10"
LINK_HOST = "127.0.0.11"
TIMEOUT_S = 10.0


class Echo:
    """A server that sends back what it gets, at a port of its own."""

    def __init__(self) -> None:
        self.listener = socket.create_server((BROKER_HOST, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(BROKER_HOST, [echo.port]) as proxy:
        proxy.add("link", LINK_HOST)
        yield proxy


def connect(echo: Echo) -> socket.socket:
    return socket.create_connection((LINK_HOST, echo.port), timeout=TIMEOUT_S)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(65536)):
        data += more
    return data


def has_ended(connection: socket.socket) -> bool:
    """Tell whether the other side closes the connection, in whichever way."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass_unchanged_but_for_the_address(echo: Echo, proxy: Proxy) -> None:
    """What the broker says of its own address becomes the link's; all else passes, however large."""
    with connect(echo) as connection:
        connection.sendall(f"tcp://{BROKER_HOST}:5555".encode())
        assert receive(connection, 21) == f"tcp://{LINK_HOST}:5555".encode()

        data = bytes(range(256)) * 8192
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        assert receive(connection, len(data)) == data


def test_a_delay_holds_back_and_keeps_the_order(echo: Echo, proxy: Proxy) -> None:
    """Both ways are delayed; what was sent first comes first."""
    with connect(echo) as connection:
        proxy.set_fault("link", "delay", 0.15)
        began_s = time.monotonic()
        connection.sendall(b"one")
        connection.sendall(b"two")
        assert receive(connection, 6) == b"onetwo"
        assert time.monotonic() - began_s >= 0.3


def test_a_throttle_limits_the_rate(echo: Echo, proxy: Proxy) -> None:
    """50,000 bytes at 100,000 bytes/s take half a second each way."""
    with connect(echo) as connection:
        proxy.set_fault("link", "throttle", 100_000.0)
        began_s = time.monotonic()
        connection.sendall(bytes(50_000))
        receive(connection, 50_000)
        assert time.monotonic() - began_s >= 0.5


def test_a_cut_closes_and_refuses_until_it_heals(echo: Echo, proxy: Proxy) -> None:
    """What was connected ends; a new connection ends at once, and works after the heal."""
    with connect(echo) as connection:
        connection.sendall(b"x")
        receive(connection, 1)
        proxy.set_fault("link", "cut")
        assert has_ended(connection)
    with connect(echo) as refused:
        assert has_ended(refused)

    proxy.heal("link")
    with connect(echo) as connection:
        connection.sendall(b"y")
        assert receive(connection, 1) == b"y"


def test_what_is_swallowed_never_comes_and_the_connection_ends_with_it(echo: Echo, proxy: Proxy) -> None:
    """No word to either side while it lasts; a stream with a hole is closed, not continued."""
    with connect(echo) as connection:
        connection.sendall(b"x")
        receive(connection, 1)
        proxy.set_fault("link", "swallow")
        connection.sendall(b"lost")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(TIMEOUT_S)

        proxy.heal("link")

        assert has_ended(connection)
