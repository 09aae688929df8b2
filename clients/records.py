"""What clients hand to their users, beside the wire's own Outcome and Status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.clients.arrays import tensors_of as _tensors_of
from headrace.errors import FrameError
from headrace.protocol.messages import Outcome, Status
from headrace.protocol.per_frame import per_frame


@per_frame(frozen=True, slots=True, order=True)
class FrameId:
    """The name of a frame for ever."""

    stream: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class ProducerAccount:
    """How the frames of a producer ended so far. ``sent = finished + unfinished``.

    ``by_status`` counts published outcomes by Status, ``rejected`` refused frames by code. A frame that
    ended while the connection was down may be known as finished without its status (``unknown``).
    ``by_lane`` counts sent frames by how their payloads went ("inline", "shm"); ``arena_full`` those that
    went inline because no slot in shared memory was free.
    """

    sent: int
    finished: int
    unfinished: int
    by_status: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    resent: int = 0
    sessions: int = 0
    by_lane: dict[str, int] = field(default_factory=dict)
    arena_full: int = 0

    @property
    def unknown(self) -> int:
        return self.finished - sum(self.by_status.values()) - sum(self.rejected.values())


class MissedReason(StrEnum):
    """Why outcomes can't be had."""

    LEFT_RING = "left_ring"  # the broker keeps them no longer
    NEW_BOOT = "new_boot"  # the broker that published them is gone
    NO_ANSWER = "no_answer"  # the broker answered the question for them without them


@dataclass(frozen=True, slots=True)
class Missed:
    """Outcomes of a stream that this subscriber will not get: pub_seq ``first`` to ``last``, both
    included, of the broker's ``boot``. ``last`` is None when nobody can tell how many there were, if
    any: the broker that would know is gone."""

    stream: str
    boot: int
    first: int
    last: int | None
    reason: MissedReason

    @property
    def count(self) -> int | None:
        return None if self.last is None else self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class SubscriberAccount:
    """What a subscriber did so far; nothing it left out is uncounted."""

    delivered: int = 0
    missed: int = 0  # outcomes in Missed ranges with a known end
    missed_unknown: int = 0  # Missed ranges without one
    skipped: int = 0  # mode `latest`: outcomes a newer one replaced, or that were never fetched
    duplicates: int = 0  # frames run twice across a new boot, yielded once
    fetched: int = 0  # outcomes that came by replay
    behind: int = 0  # outcomes known to exist and not yet delivered
    sessions: int = 0
    age_ms: float = 0.0  # how long the last item handed out had waited in this process


def tensors_of(outcome: Outcome) -> dict[str, npt.NDArray[np.generic]]:
    """Return the output tensors of an outcome by name, as read-only views of its payloads.

    Empty for an adapter whose outputs are values (boxes, labels) and for a frame without a result.
    """
    return _tensors_of(outcome.tensors, outcome.payloads)


def raise_for_status(outcome: Outcome) -> Outcome:
    """Return an outcome that has a result; raise FrameError, with status and code, for any other."""
    if outcome.status is not Status.OK:
        text = outcome.message or f"frame {outcome.seq} of stream {outcome.stream} is {outcome.status}"
        raise FrameError(outcome.status, outcome.code, text)
    return outcome
