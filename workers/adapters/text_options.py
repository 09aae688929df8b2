"""The options of the ``text`` adapter, apart from it: to check them needs no OpenCV."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.workers.adapters.options import Options


@dataclass(frozen=True, slots=True)
class TextOptions:
    """``thresh``: a pixel is text above it; ``box_thresh``: a region is kept from it on; ``max_candidates``;
    ``unclip_ratio``; ``min_size`` in pixels of the map; ``dilation``; ``output``, "" for the first."""

    thresh: float
    box_thresh: float
    max_candidates: int
    unclip_ratio: float
    min_size: float
    dilation: bool
    output: str

    @classmethod
    def read(cls, options: Options) -> TextOptions:
        """Read and check them all. Raises ConfigError."""
        read = cls(
            thresh=options.number("thresh", 0.3, 0.0, 1.0),
            box_thresh=options.number("box_thresh", 0.5, 0.0, 1.0),
            max_candidates=options.integer("max_candidates", 1000, 1, 1000),
            unclip_ratio=options.number("unclip_ratio", 1.6, 0.0, 10.0),
            min_size=options.number("min_size", 3.0, 0.0, 1000.0),
            dilation=options.flag("dilation", True),
            output=options.text("output", ""),
        )
        options.finish()
        return read
