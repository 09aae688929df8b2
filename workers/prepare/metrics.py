"""How far a converted model is from FP32: numbers of its tensors, and of what is made of them.

Tensors, r of FP32 and c of the candidate over all frames:
    max_abs  = max |r - c|
    max_rel  = max |r - c| / max |r|   (of the whole output: by element, every zero would be infinitely off)
    sqnr_db  = 10 log10(sum r^2 / sum (r - c)^2)   (signal to quantisation noise, as ONNX Runtime's
               quantization/qdq_loss_debug.py has it; 6 dB a bit)
    cosine   = sum r c / sqrt(sum r^2 sum c^2)
Classes (adapter ``classify``): the share of frames in which the candidate's best class, or one of its best
five, is FP32's best class: the top-1 and top-5 accuracy of ImageNet with FP32 as the truth.
Boxes (``detect``, ``text``): see ``boxes.py``.

FP32 is the truth here, not a person's labels: what is judged is the conversion, not the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.messages import FrameResult, Status, Value
from headrace.workers.adapters import Adapter, load_adapter
from headrace.workers.geometry import Placement
from headrace.workers.prepare.boxes import Boxes, BoxMeter

Array: TypeAlias = NDArray[np.generic]

#: Stands for "no difference at all", which JSON has no number for. float32 itself ends near 150 dB.
MAX_SQNR_DB = 200.0

#: The adapters whose results are boxes.
BOX_ADAPTERS = frozenset({"detect", "text"})


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """One output against FP32's, all frames together. ``non_finite_count`` counts the candidate's values
    that are NaN or infinite where FP32's are not; they are in no other figure."""

    name: str
    max_abs: float
    max_rel: float
    sqnr_db: float
    cosine: float
    non_finite_count: int = 0


