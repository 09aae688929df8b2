"""The command line: help for newcomers, one-line errors, stable exit codes, texts and objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
import structlog
from click.testing import CliRunner

from headrace import __version__, cli
from headrace.build_kind import build_kind
from headrace.cli.lines import missed_line, missed_object, outcome_line, outcome_object
from headrace.cli.push import stream_name
from headrace.cli.reload import what_was_done
from headrace.cli.tables import status_text
from headrace.clients.records import Missed, MissedReason
from headrace.errors import (
    ConfigError,
    DeviceError,
    HeadraceError,
    ModelError,
    RequestTimeoutError,
    UnreachableError,
)
from headrace.exit_codes import ExitCode, exit_code_of
from headrace.protocol.messages import Outcome, Status, TensorSpec, Timing, Value
from headrace.supervisor import SupervisorError


@pytest.fixture(autouse=True)
def _reset_logs() -> Iterator[None]:
    """A command sets up the process's logs; the next test's stderr is another."""
    yield
    structlog.reset_defaults()


COMMANDS = [
    "up",
    "broker",
    "worker",
    "push",
    "watch",
    "status",
    "demo",
    "bench",
    "simulate",
    "plan-classes",
    "record",
    "reload",
    "export",
    "doctor",
]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_it_does_and_shows_examples(name: str) -> None:
    """A newcomer sees a sentence, every option with its meaning, and lines to copy."""
    result = CliRunner().invoke(cli.cli, [name, "--help"])

    assert result.exit_code == 0
    assert f"Usage: cli {name}" in result.output
    assert "Examples:" in result.output
    assert f"  headrace {name}" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_meaning(name: str) -> None:
    """No option stands in --help without a word."""
    command = cli.cli.commands[name]
    mute = [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and not option.help
    ]

    assert mute == []


def test_help_of_all_lists_the_commands_and_exit_codes() -> None:
    """`headrace --help` is the first page."""
    result = CliRunner().invoke(cli.cli, ["--help"])

    for name in COMMANDS:
        assert f"  {name} " in result.output
    for code in (65, 69, 70, 78):
        assert str(code) in result.output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`headrace --version` names the release, and whether it is compiled."""
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace, version {__version__} ({build_kind()})\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["broker"], ExitCode.CONFIG, ["no [[models]]", "headrace up --model"]),
        (["broker", "--config", "none.toml"], ExitCode.CONFIG, ["none.toml", "No such file"]),
        (["broker", "--config", "vidoe"], ExitCode.CONFIG, ["no preset named 'vidoe'", "video"]),
        (["broker", "--config", "video", "--port", "99999"], ExitCode.CONFIG, ["broker.port = 99999"]),
        (["broker", "--config", "video", "--size", "3x3"], ExitCode.USAGE, ["--size and --adapter"]),
        (["broker", "--model", "none.onnx"], ExitCode.CONFIG, ["--model none.onnx", "no such file"]),
        (["up"], ExitCode.CONFIG, ["no [[models]]"]),
        (["up", "--workers", "0"], ExitCode.USAGE, ["--workers", "0 is not in the range"]),
        (["worker", "--connect", "http://x"], ExitCode.CONFIG, ["http://x", "tcp or ipc"]),
        (["worker", "--device", "tpu"], ExitCode.USAGE, ["--device", "tpu"]),
        (["status", "--connect", "host:port"], ExitCode.CONFIG, ["host:port"]),
        (
            ["status", "--connect", "ipc:///nowhere/s", "--timeout", "0.2"],
            ExitCode.UNAVAILABLE,
            ["/nowhere/s", "`headrace up`", "--connect"],
        ),
        (["watch", "a", "b/"], ExitCode.USAGE, ["'b/' is a prefix"]),
        (["push", "none.mp4"], ExitCode.FAILED, ["none.mp4"]),
        (["push"], ExitCode.USAGE, ["SOURCE"]),
        (["demo", "--fps", "fast"], ExitCode.USAGE, ["fast", "native"]),
        (["demo", "--fps", "0"], ExitCode.USAGE, ["native"]),
        (["nothing"], ExitCode.USAGE, ["nothing"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and len(value) < 6 else None,
)
def test_an_error_is_named_in_one_line(
    arguments: list[str], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line of stderr names key, value and remedy; stdout stays empty."""
    assert cli.run(arguments) == code

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    last_line = captured.err.strip().splitlines()[-1]
    for word in words:
        assert word in last_line


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a bug report there is HEADRACE_DEBUG=1."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")

    assert cli.run(["broker"]) == ExitCode.CONFIG

    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 78),
        (ModelError("x"), 65),
        (DeviceError("x"), 69),
        (UnreachableError("x"), 69),
        (RequestTimeoutError("x"), 69),
        (HeadraceError("x"), 1),
        (SupervisorError("x", 65), 65),
        (ValueError("x"), 70),
    ],
)
def test_exit_codes_of_errors(error: Exception, code: int) -> None:
    """Each class of error has its documented code; what is no error of ours is a bug."""
    assert exit_code_of(error) == code


def _raise(error: BaseException) -> click.Command:
    @click.command("fail")
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("two\nlines"), 70, "headrace: internal error, please report it: ValueError: two lines"),
        (ConfigError("a\nb"), 78, "headrace: error: a b"),
        (KeyboardInterrupt(), 130, "headrace: interrupted"),
    ],
)
def test_whatever_a_command_raises_ends_in_one_line(
    error: BaseException,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No traceback reaches a user, not even of a bug."""
    monkeypatch.setitem(cli.cli.commands, "fail", _raise(error))

    assert cli.run(["fail"]) == code

    assert capsys.readouterr().err.strip() == text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("clip.mp4", "clip"),
        ("/data/site-a/door.avi", "door"),
        ("images/", "images"),
        ("0", "camera-0"),
        ("rtsp://user:secret@camera/live", "camera/live"),
    ],
)
def test_a_stream_is_named_after_its_source(source: str, name: str) -> None:
    """Without --stream; a password in an address never becomes a topic."""
    assert stream_name(source) == name


