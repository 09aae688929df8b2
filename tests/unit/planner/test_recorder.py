"""From a broker's answers to the frames of a trace."""

from __future__ import annotations

import pytest

from headrace.errors import RemoteProtocolError
from headrace.planner.recorder import Recorder
from headrace.planner.trace_file import TraceFrame, TraceKind
from headrace.protocol.messages import Encoding, Keep, Value


def entry(time_us: int, stream: str = "cam", **changes: Value) -> list[Value]:
    fields: dict[str, Value] = {
        "time": time_us,
        "stream": stream,
        "shape": [4, 5, 3],
        "bytes": 60,
        "model": "",
        "priority": 0,
        "ttl_ms": None,
        "keep": "all",
        "encoding": "raw",
        "dtype": "uint8",
    }
    return list((fields | changes).values())


def answer(*entries: list[Value], **changes: Value) -> dict[str, Value]:
    return {"frames": list(entries), "next": len(entries), "lost": 0, "more": False} | changes


def test_times_count_from_the_first_frame() -> None:
    """Whatever the broker's clock says."""
    recorder = Recorder()

    taken = recorder.take(answer(entry(5_000_000), entry(6_500_000)))
    taken += recorder.take(answer(entry(7_000_000)))

    assert [frame.time_s for frame in taken] == [0.0, 1.5, 2.0]
    assert (recorder.frames_count, recorder.streams_count) == (3, 1)


def test_every_field_is_taken() -> None:
    """And the next question says where to go on."""
    recorder = Recorder()
    special = entry(1, "b", model="m", priority=2, ttl_ms=7, keep="latest", encoding="jpeg")

    taken = recorder.take(answer(special, next=9, lost=3, more=True))

    kind = TraceKind((4, 5, 3), 60, "m", 2, 7, Keep.LATEST, Encoding.JPEG)
    assert taken == [TraceFrame(0.0, "b", kind)]
    assert (recorder.params, recorder.more, recorder.lost_count) == ({"after": 9}, True, 3)


def test_the_clock_of_another_broker_goes_on_from_the_last_frame() -> None:
    """A broker that was started again, on another machine perhaps, does not turn the trace back."""
    recorder = Recorder()

    taken = recorder.take(answer(entry(5_000_000), entry(6_000_000), entry(1_000), entry(501_000)))

    assert [frame.time_s for frame in taken] == [0.0, 1.0, 1.0, 1.5]


def test_names_can_be_hashed() -> None:
    """The same name gives the same hash in one recording, another salt another one."""
    entries = answer(entry(1, "door"), entry(2, "gate"), entry(3, "door"))

    door, gate, again = (frame.stream for frame in Recorder(b"salt").take(entries))
    (other, *_) = (frame.stream for frame in Recorder(b"pepper").take(entries))

    assert door == again
    assert len({door, gate, other, "door"}) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        answer(next="1"),
        answer(lost=None),
        answer(frames="none"),
        answer([1, 2]),
        answer(entry(1, shape=["a"])),
        answer(entry(1, keep="some")),
        answer(entry(1, ttl_ms="soon")),
    ],
    ids=["empty", "next", "lost", "frames", "short", "shape", "keep", "ttl"],
)
def test_an_answer_that_cant_be_read_is_refused(wrong: dict[str, Value]) -> None:
    """A broker of another release is told apart from a bug of ours."""
    with pytest.raises(RemoteProtocolError):
        Recorder().take(wrong)
