"""Reloading over the sockets: files are read and served, workers told, whoever asked learns how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import hr_broker as hb
import pytest
import zmq
from click.testing import CliRunner

from headrace import cli
from headrace.broker.shell_settings import LocalModel
from headrace.protocol.messages import Batch, Load, Loaded, NotLoaded, Unload

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name, content in (("m.onnx", b"graph"), ("new.onnx", b"other graph"), ("weights.bin", b"1234")):
        (tmp_path / "models" / name).write_bytes(content)
    (tmp_path / "secret.key").write_bytes(b"nobody's business")
    return tmp_path / "models"


@pytest.fixture
def broker(folder: Path) -> Iterator[hb.BrokerThread]:
    with hb.running_broker(
        hb.broker_settings(local_models=(LocalModel("m", "1", folder / "m.onnx"),))
    ) as running:
        yield running


def state(caller: hb.Caller) -> dict[str, object]:
    return caller.call("status", max_streams=0).result["models"][0]  # type: ignore[index, return-value]


def wait_for(caller: hb.Caller, *phases: str) -> dict[str, object]:
    """Ask until the reload is in one of these phases."""
    until_s = time.monotonic() + hb.TIMEOUT_S
    while time.monotonic() < until_s:
        reload = state(caller)["reload"]
        if isinstance(reload, dict) and reload["phase"] in phases:
            return reload
    raise AssertionError(f"never {phases}: {state(caller)}")


def test_a_reload_and_its_rollback(broker: hb.BrokerThread, folder: Path) -> None:
    """The worker is told to load, fetches the new files, and is sent batches of the new version."""
    with (
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hb.Caller(broker.endpoints) as caller,
    ):
        begun = caller.call(
            "reload", path=str(folder / "new.onnx"), extra_files=["weights.bin"], frames=0, version="2"
        )
        load = worker.expect(Load)
        chunks = [
            bytes(caller.call("fetch", sha256=file.sha256, offset=0, nbytes=99).payloads[0])
            for file in (*load.model.files, *worker.setup.models[0].files)
        ]
        profile = hb.ready_for((load.model,), "w1", 1).models[0]
        worker.send(Loaded(profile))
        wait_for(caller, "live")
        producer.send(hb.frames(hb.frame("cam", 0)))
        first = worker.expect(Batch)
        worker.finish(first)
        back = caller.call("rollback")
        unload = worker.expect(Unload)
        producer.send(hb.frames(hb.frame("cam", 1)))
        second = worker.expect(Batch)
        after = state(caller)

    assert begun.result == {"number": 1, "phase": "reading"}
    assert [file.path for file in load.model.files] == ["new.onnx", "weights.bin"]
    assert chunks == [b"other graph", b"1234", b"graph"]
    assert (first.version, second.version) == ("2", "1")
    assert (back.result, unload) == ({"serving": "1", "phase": "rolled_back"}, Unload("m", "2"))
    assert (after["live_version"], after["kept_version"]) == ("1", "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.onnx", "can't be opened: No such file"),
        ("../secret.key", "lies in none of the folders that models may be reloaded from"),
    ],
)
def test_files_that_cannot_be_read_end_it(
    broker: hb.BrokerThread, folder: Path, name: str, words: str
) -> None:
    """Nobody gets at a file of another folder; the running version serves on."""
    with hb.Caller(broker.endpoints) as caller:
        caller.call("reload", path=str(folder / name))
        reload = wait_for(caller, "failed")

    assert reload["code"] == "reload_refused"
    assert words in str(reload["message"])


@pytest.mark.parametrize(
    ("method", "params", "code", "words"),
    [
        ("reload", {"path": "new.onnx"}, "bad_params", "must be absolute"),
        ("reload", {"path": "/x", "version": "a b"}, "bad_params", "version"),
        ("reload", {"path": "/x", "tolerance": -1}, "bad_params", "'tolerance'"),
        ("reload", {"path": "/x", "agreement": "all"}, "bad_params", "'agreement'"),
        ("reload", {"path": "/x", "model": "nobody"}, "not_found", "no such model"),
        ("rollback", {}, "not_found", "no earlier version"),
        ("commit", {"model": "m"}, "not_found", "no earlier version"),
    ],
)
def test_a_wrong_order_is_refused_at_once(
    broker: hb.BrokerThread, method: str, params: dict[str, object], code: str, words: str
) -> None:
    """The answer names what is wrong."""
    with hb.Caller(broker.endpoints) as caller:
        reply = caller.call(method, **params)

    assert reply.code == code
    assert words in reply.message


def test_the_command_tells_how_it_ended(broker: hb.BrokerThread, folder: Path) -> None:
    """Exit code 1 and the worker's reason; --status says the same later."""
    address = ["--connect", broker.endpoints.frames]
    with hb.Worker(broker.endpoints) as worker, hb.Caller(broker.endpoints) as caller:
        caller.call("reload", path=str(folder / "new.onnx"), version="2")
        worker.expect(Load)
        worker.send(NotLoaded("m", "2", "load_failed", "no batch axis"))
        wait_for(caller, "failed")

        none = CliRunner().invoke(
            cli.cli, ["reload", *address, "--path", str(folder / "none.onnx")], standalone_mode=False
        )
        said = CliRunner().invoke(cli.cli, ["reload", *address, "--status"])
        both = CliRunner().invoke(cli.cli, ["reload", *address, "--status", "--rollback"])

    assert none.return_value == 1
    assert "m: failed, serving version 1; reload_refused" in none.output
    assert "m: failed, serving version 1; reload_refused" in said.output
    assert "name one of --path" in both.output
