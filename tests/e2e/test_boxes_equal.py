"""Boxes of the trained detector through broker and worker equal those of plain ONNX Runtime.

The reference is written here on its own: it pads, scales and normalises in NumPy and calls ONNX Runtime on
the detector's own FP32 file. Only what turns a probability map into boxes is shared. The clips hold hardly
any text, so seeded words are written on each frame: several lines of all sizes, colours and angles.

By default each clip gives FEW_FRAMES frames; FULL_TESTS=1 takes MANY_FRAMES. (Not HEADRACE_...: those
variables are configuration keys, and an unknown one is refused.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import hr_detector
import numpy as np
import onnxruntime
import pytest
from hr_processes import Processes
from numpy.typing import NDArray

import headrace
from headrace.protocol.messages import Status
from headrace.workers.adapters import load_adapter
from headrace.workers.geometry import Placement

FEW_FRAMES = 8
MANY_FRAMES = 50
IS_FULL = os.environ.get("FULL_TESTS", "") not in {"", "0"}
FRAMES_COUNT = MANY_FRAMES if IS_FULL else FEW_FRAMES

#: Largest distance of two corners of the same box, in frame pixels on one axis.
TOLERANCE = 1.0

Image = NDArray[np.uint8]
Boxes = NDArray[np.float64]

#: Both models are the same file: one runs every frame alone, the other only full batches of four.
CONFIG = """
[broker]
port = 0
http = false
[admission]
max_bytes = 2147483648
credits_per_producer = 1000
max_queued_per_stream = 1000
""" + "".join(
    f"""
[[models]]
name = "{name}"
path = "package:rapidocr/models/PP-OCRv6_det_small.onnx"
adapter = "text"
policy = "{policy}"
max_queue_delay_ms = 600000
[models.image]
color = "bgr"
scale = {1 / 255!r}
mean = [0.5, 0.5, 0.5]
std = [0.5, 0.5, 0.5]
pad_value = 0
"""
    + "".join(
        f"""[[models.size_classes]]
name = "{size_class}"
height = {height}
width = {width}
max_batch_size = {batch}
"""
        for size_class, height, width in (("small", 160, 192), ("wide", 288, 640), ("large", 384, 640))
    )
    for name, policy, batch in (("alone", "adaptive", 1), ("fours", "window", 4))
)


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip, its size class, and where its frames lie in it (pixels)."""

    name: str
    size_class: str
    class_height: int
    class_width: int
    height: int
    width: int
    top: int = 0
    scale: int = 1


CLIPS = (
    Clip("carphone_pristine", "small", 160, 192, height=144, width=176),
    Clip("bikes", "wide", 288, 640, height=272, width=640),
    # 1280x720 is halved to 640x360, which leaves 12 rows above and below.
    Clip("bigbuckbunny", "large", 384, 640, height=360, width=640, top=12, scale=2),
)

#: How a frame travels, and how many run at once.
WAYS = (("raw", "alone"), ("png", "alone"), ("raw", "fours"), ("png", "fours"))

WORDS = ("EXIT", "Gate 4", "headrace", "WATER", "7:45", "Platform", "no entry", "MILL 1871")


def write_words(image: Image, rng: np.random.Generator) -> Image:
    """Return a copy with a few words of random size, colour, angle and place, each inside the frame."""
    written = image.copy()
    height, width = image.shape[:2]
    for row in range(lines := int(rng.integers(2, 5))):
        text = WORDS[rng.integers(len(WORDS))]
        scale = float(rng.uniform(0.9, 1.6)) * max(0.45, height / 420)
        thickness = max(1, round(scale * 1.8))
        (text_width, _), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, thickness)
        x = int(rng.integers(0, max(1, width - text_width)))
        y = int(height * (row + 0.7) / lines)
        mask = np.zeros((height, width), np.uint8)
        cv2.putText(mask, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, scale, 255, thickness, cv2.LINE_AA)
        turn = cv2.getRotationMatrix2D((x + text_width / 2, y), float(rng.uniform(-12, 12)), 1.0)
        alpha = cv2.warpAffine(mask, turn, (width, height))[..., np.newaxis] / 255.0
        color = rng.choice([(255, 255, 255), (0, 0, 0), (40, 220, 250)])
        written = np.round(written * (1 - alpha) + alpha * color).astype(np.uint8)
    return written


def frames_of(clip: Clip, count: int) -> list[Image]:
    """Return frames spread evenly over a clip (BGR), with words on them."""
    every = hr_detector.clip_frames(clip.name, 10_000)
    chosen = [every[round(index * (len(every) - 1) / (count - 1))] for index in range(count)]
    rng = np.random.default_rng(list(clip.name.encode()))
    return [write_words(image, rng) for image in chosen]


