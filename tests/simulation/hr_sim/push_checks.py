"""Judges what producers are told: every frame's end once, and never before its outcome is out."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocol.messages import Frame, Reject, Status
from hr_sim.book import Violation


@dataclass(slots=True)
class _Pushed:
    frame: Frame
    is_finished: bool = False
    is_abandoned: bool = False


class PushRecord:
    """All frames that were pushed by producers, over all their lives."""

    def __init__(self) -> None:
        self.frames_count = 0
        self.plain_count = 0
        self._pushed: dict[int, dict[int, _Pushed]] = {}
        self._statuses: dict[int, list[Status]] = {}

    def push(self, _name: str, epoch: int, frames: list[Frame]) -> None:
        """A program handed frames to its producer."""
        self.frames_count += len(frames)
        by_id = self._pushed.setdefault(epoch, {})
        for frame in frames:
            by_id[_id_of(frame)] = _Pushed(frame)

    def abandon(self, epoch: int) -> None:
        """The process is gone, and what it had not sent with it."""
        for pushed in self._pushed.get(epoch, {}).values():
            pushed.is_abandoned = True

    def published(self, frame_id: int, status: Status) -> None:
        """An outcome is out, in one boot or another."""
        self._statuses.setdefault(frame_id, []).append(status)

    def finish(self, frame: Frame, reject: Reject | None) -> None:
        """A producer was told of a frame's end."""
        key = (frame.stream, frame.epoch or 0, frame.seq or 0)
        pushed = self._pushed.get(frame.epoch or 0, {}).get(_id_of(frame))
        if pushed is None or pushed.is_finished:
            raise Violation("its producer is told of its end twice", key)
        pushed.is_finished = True
        statuses = self._statuses.get(_id_of(frame), [])
        is_known = any((status is Status.REJECTED) == (reject is not None) for status in statuses)
        if not is_known:
            told = "finished" if reject is None else f"rejected as {reject.code}"
            raise Violation(f"its producer is told that it is {told}, outcomes are {statuses}", key)

    def unfinished(self) -> _Pushed | None:
        """Return a frame that its living producer still waits for."""
        for by_id in self._pushed.values():
            for pushed in by_id.values():
                if not pushed.is_finished and not pushed.is_abandoned:
                    return pushed
        return None


def _id_of(frame: Frame) -> int:
    assert frame.pts_ns is not None
    return frame.pts_ns
