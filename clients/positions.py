"""The broker's answer to ``positions``, checked. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.messages import Value


@dataclass(frozen=True, slots=True)
class Positions:
    """One page: next pub_seq by stream in this boot, and where the next page begins ("" when there is none).

    With a journal also: every earlier boot it knows, the oldest first, and whether it holds all streams of
    it; and by stream where each earlier boot ended."""

    boot: int
    streams: dict[str, int]
    after: str = ""
    earlier_boots: dict[int, bool] = field(default_factory=dict)
    earlier: dict[str, dict[int, int]] = field(default_factory=dict)


def read_positions(result: dict[str, Value]) -> Positions:
    """Return the answer. Raises RemoteProtocolError."""
    boot, streams, after = result.get("boot"), result.get("streams"), result.get("streams_next", "")
    if not isinstance(boot, int) or not isinstance(streams, dict) or not isinstance(after, str):
        raise RemoteProtocolError(Code.BAD_FIELD, "positions lack boot or streams")
    next_by_stream: dict[str, int] = {}
    for stream, span in streams.items():
        match span:
            case [int(), int() as next_pub_seq] if next_pub_seq >= 0:
                next_by_stream[stream] = next_pub_seq
            case _:
                raise RemoteProtocolError(Code.BAD_FIELD, f"the position of stream {stream!r} is no range")
    return Positions(
        boot,
        next_by_stream,
        after,
        _read_boots(result.get("earlier_boots", [])),
        _read_earlier(result.get("earlier", {})),
    )


def spans_since(spans: dict[int, int], boots: dict[int, bool], seen: Container[int]) -> dict[int, int]:
    """Return the spans of the first boot that was seen and of all later ones."""
    known = list(boots)
    first = next((index for index, boot in enumerate(known) if boot in seen), len(known))
    return {boot: end for boot, end in spans.items() if boot in known[first:]}


def _read_boots(value: Value) -> dict[int, bool]:
    boots: dict[int, bool] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case [int() as boot, bool() as is_complete]:
                boots[boot] = is_complete
            case _:
                raise RemoteProtocolError(Code.BAD_FIELD, "an earlier boot is no pair of id and flag")
    return boots


def _read_earlier(value: Value) -> dict[str, dict[int, int]]:
    if not isinstance(value, dict):
        raise RemoteProtocolError(Code.BAD_FIELD, "the positions of earlier boots are no map")
    found: dict[str, dict[int, int]] = {}
    for stream, entries in value.items():
        ends = found[stream] = {}
        for entry in entries if isinstance(entries, list) else [entries]:
            match entry:
                case [int() as boot, int(), int() as end] if end >= 0:
                    ends[boot] = end
                case _:
                    raise RemoteProtocolError(
                        Code.BAD_FIELD, f"an earlier position of stream {stream!r} is no range"
                    )
    return found
