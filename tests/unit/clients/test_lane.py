"""The producer's choice of lane: when an arena is made, when a slot is taken, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.clients.lane import MIN_SLOT_BYTES, Lane
from headrace.errors import ArenaError, ConfigError
from headrace.host import host_key
from headrace.protocol.messages import Encoding, Frame, ShmRef

NBYTES = 256 * 1024
SIZE = MIN_SLOT_BYTES

Make = Callable[..., Lane]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Lane] = []

    def lane(choice: str = "auto", nbytes: int = NBYTES) -> Lane:
        made.append(Lane(choice, nbytes, 7, tmp_path))
        return made[-1]

    yield lane
    for one in made:
        one.close(is_abandoned=False)
    assert list(tmp_path.iterdir()) == []


def opened(lane: Lane, folder: Path) -> Lane:
    assert lane.prepare(host_key(folder)) != ""
    lane.note_welcome(True)
    return lane


def test_before_a_broker_is_known_payloads_go_inline(make: Make) -> None:
    """There is no arena yet, so push() does not wait for one."""
    lane = make()

    assert lane.has_room(SIZE)
    assert lane.take(SIZE) is None
    payload = lane.fill(None, b"abc")
    lane.note_sent(payload)
    assert bytes(payload) == b"abc"  # type: ignore[arg-type]
    assert lane.counts == {"inline": 1}


def test_a_slot_is_filled_with_one_copy_and_freed_with_the_outcome(make: Make, tmp_path: Path) -> None:
    """The caller may change its array at once."""
    lane = opened(make(), tmp_path)
    array = np.arange(SIZE, dtype=np.uint8)
    slot = lane.take(SIZE)
    assert slot is not None

    payload = lane.fill(slot, array.data)
    lane.note_sent(payload)
    sent = array.tobytes()
    array[:] = 0

    assert payload == slot
    assert bytes(lane.view(slot)) == sent
    assert lane.counts == {"shm": 1}
    assert bytes(lane.inlined(Frame("s", slot, SIZE, (SIZE,))).payload) == sent  # type: ignore[arg-type]
    lane.free(slot)
    lane.free(b"inline payloads have no slot")
    assert lane.take(SIZE) is not None


def test_an_inline_frame_is_sent_as_it_is(make: Make, tmp_path: Path) -> None:
    frame = Frame("s", b"abc", 3, (3,))

    assert make().inlined(frame) is frame
    assert opened(make(), tmp_path).inlined(frame) is frame


def test_a_full_arena_is_counted(make: Make, tmp_path: Path) -> None:
    """The frame goes inline: nothing waits where there is another way."""
    lane = opened(make(), tmp_path)
    slots = [lane.take(NBYTES // 4) for _ in range(5)]

    assert [slot is None for slot in slots] == [False, False, False, True, True]
    assert lane.full_count == 2
    assert lane.has_room(NBYTES)


def test_small_payloads_take_no_slot(make: Make, tmp_path: Path) -> None:
    """Unless nothing else is wanted."""
    assert opened(make(), tmp_path).take(MIN_SLOT_BYTES - 1) is None
    assert opened(make("shm"), tmp_path).take(1) is not None


def test_one_arena_serves_all_connections(make: Make, tmp_path: Path) -> None:
    """Unfinished frames lie there, so it stays, also while a broker can't read it."""
    lane = opened(make(), tmp_path)
    name = lane.prepare(host_key(tmp_path))
    slot = lane.take(SIZE)

    assert lane.prepare("another host") == ""
    lane.note_welcome(False)
    assert lane.take(SIZE) is None
    assert lane.prepare(host_key(tmp_path)) == name
    lane.note_welcome(True)
    assert isinstance(slot, ShmRef)
    assert slot.arena == name
    assert lane.take(SIZE) is not None


@pytest.mark.parametrize(
    ("prepare", "is_possible", "words"),
    [
        (lambda _lane, _key: None, False, "not connected"),
        (lambda lane, _key: lane.prepare("another host"), False, "share no memory"),
        (lambda lane, key: lane.prepare(key), False, "can't open arena"),
    ],
    ids=["no broker yet", "other host", "not opened"],
)
def test_lane_shm_raises_where_there_is_no_shared_memory(
    make: Make, tmp_path: Path, prepare: Callable[[Lane, str], object], is_possible: bool, words: str
) -> None:
    """And says why. Until a broker is there, push() waits."""
    lane = make("shm")
    prepare(lane, host_key(tmp_path))
    if words != "not connected":
        lane.note_welcome(is_possible)

    assert lane.has_room(SIZE) == (words != "not connected")
    with pytest.raises(ArenaError, match=words):
        lane.take(SIZE)


def test_lane_shm_has_room_while_a_slot_is_free(make: Make, tmp_path: Path) -> None:
    lane = opened(make("shm"), tmp_path)
    slots = [lane.take(NBYTES // 4) for _ in range(3)]

    assert not lane.has_room(NBYTES // 4)
    lane.free(slots[1])
    assert lane.has_room(NBYTES // 4)


def test_lane_inline_makes_no_arena(make: Make, tmp_path: Path) -> None:
    lane = make("inline")

    assert lane.prepare(host_key(tmp_path)) == ""
    assert lane.host_key == ""
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said_once(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not at each reconnection."""
    lane = make(nbytes=2**40)
    with caplog.at_level(logging.WARNING):
        assert [lane.prepare(host_key(tmp_path)) for _ in range(3)] == ["", "", ""]

    assert len(caplog.records) == 1
    assert str(2**40) in caplog.text


def test_the_shape_of_an_image_is_read_before_it_goes_into_a_slot(make: Make) -> None:
    """The broker does not look there. What can't be read it must see, to say why."""
    header = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000280000001e00802000000bab34bb3")

    assert make().shape_in_slot(Encoding.PNG, header) == (480, 640, 3)
    assert make().shape_in_slot(Encoding.PNG, b"nonsense") is None


def test_a_lane_that_there_is_not_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto, inline, shm"):
        Lane("fast", NBYTES, 7, tmp_path)
