"""What referees write down: frames and sessions as one boot of the broker has seen them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.protocol.messages import BadFrame, Frame, Status


class Violation(AssertionError):  # noqa: N818 - it is no error of ours but a finding
    """The core broke a promise. ``key`` names the frame, for its story."""

    def __init__(self, text: str, key: tuple[str, int, int] | None = None) -> None:
        super().__init__(text)
        self.key = key


class Result(NamedTuple):
    """What a worker said of a frame, in a batch of how many."""

    status: Status
    code: str
    outputs: object
    worker: str
    batch_size: int


@dataclass(slots=True, eq=False)
class Seen:
    """One frame as this boot has seen it. In flight it is in one batch, or in two when one is a hedge."""

    id: int
    frame: Frame | BadFrame
    stream: str
    epoch: int
    arrived_ns: int
    deadline_ns: int | None
    session: Session | None
    seq: int | None = None
    waits_from_ns: int = 0
    class_key: tuple[str, str] = ("", "")
    status: Status | None = None  # of its published outcome
    in_flight: dict[int, bytes] = field(default_factory=dict)  # batch -> worker's peer
    dispatched_count: int = 0
    lost_count: int = 0
    sent_ns: int = 0  # when a batch first took it out of the queue, of those it is in now
    back_ns: int = 0  # when it last came back from a worker
    result: Result | None = None  # what a worker has made of it
    tentative: list[Result] = field(
        default_factory=list
    )  # what one copy's end means if the other is given up
    is_superseded: bool = False
    was_hedged: bool = False
    passed_count: int | None = None  # frames that went before it since it aged
    passed_limit: int = 0

    @property
    def priority(self) -> int:
        return self.frame.priority if isinstance(self.frame, Frame) else 0

    @property
    def key(self) -> tuple[str, int, int]:
        return self.stream, self.epoch, -1 if self.seq is None else self.seq


@dataclass(slots=True, eq=False)
class Session:
    """One Hello, as counted here."""

    peer: bytes
    epoch: int
    concluded_count: int = 0
    received_count: int = 0
    told_count: int = 0
    is_live: bool = True