class TensorMeter:
    """Sums up one output frame by frame: nothing is kept of the frames. Sums are float64."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._signal = self._noise = self._other = self._product = 0.0
        self._max_abs = self._peak = 0.0
        self._non_finite = 0

    def add(self, reference: Array, candidate: Array) -> None:
        """Add one frame, or a batch: arrays of the same shape. Another shape counts as all noise."""
        r = reference.astype(np.float64).ravel()
        is_same_shape = reference.shape == candidate.shape
        c = candidate.astype(np.float64).ravel() if is_same_shape else np.zeros_like(r)
        is_known = np.isfinite(r)
        is_finite = np.isfinite(c)
        self._non_finite += int(np.count_nonzero(is_known & ~is_finite))
        both = is_known & is_finite
        if not both.all():
            r, c = r[both], c[both]
        if not r.size:
            return
        off = r - c
        self._signal += _product(r, r)
        self._other += _product(c, c)
        self._product += _product(r, c)
        self._noise += _product(off, off)
        self._max_abs = max(self._max_abs, float(np.abs(off).max()))
        self._peak = max(self._peak, float(np.abs(r).max()))

    def figures(self) -> TensorFigures:
        """Return what the frames so far amount to."""
        return TensorFigures(
            self._name,
            self._max_abs,
            self._max_abs / self._peak if self._peak else float(self._max_abs > 0),
            sqnr_db(self._signal, self._noise),
            self._cosine(),
            self._non_finite,
        )

    def _cosine(self) -> float:
        length = math.sqrt(self._signal * self._other)
        if length == 0.0:
            return 1.0 if self._signal == self._other else 0.0
        return min(1.0, self._product / length)


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    # Not `a @ b`: its threads and ONNX Runtime's, which spin a while after a run, take each other's cores.
    return float(np.einsum("i,i->", a, b))


def sqnr_db(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in dB, within -MAX_SQNR_DB to MAX_SQNR_DB."""
    if noise <= 0.0:
        return MAX_SQNR_DB
    if signal <= 0.0:
        return -MAX_SQNR_DB
    return max(-MAX_SQNR_DB, min(MAX_SQNR_DB, 10.0 * math.log10(signal / noise)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate against FP32 over ``frame_count`` frames. ``task`` holds what the adapter's results say:
    ``top1_agreement``, ``top5_agreement``, or ``box_f1``, ``box_ap``, ``box_map``, ``box_mean_iou``,
    ``reference_boxes``, ``candidate_boxes``; nothing for other adapters."""

    frame_count: int
    tensors: tuple[TensorFigures, ...]
    task: dict[str, float]

    @property
    def sqnr_db(self) -> float:
        """The worst output's."""
        return min((figures.sqnr_db for figures in self.tensors), default=MAX_SQNR_DB)

    @property
    def rank(self) -> tuple[float, float]:
        """Orders candidates, better is larger: by the task to three digits, then by SQNR."""
        if any(figures.non_finite_count for figures in self.tensors):
            return (-1.0, -MAX_SQNR_DB)
        task = self.task.get("box_f1", self.task.get("top1_agreement", 1.0))
        return (round(task, 3), self.sqnr_db)

    def figures(self) -> dict[str, float]:
        """Return every figure under one name, for manifests and tables. The worst output stands for all."""
        found = {
            "frames": float(self.frame_count),
            "max_abs": max((f.max_abs for f in self.tensors), default=0.0),
            "max_rel": max((f.max_rel for f in self.tensors), default=0.0),
            "sqnr_db": self.sqnr_db,
            "cosine": min((f.cosine for f in self.tensors), default=1.0),
            "non_finite": float(sum(f.non_finite_count for f in self.tensors)),
        }
        return found | self.task


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits of a comparison; None is no limit. Values that are not finite are never tolerated."""

    max_abs: float | None = None
    max_rel: float | None = None
    min_sqnr_db: float | None = None
    min_cosine: float | None = None
    min_top1_agreement: float | None = None
    min_top5_agreement: float | None = None
    min_box_f1: float | None = None
    min_box_ap: float | None = None

    def breaches(self, comparison: Comparison) -> tuple[str, ...]:
        """Return a text for each limit that does not hold; none means that all do."""
        figures = comparison.figures()
        found = []
        if figures["non_finite"]:
            found.append(f"{figures['non_finite']:.0f} values are not finite where FP32's are")
        for limit_field in fields(self):
            limit = getattr(self, limit_field.name)
            key = limit_field.name.removeprefix("min_")
            value = figures.get(key)
            if limit is None or value is None:
                continue
            if key != limit_field.name and value < limit:
                found.append(f"{key} {value:.4g} is below {limit:g}")
            elif key == limit_field.name and value > limit:
                found.append(f"{key} {value:.4g} is above {limit:g}")
        return tuple(found)

    def as_dict(self) -> dict[str, float]:
        """Return the limits that there are."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def default_tolerance(precision: str, adapter: str) -> Tolerance:
    """Return the limits that hold unless others are given, for ``fp16`` or ``int8``.

    FP16 has 11 bits: 0.02 of an output's peak is what the workers' self-test allows between runs of it. INT8
    is judged by what its users see: of a hundred frames five may change their best class, and of a hundred
    boxes one in twenty may come, go or be wide of the mark. 20 dB (a tenth of the amplitude) is the least
    at which those figures were worth a look. Where an adapter makes classes or boxes of the outputs, those
    are limited and no single value is: at the edge of a box a probability of the text detector moves by
    0.03 in FP16, and no box with it.
    """
    if precision == "fp16":
        if adapter == "classify":
            return Tolerance(min_cosine=0.999, min_top1_agreement=0.99)
        if adapter in BOX_ADAPTERS:
            return Tolerance(min_cosine=0.999, min_box_f1=0.98)
        return Tolerance(max_rel=2e-2, min_cosine=0.999)
    if adapter == "classify":
        return Tolerance(min_top1_agreement=0.95)
    if adapter in BOX_ADAPTERS:
        return Tolerance(min_box_f1=0.95)
    return Tolerance(min_sqnr_db=20.0, min_cosine=0.99)


class Comparer:
    """Compares outputs frame by frame. ``output_names`` are the graph's, in its order."""

    def __init__(self, adapter: str, adapter_options: dict[str, Value], output_names: Sequence[str]) -> None:
        self._names = tuple(output_names)
        self._meters = [TensorMeter(name) for name in output_names]
        self._kind = adapter
        self._options = adapter_options
        self._boxes = BoxMeter()
        self._adapter = load_adapter(adapter, adapter_options) if adapter in BOX_ADAPTERS else None
        self._frame_count = 0
        self._hits = [0, 0]

    def add(
        self, reference: Sequence[Array], candidate: Sequence[Array], placement: Placement | None
    ) -> None:
        """Add one frame: the outputs of a batch of one, in the graph's order."""
        self._frame_count += 1
        for meter, r, c in zip(self._meters, reference, candidate, strict=True):
            if r.dtype.kind in "fiu":
                meter.add(r, c)
        if self._kind == "classify":
            self._add_classes(reference, candidate)
        elif self._adapter is not None:
            first, second = (
                self._find_boxes(self._adapter, outputs, placement) for outputs in (reference, candidate)
            )
            self._boxes.add(first, second)

    def result(self) -> Comparison:
        """Return the figures of all frames so far."""
        task: dict[str, float] = {}
        if self._kind == "classify" and self._frame_count:
            task = {
                "top1_agreement": self._hits[0] / self._frame_count,
                "top5_agreement": self._hits[1] / self._frame_count,
            }
        elif self._adapter is not None:
            task = self._boxes.figures()
        return Comparison(self._frame_count, tuple(meter.figures() for meter in self._meters), task)

    def _add_classes(self, reference: Sequence[Array], candidate: Sequence[Array]) -> None:
        # Softmax and sigmoid, which the adapter may apply, keep the order: raw outputs do.
        wanted = self._options.get("output")
        index = self._names.index(wanted) if isinstance(wanted, str) and wanted in self._names else 0
        best = int(np.argmax(reference[index]))
        five = np.argsort(-candidate[index].astype(np.float64).ravel(), kind="stable")[:5].tolist()
        self._hits[0] += five[0] == best
        self._hits[1] += best in five

    def _find_boxes(self, adapter: Adapter, outputs: Sequence[Array], placement: Placement | None) -> Boxes:
        """Run the adapter. A frame that it can't read, such as one of NaN, has no boxes."""
        rows = {
            name: array if array.shape[:1] == (1,) else array[np.newaxis]
            for name, array in zip(self._names, outputs, strict=True)
        }
        (result,) = adapter.process(rows, [placement])
        return _boxes_of(result)


def _boxes_of(result: FrameResult) -> Boxes:
    found = result.outputs if result.status is Status.OK and isinstance(result.outputs, dict) else {}
    boxes = np.asarray(found.get("boxes") or [], np.float64)
    scores = np.asarray(found.get("scores") or [], np.float64)
    classes = np.asarray(found.get("classes") or [0] * len(scores), np.int64)
    return Boxes(boxes.reshape(len(scores), -1, 2) if len(scores) else np.zeros((0, 2, 2)), scores, classes)
