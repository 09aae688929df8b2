"""A pool in simulated time: its figures against arithmetic, and against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.clients.load.schedule import Pattern
from headrace.planner.costs import Costs, Formula, ProfileEntry
from headrace.planner.streams import PatternSource, TraceSource
from headrace.planner.trace_file import TraceFrame, TraceKind
from headrace.planner.world import Overheads, Run, World
from headrace.protocol.messages import ImageInput, ModelSpec, SizeClassSpec, Status

KIND = TraceKind((8, 8, 3), 192)
NOTHING = Overheads(0, 0, 0, 0, 0, 0, 0)
COSTS = Costs(default=Formula(10.0, 1.0))


def settings(**policy: object) -> CoreSettings:
    spec = ModelSpec("m", "1", image=ImageInput(), size_classes=(SizeClassSpec("c", 8, 8, 4),))
    return CoreSettings(models=(ModelSettings(spec, {"": ClassPolicy(**policy)}),))  # type: ignore[arg-type]


def serve(times_s: list[float], *, kind: TraceKind = KIND, overheads: Overheads = NOTHING) -> Run:
    frames = [TraceFrame(time_s, f"s{number}", kind) for number, time_s in enumerate(times_s)]
    return World(settings(), COSTS, 1, overheads=overheads).run(TraceSource(frames), 1.0, objective_ms=20.0)


def steady(seed: int, *, workers: int = 2, fps: float = 15.0, ttl_ms: int | None = None) -> Run:
    kind = replace(KIND, ttl_ms=ttl_ms)
    source = PatternSource(20, fps, [(kind, 1.0)], 4.0, pattern=Pattern.POISSON, seed=seed)
    return World(settings(), COSTS, workers).run(source, 4.0, warm_up_s=1.0, objective_ms=100.0)


def test_a_frame_alone_takes_its_run() -> None:
    """Without overheads the latency is the time of a batch of one."""
    run = serve([0.1])

    assert run.tally.latency.quantile_ms(1.0) == pytest.approx(11.0, rel=0.01)
    assert (run.tally.offered, run.tally.good, run.mean_batch) == (1, 1, 1.0)
    assert run.utilisation == pytest.approx(0.011)
    assert (run.frame_events, run.unfinished) == (2, 0)


def test_every_overhead_is_on_the_way() -> None:
    """Each of them makes the one frame later by itself."""
    run = serve([0.1], overheads=Overheads(1_000, 2_000, 500, 500, 3_000, 4_000, 0))

    assert run.tally.latency.quantile_ms(1.0) == pytest.approx(11.0 + 11.0, rel=0.01)


def test_frames_that_wait_for_the_device_share_a_batch() -> None:
    """One runs at once, the four that come meanwhile run together: 4 frames late, none lost."""
    run = serve([0.1, 0.101, 0.102, 0.103, 0.104])

    assert [(use.frames, use.batches) for use in run.classes] == [(5, 2)]
    assert run.tally.latency.quantile_ms(1.0) == pytest.approx(24.0, rel=0.01)
    assert run.tally.good == 1  # within 20 ms


def test_the_warm_up_counts_for_nothing() -> None:
    """Neither its frames nor its work."""
    frames = [TraceFrame(0.1, "a", KIND), TraceFrame(0.6, "a", KIND)]

    run = World(settings(), COSTS, 1, overheads=NOTHING).run(TraceSource(frames), 1.0, warm_up_s=0.5)

    assert (run.tally.offered, run.tally.good) == (1, 1)
    assert run.utilisation == pytest.approx(0.011 / 0.5)
    assert run.frame_events == 4


def test_equal_seeds_give_equal_figures() -> None:
    """To the last digit; another seed gives others."""
    first, second, third = steady(1), steady(1), steady(2)

    assert (first.events, first.utilisation, first.tally.good) == (
        second.events,
        second.utilisation,
        second.tally.good,
    )
    assert first.tally.latency.quantile_ms(0.99) == second.tally.latency.quantile_ms(0.99)
    assert first.utilisation != third.utilisation


@pytest.mark.parametrize(("fps", "ttl_ms"), [(15.0, None), (60.0, 100), (60.0, None)])
def test_every_frame_ends_once(fps: float, ttl_ms: int | None) -> None:
    """What was offered equals the sum of all ends, under any load."""
    run = steady(3, fps=fps, ttl_ms=ttl_ms)

    assert run.unfinished == 0
    assert sum(run.tally.by_status.values()) == run.tally.offered
    assert run.tally.latency.count == run.tally.by_status[Status.OK]


def test_an_overload_is_told_apart_by_codes() -> None:
    """Frames that can't make it are rejected, and the devices are never idle."""
    run = steady(3, workers=1, fps=60.0, ttl_ms=100)

    assert run.utilisation > 0.98
    assert run.tally.rejected_by_code.keys() <= {"wont_make_it"}
    assert 0.1 < run.good_share < 4 / 14e-3 / (20 * 60)


def test_workers_heartbeats_are_answered() -> None:
    """A worker that is idle for a long time is not lost."""
    run = serve([0.1, 0.9])
    frames = [TraceFrame(float(time_s), "a", KIND) for time_s in (0, 20)]
    long = World(settings(), COSTS, 1).run(TraceSource(frames), 21.0)

    assert run.tally.good == 2
    assert long.tally.by_status == {Status.OK: 2}


def test_size_classes_may_come_from_the_profile() -> None:
    """A model whose classes the configuration leaves to its graph is served as the profile says."""
    model = ModelSettings(ModelSpec("m", "1", image=ImageInput()))
    costs = Costs([ProfileEntry("", SizeClassSpec("c", 8, 8, 4), Formula(10.0, 1.0))])

    run = World(CoreSettings(models=(model,)), costs, 1).run(TraceSource([TraceFrame(0.1, "a", KIND)]), 1.0)

    assert run.tally.by_status == {Status.OK: 1}
    assert run.classes[0].size_class == "c"


def test_no_workers_leave_frames_unfinished() -> None:
    """The run ends all the same, and says so."""
    run = World(settings(), COSTS, 0).run(TraceSource([TraceFrame(0.0, "a", KIND)]), 1.0)

    assert (run.unfinished, run.good_share) == (1, 0.0)