OUTCOME = Outcome(
    stream="cam-1",
    epoch=2**63,
    seq=7,
    boot=1,
    pub_seq=3,
    status=Status.OK,
    model="text",
    version="1",
    size_class="small",
    worker="w-1",
    attempt=1,
    batch_size=4,
    shape=(144, 176, 3),
    timing=Timing(published_us=34_240),
)


@pytest.mark.parametrize(
    ("outputs", "tensors", "words"),
    [
        (None, (), ""),
        ([1, 2], (), "2 results"),
        ({"boxes": [1, 2, 3], "label": "cat", "score": 0.98765}, (), "3 boxes, label=cat, score=0.988"),
        (b"abc", (), "3 bytes"),
        ("x" * 100, (), "x" * 37 + "..."),
        (None, (TensorSpec("out", "float32", (2, 3)),), "out float32[2, 3]"),
    ],
)
def test_an_outcome_is_one_line(outputs: Value, tensors: tuple[TensorSpec, ...], words: str) -> None:
    """Where it ran, how long it took, and the gist of what came out."""
    line = outcome_line(replace(OUTCOME, outputs=outputs, tensors=tensors, payloads=(b"",) * len(tensors)))

    assert line == ("cam-1 #7  ok  text/small  batch of 4 on w-1  34.2 ms" + (f"  {words}" if words else ""))


def test_a_rejected_outcome_names_its_code_and_message() -> None:
    """A frame that never ran shows why."""
    outcome = Outcome("s", 1, 2, 3, 4, Status.REJECTED, code="wrong_dtype", message="float64 given")

    assert outcome_line(outcome) == "s #2  rejected  wrong_dtype: float64 given"
    assert outcome_object(outcome)["code"] == "wrong_dtype"


def test_an_outcome_object_is_json_without_empty_fields() -> None:
    """Machines get names, numbers and shapes; payload bytes and what says nothing are left out."""
    value = json.loads(json.dumps(outcome_object(OUTCOME)))

    assert value["event"] == "outcome"
    assert value["epoch"] == 2**63
    assert value["timing"]["published_us"] == 34_240
    assert not {"payloads", "code", "message", "meta"} & set(value)


@pytest.mark.parametrize(("last", "which"), [(9, "5 to 9"), (None, "5 and later")])
def test_a_missed_range_is_one_line(last: int | None, which: str) -> None:
    """A hole is said, never silence."""
    missed = Missed("s", 1, 5, last, MissedReason.LEFT_RING)

    assert missed_line(missed) == f"s  missed outcomes {which} (left_ring)"
    assert missed_object(missed)["event"] == "missed"


def test_status_shows_account_classes_workers_and_streams() -> None:
    """The account adds up in one line; each table has its row."""
    status: dict[str, Value] = {
        "broker": {"release": "1", "build": "compiled", "pid": 5, "addresses": {"frames": "tcp://h:1"}},
        "is_draining": False,
        "account": {
            "accepted": 10, "ok": 7, "error": 1, "expired": 1, "superseded": 0, "unfinished": 1,
            "rejected": 2,
        },
        "rejected_by_code": {"queue_full": 2},
        "unfinished_bytes": 2**20,
        "max_bytes": 2**29,
        "producers_count": 1,
        "classes": [{"model": "m", "version": "1", "size_class": "c", "mean_batch": 2.5}],
        "workers": [{"id": "w", "device": "cpu", "slots": 2, "in_flight": 1, "notes": ["fixed batch of 1"]}],
        "streams": {f"s{n}": {"counts": {"ok": n}, "is_stale": True} for n in range(30)},
        "streams_count": 30,
        "models": [
            {
                "name": "m", "version": "1", "live_version": "1-ab", "kept_version": "1",
                "reload": {"phase": "live"},
            },
            {"name": "quiet", "version": "1", "live_version": "1", "kept_version": "", "reload": None},
        ],
    }  # fmt: skip

    text = status_text(status)

    assert text.startswith("broker 1 (compiled) at tcp://h:1, pid 5")
    assert (
        "10 accepted = 7 ok + 1 error + 1 expired + 0 superseded + 1 unfinished; 2 rejected (2 queue_full)"
        in text
    )
    assert "1 of 512 MiB" in text
    assert "2.50" in text
    assert "w: fixed batch of 1" in text
    assert "  m:1: serving version 1-ab, last reload live, version 1 kept\n" in text
    assert "quiet" not in text
    assert "stale" in text
    assert "and 10 more" in text


def test_status_of_an_unknown_release_shows_dashes() -> None:
    """What is missing is a dash, never a traceback; no worker is said aloud with the remedy."""
    text = status_text({"classes": [{}, 5], "workers": "x", "streams": [], "account": None})

    assert "- accepted" in text
    assert "no workers: frames wait; start one with `headrace worker" in text


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("failed", "the reload was given up; serving version 2 as before"),
        ("rolled_back", "rolled back: serving version 2"),
        ("committed", "committed: serving version 2, the one before was let go"),
        ("of-a-later-release", "of-a-later-release: serving version 2"),
    ],
)
def test_what_was_done_about_a_reload_is_said(phase: str, said: str) -> None:
    assert what_was_done({"serving": "2", "phase": phase}) == said


def test_a_packaged_preset_is_read_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--config video is the preset, which has no model yet: the error says what to add."""
    assert cli.run(["broker", "--config", "video"]) == ExitCode.CONFIG
    assert "video.toml: no [[models]]" in capsys.readouterr().err
