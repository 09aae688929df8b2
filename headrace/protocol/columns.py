"""Many rows in one header: what all rows share stands once, the rest as a column of one value a row.

Not here: what the fields are (``bundles``). Nil in a column means that the row leaves the field out. Small
payloads travel joined, as one message part: a part costs each side two to four microseconds, a slice of a
part a tenth of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from typing import Any, Final, TypeVar

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.fields import bad_field, missing_field
from headrace.protocol.messages import Buffer, Limits
from headrace.protocol.wire import pack, part_bytes

T = TypeVar("T")

#: Payloads up to this size are joined. Measured with pyzmq 27, both sides together: a part of 1 KiB costs
#: 4 us, joined and cut out 0.4 us; at 4 KiB the two copies cost a third of the part, at 64 KiB all of it.
JOIN_BYTES: Final = 4_096

#: Most fields of a row, and most bytes of ``shared`` beside ``max_meta_bytes``. What is shared counts once in
#: the header's size but is read once a row: a header of 1 MiB must not stand for 256 of them.
MAX_FIELDS: Final = 64
MAX_SHARED_BYTES: Final = 64 * 1024


class ColumnWriter:
    """Writes objects of one class by a table of (wire name, attribute, default)."""

    def __init__(self, fields: Sequence[tuple[str, str, object]], trees: Iterable[str] = ()) -> None:
        """``trees`` are fields of any value: they are never taken for equal, since 1 equals true."""
        self._names = tuple([name for name, _, _ in fields])
        self._defaults = tuple([default for _, _, default in fields])
        self._get = attrgetter(*[attribute for _, attribute, _ in fields])
        self._trees = frozenset(trees)

    def write(self, rows: Sequence[object]) -> dict[str, Any]:
        """Return ``count``, ``shared`` and ``columns``; defaults are left out."""
        count = len(rows)
        shared: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        values = zip(*map(self._get, rows), strict=True)
        for name, default, column in zip(self._names, self._defaults, values, strict=True):
            first = column[0]
            is_alike = column.count(first) == count
            if is_alike and first == default:
                continue
            if is_alike and name not in self._trees:
                shared[name] = first
            else:
                columns[name] = [value or None for value in column] if default == () else column
        return {"count": count, "shared": shared, "columns": columns}


class Table:
    """The rows of a received header. Invariant: every column has ``count`` values."""

    __slots__ = ("columns", "count", "shared")

    def __init__(self, header: dict[Any, Any], limits: Limits) -> None:
        """Raises RemoteProtocolError when the header has no table of at least one row, or too many."""
        count, shared, columns = header.get("count"), header.get("shared"), header.get("columns")
        if type(count) is not int:
            raise missing_field("count") if count is None else bad_field("count", "an integer", count)
        if not 1 <= count <= limits.max_frames_per_message:
            raise RemoteProtocolError(
                Code.OUT_OF_RANGE,
                f"count must be 1 to {limits.max_frames_per_message} (max_frames_per_message), got {count}",
            )
        if type(shared) is not dict:
            raise bad_field("shared", "a map", shared)
        if type(columns) is not dict:
            raise bad_field("columns", "a map", columns)
        if len(shared) + len(columns) > MAX_FIELDS:
            raise RemoteProtocolError(
                Code.OUT_OF_RANGE,
                f"a table has at most {MAX_FIELDS} fields, shared and columns together,"
                f" got {len(shared) + len(columns)}",
            )
        shared_bytes, most_bytes = len(pack(shared)), MAX_SHARED_BYTES + limits.max_meta_bytes
        if shared_bytes > most_bytes:
            raise RemoteProtocolError(
                Code.MESSAGE_TOO_LARGE,
                f"shared has {shared_bytes} bytes, the limit is {most_bytes}: write large values as a column",
            )
        for name, column in columns.items():
            if type(column) is not list or len(column) != count:
                raise bad_field(f"column {name[:32]!r}", f"an array of {count}", column)
        self.count: int = count
        self.shared: dict[Any, Any] = shared
        self.columns: dict[Any, list[Any]] = columns

    def rows(self) -> list[dict[Any, Any]]:
        """Return each row as the map that it would be on its own."""
        rows = [dict(self.shared) for _ in range(self.count)]
        for name, column in self.columns.items():
            for row, value in zip(rows, column, strict=True):
                if value is not None:
                    row[name] = value
        return rows

    def has(self, *names: str) -> bool:
        """Tell whether one of the fields is there, shared or as a column."""
        return any(name in self.shared or name in self.columns for name in names)

    def each(self, name: str, read: Callable[[Any, str], T], default: T | None = None) -> Iterable[T]:
        """Return the values of a field, one a row, each distinct value read once; a default of None means
        that every row must have one.

        For texts: numbers that are equal to a bool would be taken for it. Raises TypeError for values that
        can't be distinct (lists, maps)."""
        column = self.columns.get(name)
        if column is None:
            if name not in self.shared and default is not None:
                return repeat(default, self.count)
            return repeat(read(self.shared.get(name), name), self.count)
        known = {value: read(value, name) for value in set(column) if value is not None or default is None}
        if default is not None:
            known[None] = default
        return [known[value] for value in column]

    def numbers(self, name: str) -> Iterable[int]:
        """Return the unsigned integers of a field that every row has."""
        column = self.columns.get(name)
        values: list[Any] = [self.shared.get(name)] if column is None else column
        if set(map(type, values)) != {int} or min(values) < 0:
            raise bad_field(name, "unsigned integers", values)
        return repeat(values[0], self.count) if column is None else column

    def integers(self, name: str, low: int, high: int, default: T) -> Iterable[int | T]:
        """Return the integers of a field, one a row; nil or left out is the default."""
        column = self.columns.get(name)
        values: list[Any] = [self.shared.get(name)] if column is None else column
        kinds = set(map(type, values))
        if not kinds <= _INT_OR_NIL:
            raise bad_field(name, "integers", values)
        has_nil = kinds != {int}
        if has_nil and name in self.shared:
            raise bad_field(name, "no nil for all rows", None)  # what it means there is the field's own
        present = [value for value in values if value is not None] if has_nil else values
        if present and not low <= min(present) <= max(present) <= high:
            raise bad_field(name, f"{low} to {high}", values)
        if column is None:
            return repeat(default if has_nil else values[0], self.count)
        return [default if value is None else value for value in column] if has_nil else column


