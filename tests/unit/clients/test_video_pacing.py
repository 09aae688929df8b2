"""Pacing: source time against the clock, thinning by timestamps, loops, back-off."""

from __future__ import annotations

import pytest

from headrace.clients.video.pacing import BackOff, Pacer, Subsampler, Timeline

MS = 1_000_000
SECOND = 1000 * MS
# VID-05: times of a source with a varying rate.
UNEVEN = [0, 33 * MS, 66 * MS, 500 * MS, 533 * MS, 10_000 * MS]


def test_a_frame_is_due_by_its_own_time_not_by_its_number():
    """VID-05: sending times keep the source's distances exactly."""
    pacer = Pacer(is_realtime=True)

    due = [pacer.due_ns(pts, 77 * SECOND) for pts in UNEVEN]

    assert [d - 77 * SECOND for d in due] == UNEVEN


def test_a_source_that_starts_late_on_its_time_line_is_due_at_once():
    pacer = Pacer(is_realtime=True)

    assert pacer.due_ns(3600 * SECOND, 5) == 5
    assert pacer.due_ns(3601 * SECOND, 6) == 5 + SECOND


def test_a_late_sender_keeps_the_intended_times():
    """Delay shows as latency: the next due time is not moved by it."""
    pacer = Pacer(is_realtime=True)
    pacer.due_ns(0, 1000)

    assert pacer.due_ns(40 * MS, 1000 + 500 * MS) == 1000 + 40 * MS


def test_time_that_steps_back_starts_afresh():
    pacer = Pacer(is_realtime=True)
    pacer.due_ns(9 * SECOND, 0)

    assert pacer.due_ns(0, 3 * SECOND) == 3 * SECOND
    assert pacer.due_ns(SECOND, 3 * SECOND) == 4 * SECOND


def test_without_pacing_every_frame_is_due_now():
    pacer = Pacer(is_realtime=False, fps=1)

    assert [pacer.due_ns(pts, 42) for pts in [*UNEVEN, None]] == [42] * 7


@pytest.mark.parametrize(("fps", "distance"), [(None, 0), (4, 250 * MS), (0.5, 2 * SECOND)])
def test_images_without_a_time_are_sent_at_the_rate_asked_for(fps, distance):
    pacer = Pacer(is_realtime=True, fps=fps)

    due = [pacer.due_ns(None, 10) for _ in range(4)]

    assert [d - 10 for d in due] == [0, distance, 2 * distance, 3 * distance]


@pytest.mark.parametrize(
    ("source_fps", "fps", "seconds", "expected"),
    [
        pytest.param(25, 2, 10, 20, id="25-to-2"),
        pytest.param(30, 30, 10, 300, id="same-rate-loses-none"),
        pytest.param(30, 60, 10, 300, id="more-than-there-is"),
        pytest.param(25, 24, 10, 240, id="25-to-24"),
        pytest.param(30, 0.5, 10, 5, id="one-in-two-seconds"),
    ],
)
@pytest.mark.parametrize("rounded_to", [1, MS])
def test_thinning_gives_the_rate_asked_for(source_fps, fps, seconds, expected, rounded_to):
    """Also with times rounded to milliseconds, as Matroska has them."""
    subsampler = Subsampler(fps)
    times = [n * SECOND // source_fps // rounded_to * rounded_to for n in range(source_fps * seconds)]

    assert abs(sum(subsampler.is_wanted(pts) for pts in times) - expected) <= (1 if fps < source_fps else 0)


def test_thinning_goes_by_time_so_a_gap_makes_no_burst():
    subsampler = Subsampler(2)

    taken = [pts for pts in UNEVEN if subsampler.is_wanted(pts)]

    assert taken == [0, 500 * MS, 10_000 * MS]


def test_no_rate_takes_every_frame():
    assert all(Subsampler(None).is_wanted(pts) for pts in UNEVEN)
    assert all(Subsampler(1).is_wanted(None) for _ in range(9))


@pytest.mark.parametrize("fps", [0, -1, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(fps):
    with pytest.raises(ValueError, match="fps must be above 0"):
        Subsampler(fps)


def test_the_first_piece_keeps_its_times():
    timeline = Timeline()

    assert [timeline.place(pts) for pts in UNEVEN] == UNEVEN


def test_loops_follow_each_other_without_a_jump():
    """Three loops of a clip that starts at 100 ms give one even time line."""
    timeline = Timeline()
    placed = []
    for _ in range(3):
        placed += [timeline.place(pts) for pts in (100 * MS, 140 * MS, 180 * MS)]
        timeline.begin_piece(timeline.step_ns)

    assert placed == [(100 + 40 * n) * MS for n in range(9)]


def test_a_loop_of_one_frame_still_rises():
    timeline = Timeline()
    placed = []
    for _ in range(3):
        placed.append(timeline.place(0))
        timeline.begin_piece(timeline.step_ns)

    assert placed[0] < placed[1] < placed[2]


def test_a_piece_before_any_frame_changes_nothing():
    timeline = Timeline()
    timeline.begin_piece(SECOND)

    assert timeline.place(5) == 5


def test_back_off_doubles_to_its_limit_and_resets():
    back_off = BackOff(500, 3000)

    waits = [back_off.next_ms() for _ in range(5)]
    failures = back_off.failure_count
    back_off.reset()

    assert waits == [500, 1000, 2000, 3000, 3000]
    assert failures == 5
    assert (back_off.next_ms(), back_off.failure_count) == (500, 1)


@pytest.mark.parametrize(("first", "limit"), [(0, 10), (20, 10), (-1, 10)])
def test_back_off_refuses_bounds_that_are_none(first, limit):
    with pytest.raises(ValueError, match="first_ms"):
        BackOff(first, limit)
