"""Finds which nodes must stay in FP32, by running both precisions on frames until they agree.

Round by round: values that FP16 can't hold (or could not, were a frame twice as strong) keep the nodes that
give and read them in FP32; once everything is finite, the nodes that add most to the error follow, one, two,
four and so on, until the outputs are within tolerance. Then each such group is let go again, the largest
first, if the tolerance holds without it: the few that matter are rarely those of the last group. What is left
is a file for the GPU, or a refusal: never a file that was not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from headrace.workers.onnx_model import OnnxTensor
from headrace.workers.prepare.fp16_graph import (
    FP16_MAX,
    Clamped,
    clamped_weights,
    convert,
    is_always_fp32,
    rounded_copy,
)
from headrace.workers.prepare.fp16_twin import Feed, TensorFigures, measure
from headrace.workers.prepare.graph import consumers, load_proto, save
from headrace.workers.prepare.refusal import PrepareRefusedError, Reason

#: The frames seen are a sample: a value this many times below FP16's end counts as beyond it.
HEADROOM = 2.0

#: Rounds of measuring. Each of the last ones doubles the nodes kept: 12 reach 2000 nodes.
MAX_ROUNDS = 12

#: With more of the nodes than this in FP32 the file would be FP16 by name only.
MAX_KEPT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node that stays in FP32. ``value`` is the largest magnitude it gives or reads ("overflow" and
    "weights"), or the relative error that it adds ("precision")."""

    name: str
    op_type: str
    why: str
    value: float


@dataclass(frozen=True, slots=True)
class Fp16Report:
    """How the FP16 file came about. ``error`` is the largest relative difference found in the last round."""

    kept: tuple[KeptNode, ...]
    clamped: tuple[Clamped, ...]
    converted_count: int
    rounds: int


#: Compares the file at a path with the master: the figures that are beyond tolerance, none when it holds.
Judge = Callable[[Path], tuple[str, ...]]


def make_fp16(
    master: Path,
    out: Path,
    types: Mapping[str, OnnxTensor],
    feeds: Callable[[], Iterable[Feed]],
    judge: Judge,
    threads: int = 0,
) -> Fp16Report:
    """Write ``out``, the FP16 file of ``master``; its folder holds what is made on the way.

    ``feeds`` gives the frames anew at each call. Raises PrepareRefusedError when no mixture of both
    precisions holds the tolerance.
    """
    return _Search(master, out, types, feeds, judge, threads).run()


