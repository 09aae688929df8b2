"""A model as the broker describes it: which files which engine runs."""

from __future__ import annotations

from dataclasses import replace

from headrace.protocol import codec
from headrace.protocol.messages import Limits, Load, ModelFile, ModelSpec

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


def test_what_batches_are_compared_with_goes_to_workers_of_other_files() -> None:
    """A worker of the FP32 file itself has nothing to compare; the wire carries both fields."""
    spec = ModelSpec("m", "1", ON_GPU, fp32_files=EVERYWHERE, fp32_sample_share=0.25)

    assert spec.for_engine("cpu") is spec
    assert replace(spec, files=EVERYWHERE, gpu_files=ON_GPU).for_engine("cpu").fp32_files == ()
    assert replace(spec, gpu_files=ON_GPU).for_engine("cuda") == spec
    assert codec.decode(codec.encode(Load(spec)), Limits()) == Load(spec)
