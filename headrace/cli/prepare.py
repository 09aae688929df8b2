"""``headrace prepare``: a model made ready to be served, and a prepared folder checked again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.common import json_option, say, set_up_logs, write_json
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.prepared import Manifest
    from headrace.protocol.messages import ImageInput, SizeClassSpec
    from headrace.workers.prepare.folder import PrepareOptions
    from headrace.workers.prepare.metrics import Tolerance

_EPILOG = """\b
Examples:
  headrace prepare resnet50.onnx --out resnet50 --adapter classify --labels labels.txt
  headrace prepare detector.onnx --out detector --size-class 384x640 --size-class 640x640 \\
      --color bgr --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5 --adapter text --calibration clips/
  headrace prepare resnet50.onnx --out resnet50 --int8 --calibration photos/ \\
      --tolerance int8.min_top1_agreement=0.97
  headrace prepare --check resnet50
  headrace up --config pool.toml      # with path = "resnet50" in its [[models]]

Exit codes beside the usual: 1 --check found a difference; 65 the model can't be prepared as asked. The first
word of the error is its reason, which stays the same between releases: docs/models.md lists them.
"""


@click.command("prepare", epilog=_EPILOG, short_help="Make a model ready to be served.")
@click.argument("model", metavar="MODEL.onnx|DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--check", is_flag=True, help="Check the prepared folder DIR again instead of making one.")
@click.option("--force", is_flag=True, help="Replace the folder if it exists.")
@click.option("--name", help="Name of the model. Default: that of its file.")
@click.option("--fp16/--no-fp16", default=True, show_default=True, help="Make the file for a GPU.")
@click.option("--int8/--no-int8", default=False, show_default=True, help="Make the INT8 file for a CPU.")
@click.option(
    "--calibration",
    multiple=True,
    metavar="FOLDER|VIDEO|demo",
    help="Pictures and videos to measure with; may be repeated. Without any: seeded noise, and it says so.",
)
@click.option(
    "--frames", type=click.IntRange(2, 10_000), default=32, show_default=True, help="How many of them."
)
@click.option(
    "--size-class",
    "sizes",
    multiple=True,
    metavar="HEIGHTxWIDTH",
    help="A size class; may be repeated. Default: the graph's own fixed size.",
)
@click.option("--fit", type=click.Choice(["exact", "pad", "letterbox"]), default="pad", show_default=True)
@click.option("--max-batch-size", type=click.IntRange(1, 1024), default=8, show_default=True)
@click.option(
    "--tensors", is_flag=True, help="Take the inputs as plain tensors, even one that looks like images."
)
@click.option("--color", type=click.Choice(["rgb", "bgr", "gray"]), help="Channel order of the model.")
@click.option("--scale", type=float, help="Applied to pixels of 0 to 255 first. Default: 1/255; 1 for uint8.")
@click.option("--mean", metavar="A,B,C", help="Subtracted after scaling, per channel.")
@click.option("--std", metavar="A,B,C", help="Divided by last, per channel.")
@click.option("--pad-value", type=click.IntRange(0, 255), default=0, show_default=True)
@click.option(
    "--adapter", default="tensors", show_default=True, help="What becomes of the outputs, and the metric."
)
@click.option(
    "--adapter-option", "adapter_options", multiple=True, metavar="KEY=JSON", help="May be repeated."
)
@click.option("--labels", type=click.Path(path_type=Path), help="A text file, one label a line.")
@click.option(
    "--tolerance",
    "limits",
    multiple=True,
    metavar="PRECISION.LIMIT=NUMBER",
    help="A limit other than the default, as in fp16.max_rel=0.01; may be repeated.",
)
@click.option("--threads", type=click.IntRange(0, 1024), default=0, show_default=True, help="0 = all cores.")
@json_option("Print the manifest, or what the check found, as one JSON object on stdout.")
def command(*, model: Path, out: Path | None, check: bool, as_json: bool, **given: Any) -> int:
    """Prepare MODEL.onnx: open and prove its batch axis, fold the uint8 front end in, make FP16 and INT8.

    Every file is compared with FP32 on frames and refused over tolerance. What is left is a folder that a
    configuration names as `path`, and from which each worker gets the file for its device.
    """
    set_up_logs()
    if check:
        return _check(model, given["threads"], as_json)
    if out is None:
        raise click.UsageError("--out DIR is missing: where the folder is to be made")
    if out.suffix == ".onnx":
        raise click.BadParameter(
            f"{out}: a folder is made, whose name may not end in .onnx", param_hint="--out"
        )
    from headrace.workers.prepare.folder import prepare

    manifest = prepare(_options(model, out, given), say)
    if as_json:
        write_json(manifest.model_dump(mode="json"))
    else:
        click.echo(_as_text(manifest, out))
    return 0


def _check(folder: Path, threads: int, as_json: bool) -> int:
    from headrace.workers.prepare.check import check_folder

    found = check_folder(folder, threads)
    if as_json:
        write_json({"folder": str(folder), "faults": found.faults, "passed": found.passed})
    else:
        for line in (*found.passed, *(f"FAULT {fault}" for fault in found.faults)):
            click.echo(line)
    return 1 if found.faults else 0


def _options(model: Path, out: Path, given: dict[str, Any]) -> PrepareOptions:
    from headrace.quick_model import model_name
    from headrace.workers.prepare.folder import PrepareOptions

    return PrepareOptions(
        source=model,
        out=out,
        name=given["name"] or model_name(model),
        image=_image(model, given),
        size_classes=_size_classes(given),
        adapter=given["adapter"],
        adapter_options=_adapter_options(given["adapter_options"], given["labels"]),
        has_fp16=given["fp16"],
        has_int8=given["int8"],
        calibration=given["calibration"],
        frame_count=given["frames"],
        tolerances=_tolerances(given["limits"], given["adapter"]),
        threads=given["threads"],
        is_forced=given["force"],
    )


def _image(path: Path, given: dict[str, Any]) -> ImageInput | None:
    """Return the image input: told by the options, or by a single input that looks like one."""
    from headrace.protocol.messages import Color, ImageInput
    from headrace.quick_model import guess_image
    from headrace.workers.onnx_model import read_model

    is_told = any(given[key] is not None for key in ("color", "scale", "mean", "std"))
    if given["tensors"]:
        if is_told or given["sizes"]:
            raise click.UsageError(
                "--tensors: there is no image to give a colour, a size or a normalisation to"
            )
        return None
    guessed = guess_image(read_model(str(path)))
    if guessed is None and not is_told:
        return None
    color = given["color"] or (guessed.color if guessed else "rgb")
    channels = 1 if color == "gray" else 3
    scale = given["scale"]
    if scale is None:
        scale = guessed.scale if guessed else 1 / 255
    mean, std = (_numbers(key, given[key], channels) for key in ("mean", "std"))
    return ImageInput(Color(color), channels, scale, mean, std, given["pad_value"])


def _numbers(key: str, text: str | None, channels: int) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) == 1:
        values *= channels
    if len(values) != channels or (key == "std" and 0.0 in values):
        raise click.BadParameter(
            f"{text!r}: {channels} numbers are needed, as in 0.5,0.5,0.5", param_hint=f"--{key}"
        )
    return values


def _size_classes(given: dict[str, Any]) -> tuple[SizeClassSpec, ...]:
    from headrace.protocol.messages import Fit, SizeClassSpec

    classes = []
    for text in given["sizes"]:
        found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
        if not found:
            raise click.BadParameter(f"{text!r}: HEIGHTxWIDTH in pixels is needed", param_hint="--size-class")
        height, width = (int(number) for number in found.groups())
        classes.append(SizeClassSpec(text, height, width, given["max_batch_size"], Fit(given["fit"])))
    return tuple(dict.fromkeys(classes))


def _adapter_options(pairs: tuple[str, ...], labels: Path | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    if labels is not None:
        try:
            lines = labels.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--labels {labels}: can't be read: {error}") from error
        options["labels"] = [line.strip() for line in lines if line.strip()]
    return options


def _tolerances(limits: tuple[str, ...], adapter: str) -> dict[str, Tolerance]:
    from dataclasses import fields, replace

    from headrace.workers.prepare.metrics import Tolerance, default_tolerance

    known = [each.name for each in fields(Tolerance)]
    found: dict[str, Tolerance] = {}
    for text in limits:
        parts = re.fullmatch(r"(fp16|int8)\.(\w+)=(.+)", text)
        if not parts or parts[2] not in known or not _is_number(parts[3]):
            raise click.BadParameter(
                f"{text!r}: fp16. or int8., one of {', '.join(known)}, = and a number are needed",
                param_hint="--tolerance",
            )
        precision = parts[1]
        before = found.get(precision) or default_tolerance(precision, adapter)
        found[precision] = replace(before, **{parts[2]: float(parts[3])})
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?([eE]-?\d+)?", text) is not None


def _as_text(manifest: Manifest, out: Path) -> str:
    """Return the table that a configuration needs, with what was made in comments."""
    lines = [f"# {out}: prepared from {manifest.source.name}"]
    for precision, variant in manifest.variants.items():
        size = sum(file.nbytes for file in variant.files) / 1e6
        lines.append(f"# {variant.files[0].name}: {size:.1f} MB")
        if precision == "fp16":
            lines.append(f"#   {len(variant.notes['kept_in_fp32'])} nodes kept in FP32")
    lines += ["[[models]]", f'name = "{manifest.name}"', f'path = "{out.resolve()}"']
    if "int8" in manifest.variants:
        lines.append('precision = "int8"  # on CPUs; GPUs get FP16')
    return "\n".join(lines)
