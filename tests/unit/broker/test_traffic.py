"""How fast frames come."""

from __future__ import annotations

import pytest

from headrace.broker.traffic import RATE_PIECE_NS, ArrivalRate


def test_rate_is_nothing_until_a_piece_is_over() -> None:
    """One frame says nothing about the next."""
    rate = ArrivalRate()

    assert rate.frames_per_ns(1, 0) == 0.0
    assert rate.frames_per_ns(50, RATE_PIECE_NS - 1) == 0.0


def test_rate_is_that_of_the_first_piece_then_a_moving_mean() -> None:
    """Half the weight lies in the newest piece."""
    rate = ArrivalRate()
    rate.frames_per_ns(0, 0)

    first = rate.frames_per_ns(100, RATE_PIECE_NS)
    second = rate.frames_per_ns(400, 2 * RATE_PIECE_NS)

    assert first == pytest.approx(100 / RATE_PIECE_NS)
    assert second == pytest.approx(200 / RATE_PIECE_NS)
