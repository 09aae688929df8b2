"""The ``detect`` adapter: boxes of YOLO-family detectors, in frame pixels, after non-maximum suppression.

Layouts of one row, as the exporters write them:
``v5``  [boxes, 5 + classes]: cx, cy, w, h, objectness, class scores (YOLOv3 to v7, YOLOX decoded)
``v8``  [4 + classes, boxes]: cx, cy, w, h, class scores, transposed (YOLOv8 to v12)
``nms`` [boxes, 6]: x1, y1, x2, y2, score, class: the graph suppresses by itself (YOLOv10, end-to-end
        exports); [boxes, 7] with the image index in front, as YOLOv7 writes it
``auto`` is v8 when a row has fewer lines than columns, else v5: there are always more boxes than classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.workers.adapters.base import Adapter, AdapterError, Array, Outputs, RowResult, pick_output
from headrace.workers.adapters.options import Options
from headrace.workers.geometry import Placement

#: Boxes over the score limit that suppression looks at, best first: it is quadratic in the worst case.
MAX_CANDIDATES = 3000


@dataclass(frozen=True, slots=True)
class Candidates:
    """Boxes before suppression: ``boxes`` float32 [n, 4] x1, y1, x2, y2; ``scores`` [n]; ``classes`` [n]."""

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]


class DetectAdapter(Adapter):
    """Options: ``layout``; ``score_thresh``; ``iou_thresh``; ``max_boxes``; ``class_agnostic`` (suppress
    across classes); ``coordinates`` (``pixels`` of the model's input, or ``relative`` 0 to 1); ``labels``;
    ``output`` (the first by default).

    Gives ``boxes`` ([x1, y1, x2, y2] in frame pixels), ``scores``, ``classes`` and, with labels, ``labels``:
    parallel lists, best first.
    """

    name = "detect"

    def __init__(self, options: Options) -> None:
        self._layout = options.choice("layout", "auto", ("auto", "v5", "v8", "nms"))
        self._score_thresh = options.number("score_thresh", 0.25, 0.0, 1.0)
        self._iou_thresh = options.number("iou_thresh", 0.45, 0.0, 1.0)
        self._max_boxes = options.integer("max_boxes", 300, 1, 1000)
        self._is_class_agnostic = options.flag("class_agnostic", False)
        self._is_relative = options.choice("coordinates", "pixels", ("pixels", "relative")) == "relative"
        self._labels = options.texts("labels")
        self._output = options.text("output", "")
        options.finish()

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Return the boxes of one frame. Raises AdapterError for an output of another layout."""
        if placement is None:
            raise AdapterError("boxes need a model with an image input")
        output = pick_output(row, self._output)
        found, is_suppressed = self._read(output)
        if self._is_relative:
            size = [placement.class_width, placement.class_height] * 2
            found = Candidates(found.boxes * np.array(size, np.float32), found.scores, found.classes)
        best = np.argsort(-found.scores, kind="stable")[:MAX_CANDIDATES]
        found = Candidates(found.boxes[best], found.scores[best], found.classes[best])
        if is_suppressed:
            kept = np.arange(len(found.scores))
        else:
            groups = np.zeros_like(found.classes) if self._is_class_agnostic else found.classes
            kept = suppress(found.boxes, groups, self._iou_thresh)
        kept = kept[: self._max_boxes]
        classes = found.classes[kept]
        outputs: dict[str, object] = {
            "boxes": np.round(placement.boxes_to_frame(found.boxes[kept]), 2).tolist(),
            "scores": np.round(found.scores[kept].astype(np.float64), 4).tolist(),
            "classes": classes.tolist(),
        }
        if self._labels:
            outputs["labels"] = [self._label(index) for index in classes.tolist()]
        return RowResult(outputs)

    def _label(self, index: int) -> str:
        if not 0 <= index < len(self._labels):
            raise AdapterError(f"class {index} has no label: {len(self._labels)} labels are configured")
        return self._labels[index]

    def _read(self, output: Array) -> tuple[Candidates, bool]:
        table = output.astype(np.float32)
        while table.ndim > 2 and table.shape[0] == 1:
            table = table[0]
        if table.ndim != 2:
            raise AdapterError(
                f"a detector's output of one frame has two axes, this one {list(output.shape)}"
            )
        layout = self._layout
        if layout == "auto":
            layout = "v8" if table.shape[0] < table.shape[1] else "v5"
        if layout == "v8":
            table = table.T
        least = {"v5": 6, "v8": 5, "nms": 6}[layout]
        if table.shape[1] < least or (layout == "nms" and table.shape[1] > 7):
            raise AdapterError(f"the output {list(output.shape)} is not of layout {layout}")
        if layout == "nms":
            return self._keep(table[:, -6:-2], table[:, -2], table[:, -1].astype(np.int64)), True
        class_scores = table[:, 4:] if layout == "v8" else table[:, 5:] * table[:, 4:5]
        classes = class_scores.argmax(axis=1)
        scores = class_scores[np.arange(len(classes)), classes]
        half = table[:, 2:4] / 2
        corners = np.concatenate([table[:, :2] - half, table[:, :2] + half], axis=1)
        return self._keep(corners, scores, classes), False

    def _keep(
        self, boxes: NDArray[np.float32], scores: NDArray[np.float32], classes: NDArray[np.int64]
    ) -> Candidates:
        is_kept = scores >= self._score_thresh
        return Candidates(boxes[is_kept], scores[is_kept], classes[is_kept])


def suppress(boxes: NDArray[np.float32], groups: NDArray[np.int64], iou_thresh: float) -> NDArray[np.int64]:
    """Return the indexes that greedy suppression keeps of ``boxes`` [n, 4], which stand best first.

    Only boxes of one group suppress each other, when their intersection over union exceeds the limit.
    """
    areas = np.clip(boxes[:, 2] - boxes[:, 0], 0, None) * np.clip(boxes[:, 3] - boxes[:, 1], 0, None)
    left = np.arange(len(boxes))
    kept: list[int] = []
    while left.size:
        best, others = left[0], left[1:]
        kept.append(int(best))
        low = np.maximum(boxes[best, :2], boxes[others, :2])
        high = np.minimum(boxes[best, 2:], boxes[others, 2:])
        sides = np.clip(high - low, 0, None)
        overlap = sides[:, 0] * sides[:, 1]
        union = areas[best] + areas[others] - overlap
        is_suppressed = (overlap > iou_thresh * union) & (groups[others] == groups[best])
        left = others[~is_suppressed]
    return np.asarray(kept, dtype=np.int64)
