"""Model files that the broker hands out: described, hashed, served in chunks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace.broker.model_store import MAX_CHUNK_BYTES, ModelStore
from headrace.broker.settings import CoreSettings, ModelSettings
from headrace.broker.shell_settings import LocalModel, ShellSettings
from headrace.errors import ConfigError, ModelError, RemoteError
from headrace.protocol.messages import EmulatedCost, ModelFile, ModelSpec


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model_at(path: Path, *extra: Path) -> LocalModel:
    return LocalModel("m", "1", path, extra)


def settings_of(*specs: ModelSpec) -> CoreSettings:
    return CoreSettings(models=tuple(ModelSettings(spec) for spec in specs))


def test_files_are_described_relative_to_the_graph(tmp_path: Path) -> None:
    """The graph comes first, its weights under the names that the graph uses."""
    (tmp_path / "weights").mkdir()
    graph, weights = tmp_path / "m.onnx", tmp_path / "weights" / "a.bin"
    graph.write_bytes(b"graph")
    weights.write_bytes(b"weights")

    with ModelStore.open((model_at(graph, weights),)) as store:
        described = store.with_files(settings_of(ModelSpec("m", "1"))).models[0].spec.files

    assert described == (
        ModelFile("m.onnx", sha256(b"graph"), 5),
        ModelFile("weights/a.bin", sha256(b"weights"), 7),
    )


def test_chunks_join_to_the_file(tmp_path: Path) -> None:
    """Chunks are limited whatever is asked for, and end with the file."""
    data = bytes(range(256)) * (MAX_CHUNK_BYTES // 256) + b"tail"
    path = tmp_path / "m.onnx"
    path.write_bytes(data)

    with ModelStore.open((model_at(path),)) as store:
        first, total = store.read_chunk(sha256(data), 0, 2**60)
        rest, _ = store.read_chunk(sha256(data), len(first), 2**60)
        beyond, _ = store.read_chunk(sha256(data), total + 1, 10)

    assert (len(first), total, beyond) == (MAX_CHUNK_BYTES, len(data), b"")
    assert first + rest == data


def test_an_unknown_hash_is_not_found(tmp_path: Path) -> None:
    """A peer that asks for what no model has gets a code, not a path."""
    with ModelStore.open(()) as store, pytest.raises(RemoteError) as caught:
        store.read_chunk("0" * 64, 0, 1)

    assert caught.value.code == "not_found"


def test_a_replaced_file_is_served_as_it_was(tmp_path: Path) -> None:
    """A new version moved into place does not change what this broker hands out."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    with ModelStore.open((model_at(path),)) as store:
        (tmp_path / "new").write_bytes(b"brand new")
        (tmp_path / "new").replace(path)

        assert store.read_chunk(sha256(b"old"), 0, 10) == (b"old", 3)


def test_an_overwritten_file_is_no_longer_served(tmp_path: Path) -> None:
    """Bytes that no longer have their hash are refused, with the reason."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    with ModelStore.open((model_at(path),)) as store:
        path.write_bytes(b"other")
        with pytest.raises(RemoteError, match=r"m\.onnx was overwritten") as caught:
            store.read_chunk(sha256(b"old"), 0, 10)

    assert caught.value.code == "not_found"


def test_two_models_may_share_a_file(tmp_path: Path) -> None:
    """The same content is opened once and closed once."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"graph")

    with ModelStore.open((model_at(path), LocalModel("n", "2", path))) as store:
        settings = store.with_files(settings_of(ModelSpec("m", "1"), ModelSpec("n", "2")))

    assert settings.models[0].spec.files == settings.models[1].spec.files


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda path: None, "can't be opened: No such file"),
        (lambda path: path.mkdir(), "can't be read: Is a directory"),
        (lambda path: path.touch(), "is empty"),
    ],
    ids=["missing", "folder", "empty"],
)
def test_a_file_that_cannot_be_served_is_named(tmp_path: Path, prepare: object, problem: str) -> None:
    """The error names model, path and reason."""
    path = tmp_path / "m.onnx"
    prepare(path)  # type: ignore[operator]

    with pytest.raises(ModelError, match=f"model m: .*m.onnx {problem}"):
        ModelStore.open((model_at(path),))


def test_weights_outside_the_graphs_folder_are_refused(tmp_path: Path) -> None:
    """The graph could not name them, and a worker would have to write outside its cache."""
    (tmp_path / "graphs").mkdir()
    graph, weights = tmp_path / "graphs" / "m.onnx", tmp_path / "weights.bin"
    graph.write_bytes(b"graph")
    weights.write_bytes(b"weights")

    with pytest.raises(ModelError, match=r"weights\.bin does not lie in"):
        ModelStore.open((model_at(graph, weights),))


def test_a_model_without_files_must_be_emulated() -> None:
    """Nobody could run a model that has neither file nor emulated cost."""
    emulated = ModelSpec("e", "1", emulated=EmulatedCost(1.0, 0.1))

    with ModelStore.open(()) as store:
        assert store.with_files(settings_of(emulated)).models[0].spec == emulated
        with pytest.raises(ConfigError, match="model m:1: no file given"):
            store.with_files(settings_of(ModelSpec("m", "1")))


def test_files_for_a_gpu_are_served_beside_the_others(tmp_path: Path) -> None:
    """A prepared folder has one file for CPUs and one for GPUs; workers can fetch either."""
    path, half = tmp_path / "model.fp32.onnx", tmp_path / "model.fp16.onnx"
    path.write_bytes(b"full")
    half.write_bytes(b"half")
    local = LocalModel("m", "1", path, gpu_files=(half,))

    with ModelStore.open((local,)) as store:
        spec = store.with_files(CoreSettings((ModelSettings(ModelSpec("m", "1")),))).models[0].spec
        chunks = [store.read_chunk(file.sha256, 0, 100)[0] for file in (*spec.files, *spec.gpu_files)]

    assert [file.path for file in (*spec.files, *spec.gpu_files)] == [path.name, half.name]
    assert chunks == [b"full", b"half"]


def test_a_reload_reads_from_the_models_own_folders_and_those_that_are_named(tmp_path: Path) -> None:
    """Each folder once, as it is after links and `..`."""
    link = tmp_path / "link"
    (tmp_path / "models").mkdir()
    link.symlink_to(tmp_path / "models")
    local = (model_at(tmp_path / "models" / "m.onnx"), model_at(link / "n.onnx"))
    named = (tmp_path / "models" / ".." / "new", tmp_path / "models")

    settings = ShellSettings(CoreSettings(models=()), local_models=local, reload_folders=named)

    assert settings.folders_of_models() == (tmp_path / "models", tmp_path / "new")
