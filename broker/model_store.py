"""The model files that this broker hands to workers, found by sha256.

The files are opened once, at start or for a reload, and served from those descriptors: a file replaced on
disk (rename) goes on being served as it was when its hash was taken. One that is overwritten in place is
noticed by its time and size and no longer served. Workers check the hash of what they got in any case.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from headrace.broker.settings import CoreSettings
from headrace.broker.shell_settings import LocalModel
from headrace.errors import Code, ConfigError, ModelError, RemoteError
from headrace.protocol.messages import ModelFile

#: Largest chunk of one answer. Reading it takes the broker's loop well under a millisecond from the page
#: cache.
MAX_CHUNK_BYTES = 1024 * 1024

#: (path, modification time, size) -> sha256. Lives as long as the process: a restart in the same process
#: and two models that share a file hash it once.
_hash_cache: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    nbytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """The files of one version of a model, opened and hashed, in nobody's hands yet."""

    files: tuple[ModelFile, ...]
    by_sha256: dict[str, _OpenFile]
    gpu_files: tuple[ModelFile, ...] = ()
    fp32_files: tuple[ModelFile, ...] = ()


class ModelStore:
    """Open files by sha256. A context manager: leaving it closes them. ``read`` may be called from any
    thread, all else from the one that owns the store."""

    def __init__(self) -> None:
        self._files: dict[str, _OpenFile] = {}
        self._models: dict[tuple[str, str], OpenedFiles] = {}

    @classmethod
    def open(cls, models: tuple[LocalModel, ...]) -> Self:
        """Open and hash the files of every model. Raises ModelError naming the file that can't be used."""
        store = cls()
        try:
            for model in models:
                opened = store.read(model)
                store._models[(model.name, model.version)] = opened
                store._take(opened)
        except BaseException:
            store.close()
            raise
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def with_files(self, settings: CoreSettings) -> CoreSettings:
        """Return the core's settings with the files of each model filled in.

        Raises ConfigError for a model that has neither files nor an emulated cost, as no worker could run it.
        """
        models = []
        for model in settings.models:
            spec = model.spec
            opened = self._models.get((spec.name, spec.version), OpenedFiles(spec.files, {}, spec.gpu_files))
            files, gpu_files, fp32_files = opened.files, opened.gpu_files, opened.fp32_files
            if not files and spec.emulated is None:
                raise ConfigError(
                    f"model {spec.name}:{spec.version}: no file given; set its path, or emulated = {{...}}"
                )
            spec = replace(spec, files=files, gpu_files=gpu_files, fp32_files=fp32_files)
            models.append(replace(model, spec=spec))
        return replace(settings, models=tuple(models))

    def read_chunk(self, sha256: str, offset: int, nbytes: int) -> tuple[bytes, int]:
        """Return up to ``nbytes`` (at most MAX_CHUNK_BYTES) at ``offset``, and the file's whole length.

        Raises RemoteError ``not_found`` for a hash that no model has, or whose file was overwritten.
        """
        file = self._files.get(sha256)
        if file is None:
            raise RemoteError(Code.NOT_FOUND, f"no model file has sha256 {sha256[:64]}")
        status = os.fstat(file.descriptor)
        if (status.st_size, status.st_mtime_ns) != (file.nbytes, file.modified_ns):
            raise RemoteError(
                Code.NOT_FOUND, f"{file.path.name} was overwritten after the broker had started; restart it"
            )
        return os.pread(file.descriptor, min(nbytes, MAX_CHUNK_BYTES), offset), file.nbytes

    def read(self, model: LocalModel) -> OpenedFiles:
        """Open and hash the files of a model. Raises ModelError naming the one that can't be used."""
        folder = model.path.parent.resolve()
        lists: list[list[ModelFile]] = [[], [], []]
        kinds = ((model.path, *model.extra_files), model.gpu_files, model.fp32_files)
        opened: dict[str, _OpenFile] = {}
        try:
            for paths, files in zip(kinds, lists, strict=True):
                for path in paths:
                    files.append(_open_file(model, path, _name_in(folder, model, path), opened))
        except BaseException:
            for file in opened.values():
                os.close(file.descriptor)
            raise
        return OpenedFiles(tuple(lists[0]), opened, tuple(lists[1]), tuple(lists[2]))

    def adopt(self, opened: OpenedFiles, wanted: Collection[str]) -> None:
        """Serve these files from now on; of the others only those whose hash is ``wanted``."""
        for sha256 in [one for one in self._files if one not in wanted and one not in opened.by_sha256]:
            os.close(self._files.pop(sha256).descriptor)
        self._take(opened)

    def _take(self, opened: OpenedFiles) -> None:
        for sha256, file in opened.by_sha256.items():
            if sha256 in self._files:
                os.close(self._files[sha256].descriptor)  # the newer one may lie where it lasts longer
            self._files[sha256] = file


def _name_in(folder: Path, model: LocalModel, path: Path) -> str:
    inside = path.parent.resolve() / path.name
    if not inside.is_relative_to(folder):
        raise ModelError(f"model {model.name}: {path} does not lie in {folder}, the folder of its graph")
    return inside.relative_to(folder).as_posix()


def _open_file(model: LocalModel, path: Path, name: str, opened: dict[str, _OpenFile]) -> ModelFile:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"model {model.name}: {path} can't be opened: {error.strerror}") from error
    try:
        sha256, status = _hash(path, descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ModelError(f"model {model.name}: {path} can't be read: {error.strerror}") from error
    if sha256 in opened:
        os.close(descriptor)
    elif status.st_size == 0:
        os.close(descriptor)
        raise ModelError(f"model {model.name}: {path} is empty")
    else:
        opened[sha256] = _OpenFile(path, descriptor, status.st_size, status.st_mtime_ns)
    return ModelFile(name, sha256, status.st_size)


def _hash(path: Path, descriptor: int) -> tuple[str, os.stat_result]:
    status = os.fstat(descriptor)
    key = (str(path.resolve()), status.st_mtime_ns, status.st_size)
    known = _hash_cache.get(key)
    if known is None:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            known = _hash_cache[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return known, status
