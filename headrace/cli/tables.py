"""The broker's status as a text of a few tables.

The answer may come from a broker of another release, so that each field is looked at before it is used:
what is missing shows as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.protocol.messages import Value

Entry = Mapping[str, Value]

#: Streams shown; --json has all that the broker sent.
MAX_STREAMS = 20

MIB = 1024 * 1024

_MISSING = "-"


def status_text(status: Entry) -> str:
    """Return the account, and a table each of size classes, workers and streams."""
    parts = [_head(status), _account(status)]
    parts += _table("size classes", _CLASS_COLUMNS, _entries(status, "classes"))
    parts += _reloaded(status)
    workers = _entries(status, "workers")
    parts += _table("workers", _WORKER_COLUMNS, workers) if workers else [_no_workers()]
    for worker in workers:
        notes = worker.get("notes")
        parts += [f"  {_text(worker, 'id')}: {note!s}" for note in notes] if isinstance(notes, list) else []
    parts += _table("compared with FP32", _DRIFT_COLUMNS, _entries(status, "drift"))
    streams = _named(status, "streams")
    parts += _table("streams", _STREAM_COLUMNS, streams[:MAX_STREAMS])
    count = status.get("streams_count")
    hidden = count - len(streams[:MAX_STREAMS]) if isinstance(count, int) else 0
    if hidden > 0:
        parts.append(f"  and {hidden} more (--json shows them)")
    return "\n".join(parts)


def _head(status: Entry) -> str:
    broker = _map(status.get("broker"))
    addresses = _map(broker.get("addresses"))
    state = "draining" if status.get("is_draining") else "serving"
    release = f"{_text(broker, 'release')} ({_text(broker, 'build')})"
    who = f"broker {release} at {_text(addresses, 'frames')}, pid {_text(broker, 'pid')}"
    used, most = (_number(status, key, 1 / MIB) for key in ("unfinished_bytes", "max_bytes"))
    return f"{who}: {state}, {used} of {most} MiB in use, {_text(status, 'producers_count')} producers"


def _account(status: Entry) -> str:
    account = _map(status.get("account"))

    def count(name: str) -> str:
        return f"{_text(account, name)} {name}"

    ends = " + ".join(count(name) for name in ("ok", "error", "expired", "superseded", "unfinished"))
    codes = [
        f"{number!s} {code}"
        for table in ("rejected_by_code", "error_by_code", "misbehaved_by_code")
        for code, number in _map(status.get(table)).items()
    ]
    return f"frames: {count('accepted')} = {ends}; {count('rejected')}" + (
        f" ({', '.join(codes)})" if codes else ""
    )


def _reloaded(status: Entry) -> list[str]:
    """Return a line for each model of which another version serves, is on its way or is kept."""
    lines = []
    for model in _entries(status, "models"):
        phase = _map(model.get("reload")).get("phase")
        if phase is None:
            continue
        kept = model.get("kept_version")
        name = f"{_text(model, 'name')}:{_text(model, 'version')}"
        line = f"  {name}: serving version {_text(model, 'live_version')}, last reload {phase!s}"
        lines.append(line + (f", version {kept!s} kept" if kept else ""))
    return lines


def _no_workers() -> str:
    return "\nno workers: frames wait; start one with `headrace worker --connect ADDRESS`"


Column = tuple[str, Callable[[Entry], str]]


def _table(title: str, columns: Sequence[Column], entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    rows = [[heading for heading, _ in columns]] + [[show(entry) for _, show in columns] for entry in entries]
    return ["", f"{title}", *aligned(rows)]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equally many cells as lines in which each column has one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _column(heading: str, key: str, *, factor: float | None = None, digits: int = 0) -> Column:
    if factor is None:
        return heading, lambda entry: _text(entry, key)
    return heading, lambda entry: _number(entry, key, factor, digits)


def _stream_count(status: str) -> Column:
    def show(entry: Entry) -> str:
        return str(_map(entry.get("counts")).get(status, 0))

    return status, show


_CLASS_COLUMNS: tuple[Column, ...] = (
    ("model", lambda entry: f"{_text(entry, 'model')}:{_text(entry, 'version')}"),
    _column("class", "size_class"),
    ("size", lambda entry: f"{_text(entry, 'height')}x{_text(entry, 'width')}"),
    _column("waiting", "waiting"),
    _column("running", "in_flight"),
    _column("workers", "workers"),
    _column("batches", "batches"),
    _column("mean batch", "mean_batch", factor=1, digits=2),
    _column("padding %", "padding_waste", factor=100),
    _column("oldest ms", "oldest_wait_ms", factor=1),
)

_WORKER_COLUMNS: tuple[Column, ...] = (
    _column("worker", "id"),
    _column("device", "device"),
    _column("engine", "engine"),
    _column("state", "state"),
    ("slots", lambda entry: f"{_text(entry, 'in_flight')}/{_text(entry, 'slots')}"),
    _column("batches", "batches"),
    _column("frames", "frames"),
    _column("busy %", "busy_share", factor=100),
    _column("heard ms ago", "last_heard_ms", factor=1),
)

_DRIFT_COLUMNS: tuple[Column, ...] = (
    _column("worker", "worker"),
    _column("model", "model"),
    _column("rows compared", "rows_total", factor=1),
    _column("skipped", "skipped_rows_total", factor=1),
    _column("max abs", "max_abs", factor=1, digits=6),
    _column("max rel", "max_rel", factor=1, digits=6),
    _column("other class %", "class_changes_ratio", factor=100, digits=2),
)

_STREAM_COLUMNS: tuple[Column, ...] = (
    _column("stream", "name"),
    _stream_count("ok"),
    _stream_count("error"),
    _stream_count("expired"),
    _stream_count("superseded"),
    _stream_count("rejected"),
    _column("unfinished", "unfinished"),
    _column("last frame ms ago", "last_frame_ms", factor=1),
    ("", lambda entry: "stale" if entry.get("is_stale") else ""),
)


def _map(value: Value) -> Entry:
    return value if isinstance(value, dict) else {}


def _entries(status: Entry, key: str) -> list[Entry]:
    value = status.get(key)
    return [_map(entry) for entry in value] if isinstance(value, list) else []


def _named(status: Entry, key: str) -> list[Entry]:
    return [{"name": name, **_map(entry)} for name, entry in _map(status.get(key)).items()]


def _text(entry: Entry, key: str) -> str:
    value = entry.get(key)
    return _MISSING if value is None else str(value)


def _number(entry: Entry, key: str, factor: float, digits: int = 0) -> str:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _MISSING
    return f"{value * factor:.{digits}f}"
