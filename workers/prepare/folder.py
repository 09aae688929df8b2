"""``headrace prepare``: a folder of files from one ONNX file, each proven against its FP32 master.

Theory of operation: everything is made in a temporary folder beside the wanted one and renamed into place
when all of it holds, so that a folder is there whole or not at all; a refusal leaves nothing. The order is
fixed: the batch axis and the uint8 front end give the FP32 master; its rows are proven; FP16 and INT8 are
made from it and judged by it; then the manifest is written, with the hash of each file.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import headrace
from headrace.config_models import ImageSection, SizeClassSection
from headrace.prepared import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    OutputEntry,
    Precision,
    SourceEntry,
    TensorEntry,
    VariantEntry,
    hash_file,
)
from headrace.protocol.messages import ImageInput, ModelSpec, Oversize, SizeClassSpec, Value
from headrace.workers.adapters import check_adapter
from headrace.workers.front_end import add_front_end
from headrace.workers.model_io import describe
from headrace.workers.onnx_model import DYNAMIC, OnnxModel, OnnxTensor, read_model
from headrace.workers.prepare.batch_axis import PROOF_ROWS, open_batch_axis, prove_rows
from headrace.workers.prepare.fp16_search import Fp16Report, make_fp16
from headrace.workers.prepare.frames import Rows, gather
from headrace.workers.prepare.graph import read_source, save, tensor_types
from headrace.workers.prepare.judge import FrameJudge, output_figures
from headrace.workers.prepare.metrics import Comparison, Tolerance, default_tolerance
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

#: Largest difference between a row of a batch and the row alone, relative to the output: as the workers'
#: self-test has it. FP16 and INT8 files round, so that another order of sums may tip a value over.
ROW_TOLERANCE: dict[str, float] = {"fp32": 1e-3, "fp16": 2e-2, "int8": 5e-2}

#: Seeded frames of each size class that a later check runs again, and their seed.
CHECK_FRAMES = 2
CHECK_SEED = 20_241_201

#: Frames that FP16 is measured on. Each runs through both precisions node by node, some three times as long
#: as plainly.
FP16_FRAMES = 12

#: Which packages a manifest tells the versions of.
_TOOLS = ("onnx", "onnxruntime", "onnxruntime-gpu", "numpy")

#: Why a node stays in FP32, in words; the number beside its name is the magnitude, or the error it adds.
_WHY = {
    "overflow": "values too large for FP16",
    "weights": "weights too large for FP16",
    "precision": "they add most to the error",
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What to make. ``image`` None: plain tensors. ``tolerances`` by precision; what it lacks is the default.

    ``calibration`` names folders, images, videos or "demo"; empty means seeded noise.
    """

    source: Path
    out: Path
    name: str
    image: ImageInput | None = None
    size_classes: tuple[SizeClassSpec, ...] = ()
    oversize: Oversize = Oversize.LETTERBOX
    adapter: str = "tensors"
    adapter_options: dict[str, Value] = field(default_factory=dict)
    has_fp16: bool = True
    has_int8: bool = False
    calibration: tuple[str, ...] = ()
    frame_count: int = 32
    tolerances: dict[str, Tolerance] = field(default_factory=dict)
    threads: int = 0
    is_forced: bool = False

    def tolerance(self, precision: str) -> Tolerance:
        """Return the limits of one precision."""
        return self.tolerances.get(precision) or default_tolerance(precision, self.adapter)


def prepare(options: PrepareOptions, say: Say = lambda _text: None) -> Manifest:
    """Make the folder ``options.out`` and return its manifest; ``say`` hears each step.

    Raises PrepareRefusedError with a stable reason when the model can't be prepared as asked, ModelError for
    a file that is no model, ConfigError for an adapter that does not take its options.
    """
    check_adapter(options.adapter, dict(options.adapter_options))
    if options.out.exists() and not options.is_forced:
        raise PrepareRefusedError(Reason.OUT_EXISTS, f"{options.out} exists: name another, or add --force")
    options.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _in_place(options.out) as folder:
        return _Preparation(options, folder, say).run()


