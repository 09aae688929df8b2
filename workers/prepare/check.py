"""``headrace prepare --check``: is a prepared folder still what it was, and does it still answer alike?

Hashes first, since nothing else counts for a file that was changed. Then every file runs the seeded frames
that it ran when it was made: rows against rows alone, mean and size of its outputs against those noted then,
and all of it against FP32. The limits have room for another CPU, whose kernels round otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import ModelError
from headrace.prepared import FileEntry, Manifest, OutputEntry, Precision, hash_file, read_manifest
from headrace.protocol.messages import Color, Fit, ImageInput, ModelSpec, Oversize, SizeClassSpec
from headrace.workers.model_io import describe
from headrace.workers.onnx_model import read_model
from headrace.workers.prepare.batch_axis import prove_rows
from headrace.workers.prepare.folder import CHECK_FRAMES, CHECK_SEED, ROW_TOLERANCE
from headrace.workers.prepare.frames import gather
from headrace.workers.prepare.judge import FrameJudge, output_figures

#: Mean and root mean square of an output may have moved by this share of the latter. INT8 steps are coarse.
OUTPUT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-3, "fp16": 1e-2, "int8": 5e-2}

#: A file may differ from FP32 by this many times what it did when it was made. INT8 kernels of another
#: instruction set saturate otherwise, and a sum in another order tips a rounding over.
SLACK = 1.5

#: ... and by this much in any case, relative to the output.
LEAST_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found: one line each. No ``faults``: the folder is what it was."""

    passed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def check_folder(folder: Path, threads: int = 0) -> Checked:
    """Check a prepared folder. Raises ModelError when it has no manifest that can be read."""
    manifest = read_manifest(folder)
    checked = Checked()
    for variant in manifest.variants.values():
        for entry in variant.files:
            fault = _file_fault(folder, entry)
            if fault:
                checked.faults.append(fault)
            else:
                checked.passed.append(f"{entry.name}: hash as in the manifest")
    if checked.faults:
        return checked  # a changed file is not run
    for precision in manifest.variants:
        try:
            checked.passed.append(_run(folder, manifest, precision, threads))
        except ModelError as error:
            checked.faults.append(str(error))
    return checked


def _file_fault(folder: Path, entry: FileEntry) -> str:
    path = folder / entry.name
    try:
        nbytes = path.stat().st_size
        if nbytes != entry.nbytes:
            return f"{entry.name}: {nbytes} bytes, the manifest says {entry.nbytes}: the file was changed"
        found = hash_file(path)
    except OSError as error:
        return f"{entry.name}: can't be read: {error.strerror}"
    if found != entry.sha256:
        return f"{entry.name}: sha256 {found}, the manifest says {entry.sha256}: the file was changed"
    return ""


def _run(folder: Path, manifest: Manifest, precision: Precision, threads: int) -> str:
    variant = manifest.variants[precision]
    path = folder / variant.files[0].name
    spec = spec_of(manifest)
    model = read_model(str(path), label=path.name)
    rows = gather(describe(spec, model), spec, (), CHECK_FRAMES, per_class=CHECK_FRAMES, seed=CHECK_SEED)
    worst = max(prove_rows(model, feed, ROW_TOLERANCE[precision]) for feed in rows.joined())
    figures = output_figures(path, rows, threads)
    for entry in variant.seeded_outputs:
        _check_output(path, entry, figures, OUTPUT_TOLERANCE[precision])
    text = (
        f"{path.name}: rows of a batch equal the same rows alone (difference {worst:.1e}), outputs as noted"
    )
    if precision == "fp32":
        return text
    master = folder / manifest.variants["fp32"].files[0].name
    judge = FrameJudge(
        master, rows, rows.placements, manifest.adapter, dict(manifest.adapter_options), threads
    )
    compared = judge(path).figures()
    limit = max(variant.seeded_difference * SLACK, LEAST_DIFFERENCE)
    found = compared["max_rel"]
    if compared["non_finite"] or not found <= limit:
        raise ModelError(
            f"{path.name}: differs from FP32 by {found:.3g} of the output on seeded frames, limit {limit:.3g}"
        )
    return f"{text}; {found:.3g} from FP32, limit {limit:.3g}"


def _check_output(
    path: Path, entry: OutputEntry, figures: dict[str, tuple[float, float]], tolerance: float
) -> None:
    mean, rms = figures.get(entry.name, (float("nan"), float("nan")))
    if not max(abs(mean - entry.mean), abs(rms - entry.rms)) <= tolerance * entry.rms:
        raise ModelError(
            f"{path.name}: output {entry.name} is not what it was on seeded frames: mean {mean:.4g} and root"
            f" mean square {rms:.4g}, noted {entry.mean:.4g} and {entry.rms:.4g}"
        )


def spec_of(manifest: Manifest) -> ModelSpec:
    """Return the model as a broker describes it to workers, without files."""
    image = manifest.served_image()
    return ModelSpec(
        manifest.name,
        "1",
        image=ImageInput(Color(image.color), image.channels, pad_value=image.pad_value) if image else None,
        size_classes=tuple(
            SizeClassSpec(c.label, c.height, c.width, c.max_batch_size, Fit(c.fit))
            for c in manifest.size_classes
        ),
        oversize=Oversize(manifest.oversize),
        adapter=manifest.adapter,
        adapter_options=dict(manifest.adapter_options),
    )
