"""Write analysed video: draw an outcome onto its frame, and MP4 files with the frames' real times."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.clients.video.containers import require_av
from headrace.clients.video.frames import Image
from headrace.clients.video.pacing import NANOSECONDS
from headrace.protocol.messages import Outcome, Value

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.video.stream import VideoStream

#: Ticks of the files written: divisible by the frame rates in use (24, 25, 30, 50, 60, 30000/1001), and below
#: 65,536, the most that the MPEG-4 encoder takes.
TIME_BASE = Fraction(1, 60_000)

#: Green is rare in indoor and street scenes and reads well on light and dark.
BOX_COLOR = (0, 230, 64)
TEXT_COLOR = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Detection:
    """One found thing: its outline in frame pixels (float32 [points, 2], x and y), label and score."""

    points: NDArray[np.float32]
    label: str = ""
    score: float | None = None


def detections_of(outputs: Value) -> list[Detection]:
    """Return what the outputs of the text and detect adapters hold; [] for anything else.

    Both give ``boxes`` (corner points, or x1, y1, x2, y2), ``scores`` and, if they know them, ``labels``.
    """
    if not isinstance(outputs, dict):
        return []
    boxes, scores, labels = (_list(outputs.get(key)) for key in ("boxes", "scores", "labels"))
    found = []
    for index, box in enumerate(boxes):
        points = _corner_points(box)
        if points is None:
            continue
        score = scores[index] if index < len(scores) else None
        label = labels[index] if index < len(labels) else ""
        found.append(Detection(points, str(label), float(score) if isinstance(score, int | float) else None))
    return found


def _corner_points(box: Value) -> NDArray[np.float32] | None:
    """Return a box as [points, 2], None when it is no box: user adapters may give anything."""
    try:
        points = np.asarray(box, np.float32)
    except (TypeError, ValueError):
        return None
    if points.shape == (4,):
        x1, y1, x2, y2 = points
        points = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float32)
    return points if points.ndim == 2 and points.shape[1] == 2 and np.isfinite(points).all() else None


def annotate(image: Image, outcome: Outcome) -> Image:
    """Return a copy of a frame with the outcome drawn on it: outlines, labels and scores; a frame without
    a result gets its status instead.

    Args:
        image: the frame as sent, uint8 [height, width, 3] RGB.
        outcome: its outcome; coordinates are in the pixels of ``image``.
    """
    import cv2

    canvas = np.ascontiguousarray(image).copy()
    thickness = max(1, round(min(canvas.shape[:2]) / 240))
    text_scale = max(0.35, min(canvas.shape[:2]) / 900)
    for detection in detections_of(outcome.outputs):
        outline = np.round(detection.points).astype(np.int32)
        cv2.polylines(canvas, [outline], isClosed=True, color=BOX_COLOR, thickness=thickness)
        score = "" if detection.score is None else f"{detection.score:.2f}"
        text = f"{detection.label} {score}".strip()
        if text:
            corner = (int(outline[:, 0].min()), int(outline[:, 1].min()))
            _draw_text(canvas, text, corner, text_scale)
    if outcome.status != "ok":
        _draw_text(canvas, f"{outcome.status} {outcome.code}".strip(), (4, 24), text_scale)
    return canvas


def _draw_text(canvas: Image, text: str, bottom_left: tuple[int, int], scale: float) -> None:
    """Draw dark text on a filled box whose lower left corner is given, kept inside the picture."""
    import cv2

    font = cv2.FONT_HERSHEY_SIMPLEX
    (width, height), base = cv2.getTextSize(text, font, scale, 1)
    x = max(0, min(bottom_left[0], canvas.shape[1] - width))
    y = max(height + base, min(bottom_left[1], canvas.shape[0]))
    cv2.rectangle(canvas, (x, y - height - base), (x + width, y), BOX_COLOR, thickness=-1)
    cv2.putText(canvas, text, (x, y - base + 1), font, scale, TEXT_COLOR, 1, cv2.LINE_AA)


def _list(value: Value) -> list[Value]:
    return value if isinstance(value, list) else []


class Mp4Writer:
    """Writes images to one MP4 (H.264, or MPEG-4 where there is no libx264) at their own times.

    Invariants: written times rise strictly (an image at or before the last one is dropped and counted);
    the file starts at time 0; its size is that of the first image, made even by repeating the last row or
    column, and later images of another size are scaled into it with their aspect kept.
    """

    def __init__(self, path: Path) -> None:
        require_av()
        self.path = path
        self.written_count = 0
        self.dropped_count = 0
        self._output: tuple[OutputContainer, VideoStream] | None = None
        self._first_ns = 0
        self._last_ticks = -1

    def __enter__(self) -> Mp4Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, image: Image, pts_ns: int) -> None:
        """Append an image (uint8 [height, width, 3] RGB) shown from ``pts_ns`` until the next one."""
        import av

        if self._output is None:
            self._output = self._open(image)
            self._first_ns = pts_ns
        container, stream = self._output
        ticks = round(Fraction(pts_ns - self._first_ns, NANOSECONDS) / TIME_BASE)
        if ticks <= self._last_ticks:
            self.dropped_count += 1
            return
        self._last_ticks = ticks
        frame = av.VideoFrame.from_ndarray(fitted(image, stream.height, stream.width), "rgb24")
        frame.pts = ticks
        frame.time_base = TIME_BASE
        container.mux(stream.encode(frame))
        self.written_count += 1

    def close(self) -> None:
        """Write what the encoder still holds and the file's index. Without any image there is no file."""
        if self._output is None:
            return
        (container, stream), self._output = self._output, None
        container.mux(stream.encode(None))
        container.close()

    def _open(self, image: Image) -> tuple[OutputContainer, VideoStream]:
        import av

        self.path.parent.mkdir(parents=True, exist_ok=True)
        has_x264 = "libx264" in av.codecs_available
        container = av.open(str(self.path), "w", format="mp4")
        stream = container.add_stream("libx264" if has_x264 else "mpeg4", rate=30)
        stream.height = image.shape[0] + image.shape[0] % 2
        stream.width = image.shape[1] + image.shape[1] % 2
        stream.pix_fmt = "yuv420p"
        stream.time_base = TIME_BASE
        stream.codec_context.time_base = TIME_BASE
        # Fast rather than small: the writer shares its processors with the models.
        stream.options = {"preset": "veryfast", "crf": "20", "threads": "1"} if has_x264 else {}
        if not has_x264:
            stream.bit_rate = 4_000_000
        return container, stream


def fitted(image: Image, height: int, width: int) -> Image:
    """Return the image at exactly this size: one row or column short is repeated, any other size is
    scaled with its aspect kept and centred on black."""
    import cv2

    rows, columns = image.shape[:2]
    if (rows, columns) == (height, width):
        return image
    if 0 <= height - rows <= 1 and 0 <= width - columns <= 1:
        return np.pad(image, ((0, height - rows), (0, width - columns), (0, 0)), mode="edge")
    scale = min(height / rows, width / columns)
    new_rows, new_columns = max(1, round(rows * scale)), max(1, round(columns * scale))
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - new_rows) // 2, (width - new_columns) // 2
    canvas[top : top + new_rows, left : left + new_columns] = cv2.resize(
        image, (new_columns, new_rows), interpolation=cv2.INTER_AREA
    )
    return canvas
