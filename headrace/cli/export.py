"""``headrace export``: a torch model as an ONNX file, proven against torch."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli.common import json_option, set_up_logs, write_json

if TYPE_CHECKING:
    from headrace.export_sources import Source
    from headrace.torch_export import Exported
    from headrace.workers.onnx_model import OnnxTensor

_EPILOG = """\b
Examples:
  headrace export torchvision:resnet50 --out resnet50.onnx
  headrace export torchvision:resnet50 --weights my.pth --height 288 --width 288 --out mine.onnx
  headrace export my_models:detector --height 640 --width 640 --open-size --out detector.onnx
  headrace up --model resnet50.onnx

my_models:detector is a function without arguments that returns a torch.nn.Module, or (module, example
input). It is looked for where you stand, too.

Exit codes beside the usual: 65 torch can't export the model, or the file does not answer as torch does;
69 torch, torchvision or the weights are not here.
"""


@click.command("export", epilog=_EPILOG, short_help="A torch model as an ONNX file.")
@click.argument("model", metavar="torchvision:NAME|MODULE:FUNCTION")
@click.option("--out", "path", type=click.Path(path_type=Path), required=True, help="The ONNX file to write.")
@click.option(
    "--height",
    type=click.IntRange(1, 65_536),
    help="Height of the image in pixels. Default for torchvision: what the weights were trained on.",
)
@click.option("--width", type=click.IntRange(1, 65_536), help="Width of the image in pixels, likewise.")
@click.option(
    "--channels", type=click.IntRange(1, 4), help="Channels of the image, for a function (default 3)."
)
@click.option(
    "--open-size",
    is_flag=True,
    help="Leave height and width open too, for several size classes. Needs a model that takes any size.",
)
@click.option(
    "--weights",
    metavar="NAME|FILE|none",
    help="For torchvision: one of its weights, a file with a state dict, or none for random ones."
    " Default: the newest it has, downloaded once.",
)
@click.option(
    "--opset", type=click.IntRange(18, 64), default=18, show_default=True, help="Opset of the ONNX file."
)
@json_option("Print one JSON object on stdout.")
def command(
    *,
    model: str,
    path: Path,
    height: int | None,
    width: int | None,
    channels: int | None,
    open_size: bool,
    weights: str | None,
    opset: int,
    as_json: bool,
) -> int:
    """Write a torch model to ONNX with an open batch axis.

    The file is put in place only when ONNX Runtime answers two different inputs, of one row and of three, as
    torch does; the largest difference is told. What is printed beside it is a table for a configuration.

    The code that is named is imported and run. Needs `pip install 'headrace[cpu,export]'`.
    """
    set_up_logs()
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"{path.parent}: no such folder", param_hint="--out")
    from headrace.export_sources import Wishes, find_source
    from headrace.torch_export import export

    # What torchvision says of a download, and a function of what it does, is no part of the result.
    with contextlib.redirect_stdout(sys.stderr):
        source = find_source(model, Wishes(height, width, channels, weights))
        exported = export(source, path, opset=opset, has_open_size=open_size)
    if as_json:
        write_json(_as_object(source, exported))
    else:
        click.echo(_as_text(source, exported))
    return 0


def _as_object(source: Source, exported: Exported) -> dict[str, object]:
    return {
        "path": str(exported.path),
        "weight_files": [str(file) for file in exported.weight_files],
        "bytes": exported.nbytes,
        "opset": exported.opset,
        "model": source.label,
        "weights": source.weights,
        "inputs": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in exported.inputs],
        "outputs": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "max_abs_difference": each.absolute,
                "max_rel_difference": each.relative,
            }
            for tensor, each in zip(exported.outputs, exported.differences, strict=True)
        ],
        "mean": source.mean,
        "std": source.std,
        "notes": exported.notes,
    }


def _as_text(source: Source, exported: Exported) -> str:
    """Say what was written in comments, and what a configuration needs as TOML."""
    from headrace.quick_model import model_name

    weights = f", weights {source.weights}" if source.weights else ""
    lines = [
        f"# {source.label}{weights}: {exported.nbytes / 1e6:.1f} MB, opset {exported.opset}",
        *(f"# takes {_tensor(tensor)}" for tensor in exported.inputs),
        *(f"# gives {_tensor(tensor)}" for tensor in exported.outputs),
        "# equal to torch on two inputs, of 1 and of 3 rows; largest difference "
        + ", ".join(
            f"{d.name} {d.absolute:.1e} ({d.relative:.1e} of the output)" for d in exported.differences
        ),
        *(f"# note: {note}" for note in exported.notes),
        "[[models]]",
        f'name = "{model_name(exported.path)}"',
        f'path = "{exported.path.resolve()}"',
    ]
    if exported.weight_files:
        names = ", ".join(f'"{file.name}"' for file in exported.weight_files)
        lines.append(f"extra_files = [{names}]")
    if source.is_classifier:
        lines.append('adapter = "classify"')
    return "\n".join([*lines, *_image_lines(source, exported)])


def _image_lines(source: Source, exported: Exported) -> list[str]:
    if len(source.example) != 1 or source.example[0].ndim != 4:
        return []
    _, channels, height, width = source.example[0].shape
    if channels not in (1, 3):
        return []
    lines = ["[models.image]"]
    if channels == 1:
        lines += ['color = "gray"', "channels = 1"]
    if source.mean and source.std:
        lines += [
            f"scale = {1 / 255}",
            f"mean = [{', '.join(f'{value:g}' for value in source.mean)}]",
            f"std = [{', '.join(f'{value:g}' for value in source.std)}]",
        ]
    else:
        lines.append("# scale, mean and std: as the model was trained")
    if any(axis < 0 for axis in (exported.inputs[0].shape or ())[2:]):
        lines += ["[[models.size_classes]]", f"height = {height}", f"width = {width}"]
    return lines


def _tensor(tensor: OnnxTensor) -> str:
    shape = ", ".join("any" if axis < 0 else str(axis) for axis in tensor.shape or ())
    return f"{tensor.name}: {tensor.dtype} [{shape}]"
