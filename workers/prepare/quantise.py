"""INT8 for CPUs: a QDQ graph by static quantisation, as good as a tolerance asks for, or none.

Theory of operation: the FP32 master is optimised and its activations are calibrated once for each method
(``ranges.py``); each method gives a candidate, which is judged against FP32 on frames that it was not
calibrated on, and the best stays. While that one breaks the tolerance, the layers that add most noise
(``layer_noise.py``) are left in FP32, one in the first rounds, then two, four ..., and it is made again from
the same ranges. That ends after some rounds, or with half of the nodes in FP32: then the model is refused
with the best figures there were.

The uint8 front end stays outside: a transposition and the arithmetic of pixels have nothing to gain. Nodes
that spell out a GELU are made one before (ONNX Runtime's own, in its own domain): as one it is fast in float,
while five with conversions between them cost the text detector half of what INT8 gains.

Types are what ONNX Runtime's own text on ``quantize_static`` advises for CPUs: uint8 activations and int8
weights on x86, with weights of 7 bits where the CPU lacks VNNI (its older instruction adds two products in
16 bits, which 8-bit weights overflow); int8 for both on ARM. Weights have a scale per output channel.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.workers.onnx_model import first_line
from headrace.workers.prepare.calibration import Feeds
from headrace.workers.prepare.graph import (
    EXTERNAL_BYTES,
    consumers,
    load_proto,
    save,
    sort_nodes,
    weight_bytes,
)
from headrace.workers.prepare.judge import open_file, run
from headrace.workers.prepare.layer_noise import NodeNoise, measure_nodes
from headrace.workers.prepare.metrics import Comparison, Tolerance
from headrace.workers.prepare.ranges import METHODS, find_ranges, quiet
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

if TYPE_CHECKING:
    import onnx
    from onnxruntime.quantization.calibrate import TensorsData

#: Scales per channel need DequantizeLinear of this opset.
CHANNEL_OPSET = 13

#: Share of the nodes that must be left: with more of them in FP32 the file is INT8 by name alone, and each
#: border between the two costs a conversion.
LEAST_SHARE = 0.5

#: The front end's nodes in the order in which ``front_end.py`` writes them, each at most once.
_FRONT_END = ("Transpose", "Cast", "Mul", "Add")

_CPU_INFO = Path("/proc/cpuinfo")


class Judge(Protocol):
    """Compares a file with FP32, on the first ``limit`` frames or on all."""

    def __call__(self, path: Path, limit: int | None = None) -> Comparison: ...


@dataclass(frozen=True, slots=True)
class QuantSettings:
    """``percentile``: share of the values inside the range, in percent. ``search_frames``: judged on so many
    while searching, on all in the end. ``max_rounds`` bounds the search for layers to leave out;
    ``exclude`` names nodes that are left out from the start. ``is_reduced`` None: as this CPU needs it."""

    methods: tuple[str, ...] = METHODS
    percentile: float = 99.99
    is_per_channel: bool = True
    is_reduced: bool | None = None
    max_rounds: int = 8
    exclude: tuple[str, ...] = ()
    search_frames: int = 64
    noise_frames: int = 4
    timed_runs: int = 30
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: its method, how many layers it leaves out, its figures and the limits that it breaks."""

    method: str
    excluded_count: int
    figures: dict[str, float]
    breaches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What was made. Times are CPU milliseconds per frame on one thread, the medians of runs of both files
    in turn; ``speed_ratio`` above 1 means that INT8 is faster."""

    method: str
    excluded: tuple[NodeNoise, ...]
    front_end: tuple[str, ...]
    trials: tuple[Trial, ...]
    comparison: Comparison
    quantised_count: int
    kinds: str
    fp32_bytes: int
    int8_bytes: int
    fp32_ms: float
    int8_ms: float

    @property
    def speed_ratio(self) -> float:
        return self.fp32_ms / self.int8_ms if self.int8_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the comparison, made of what JSON has."""
        return {
            "method": self.method,
            "kinds": self.kinds,
            "excluded_layers": [{**asdict(e), "neighbours": list(e.neighbours)} for e in self.excluded],
            "front_end_nodes": list(self.front_end),
            "quantised_nodes": self.quantised_count,
            "trials": [{**asdict(trial), "breaches": list(trial.breaches)} for trial in self.trials],
            "fp32_bytes": self.fp32_bytes,
            "int8_bytes": self.int8_bytes,
            "fp32_ms": round(self.fp32_ms, 3),
            "int8_ms": round(self.int8_ms, 3),
            "speed_ratio": round(self.speed_ratio, 3),
        }


