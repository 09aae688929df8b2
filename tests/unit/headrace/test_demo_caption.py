"""The demo's captions: in the lower left corner, the rest of the picture untouched."""

from __future__ import annotations

import hr_video
import numpy as np
import pytest

from headrace.clients.video.sources import open_source
from headrace.demo.caption import CaptionedSource, draw_caption


@pytest.mark.parametrize("size", [(144, 176), (272, 640), (720, 1280)])
def test_a_caption_covers_the_lower_left_corner_only(size):
    image = np.full((*size, 3), 120, np.uint8)

    drawn = draw_caption(image, "CAMERA 1 00:07")

    changed = np.argwhere((drawn != 120).any(axis=2))
    assert changed[:, 1].min() == 0
    assert changed[:, 0].max() == size[0] - 1
    assert changed[:, 0].min() > size[0] * 0.75
    assert drawn.max() > 200
    assert (image == 120).all()


def test_frames_keep_their_time_and_size():
    clip = str(hr_video.clip("carphone_pristine"))
    plain = list(open_source(clip).frames())

    captioned = list(CaptionedSource(open_source(clip), "CAMERA 1").frames())

    assert [f.pts_ns for f in captioned] == [f.pts_ns for f in plain]
    assert captioned[0].image.shape == (144, 176, 3)
    assert np.array_equal(captioned[40].image[:100], plain[40].image[:100])
    assert not np.array_equal(captioned[40].image, plain[40].image)
