"""The model cache: only what has its hash, once a host, resumed, and never a path that a peer chose."""

from __future__ import annotations

import fcntl
import hashlib
import threading
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.protocol.messages import ModelFile, ModelSpec
from headrace.workers import model_cache
from headrace.workers.model_cache import FetchError, ModelCache, StoppedError, default_cache_folder

DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "CHUNK_BYTES", 1000)


class Source:
    """Serves DATA; ``fail_at`` breaks off at an offset, ``twist`` changes what is served."""

    def __init__(self, data: bytes = DATA, fail_at: int | None = None) -> None:
        self.data, self.fail_at = data, fail_at
        self.offsets: list[int] = []

    def fetch(self, sha256: str, offset: int, nbytes: int) -> tuple[int, bytes]:
        if offset == self.fail_at:
            raise FetchError("the connection was lost")
        self.offsets.append(offset)
        return len(self.data), self.data[offset : offset + nbytes]


def models(path: str = "model.onnx", sha256: str = SHA256, nbytes: int = len(DATA)) -> tuple[ModelSpec, ...]:
    return (ModelSpec("m", "1", files=(ModelFile(path, sha256, nbytes),)),)


def test_a_file_is_fetched_in_chunks_verified_and_kept(tmp_path: Path) -> None:
    source = Source()

    files = ModelCache(tmp_path).ensure(models(), source)

    assert Path(files[SHA256]).read_bytes() == DATA
    assert source.offsets == list(range(0, len(DATA), 1000))
    again = Source()
    assert ModelCache(tmp_path).ensure(models(), again) == files
    assert again.offsets == []


def test_a_fetch_that_broke_off_is_taken_up_where_it_ended(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="lost"):
        ModelCache(tmp_path).ensure(models(), Source(fail_at=3000))

    source = Source()
    files = ModelCache(tmp_path).ensure(models(), source)

    assert source.offsets[0] == 3000
    assert Path(files[SHA256]).read_bytes() == DATA


def test_what_does_not_have_its_hash_is_thrown_away(tmp_path: Path) -> None:
    """Neither the file nor its part stays: the next try starts anew."""
    wrong = Source(b"x" * len(DATA))
    with pytest.raises(FetchError, match="does not have sha256"):
        ModelCache(tmp_path).ensure(models(), wrong)

    source = Source()
    ModelCache(tmp_path).ensure(models(), source)

    assert source.offsets[0] == 0


@pytest.mark.parametrize("damage", [b"", DATA[:-1], b"y" + DATA[1:]], ids=["empty", "short", "changed"])
def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    cache = ModelCache(tmp_path)
    path = cache.path_of(SHA256)
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)

    cache.ensure(models(), Source())

    assert path.read_bytes() == DATA


@pytest.mark.parametrize(
    ("source", "words"),
    [(Source(DATA + b"more"), "announced"), (Source(b""), "announced")],
    ids=["longer", "empty"],
)
def test_a_file_of_another_size_is_refused(tmp_path: Path, source: Source, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        ModelCache(tmp_path).ensure(models(), source)


def test_a_chunk_of_another_size_is_refused(tmp_path: Path) -> None:
    class Greedy(Source):
        def fetch(self, sha256: str, offset: int, nbytes: int) -> tuple[int, bytes]:
            return len(DATA), DATA

    with pytest.raises(FetchError, match="asked for 1000 bytes, got 10240"):
        ModelCache(tmp_path).ensure(models(), Greedy())


@pytest.mark.parametrize("sha256", ["../../etc/passwd", "A" * 64, "", SHA256 + "/x"])
def test_a_hash_that_is_no_hash_never_becomes_a_path(tmp_path: Path, sha256: str) -> None:
    with pytest.raises(FetchError, match="is not a sha256"):
        ModelCache(tmp_path).ensure(models(sha256=sha256), Source())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../../../tmp/evil", "/etc/passwd"])
def test_a_models_own_path_is_not_used_here(tmp_path: Path, path: str) -> None:
    files = ModelCache(tmp_path).ensure(models(path), Source())

    assert Path(files[SHA256]).is_relative_to(tmp_path)


@pytest.mark.parametrize("nbytes", [-1, 5_001])
def test_a_size_beyond_the_bound_is_refused_before_anything_is_fetched(tmp_path: Path, nbytes: int) -> None:
    source = Source()

    with pytest.raises(FetchError, match="limit is 5000"):
        ModelCache(tmp_path, max_file_bytes=5_000).ensure(models(nbytes=nbytes), source)

    assert source.offsets == []


def test_a_second_worker_waits_for_the_first_and_fetches_nothing(tmp_path: Path) -> None:
    """The lock is held by somebody else; when it is free the file is there."""
    cache = ModelCache(tmp_path)
    path = cache.path_of(SHA256)
    path.parent.mkdir(parents=True)
    source = Source()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: ModelCache(tmp_path).ensure(models(), source))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        path.write_bytes(DATA)
    thread.join(10)

    assert not thread.is_alive()
    assert source.offsets == []


def test_a_stop_ends_the_wait_for_a_lock_and_a_fetch(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        ModelCache(tmp_path, should_stop=lambda: True).ensure(models(), Source())


def test_a_folder_that_cannot_be_used_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder is needed")

    with pytest.raises(ConfigError, match="--cache-dir"):
        ModelCache(tmp_path).ensure(models(), Source())


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    assert default_cache_folder() == tmp_path / "headrace"

    monkeypatch.setenv("HEADRACE_CACHE", "/elsewhere")
    assert default_cache_folder() == Path("/elsewhere")
