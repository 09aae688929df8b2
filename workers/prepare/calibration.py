"""Frames to calibrate and to judge with: the user's pictures and videos, fitted to a class as staging does.

Frames are chosen once, with a seed, spread evenly over all sources and over the length of each, and stand in
an order in which any stretch of them covers all sources. What can't be read is skipped, named and counted.
Without any source the frames are seeded noise, and whoever reports says so: ranges and errors found on noise
say little about pictures.

The word ``demo`` stands for the demo's clips, with the captions that the demo burns into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.messages import Color, Fit, ImageInput, ModelSpec, Oversize, SizeClassSpec
from headrace.workers.engine import InputPlan
from headrace.workers.geometry import Placement, place
from headrace.workers.onnx_model import DYNAMIC
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

Array: TypeAlias = NDArray[np.generic]
Pixels: TypeAlias = NDArray[np.uint8]
#: Starts another pass over the inputs of single rows: input name to [1, ...].
Feeds: TypeAlias = Callable[[], Iterator[dict[str, Array]]]

#: Means the clips that the demo plays.
DEMO = "demo"

#: Frames are kept in memory, fitted; 512 MiB are 430 frames of 640x640.
MAX_FRAMES_BYTES = 512 * 1024 * 1024

#: Unreadable files that are named in words; all are counted.
MAX_NAMED = 5

SEED = 20_240_607


@dataclass(frozen=True, slots=True)
class SourceUse:
    """What one source gave. ``unreadable`` names files that could not be read or ended early."""

    name: str
    frame_count: int
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CalibrationFrames:
    """``images``: uint8 [count, height, width, channels] of ``size_class``, in the model's colour order,
    border filled. ``placements``, ``origins`` (``bikes.mp4#37``) and ``source_indexes`` have one entry each.
    Invariant: there is at least one."""

    images: Pixels
    placements: tuple[Placement, ...]
    origins: tuple[str, ...]
    source_indexes: tuple[int, ...]
    sources: tuple[SourceUse, ...]
    size_class: SizeClassSpec
    wanted_count: int
    is_synthetic: bool = False

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, size: int = 1) -> Iterator[Pixels]:
        """Yield the frames in order, ``size`` at a time; the last batch may be smaller."""
        for start in range(0, len(self.images), size):
            yield self.images[start : start + size]

    def feeds(self, input_name: str) -> Feeds:
        """Return the frames as inputs of single rows, under the name that the graph has for them."""
        return lambda: ({input_name: batch} for batch in self.batches())

    def split(self, first_count: int) -> tuple[CalibrationFrames, CalibrationFrames]:
        """Part the frames in two, both spread over all sources: ``first_count`` of them, and the rest.

        A single frame, or a count that would leave nothing, gives all frames twice.
        """
        count = len(self.images)
        if not 0 < first_count < count:
            return self, self
        first = set(np.linspace(0, count - 1, first_count).round().astype(int).tolist())
        others = [index for index in range(count) if index not in first]
        return self._part(sorted(first)), self._part(others)

    def describe(self) -> str:
        """Say in one line where the frames are from, what is missing and what could not be read."""
        size = f"{self.size_class.height}x{self.size_class.width}"
        if self.is_synthetic:
            return f"{len(self)} synthetic frames (seeded noise, no real pictures) of {size}"
        parts = ", ".join(f"{use.frame_count} of {use.name}" for use in self.sources)
        short = f" ({self.wanted_count} were asked for)" if len(self) < self.wanted_count else ""
        text = f"{len(self)} real frames of {size}{short}: {parts}"
        bad = [name for use in self.sources for name in use.unreadable]
        if bad:
            more = ", ..." if len(bad) > MAX_NAMED else ""
            text += f"; {len(bad)} unreadable: {', '.join(bad[:MAX_NAMED])}{more}"
        return text

    def _part(self, indexes: list[int]) -> CalibrationFrames:
        return replace(
            self,
            images=self.images[indexes],
            placements=tuple(self.placements[i] for i in indexes),
            origins=tuple(self.origins[i] for i in indexes),
            source_indexes=tuple(self.source_indexes[i] for i in indexes),
            sources=tuple(
                replace(use, frame_count=sum(self.source_indexes[i] == number for i in indexes))
                for number, use in enumerate(self.sources)
            ),
            wanted_count=len(indexes),
        )


def load_frames(
    sources: Sequence[str], spec: ModelSpec, size_class: SizeClassSpec, count: int, seed: int = SEED
) -> CalibrationFrames:
    """Choose ``count`` frames of folders of images, image files, videos or DEMO and fit them to a class.

    Fewer when the sources have fewer, or when they would exceed MAX_FRAMES_BYTES. A class that takes only
    its own size letterboxes here. Raises PrepareRefusedError (``no_frames``) when there is no such source
    or nothing in it can be read.
    """
    if count < 1:
        raise PrepareRefusedError(Reason.NO_FRAMES, f"{count} frames asked for: at least 1 is needed")
    image = spec.image or ImageInput()
    row_bytes = size_class.height * size_class.width * image.channels
    kept_count = max(1, min(count, MAX_FRAMES_BYTES // row_bytes))
    if not sources:
        return _synthetic(image, size_class, kept_count, seed)
    spec = replace(spec, oversize=Oversize.LETTERBOX)
    if size_class.fit is Fit.EXACT:
        size_class = replace(size_class, fit=Fit.LETTERBOX)
    pools = [pool for name in sources for pool in _open(name)]
    if all(len(pool.items) == 0 for pool in pools):
        raise _nothing(pools)
    rng = np.random.default_rng(seed)
    quotas = _quotas([len(pool.items) for pool in pools], kept_count)
    rows: list[Pixels] = []
    placed: list[tuple[float, str, int, Placement]] = []
    for number, (pool, quota) in enumerate(zip(pools, quotas, strict=True)):
        for position, origin, pixels in pool.read(quota, rng):
            row = np.empty((size_class.height, size_class.width, image.channels), np.uint8)
            placed.append((position, origin, number, _place_image(pixels, spec, size_class, row)))
            rows.append(row)
    if not rows:
        raise _nothing(pools)
    # By the position in its own source: neighbours in this order come from different sources.
    order = sorted(range(len(rows)), key=lambda i: placed[i][0])
    uses = tuple(SourceUse(pool.name, pool.given, tuple(pool.unreadable)) for pool in pools)
    return CalibrationFrames(
        np.stack([rows[i] for i in order]),
        tuple(placed[i][3] for i in order),
        tuple(placed[i][1] for i in order),
        tuple(placed[i][2] for i in order),
        uses,
        size_class,
        count,
    )


def tensor_feeds(
    plans: Sequence[InputPlan], feed_names: Sequence[str], count: int, seed: int = SEED
) -> Feeds:
    """Return seeded synthetic rows for a model without an image, or with more inputs than one.

    Whole numbers that are no pixels stay 0 or 1, as they may be indexes; an open axis has length 4.
    """

    def rows() -> Iterator[dict[str, Array]]:
        rng = np.random.default_rng([seed, 1])
        for _ in range(count):
            yield {
                name: _random_row(rng, plan)[np.newaxis] for name, plan in zip(feed_names, plans, strict=True)
            }

    return rows


def _random_row(rng: np.random.Generator, plan: InputPlan) -> Array:
    shape = tuple(4 if axis == DYNAMIC else axis for axis in plan.shape)
    dtype = np.dtype(plan.dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 256 if plan.is_image else 2, shape).astype(dtype)


def _synthetic(image: ImageInput, size_class: SizeClassSpec, count: int, seed: int) -> CalibrationFrames:
    """Make noise of several grains: blocks of 1 to 32 pixels, so that not every frame is the same grey."""
    rng = np.random.default_rng(seed)
    shape = (size_class.height, size_class.width)
    images = np.empty((count, *shape, image.channels), np.uint8)
    for index in range(count):
        grain = 2 ** (index % 6)
        small = rng.integers(
            0, 256, (-(-shape[0] // grain), -(-shape[1] // grain), image.channels), dtype=np.uint8
        )
        images[index] = small.repeat(grain, axis=0).repeat(grain, axis=1)[: shape[0], : shape[1]]
    placement = place(shape, size_class, Oversize.LETTERBOX)
    return CalibrationFrames(
        images,
        (placement,) * count,
        tuple(f"synthetic#{index}" for index in range(count)),
        (0,) * count,
        (SourceUse("synthetic", count),),
        size_class,
        count,
        is_synthetic=True,
    )


def _place_image(pixels: Pixels, spec: ModelSpec, size_class: SizeClassSpec, row: Pixels) -> Placement:
    from headrace.workers.pixels import place_image

    return place_image(pixels, Color.RGB, spec, size_class, row)


# -- sources -------------------------------------------------------------------------------------------


class _Images:
    """Image files of a folder, deep; ``read`` replaces files that can't be read by others while there are."""

    def __init__(self, name: str, items: list[Path], root: Path) -> None:
        self.name, self.items, self.given = name, items, 0
        self.unreadable: list[str] = []
        self._root = root

    def read(self, quota: int, rng: np.random.Generator) -> Iterator[tuple[float, str, Pixels]]:
        """Yield up to ``quota`` of (position 0 to 1, origin, RGB pixels)."""
        from headrace.clients.video.sources import read_image

        chosen = _picks(len(self.items), quota, rng)
        spare = rng.permutation(np.setdiff1d(np.arange(len(self.items)), chosen)).tolist()
        for index in [*chosen, *spare]:
            if self.given == quota:
                return
            path = self.items[index]
            label = str(path.relative_to(self._root))
            pixels = read_image(path)
            if pixels is None:
                self.unreadable.append(label)
                continue
            self.given += 1
            yield (index + 0.5) / len(self.items), label, pixels


class _Video:
    """A video file; ``items`` are the numbers of its frames as the container counts them."""

    def __init__(self, name: str, path: Path, caption: str = "") -> None:
        self.name, self.given = name, 0
        self.unreadable: list[str] = []
        self._path, self._caption = path, caption
        self.items = range(self._frame_count())

    def read(self, quota: int, rng: np.random.Generator) -> Iterator[tuple[float, str, Pixels]]:
        """See _Images.read. Frames are decoded in order, up to the last one wanted."""
        from headrace.clients.video.frames import SourceError, SourceOptions
        from headrace.clients.video.sources import open_source

        wanted = set(_picks(len(self.items), quota, rng))
        try:
            source = open_source(str(self._path), SourceOptions(decode_threads=1))
            for number, frame in enumerate(source.frames()):
                if number in wanted:
                    self.given += 1
                    seconds = (frame.pts_ns or 0) // 1_000_000_000
                    pixels = self._with_caption(frame.image, seconds)
                    yield (number + 0.5) / len(self.items), f"{self.name}#{number}", pixels
                if self.given == quota:
                    break
            source.close()
        except SourceError as error:
            self.unreadable.append(f"{self.name} ({error})")
            return
        if self.given < len(wanted):
            self.unreadable.append(f"{self.name} ({len(wanted) - self.given} frames can't be decoded)")

    def _with_caption(self, image: Pixels, seconds: int) -> Pixels:
        if not self._caption:
            return image
        from headrace.demo.caption import draw_caption

        return draw_caption(image, f"{self._caption} {seconds // 60:02d}:{seconds % 60:02d}")

    def _frame_count(self) -> int:
        import av

        try:
            with av.open(str(self._path)) as container:
                if not container.streams.video:
                    self.unreadable.append(f"{self.name} (no video in it)")
                    return 0
                # Counting packets decodes nothing, and what containers state is often 0 or wrong.
                return sum(1 for packet in container.demux(video=0) if packet.size)
        except (av.error.FFmpegError, OSError) as error:
            self.unreadable.append(f"{self.name} ({type(error).__name__})")
            return 0


_Pool: TypeAlias = _Images | _Video


def _open(name: str) -> list[_Pool]:
    from headrace.clients.video.frames import SourceError
    from headrace.clients.video.sources import IMAGE_SUFFIXES, natural_key

    path = Path(name)
    if name == DEMO and not path.exists():
        from headrace.demo.cameras import CAMERAS, clip_path

        try:
            clips = [(camera, clip_path(camera)) for camera in CAMERAS]
        except SourceError as error:
            raise PrepareRefusedError(Reason.NO_FRAMES, str(error)) from error
        return [_Video(path.name, path, camera.stream.upper().replace("-", " ")) for camera, path in clips]
    if not path.exists():
        raise PrepareRefusedError(Reason.NO_FRAMES, f"no such folder, image or video: {name}")
    if path.is_dir():
        found = (p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        return [_Images(name, sorted(found, key=lambda p: natural_key(str(p.relative_to(path)))), path)]
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return [_Images(path.name, [path], path.parent)]
    return [_Video(path.name, path)]


def _nothing(pools: Sequence[_Pool]) -> PrepareRefusedError:
    bad = [text for pool in pools for text in pool.unreadable]
    named = (
        f"; unreadable: {', '.join(bad[:MAX_NAMED])}{', ...' if len(bad) > MAX_NAMED else ''}" if bad else ""
    )
    where = ", ".join(pool.name for pool in pools)
    return PrepareRefusedError(
        Reason.NO_FRAMES, f"no frame could be read from {where}{named}: name folders of images or videos"
    )


def _quotas(available: Sequence[int], count: int) -> list[int]:
    """Share ``count`` evenly; what a source lacks goes to the others."""
    quotas = [0] * len(available)
    while sum(quotas) < min(count, sum(available)):
        open_ones = [i for i, have in enumerate(available) if quotas[i] < have]
        share = max(1, (count - sum(quotas)) // len(open_ones))
        for index in open_ones:
            quotas[index] += min(share, available[index] - quotas[index], count - sum(quotas))
    return quotas


def _picks(available: int, quota: int, rng: np.random.Generator) -> list[int]:
    """Choose ``quota`` of ``available`` places: one at random in each of as many equal stretches."""
    edges = np.linspace(0, available, min(quota, available) + 1)
    starts, ends = np.ceil(edges[:-1]).astype(int), np.ceil(edges[1:]).astype(int)
    return [int(rng.integers(start, end)) for start, end in zip(starts, ends, strict=True)]
