"""The broker's answer to ``positions``, checked. Pure."""

from __future__ import annotations

from headrace.errors import Code, RemoteProtocolError
from headrace.protocol.messages import Value


def read_positions(result: dict[str, Value]) -> tuple[int, dict[str, int], str]:
    """Return boot, next pub_seq by stream, and where the next page begins ("" when there is none).

    Raises RemoteProtocolError.
    """
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
    return boot, next_by_stream, after
