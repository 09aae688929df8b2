"""What a subscriber session is told and what it asks for: its events, actions and states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeAlias

from headrace.clients.records import Missed
from headrace.protocol.messages import Message, Outcome, Outcomes, Request, Subscribed
from headrace.protocol.per_frame import per_frame


class Mode(StrEnum):
    """What a reader that is slower than its streams gets: ``every`` outcome, or the ``latest`` one."""

    EVERY = "every"
    LATEST = "latest"


class Start(StrEnum):
    """Where a subscriber begins: with what the broker still keeps, or with what comes."""

    EARLIEST = "earliest"
    NOW = "now"


class State(Enum):
    """Where the session stands (see the drawing above)."""

    AWAY = "away"
    CONNECTING = "connecting"
    CONFIRMING = "confirming"
    OPEN = "open"
    CLOSED = "closed"


# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """What Connect asked for has been done: results and control are both connected."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """One of the connections has gone, or could not be made; the other is closed as well."""

    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """Something came on a topic."""

    topic: bytes
    message: Outcomes | Subscribed


@dataclass(frozen=True, slots=True)
class Answered:
    """Something came on control."""

    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; everything that had come has been handed over. ``has_room``: whether the reader
    can take more."""

    has_room: bool


Event: TypeAlias = Connected | Disconnected | Published | Answered | Tick


# -- actions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Find the broker and connect results and control anew."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close both connections."""

    reason: str


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to a topic; where it was subscribed to already, unsubscribe first."""

    topic: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Send on control."""

    request: Request


@per_frame(frozen=True, slots=True)
class Deliver:
    """Hand to the reader, in the order of the actions."""

    item: Outcome | Missed


# -- requests under way ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    """A replay of pub_seq ``first`` to ``end - 1`` was asked for."""

    stream: str
    boot: int
    first: int
    end: int
    asked_ns: int


@dataclass(frozen=True, slots=True)
class PositionsAsked:
    """A page of positions was asked for; ``has_earlier``: with what the journal has of earlier boots."""

    asked_ns: int
    has_earlier: bool


Action: TypeAlias = Connect | Disconnect | Subscribe | Ask | Deliver
