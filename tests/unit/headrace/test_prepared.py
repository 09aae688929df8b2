"""A prepared folder as a configuration names it: what its manifest fills in, and which file is run where."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from headrace import config, config_settings
from headrace.config_models import ImageSection, ModelSection, SizeClassSection
from headrace.errors import ConfigError, ModelError
from headrace.prepared import (
    FileEntry,
    Manifest,
    SourceEntry,
    TensorEntry,
    VariantEntry,
    read_manifest,
)
from headrace.protocol.messages import ModelSpec
from headrace.quick_model import model_section

FILES = {"fp32": b"full", "fp16": b"half", "int8": b"quarter"}


def write_folder(folder: Path, **fields: object) -> Path:
    """Write a prepared folder whose model files are a few bytes: nothing here runs them."""
    variants = {}
    folder.mkdir()
    for precision, data in FILES.items():
        name = f"model.{precision}.onnx"
        (folder / name).write_bytes(data)
        entry = FileEntry(name=name, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        variants[precision] = VariantEntry(files=(entry,))
    made = {
        "name": "m",
        "source": SourceEntry(name="m.onnx", sha256="0" * 64),
        "inputs": (TensorEntry(name="x", dtype="uint8", shape=(-1, 32, 64, 3)),),
        "outputs": (TensorEntry(name="y", dtype="float32", shape=(-1, 10)),),
        "image": ImageSection(color="bgr", scale=0.5, mean=(1.0, 2.0, 3.0)),
        "size_classes": (SizeClassSection(name="only", height=32, width=64, max_batch_size=4),),
        "oversize": "reject",
        "adapter": "classify",
        "adapter_options": {"labels": ["a", "b"]},
        "rows_proven": 3,
        "rows_difference": 0.0,
        "variants": variants,
        **fields,
    }
    (folder / "manifest.json").write_text(Manifest(**made).model_dump_json())
    return folder


def load(folder: Path, lines: str = "") -> config.LoadedConfig:
    path = folder.parent / "f.toml"
    path.write_text(f'[[models]]\nname = "m"\npath = "{folder.name}"\n{lines}')
    return config.load(str(path), environment={})


def spec_of(loaded: config.LoadedConfig) -> ModelSpec:
    return config_settings.to_shell_settings(loaded).core.models[0].spec


def test_the_manifest_fills_in_what_the_configuration_leaves_out(tmp_path: Path) -> None:
    """The arithmetic is in the graph, so that none is left for the worker to add."""
    spec = spec_of(load(write_folder(tmp_path / "p")))

    assert spec.image is not None
    assert (spec.image.color.value, spec.image.scale, spec.image.mean) == ("bgr", 1.0, ())
    assert [(c.name, c.max_batch_size) for c in spec.size_classes] == [("only", 4)]
    assert (spec.oversize.value, spec.adapter, spec.adapter_options) == (
        "reject",
        "classify",
        {"labels": ["a", "b"]},
    )


def test_the_configuration_has_the_last_word(tmp_path: Path) -> None:
    """What it sets stays as it is set."""
    lines = 'oversize = "letterbox"\nadapter = "tensors"\n[[models.size_classes]]\nheight = 64\nwidth = 64\n'
    spec = spec_of(load(write_folder(tmp_path / "p"), lines))

    assert [(c.height, c.width) for c in spec.size_classes] == [(64, 64)]
    assert (spec.oversize.value, spec.adapter, spec.adapter_options) == ("letterbox", "tensors", {})


@pytest.mark.parametrize(
    ("precision", "on_cpu", "on_gpu"),
    [("auto", "fp32", "fp16"), ("int8", "int8", "fp16"), ("fp16", "fp16", ""), ("fp32", "fp32", "")],
)
def test_each_engine_gets_its_file(tmp_path: Path, precision: str, on_cpu: str, on_gpu: str) -> None:
    """INT8 is for CPUs alone; files for a GPU are named only where they are others."""
    loaded = load(write_folder(tmp_path / "p"), f'precision = "{precision}"')

    (local,) = config_settings.to_shell_settings(loaded).local_models

    assert local.path.name == f"model.{on_cpu}.onnx"
    assert [path.name for path in local.gpu_files] == ([f"model.{on_gpu}.onnx"] if on_gpu else [])


def test_a_dump_read_back_serves_the_same(tmp_path: Path) -> None:
    """`headrace up` hands its broker the configuration in this form."""
    loaded = load(write_folder(tmp_path / "p"), 'precision = "int8"\nadapter = "tensors"')

    again = config.load("elsewhere", text=config.dump(loaded.with_absolute_paths()), environment={})

    assert spec_of(again) == spec_of(loaded)
    assert again.model_files(0) == loaded.model_files(0)


def test_a_folder_is_served_without_a_configuration(tmp_path: Path) -> None:
    """`headrace up --model DIR`."""
    folder = write_folder(tmp_path / "p")

    section = model_section(folder, sizes=["16x16"])

    assert (section.name, section.path, section.adapter) == ("m", str(folder), "classify")
    assert [item.label for item in section.size_classes] == ["16x16"]


def test_an_image_table_that_says_something_else_is_refused(tmp_path: Path) -> None:
    """Normalised twice, a model answers nonsense and nobody sees why."""
    with pytest.raises(ConfigError, match="leave the table out"):
        load(write_folder(tmp_path / "p"), "[models.image]\nscale = 0.5")


def test_a_precision_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """What the folder has is named, and how to get the other."""
    folder = write_folder(tmp_path / "p")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["variants"]["int8"]
    (folder / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(ConfigError, match="only fp32, fp16; prepare it again with --int8"):
        config_settings.to_shell_settings(load(folder, 'precision = "int8"'))


def test_a_precision_of_a_single_file_is_refused() -> None:
    """There is nothing to choose from."""
    with pytest.raises(ValueError, match="is one file"):
        ModelSection(name="m", path="m.onnx", precision="int8")


def test_a_file_of_another_length_is_named(tmp_path: Path) -> None:
    """A half-copied folder does not start."""
    folder = write_folder(tmp_path / "p")
    (folder / "model.fp16.onnx").write_bytes(b"ha")

    with pytest.raises(ConfigError, match=r"model\.fp16\.onnx: 2 bytes, the manifest says 4"):
        config_settings.to_shell_settings(load(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 2}, "format_version"),
        ({"variants": {"fp32": {"files": [{"name": "../x", "nbytes": 1, "sha256": "0" * 64}]}}}, "name"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=["newer format", "a file outside the folder", "unknown key"],
)
def test_a_manifest_that_is_not_one_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """It may come from anywhere: it is checked like any input."""
    folder = write_folder(tmp_path / "p")
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(ModelError, match=words):
        read_manifest(folder)


@pytest.mark.parametrize(("share", "names"), [("0.0", []), ("0.01", ["model.fp32.onnx"])])
def test_a_share_of_batches_asks_for_the_fp32_file(tmp_path: Path, share: str, names: list[str]) -> None:
    """Without a share nobody fetches it."""
    lines = f'precision = "int8"\nfp32_sample_share = {share}'
    settings = config_settings.to_shell_settings(load(write_folder(tmp_path / "p"), lines))

    assert [path.name for path in settings.local_models[0].fp32_files] == names
    assert settings.core.models[0].spec.fp32_sample_share == float(share)


def test_a_single_file_has_nothing_to_compare_with(tmp_path: Path) -> None:
    """Said where the configuration is read."""
    (tmp_path / "m.onnx").write_bytes(b"x")
    text = f'[[models]]\nname = "m"\npath = "{tmp_path}/m.onnx"\nfp32_sample_share = 0.5\n'
    with pytest.raises(ConfigError, match="fp32_sample_share"):
        config.load("test", text=text, environment={})
