"""The load generator against a real broker in this process: its account holds whatever the pool does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hr_broker as hb
import pytest
import structlog
from hr_clients import AutoWorker

from headrace import cli
from headrace.clients.lane import LaneChoice
from headrace.clients.load import generator as gen
from headrace.clients.load.figures import NoticeCode, StepResult, result_of
from headrace.clients.load.generator import Generator, LoadPlan
from headrace.clients.load.ledger import Ledger
from headrace.clients.load.payloads import Content, Size
from headrace.clients.load.schedule import Pattern
from headrace.clients.producer import Producer
from headrace.clients.records import Missed
from headrace.errors import UnreachableError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Encoding,
    Frame,
    FrameResult,
    Keep,
    Outcome,
    Oversize,
    SizeClassSpec,
    Status,
)

PLAN = LoadPlan(
    sizes=((Size(8, 8), 0.5), (Size(16, 12), 0.5)),
    streams_count=4,
    priorities=((0, 0.75), (5, 0.25)),
    seconds=0.4,
    warm_up_s=0.1,
    drain_limit_s=5.0,
    producers_count=2,
)


@pytest.fixture(autouse=True)
def _reset_logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def broker() -> Iterator[hb.BrokerThread]:
    with hb.running_broker() as running:
        yield running


def load(
    address: str,
    plan: LoadPlan = PLAN,
    *,
    rate: float = 100.0,
    stop: threading.Event | None = None,
    on_tick: Callable[[], None] = lambda: None,
) -> StepResult:
    """Run one step; return its figures."""
    with Generator(address, plan) as generator:
        step = generator.run(rate, 1, on_tick, stop or threading.Event())
        return result_of(step, generator.ledger, plan, generator.size_of, generator.priority_of)


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("encoding", Encoding)
def test_every_frame_comes_back(broker: hb.BrokerThread, pattern: Pattern, encoding: Encoding) -> None:
    """What was due was sent, ended ok, and was seen, whatever the pattern and the encoding."""
    plan = replace(PLAN, pattern=pattern, encoding=encoding, content=Content.SCENE)
    with AutoWorker(broker.endpoints):
        result = load(broker.endpoints.frames, plan)

    assert result.problems == ()
    assert result.counts.ok == result.counts.sent == result.scheduled > 20
    assert result.latency.count > 0
    assert result.latency.by_name["p50"] >= result.pool.by_name["p50"] > 0
    assert [group.name for group in result.priorities] == ["0", "5"]
    assert [group.streams for group in result.sizes] == [2, 2]


def test_steps_follow_each_other_on_one_connection(broker: hb.BrokerThread) -> None:
    """Each has its own account, and the frames of both are numbered through."""
    with AutoWorker(broker.endpoints), Generator(broker.endpoints.frames, PLAN) as generator:
        results = [
            result_of(
                generator.run(rate, 0, lambda: None, threading.Event()),
                generator.ledger,
                PLAN,
                generator.size_of,
                generator.priority_of,
            )
            for rate in (40.0, 80.0)
        ]

    assert [result.counts.sent for result in results] == [20, 40]
    assert [result.problems for result in results] == [(), ()]


def test_rejects_are_counted_by_code(broker: hb.BrokerThread) -> None:
    """A model that is not there: every frame ends so, and the account still adds up."""
    with AutoWorker(broker.endpoints):
        result = load(broker.endpoints.frames, replace(PLAN, model="none"))

    assert result.counts.rejected == result.counts.sent > 0
    assert result.rejected_by_code == {"unknown_model": result.counts.sent}
    assert result.problems == ("no frame ended ok",)


def test_errors_expiries_and_newer_frames_are_told_apart(broker: hb.BrokerThread) -> None:
    """A slow worker: frames wait past their time, or are replaced; some fail."""
    seen: list[int] = []

    def slow(frame: Frame) -> FrameResult:
        time.sleep(0.02)  # the worker's run time, not synchronisation
        seen.append(frame.seq or 0)
        return (
            FrameResult(Status.ERROR, code="damaged_image") if len(seen) % 3 == 0 else FrameResult(Status.OK)
        )

    plan = replace(PLAN, ttl_ms=100, keep=Keep.LATEST)
    with AutoWorker(broker.endpoints, answer=slow):
        result = load(broker.endpoints.frames, plan, rate=200.0)

    counts = result.counts
    assert result.problems == ()
    assert counts.sent == counts.accepted + counts.rejected
    assert counts.ok
    assert counts.error
    assert counts.superseded + counts.expired + counts.rejected
    assert result.ended_by_code["damaged_image"] == counts.error


def test_frames_not_back_in_time_are_unfinished(broker: hb.BrokerThread) -> None:
    """A worker that holds its batches: the wait is bounded and the rest is named."""
    plan = replace(PLAN, drain_limit_s=0.3)
    worker = AutoWorker(broker.endpoints)
    worker.gate.clear()
    with worker:
        began_s = time.monotonic()
        result = load(broker.endpoints.frames, plan)
        elapsed_s = time.monotonic() - began_s

    counts = result.counts
    assert counts.unfinished == counts.sent > 0
    assert elapsed_s < 10
    assert f"{counts.sent} of {counts.sent} frames have no outcome 0.3 s after" in result.problems[0]


@pytest.mark.parametrize("lane", [LaneChoice.INLINE, LaneChoice.SHM])
def test_frames_go_by_the_lane_that_was_asked_for(lane: LaneChoice) -> None:
    """And are counted by it."""
    settings = hb.broker_settings(hb.emulated_model("m", SizeClassSpec("large", 96, 96)))
    with hb.running_broker(settings) as broker, AutoWorker(broker.endpoints):
        result = load(broker.endpoints.frames, replace(PLAN, sizes=((Size(96, 96), 1.0),), lane=lane))

    assert result.problems == ()
    assert result.by_lane == {lane.value: result.counts.sent}


def test_a_stop_ends_the_sending_and_keeps_the_account(broker: hb.BrokerThread) -> None:
    """What was sent until then is waited for and adds up."""
    stop = threading.Event()
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 5:
            stop.set()

    with AutoWorker(broker.endpoints):
        result = load(
            broker.endpoints.frames, replace(PLAN, seconds=60.0), rate=20.0, stop=stop, on_tick=tick
        )

    assert result.is_interrupted
    assert 0 < result.counts.sent < 200
    assert result.problems == ()
    assert result.measured_s < 10


def test_a_full_window_is_the_pool_s_doing(broker: hb.BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames without room are late or left out, and the notice says why; the account still adds up."""
    monkeypatch.setattr(gen, "WINDOW_FRAMES", 4)
    monkeypatch.setattr(gen, "MAX_LAG_S", 0.1)

    def slow(frame: Frame) -> FrameResult:
        time.sleep(0.05)  # the worker's run time, not synchronisation
        return FrameResult(Status.OK)

    with AutoWorker(broker.endpoints, answer=slow):
        result = load(broker.endpoints.frames, rate=200.0)

    assert result.unsent.get("window", 0) > 0
    assert NoticeCode.WINDOW_FULL in [notice.code for notice in result.notices]
    assert result.counts.sent + sum(result.unsent.values()) == result.scheduled
    assert result.problems == ()


