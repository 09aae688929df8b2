"""Traces: what is written is read, and what can't be used is named with its line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.planner.trace_file import TraceFrame, TraceKind, TraceWriter, read_trace
from headrace.protocol.messages import Encoding, Keep

HEAD = '{"headrace_trace":1}\n'
GOOD = '{"t":0.5,"stream":"a","shape":[4,4,3],"bytes":48}\n'


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every field survives, and what is default is left out of the file."""
    plain = TraceFrame(0.0, "cam-1", TraceKind((480, 640, 3), 921_600))
    special = TraceFrame(
        1.25,
        "cäm-2",
        TraceKind((8, 8), 77, "m:2", 3, 100, Keep.LATEST, Encoding.JPEG, "uint8"),
    )
    tensor = TraceFrame(1.25, "t", TraceKind((10,), 40, dtype="float32"))
    file = io.StringIO()

    writer = TraceWriter(file, {"release": "1"})
    for frame in (plain, special, tensor):
        writer.write(frame)

    path = tmp_path / "trace.jsonl"
    path.write_text(file.getvalue(), encoding="utf-8")
    assert list(read_trace(path)) == [plain, special, tensor]
    assert "priority" not in file.getvalue().splitlines()[1]


def test_frames_alike_share_one_kind(tmp_path: Path) -> None:
    """A long trace does not hold a kind for each frame."""
    path = tmp_path / "trace.jsonl"
    path.write_text(HEAD + GOOD + GOOD)

    first, second = read_trace(path)

    assert first.kind is second.kind


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("no json\n", "line 1"),
        ("[]\n", "is no trace"),
        ('{"headrace_trace":2}\n', "is no trace"),
        (HEAD + "{}\n", "line 2.*'t' is missing"),
        (HEAD + GOOD.replace("0.5", "-1"), "t is -1"),
        (HEAD + GOOD.replace("0.5", "NaN"), "t is nan"),
        (HEAD + GOOD + GOOD.replace("0.5", "0.4"), "line 3.*times never fall"),
        (HEAD + GOOD.replace('"a"', "7"), "stream is 7"),
        (HEAD + GOOD.replace("[4,4,3]", "[4,0,3]"), "shape holds 0"),
        (HEAD + GOOD.replace("[4,4,3]", "5"), "line 2"),
        (HEAD + GOOD.replace("48", "true"), "bytes holds True"),
        (HEAD + GOOD.replace("}", ',"keep":"some"}'), "line 2"),
        (HEAD + "[]\n", "line 2"),
    ],
)
def test_what_cant_be_used_is_named(tmp_path: Path, text: str, reason: str) -> None:
    """One line, with the file, the line and what is wrong."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError, match=reason) as raised:
        list(read_trace(path))

    assert str(path) in str(raised.value)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    """The remedy is a command."""
    with pytest.raises(ConfigError, match="headrace record"):
        list(read_trace(tmp_path / "none.jsonl"))