class Reference:
    """The detector's file in plain ONNX Runtime."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(hr_detector.detector_path()), options, providers=["CPUExecutionProvider"]
        )
        self._input_name = self._session.get_inputs()[0].name
        self._adapter = load_adapter("text")

    def boxes(self, clip: Clip, image: Image) -> Boxes:
        """Return the boxes [n, 4, 2] of one frame, in its own pixels."""
        if clip.scale != 1:
            image = np.asarray(cv2.resize(image, (clip.width, clip.height)), np.uint8)
        padded = np.zeros((clip.class_height, clip.class_width, 3), np.float64)
        padded[clip.top : clip.top + clip.height, : clip.width] = image
        tensor = ((padded / 255 - 0.5) / 0.5).astype(np.float32).transpose(2, 0, 1)[np.newaxis]
        (probability,) = self._session.run(None, {self._input_name: tensor})
        placement = Placement(
            frame_height=clip.height * clip.scale,
            frame_width=clip.width * clip.scale,
            class_height=clip.class_height,
            class_width=clip.class_width,
            top=clip.top,
            left=0,
            height=clip.height,
            width=clip.width,
        )
        (result,) = self._adapter.process({"map": probability}, [placement])
        return _as_boxes(result.outputs)


def deviation(found: Boxes, expected: Boxes) -> float:
    """Return the largest distance of a corner of ``found`` from its place, infinite when the boxes differ in
    number. Each box is held against the nearest one, and no box may be taken twice."""
    if len(found) != len(expected):
        return float("inf")
    if not len(found):
        return 0.0
    distances = np.abs(found[:, np.newaxis] - expected[np.newaxis]).max(axis=(2, 3))
    nearest = distances.argmin(axis=1)
    if len(set(nearest.tolist())) != len(found):
        return float("inf")
    return float(distances.min(axis=1).max())


def _as_boxes(outputs: Any) -> Boxes:
    assert outputs is not None
    return np.array(outputs["boxes"], np.float64).reshape(-1, 4, 2)


def _encoded(image: Image, encoding: str) -> object:
    if encoding == "raw":
        return image
    return cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 1])[1].tobytes()


@pytest.mark.timeout(1_200 if IS_FULL else 240)
def test_boxes_equal_plain_onnxruntime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Must-show 3: raw and PNG, alone and four at once, on all three clips, within a pixel."""
    reference = Reference()
    count = FRAMES_COUNT + -FRAMES_COUNT % 4  # only full batches run under "fours"
    worst: dict[str, float] = {}
    boxes_count = 0
    with Processes(tmp_path) as processes:
        broker = processes.broker(CONFIG)
        processes.worker(broker, device="cpu")

        for clip in CLIPS:
            images = frames_of(clip, count)
            expected = [reference.boxes(clip, image) for image in images]
            assert sum(map(len, expected)) >= 1.5 * count, "too few boxes for the comparison to mean anything"
            for encoding, model in WAYS:
                found = _through_headrace(broker.address, clip, images, encoding, model)
                deviations = [deviation(*pair) for pair in zip(found, expected, strict=True)]
                worst[f"{clip.name} {encoding} {model}"] = max(deviations)
                boxes_count += sum(map(len, found))
        broker.wait_drained()

    with capsys.disabled():
        sys.stdout.write(
            f"\n{count} frames of each clip, {boxes_count} boxes: at most {max(worst.values())} px apart\n"
        )
    assert max(worst.values()) <= TOLERANCE, worst


def _through_headrace(
    address: str, clip: Clip, images: list[Image], encoding: str, model: str
) -> list[Boxes]:
    stream = f"{clip.name}-{encoding}-{model}"
    with headrace.Subscriber(address, stream=stream) as subscriber, headrace.Producer(address) as producer:
        for image in images:
            producer.push(_encoded(image, encoding), stream=stream, model=model, color="bgr")
        outcomes = [subscriber.get(timeout=120) for _ in images]
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, headrace.Outcome)
        assert (outcome.seq, outcome.status, outcome.message) == (number, Status.OK, "")
        assert outcome.size_class == clip.size_class
        assert outcome.batch_size == {"alone": 1, "fours": 4}[model]
    return [_as_boxes(outcome.outputs) for outcome in outcomes]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda image: np.roll(image, 3, axis=1), id="three-pixels-to-the-right"),
        pytest.param(lambda image: np.roll(image, 3, axis=0), id="three-pixels-down"),
        pytest.param(np.zeros_like, id="without-words"),
        pytest.param(lambda image: cv2.resize(image[:-8, :-8], (176, 144)), id="stretched"),
    ],
)
def test_the_comparison_sees_a_wrong_frame(change: Callable[[Image], Image]) -> None:
    """A reference of frames that were moved, lost or stretched is not within the tolerance."""
    clip, reference = CLIPS[0], Reference()

    for image in frames_of(clip, 3):
        assert deviation(reference.boxes(clip, change(image)), reference.boxes(clip, image)) > TOLERANCE
