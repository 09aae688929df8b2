"""Naming the process that holds a port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from headrace.broker.port_owner import describe_listener


def test_our_own_listener_is_found() -> None:
    """Process id and name of the holder."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert describe_listener(server.getsockname()[1]).startswith(f"process {os.getpid()} (")


def test_a_connection_is_not_a_listener() -> None:
    """A client's end on a port does not make it the holder."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert describe_listener(client.getsockname()[1]) == ""


def test_a_machine_that_tells_nothing_gives_an_empty_answer(tmp_path: Path) -> None:
    """No /proc (another system): no guess."""
    assert describe_listener(80, proc=tmp_path) == ""


def test_a_process_that_may_not_be_looked_into_is_passed_over(tmp_path: Path) -> None:
    """The port is taken, but its holder's descriptors are not ours to read."""
    row = "0: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4242 1"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(f"header\n{row}\n")
    (tmp_path / "7").mkdir()

    assert describe_listener(0x50, proc=tmp_path) == ""
