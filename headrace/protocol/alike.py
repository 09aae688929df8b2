"""Outcomes like those before them: what the rows of a table share is checked once and known by its bytes.

Not here: the rules (``bundles`` has them, and reads the first table of a kind). A broker publishes message
after message for a stream in which all but the numbers and the stages is the same; checking that again costs
a subscriber more than all the rest of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Final

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.columns import Table
from headrace.protocol.fields import U64_MAX, bad_field, tree
from headrace.protocol.messages import Buffer, Outcome, Timing
from headrace.protocol.tensors import tensor_bytes
from headrace.protocol.wire import pack, part_bytes

STAGES: Final = ("queued_us", "batched_us", "staged_us", "ran_us", "published_us")

#: What may vary among the outcomes of a message, and what they may share. Values of any kind (``meta``,
#: shared ``outputs``) can be changed by whoever gets them, so that they are read anew each time.
_VARYING: Final = frozenset(("seq", "pub_seq", "outputs", *STAGES))
_SHARED: Final = frozenset(
    (
        "stream", "epoch", "boot", "model", "version", "size_class", "worker", "attempt", "batch_size",
        "shape", "status", "code", "tensors", *STAGES,
    )
)  # fmt: skip

#: Bounds of what is remembered: beyond the one all is forgotten, larger than the other is read anew.
MAX_KNOWN = 1_024
MAX_KNOWN_BYTES = 1_024


class Alike:
    """What was read before. Invariant: an entry was checked by the rules and holds what its key says.

    Any thread may use it: an entry is put as a whole and never changed."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Outcome, tuple[int, ...]]] = {}

    def key(self, table: Table) -> bytes | None:
        """Return what names all that the rows share but their stages; None when this is not for here."""
        shared, columns = table.shared, table.columns
        if not (shared.keys() <= _SHARED and columns.keys() <= _VARYING) or None in shared.values():
            return None
        # Packed, 1 and True differ; compared, they would be equal.
        key = pack([shared.get(name) for name in _KEY_NAMES])
        return key if len(key) <= MAX_KNOWN_BYTES else None

    def learn(self, key: bytes, outcome: Outcome) -> None:
        """Remember what an outcome that was read by the rules shares with others of this key."""
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        sizes = [tensor_bytes(spec.shape, spec.dtype) for spec in outcome.tensors]
        self._known[key] = (replace(outcome, outputs=None, payloads=()), tuple(sizes))

    def read(self, key: bytes, table: Table, payloads: Sequence[Buffer]) -> list[Outcome] | None:
        """Return the outcomes of a table; None for a key that is not known.

        Raises RemoteProtocolError when a row needs a closer look."""
        known = self._known.get(key)
        if known is None:
            return None
        alike, sizes = known
        stream, epoch, boot, status, code = alike.stream, alike.epoch, alike.boot, alike.status, alike.code
        model, version, size_class, worker = alike.model, alike.version, alike.size_class, alike.worker
        attempt, batch_size, shape, tensors = alike.attempt, alike.batch_size, alike.shape, alike.tensors
        rows = zip(
            table.numbers("seq"),
            table.numbers("pub_seq"),
            _timings(table),
            _outputs(table),
            _payloads(payloads, sizes, table.count),
            strict=False,  # what all rows have alike is repeated without end
        )
        return [
            Outcome(
                stream, epoch, seq, boot, pub_seq, status, code, "", model, version, size_class, worker,
                attempt, batch_size, shape, None, None, None, timing, output, tensors, taken, (),
            )
            for seq, pub_seq, timing, output, taken in rows
        ]  # fmt: skip


_KEY_NAMES: Final = sorted(_SHARED - frozenset(STAGES))


def _timings(table: Table) -> Iterable[Timing]:
    if table.columns.keys().isdisjoint(STAGES) and table.shared.keys().isdisjoint(STAGES):
        return repeat(Timing())
    return map(Timing, *[table.integers(name, 0, U64_MAX, None) for name in STAGES])


def _outputs(table: Table) -> Iterable[Any]:
    outputs = table.columns.get("outputs")
    if outputs is None:
        return repeat(None)
    for value in outputs:
        tree(value, "outputs")
    return outputs


def _payloads(payloads: Sequence[Buffer], sizes: tuple[int, ...], count: int) -> Iterable[tuple[Buffer, ...]]:
    """Return each row's payloads, of which each must be as large as its tensor."""
    width = len(sizes)
    if len(payloads) != width * count:
        raise RemoteProtocolError(
            Code.PART_COUNT, f"{width * count} payloads are announced, {len(payloads)} are there"
        )
    if not width:
        return repeat(())
    for index, nbytes in enumerate(sizes):
        if set(map(part_bytes, payloads[index::width])) != {nbytes}:
            raise bad_field("a tensor", f"{nbytes} bytes", None)
    return zip(*[iter(payloads)] * width, strict=True)
