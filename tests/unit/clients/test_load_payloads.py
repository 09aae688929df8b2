"""Frames of a load: of the sizes asked for, different from each other, readable as what they are."""

from __future__ import annotations

import importlib.util
import sys

import cv2
import numpy as np
import pytest

from headrace.clients.load.payloads import (
    MAX_POOL_FRAMES,
    MIN_POOL_FRAMES,
    POOL_BYTES,
    Content,
    Payloads,
    Size,
    resolve,
)
from headrace.errors import LocalError
from headrace.protocol.messages import Encoding, ModelSpec

SMALL, WIDE = Size(48, 64), Size(30, 200)


def payloads(encoding: Encoding = Encoding.RAW, content: Content = Content.NOISE, seed: int = 1) -> Payloads:
    return Payloads([SMALL, WIDE], encoding=encoding, content=content, seed=seed)


@pytest.mark.parametrize("content", [Content.NOISE, Content.SCENE])
def test_raw_frames_are_images_of_their_size_and_never_equal(content: Content) -> None:
    """A frame carries its number: a pool that knows contents again finds none."""
    frames = payloads(content=content)

    seen = set()
    for number in range(2 * MAX_POOL_FRAMES):
        frame = frames.get(number % 2, number)
        assert isinstance(frame, np.ndarray)
        assert frame.shape == ((48, 64, 3), (30, 200, 3))[number % 2]
        assert frame.dtype == np.uint8
        seen.add(frame.tobytes())
    assert len(seen) == 2 * MAX_POOL_FRAMES


@pytest.mark.parametrize(("encoding", "magic"), [(Encoding.JPEG, b"\xff\xd8"), (Encoding.PNG, b"\x89PNG")])
def test_encoded_frames_are_files_of_their_kind(encoding: Encoding, magic: bytes) -> None:
    """Whoever decodes them gets the size asked for."""
    frame = payloads(encoding, Content.SCENE).get(1, 5)

    assert isinstance(frame, bytes)
    assert frame.startswith(magic)
    assert cv2.imdecode(np.frombuffer(frame, np.uint8), cv2.IMREAD_COLOR).shape == (30, 200, 3)


def test_a_scene_compresses_as_a_photograph_does() -> None:
    """Noise would make JPEG files of a size that no camera sends."""
    scene = payloads(Encoding.JPEG, Content.SCENE).get(0, 0)
    noise = payloads(Encoding.JPEG, Content.NOISE).get(0, 0)

    assert len(scene) < len(noise) / 2


def test_one_seed_makes_one_set_of_frames() -> None:
    """A run can be repeated to the byte."""
    assert np.array_equal(payloads(seed=3).get(0, 7), payloads(seed=3).get(0, 7))
    assert not np.array_equal(payloads(seed=3).get(0, 7), payloads(seed=4).get(0, 7))


def test_the_pool_of_frames_is_bounded() -> None:
    """Large frames are fewer, so that making them does not take all memory."""
    large = Size(2_160, 3_840)

    frames = Payloads([large], encoding=Encoding.RAW, content=Content.NOISE, seed=0)

    count = len(frames._frames[0])
    assert MIN_POOL_FRAMES <= count <= max(MIN_POOL_FRAMES, POOL_BYTES // (2_160 * 3_840 * 3))


def test_a_frame_smaller_than_its_number_holds_a_part_of_it() -> None:
    """One pixel is a frame too."""
    frames = Payloads([Size(1, 1)], encoding=Encoding.RAW, content=Content.SCENE, seed=0)

    assert np.array_equal(frames.get(0, 0x030201).reshape(-1), [1, 2, 3])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "encoding", "adapter", "expected"),
    [
        (Content.AUTO, Encoding.RAW, "tensors", Content.NOISE),
        (Content.AUTO, Encoding.RAW, "detect", Content.SCENE),
        (Content.AUTO, Encoding.RAW, "text", Content.SCENE),
        (Content.AUTO, Encoding.JPEG, "tensors", Content.SCENE),
        (Content.NOISE, Encoding.JPEG, "text", Content.NOISE),
        (Content.SCENE, Encoding.RAW, "tensors", Content.SCENE),
    ],
)
def test_auto_is_a_scene_where_something_is_looked_for_or_compressed(
    content: Content, encoding: Encoding, adapter: str, expected: Content
) -> None:
    """What is said outright is done."""
    assert resolve(content, encoding, ModelSpec("m", "1", adapter=adapter)) is expected
    assert resolve(Content.AUTO, Encoding.RAW, None) is Content.NOISE


def test_without_opencv_encoded_frames_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a scene goes without writing."""
    monkeypatch.setitem(sys.modules, "cv2", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(LocalError, match=r"headrace\[video\]"):
        payloads(Encoding.JPEG)
    assert payloads(content=Content.SCENE).get(0, 0) is not None