class _Search:
    """One search. Invariant: ``_kept`` only grows until the tolerance holds, so that it ends."""

    def __init__(
        self,
        master: Path,
        out: Path,
        types: Mapping[str, OnnxTensor],
        feeds: Callable[[], Iterable[Feed]],
        judge: Judge,
        threads: int,
    ) -> None:
        self._master, self._out, self._types = master, out, types
        self._feeds, self._judge, self._threads = feeds, judge, threads
        proto = load_proto(master)
        self._inputs = [info.name for info in proto.graph.input]
        self._clamped = clamped_weights(proto)
        self._nodes = [_Node.of(node) for node in proto.graph.node]
        self._can_convert = [
            node
            for node in self._nodes
            if not node.is_always_fp32 and any(self._is_float(n) for n in node.outputs)
        ]
        self._kept: dict[str, KeptNode] = {}
        self._groups: list[list[str]] = []  # kept for precision, as they came
        readers = consumers(proto.graph.node)
        for each in self._clamped:
            for reader in readers.get(each.name, []) if each.large else []:
                self._keep(_Node.of(reader), "weights", each.peak)

    def run(self) -> Fp16Report:
        label = self._master.name
        if not self._can_convert:
            raise PrepareRefusedError(
                Reason.NOTHING_TO_CONVERT,
                f"{label}: no node computes in float32, so there is nothing to convert",
            )
        breaches: tuple[str, ...] = ()
        how_many = 1
        for number in range(1, MAX_ROUNDS + 1):
            figures = measure(
                self._master, self._types, self._kept, self._feeds(), self._out.parent, self._threads
            )
            self._check_master(figures)
            has_new = self._keep_overflowing(figures)
            self._check_share(Reason.FP16_OVERFLOW, breaches)
            if has_new:
                continue
            breaches = self._judge_rounded()
            if not breaches:
                self._release()
                self._write()
                converted = sum(node.name not in self._kept for node in self._can_convert)
                kept = tuple(self._kept[n.name] for n in self._nodes if n.name in self._kept)
                return Fp16Report(kept, self._clamped, converted, number)
            if not self._keep_worst(figures, how_many):
                break
            how_many *= 2
            self._check_share(Reason.FP16_TOLERANCE, breaches)
        raise PrepareRefusedError(
            Reason.FP16_TOLERANCE,
            f"{label}: with {len(self._kept)} of {len(self._can_convert)} nodes kept in FP32 the outputs are"
            f" still over tolerance after {MAX_ROUNDS} rounds: {'; '.join(breaches) or 'values not finite'}",
        )

    def _check_master(self, figures: Mapping[str, TensorFigures]) -> None:
        for node in self._nodes:
            for name in node.outputs:
                if name in figures and not figures[name].is_finite:
                    raise PrepareRefusedError(
                        Reason.NOT_FINITE,
                        f"{self._master.name}: node {node.name} ({node.op_type}) gives values that are not"
                        " finite in FP32 already",
                    )

    def _keep_overflowing(self, figures: Mapping[str, TensorFigures]) -> bool:
        """Keep the givers and readers of every value that FP16 can't hold; tell whether there were any."""
        before = len(self._kept)
        limit = FP16_MAX / HEADROOM
        large = {n: f.peak for n, f in figures.items() if f.peak > limit}
        for node in self._nodes:
            peak = max((large[n] for n in (*node.inputs, *node.outputs) if n in large), default=0.0)
            if peak:
                self._keep(node, "overflow", peak)
        if len(self._kept) > before:
            return True
        # Nothing is too large in FP32, and yet FP16 ends in infinity (a division by what became zero): the
        # first node that it comes out of, with those that give it its inputs.
        for node in self._nodes:
            if any(n in figures and np.isinf(figures[n].error) for n in node.outputs):
                for giver in self._nodes:
                    if giver is node or set(giver.outputs) & set(node.inputs):
                        self._keep(giver, "overflow", figures[node.outputs[0]].peak)
                return len(self._kept) > before
        return False

    def _keep_worst(self, figures: Mapping[str, TensorFigures], how_many: int) -> bool:
        """Keep the nodes that add most to the error; tell whether any was left."""

        def error(names: tuple[str, ...]) -> float:
            return max((figures[n].error for n in names if n in figures), default=0.0)

        added = [
            (error(node.outputs) - error(node.inputs), node)
            for node in self._can_convert
            if node.name not in self._kept
        ]
        added.sort(key=lambda pair: -pair[0])
        for value, node in added[:how_many]:
            self._keep(node, "precision", value)
        self._groups.append([node.name for _, node in added[:how_many]])
        return bool(added)

    def _release(self) -> None:
        """Convert again what was kept for precision and is not needed for it."""
        for group in reversed(self._groups):
            held = {name: self._kept.pop(name) for name in group if name in self._kept}
            if self._judge_rounded():
                self._kept |= held

    def _check_share(self, reason: Reason, breaches: tuple[str, ...]) -> None:
        kept = [node for node in self._can_convert if node.name in self._kept]
        if len(kept) > MAX_KEPT_SHARE * len(self._can_convert):
            why = "; ".join(breaches) or "values beyond 65504, with a headroom of 2, in " + ", ".join(
                f"{n.name} ({self._kept[n.name].value:.3g})" for n in kept[:5]
            )
            raise PrepareRefusedError(
                reason,
                f"{self._master.name}: {len(kept)} of {len(self._can_convert)} nodes would have to stay in"
                f" FP32, more than {MAX_KEPT_SHARE:.0%}: {why}; prepare it with --no-fp16",
            )

    def _judge_rounded(self) -> tuple[str, ...]:
        path = self._out.with_name("rounded.onnx")
        files = save(rounded_copy(load_proto(self._master), self._types, self._kept), path)
        try:
            return self._judge(path)
        finally:
            for file in files:
                file.unlink()

    def _write(self) -> None:
        """Write the file and see that it runs: ONNX Runtime may know no FP16 kernel for one of its nodes."""
        save(convert(load_proto(self._master), self._types, self._kept), self._out)
        breaches = self._judge(self._out)
        if breaches:
            raise PrepareRefusedError(
                Reason.FP16_TOLERANCE,
                f"{self._out.name}: the converted file is over tolerance, though its rounding is not:"
                f" {'; '.join(breaches)}",
            )

    def _is_float(self, name: str) -> bool:
        return name in self._types and self._types[name].dtype == "float32"

    def _keep(self, node: _Node, why: str, value: float) -> None:
        if node.name not in self._kept and not node.is_always_fp32:
            self._kept[node.name] = KeptNode(node.name, node.op_type, why, float(value))


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_always_fp32: bool

    @classmethod
    def of(cls, node: onnx.NodeProto) -> _Node:
        return cls(node.name, node.op_type, tuple(node.input), tuple(node.output), is_always_fp32(node))