def test_a_generator_too_slow_for_its_schedule_says_so(
    broker: hb.BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that takes 20 ms can't send 200 a second: the pool gets no blame for it."""
    monkeypatch.setattr(gen, "MAX_LAG_S", 0.2)
    real_push = Producer.push

    def slow_push(self: Producer, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)  # a generator without enough of a core
        return real_push(self, *arguments, **options)

    monkeypatch.setattr(Producer, "push", slow_push)
    with AutoWorker(broker.endpoints):
        result = load(broker.endpoints.frames, rate=200.0)

    assert NoticeCode.SENDER_BEHIND in [notice.code for notice in result.notices]
    assert result.unsent.get("sender", 0) > 0
    assert "window" not in result.unsent
    assert result.problems == ()


def test_an_outcome_lost_on_the_way_here_is_noticed(
    broker: hb.BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producers know that the frame ended: its outcome is waited for, and then said to be missing."""
    monkeypatch.setattr(gen, "TAIL_LIMIT_S", 0.3)
    real_put = Ledger.put

    def lossy_put(self: Ledger, items: Sequence[Outcome | Missed]) -> None:
        real_put(self, [item for item in items if not (isinstance(item, Outcome) and item.seq == 3)])

    monkeypatch.setattr(Ledger, "put", lossy_put)
    with AutoWorker(broker.endpoints):
        result = load(broker.endpoints.frames)

    assert result.counts.missed == 4
    assert result.problems == ("4 frames ended but no outcome was seen; 0 were reported as missed",)


def test_a_generator_that_can_not_connect_leaves_nothing_open(
    broker: hb.BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producers and its subscriber are closed, the error is the one that happened."""

    def fail(self: Producer, timeout: float) -> None:
        raise UnreachableError("no welcome")

    monkeypatch.setattr(Producer, "wait_connected", fail)
    before = threading.active_count()

    with pytest.raises(UnreachableError, match="no welcome"):
        Generator(broker.endpoints.frames, PLAN)

    assert threading.active_count() == before


def test_a_broker_that_dies_leaves_an_account_of_what_is_missing() -> None:
    """The generator ends, with the frames of which nobody knows."""
    ticks: list[int] = []
    with hb.running_broker() as broker:

        def tick() -> None:
            ticks.append(1)
            if len(ticks) == 3:
                broker.stop()

        with AutoWorker(broker.endpoints):
            result = load(broker.endpoints.frames, replace(PLAN, drain_limit_s=0.5), on_tick=tick)

    counts = result.counts
    assert counts.sent == counts.ok + counts.missed + counts.unfinished
    assert counts.unfinished > 0
    assert result.problems


# -- the command ------------------------------------------------------------------------------------------


def bench(broker: hb.BrokerThread, *arguments: str) -> int:
    short = ("--seconds", "0.5", "--warm-up", "0.1", "--drain-limit", "5", "--streams", "4")
    return cli.run(["bench", "--connect", broker.endpoints.frames, *short, *arguments])


def test_the_command_prints_tables_and_writes_json_and_curves(
    broker: hb.BrokerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per rate while it runs, the tables at the end, the files beside them."""
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "html", "png")}
    with AutoWorker(broker.endpoints):
        code = bench(broker, "--rates", "40,80", "--json", str(files["json"]), "--plot", str(files["html"]))
        again = bench(broker, "--rate", "40", "--plot", str(files["png"]))

    captured = capsys.readouterr()
    assert (code, again) == (ExitCode.OK, ExitCode.OK), captured
    assert "latency of ok frames" in captured.out
    assert "the account adds up: each of 72 frames sent has exactly one end" in captured.out
    assert "headrace: 40/s: " in captured.err
    value = json.loads(files["json"].read_text())
    assert [step["account"]["ok"] for step in value["steps"]] == [24, 48]
    assert "Latency against offered rate" in files["html"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_json_on_stdout_stands_alone(broker: hb.BrokerThread, capsys: pytest.CaptureFixture[str]) -> None:
    """For a pipe into another program."""
    with AutoWorker(broker.endpoints):
        code = bench(broker, "--json", "-", "--sizes", "16x16")

    captured = capsys.readouterr()
    assert code == ExitCode.OK
    # The broker of this test logs into the same process's stdout.
    assert json.loads(captured.out.splitlines()[-1])["problems"] == []
    assert "the account adds up" in captured.err


def test_a_size_that_is_refused_fails_with_the_broker_s_words(capsys: pytest.CaptureFixture[str]) -> None:
    """It is noted before, exit code 1, and what the broker said of it."""
    model = hb.emulated_model("m", hb.SMALL)
    strict = replace(model, spec=replace(model.spec, oversize=Oversize.REJECT))
    with hb.running_broker(hb.broker_settings(strict)) as broker, AutoWorker(broker.endpoints):
        code = bench(broker, "--rate", "20", "--sizes", "17x8")

    captured = capsys.readouterr()
    assert code == ExitCode.FAILED
    assert "17x8 is larger than every size class of model m (16x16)" in captured.err
    assert "oversize: a frame of 17x8 fits no size class" in captured.out
    assert "problem: 20/s: no frame ended ok" in captured.out


def test_rates_after_one_that_left_frames_behind_are_not_measured(
    broker: hb.BrokerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be measured on a pool that is still busy."""
    worker = AutoWorker(broker.endpoints)
    worker.gate.clear()
    with worker:
        code = bench(broker, "--rates", "20,40,60", "--drain-limit", "0.2")

    captured = capsys.readouterr()
    assert code == ExitCode.FAILED
    assert "not measured were 2 of 3 rates" in captured.out


def test_streams_too_few_for_the_shares_are_refused(
    broker: hb.BrokerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is sent."""
    with AutoWorker(broker.endpoints):
        code = bench(broker, "--priorities", "0:0.99,5:0.01")

    assert code == ExitCode.USAGE
    assert "streams are too few" in capsys.readouterr().err
