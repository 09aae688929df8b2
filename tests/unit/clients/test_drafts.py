"""Drafts: what a producer remembers of a stream's last push, and what it checks all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.clients import drafts
from headrace.clients.drafts import Drafts
from headrace.errors import Code, InvalidFrameError
from headrace.protocol.messages import Color, Encoding, Frame, Keep, Limits

LIMITS = Limits()


def image(shape: tuple[int, ...] = (4, 6, 3), dtype: str = "uint8") -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def frame_of(memory: Drafts, pushed: object, **words: Any) -> Frame:
    drafted = memory.draft(pushed, words.pop("limits", LIMITS), stream=words.pop("stream", "cam"), **words)
    return drafted.frame(bytes(drafted.data), 7, 3)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", ">i4"])
def test_a_repeated_push_becomes_the_same_frame_as_the_first(dtype: str) -> None:
    """What is remembered changes nothing about what is sent."""
    memory, pushed = Drafts(), image(dtype=dtype)
    words = {"color": "bgr", "priority": 2, "ttl_ms": 1_000, "keep": "latest", "model": "m"}

    first, second = frame_of(memory, pushed, **words), frame_of(memory, pushed, **words)

    assert first == second == frame_of(Drafts(), pushed, **words)
    assert bytes(first.payload) == pushed.astype(pushed.dtype.newbyteorder("<")).tobytes()  # type: ignore[arg-type]
    assert (first.color, first.keep, first.priority) == (Color.BGR, Keep.LATEST, 2)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(image((6, 4, 3)), id="shape"),
        pytest.param(image(dtype="int16"), id="dtype"),
        pytest.param(image((4, 12, 3))[:, ::2], id="strides"),
        pytest.param(image(dtype=">u2"), id="byte order"),
        pytest.param(image((6, 4, 3)).T.copy().T, id="column order"),
    ],
)
def test_an_array_of_another_form_is_prepared_anew(changed: np.ndarray) -> None:
    """Only an array of exactly the remembered form takes the short way."""
    memory = Drafts()
    frame_of(memory, image())

    frame = frame_of(memory, changed)

    assert frame == frame_of(Drafts(), changed)
    assert frame.shape == changed.shape
    assert (
        bytes(frame.payload)
        == np.ascontiguousarray(changed)
        .astype(  # type: ignore[arg-type]
            changed.dtype.newbyteorder("<")
        )
        .tobytes()
    )


@pytest.mark.parametrize(
    ("word", "right", "wrong", "code"),
    [
        ("priority", 1, True, Code.BAD_FIELD),
        ("priority", 1, 1.0, Code.BAD_FIELD),
        ("priority", 0, 10, Code.OUT_OF_RANGE),
        ("ttl_ms", 1, True, Code.BAD_FIELD),
        ("ttl_ms", None, 0, Code.OUT_OF_RANGE),
        ("color", "rgb", "yuv", Code.BAD_COLOR),
        ("keep", "all", [], Code.BAD_FIELD),
        ("model", "m", 5, Code.BAD_FIELD),
        ("pts_ns", 5, 2**64, Code.OUT_OF_RANGE),
        ("meta", {}, {"a": object()}, Code.BAD_FIELD),
        ("stream", "cam", 5, Code.BAD_STREAM),
        ("stream", "cam", [], Code.BAD_STREAM),
    ],
)
def test_a_wrong_word_is_refused_after_a_right_one(word: str, right: Any, wrong: Any, code: Code) -> None:
    """True equals 1, but is no priority: what is remembered is compared by identity."""
    memory = Drafts()
    frame_of(memory, image(), **{word: right})

    with pytest.raises(InvalidFrameError) as refused:
        frame_of(memory, image(), **{word: wrong})

    assert refused.value.code == code


def test_new_limits_are_applied_to_a_remembered_form() -> None:
    """A producer learns the broker's limits only after it was made."""
    memory = Drafts()
    frame_of(memory, image(), priority=5)

    with pytest.raises(InvalidFrameError, match="limit is 10"):
        frame_of(memory, image(), priority=5, limits=Limits(max_frame_bytes=10))
    with pytest.raises(InvalidFrameError, match="priority"):
        frame_of(memory, image(), priority=5, limits=Limits(priority_levels=2))


def test_encoding_raw_and_encoded_bytes_pass_a_remembered_array_by() -> None:
    """An encoding that is named is looked at, whatever was pushed before."""
    memory = Drafts()
    frame_of(memory, image())

    jpeg = frame_of(memory, b"\xff\xd8\xff\xe0")

    assert (jpeg.encoding, jpeg.shape) == (Encoding.JPEG, ())
    with pytest.raises(InvalidFrameError):
        frame_of(memory, image(), encoding="jpeg")


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its bound all is forgotten and checked anew; frames are the same."""
    monkeypatch.setattr(drafts, "MAX_REMEMBERED", 3)
    memory = Drafts()

    frames = [frame_of(memory, image(), stream=f"cam-{number}") for number in range(10)]

    assert [frame.stream for frame in frames] == [f"cam-{number}" for number in range(10)]
    assert len(memory._last) <= 3
