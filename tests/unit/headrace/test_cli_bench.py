"""``headrace bench``: what its options mean, what is refused beforehand, what it shows meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import click
import pytest
import structlog
from hr_bench import PLAN, Played

from headrace import addresses, cli
from headrace.cli.bench import _pool_text, _Progress
from headrace.cli.bench_options import Pool, build_plan, parse_priorities, parse_rates, parse_sizes
from headrace.cli.progress import ProgressLine
from headrace.clients.load.payloads import Content, Size
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Encoding,
    ImageInput,
    Limits,
    ModelSpec,
    Oversize,
    SizeClassSpec,
    Status,
    Value,
)


@pytest.fixture(autouse=True)
def _reset_logs() -> Iterator[None]:
    """A command sets up the process's logs; the next test's stderr is another."""
    yield
    structlog.reset_defaults()


CLASSES = (SizeClassSpec("s", 48, 64), SizeClassSpec("l", 480, 640))
IMAGES = ModelSpec("m", "1", image=ImageInput(), size_classes=CLASSES, adapter="detect")
STRICT = ModelSpec("strict", "2", image=ImageInput(), size_classes=CLASSES[:1], oversize=Oversize.REJECT)
TENSORS = ModelSpec("t", "1")
POOL = Pool((IMAGES, STRICT, TENSORS), Limits(priority_levels=4), {})

RATES: dict[str, Any] = {"rate": None, "rates": None, "ramp": None, "fps": None, "streams": 20}
DEFAULTS: dict[str, Any] = RATES | {
    "pattern": "cameras",
    "sizes": (),
    "priorities": (),
    "ttl_ms": None,
    "keep": "all",
    "seconds": 10.0,
    "warm_up_s": 1.0,
    "drain_limit_s": 30.0,
    "model": "",
    "encoding": "raw",
    "content": "auto",
    "lane": "auto",
    "producers_count": 4,
}


def plan(pool: Pool = POOL, **options: Any) -> Any:
    return build_plan(DEFAULTS | options, pool, seed=3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (300.0,)),
        ({"fps": 2.5}, (50.0,)),
        ({"rate": 7.5}, (7.5,)),
        ({"rates": "100,200.5,50"}, (100.0, 200.5, 50.0)),
        ({"ramp": "100:300:100"}, (100.0, 200.0, 300.0)),
    ],
)
def test_the_rate_has_four_spellings(options: dict[str, Any], expected: tuple[float, ...]) -> None:
    """Without any, 20 cameras send 15 frames a second each."""
    assert parse_rates(RATES | options) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 5.0, "fps": 1.0}, "--rate and --fps both"),
        ({"rates": "100,x"}, "'x' is not a number"),
        ({"rates": "100,0"}, "a rate is above 0"),
        ({"rates": "nan"}, "'nan' is not a number"),
        ({"ramp": "100:300"}, "FROM:TO:STEP"),
        ({"ramp": "0:300:100"}, "rising from above 0"),
        ({"ramp": "100:1e999:1"}, "not a number"),
    ],
)
def test_rates_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    """With the option, what was said, and what would be right."""
    with pytest.raises(click.UsageError, match=words):
        parse_rates(RATES | options)


def test_sizes_and_priorities_are_values_with_shares() -> None:
    """In one option or several; the same value twice is one."""
    assert parse_sizes(("48x64:0.5, 480x640", "48x64:0.25")) == ((Size(48, 64), 0.75), (Size(480, 640), 1.0))
    assert parse_priorities(("0:0.9,5:0.1",)) == ((0, 0.9), (5, 0.1))
    assert parse_priorities(()) == ((0, 1.0),)


@pytest.mark.parametrize("text", ["48", "48x", "x64", "48x64:", "48x64:-1", "48X64", "0x5", "48x64:0", "axb"])
def test_sizes_that_can_not_be_read_are_refused(text: str) -> None:
    """The message shows one that can."""
    with pytest.raises(click.UsageError, match=r"--sizes"):
        parse_sizes((text,))


@pytest.mark.parametrize("text", ["high", "5:", "5:0", "-1", "1.5"])
def test_priorities_that_can_not_be_read_are_refused(text: str) -> None:
    """The message shows one that can."""
    with pytest.raises(click.UsageError, match=r"--priorities"):
        parse_priorities((text,))


def test_without_options_the_model_s_own_sizes_are_sent() -> None:
    """The first model is the broker's default; a detector gets something to find."""
    made = plan()

    assert made.sizes == ((Size(48, 64), 1.0), (Size(480, 640), 1.0))
    assert made.content is Content.SCENE
    assert made.encoding is Encoding.RAW
    assert made.seed == 3


