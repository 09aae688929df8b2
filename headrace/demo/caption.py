"""Burn a camera's name and time into its pictures, as surveillance cameras do.

The demo's model finds text, and the clips show hardly any: without a caption most pictures have no box, and
nobody could tell whether a box is in the right place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from headrace.clients.video.frames import Image, SourceCounts, VideoFrame, VideoSource
from headrace.clients.video.pacing import NANOSECONDS, Timeline


class CaptionedSource:
    """A source whose pictures carry a caption and a clock in the lower left corner. The clock shows the
    pictures' own time and goes on when the source is played again."""

    def __init__(self, source: VideoSource, caption: str) -> None:
        self.name = source.name
        self.is_live = source.is_live
        self.counts: SourceCounts = source.counts
        self._source = source
        self._caption = caption
        self._timeline = Timeline()

    def frames(self) -> Iterator[VideoFrame]:
        """See VideoSource."""
        for frame in self._source.frames():
            seconds = self._timeline.place(frame.pts_ns or 0) // NANOSECONDS
            text = f"{self._caption} {seconds // 60:02d}:{seconds % 60:02d}"
            yield VideoFrame(
                partial(_captioned, frame, text),
                pts_ns=frame.pts_ns,
                index=frame.index,
                duration_ns=frame.duration_ns,
            )
        self._timeline.begin_piece(self._timeline.step_ns)

    def close(self) -> None:
        """See VideoSource."""
        self._source.close()


def draw_caption(image: Image, text: str) -> Image:
    """Return a copy of an image (uint8 [height, width, 3]) with white on black text in its lower left."""
    import cv2

    picture = image.copy()
    height = picture.shape[0]
    # Letters of a 20th of the height, but never so small that they are lost in 144 lines.
    scale = max(0.45, height / 600)
    thickness = max(1, round(scale * 1.5))
    margin = max(4, height // 30)
    font = cv2.FONT_HERSHEY_SIMPLEX
    (text_width, text_height), base = cv2.getTextSize(text, font, scale, thickness)
    top = height - text_height - base - 2 * margin
    cv2.rectangle(picture, (0, top), (text_width + 2 * margin, height), (0, 0, 0), thickness=-1)
    position = (margin, height - margin - base)
    cv2.putText(picture, text, position, font, scale, (255, 255, 255), thickness, cv2.LINE_AA)
    return np.asarray(picture, np.uint8)


def _captioned(frame: VideoFrame, text: str) -> Image:
    return draw_caption(frame.image, text)
