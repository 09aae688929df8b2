"""Export a torch model to ONNX with an open batch axis, and prove the file against the model.

Theory of operation. torch traces the module on an example of two rows (an axis of one row would become a
constant) and writes the graph; then torch and ONNX Runtime answer two different inputs, one of them a single
row and one of three. Only a file whose answers are the module's is put in place; what they differ by is
told. Not here: FP16, INT8 and the uint8 front end, which ``headrace prepare`` makes of the file.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.export_sources import Source, import_torch
from headrace.workers.onnx_model import DYNAMIC, OnnxModel, OnnxTensor, first_line, open_session, read_model
from headrace.workers.self_test import difference

#: What torch's exporter writes itself. A newer one is made of it by a converter, which does not know all
#: operators.
DEFAULT_OPSET = 18

#: Rows of the two inputs that the file is proven with: alone, and a number that no example had.
PROOF_ROWS = (1, 3)

#: Pixels by which the second input is larger where height and width are open: every usual stride divides it.
SIZE_STEP = 64

_SEED = 20240607

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output of the file is from torch's, over both inputs: the largest difference, and as a share
    of the output's largest magnitude."""

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Exported:
    """A file in place. ``notes`` are for people."""

    path: Path
    nbytes: int
    opset: int
    inputs: tuple[OnnxTensor, ...]
    outputs: tuple[OnnxTensor, ...]
    differences: tuple[Difference, ...]
    weight_files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def export(
    source: Source, path: Path, *, opset: int = DEFAULT_OPSET, has_open_size: bool = False
) -> Exported:
    """Write ``source`` to ``path``, which is replaced only by a file that was proven.

    ``has_open_size``: height and width of images are left open too. Weights of more than 1.5 GB are written
    beside it, since an ONNX file ends at 2 GB.

    Raises ModelError when torch can't export the model, when the batch axis (or the size) does not stay open,
    and when the file's answers differ.
    """
    torch = import_torch()
    if has_open_size and any(tensor.ndim != 4 for tensor in source.example):
        raise ModelError(f"{source.label}: --open-size is for images: inputs of four axes")
    names = _output_names(torch, source)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        with _quiet():
            _write(torch, source, made, names, opset, has_open_size)
        model = read_model(str(made), label=str(path))
        if model.opset != opset:  # the exporter only logs that it could not convert what it wrote
            raise ModelError(f"{source.label}: torch writes it in opset {model.opset}, not {opset}")
        _check_open(source, model, has_open_size)
        differences = _prove(torch, source, model, has_open_size)
        others = [file for file in made.parent.iterdir() if file != made]
        # Weights first: a reader that sees the new graph must find what it names.
        for file in (*others, made):
            shutil.move(file, path.with_name(file.name))
    placed = tuple(path.with_name(file.name) for file in others)
    return Exported(
        path,
        sum(file.stat().st_size for file in (path, *placed)),
        model.opset,
        model.inputs,
        model.outputs,
        differences,
        placed,
        tuple(_notes(model)),
    )


# -- export ----------------------------------------------------------------------------------------------


def _write(
    torch: Any, source: Source, path: Path, output_names: list[str], opset: int, has_open_size: bool
) -> None:
    # Two rows: torch takes an axis of one for a constant.
    example = tuple(_rows_of(torch, tensor, 2) for tensor in source.example)
    batch, auto = torch.export.Dim("batch", min=1), torch.export.Dim.AUTO
    axes: dict[int, Any] = {0: batch, 2: auto, 3: auto} if has_open_size else {0: batch}
    try:
        program = torch.onnx.export(
            source.module,
            example,
            dynamo=True,
            opset_version=opset,
            input_names=list(source.input_names) or None,
            output_names=output_names,
            dynamic_shapes=tuple(axes for _ in example),
            verbose=False,
        )
        _forget_origins(program.model)
        program.save(str(path))
    except Exception as error:  # torch's exporter has no public root of its error classes
        raise ModelError(
            f"{source.label}: torch can't export it with an open batch axis: {_innermost(error)}"
        ) from error


def _forget_origins(model: Any) -> None:
    """Take out what the exporter notes of each value and node: traces with file names of this machine."""
    for function in (model.graph, *model.functions.values()):
        function.metadata_props.clear()
        for node in function.all_nodes() if hasattr(function, "all_nodes") else function:
            node.metadata_props.clear()
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*function.inputs, *function.outputs):
            value.metadata_props.clear()
    model.metadata_props.clear()


def _output_names(torch: Any, source: Source) -> list[str]:
    """Name the outputs as ``forward`` returns them: by key, by number, or "output" alone."""
    found = _run_torch(torch, source, source.example)
    return list(found)


