"""The ``classify`` adapter: the likeliest classes of a frame with their scores."""

from __future__ import annotations

import numpy as np

from headrace.workers.adapters.base import Adapter, AdapterError, Outputs, RowResult, pick_output
from headrace.workers.adapters.options import Options
from headrace.workers.geometry import Placement

#: ImageNet-21k has 21,841 classes; nobody reads more than a handful of them per frame.
_MAX_TOP_K = 1000


class ClassifyAdapter(Adapter):
    """Options: ``top_k``; ``activation`` (what is still to be applied: ``softmax``, ``sigmoid`` or ``none``);
    ``labels`` (one text per class); ``output`` (the first by default).

    Gives ``classes``, ``scores`` and, with labels, ``labels``: parallel lists, best first.
    """

    name = "classify"

    def __init__(self, options: Options) -> None:
        self._top_k = options.integer("top_k", 5, 1, _MAX_TOP_K)
        self._activation = options.choice("activation", "softmax", ("softmax", "sigmoid", "none"))
        self._labels = options.texts("labels")
        self._output = options.text("output", "")
        options.finish()

    def process_row(self, row: Outputs, placement: Placement | None) -> RowResult:
        """Return the best classes of one frame; its output holds one number per class, in any shape."""
        logits = pick_output(row, self._output).astype(np.float64).ravel()
        if not logits.size:
            raise AdapterError("the output holds no classes")
        if self._labels and len(self._labels) != logits.size:
            raise AdapterError(f"{len(self._labels)} labels for the {logits.size} classes of the output")
        scores = logits
        if self._activation == "softmax":
            powers = np.exp(logits - logits.max())
            scores = powers / powers.sum()
        elif self._activation == "sigmoid":
            # Beyond 700 float64's exp overflows; the result is 0 or 1 long before.
            scores = 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
        # Stable, so that equal scores come in the order of the classes, the same every time.
        best = np.argsort(-scores, kind="stable")[: self._top_k]
        outputs: dict[str, object] = {"classes": best.tolist(), "scores": np.round(scores[best], 6).tolist()}
        if self._labels:
            outputs["labels"] = [self._labels[index] for index in best]
        return RowResult(outputs)
