"""Builders of frames and records for tests of the broker core."""

from __future__ import annotations

from itertools import count

from headrace.broker.records import FrameRecord
from headrace.protocol.messages import Frame

_numbers = count(1)


def make_frame(stream: str = "cam", seq: int = 0, **fields: object) -> Frame:
    """Return a small raw frame; any field can be given."""
    values: dict[str, object] = {"payload": b"\0" * 12, "nbytes": 12, "shape": (2, 2, 3), "epoch": 1}
    return Frame(stream=stream, seq=seq, **(values | fields))  # type: ignore[arg-type]


def make_record(
    stream: str = "cam", *, priority: int = 0, received_ns: int = 0, deadline_ns: int | None = None
) -> FrameRecord:
    """Return a record with a fresh admission number."""
    number = next(_numbers)
    return FrameRecord(
        number=number,
        frame=make_frame(stream, number),
        peer=b"p",
        model="m",
        version="1",
        size_class="c",
        priority=priority,
        received_ns=received_ns,
        deadline_ns=deadline_ns,
        nbytes=12,
    )
