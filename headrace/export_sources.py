"""Where a torch model to be exported comes from: ``torchvision:NAME`` or ``module:function``.

The code named is imported and run, in this process: name only what you would run yourself. Not here: the
export and its proof (torch_export.py).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headrace.errors import ConfigError, LocalError, ModelError
from headrace.exit_codes import ExitCode
from headrace.workers.onnx_model import first_line

#: ONNX Runtime comes with cpu or gpu, of which there must be exactly one.
INSTALL_HINT = "pip install 'headrace[cpu,export]', or 'headrace[gpu,export]' beside a GPU"

#: Height and width of a torchvision model whose weights name none: what most of its classifiers were
#: trained on.
USUAL_SIDE = 224


class MissingForExportError(LocalError):
    """A package or a download that export needs is not here: names it and the remedy."""

    exit_code: ClassVar[int] = ExitCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says of the input. ``channels`` None: 3. ``weights``: "default", "none", a name
    that torchvision has for the model, or a file with a state dict."""

    height: int | None = None
    width: int | None = None
    channels: int | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A torch module in evaluation mode, on the CPU, with one example of its inputs, [rows, ...] each.

    ``mean`` and ``std`` are what its weights ask of an image of 0 to 1, empty where nobody says."""

    label: str
    module: Any
    example: tuple[Any, ...]
    input_names: tuple[str, ...] = ()
    weights: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    is_classifier: bool = False


def find_source(spec: str, wishes: Wishes) -> Source:
    """Make the model that ``spec`` names.

    Raises ConfigError for a name or wish that can't be met, MissingForExportError without torch, torchvision
    or the weights, ModelError when what the name stands for is no model.
    """
    kind, colon, name = spec.partition(":")
    if not colon or not kind or not name:
        raise ConfigError(f"{spec!r} names no model: write torchvision:resnet50, or module:function")
    torch = import_torch()
    if kind == "torchvision":
        return _from_torchvision(torch, name, wishes)
    return _from_function(torch, spec, kind, name, wishes)


def import_torch() -> Any:
    """Return the module torch, once everything that export needs is there. Raises MissingForExportError."""
    for package in ("torch", "onnxscript", "onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise MissingForExportError(f"export needs {package}, which is not installed: {INSTALL_HINT}")
    import torch

    return torch


# -- torchvision -----------------------------------------------------------------------------------------


def _from_torchvision(torch: Any, name: str, wishes: Wishes) -> Source:
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingForExportError(
            f"torchvision:{name} needs torchvision ({error}): {INSTALL_HINT}"
        ) from error
    known: Sequence[str] = models.list_models()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(known)}, such as {known[0]}"
        raise ConfigError(f"torchvision has no model {name!r}: {hint}")
    if wishes.channels not in (None, 3):
        raise ConfigError(f"--channels {wishes.channels}: the models of torchvision take 3")
    wanted = wishes.weights or "default"
    file = Path(wanted)
    chosen = None
    if wanted.lower() != "none" and not file.is_file():
        chosen = _choose_weights(name, wanted, models.get_model_weights(name))
    options: dict[str, Any] = {"weights": chosen}
    if chosen is None and "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # a detector would fetch those of the network inside it
    try:
        module = models.get_model(name, **options)
    except OSError as error:  # URLError is one
        raise MissingForExportError(
            f"weights {chosen} of {name} can't be downloaded ({first_line(error)}): give a state dict with"
            " --weights FILE, or --weights none for random ones"
        ) from error
    told = str(chosen).rpartition(".")[2] if chosen is not None else "random"
    if chosen is None and wanted.lower() != "none":
        _load_state(torch, module, file)
        told = str(file)
    trained = _Trained.of(chosen)
    example = torch.zeros(2, 3, wishes.height or trained.height, wishes.width or trained.width)
    return Source(
        name,
        module.eval(),
        (example,),
        ("images",),
        told,
        trained.mean,
        trained.std,
        trained.is_classifier,
    )


def _choose_weights(name: str, wanted: str, known: Any) -> Any:
    entries = {entry.name: entry for entry in known}
    if wanted.lower() == "default":
        if not entries:
            raise ConfigError(f"torchvision has no weights for {name}: use --weights none for random ones")
        return known.DEFAULT
    if wanted.upper() in entries:
        return entries[wanted.upper()]
    has = f"torchvision has {', '.join(entries)}" if entries else "torchvision has none"
    raise ConfigError(
        f"--weights {wanted}: neither a file nor weights of {name}: {has}; default takes the newest,"
        " none random ones"
    )


@dataclass(frozen=True, slots=True)
class _Trained:
    """What weights were trained with; the preset that comes with them says it."""

    height: int = USUAL_SIDE
    width: int = USUAL_SIDE
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    is_classifier: bool = False

    @classmethod
    def of(cls, weights: Any) -> _Trained:
        if weights is None:
            return cls()
        preset = weights.transforms()
        size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None) or USUAL_SIDE
        sides = tuple(size) if isinstance(size, list | tuple) else (size,)
        return cls(
            int(sides[0]),
            int(sides[-1]),
            tuple(float(value) for value in getattr(preset, "mean", ())),
            tuple(float(value) for value in getattr(preset, "std", ())),
            type(preset).__name__ == "ImageClassification",
        )


def _load_state(torch: Any, module: Any, file: Path) -> None:
    try:
        # weights_only: tensors alone are read, no code of the file runs.
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever reading a strange file raises; torch's words advise to run its code
        raise ModelError(f"--weights {file}: not a file of tensors that torch.save wrote") from error
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"--weights {file}: not a state dict of this model: {reason}") from error


# -- a function of one's own -----------------------------------------------------------------------------


def _from_function(torch: Any, spec: str, module_name: str, attribute: str, wishes: Wishes) -> Source:
    if wishes.weights is not None:
        raise ConfigError(
            f"--weights {wishes.weights}: {spec} loads its weights itself; leave the option out"
        )
    function = _find_function(spec, module_name, attribute)
    try:
        made = function()
    except Exception as error:
        raise ModelError(f"{spec} failed: {type(error).__name__}: {first_line(error)}") from error
    example: Any = None
    if isinstance(made, tuple) and len(made) == 2:
        made, example = made
    if not isinstance(made, torch.nn.Module):
        raise ModelError(
            f"{spec} gave a {type(made).__name__}: it must return a torch.nn.Module, or one with an example"
            " input: (module, tensor) or (module, (tensor, ...))"
        )
    if example is None:
        if wishes.height is None or wishes.width is None:
            raise ConfigError(
                f"{spec} returned no example input: give --height and --width of an image, or return"
                " (module, example)"
            )
        inputs: tuple[Any, ...] = (torch.zeros(2, wishes.channels or 3, wishes.height, wishes.width),)
    else:
        inputs = _example(torch, spec, example, wishes)
    return Source(spec, made.cpu().eval(), inputs)


def _find_function(spec: str, module_name: str, attribute: str) -> Any:
    here = os.getcwd()  # noqa: PTH109 - an entry of sys.path is a text
    if here not in sys.path:
        # The command's own sys.path begins with its folder; people name a file where they stand.
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # the module is user code: importing it may raise anything
        raise ConfigError(
            f"{spec}: module {module_name} can't be imported here: {type(error).__name__}:"
            f" {first_line(error)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{spec}: module {module_name} has no function {attribute}")
    return found


def _example(torch: Any, spec: str, example: Any, wishes: Wishes) -> tuple[Any, ...]:
    given = [f"--{name}" for name in ("height", "width", "channels") if getattr(wishes, name) is not None]
    if given:
        raise ConfigError(f"{given[0]}: {spec} returned an example input, which already says the shape")
    inputs = tuple(example) if isinstance(example, list | tuple) else (example,)
    for each in inputs:
        if not isinstance(each, torch.Tensor) or each.ndim == 0 or 0 in each.shape:
            what = f"a {type(each).__name__}" if not isinstance(each, torch.Tensor) else list(each.shape)
            raise ModelError(f"{spec}: an example input is {what}: give tensors of shape [rows, ...]")
    if not inputs or len({each.shape[0] for each in inputs}) != 1:
        raise ModelError(f"{spec}: the example inputs must have the same number of rows, and at least one")
    return inputs
