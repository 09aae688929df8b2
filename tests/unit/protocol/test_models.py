"""A model as the broker describes it: which files which engine runs."""

from __future__ import annotations

from headrace.protocol.messages import ModelFile, ModelSpec

EVERYWHERE = (ModelFile("model.fp32.onnx", "0a" * 32, 10),)
ON_GPU = (ModelFile("model.fp16.onnx", "0b" * 32, 5),)


def test_a_gpu_runs_its_own_files_and_others_the_usual() -> None:
    """Each engine sees one set of files, so that nothing else is fetched or loaded."""
    spec = ModelSpec("m", "1", files=EVERYWHERE, gpu_files=ON_GPU)

    assert spec.for_engine("cuda") == ModelSpec("m", "1", files=ON_GPU)
    assert spec.for_engine("cpu") == ModelSpec("m", "1", files=EVERYWHERE)


def test_without_files_for_a_gpu_all_engines_run_the_same() -> None:
    """A plain ONNX file serves everywhere."""
    spec = ModelSpec("m", "1", files=EVERYWHERE)

    assert spec.for_engine("cuda") is spec
