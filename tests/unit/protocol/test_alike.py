"""Outcomes like those before them are read as the first were, and refused as the first would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hr_wire
import msgpack
import pytest

from headrace.errors import RemoteProtocolError
from headrace.protocol import alike, bundles, codec
from headrace.protocol.alike import Alike
from headrace.protocol.columns import Table
from headrace.protocol.messages import Limits, Outcomes, Status, TensorSpec, Timing

LIMITS = Limits()

#: Two outcomes as a broker publishes them.
FIRST = replace(
    hr_wire.SAMPLES["outcomes alike"].outcomes[0],
    outputs=None,
    meta=None,
    message="",
    retry_after_ms=None,
    pts_ns=None,
    flags=(),
    status=Status.OK,
    code="",
    attempt=1,
    tensors=(TensorSpec("y", "uint8", (3,)),),
    payloads=(b"abc",),
    timing=Timing(1, 2, 3, 4, 5),
)
SECOND = replace(FIRST, seq=FIRST.seq + 1, pub_seq=FIRST.pub_seq + 1, payloads=(b"def",))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Alike:
    """Nothing is known from other tests."""
    monkeypatch.setattr(bundles, "_alike", Alike())
    return bundles._alike


def read(parts: list[Any]) -> object:
    try:
        return codec.decode(parts, LIMITS)
    except RemoteProtocolError as error:
        return error.code, error.message


def table_of(message: Outcomes) -> Table:
    return Table(msgpack.unpackb(codec.encode(message)[0]), LIMITS)


def changed(change: dict[str, Any]) -> list[Any]:
    """The two outcomes with fields of their header changed: ``shared__x`` inside shared, ... is removed."""
    header, *payloads = codec.encode(Outcomes((FIRST, SECOND)))
    fields = msgpack.unpackb(header)
    for name, value in change.items():
        *into, last = name.split("__")
        place = fields[into[0]] if into else fields
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return [msgpack.packb(fields), *payloads]


@pytest.mark.parametrize(
    "rows",
    [
        (FIRST, SECOND),
        (replace(FIRST, timing=Timing(1, 2, None, 4, 9)), SECOND),
        tuple(replace(row, timing=Timing()) for row in (FIRST, SECOND)),
        tuple(replace(row, tensors=(), payloads=()) for row in (FIRST, SECOND)),
        tuple(replace(row, tensors=(), payloads=(), outputs=[row.seq]) for row in (FIRST, SECOND)),
        tuple(replace(row, status=Status.ERROR, code="batch_failed") for row in (FIRST, SECOND)),
    ],
    ids=["shared stages", "own stages", "no stages", "no tensors", "outputs", "an error"],
)
def test_the_second_message_is_read_as_the_first_was(rows, known):
    """By its bytes, and with its own numbers."""
    later = tuple(replace(row, seq=row.seq + 2, pub_seq=row.pub_seq + 2) for row in rows)

    assert read(codec.encode(Outcomes(rows))) == Outcomes(rows)
    assert len(known._known) == 1
    assert read(codec.encode(Outcomes(later))) == Outcomes(later)
    assert len(known._known) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"shared__attempt": True},
        {"shared__attempt": None},
        {"shared__attempt": ...},
        {"shared__boot": 2**64 - 1},
        {"shared__queued_us": -1},
        {"shared__queued_us": True},
        {"columns__seq": ...},
        {"columns__seq": [1, True]},
        {"columns__pub_seq": [1, -1]},
        {"columns__outputs": [{b"x": 1}, 2]},
        {"columns__status": ["ok", "ok"]},
        {"shared__meta": {"a": 1}},
        {"shared__outputs": [1]},
        {"shared__message": "why"},
        {"shared__later": 1},
        {"sizes": 2},
        {"sizes": [2, 4]},
        {"shared__tensors": [{"name": "y", "dtype": "uint8", "shape": [2]}]},
    ],
    ids=str,
)
def test_what_is_known_makes_no_difference(change, known):
    """A changed message ends as it would have ended as the first one, whatever was read before it."""
    afresh = read(changed(change))

    read(codec.encode(Outcomes((FIRST, SECOND))))
    assert known._known

    assert read(changed(change)) == afresh


def test_values_of_any_kind_are_not_shared_between_messages():
    """Whoever changes the outputs of an outcome changes no other message's."""
    rows = tuple(replace(row, outputs={"n": row.seq}) for row in (FIRST, SECOND))
    read(codec.encode(Outcomes(rows)))

    read(codec.encode(Outcomes(rows))).outcomes[0].outputs["n"] = "changed"

    assert read(codec.encode(Outcomes(rows))) == Outcomes(rows)


def test_no_payload_is_kept(known):
    """What is remembered is small, however large an outcome is."""
    read(codec.encode(Outcomes((FIRST, SECOND))))

    [(outcome, sizes)] = known._known.values()
    assert outcome.payloads == ()
    assert sizes == (3,)


def test_what_is_known_is_bounded(monkeypatch, known):
    """Beyond the bound all is forgotten; what is large is never remembered."""
    monkeypatch.setattr(alike, "MAX_KNOWN", 2)
    for stream in ("a", "b", "c"):
        read(codec.encode(Outcomes(tuple(replace(row, stream=stream) for row in (FIRST, SECOND)))))

    assert len(known._known) == 1
    large = Outcomes(tuple(replace(row, version="v" * 200, tensors=()) for row in (FIRST, SECOND)))
    monkeypatch.setattr(alike, "MAX_KNOWN_BYTES", 100)
    assert (
        known.key(table_of(replace(large, outcomes=tuple(replace(r, payloads=()) for r in large.outcomes))))
        is None
    )