def _run_torch(torch: Any, source: Source, inputs: Sequence[Any], hint: str = "") -> dict[str, Any]:
    """Return what ``forward`` answers, by output name. Raises ModelError, which ends in ``hint``."""
    try:
        with torch.no_grad():
            answer = source.module(*inputs)
    except Exception as error:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
        raise ModelError(
            f"{source.label}: forward failed for {shapes}: {type(error).__name__}: {first_line(error)}{hint}"
        ) from error
    if isinstance(answer, torch.Tensor):
        named: dict[str, Any] = {"output": answer}
    elif isinstance(answer, Mapping):
        named = {str(key): value for key, value in answer.items()}
    elif isinstance(answer, list | tuple):
        named = {f"output_{number}": value for number, value in enumerate(answer)}
    else:
        named = {}
    if not named or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise ModelError(
            f"{source.label}: forward must return a tensor, or a tuple or dict of tensors, not"
            f" {_kind(answer)}: wrap the model in a module that does"
        )
    return named


def _rows_of(torch: Any, tensor: Any, rows: int) -> Any:
    """Return the first ``rows`` rows of a tensor, over again where it has fewer."""
    repeats = -(-rows // tensor.shape[0])
    return torch.cat([tensor] * repeats)[:rows].clone()


# -- proof -----------------------------------------------------------------------------------------------


def _check_open(source: Source, model: OnnxModel, has_open_size: bool) -> None:
    axes = {0: "the batch axis"} | ({2: "the height", 3: "the width"} if has_open_size else {})
    for tensor in model.inputs:
        for axis, what in axes.items():
            if tensor.shape is not None and tensor.shape[axis] != DYNAMIC:
                raise ModelError(
                    f"{source.label}: {what} of input {tensor.name} can't be left open: the model fixes it at"
                    f" {tensor.shape[axis]}"
                )


def _prove(torch: Any, source: Source, model: OnnxModel, has_open_size: bool) -> tuple[Difference, ...]:
    """Compare the file with torch on two inputs. Raises ModelError when they differ beyond rounding."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = open_session(model, options)
    largest: dict[str, Difference] = {}
    for kind, rows in enumerate(PROOF_ROWS):
        step = SIZE_STEP if has_open_size and kind else 0
        probes = [_probe(torch, tensor, rows, kind, step) for tensor in source.example]
        hint = ": without --open-size the size of the example is kept" if step else ""
        expected = {name: value.numpy() for name, value in _run_torch(torch, source, probes, hint).items()}
        feeds = {each.name: probe.numpy() for each, probe in zip(model.inputs, probes, strict=True)}
        try:
            answers: Sequence[Array] = session.run(list(expected), feeds)
        except Exception as error:
            raise ModelError(
                f"{source.label}: the exported file fails for {rows} rows, where torch does not:"
                f" {first_line(error)}"
            ) from error
        for (name, wanted), found in zip(expected.items(), answers, strict=True):
            what = _compare(wanted, found)
            if what:
                raise ModelError(
                    f"{source.label}: output {name} of the file is not torch's for {rows} rows: {what}"
                )
            largest[name] = _larger(largest.get(name), _measure(name, wanted, found))
    return tuple(largest.values())


def _probe(torch: Any, tensor: Any, rows: int, kind: int, size_step: int) -> Any:
    """Return a test input: noise for numbers with a fraction, the example's own values for others, which may
    be indexes into a table of unknown length."""
    rng = np.random.default_rng([_SEED, kind])
    shape = [rows, *tensor.shape[1:]]
    if size_step:
        shape[2:] = [side + size_step for side in shape[2:]]
    if tensor.is_floating_point():
        return torch.from_numpy(rng.standard_normal(shape)).to(tensor.dtype)
    values = tensor.flatten().numpy()
    return torch.from_numpy(rng.choice(values, size=shape))


def _compare(wanted: Array, found: Array) -> str:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return f"{found.dtype} {list(found.shape)} against {wanted.dtype} {list(wanted.shape)}"
    return difference(wanted, found)


def _measure(name: str, wanted: Array, found: Array) -> Difference:
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    absolute = float(np.max(np.abs(a - b), initial=0.0, where=finite))
    magnitude = float(np.max(np.abs(a), initial=0.0, where=finite))
    return Difference(name, absolute, absolute / magnitude if magnitude else 0.0)


def _larger(first: Difference | None, second: Difference) -> Difference:
    if first is None:
        return second
    return Difference(second.name, max(first.absolute, second.absolute), max(first.relative, second.relative))


# -- words -----------------------------------------------------------------------------------------------


def _notes(model: OnnxModel) -> Iterator[str]:
    for tensor in model.outputs:
        if not tensor.shape or tensor.shape[0] != DYNAMIC:
            yield f"output {tensor.name} has no row for each frame: workers will run batches of one"


def _innermost(error: BaseException) -> str:
    """Return the first line of the error that the others were raised from: torch's own first line is a
    heading."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _kind(answer: object) -> str:
    if isinstance(answer, Mapping):
        return f"a dict with {', '.join(sorted({type(value).__name__ for value in answer.values()}))}"
    if isinstance(answer, list | tuple):
        kinds = sorted({type(value).__name__ for value in answer})
        return f"a {type(answer).__name__} of {', '.join(kinds) or 'nothing'}"
    return f"a {type(answer).__name__}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on its own innards off stderr; what matters comes as an error."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