def quantise(
    master: Path,
    out: Path,
    feeds: Feeds,
    judge: Judge,
    tolerance: Tolerance,
    settings: QuantSettings = QuantSettings(),
) -> QuantReport:
    """Write the INT8 form of ``master`` to ``out``. ``feeds`` gives the rows to calibrate with.

    Raises PrepareRefusedError: ``int8_tolerance`` with the best figures when no candidate holds the
    tolerance, ``nothing_to_convert`` for a graph without a node that INT8 exists for; then ``out`` is not
    there.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-int8-") as folder:
        work = _Quantisation(master, Path(folder), feeds, judge, tolerance, settings)
        return work.run(out)


class _Candidate:
    """A file with its trial."""

    def __init__(self, path: Path, trial: Trial, comparison: Comparison) -> None:
        self.path, self.trial, self.comparison = path, trial, comparison


class _Quantisation:
    """One quantisation; every file but the result is in ``folder``."""

    def __init__(
        self,
        master: Path,
        folder: Path,
        feeds: Feeds,
        judge: Judge,
        tolerance: Tolerance,
        settings: QuantSettings,
    ) -> None:
        self._master, self._folder, self._feeds = master, folder, feeds
        self._judge, self._tolerance, self._settings = judge, tolerance, settings
        self._trials: list[Trial] = []
        self._model = folder / "optimised.onnx"
        self._is_per_channel, self._is_large = _optimise(master, self._model)
        proto = load_proto(self._model)
        self._is_per_channel &= settings.is_per_channel
        self._op_types = _known_op_types()
        self._front_end = front_end_nodes(proto.graph)
        self._left_out = [*self._front_end, *settings.exclude]
        self._names = [node.name for node in proto.graph.node if node.op_type in self._op_types]
        if not self._count(self._left_out):
            raise PrepareRefusedError(
                Reason.NOTHING_TO_CONVERT, f"{master.name}: it has no node that INT8 exists for"
            )

    def run(self, out: Path) -> QuantReport:
        ranges = find_ranges(
            self._model,
            self._feeds,
            self._op_types,
            self._settings.methods,
            self._settings.percentile,
            has_large_weights=self._is_large,
        )
        limit: int | None = self._settings.search_frames
        candidates = [self._try(method, ranges[method], [], limit) for method in self._settings.methods]
        best = max(candidates, key=lambda each: (not each.trial.breaches, each.comparison.rank))
        method, excluded = best.trial.method, list[NodeNoise]()
        current, rounds = best, 0
        while True:
            # Fewer frames than the limit: those were all.
            has_more = limit is not None and current.comparison.frame_count >= limit
            if not current.trial.breaches and has_more:
                limit = None
                current = self._judged(current.path, method, len(excluded), None)
            if not current.trial.breaches:
                return self._finish(out, current, excluded)
            if current.comparison.rank > best.comparison.rank:
                best = current
            worst = self._worst(current, excluded, 2 ** (rounds // 2))
            if rounds == self._settings.max_rounds or not worst:
                raise self._refusal(best, len(excluded))
            rounds += 1
            excluded += worst
            if self._count(self._all_left_out(excluded)) < LEAST_SHARE * self._count(self._left_out):
                raise self._refusal(best, len(excluded))
            current = self._try(method, ranges[method], excluded, limit)

    def _try(
        self, method: str, ranges: TensorsData, excluded: Sequence[NodeNoise], limit: int | None
    ) -> _Candidate:
        path = self._folder / f"{method}_{len(excluded)}.onnx"
        self._write(path, ranges, self._all_left_out(excluded))
        return self._judged(path, method, len(excluded), limit)

    def _judged(self, path: Path, method: str, excluded_count: int, limit: int | None) -> _Candidate:
        comparison = self._judge(path, limit)
        breaches = self._tolerance.breaches(comparison)
        trial = Trial(method, excluded_count, comparison.figures(), breaches)
        self._trials.append(trial)
        return _Candidate(path, trial, comparison)

    def _write(self, path: Path, ranges: TensorsData, left_out: list[str]) -> None:
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        activations, is_reduced = _kinds(self._settings)
        try:
            with quiet():
                quantizer = QDQQuantizer(
                    load_proto(self._model),
                    self._is_per_channel,
                    is_reduced,
                    QuantType.QInt8,
                    QuantType.QUInt8 if activations == "uint8" else QuantType.QInt8,
                    ranges,
                    [],
                    left_out,
                    self._op_types,
                    {},
                )
                quantizer.quantize_model()
        except Exception as error:  # ONNX Runtime's tools raise whatever they come across
            raise PrepareRefusedError(
                Reason.CANNOT_RUN, f"{self._master.name}: ONNX Runtime can't quantise it: {first_line(error)}"
            ) from error
        save(_tidied(quantizer.model.model), path)

    def _count(self, left_out: list[str]) -> int:
        return len(set(self._names) - set(left_out))

    def _all_left_out(self, excluded: Sequence[NodeNoise]) -> list[str]:
        return [*self._left_out, *(name for each in excluded for name in (each.name, *each.neighbours))]

    def _worst(self, candidate: _Candidate, excluded: Sequence[NodeNoise], count: int) -> list[NodeNoise]:
        left_out = self._all_left_out(excluded)
        nodes = measure_nodes(
            self._model,
            candidate.path,
            self._feeds,
            self._op_types,
            left_out,
            self._settings.noise_frames,
        )
        return nodes[:count]

    def _finish(self, out: Path, candidate: _Candidate, excluded: Sequence[NodeNoise]) -> QuantReport:
        save(load_proto(candidate.path), out)
        fp32_ms, int8_ms = time_in_turn((self._master, out), self._feeds, self._settings.timed_runs)
        activations, is_reduced = _kinds(self._settings)
        scales = "per channel" if self._is_per_channel else "per tensor"
        return QuantReport(
            method=candidate.trial.method,
            excluded=tuple(excluded),
            front_end=tuple(self._front_end),
            trials=tuple(self._trials),
            comparison=candidate.comparison,
            quantised_count=self._count(self._all_left_out(excluded)),
            kinds=f"{activations} activations, int8 weights{' of 7 bits' if is_reduced else ''} {scales}",
            fp32_bytes=_file_bytes(self._master),
            int8_bytes=_file_bytes(out),
            fp32_ms=fp32_ms,
            int8_ms=int8_ms,
        )

    def _refusal(self, best: _Candidate, excluded_count: int) -> PrepareRefusedError:
        tried = f" and {excluded_count} layers left in FP32" if excluded_count else ""
        return PrepareRefusedError(
            Reason.INT8_TOLERANCE,
            f"{self._master.name}: INT8 is not within the tolerance, with {', '.join(self._settings.methods)}"
            f"{tried}: {'; '.join(best.trial.breaches)} at best ({best.trial.method})",
        )


def front_end_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes between a uint8 input and the model's own first node."""
    import onnx

    readers = consumers(graph.node)
    constants = {tensor.name for tensor in graph.initializer}
    found: list[str] = []
    for info in graph.input:
        if info.type.tensor_type.elem_type != onnx.TensorProto.UINT8:
            continue
        tensor, steps = info.name, list(_FRONT_END)
        while len(readers.get(tensor, [])) == 1:
            node = readers[tensor][0]
            if node.op_type not in steps or any(n not in constants for n in node.input if n != tensor):
                break
            steps = steps[steps.index(node.op_type) + 1 :]
            found.append(node.name)
            tensor = node.output[0]
    return found


