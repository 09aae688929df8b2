"""Whether there is room for a frame, and whether it would be done in time: the bounds that load fills.

Not here: frames that are wrong in themselves (admission.py), the predictions (forecast.py).

Theory of operation. Every check counts as if the waiting frame that a `latest` frame supersedes were gone
already. A refusal names value and limit and says when to try again.

Urgent frames must find room however many ordinary ones came before, and nothing that was admitted is thrown
out for them. So each higher priority has room of its own: beyond ``max_queue_size`` a frame of priority p > 0
is still admitted while fewer than ``priority_reserve_frames`` frames of priority p or above wait in its
class. A class then holds at most max_queue_size + (priority_levels - 1) * priority_reserve_frames frames. The
byte budget is hard, so its reserve lies inside: priority 0 may fill it up to ``priority_bytes_share`` below
the limit, the highest priority up to the limit, those between in equal steps.
"""

from __future__ import annotations

from headrace.broker.forecast import Forecast, clamp_retry_ms
from headrace.broker.model_table import ServedClass
from headrace.broker.outcomes import OutcomeLog
from headrace.broker.quarantine import Quarantine
from headrace.broker.records import FrameRecord, Refusal
from headrace.broker.settings import CoreSettings
from headrace.broker.stream_table import Stream
from headrace.errors import Code
from headrace.protocol.messages import Frame, Keep

_NS_PER_MS = 1_000_000


class Room:
    """The bounds of queues, streams, bytes and time. Changes nothing."""

    def __init__(
        self, settings: CoreSettings, outcomes: OutcomeLog, quarantine: Quarantine, forecast: Forecast
    ) -> None:
        self._settings = settings
        self._outcomes = outcomes
        self._quarantine = quarantine
        self._forecast = forecast
        levels = settings.limits.priority_levels
        step = settings.priority_bytes_share / max(levels - 1, 1)
        self._max_bytes = [
            settings.max_bytes - int(settings.max_bytes * step * (levels - 1 - level))
            for level in range(levels)
        ]

    def max_bytes(self, priority: int) -> int:
        """Return how much of the byte budget frames of a priority may fill."""
        return self._max_bytes[priority]

    def deadline_ns(self, frame: Frame, now_ns: int) -> int | None:
        """Return when a frame that arrives now is worthless."""
        ttl_ms = self._settings.default_timeout_ms if frame.ttl_ms is None else frame.ttl_ms
        return None if ttl_ms is None else now_ns + ttl_ms * _NS_PER_MS

    def retry_ms(self, served: ServedClass, now_ns: int) -> int:
        """Return when a frame of the class that finds no room may come again."""
        return self._forecast.retry_ms(served, now_ns)

    def find_fault(self, stream: Stream, frame: Frame, served: ServedClass, now_ns: int) -> Refusal | None:
        """Return why a frame can't be taken in, None if it can."""
        if self._quarantine:
            refusal = self._check_quarantine(frame, served, now_ns)
            if refusal is not None:
                return refusal
        old = stream.latest if frame.keep is Keep.LATEST else None
        if old is None and self._has_room(stream, frame, served):
            return self._check_deadline(frame, served, now_ns)
        full = (
            self._check_stream(stream, frame, served, old)
            or self._check_class(frame, served, old)
            or self._check_bytes(stream, frame, old)
        )
        if full is not None:
            return Refusal(*full, self._forecast.retry_ms(served, now_ns))
        return self._check_deadline(frame, served, now_ns)

    def _has_room(self, stream: Stream, frame: Frame, served: ServedClass) -> bool:
        """True when none of the bounds is near: the usual case in one look; the checks have the words."""
        return (
            len(stream.order) < self._settings.max_unfinished_per_stream
            and served.queue.stream_count(stream.name) < self._settings.max_queued_per_stream
            and (served.max_queue_size == 0 or served.waiting_count < served.max_queue_size)
            and self._outcomes.unfinished_bytes + frame.nbytes <= self._max_bytes[frame.priority]
        )

    def _check_quarantine(self, frame: Frame, served: ServedClass, now_ns: int) -> Refusal | None:
        left_ns = self._quarantine.find(served.model, served.version, frame, now_ns)
        if left_ns is None:
            return None
        message = f"a frame with this content took down workers of {served.model}: it is refused for now"
        return Refusal(Code.POISON_FRAME, message, -(-left_ns // _NS_PER_MS))

    def _check_stream(
        self, stream: Stream, frame: Frame, served: ServedClass, old: FrameRecord | None
    ) -> tuple[Code, str] | None:
        unfinished = len(stream.order)
        if unfinished >= self._settings.max_unfinished_per_stream:
            message = f"stream {stream.name} has {unfinished} unfinished frames, the limit"
            return Code.STREAM_QUEUE_FULL, f"{message} (max_unfinished_per_stream)"
        waiting = served.queue.stream_count(stream.name) - served.holds(old)
        if waiting >= self._settings.max_queued_per_stream:
            message = f"{waiting} frames of stream {stream.name} wait in size class {served.spec.name}"
            return Code.STREAM_QUEUE_FULL, f"{message}, the limit (max_queued_per_stream)"
        return None

    def _check_class(
        self, frame: Frame, served: ServedClass, old: FrameRecord | None
    ) -> tuple[Code, str] | None:
        queued = served.waiting_count - served.holds(old)
        if served.max_queue_size == 0 or queued < served.max_queue_size:
            return None
        priority = frame.priority
        if priority > 0:
            urgent = served.queue.count_from(priority)
            urgent -= served.holds(old) and old is not None and old.priority >= priority
            if urgent < self._settings.priority_reserve_frames:
                return None
        message = f"{queued} frames wait in size class {served.spec.name} of {served.model}"
        return Code.QUEUE_FULL, f"{message}, the limit (max_queue_size)"

    def _check_bytes(self, stream: Stream, frame: Frame, old: FrameRecord | None) -> tuple[Code, str] | None:
        # A superseded frame gives its bytes back at once only if no other frame of its stream is before it.
        freed = old.nbytes if old is not None and stream.order[0] is old else 0
        used = self._outcomes.unfinished_bytes - freed
        limit = self._max_bytes[frame.priority]
        if used + frame.nbytes <= limit:
            return None
        message = (
            f"{used} bytes of unfinished frames and {frame.nbytes} more exceed the limit"
            f" {self._settings.max_bytes} (max_bytes), of which priority {frame.priority} may fill {limit}"
        )
        return Code.BYTES_FULL, message

    def _check_deadline(self, frame: Frame, served: ServedClass, now_ns: int) -> Refusal | None:
        deadline_ns = self.deadline_ns(frame, now_ns)
        if deadline_ns is None or not self._settings.check_deadlines:
            return None
        done_ns = self._forecast.done_ns(served, frame.priority, deadline_ns, now_ns)
        if done_ns is None or done_ns <= deadline_ns:
            return None
        done_ms, left_ms = (done_ns - now_ns) / _NS_PER_MS, (deadline_ns - now_ns) // _NS_PER_MS
        message = (
            f"it lives for {left_ms} ms and would be done in {done_ms:.1f} ms, by the predicted run times of"
            " what is before it"
        )
        return Refusal(Code.WONT_MAKE_IT, message, clamp_retry_ms(done_ns - deadline_ns))
