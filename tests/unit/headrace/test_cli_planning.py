"""``headrace simulate`` and ``headrace plan-classes``: what they answer and what they refuse."""

from __future__ import annotations

import gc
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result

from headrace import cli
from headrace.config import load
from headrace.errors import ConfigError
from headrace.planner.trace_file import TraceFrame, TraceKind, TraceWriter

POOL = """
[[models]]
name = "m"
[models.image]
[models.emulated]
base_ms = 10.0
per_frame_ms = 1.0
[[models.size_classes]]
height = 64
width = 64
max_batch_size = 4
[[models.size_classes]]
height = 128
width = 128
max_batch_size = 4
"""


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """A command sets up the process's logs and its collector; the next test has its own."""
    threshold = gc.get_threshold()
    yield
    structlog.reset_defaults()
    gc.set_threshold(*threshold)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.toml"
    path.write_text(POOL)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        writer = TraceWriter(file)
        for number in range(100):
            shape = (60, 64, 3) if number % 4 else (100, 40, 3)
            model = "other" if number == 50 else ""
            writer.write(TraceFrame(number / 50, f"cam-{number % 5}", TraceKind(shape, 1, model)))
    return path


def invoke(*arguments: object) -> Result:
    texts = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli.cli, texts, standalone_mode=False)


def simulate(pool: Path, *arguments: object) -> Result:
    return invoke("simulate", "--config", pool, "--seconds", 2, "--objective-ms", 100, *arguments)


def test_the_fewest_workers_are_searched_for(pool: Path) -> None:
    """40 streams of 15 frames/s are 600 a second; one worker makes 4 in 14 ms."""
    result = simulate(pool, "--streams", 40, "--size", "64x64", "--json")

    told = json.loads(result.stdout)
    assert result.return_value == 0
    assert told["cheapest"]["workers"] == 3
    assert told["alternatives"][0]["cost"] == 1.0
    assert "3 workers" in told["verdict"]


def test_alternatives_are_compared_in_a_table(pool: Path, tmp_path: Path) -> None:
    """Every number of workers with every policy and configuration, and a plot."""
    other = tmp_path / "other.toml"
    other.write_text(POOL.replace("max_batch_size = 4", "max_batch_size = 8"))
    plot = tmp_path / "study.html"

    result = simulate(
        pool,
        *("--config", other, "--streams", 20, "--pattern", "poisson", "--workers", "4,2"),
        *("--policies", "adaptive,window:5", "--plot", plot),
    )

    lines = result.stdout.splitlines()
    assert result.return_value == 0
    assert len([line for line in lines if "toml" in line and ("yes" in line or " no" in line)]) == 8
    assert lines[-1].startswith("Cheapest that meets 100 ms")
    assert "<svg" in plot.read_text()


def test_a_trace_is_replayed(pool: Path, trace: Path) -> None:
    """At its own times, for its whole length."""
    result = invoke("simulate", "--config", pool, "--trace", trace, "--workers", 1, "--json")

    told = json.loads(result.stdout)
    assert told["seconds"] == pytest.approx(100 / 50)
    assert told["alternatives"][0]["offered"] == 90  # the first tenth is warm-up
    assert told["alternatives"][0]["rejected_by_code"] == {"unknown_model": 1}


def test_no_alternative_that_meets_is_exit_code_1(pool: Path) -> None:
    """And the sentence says what became of the frames."""
    result = simulate(pool, "--streams", 40, "--ttl-ms", 50, "--workers", 1)

    assert result.return_value == 1
    assert "None meets" in result.stdout


def test_a_profile_replaces_the_emulated_cost(pool: Path, tmp_path: Path) -> None:
    """Measured milliseconds per batch size."""
    profile = tmp_path / "costs.toml"
    profile.write_text("[[costs]]\nheight = 64\nwidth = 64\nrun_ms = [[1, 40.0], [4, 50.0]]\n")

    result = simulate(pool, "--streams", 1, "--size", "64x64", "--workers", 1, "--profile", profile, "--json")

    assert "128x128: estimated" in result.stderr
    assert 40 < json.loads(result.stdout)["alternatives"][0]["p50_ms"] < 45


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--trace FILE or --streams"),
        (("--streams", 1, "--trace", "x"), "--trace FILE or --streams"),
        (("--streams", 1, "--size", "64"), "HEIGHTxWIDTH"),
        (("--streams", 1, "--size", "0x64"), "HEIGHTxWIDTH"),
        (("--streams", 1, "--size", "64x64:0"), "above 0"),
        (("--streams", 1, "--size", "64x64:1.2.3"), "above 0"),
        (("--streams", 1, "--size", "64x64", "--size", "8x8"), "too few"),
        (("--streams", 1, "--workers", "2,x"), "--workers"),
        (("--streams", 1, "--policies", "greedy"), "adaptive"),
        (("--streams", 1, "--policies", "window:x"), "milliseconds"),
        (("--streams", 1, "--cost", "x"), "--cost"),
        (("--streams", 1, "--plot", "study.pdf"), ".html or .png"),
    ],
    ids=str,
)
def test_what_cant_be_understood_is_refused_in_a_line(
    pool: Path, arguments: tuple[object, ...], reason: str
) -> None:
    """Before anything is simulated, with what would be right."""
    result = simulate(pool, *arguments)

    assert result.exit_code != 0
    assert reason in result.output + str(result.exception)


def test_an_unknown_cost_is_refused(tmp_path: Path) -> None:
    """A model that is not emulated needs a profile."""
    path = tmp_path / "pool.toml"
    pool = POOL.replace("[models.emulated]\nbase_ms = 10.0\nper_frame_ms = 1.0\n", "")
    path.write_text(pool.replace('name = "m"', 'name = "m"\npath = "m.onnx"'))

    result = simulate(path, "--streams", 1)
    with_cost = simulate(path, "--streams", 2, "--cost", "5+1", "--workers", 1)

    assert isinstance(result.exception, ConfigError)
    assert "--profile" in str(result.exception)
    assert with_cost.return_value == 0


def test_size_classes_are_printed_to_paste(pool: Path, trace: Path, tmp_path: Path) -> None:
    """Valid TOML for the model's table, with the waste of before and after in its comments."""
    result = invoke("plan-classes", trace, "-k", 2, "--multiple", 4, "--config", pool)

    assert result.return_value == 0
    classes = tomllib.loads("[[models]]\n" + result.stdout)["models"][0]["size_classes"]
    assert classes == [{"height": 60, "width": 64}, {"height": 100, "width": 40}]
    assert "0.0 % of what is computed is padding" in result.stdout
    assert "With the classes of" in result.stdout
    path = tmp_path / "new.toml"
    path.write_text(POOL.split("[[models.size_classes]]", maxsplit=1)[0] + result.stdout)
    assert len(load(str(path)).config.models[0].size_classes) == 2


def test_the_frames_of_one_model_can_be_planned_for(pool: Path, trace: Path) -> None:
    """Those that name no model are the default's."""
    default = json.loads(
        invoke("plan-classes", trace, "-k", 1, "--model", "m", "--config", pool, "--json").stdout
    )
    other = json.loads(invoke("plan-classes", trace, "-k", 1, "--json").stdout)

    assert (default["frames"], other["frames"]) == (99, 100)
    assert 0 < default["waste"] < 1
    assert default["present_unplaced"] == 0


def test_an_unknown_model_is_named(pool: Path, trace: Path) -> None:
    """With those there are."""
    result = invoke("plan-classes", trace, "-k", 1, "--model", "none", "--config", pool)

    assert isinstance(result.exception, ConfigError)
    assert "there are m" in str(result.exception)
