"""What arrives, kept for whoever records it."""

from __future__ import annotations

import msgpack
import pytest
from hr_records import make_frame

from headrace.broker import recording
from headrace.broker.recording import KEEP_NS, Recording
from headrace.protocol.messages import BadFrame


def stream_names(result: dict[str, object]) -> list[str]:
    frames = result["frames"]
    assert isinstance(frames, list)
    return [frame[1] for frame in frames]


def started() -> Recording:
    """Return a recording that somebody asked for at time 0."""
    one = Recording()
    assert one.read(None, 10, 0) == {"frames": [], "next": 0, "lost": 0, "more": False}
    return one


def test_nothing_is_kept_until_somebody_asks() -> None:
    """A broker that nobody records pays one look at a flag."""
    one = Recording()

    assert not one.is_on
    assert one.read(0, 10, 0)["frames"] == []
    assert one.is_on


def test_a_frame_is_kept_without_its_pixels() -> None:
    """Time in microseconds, stream, shape, bytes, model, priority, ttl, keep, encoding, dtype."""
    one = started()

    one.note(make_frame(stream="cam", shape=(4, 5, 3), model="m", priority=2, ttl_ms=9), 7_000)

    frames = one.read(0, 10, 8_000)["frames"]
    assert isinstance(frames, list)
    assert frames == [[7, "cam", [4, 5, 3], frames[0][3], "m", 2, 9, "all", "raw", "uint8"]]


def test_pages_follow_each_other() -> None:
    """Each answer says where the next one begins, and whether more waits."""
    one = started()
    for name in "abc":
        one.note(make_frame(stream=name), 1)

    first = one.read(0, 2, 2)
    second = one.read(2, 2, 2)

    assert (stream_names(first), first["next"], first["more"]) == (["a", "b"], 2, True)
    assert (stream_names(second), second["next"], second["more"]) == (["c"], 3, False)
    assert one.read(99, 2, 2)["next"] == 3


def test_long_names_make_a_page_shorter_and_not_unreadable() -> None:
    """A header may have 1 MiB: whatever peers call their models, the recording goes on."""
    one = started()
    for _ in range(3_000):
        one.note(make_frame(stream="\U0001f600" * 32, model="\U0001f600" * 256, shape=(2**40,) * 8), 1)
    found, after = 0, 0
    while found < 3_000:
        page = one.read(after, recording.MAX_FRAMES_PER_PAGE, 2)
        assert len(msgpack.packb(page)) < 1_000_000
        assert page["next"] > after
        assert page["more"] == (page["next"] < 3_000)
        found, after = found + len(page["frames"]), page["next"]

    assert found == 3_000


def test_a_reader_that_is_too_slow_is_told_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring is the bound; what has left it is counted."""
    monkeypatch.setattr(recording, "MAX_FRAMES", 2)
    one = started()
    for name in "abcd":
        one.note(make_frame(stream=name), 1)

    result = one.read(1, 10, 2)

    assert (stream_names(result), result["lost"]) == (["c", "d"], 1)


def test_a_recording_ends_by_itself() -> None:
    """The first frame after KEEP_NS without a question ends it; the numbers go on."""
    one = started()
    one.note(make_frame(stream="a"), 1)

    one.note(make_frame(stream="b"), KEEP_NS)

    assert not one.is_on
    assert one.read(0, 10, KEEP_NS) == {"frames": [], "next": 1, "lost": 1, "more": False}


def test_a_question_that_comes_late_finds_nothing_old() -> None:
    """What was kept for an earlier recording is not handed to the next."""
    one = started()
    one.note(make_frame(stream="a"), 1)

    assert one.read(None, 10, 2 * KEEP_NS)["frames"] == []


def test_a_frame_that_cant_be_read_is_left_out() -> None:
    """It has no shape."""
    one = started()

    one.note(BadFrame("bad_shape", "no shape", "cam"), 1)

    assert one.read(0, 10, 2)["next"] == 0
