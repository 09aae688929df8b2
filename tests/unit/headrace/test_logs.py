"""Logs go to stderr, in one of two styles, and repeats are counted instead of written."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from headrace import logs

SECOND_NS = 1_000_000_000

BAD_SHAPE = (("code", "bad_shape"),)


def test_first_of_a_kind_is_passed_and_repeats_are_counted() -> None:
    """Of five equal errors within the interval one is written and four are summed up."""
    repeats = logs.RepeatFilter(10 * SECOND_NS)

    passed = [repeats.is_passed("error", "frame rejected", BAD_SHAPE, at) for at in range(5)]

    assert passed == [True, False, False, False, False]
    assert repeats.due(9 * SECOND_NS) == []
    assert repeats.due(10 * SECOND_NS) == [logs.Summary("error", "frame rejected", BAD_SHAPE, 4)]


def test_a_kind_that_fell_silent_is_written_again_at_once() -> None:
    """After a whole interval without repeats the next call passes."""
    repeats = logs.RepeatFilter(10 * SECOND_NS)
    repeats.is_passed("error", "frame rejected", (), 0)

    repeats.due(10 * SECOND_NS)

    assert repeats.is_passed("error", "frame rejected", (), 11 * SECOND_NS)


def test_a_kind_that_goes_on_stays_muted_with_a_count_each_interval() -> None:
    """An endless error costs one line an interval, and the counts add up to the calls."""
    repeats = logs.RepeatFilter(SECOND_NS)
    passed = summed = 0
    for at in range(0, 60 * SECOND_NS, SECOND_NS // 100):
        summed += sum(summary.count for summary in repeats.due(at))
        passed += repeats.is_passed("error", "camera offline", (), at)
    summed += sum(summary.count for summary in repeats.due(0, is_final=True))

    assert passed == 1
    assert passed + summed == 6_000


def test_kinds_differ_by_code_and_are_bounded() -> None:
    """Another code is another kind; beyond the bound everything passes and nothing grows."""
    repeats = logs.RepeatFilter(SECOND_NS)

    assert all(repeats.is_passed("error", "x", (("code", str(code)),), 0) for code in range(logs.MAX_KINDS))
    assert repeats.is_passed("error", "x", (("code", "one too many"),), 0)
    assert repeats.is_passed("error", "x", (("code", "one too many"),), 0)
    assert not repeats.is_passed("error", "x", (("code", "0"),), 0)


def test_interval_of_zero_writes_everything() -> None:
    """summary_ms = 0 turns the filter off."""
    repeats = logs.RepeatFilter(0)

    assert all(repeats.is_passed("error", "x", (), at) for at in range(10))


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    yield io.StringIO()
    structlog.reset_defaults()


def test_json_lines_carry_event_level_and_values(stream: io.StringIO) -> None:
    """One line is one JSON object with a timestamp."""
    logs.configure(style="json", stream=stream)

    structlog.get_logger().info("worker ready", worker="w-1", slots=2)

    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["worker"], line["slots"]) == ("worker ready", "info", "w-1", 2)
    assert line["timestamp"].endswith("Z")


def test_repeated_errors_are_summed_up_at_the_end(stream: io.StringIO) -> None:
    """PRC-07: 1,000 equal errors leave two lines, the second with the count."""
    logs.configure(style="json", stream=stream)
    log = structlog.get_logger()

    for number in range(1_000):
        log.error("frame rejected", code="bad_shape", seq=number)
    logs.flush()

    first, summary = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["seq"] == 0
    assert (summary["event"], summary["code"], summary["repeated_count"]) == (
        "frame rejected",
        "bad_shape",
        999,
    )
    assert summary["level"] == "error"


def test_two_processes_that_fail_alike_are_both_named(stream: io.StringIO) -> None:
    """The second worker that ends is no repeat of the first."""
    logs.configure(style="json", stream=stream)

    for name in ("worker-0", "worker-1"):
        structlog.get_logger().error("process ended", process=name)

    assert [json.loads(line)["process"] for line in stream.getvalue().splitlines()] == [
        "worker-0",
        "worker-1",
    ]


class FullDisk(io.StringIO):
    """A stream that can't be written to for a while."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(text)


def test_a_full_disk_stops_nothing_and_lost_lines_are_counted() -> None:
    """No call raises; once there is space again, the second line says how many are missing."""
    stream = FullDisk()
    logs.configure(style="json", stream=stream)
    log = structlog.get_logger()

    stream.is_full = True
    for number in range(3):
        log.info("worker ready", number=number)
    stream.is_full = False
    log.info("worker ready", number=3)
    log.info("worker ready", number=4)

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line.get("number"), line.get("lines_count")) for line in lines] == [
        ("worker ready", 3, None),
        ("log lines lost", None, 3),
        ("worker ready", 4, None),
    ]


def test_a_closed_stream_stops_nothing() -> None:
    """Somebody closed it under the log's feet."""
    stream = io.StringIO()
    logs.configure(style="json", stream=stream)
    stream.close()

    structlog.get_logger().error("batch failed")
    logs.flush()


def test_a_pipe_without_reader_is_replaced_by_nothing() -> None:
    """Neither this line nor the buffers at the end of the process meet the pipe again."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        logs.configure(style="json", stream=stream)
        os.close(reader)

        structlog.get_logger().info("worker ready")

        assert Path(f"/proc/self/fd/{stream.fileno()}").readlink() == Path(os.devnull)


def test_information_is_never_left_out(stream: io.StringIO) -> None:
    """The filter is for warnings and errors only."""
    logs.configure(style="json", stream=stream)

    for _ in range(3):
        structlog.get_logger().info("worker ready")

    assert len(stream.getvalue().splitlines()) == 3


def test_level_and_human_style(stream: io.StringIO) -> None:
    """Below the level nothing is written; auto is JSON where there is no terminal, human is plain text."""
    logs.configure(style="human", level="warning", stream=stream)

    structlog.get_logger().info("left out")
    structlog.get_logger().warning("batch failed", batch=7)

    assert "left out" not in stream.getvalue()
    assert "batch failed" in stream.getvalue()
    assert "batch=7" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
