"""Odd things that people type: each ends soon, with its own exit code and one line that says why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from hr_processes import LIMIT_S, BrokerProcess, Processes, Running, check_account, emulated_config

from headrace.exit_codes import ExitCode


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all, which must outlive all of them."""
    with Processes(tmp_path_factory.mktemp("broker")) as processes:
        broker = processes.broker(emulated_config())
        yield broker
        status = broker.status()
        check_account(status)
        assert status["account"]["accepted"] == 0
        assert broker.running.stop() == ExitCode.OK
        assert "Traceback" not in broker.running.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are not what their names say."""
    tmp_path = tmp_path_factory.mktemp("odd")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("not a video\n")
    (tmp_path / "noise.jpg").write_bytes(np.random.default_rng(1).bytes(1_000))
    (tmp_path / "empty.toml").touch()
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


LONG = "x" * 200

#: Commands at a time.
AT_ONCE = 3

CASES = {
    "push-empty-file": ("push empty.mp4 --connect FRAMES", ExitCode.FAILED, "empty.mp4 is not a video"),
    "push-text-as-video": ("push text.mp4 --connect FRAMES", ExitCode.FAILED, "text.mp4 is not a video"),
    "push-noise-as-image": ("push noise.jpg --connect FRAMES", ExitCode.FAILED, "1 damaged"),
    "push-empty-folder": ("push folder --connect FRAMES", ExitCode.FAILED, "holds no image"),
    "push-nothing-there": ("push none.mp4 --connect FRAMES", ExitCode.FAILED, "none.mp4"),
    "push-no-camera": ("push 99 --connect FRAMES", ExitCode.FAILED, "no camera 99"),
    "push-to-results": ("push PICTURE --connect RESULTS", ExitCode.UNAVAILABLE, "no broker answered"),
    "push-priority": ("push PICTURE --priority 200 --connect FRAMES", ExitCode.FAILED, "priority: 200"),
    "push-empty-stream": ("push PICTURE --stream  --connect FRAMES", ExitCode.FAILED, "bad_stream"),
    "push-long-stream": (f"push PICTURE --stream {LONG} --connect FRAMES", ExitCode.FAILED, "bad_stream"),
    "watch-long-stream": (f"watch {LONG} --connect FRAMES", ExitCode.CONFIG, "1 to 128"),
    "watch-empty-stream": ("watch  --connect FRAMES", ExitCode.CONFIG, "0 bytes"),
    "watch-prefix-and-stream": ("watch a b/ --connect FRAMES", ExitCode.USAGE, "is a prefix"),
    "watch-count-zero": ("watch --count 0 --connect FRAMES", ExitCode.USAGE, "--count"),
    "status-at-intake": ("status --timeout 0.5 --connect INTAKE", ExitCode.UNAVAILABLE, "no broker answered"),
    "status-at-control": ("status --connect CONTROL", ExitCode.OK, "no workers"),
    "status-high-port": ("status --connect tcp://127.0.0.1:99999", ExitCode.CONFIG, "99999"),
    "status-no-ipc": ("status --timeout 0.5 --connect ipc:///none/x", ExitCode.UNAVAILABLE, "ipc:///none/x"),
    "worker-no-file": ("worker --device cpu --connect FRAMES", ExitCode.MODEL, "has no file"),
    "worker-empty-address": ("worker --connect ", ExitCode.CONFIG, "must not be empty"),
    "broker-empty-file": ("broker --config empty.toml", ExitCode.CONFIG, "no [[models]]"),
    "broker-not-utf8": ("broker --config latin.toml", ExitCode.CONFIG, "not UTF-8"),
    "broker-folder": ("broker --config folder", ExitCode.CONFIG, "can't be read"),
    "broker-empty-model": ("broker --model empty.onnx --port 0", ExitCode.MODEL, "the file is empty"),
    "broker-no-model": ("broker --model none.onnx --port 0", ExitCode.CONFIG, "no such file"),
    "broker-high-port": ("broker --config CONFIG --port 65535", ExitCode.CONFIG, "at most 65531"),
    "broker-ready-file": ("broker --config CONFIG --ready-file none/r.json", ExitCode.FAILED, "No such file"),
    "demo-out": ("demo --out text.mp4/out", ExitCode.FAILED, "text.mp4"),
}


@pytest.fixture(scope="module")
def runs(broker: BrokerProcess, folder: Path) -> Iterator[dict[str, Future[tuple[Running, int]]]]:
    """Every command, run to its end: a few at a time, as some of them wait for an answer that never comes."""
    picture = folder / "picture.png"
    picture.write_bytes(_png())
    config = folder / "broker.toml"
    config.write_text(emulated_config())
    names = {name.upper(): address for name, address in broker.endpoints.items() if isinstance(address, str)}
    names |= {"PICTURE": str(picture), "CONFIG": str(config)}

    with Processes(folder) as processes, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(line: str) -> tuple[Running, int]:
            arguments = [names.get(word, word) for word in line.split(" ")]
            running = processes.start(*arguments, cwd=folder, env={"HEADRACE_CACHE": str(folder / "cache")})
            return running, running.wait()

        yield {name: pool.submit(run, line) for name, (line, _, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_odd_input_is_answered_in_one_line(runs: dict[str, Future[tuple[Running, int]]], name: str) -> None:
    """Exit code of the kind, the reason in the last line, no traceback, and no broker is the worse for it."""
    _, code, words = CASES[name]

    running, ended = runs[name].result(LIMIT_S)

    output = [*running.stdout, *running.stderr.splitlines()]
    assert ended == code, running.text()
    assert words in "\n".join(output[-2:]), running.text()
    assert "Traceback" not in running.stderr
    assert "internal error" not in running.stderr


def _png() -> bytes:
    return bytes(cv2.imencode(".png", np.zeros((32, 32, 3), np.uint8))[1])
