"""What the models of a configuration would take of this machine's GPU, as findings of the doctor.

Estimated from the files (workers/cuda/estimate.py); compared with ``worker.gpu_memory_mb`` and, where there
is a GPU, with what is free of it. On a machine without one the estimate is all that can be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.config import LoadedConfig
from headrace.config_settings import to_model_spec
from headrace.doctor import Finding, Gpu, Verdict
from headrace.workers.cuda.estimate import ModelNeed, estimate
from headrace.workers.cuda.graphs import ESTIMATED_GRAPH_BYTES, Budget, choose
from headrace.workers.onnx_model import read_model

#: Batches on the device at once, where the configuration asks for fewer: less than two overlap nothing.
_FEWEST_SLOTS = 2


def examine_memory(loaded: LoadedConfig, gpu: Gpu | None) -> list[Finding]:
    """Return a finding for each model of the configuration, and one for all of them.

    Raises ModelError for a model that could not be served, ConfigError for a file that is not there."""
    needs: list[ModelNeed] = []
    findings: list[Finding] = []
    for index, model in enumerate(loaded.config.models):
        files = {name: str(path) for name, path in loaded.model_files(index, "cuda").items()}
        if not files:
            findings.append(
                _note(f"{model.name}:{model.version}", "it has no file: the device emulated alone")
            )
            continue
        path, *_ = files.values()
        onnx_model = read_model(path, dict(list(files.items())[1:]), label=f"{model.name}:{model.version}")
        needs.append(estimate(to_model_spec(model), onnx_model, Path(path)))
    limit_mb = loaded.config.worker.gpu_memory_mb
    limit_bytes = None if limit_mb is None else limit_mb * 2**20
    slots = max(_FEWEST_SLOTS, loaded.config.worker.slots)
    findings += _of_models(needs, limit_bytes, has_gpu=gpu is not None)
    if needs:
        findings.append(_of_all(needs, limit_bytes, slots, gpu))
    return findings


def _of_models(needs: list[ModelNeed], limit_bytes: int | None, *, has_gpu: bool) -> Iterator[Finding]:
    """Give each model's graphs what the ones before it left of the limit, as the engine does."""
    budget = Budget(limit_bytes)
    for need in needs:
        arena = f"weights and results of nodes {_mib(need.arena_bytes)}"
        if need.result_bytes is None:
            arena = f"weights {_mib(need.weight_bytes)}, results of nodes can't be told from the file"
        if need.why_loose:
            yield _note(need.label, f"estimated: {arena}; no graphs: {need.why_loose}")
            continue
        chosen, left_out = choose(need.buckets, budget)
        taken = sum(each.io_bytes + ESTIMATED_GRAPH_BYTES for each in chosen)
        budget = Budget(limit_bytes, budget.used_bytes + taken)
        text = f"estimated: {arena}; {len(need.buckets)} graphs with their buffers {_mib(need.graph_bytes)}"
        remedies: list[str] = []
        if left_out:
            names = ", ".join(each.label.removeprefix(f"{need.label} ") for each in left_out)
            text += f"; {len(left_out)} would run without a graph: {names}"
            remedies.append(
                "raise worker.gpu_memory_mb, lower max_batch_size, or set traffic_share by size class"
            )
        if limit_bytes is not None and need.arena_bytes > limit_bytes:
            text += f"; its session alone is above worker.gpu_memory_mb = {limit_bytes // 2**20}"
            remedies.insert(0, f"worker.gpu_memory_mb = {need.arena_bytes // 2**20 + 1} or more")
        is_compared = has_gpu or limit_bytes is not None
        verdict = Verdict.WARNING if remedies else Verdict.OK if is_compared else Verdict.NOTE
        yield Finding(f"graphs of {need.label}", verdict, text, "; ".join(remedies))


def _of_all(needs: list[ModelNeed], limit_bytes: int | None, slots: int, gpu: Gpu | None) -> Finding:
    graphs = sum(need.graph_bytes for need in needs)
    if limit_bytes is not None:
        graphs = min(graphs, limit_bytes)
    arenas = sum(need.arena_bytes for need in needs)
    total = graphs + arenas + max(need.slot_bytes(slots) for need in needs)
    text = (
        f"estimated: {_mib(total)} of a GPU for each worker (sessions {_mib(arenas)}, graphs {_mib(graphs)}),"
        " beside what CUDA, cuDNN and torch take themselves"
    )
    if gpu is None:
        return Finding("memory of all models", Verdict.NOTE, f"{text}; no GPU here to compare it with")
    if total > gpu.free_bytes:
        remedy = "set worker.gpu_memory_mb, lower max_batch_size, or give models to workers on other GPUs"
        return Finding(
            "memory of all models", Verdict.WARNING, f"{text}; {_mib(gpu.free_bytes)} are free", remedy
        )
    return Finding("memory of all models", Verdict.OK, f"{text}; {_mib(gpu.free_bytes)} are free")


def _note(label: str, text: str) -> Finding:
    return Finding(f"graphs of {label}", Verdict.NOTE, text)


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // 2**20)} MiB"
