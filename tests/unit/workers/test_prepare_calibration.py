"""Frames for calibration: chosen evenly and repeatably, fitted as staging does, unreadable files named."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from hr_video import clip, noise, write_lossless

from headrace.protocol.messages import Color, Fit, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers.engine import InputPlan
from headrace.workers.prepare import calibration
from headrace.workers.prepare.calibration import load_frames, tensor_feeds
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

SPEC = ModelSpec("m", "1", image=ImageInput(color=Color.BGR, pad_value=7))
CLASS = SizeClassSpec("c", 32, 48, fit=Fit.LETTERBOX)


def _images(folder: Path, count: int, first: int = 0) -> str:
    """Write grey images of 16x24 whose level is their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        cv2.imwrite(str(folder / f"img{number}.png"), np.full((16, 24, 3), number, np.uint8))
    return str(folder)


def test_frames_are_fitted_as_staging_does(tmp_path: Path) -> None:
    """Scaled with the aspect kept, in the model's colour order, with the model's border."""
    picture = np.zeros((32, 32, 3), np.uint8)
    picture[..., 2] = 200  # OpenCV writes BGR: red
    cv2.imwrite(str(tmp_path / "red.png"), picture)

    frames = load_frames([str(tmp_path / "red.png")], SPEC, CLASS, 1)

    assert frames.images.shape == (1, 32, 48, 3)
    assert frames.images[0, 10, 20].tolist() == [0, 0, 200]
    assert frames.images[0, 10, 2].tolist() == [7, 7, 7]
    assert (frames.placements[0].left, frames.placements[0].width) == (8, 32)
    assert frames.origins == ("red.png",)


def test_the_choice_is_spread_seeded_and_covers_subfolders(tmp_path: Path) -> None:
    """Ten of a hundred: one in each tenth, the same for the same seed."""
    _images(tmp_path / "a", 50)
    _images(tmp_path / "b", 50, first=50)

    first, again, other = (load_frames([str(tmp_path)], SPEC, CLASS, 10, seed) for seed in (1, 1, 2))

    levels = sorted(int(image[16, 24, 0]) for image in first.images)
    assert [level // 10 for level in levels] == list(range(10))
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_every_source_gives_its_share_and_the_order_mixes_them(tmp_path: Path) -> None:
    """A source with too few frames leaves the rest to the others; each half of a split sees both."""
    small, large = _images(tmp_path / "small", 3), _images(tmp_path / "large", 40)

    frames = load_frames([small, large], SPEC, CLASS, 20)
    first, second = frames.split(10)

    assert [use.frame_count for use in frames.sources] == [3, 17]
    assert len(first) == len(second) == 10
    assert sum(use.frame_count for use in first.sources) == 10
    halves = [set(zip(half.source_indexes, half.origins, strict=True)) for half in (first, second)]
    assert len(halves[0] | halves[1]) == 20
    assert frames.describe() == f"20 real frames of 32x48: 3 of {small}, 17 of {large}"


def test_unreadable_files_are_named_counted_and_replaced(tmp_path: Path) -> None:
    """Six broken files of ten: the four others are found, the first five are named."""
    _images(tmp_path, 4)
    for number in range(6):
        (tmp_path / f"broken{number}.jpg").write_bytes(b"no picture")

    frames = load_frames([str(tmp_path)], SPEC, CLASS, 9)

    assert len(frames) == 4
    assert "(9 were asked for)" in frames.describe()
    assert "6 unreadable: broken" in frames.describe()
    assert frames.describe().endswith(", ...")


def test_a_video_gives_frames_of_all_its_length(tmp_path: Path) -> None:
    """Frames are numbered in the order of the file."""
    path = write_lossless(
        tmp_path / "clip.mkv", [noise(16, 24, n) for n in range(20)], [40 * n for n in range(20)]
    )

    frames = load_frames([str(path)], SPEC, CLASS, 4)

    numbers = [int(origin.removeprefix("clip.mkv#")) for origin in frames.origins]
    assert [number // 5 for number in numbers] == [0, 1, 2, 3]


def test_the_demo_stands_for_its_clips_with_captions() -> None:
    """Three frames, one of each clip, with black behind the caption in the lower left corner."""
    clip("bikes")

    frames = load_frames(["demo"], SPEC, SizeClassSpec("c", 272, 640, fit=Fit.LETTERBOX), 3)

    assert [use.frame_count for use in frames.sources] == [1, 1, 1]
    bikes = next(i for i, origin in enumerate(frames.origins) if origin.startswith("bikes.mp4#"))
    assert frames.images[bikes, 268, :40].max() < 40


@pytest.mark.parametrize("kind", ["missing", "empty", "broken video", "broken images", "none wanted"])
def test_no_frame_at_all_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    """Nothing is prepared on nothing: the source is named, and what could not be read in it."""
    source, count = tmp_path / "source", 4
    if kind == "broken video":
        source = tmp_path / "clip.mp4"
        source.write_bytes(b"no video" * 100)
    elif kind != "missing":
        source.mkdir()
    if kind == "broken images":
        (source / "a.png").write_bytes(b"")
    if kind == "none wanted":
        count = 0

    with pytest.raises(PrepareRefusedError) as caught:
        load_frames([str(source)], SPEC, CLASS, count)

    assert caught.value.reason is Reason.NO_FRAMES
    if kind.startswith("broken"):
        assert "unreadable: " in str(caught.value)


def test_without_sources_the_frames_are_synthetic_and_say_so() -> None:
    """The same noise each time, in several grains."""
    first, again = (load_frames([], SPEC, CLASS, 7) for _ in range(2))

    assert first.is_synthetic
    assert first.describe() == "7 synthetic frames (seeded noise, no real pictures) of 32x48"
    assert np.array_equal(first.images, again.images)
    assert len({image.tobytes() for image in first.images}) == 7


def test_frames_in_memory_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer frames instead of all memory, and the report says how many were asked for."""
    monkeypatch.setattr(calibration, "MAX_FRAMES_BYTES", 3 * 32 * 48 * 3)

    assert len(load_frames([], SPEC, CLASS, 50)) == 3


def test_a_class_of_one_size_only_letterboxes_here(tmp_path: Path) -> None:
    """Pictures of any size serve for calibration; serving goes on refusing them."""
    frames = load_frames([_images(tmp_path, 1)], SPEC, SizeClassSpec("e", 32, 48, fit=Fit.EXACT), 1)

    assert frames.placements[0].height == 32


def test_a_split_of_one_frame_gives_it_twice() -> None:
    """There is nothing to hold out; whoever judges sees the frame that was calibrated on."""
    frames = load_frames([], SPEC, CLASS, 1)

    assert frames.split(1) == (frames, frames)


def test_feeds_start_again_and_keep_rows_single() -> None:
    """Calibration passes over the frames once for each method."""
    feeds = load_frames([], SPEC, CLASS, 3).feeds("x")

    for _ in range(2):
        assert [row["x"].shape for row in feeds()] == [(1, 32, 48, 3)] * 3


def test_tensor_feeds_fit_every_input_and_repeat() -> None:
    """Floats are normal, whole numbers 0 or 1, open axes get a length."""
    plans = [InputPlan("a", "float32", (-1, 3), False), InputPlan("b", "int64", (5,), False)]
    feeds = tensor_feeds(plans, ["x", "y"], 2)

    rows = list(feeds())

    assert [rows[0]["x"].shape, rows[0]["y"].shape] == [(1, 4, 3), (1, 5)]
    assert set(rows[0]["y"].ravel().tolist()) <= {0, 1}
    assert np.array_equal(rows[1]["x"], list(feeds())[1]["x"])
