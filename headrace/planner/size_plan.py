"""The size classes that waste least padding over a recorded mix of frame shapes.

The problem. Given frames (height, width, how many), choose K rectangles so that each frame fits into one of
them, unscaled, and the padded area, the sum over all frames of the area of the smallest rectangle that
contains it, is least. Both sides of a rectangle are multiples of ``multiple``, so every shape is rounded up
to those first; after that only rectangles whose height is some frame's height and whose width is some
frame's width can be in an optimum (a larger one could be shrunk to the bounding box of its own frames).

In one dimension dynamic programming over the sorted sizes solves it. Rectangles have no such order: two of
them may each be larger in one direction, and the choice then is one of partitions, for which we know no
polynomial method. So three exact solutions are taken, each over its own family, and the best one wins:

* ``any``: all rectangles, by dynamic programming over subsets of the distinct shapes. Exact without any
  restriction, with 3 ** shapes steps: up to MAX_SUBSET_SHAPES shapes.
* ``nested``: rectangles that form a chain, each inside the next. Dynamic programming over the grid of
  candidates: the best chain that ends in a candidate extends the best chain that ends inside it, and what
  the last link adds is its area times the frames that fit it but not the link before. O(K * candidates ** 2).
* ``by orientation``: one chain for frames at least as wide as high and one for the others, the split of K
  between the two chosen as well.

With few shapes the answer is the optimum; else it is the optimum of the two families, and says so. Cameras
with landscape and portrait frames are the reason for the third family: one chain would pad both to squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError

Shape = tuple[int, int]  # height, width

#: Distinct shapes up to which all rectangles are looked at: 3 ** 13 steps take about a tenth of a second for
#: each class.
MAX_SUBSET_SHAPES = 13

#: Candidates of a chain: distinct heights times distinct widths. 8,192 take about a second for each class.
MAX_CANDIDATES = 8_192


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Size classes, smallest area first. ``family`` names the rectangles over which they are the optimum.
    Areas are in pixels, over all frames."""

    classes: tuple[Shape, ...]
    family: str
    frame_area: int
    padded_area: int

    @property
    def waste(self) -> float:
        """Return the share of the padded area that is padding."""
        return 1.0 - self.frame_area / self.padded_area


def plan_classes(shapes: Mapping[Shape, int], count: int, multiple: int = 32) -> SizePlan:
    """Return at most ``count`` size classes that waste least over the frames.

    Args:
        shapes: (height, width) in pixels -> number of frames, at least one.
        count: how many classes there may be, from 1.
        multiple: both sides of a class are multiples of this; a convolutional network's stride.

    Returns:
        The plan; fewer classes when more would not waste less.

    Raises:
        ConfigError: no frames, or more distinct sides than MAX_CANDIDATES allows.
    """
    if not shapes:
        raise ConfigError("no frame of the trace has a height and a width: there is nothing to plan")
    rounded: dict[Shape, int] = {}
    for (height, width), frames in shapes.items():
        key = (_up(height, multiple), _up(width, multiple))
        rounded[key] = rounded.get(key, 0) + frames
    if len(rounded) <= MAX_SUBSET_SHAPES:
        families = {"any": best_subsets(rounded, count)}
    else:
        families = {"nested": best_chain(rounded, count)}
        if count > 1:
            families["by orientation"] = best_by_orientation(rounded, count)
    frame_area = sum(height * width * frames for (height, width), frames in shapes.items())
    plans = [
        SizePlan(_by_area(classes), family, frame_area, padded_area(rounded, classes))
        for family, classes in families.items()
    ]
    return min(plans, key=lambda plan: (plan.padded_area, len(plan.classes)))


def padded_area(shapes: Mapping[Shape, int], classes: Sequence[Shape]) -> int:
    """Return the sum over all frames of the area of the smallest class that contains it.

    Raises ValueError when one fits none."""
    ordered = _by_area(classes)
    total = 0
    for (height, width), frames in shapes.items():
        for class_height, class_width in ordered:
            if height <= class_height and width <= class_width:
                total += class_height * class_width * frames
                break
        else:
            raise ValueError(f"{height}x{width} fits none of {list(ordered)}")
    return total


# -- any rectangles ----------------------------------------------------------------------------------------


def best_subsets(shapes: Mapping[Shape, int], count: int) -> tuple[Shape, ...]:
    """Return the optimum over all rectangles. Time 3 ** len(shapes) * count.

    A set of frames that share a class costs their number times the area of their bounding box. ``best[s]`` is
    the least cost of the set s in k parts; the part that holds the lowest member of s is tried in all ways.
    """
    listed = sorted(shapes)
    size = 1 << len(listed)
    costs = [0] * size
    boxes: list[Shape] = [(0, 0)] * size
    numbers = [0] * size
    for members in range(1, size):
        lowest = (members & -members).bit_length() - 1
        rest = members & (members - 1)
        height, width = listed[lowest]
        boxes[members] = (max(boxes[rest][0], height), max(boxes[rest][1], width))
        numbers[members] = numbers[rest] + shapes[listed[lowest]]
        costs[members] = boxes[members][0] * boxes[members][1] * numbers[members]
    best = costs
    choices: list[list[int]] = [list(range(size))]
    for _ in range(1, min(count, len(listed))):
        best, chosen = _one_part_more(best, costs)
        choices.append(chosen)
    found: list[Shape] = []
    members = size - 1
    while members:
        part = choices.pop()[members]
        found.append(boxes[part])
        members ^= part
    return tuple(dict.fromkeys(found))


