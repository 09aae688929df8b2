"""The ranges of activations that INT8 is given, by each calibration method of ONNX Runtime.

Theory of operation: one pass over the frames finds the smallest and largest value of every tensor (MinMax).
If another method is wanted, a second pass fills one histogram per tensor between those bounds, from which
both Percentile and Entropy take their ranges. Both passes hand ONNX Runtime's calibrators one frame at a
time, so that the activations of one frame, and never of all, are in memory.

Two things of ONNX Runtime 1.32 are worked around: ``max_intermediate_outputs`` of its MinMax calibrator
drops what it should have summed up (calibrate.py, ``collect_data`` clears without computing), and histograms
that begin with a frame of small values grow by bins of that width without bound: ours begin at full width.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from headrace.workers.prepare.calibration import Array, Feeds

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import CalibraterBase, HistogramCollector, TensorsData

#: ONNX Runtime's: counts, edges, lowest, highest, threshold.
Histogram: TypeAlias = tuple[Any, ...]

METHODS = ("minmax", "entropy", "percentile")

#: Bins of a histogram: ONNX Runtime's own number for percentiles.
HISTOGRAM_BINS = 2048

#: Entropy looks at every width of the range against every bin, in Python: 230 tensors take 3 s with so many
#: bins, 14 s with 512 and 50 s with 1024, which gave the text detector no better ranges.
ENTROPY_BINS = 256

#: Levels that entropy tries to tell apart: ONNX Runtime's own number.
ENTROPY_LEVELS = 128


class RowReader:
    """ONNX Runtime's idea of calibration data: one feed, and then None."""

    def __init__(self, feed: dict[str, Array]) -> None:
        self._feed: dict[str, Array] | None = feed

    def get_next(self) -> dict[str, Array] | None:
        feed, self._feed = self._feed, None
        return feed

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return iter(self.get_next, None)


def find_ranges(
    model: Path,
    feeds: Feeds,
    op_types: Sequence[str],
    methods: Sequence[str],
    percentile: float,
    *,
    has_large_weights: bool = False,
) -> dict[str, TensorsData]:
    """Return the ranges of the tensors around all nodes of ``op_types``, by method.

    ``feeds`` gives single rows, whose shapes may differ; files are written beside ``model``.
    """
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData, create_calibrator

    def calibrator(method: CalibrationMethod, options: dict[str, object]) -> CalibraterBase:
        return create_calibrator(
            model,
            list(op_types),
            augmented_model_path=str(model.with_name(f"augmented_{method.name}.onnx")),
            calibrate_method=method,
            use_external_data_format=has_large_weights,
            extra_options=options,
        )

    with quiet():
        bounds = _collect(calibrator(CalibrationMethod.MinMax, {}), feeds)
        found = {"minmax": bounds}
        if set(methods) != {"minmax"}:
            counting = calibrator(
                CalibrationMethod.Percentile,
                {"symmetric": False, "num_bins": HISTOGRAM_BINS, "percentile": percentile},
            )
            counting.collector = _collector("percentile", percentile, _empty_histograms(bounds))
            found["percentile"] = _collect(counting, feeds)
        if "entropy" in methods:
            counted = counting.collector.histogram_dict
            coarse = {name: _coarser(histogram) for name, histogram in counted.items()}
            collector = _collector("entropy", percentile, coarse)
            found["entropy"] = TensorsData(CalibrationMethod.Entropy, collector.compute_collection_result())
    return {method: found[method] for method in methods}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what ONNX Runtime's tools print, and their warnings, off the terminal. What fails raises."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _collect(calibrator: CalibraterBase, feeds: Feeds) -> TensorsData:
    for feed in feeds():
        calibrator.collect_data(RowReader(feed))
    return calibrator.compute_data()


def _collector(method: str, percentile: float, histograms: dict[str, Histogram]) -> HistogramCollector:
    from onnxruntime.quantization.calibrate import HistogramCollector

    collector = HistogramCollector(
        method=method,
        symmetric=False,
        num_bins=HISTOGRAM_BINS,
        num_quantized_bins=ENTROPY_LEVELS,
        percentile=percentile,
        scenario="same",
    )
    collector.histogram_dict = histograms
    return collector


def _empty_histograms(bounds: TensorsData) -> dict[str, Histogram]:
    """Make an empty histogram over the whole range of each tensor."""
    histograms: dict[str, Histogram] = {}
    for name, data in bounds.items():
        low, high = (np.float32(np.asarray(value).item()) for value in data.range_value)
        threshold = np.array(max(abs(low), abs(high)), np.float32)
        if threshold > 0:
            edges = np.linspace(-threshold, threshold, HISTOGRAM_BINS + 1, dtype=np.float32)
            histograms[name] = (np.zeros(HISTOGRAM_BINS, np.int64), edges, low, high, threshold)
    return histograms


def _coarser(histogram: Histogram) -> Histogram:
    counts, edges, *rest = histogram
    step = len(counts) // ENTROPY_BINS
    if step < 2 or len(counts) % ENTROPY_BINS:
        return histogram
    return (counts.reshape(ENTROPY_BINS, step).sum(axis=1), edges[::step], *rest)