def test_sizes_found_by_workers_are_in_the_status() -> None:
    """A model that takes its size from the graph names none itself."""
    status: dict[str, Value] = {
        "classes": [
            {"model": "m", "height": 32, "width": 32},
            {"model": "other", "height": 5, "width": 5},
            {"model": "m", "height": 0, "width": 0},
        ]
    }
    bare = ModelSpec("m", "1", image=ImageInput())

    assert plan(Pool((bare,), Limits(), status)).sizes == ((Size(32, 32), 1.0),)


def test_a_model_that_nobody_described_needs_sizes() -> None:
    """Before its first worker is there, nobody knows them."""
    with pytest.raises(click.UsageError, match="give --sizes"):
        plan(Pool((ModelSpec("m", "1", image=ImageInput()),), Limits(), {}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "none"}, "no such model; it has: m, strict, t"),
        ({"model": "m:9"}, "no such model"),
        ({"model": "t"}, "takes plain tensors"),
        ({"sizes": ("99999x99999",)}, "9,999,800,001 pixels; the broker takes at most"),
        ({"priorities": ("4",)}, "priorities are 0 to 3"),
        ({"rate": 1e7, "seconds": 3_600.0}, "fewer --seconds"),
    ],
)
def test_what_the_pool_can_not_do_is_told_before_the_load(options: dict[str, Any], words: str) -> None:
    """Not by a thousand rejects."""
    with pytest.raises(click.UsageError, match=words):
        plan(**options)


@pytest.mark.parametrize(
    ("options", "end"),
    [({"model": "m:1"}, "scaled down"), ({"model": "strict"}, "rejected `oversize`")],
)
def test_a_size_larger_than_every_class_is_noted(
    options: dict[str, Any], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is sent all the same: a camera would do so too."""
    assert plan(sizes=("1080x1920",), **options).sizes == ((Size(1080, 1920), 1.0),)

    assert end in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "0"], ["--rate", "x>0"]),
        (["--seconds", "0"], ["--seconds"]),
        (["--plot", "curve.pdf"], [".html or .png"]),
        (["--plot", "nowhere/curve.html"], ["nowhere is not there"]),
        (["--json", "nowhere/run.json"], ["nowhere is not there"]),
        (["--connect", "ipc:///nowhere/s"], ["/nowhere/s", "`headrace up`"]),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is connected or measured."""
    monkeypatch.setattr(addresses, "discover", partial(addresses.discover, timeout_s=0.2))

    code = cli.run(["bench", *arguments])

    assert code == (ExitCode.UNAVAILABLE if "--connect" in arguments else ExitCode.USAGE)
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err.strip().splitlines()[-1]


def test_the_progress_line_tells_ends_and_latency() -> None:
    """Of this step alone, and of the last frames."""
    played = Played()
    played.run(8)

    class One:
        ledger = played.ledger

    progress = _Progress(One(), "2/3: 100/s", PLAN, ProgressLine())  # type: ignore[arg-type]
    assert "0 sent, no outcome yet, 0 under way" in progress._text()
    seq = played.send(0, 4.0)
    played.end(0, seq, 4.010)
    played.end(1, played.send(1, 4.0), 4.020, Status.REJECTED, "queue_full")
    played.send(2, 4.1)

    text = progress._text()

    assert text.startswith("2/3: 100/s: 0 of 5 s, 3 sent, 1 ok, 1 rejected, 1 under way, lately p50 10.0")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "no worker that is ready"),
        ({"workers": [{"state": "loading", "engine": "cpu", "device": "cpu"}]}, "no worker that is ready"),
        (
            {
                "broker": {"release": "9.9"},
                "workers": [{"state": "ready", "engine": "cpu", "device": "cpu:4"}] * 2,
            },
            "broker 9.9 with ready workers: 2 x cpu on cpu:4",
        ),
    ],
)
def test_the_pool_is_described(status: dict[str, Value], words: str) -> None:
    """Figures without the machine they are of say little."""
    assert words in _pool_text(status)


def test_a_progress_line_never_wraps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a narrow terminal it is cut: a line that wraps could not be rewritten in place."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("headrace.cli.progress.TERMINAL_INTERVAL_S", 0.0)
    line = ProgressLine()

    line.show(lambda: "x" * 100)
    line.clear()

    assert capsys.readouterr().err == "\r" + "x" * 19 + "\r" + " " * 19 + "\r"
