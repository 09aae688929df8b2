"""DONE, outcomes and replies: results add up with their parts."""

from __future__ import annotations

import dataclasses

import hr_wire
import msgpack
import pytest

from headrace.errors import RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import Done, FrameResult, Outcomes, ReplayReply, Status, TensorSpec, Timing

LIMITS = hr_wire.LIMITS
TENSOR = {"name": "y", "dtype": "uint8", "shape": [3]}
OUTCOME = {"stream": "a", "epoch": 1, "seq": 2, "boot": 3, "pub_seq": 4, "status": "ok"}


def done_parts(results: object, *payloads: bytes) -> list[bytes]:
    return [msgpack.packb({"v": 1, "type": "done", "batch": 1, "results": results}), *payloads]


def outcome_parts(*outcomes: object, kind: str = "outcomes", **fields: object) -> list[bytes]:
    return [msgpack.packb({"v": 1, "type": kind, "outcomes": list(outcomes), **fields})]


def code_of(parts) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(parts, LIMITS)
    return caught.value.code


BAD_RESULTS = {
    "none": ([], [], "out_of_range"),
    "too many": ([{"status": "ok"}] * 257, [], "out_of_range"),
    "no array": ({"0": 1}, [], "bad_field"),
    "nil": (None, [], "missing_field"),
    "no map": ([1], [], "bad_field"),
    "no status": ([{}], [], "bad_field"),
    "status of another kind": ([{"status": "expired"}], [], "bad_field"),
    "unknown status": ([{"status": "fine"}], [], "bad_field"),
    "long code": ([{"status": "error", "code": "x" * 257}], [], "out_of_range"),
    "long message": ([{"status": "error", "message": "x" * 2049}], [], "out_of_range"),
    "too many flags": ([{"status": "ok", "flags": ["x"] * 17}], [], "out_of_range"),
    "bytes for a key": ([{"status": "ok", "outputs": [{"a": {b"b": 1}}]}], [], "bad_field"),
    "tensors no array": ([{"status": "ok", "tensors": TENSOR}], [b"abc"], "bad_field"),
    "too many tensors": ([{"status": "ok", "tensors": [TENSOR] * 65}], [b"abc"] * 65, "bad_field"),
    "tensor no map": ([{"status": "ok", "tensors": ["y"]}], [b"abc"], "bad_field"),
    "tensor dtype": ([{"status": "ok", "tensors": [TENSOR | {"dtype": "object"}]}], [b"abc"], "bad_dtype"),
    "tensor shape": ([{"status": "ok", "tensors": [TENSOR | {"shape": [-1]}]}], [b"abc"], "bad_shape"),
    "tensor overflow": (
        [{"status": "ok", "tensors": [TENSOR | {"shape": [2**63, 2**63]}]}],
        [b""],
        "bad_shape",
    ),
    "tensor size": ([{"status": "ok", "tensors": [TENSOR]}], [b"abcd"], "size_mismatch"),
    "part missing": ([{"status": "ok", "tensors": [TENSOR]}], [], "part_count"),
    "second part missing": ([{"status": "ok", "tensors": [TENSOR]}] * 2, [b"abc"], "part_count"),
    "part too many": ([{"status": "ok"}], [b""], "part_count"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_done_that_does_not_add_up_is_refused(name):
    """A worker's answer is refused whole: which frame a part belongs to is not guessed."""
    results, payloads, code = BAD_RESULTS[name]

    assert code_of(done_parts(results, *payloads)) == code


def test_parts_go_to_the_tensors_in_order():
    """Each result takes as many parts as it describes tensors; results without tensors take none."""
    results = [
        {"status": "ok", "tensors": [TENSOR, TENSOR]},
        {"status": "ok"},
        {"status": "ok", "tensors": [TENSOR]},
    ]

    done = codec.decode(done_parts(results, b"abc", b"def", b"ghi"), LIMITS)

    assert [result.payloads for result in done.results] == [(b"abc", b"def"), (), (b"ghi",)]


def test_outputs_may_be_any_tree():
    """Boxes, labels, numbers, nothing: what the model's adapter returned comes back, floats and all."""
    values = [None, 1, -(2**63), 1.5, float("inf"), "text", b"\xff", [], {}, [[1], {"a": [None, True]}]]
    done = Done(1, tuple(FrameResult(Status.OK, outputs=value) for value in values))

    assert codec.decode(codec.encode(done), LIMITS) == done


def test_tensors_and_payloads_of_a_result_must_pair_up_when_sent():
    """A worker that mixes them up fails at once, on its own side."""
    result = FrameResult(Status.OK, tensors=(TensorSpec("y", "uint8", (3,)),))

    with pytest.raises(ValueError, match="1 tensors are described, 0 are there"):
        codec.encode(Done(1, (result,)))


def test_a_long_explanation_in_a_result_is_cut():
    """The outcome of a frame is not lost because its error text was long."""
    done = Done(1, (FrameResult(Status.ERROR, "batch_failed", "x" * 5000),))

    assert len(codec.decode(codec.encode(done), LIMITS).results[0].message) == 2048


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": None}, {"stream": ""}, {"epoch": None}, {"seq": -1}, {"boot": True}, {"pub_seq": 1.0},
        {"status": None}, {"status": "fine"}, {"model": 1}, {"worker": "x" * 257}, {"attempt": -1},
        {"batch_size": 2**32}, {"shape": []}, {"shape": [0]}, {"pts_ns": 2**63}, {"pts_ns": 0.5},
        {"meta": [1]}, {"meta": {b"a": 1}}, {"retry_after_ms": -1}, {"timing": [1]},
        {"timing": {"ran_us": -1}}, {"outputs": {b"a": 1}}, {"tensors": [TENSOR]},
    ],
    ids=repr,
)  # fmt: skip
def test_a_broken_outcome_is_refused(changes):
    """A subscriber never sees a field that is not what it says."""
    assert code_of(outcome_parts(OUTCOME | changes))