def time_in_turn(paths: Sequence[Path], feeds: Feeds, runs: int) -> list[float]:
    """Return the median CPU milliseconds of one row of each file, run in turn on one thread.

    With one thread ONNX Runtime computes in the calling thread, whose own time does not count what other
    processes take.
    """
    sessions = [open_file(path, 1) for path in paths]
    taken: list[list[float]] = [[] for _ in paths]
    for number, feed in enumerate(islice(cycle(list(islice(feeds(), 8))), runs + 2)):
        for path, session, times in zip(paths, sessions, taken, strict=True):
            start_ns = time.thread_time_ns()
            run(session, feed, path)
            if number >= 2:  # the first runs allocate
                times.append((time.thread_time_ns() - start_ns) / 1e6)
    return [statistics.median(times) for times in taken]


def has_vnni(text: str) -> bool:
    """Tell whether the CPU that /proc/cpuinfo describes adds products of bytes in 32 bits."""
    flags = {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}
    return bool(flags & {"avx512_vnni", "avx_vnni"})


def _kinds(settings: QuantSettings) -> tuple[str, bool]:
    """Return the type of activations, and whether weights get 7 bits only."""
    is_x86 = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
    if settings.is_reduced is not None:
        return ("uint8" if is_x86 else "int8"), settings.is_reduced
    if not is_x86:
        return "int8", False
    try:
        text = _CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return "uint8", True
    return "uint8", not has_vnni(text)


