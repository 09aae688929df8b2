"""Which size class of a model a frame goes to: the smallest that contains it.

Nearest by distance is wrong: it can name a class that is smaller in one direction and cut the frame. A
frame larger than every class goes, scaled down, into the class that keeps most of its pixels, or is refused:
the model's ``oversize`` decides. Not here: where in the class the pixels go (workers/geometry.py).
"""

from __future__ import annotations

from headrace.broker.records import Refusal
from headrace.errors import Code
from headrace.protocol.messages import Encoding, Fit, Frame, ImageInput, ModelSpec, Oversize, SizeClassSpec

#: Name of the one class of a model that takes plain tensors: no padding, the worker checks the shape.
TENSOR_CLASS = "tensor"

#: Kinds of frames whose place is remembered: cameras have a few, and a peer can't make it more.
MAX_KNOWN_SHAPES = 1_024

#: Channels a raw image may have: gray, colour, colour with an alpha channel that is dropped.
_IMAGE_CHANNELS = (1, 3, 4)


class SizeClasses:
    """The size classes of one model, smallest area first. Invariant: names are unique."""

    def __init__(self, spec: ModelSpec, classes: tuple[SizeClassSpec, ...]) -> None:
        self._spec = spec
        self._classes = tuple(sorted(classes, key=lambda c: (c.height * c.width, c.height, c.name)))
        self._by_name = {size_class.name: size_class for size_class in self._classes}
        self._known: dict[tuple[object, ...], SizeClassSpec | Refusal] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names, smallest area first."""
        return tuple(size_class.name for size_class in self._classes)

    def get(self, name: str) -> SizeClassSpec:
        """Return the class of that name; KeyError if there is none."""
        return self._by_name[name]

    def place(self, frame: Frame) -> SizeClassSpec | Refusal:
        """Return the class a frame belongs to, or why there is none.

        ``frame.shape`` is (height, width) or (height, width, channels) for image models.
        """
        kind = (frame.shape, frame.dtype, frame.encoding)
        place = self._known.get(kind)
        if place is None:
            if len(self._known) >= MAX_KNOWN_SHAPES:
                self._known.clear()
            place = self._known[kind] = self._find_place(frame)
        return place

    def _find_place(self, frame: Frame) -> SizeClassSpec | Refusal:
        image = self._spec.image
        if image is None:
            return self._place_tensor(frame)
        refusal = _check_image(frame, image)
        if refusal is not None:
            return refusal
        height, width = frame.shape[0], frame.shape[1]
        for size_class in self._classes:
            if size_class.fit is Fit.EXACT:
                if (height, width) == (size_class.height, size_class.width):
                    return size_class
            elif height <= size_class.height and width <= size_class.width:
                return size_class
        return self._place_oversize(height, width)

    def _place_oversize(self, height: int, width: int) -> SizeClassSpec | Refusal:
        scalable = [c for c in self._classes if c.fit is not Fit.EXACT]
        if self._spec.oversize is Oversize.REJECT or not scalable:
            sizes = ", ".join(f"{c.height}x{c.width}" for c in self._classes)
            name = self._spec.name
            return Refusal(
                Code.OVERSIZE, f"a frame of {height}x{width} fits no size class of {name} ({sizes})"
            )
        # The class in which the frame is scaled down least keeps most of it; ties go to the smaller class.
        return max(scalable, key=lambda c: (min(c.height / height, c.width / width), -c.height * c.width))

    def _place_tensor(self, frame: Frame) -> SizeClassSpec | Refusal:
        if frame.encoding is not Encoding.RAW:
            return Refusal(
                Code.BAD_ENCODING, f"model {self._spec.name} takes tensors, not {frame.encoding} images"
            )
        return self._classes[0]


def padding_waste(shape: tuple[int, ...], size_class: SizeClassSpec) -> float:
    """Return the share (0 to 1) of a class's area that is padding when it holds a frame of ``shape``.

    A class that holds tensors (height or width 0) wastes nothing.
    """
    area = size_class.height * size_class.width
    if area == 0 or len(shape) < 2:
        return 0.0
    height, width = shape[0], shape[1]
    scale = min(size_class.height / height, size_class.width / width)
    if size_class.fit is not Fit.LETTERBOX:
        scale = min(1.0, scale)
    used = min(size_class.height, round(height * scale)) * min(size_class.width, round(width * scale))
    return 1.0 - used / area


def _check_image(frame: Frame, image: ImageInput) -> Refusal | None:
    shape = frame.shape
    if frame.dtype != "uint8":
        return Refusal(Code.WRONG_DTYPE, f"an image of dtype {frame.dtype} can't be used: expected uint8")
    if len(shape) not in (2, 3):
        return Refusal(
            Code.WRONG_SHAPE, f"an image of shape {list(shape)}: expected [height, width, channels]"
        )
    # A file's decoder makes colour of whatever channels it has, gray with alpha (two of them) included.
    channels = shape[2] if len(shape) == 3 and frame.encoding is Encoding.RAW else 1
    if channels not in _IMAGE_CHANNELS:
        return Refusal(
            Code.WRONG_CHANNELS,
            f"an image of shape {list(shape)} has {channels} channels: expected 1, 3 or 4 in the last axis"
            f" (the model takes {image.channels})",
        )
    return None
