"""The demo's table and lines: right figures, and no failure on a status that lacks fields."""

from __future__ import annotations

import io
from collections import Counter, deque

import pytest
from rich.console import Console

from headrace.demo.broker_status import account_of, class_rows, worker_rows
from headrace.demo.display import Display
from headrace.demo.live_table import line_of, table_of, view_of
from headrace.demo.tracker import StreamProgress

MS = 1_000_000
SIZES = {"camera-1": "176x144", "camera-2": "640x272"}
STATUS = {
    "account": {"accepted": 9, "ok": 9},
    "classes": [
        {"size_class": "small", "waiting": 3, "batches": 4, "mean_batch": 1.5, "padding_waste": 0.175}
    ],
    "workers": [
        {"id": "w-1", "device": "cpu", "state": "ready", "in_flight": 1, "frames": 6, "busy_share": 0.42}
    ],
}


def view(elapsed_s=6.0, status=STATUS):
    progress = {
        "camera-1": StreamProgress(
            9,
            Counter(ok=6, superseded=2, error=1),
            12,
            deque([(4000 * MS, 30 * MS, 1), (5000 * MS, 50 * MS, 4), (5500 * MS, 40 * MS, 3)]),
        )
    }
    return view_of(elapsed_s, 12.0, SIZES, progress, status)


def test_a_moment_holds_the_means_of_the_last_seconds():
    first, second = view().streams

    assert (first.sent, first.ok, first.superseded, first.other, first.boxes) == (9, 6, 2, 1, 3)
    assert first.fps == pytest.approx(1.0)
    assert first.latency_ms == pytest.approx(40.0)
    assert (second.sent, second.fps, second.latency_ms, second.boxes) == (0, 0.0, None, 0)


def test_the_line_names_streams_classes_and_workers():
    line = line_of(view())

    assert line.startswith("  6.0 s of 12 | camera-1 1.0 fps 40 ms 3 boxes; camera-2 0.0 fps - 0 boxes |")
    assert "small 3 queued, batch 1.5" in line
    assert line.endswith("w-1 42% busy")


def test_the_table_shows_every_row():
    console = Console(file=io.StringIO(), width=120)

    console.print(table_of(view()))

    text = console.file.getvalue()
    for word in ("camera-1", "camera-2", "640x272", "40 ms", "small", "18%", "1.50", "w-1", "42%"):
        assert word in text


@pytest.mark.parametrize(
    "status",
    [{}, {"classes": None, "workers": 3, "account": "x"}, {"classes": [None, 1], "workers": [None]}],
    ids=["empty", "wrong-types", "wrong-entries"],
)
def test_a_status_of_another_release_breaks_nothing(status):
    assert account_of(status) == {}
    assert sum(row.queued + row.batches for row in class_rows(status)) == 0
    assert sum(row.load for row in worker_rows(status)) == 0
    assert line_of(view(status=status))


def test_without_a_terminal_there_is_a_line_every_two_seconds():
    stream = io.StringIO()

    with Display(stream) as display:
        display.note("waiting")
        for tenths in range(0, 60, 5):
            display.show(view(elapsed_s=tenths / 10))

    lines = stream.getvalue().splitlines()
    assert lines[0] == "waiting"
    assert [line.split()[0] for line in lines[1:]] == ["0.0", "2.0", "4.0"]
