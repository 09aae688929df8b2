"""Keeps model files by their sha256, fetched from the broker in chunks; shared by all workers of a host.

A file is in the cache when it stands under its own hash and was verified by this process; where its model
wants it (``ModelFile.path``) is the engine's matter, and no name that a peer sent ever becomes a path here.

Theory of operation. A fetch holds the file's lock (flock, gone with the process), appends to ``HASH.part``,
hashes the whole and renames it: others see either nothing or the complete file. A fetch that broke off is
taken up where the part ends. What does not have its hash is deleted: it is tried again from its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import structlog

from headrace.errors import ConfigError, LocalError
from headrace.protocol.messages import ModelFile, ModelSpec

log = structlog.get_logger()

#: Bytes asked for at once. A round trip per MiB is nothing beside reading and hashing it.
CHUNK_BYTES = 1024 * 1024

#: Largest model file that is fetched. ONNX models with external weights of this size do not fit the memory
#: of the GPUs that this project is for.
MAX_FILE_BYTES = 64 * 1024**3

#: How often a waiting process looks whether another one has finished its fetch.
LOCK_POLL_S = 0.05

_SHA256 = re.compile(r"[0-9a-f]{64}")


class FetchError(LocalError):
    """A file could not be had now; another try may work."""


class StoppedError(LocalError):
    """The process is ending; the fetch was given up."""


class ChunkSource(Protocol):
    """Where chunks come from: the broker's control socket in production."""

    def fetch(self, sha256: str, offset: int, nbytes: int) -> tuple[int, bytes]:
        """Return the file's total size and up to ``nbytes`` bytes from ``offset``. Raises FetchError."""
        ...


class ModelCache:
    """See the module. Used by one thread at a time; any number of processes share one ``folder``."""

    def __init__(
        self, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES, should_stop: Callable[[], bool] = bool
    ) -> None:
        self._folder = folder / "models"
        self._max_file_bytes = max_file_bytes
        self._should_stop = should_stop
        self._verified: set[str] = set()
        self._pause = threading.Event()  # never set: only waited on

    def ensure(self, models: tuple[ModelSpec, ...], source: ChunkSource) -> dict[str, str]:
        """Return the local path of every file of ``models`` by sha256, fetching those that are missing.

        Raises FetchError when the broker can't give one now, ConfigError when the folder can't be used,
        StoppedError when ``should_stop`` said so.
        """
        files = {file.sha256: file for spec in models for file in (*spec.files, *spec.fp32_files)}
        return {sha256: str(self._ensure_file(file, source)) for sha256, file in files.items()}

    def path_of(self, sha256: str) -> Path:
        """Return where a file stands once it is there."""
        return self._folder / sha256[:2] / sha256

    def _ensure_file(self, file: ModelFile, source: ChunkSource) -> Path:
        self._check(file)
        path = self.path_of(file.sha256)
        try:
            if not self._is_there(path, file):
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._locked(path.with_suffix(".lock")):
                    if not self._is_there(path, file):  # another worker may have fetched it meanwhile
                        self._fetch(file, path, source)
        except OSError as error:
            raise ConfigError(
                f"model cache {self._folder}: {error.strerror or error}; choose another with --cache-dir or"
                " HEADRACE_CACHE"
            ) from error
        self._verified.add(file.sha256)
        return path

    def _check(self, file: ModelFile) -> None:
        if not _SHA256.fullmatch(file.sha256):
            raise FetchError(f"model file {file.path!r}: {file.sha256[:80]!r} is not a sha256")
        if not 0 <= file.nbytes <= self._max_file_bytes:
            raise FetchError(
                f"model file {file.path!r} is said to have {file.nbytes} bytes, the limit is"
                f" {self._max_file_bytes}"
            )

    def _is_there(self, path: Path, file: ModelFile) -> bool:
        """Tell whether the file is whole. Hashed once a process: disks and people damage files."""
        if not path.is_file():
            return False
        is_complete = path.stat().st_size == file.nbytes
        if is_complete and (file.sha256 in self._verified or self._hash(path).hexdigest() == file.sha256):
            return True
        log.warning("cached model file is damaged", path=str(path))
        path.unlink(missing_ok=True)
        return False

    def _fetch(self, file: ModelFile, path: Path, source: ChunkSource) -> None:
        part = path.with_suffix(".part")
        if part.exists() and part.stat().st_size > file.nbytes:
            part.unlink()
        digest = self._hash(part) if part.exists() else hashlib.sha256()
        with part.open("ab") as stream:
            offset = stream.seek(0, os.SEEK_END)
            log.info("fetching model file", sha256=file.sha256, size_bytes=file.nbytes, have_bytes=offset)
            while offset < file.nbytes:
                self._stop_if_asked()
                chunk = self._next_chunk(file, offset, source)
                stream.write(chunk)
                digest.update(chunk)
                offset += len(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise FetchError(f"model file {file.path!r}: what was fetched does not have sha256 {file.sha256}")
        part.replace(path)

    def _next_chunk(self, file: ModelFile, offset: int, source: ChunkSource) -> bytes:
        wanted = min(CHUNK_BYTES, file.nbytes - offset)
        total, chunk = source.fetch(file.sha256, offset, wanted)
        if total != file.nbytes:
            raise FetchError(
                f"model file {file.path!r}: {file.nbytes} bytes announced, the broker has {total}"
            )
        if not 0 < len(chunk) <= wanted:
            raise FetchError(f"model file {file.path!r}: asked for {wanted} bytes, got {len(chunk)}")
        return chunk

    def _hash(self, path: Path) -> hashlib._Hash:
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(CHUNK_BYTES):
                self._stop_if_asked()
                digest.update(block)
        return digest

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        with path.open("w") as stream:
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._stop_if_asked()
                    self._pause.wait(LOCK_POLL_S)
            yield

    def _stop_if_asked(self) -> None:
        if self._should_stop():
            raise StoppedError("fetching was given up")


def default_cache_folder() -> Path:
    """Return HEADRACE_CACHE, else ``headrace`` in the user's cache folder."""
    named = os.environ.get("HEADRACE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
