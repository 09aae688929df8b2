"""The emulated GPU of W3: T(b) = 2.0 ms + 0.15 ms x b, and the variant in which pixels cost."""

from __future__ import annotations

BASE_MS = 2.0
PER_FRAME_MS = 0.15

#: The variant: a frame costs in proportion to its pixels, 0.15 ms for 224x224.
REFERENCE_SIDE = 224


def per_frame_ms(side: int, *, is_scaled: bool) -> float:
    """Return the cost of one more frame of a class in its batch."""
    return PER_FRAME_MS * ((side / REFERENCE_SIDE) ** 2 if is_scaled else 1.0)


def cost_s(count: int, side: int, *, is_scaled: bool) -> float:
    """Return the time of a batch, in seconds."""
    return (BASE_MS + per_frame_ms(side, is_scaled=is_scaled) * count) / 1e3
