"""Messages to message parts and back: the face of wire version 1.

``encode`` trusts its caller, who is our own code; ``decode`` trusts nobody: for any bytes it returns a
message or raises RemoteProtocolError, nothing else. Layout: docs/protocol.md. Where things are:
``wire`` runs msgpack, ``frames`` and ``results`` hold what comes per frame, ``bundles`` and ``columns`` many
of them at once, ``peers`` the tables of all other messages, ``fields`` and ``tensors`` the checks of single
values, ``imageheader`` image sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from headrace.errors import Code, RemoteProtocolError, UnexpectedTypeError
from headrace.protocol import messages as m
from headrace.protocol.bundles import (
    read_batch,
    read_done,
    read_frames,
    read_outcomes,
    write_batch,
    write_done,
    write_frames,
    write_outcomes,
)
from headrace.protocol.fields import shown
from headrace.protocol.messages import PROTOCOL_VERSION, Buffer, Limits, Message
from headrace.protocol.peers import SCHEMAS, Schema
from headrace.protocol.results import read_replay_reply, write_replay_reply
from headrace.protocol.wire import pack, unpack_header

# Who may say what, as seen by the receiver. A socket passes its own set to decode().
_ROUTER_COMMON: Final = frozenset({m.Discover, m.Heartbeat, m.Goodbye})
_DEALER_COMMON: Final = frozenset({m.Endpoints, m.Refused, m.Heartbeat, m.Goodbye})
FROM_PRODUCER: Final[frozenset[type]] = _ROUTER_COMMON | {m.Hello, m.Frames}
FROM_INTAKE: Final[frozenset[type]] = frozenset({m.Frames})
FROM_WORKER: Final[frozenset[type]] = _ROUTER_COMMON | {
    m.WorkerHello,
    m.Ready,
    m.Done,
    m.Failed,
    m.Telemetry,
    m.Loaded,
    m.NotLoaded,
    m.Compared,
}
FROM_CONTROL: Final[frozenset[type]] = _ROUTER_COMMON | {m.Request}
TO_PRODUCER: Final[frozenset[type]] = _DEALER_COMMON | {m.Welcome, m.Credit, m.Reject}
TO_WORKER: Final[frozenset[type]] = _DEALER_COMMON | {
    m.Setup,
    m.Batch,
    m.Cancel,
    m.Load,
    m.Unload,
    m.Compare,
}
TO_CONTROL: Final[frozenset[type]] = _DEALER_COMMON | {m.Reply, m.ReplayReply}
PUBLISHED: Final[frozenset[type]] = frozenset({m.Outcomes, m.Subscribed})

_Write = Callable[[Any], "tuple[dict[str, Any], list[Buffer]]"]
_Read = Callable[[dict[Any, Any], Sequence[Buffer], Limits], Message]


def encode(message: Message) -> list[Buffer]:
    """Return the parts of a message: the header, then its payloads, which are passed on, not copied.

    Raises ValueError, TypeError or OverflowError for what can't be sent (a BadFrame, a value that msgpack
    has no type for, an integer beyond 64 bits): a bug of the caller, or user data it should have checked.
    """
    type_name, write = _WRITERS[type(message)]
    fields, payloads = write(message)
    return [pack({"v": PROTOCOL_VERSION, "type": type_name, **fields}), *payloads]


def decode(parts: Sequence[Buffer], limits: Limits, expected: frozenset[type] | None = None) -> Message:
    """Return the message that the parts of one ZeroMQ message hold (without routing id or topic).

    ``expected`` are the message classes that this peer may send; None means any. A frame of a readable
    message that is wrong itself comes back as BadFrame in its place.

    Raises RemoteProtocolError with a stable code and our own text, for whatever bytes; UnexpectedTypeError
    before anything but the type was looked at.
    """
    header = unpack_header(parts, limits)
    version = header.get("v", PROTOCOL_VERSION)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            Code.BAD_VERSION, f"this side speaks protocol version {PROTOCOL_VERSION}, got {shown(version)}"
        )
    type_name = header.get("type", "frame")
    known = _READERS.get(type_name) if type(type_name) is str else None
    if known is None:
        raise RemoteProtocolError(Code.UNKNOWN_TYPE, f"there is no message type {shown(type_name)}")
    kind, read = known
    if expected is not None and kind not in expected:
        wanted = sorted([_WRITERS[member][0] for member in expected])
        raise UnexpectedTypeError(
            kind, f"type {type_name} has no place here, which takes {', '.join(wanted)}"
        )
    try:
        return read(header, parts[1:], limits)
    except RemoteProtocolError as error:
        error.kind = kind
        raise


# -- results ------------------------------------------------------------------------------------------


def topic_of(stream: str) -> bytes:
    """Return the topic of a stream: NUL ends it, so that ``cam-1`` never matches ``cam-10``."""
    return stream.encode("utf-8") + b"\0"


def encode_published(message: m.Outcomes | m.Subscribed, topic: bytes | None = None) -> list[Buffer]:
    """Return [topic, header, payloads ...] for the results socket.

    Outcomes go to their stream's topic. Subscribed goes to exactly the ``topic`` that was subscribed to,
    with or without NUL; left out, it is taken for a prefix.
    """
    if topic is None:
        is_outcomes = type(message) is m.Outcomes
        topic = topic_of(message.outcomes[0].stream) if is_outcomes else message.topic.encode("utf-8")  # type: ignore[union-attr]
    return [topic, *encode(message)]


def decode_published(parts: Sequence[Buffer], limits: Limits) -> m.Outcomes | m.Subscribed:
    """Return what was published: parts are [topic, header, payloads ...].

    Raises RemoteProtocolError as decode() does, and bad_field when outcomes stand under another topic.
    """
    message = decode(parts[1:], limits, PUBLISHED)
    if type(message) is m.Outcomes:
        stream = message.outcomes[0].stream
        if bytes(parts[0]) != topic_of(stream):
            raise RemoteProtocolError(
                Code.BAD_FIELD, f"the topic of the message is not that of its stream {shown(stream)}"
            )
    return message  # type: ignore[return-value]  # PUBLISHED holds these two


# -- tables -------------------------------------------------------------------------------------------


def _write_by(schema: Schema[Any]) -> _Write:
    def write(message: Any) -> tuple[dict[str, Any], list[Buffer]]:
        return schema.write(message), []

    return write


def _read_by(schema: Schema[Any]) -> _Read:
    def read(header: dict[Any, Any], payloads: Sequence[Buffer], _limits: Limits) -> Message:
        if payloads:
            raise RemoteProtocolError(
                Code.PART_COUNT, f"this type of message has no payload parts, the message has {len(payloads)}"
            )
        message: Message = schema.kind(**schema.read(header))
        return message

    return read


def _write_reply(message: m.Reply) -> tuple[dict[str, Any], list[Buffer]]:
    return SCHEMAS["reply"].write(message), list(message.payloads)


def _read_reply(header: dict[Any, Any], payloads: Sequence[Buffer], limits: Limits) -> m.Reply:
    if len(payloads) > limits.max_frames_per_message:
        raise RemoteProtocolError(
            Code.PART_COUNT,
            f"a reply has at most {limits.max_frames_per_message} payload parts "
            f"(max_frames_per_message), the message has {len(payloads)}",
        )
    return m.Reply(**SCHEMAS["reply"].read(header), payloads=tuple(payloads))


_BY_HAND: Final[dict[str, tuple[type, _Write, _Read]]] = {
    "frame": (m.Frames, write_frames, read_frames),
    "batch": (m.Batch, write_batch, read_batch),
    "done": (m.Done, write_done, read_done),
    "outcomes": (m.Outcomes, write_outcomes, read_outcomes),
    "replay_reply": (m.ReplayReply, write_replay_reply, read_replay_reply),
    "reply": (m.Reply, _write_reply, _read_reply),
}
_ALL: Final[dict[str, tuple[type, _Write, _Read]]] = {
    **{name: (schema.kind, _write_by(schema), _read_by(schema)) for name, schema in SCHEMAS.items()},
    **_BY_HAND,
}
_WRITERS: Final[dict[type, tuple[str, _Write]]] = {
    kind: (name, write) for name, (kind, write, _) in _ALL.items()
}
_READERS: Final[dict[str, tuple[type, _Read]]] = {
    name: (kind, read) for name, (kind, _, read) in _ALL.items()
}

#: Every message class with its wire type, for documentation and tests.
TYPE_NAMES: Final[dict[type, str]] = {kind: name for name, (kind, _, _) in _ALL.items()}