def _one_part_more(best: list[int], costs: list[int]) -> tuple[list[int], list[int]]:
    """Return, for each set, the least cost with one part more and the part that is split off for it."""
    more = list(best)
    chosen = list(range(len(best)))
    for members in range(1, len(best)):
        least, split = costs[members], members
        lowest = members & -members
        others = members ^ lowest
        part = others
        while part:  # all proper subsets that leave the lowest member out
            part_cost = costs[members ^ part] + best[part]
            if part_cost < least:
                least, split = part_cost, members ^ part
            part = (part - 1) & others
        more[members], chosen[members] = least, split
    return more, chosen


# -- chains ------------------------------------------------------------------------------------------------


def best_chain(shapes: Mapping[Shape, int], count: int) -> tuple[Shape, ...]:
    """Return the optimum over chains of at most ``count`` rectangles, each inside the next.

    Raises ConfigError when there are more candidates than MAX_CANDIDATES."""
    return _chains(shapes, count)[-1]


def best_by_orientation(shapes: Mapping[Shape, int], count: int) -> tuple[Shape, ...]:
    """Return the optimum over pairs of chains, one for landscape (and square) frames, one for portrait."""
    wide = {shape: frames for shape, frames in shapes.items() if shape[1] >= shape[0]}
    high = {shape: frames for shape, frames in shapes.items() if shape[1] < shape[0]}
    if not wide or not high:
        return best_chain(shapes, count)
    wide_chains, high_chains = _chains(wide, count - 1), _chains(high, count - 1)
    pairs = [(wide_chains[k - 1], high_chains[count - k - 1]) for k in range(1, count)]
    chosen = min(pairs, key=lambda pair: padded_area(wide, pair[0]) + padded_area(high, pair[1]))
    return tuple(dict.fromkeys(chosen[0] + chosen[1]))


def _chains(shapes: Mapping[Shape, int], count: int) -> list[tuple[Shape, ...]]:
    """Return the best chain of at most 1, 2 ... ``count`` classes."""
    heights = np.array(sorted({height for height, _ in shapes}))
    widths = np.array(sorted({width for _, width in shapes}))
    if len(heights) * len(widths) > MAX_CANDIDATES:
        raise ConfigError(
            f"{len(heights)} distinct heights and {len(widths)} distinct widths make more than"
            f" {MAX_CANDIDATES} candidates: round shapes up to a larger --multiple"
        )
    row = {int(height): index for index, height in enumerate(heights)}
    column = {int(width): index for index, width in enumerate(widths)}
    fitting = np.zeros((len(heights), len(widths)), np.int64)
    for (height, width), frames in shapes.items():
        fitting[row[height], column[width]] += frames
    fitting = fitting.cumsum(0).cumsum(1)  # frames that fit each candidate
    areas = heights[:, None].astype(np.int64) * widths[None, :].astype(np.int64)
    least = areas * fitting
    befores: list[np.ndarray] = []
    chains = [_walk_back(heights, widths, befores)]
    for _ in range(1, count):
        least, before = _one_link_more(least, areas, fitting)
        befores.append(before)
        chains.append(_walk_back(heights, widths, befores))
    return chains


def _one_link_more(
    least: np.ndarray, areas: np.ndarray, fitting: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each candidate, the least cost of a chain that ends there with one link more, and the flat
    index of the link before (its own index: none more pays)."""
    more = np.empty_like(least)
    before = np.empty(least.shape, np.int64)
    columns = least.shape[1]
    for i in range(least.shape[0]):
        for j in range(columns):
            # What frames cost that the link before takes, less what they would cost in this one.
            gain = least[: i + 1, : j + 1] - areas[i, j] * fitting[: i + 1, : j + 1]
            # The candidate itself stands for a shorter chain.
            flat = int(gain.argmin())
            row, column = divmod(flat, j + 1)
            if gain[row, column] >= gain[i, j]:
                row, column = i, j
            more[i, j] = gain[row, column] + areas[i, j] * fitting[i, j]
            before[i, j] = row * columns + column
    return more, before


def _walk_back(heights: np.ndarray, widths: np.ndarray, befores: Sequence[np.ndarray]) -> tuple[Shape, ...]:
    """Return the chain that ends in the largest candidate, which alone holds all frames."""
    row, column = len(heights) - 1, len(widths) - 1
    chain = [(int(heights[row]), int(widths[column]))]
    for before in reversed(befores):
        row, column = divmod(int(before[row, column]), len(widths))
        chain.append((int(heights[row]), int(widths[column])))
    return tuple(dict.fromkeys(chain))


def _by_area(classes: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(sorted(classes, key=lambda shape: (shape[0] * shape[1], shape[0])))


def _up(side: int, multiple: int) -> int:
    return -(-side // multiple) * multiple
