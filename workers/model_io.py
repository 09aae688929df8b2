"""What a model takes, worked out from its specification and its graph: size classes and input plans.

Shared by the engines that run ONNX graphs. Not here: running anything; whether the batch axis really is
one is for self_test.py to find out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.errors import ModelError
from headrace.protocol.messages import Fit, ModelSpec, SizeClassSpec, TensorSpec
from headrace.workers.engine import InputPlan
from headrace.workers.front_end import ImageModel, add_front_end
from headrace.workers.onnx_model import DYNAMIC, OnnxModel, OnnxTensor

#: Name of the one size class of a model that takes plain tensors. Its height and width are 0.
TENSOR_CLASS = "tensor"

#: ``batch`` of a model whose inputs share no first axis: every run takes one frame.
UNBATCHED = 0


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input as the session is fed. ``row_shape`` leaves the batch axis out; a model input without one
    has ``has_batch`` False and is fed the single row of its buffer."""

    name: str
    feed_name: str
    dtype: str
    row_shape: tuple[int, ...]
    has_batch: bool
    is_image: bool


@dataclass(frozen=True, slots=True)
class ModelIO:
    """Everything about a model's inputs. ``batch`` is DYNAMIC, UNBATCHED, or the graph's fixed batch size.

    Invariant: ``classes`` is not empty and every class fits the graph's fixed height and width.
    """

    model: OnnxModel
    inputs: tuple[ModelInput, ...]
    batch: int
    classes: tuple[SizeClassSpec, ...]
    described: tuple[TensorSpec, ...]

    @property
    def has_open_shape(self) -> bool:
        """True when a row may have more than one shape within a size class (dynamic tensor models)."""
        return any(DYNAMIC in i.row_shape for i in self.inputs if not i.is_image)

    def plans(self, size_class: SizeClassSpec) -> tuple[InputPlan, ...]:
        """Return how each input of one row is staged for a size class."""
        return tuple(
            InputPlan(
                i.name,
                i.dtype,
                (size_class.height, size_class.width, i.row_shape[2]) if i.is_image else i.row_shape,
                i.is_image,
            )
            for i in self.inputs
        )


def describe(spec: ModelSpec, model: OnnxModel) -> ModelIO:
    """Work out the inputs of ``model`` as ``spec`` wants it served; adds the uint8 front end to image models.

    Raises ModelError when the graph and the specification do not go together.
    """
    if not model.inputs:
        raise ModelError(f"model {model.label}: the graph has no inputs")
    for tensor in model.inputs:
        if tensor.shape is None:
            raise ModelError(f"model {model.label}: input {tensor.name} does not state its number of axes")
    if spec.image is None:
        io = _describe_tensors(spec, model)
    else:
        image_model = add_front_end(model, spec.image)
        io = _describe_image(spec, image_model, spec.image.channels)
    return replace(io, described=tuple(_described(tensor, io) for tensor in model.inputs))


def _describe_tensors(spec: ModelSpec, model: OnnxModel) -> ModelIO:
    first = model.inputs[0].shape or ()
    batch = first[0] if first else UNBATCHED
    if len(first) == 1 and batch > 1:
        # A vector: a fixed batch of numbers is so much rarer that it is not even asked for.
        batch = UNBATCHED
    if any(not _has_batch(tensor, batch) for tensor in model.inputs):
        # Some fixed sizes differ: the first axes are no batch, unless they are the exporter's usual 1.
        batch = 1 if batch == 1 else UNBATCHED
    inputs = tuple(_model_input(tensor, tensor.name, batch) for tensor in model.inputs)
    if len(spec.size_classes) > 1:
        raise ModelError(
            f"model {model.label}: takes plain tensors and has one size class, {len(spec.size_classes)} are"
            " configured"
        )
    classes = spec.size_classes or (SizeClassSpec(TENSOR_CLASS, 0, 0, fit=Fit.EXACT),)
    return ModelIO(model, inputs, batch, classes, ())


def _describe_image(spec: ModelSpec, image_model: ImageModel, channels: int) -> ModelIO:
    model, source = image_model.model, image_model.source
    inputs = []
    for tensor in model.inputs:
        if tensor.name == image_model.feed_name:
            shape = (image_model.height, image_model.width, channels)
            inputs.append(ModelInput(source.name, tensor.name, "uint8", shape, True, True))
        else:
            inputs.append(_model_input(tensor, tensor.name, image_model.batch))
    batch = image_model.batch
    if batch != 1 and not all(i.has_batch for i in inputs):
        if batch != DYNAMIC:
            names = ", ".join(i.name for i in inputs if not i.has_batch)
            raise ModelError(
                f"model {model.label}: fixed batch of {batch}, but inputs without that axis: {names}"
            )
        batch = 1
    return ModelIO(model, tuple(inputs), batch, _image_classes(spec, image_model), ())


def _image_classes(spec: ModelSpec, image_model: ImageModel) -> tuple[SizeClassSpec, ...]:
    label, height, width = image_model.model.label, image_model.height, image_model.width
    if not spec.size_classes:
        if DYNAMIC in (height, width):
            raise ModelError(
                f"model {label}: the graph leaves height or width open, so size classes must be configured"
            )
        return (SizeClassSpec(f"{height}x{width}", height, width),)
    for size_class in spec.size_classes:
        if height not in (DYNAMIC, size_class.height) or width not in (DYNAMIC, size_class.width):
            raise ModelError(
                f"model {label}: size class {size_class.name} is {size_class.height}x{size_class.width}, the"
                f" graph takes only {_length(height)}x{_length(width)}"
            )
    return spec.size_classes


def _has_batch(tensor: OnnxTensor, batch: int) -> bool:
    return bool(tensor.shape) and batch != UNBATCHED and tensor.shape is not None and tensor.shape[0] == batch


def _model_input(tensor: OnnxTensor, feed_name: str, batch: int) -> ModelInput:
    has_batch = _has_batch(tensor, batch)
    shape = tensor.shape or ()
    row_shape = shape[1:] if has_batch else shape
    return ModelInput(tensor.name, feed_name, tensor.dtype, row_shape, has_batch, is_image=False)


def _described(tensor: OnnxTensor, io: ModelIO) -> TensorSpec:
    shape = tensor.shape or ()
    has_batch = next(i.has_batch for i in io.inputs if i.name == tensor.name)
    return TensorSpec(tensor.name, tensor.dtype, shape[1:] if has_batch else shape)


def _length(axis: int) -> str:
    return "any" if axis == DYNAMIC else str(axis)
