"""Runs a candidate and the FP32 master on the same frames, and sums up how far they are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.protocol.messages import Value
from headrace.workers.geometry import Placement
from headrace.workers.onnx_model import first_line
from headrace.workers.prepare.calibration import Array, Feeds
from headrace.workers.prepare.metrics import Comparer, Comparison
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

if TYPE_CHECKING:
    import onnxruntime

#: Outputs of the master that are kept between two candidates; beyond it the master is run again.
MAX_KEPT_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class FrameJudge:
    """Judges files against ``master`` on the rows of ``feeds``, of which ``placements`` has one entry each.

    Invariant: ``_kept`` holds the master's outputs of the first frames, in their order.
    """

    master: Path
    feeds: Feeds
    placements: Sequence[Placement | None]
    adapter: str
    adapter_options: dict[str, Value]
    threads: int = 0
    _kept: list[list[Array]] = field(default_factory=list)
    _kept_bytes: int = 0

    def __call__(self, path: Path, limit: int | None = None) -> Comparison:
        """Compare the file at ``path`` on the first ``limit`` frames, or on all.

        Raises PrepareRefusedError when ONNX Runtime can't run one of the files.
        """
        candidate = open_file(path, self.threads)
        names = [output.name for output in candidate.get_outputs()]
        comparer = Comparer(self.adapter, self.adapter_options, names)
        frames = zip(self.feeds(), self.placements, self._references(), strict=False)
        for feed, placement, reference in islice(frames, limit):
            comparer.add(reference, run(candidate, feed, path), placement)
        return comparer.result()

    def _references(self) -> Iterator[list[Array]]:
        yield from self._kept
        known = len(self._kept)
        session = None
        for feed in islice(self.feeds(), known, None):
            session = session or open_file(self.master, self.threads)
            outputs = run(session, feed, self.master)
            nbytes = sum(array.nbytes for array in outputs)
            if len(self._kept) == known and self._kept_bytes + nbytes <= MAX_KEPT_BYTES:
                self._kept.append(outputs)
                self._kept_bytes += nbytes
                known += 1
            yield outputs


def output_figures(path: Path, feeds: Feeds, threads: int = 0) -> dict[str, tuple[float, float]]:
    """Run the rows of ``feeds``; return mean and root mean square of each output over all of them."""
    session = open_file(path, threads)
    names = [output.name for output in session.get_outputs()]
    totals = {name: np.zeros(3) for name in names}
    for feed in feeds():
        for name, values in zip(names, run(session, feed, path), strict=True):
            wide = values.astype(np.float64)
            totals[name] += (wide.size, wide.sum(), np.square(wide).sum())
    return {n: (float(t[1] / max(t[0], 1)), float((t[2] / max(t[0], 1)) ** 0.5)) for n, t in totals.items()}


def open_file(path: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    """Open a session on a file, weights beside it included, on the CPU. Raises PrepareRefusedError."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no public root of its error classes
        raise PrepareRefusedError(
            Reason.CANNOT_RUN, f"{path.name}: ONNX Runtime refuses it: {first_line(error)}"
        ) from error


def run(session: onnxruntime.InferenceSession, feed: dict[str, Array], path: Path) -> list[Array]:
    """Run one feed; an error names the file. Raises PrepareRefusedError."""
    try:
        return [np.asarray(value) for value in session.run(None, feed)]
    except Exception as error:  # as above
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        raise PrepareRefusedError(
            Reason.CANNOT_RUN, f"{path.name}: can't be run with {shapes}: {first_line(error)}"
        ) from error