def _known_op_types() -> list[str]:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return sorted({*QDQRegistry, *QLinearOpsRegistry})


def _optimise(master: Path, out: Path) -> tuple[bool, bool]:
    """Write ``master`` with batch norms folded, GELUs joined and shapes inferred, in an opset that has scales
    per channel.

    Returns whether it has that opset, and whether its weights need a file of their own.
    """
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    proto = load_proto(master)
    is_large = weight_bytes(proto) > EXTERNAL_BYTES
    is_new = _opset(proto) >= CHANNEL_OPSET
    source = master
    if not is_new and not is_large:
        source = out.with_name("converted.onnx")
        try:
            save(onnx.version_converter.convert_version(proto, CHANNEL_OPSET), source)
            is_new = True
        except Exception:  # noqa: BLE001 - the converter lacks some nodes: then one scale per tensor
            source = master
    try:
        with quiet():
            # Symbolic shape inference would need sympy, and serves transformers.
            quant_pre_process(str(source), str(out), skip_symbolic_shape=True, save_as_external_data=is_large)
    except Exception as error:  # see _write
        raise PrepareRefusedError(
            Reason.CANNOT_RUN, f"{master.name}: ONNX Runtime can't optimise it: {first_line(error)}"
        ) from error
    _join_gelus(out, is_large=is_large)
    return is_new, is_large


def _join_gelus(path: Path, *, is_large: bool) -> None:
    from onnxruntime.transformers.fusion_gelu import FusionGelu
    from onnxruntime.transformers.onnx_model import OnnxModel

    if is_large:  # all its weights would be written once more
        return
    proto = load_proto(path)
    with quiet():
        FusionGelu(OnnxModel(proto)).apply()
    path.write_bytes(_tidied(proto).SerializeToString())


def _opset(proto: onnx.ModelProto) -> int:
    return max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)


def _tidied(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Sort the nodes, and take out the operator sets that ONNX Runtime's optimiser lists without need."""
    sort_nodes(proto.graph)
    used = {node.domain for node in proto.graph.node} | {"", "ai.onnx"}
    kept = [entry for entry in proto.opset_import if entry.domain in used]
    copies = [(entry.domain, entry.version) for entry in kept]
    del proto.opset_import[:]
    for domain, version in copies:
        entry = proto.opset_import.add()
        entry.domain, entry.version = domain, version
    return proto


def _file_bytes(path: Path) -> int:
    weights = path.with_name(f"{path.name}.weights")
    return path.stat().st_size + (weights.stat().st_size if weights.exists() else 0)
