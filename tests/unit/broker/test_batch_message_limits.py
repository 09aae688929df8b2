"""A batch never holds more than one message to a worker can carry."""

from __future__ import annotations

from dataclasses import replace

import hr_core as hc

from headrace.protocol.messages import Limits, Value

MIB = 1024 * 1024


def driver(**limits: int) -> hc.CoreDriver:
    return hc.CoreDriver(hc.make_settings(limits=Limits(**limits)))


def run_all(world: hc.CoreDriver) -> list[list[int | None]]:
    """Answer each batch until none is sent; return the seqs of each."""
    sent: list[list[int | None]] = []
    todo = hc.batches(world.tick())
    while todo:
        for one in todo:
            sent.append(hc.seqs(one.batch))
            world.done(one)
        todo = hc.batches(world.tick())
    return sent


def test_large_frames_meet_the_byte_limit_before_the_batch_limit() -> None:
    """PAY-07: four frames of 3 MiB in messages of 8 MiB leave as two and two, in order."""
    world = driver(max_frame_bytes=4 * MIB, max_message_bytes=8 * MIB, max_header_bytes=MIB)
    world.join_worker(slots=2)
    world.push(*(hc.frame(seq=number, nbytes=3 * MIB) for number in range(4)))

    sent = run_all(world)

    assert sent == [[0, 1], [2, 3]]
    world.core.check_invariants()


def test_a_frame_of_any_admitted_size_is_sent_alone_at_least() -> None:
    """Limits that leave no room beside the header still let one frame through."""
    world = driver(max_frame_bytes=MIB, max_message_bytes=MIB, max_header_bytes=MIB)
    world.join_worker(slots=2)
    world.push(hc.frame(seq=0, nbytes=MIB), hc.frame(seq=1, nbytes=MIB))

    sent = run_all(world)

    assert sent == [[0], [1]]


def test_a_batch_has_no_more_frames_than_a_message() -> None:
    """A size class may allow more frames than a message holds; the message wins."""
    world = driver(max_frames_per_message=3)
    world.join_worker(slots=2)
    world.push(*(hc.frame(seq=number) for number in range(4)))

    sent = run_all(world)

    assert sent == [[0, 1, 2], [3]]


def test_half_of_a_failed_batch_is_cut_as_well() -> None:
    """Bisection goes on with what did not fit as an exact batch of its own."""
    world = driver(max_frames_per_message=1)
    world.join_worker(slots=4)
    queue = world.core.models.classes[0].queue
    world.push(hc.frame(seq=0), hc.frame(seq=1))
    queue.push_exact(queue.take(2, world.now_ns))

    sent = run_all(world)

    assert sent == [[0], [1]]
    world.core.check_invariants()


def test_a_batch_leaves_meta_behind_and_the_outcome_has_it() -> None:
    """256 frames with 4 KiB of meta each would make a header that the worker refuses."""
    world = driver()
    world.join_worker(slots=2)
    meta: dict[str, Value] = {"note": "x" * 4_000}
    world.push(*(replace(hc.frame(seq=number), meta=meta) for number in range(2)))

    (sent,) = hc.batches(world.tick())
    actions = world.done(sent)

    assert [frame.meta for frame in sent.batch.frames] == [None, None]
    assert [outcome.meta for outcome in hc.outcomes(actions)] == [meta, meta]
