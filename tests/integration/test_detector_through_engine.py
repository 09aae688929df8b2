"""The trained text detector through the cpu engine and the text adapter equals plain ONNX Runtime."""

from __future__ import annotations

from typing import Any

import cv2
import hr_detector
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from headrace.protocol.messages import Oversize, SizeClassSpec
from headrace.workers.adapters import load_adapter
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.engine import InputBuffer, ModelKey, StagedBatch
from headrace.workers.geometry import Placement, place

MODEL = ModelKey("text", "1")


@pytest.fixture(scope="module")
def engine() -> Any:
    """The detector in its three size classes, measured as shortly as possible."""
    engine = CpuEngine(profile_budget_ms=1)
    engine.load(*hr_detector.detector_spec())
    engine.profile(MODEL)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """The same file in a plain session: float input, no front end."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(hr_detector.detector_path()), options, providers=["CPUExecutionProvider"]
    )


def _stage(frame: NDArray[np.uint8], size_class: SizeClassSpec) -> tuple[NDArray[np.uint8], Placement]:
    placement = place(frame.shape, size_class, Oversize.LETTERBOX)
    staged = np.zeros((size_class.height, size_class.width, 3), np.uint8)
    resized = cv2.resize(frame, (placement.width, placement.height)) if placement.is_scaled else frame
    staged[placement.rows, placement.columns] = resized
    return staged, placement


def _boxes(results: list[Any]) -> list[NDArray[np.float64]]:
    for result in results:
        assert result.outputs is not None, result.message
    return [np.array(result.outputs["boxes"]).reshape(-1, 4, 2) for result in results]


def _through_engine(
    engine: CpuEngine, size_class: str, staged: list[NDArray[np.uint8]], placements: list[Placement]
) -> list[NDArray[np.float64]]:
    bucket = engine.bucket_for(MODEL, size_class, len(staged))
    (plan,) = engine.plan(MODEL, size_class)
    array = np.zeros((bucket, *plan.shape), np.uint8)
    array[: len(staged)] = staged
    engine.submit(StagedBatch(1, MODEL, size_class, len(staged), bucket, (InputBuffer(plan.name, array),)))
    outputs = engine.collect()
    assert not outputs.error
    return _boxes(load_adapter("text").process(outputs.outputs, placements))


@pytest.mark.parametrize(
    ("clip", "size_class"),
    [
        pytest.param("carphone_pristine", hr_detector.SIZE_CLASSES[0], id="176x144"),
        pytest.param("bikes", hr_detector.SIZE_CLASSES[1], id="640x272"),
        pytest.param("bigbuckbunny", hr_detector.SIZE_CLASSES[2], id="1280x720"),
    ],
)
def test_boxes_equal_plain_onnxruntime(
    engine: CpuEngine, session: onnxruntime.InferenceSession, clip: str, size_class: SizeClassSpec
) -> None:
    """Alone and in a batch of four, each frame's boxes are those of the plain session within a pixel."""
    pairs = [_stage(frame, size_class) for frame in hr_detector.clip_frames(clip, 4, step=12)]
    staged, placements = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = []
    for image, placement in zip(staged, placements, strict=True):
        tensor = ((image / 255.0 - 0.5) / 0.5).astype(np.float32).transpose(2, 0, 1)[np.newaxis]
        (probability,) = session.run(None, {"x": tensor})
        expected += _boxes(load_adapter("text").process({"map": probability}, [placement]))

    together = _through_engine(engine, size_class.name, staged, placements)
    alone = [
        _through_engine(engine, size_class.name, [image], [placement])[0]
        for image, placement in zip(staged, placements, strict=True)
    ]

    for found in (together, alone):
        assert [len(boxes) for boxes in found] == [len(boxes) for boxes in expected]
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1.0)


@pytest.mark.parametrize(
    ("height", "width"), [pytest.param(288, 640, id="exact"), pytest.param(500, 1000, id="letterboxed")]
)
def test_written_words_are_found_where_they_stand(engine: CpuEngine, height: int, width: int) -> None:
    """Two words drawn at known places get one box each, around them, first the upper one."""
    frame: NDArray[np.uint8] = np.full((height, width, 3), 230, np.uint8)
    places = []
    for text, x, y in (("HEADRACE", 60, 90), ("WATER", 250, 220)):
        (text_width, text_height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 1.6, 4)
        cv2.putText(frame, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 1.6, (20, 20, 20), 4, cv2.LINE_AA)
        places.append((x, y - text_height, x + text_width, y))
    staged, placement = _stage(frame, hr_detector.SIZE_CLASSES[1])

    (boxes,) = _through_engine(engine, "wide", [staged], [placement])

    assert len(boxes) == 2
    for box, (left, top, right, bottom) in zip(boxes, places, strict=True):
        found = (*box.min(axis=0), *box.max(axis=0))
        np.testing.assert_allclose(found, (left, top, right, bottom), atol=text_height * 0.5)