def test_the_smallest_outcome_is_six_fields():
    """Everything else has a default, nil included."""
    smallest = codec.decode(outcome_parts(OUTCOME), LIMITS).outcomes[0]
    nils = codec.decode(
        outcome_parts(OUTCOME | dict.fromkeys(("pts_ns", "meta", "retry_after_ms", "outputs"))), LIMITS
    ).outcomes[0]

    assert smallest == nils
    assert smallest.timing == Timing()
    assert (smallest.shape, smallest.tensors, smallest.flags) == ((), (), ())


@pytest.mark.parametrize("field", ["queued_us", "batched_us", "staged_us", "ran_us", "published_us"])
def test_each_stage_of_the_timing_stands_alone(field):
    """A frame has the stages it reached and no others."""
    outcome = dataclasses.replace(hr_wire.REJECTED_OUTCOME, timing=Timing(**{field: 7}))
    message = Outcomes((outcome,))

    assert codec.decode(codec.encode(message), LIMITS) == message


@pytest.mark.parametrize("entries", [[], None, 5, [5]], ids=repr)
def test_published_outcomes_are_never_empty(entries):
    """A published message has at least one outcome, and each is a map."""
    parts = [msgpack.packb({"v": 1, "type": "outcomes", "outcomes": entries})]

    assert code_of(parts) in {"out_of_range", "missing_field", "bad_field"}


def test_a_replay_may_be_empty_or_long():
    """Nothing is left in the ring, or more than fits in one published message."""
    empty = ReplayReply(1, (), missed=((0, 5),))
    outcome = codec.decode(outcome_parts(OUTCOME), LIMITS).outcomes[0]
    long = ReplayReply(1, (outcome,) * 1000)

    for message in (empty, long):
        assert codec.decode(codec.encode(message), LIMITS) == message


@pytest.mark.parametrize(
    "fields",
    [
        {"missed": [[1]]},
        {"missed": [[1, 2, 3]]},
        {"missed": [1]},
        {"missed": [[-1, 2]]},
        {"has_more": 1},
        {"id": None},
    ],
    ids=repr,
)
def test_a_broken_replay_is_refused(fields):
    """Ranges are pairs of numbers."""
    assert code_of(outcome_parts(OUTCOME, kind="replay_reply", **({"id": 1} | fields)))


def test_a_replay_needs_an_array():
    """An answer without outcomes says so with an empty array."""
    assert code_of([msgpack.packb({"v": 1, "type": "replay_reply", "id": 1})]) == "bad_field"
