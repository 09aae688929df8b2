"""The producers' arenas as the broker sees them: what each costs, and when there are too many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.arena import MIN_ARENA_BYTES, ArenaWriter
from headrace.broker.arenas import Arenas
from headrace.descriptors import Descriptors, count_open
from headrace.protocol.messages import Hello

KEY = "host"


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[ArenaWriter]]:
    made = [ArenaWriter.create(MIN_ARENA_BYTES, epoch, tmp_path) for epoch in range(1, 7)]
    yield made
    for writer in made:
        writer.close()


def hello(writer: ArenaWriter, epoch: int) -> Hello:
    return Hello(name=f"p{epoch}", epoch=epoch, host_key=KEY, arena=writer.name)


def test_an_arena_takes_one_descriptor(writers: list[ArenaWriter], tmp_path: Path) -> None:
    """A producer that names its arena again takes none."""
    arenas = Arenas(tmp_path, KEY)
    before = count_open()

    for _ in range(2):
        for epoch, writer in enumerate(writers, 1):
            assert arenas.open(hello(writer, epoch)) == writer.nbytes

    assert count_open() == before + len(writers)
    arenas.close()
    assert count_open() == before


def test_half_of_the_descriptors_are_left_to_connections(writers: list[ArenaWriter], tmp_path: Path) -> None:
    """Those that are there already keep their arena; further producers send inline, and the log says why."""
    arenas = Arenas(tmp_path, KEY, descriptors=Descriptors(20, lambda: 7))

    with capture_logs() as logs:
        sizes = [arenas.open(hello(writer, epoch)) for epoch, writer in enumerate(writers, 1)]
        again = arenas.open(hello(writers[0], 1))

    assert [size > 0 for size in sizes] == [True] * 3 + [False] * 3
    assert again == writers[0].nbytes
    assert {entry["reason"] for entry in logs} == {
        "10 of 20 descriptors are in use: raise the limit on open files (ulimit -n)"
    }
    arenas.close()


def test_two_producers_may_not_share_an_arena(writers: list[ArenaWriter], tmp_path: Path) -> None:
    """The second one that names it sends inline; the first keeps it."""
    with ExitStack() as stack:
        arenas = Arenas(tmp_path, KEY)
        stack.callback(arenas.close)

        with capture_logs() as logs:
            sizes = [arenas.open(hello(writers[0], epoch)) for epoch in (1, 2, 1)]

    assert sizes == [writers[0].nbytes, 0, writers[0].nbytes]
    assert [entry["reason"] for entry in logs] == ["it is another producer's"]
