"""The account of all frames at the end of a demo: does every frame sent have exactly one outcome?

Pure arithmetic over three independent counts: what the cameras sent, what the subscriber saw, and what the
broker says of itself. Any disagreement is a problem in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.protocol.messages import Status

#: Outcomes of frames that the broker accepted: accepted = ok + error + expired + superseded.
ACCEPTED = (Status.OK, Status.ERROR, Status.EXPIRED, Status.SUPERSEDED)


@dataclass(frozen=True, slots=True)
class DemoAccount:
    """``sent`` frames and ``outcomes`` by status per stream, as this process saw them. ``broker`` is the
    broker's own account (None when it could not be asked). ``duplicate_count`` outcomes came twice,
    ``missed_count`` outcomes could not be had again by the subscriber."""

    sent: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, int]]
    broker: Mapping[str, int] | None
    duplicate_count: int = 0
    missed_count: int = 0

    @property
    def totals(self) -> dict[str, int]:
        """Return the outcomes of all streams by status, every status named."""
        return {
            status.value: sum(by_status.get(status.value, 0) for by_status in self.outcomes.values())
            for status in Status
        }

    @property
    def sent_count(self) -> int:
        """Return the frames sent by all streams."""
        return sum(self.sent.values())

    @property
    def accepted_count(self) -> int:
        """Return the frames that the broker took: all but the rejected ones."""
        return self.sent_count - self.totals[Status.REJECTED]

    def problems(self) -> list[str]:
        """Return what does not add up, one sentence each; empty when all is well."""
        found = []
        for stream, sent in self.sent.items():
            by_status = self.outcomes.get(stream, {})
            ended = sum(by_status.values())
            if ended != sent:
                found.append(f"{stream}: {sent} frames sent but {ended} outcomes seen")
            if not by_status.get(Status.OK, 0):
                found.append(f"{stream}: no frame ended ok")
        found += [
            f"{stream}: outcomes of a stream nobody sent"
            for stream in self.outcomes
            if stream not in self.sent
        ]
        totals = self.totals
        ended = sum(totals[status] for status in ACCEPTED)
        if ended != self.accepted_count:
            found.append(f"accepted {self.accepted_count} but ok + error + expired + superseded = {ended}")
        if self.duplicate_count:
            found.append(f"{self.duplicate_count} outcomes came twice")
        if self.missed_count:
            found.append(f"{self.missed_count} outcomes were reported as missed")
        return found + self._broker_problems()

    def _broker_problems(self) -> list[str]:
        if self.broker is None:
            return ["the broker's own account could not be read"]
        own = self.totals | {"accepted": self.accepted_count, "unfinished": 0}
        return [
            f"the broker counts {name} = {self.broker.get(name, 0)}, this side {count}"
            for name, count in own.items()
            if self.broker.get(name, 0) != count
        ]

    def line(self) -> str:
        """Return the account as one line of text."""
        totals = self.totals
        parts = " + ".join(f"{totals[status]} {status.value}" for status in ACCEPTED)
        return (
            f"{self.sent_count} frames sent = {self.accepted_count} accepted ({parts})"
            f" + {totals[Status.REJECTED]} rejected"
        )