@contextlib.contextmanager
def _in_place(out: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``out`` at the end, and is gone after an error."""
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        yield work
        work.chmod(0o755)
        for path in (*work.iterdir(), work):
            if path.is_file():
                path.chmod(0o644)  # weights apart are written for their owner alone
            _flush(path)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=work.parent))
            out.rename(old / out.name)
            work.rename(out)
            shutil.rmtree(old)
        else:
            work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Preparation:
    """One preparation. Everything but the source is in ``folder``."""

    def __init__(self, options: PrepareOptions, folder: Path, say: Say) -> None:
        self._options, self._folder, self._say = options, folder, say

    def run(self) -> Manifest:
        options = self._options
        source = read_source(options.source)
        master, files = self._make_master(source)
        spec = self._served_spec()
        io = describe(spec, master)
        path = self._folder / files[0].name
        difference = self._prove("fp32", path, spec)
        self._say(
            f"rows of a batch equal the same rows alone: {PROOF_ROWS} rows, difference {difference:.1e}"
        )
        frames = gather(io, spec, options.calibration, options.frame_count, per_class=2)
        self._say(f"measured on {frames.description}")
        noise = gather(io, spec, (), CHECK_FRAMES, per_class=CHECK_FRAMES, seed=CHECK_SEED)
        seeded = self._judge(path, noise)
        master_entry = VariantEntry(files=_entries(files), seeded_outputs=self._outputs(path, seeded))
        variants: dict[Precision, VariantEntry] = {"fp32": master_entry}
        if options.has_fp16:
            few = gather(io, spec, options.calibration, min(options.frame_count, FP16_FRAMES), per_class=2)
            variants["fp16"] = self._make_fp16(path, few, self._judge(path, frames), seeded, spec)
        if options.has_int8:
            variants["int8"] = self._make_int8(path, frames, seeded, spec)
        manifest = Manifest(
            name=options.name,
            source=SourceEntry(
                name=options.source.name,
                sha256=hash_file(options.source),
                weights={name: hash_file(Path(file)) for name, file in source.weights.items()},
            ),
            inputs=tuple(_tensor(tensor) for tensor in master.inputs),
            outputs=tuple(_tensor(tensor) for tensor in master.outputs),
            image=_image(options.image),
            size_classes=tuple(_size_class(each) for each in io.classes) if options.image else (),
            oversize=options.oversize.value,
            adapter=options.adapter,
            adapter_options=dict(options.adapter_options),
            frames=frames.description,
            rows_proven=PROOF_ROWS,
            rows_difference=difference,
            variants=variants,
            tools=_tools(),
        )
        text = manifest.model_dump_json(indent=2)
        (self._folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
        return manifest

    def _make_master(self, source: OnnxModel) -> tuple[OnnxModel, list[Path]]:
        """Write the FP32 master: open batch axis, uint8 front end."""
        options = self._options
        opened = open_batch_axis(source)
        if options.image is not None:
            image = add_front_end(opened, options.image)
            if DYNAMIC in (image.height, image.width) and not options.size_classes:
                raise PrepareRefusedError(
                    Reason.NO_SIZE,
                    f"model {source.label}: the graph leaves height or width open: name the sizes that it is"
                    " to be proven and served in with --size-class HEIGHTxWIDTH",
                )
            opened = image.model
        files = save(opened.proto, self._folder / "model.fp32.onnx", options.source.parent)
        return read_model(str(files[0]), label=options.source.name), files

    def _served_spec(self) -> ModelSpec:
        """Return how a broker describes the prepared files: their arithmetic is in the graph."""
        options = self._options
        image = options.image
        if image is not None:
            image = replace(image, scale=1.0, mean=(), std=())
        return ModelSpec(
            options.name,
            "1",
            image=image,
            size_classes=options.size_classes,
            oversize=options.oversize,
            adapter=options.adapter,
            adapter_options=options.adapter_options,
        )

    def _prove(self, precision: Precision, path: Path, spec: ModelSpec) -> float:
        model = read_model(str(path), label=f"{self._options.source.name} ({precision})")
        rows = gather(describe(spec, model), spec, (), PROOF_ROWS, per_class=PROOF_ROWS)
        return max(prove_rows(model, feed, ROW_TOLERANCE[precision]) for feed in rows.joined())

    def _judge(self, master: Path, rows: Rows) -> FrameJudge:
        options = self._options
        return FrameJudge(
            master, rows, rows.placements, options.adapter, options.adapter_options, options.threads
        )

    def _make_fp16(
        self, master: Path, frames: Rows, judge: FrameJudge, seeded: FrameJudge, spec: ModelSpec
    ) -> VariantEntry:
        tolerance = self._options.tolerance("fp16")
        out = self._folder / "model.fp16.onnx"
        types = tensor_types(read_model(str(master)))
        report = make_fp16(
            master, out, types, frames, lambda path: tolerance.breaches(judge(path)), self._options.threads
        )
        measured = judge(out)
        self._tell_fp16(report, measured)
        return self._entry("fp16", out, tolerance, measured, seeded, _fp16_notes(report), spec)

    def _make_int8(self, master: Path, frames: Rows, seeded: FrameJudge, spec: ModelSpec) -> VariantEntry:
        from headrace.workers.prepare.quantise import QuantSettings, quantise

        tolerance = self._options.tolerance("int8")
        out = self._folder / "model.int8.onnx"
        to_calibrate, to_judge = frames.split()
        report = quantise(
            master,
            out,
            to_calibrate,
            self._judge(master, to_judge),
            tolerance,
            QuantSettings(threads=self._options.threads),
        )
        self._say(
            f"INT8 ({report.method}): {_figures(report.comparison)}; {len(report.excluded)} layers left in"
            f" FP32{_names(e.name for e in report.excluded)}; {report.speed_ratio:.2f} x as fast as FP32 here"
        )
        return self._entry("int8", out, tolerance, report.comparison, seeded, report.as_dict(), spec)

    def _entry(
        self,
        precision: Precision,
        path: Path,
        tolerance: Tolerance,
        measured: Comparison,
        seeded: FrameJudge,
        notes: dict[str, Any],
        spec: ModelSpec,
    ) -> VariantEntry:
        self._prove(precision, path, spec)
        weights = path.with_name(f"{path.name}.weights")
        return VariantEntry(
            files=_entries([path, weights] if weights.exists() else [path]),
            tolerance=tolerance.as_dict(),
            measured=measured.figures(),
            seeded_difference=seeded(path).figures()["max_rel"],
            seeded_outputs=self._outputs(path, seeded),
            notes=notes,
        )

    def _outputs(self, path: Path, seeded: FrameJudge) -> tuple[OutputEntry, ...]:
        figures = output_figures(path, seeded.feeds, self._options.threads)
        return tuple(OutputEntry(name=name, mean=mean, rms=rms) for name, (mean, rms) in figures.items())

    def _tell_fp16(self, report: Fp16Report, measured: Comparison) -> None:
        self._say(
            f"FP16: {_figures(measured)}; {report.converted_count} nodes converted in {report.rounds}"
            f" round{'s' if report.rounds != 1 else ''}"
        )
        for why, meaning in _WHY.items():
            nodes = [f"{n.name} ({n.op_type}, {n.value:.3g})" for n in report.kept if n.why == why]
            if nodes:
                self._say(f"FP16: {len(nodes)} nodes stay in FP32, {meaning}: {', '.join(nodes)}")
        clamped = [each for each in report.clamped if each.tiny]
        if clamped:
            count = sum(each.tiny for each in clamped)
            self._say(
                f"FP16: {count} weights below 5.96e-8 lifted to it, in {len(clamped)} tensors"
                f"{_names(each.name for each in clamped)}"
            )


def _fp16_notes(report: Fp16Report) -> dict[str, Any]:
    return {
        "kept_in_fp32": [asdict(node) for node in report.kept],
        "clamped_initializers": [asdict(each) for each in report.clamped],
        "converted_nodes": report.converted_count,
        "rounds": report.rounds,
    }


def _entries(files: list[Path]) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(name=f.name, nbytes=f.stat().st_size, sha256=hash_file(f)) for f in files)


def _tensor(tensor: OnnxTensor) -> TensorEntry:
    return TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape or ())


def _image(image: ImageInput | None) -> ImageSection | None:
    if image is None:
        return None
    return ImageSection(
        color=image.color.value,
        channels=1 if image.channels == 1 else 3,
        scale=image.scale,
        mean=image.mean,
        std=image.std,
        pad_value=image.pad_value,
    )


def _size_class(each: SizeClassSpec) -> SizeClassSection:
    return SizeClassSection(
        name=each.name,
        height=each.height,
        width=each.width,
        max_batch_size=each.max_batch_size,
        fit=each.fit.value,
    )


def _tools() -> dict[str, str]:
    found = {"headrace": headrace.__version__, "python": platform.python_version()}
    for package in _TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _figures(comparison: Comparison) -> str:
    found = comparison.figures()
    task = "".join(f", {key} {value:.4g}" for key, value in comparison.task.items())
    return (
        f"max abs {found['max_abs']:.2g}, max rel {found['max_rel']:.2g}, cosine {found['cosine']:.5f}{task}"
    )


def _names(names: Iterator[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f" ({', '.join(listed[:8])}{more})" if listed else ""