_INT_OR_NIL: Final = frozenset({int, type(None)})


def join_payloads(payloads: list[Buffer]) -> tuple[dict[str, Any], list[Buffer]]:
    """Return the header field and the parts for payloads: one part and ``sizes`` when all are small."""
    if len(payloads) < 2:
        return {}, payloads
    sizes = list(map(part_bytes, payloads))
    if max(sizes) > JOIN_BYTES:
        return {}, payloads
    is_even = sizes[0] > 0 and sizes.count(sizes[0]) == len(sizes)
    return {"sizes": sizes[0] if is_even else sizes}, [b"".join(payloads)]


def cut_payloads(header: dict[Any, Any], parts: Sequence[Buffer], max_count: int) -> Sequence[Buffer]:
    """Return the payloads of a message: its parts, or its one part cut up by ``sizes``.

    Raises RemoteProtocolError when the sizes are not those of the part, or cut it in more than
    ``max_count`` payloads."""
    sizes = header.get("sizes")
    if sizes is None:
        return parts
    if len(parts) != 1:
        raise RemoteProtocolError(
            Code.PART_COUNT, f"payloads with sizes are joined in 1 part, the message has {len(parts)}"
        )
    # Bytes of their own: a slice of a view would keep all the others in memory as long as itself.
    whole = bytes(parts[0])
    total_bytes = len(whole)
    if type(sizes) is int:
        if sizes < 1 or total_bytes % sizes or not sizes <= total_bytes <= sizes * max_count:
            raise _bad_sizes(sizes, total_bytes)
        return [whole[start : start + sizes] for start in range(0, total_bytes, sizes)]
    if type(sizes) is not list or set(map(type, sizes)) != {int} or min(sizes) < 0:
        raise bad_field("sizes", "a size, or an array of sizes", sizes)
    if len(sizes) > max_count:
        raise RemoteProtocolError(
            Code.PART_COUNT, f"sizes cut the part in {len(sizes)} payloads, there can be {max_count}"
        )
    if sum(sizes) != total_bytes:
        raise _bad_sizes(sum(sizes), total_bytes)
    return [whole[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _bad_sizes(announced: int, found: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        Code.SIZE_MISMATCH, f"a part of {found} bytes can't be cut by sizes {announced}"
    )
