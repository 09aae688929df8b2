"""Client: request and reply over the same frames and outcomes, from any number of threads.

Not here: anything of the protocol; a Client is a Producer and a Subscriber of its own streams.

Theory of operation. Outcomes of one stream come in order, so two requests on one stream would wait for
each other. Each request therefore takes a free *lane*, a stream that has no other request in flight;
the subscriber follows them all by their common prefix. There are as many lanes as requests were ever
in flight at once, and an outcome finds its request by (stream, seq), never by its order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Self, TypedDict, Unpack

from headrace.clients.producer import Producer
from headrace.clients.records import FrameId, Missed, MissedReason
from headrace.clients.subscriber import Subscriber
from headrace.clients.subscriber_events import Mode, Start
from headrace.errors import ClosedError, NotDeliveredError, RequestTimeoutError
from headrace.protocol.messages import Color, Encoding, Outcome, Reject, Status

#: How long a request waits for its outcome when the caller does not say: a worker may still load its
#: model.
DEFAULT_TIMEOUT_S = 30.0


class InferOptions(TypedDict, total=False):
    """What a request may say beside its array: the options of ``Producer.push`` that make sense here."""

    model: str
    color: Color | str
    priority: int
    ttl_ms: int | None
    meta: Mapping[str, object] | None
    encoding: Encoding | str | None


class Client:
    """Asks for the outcome of one array at a time, or of many at once.

    Thread-safe. Invariant: at most ``max_in_flight`` requests are in flight, each on its own lane.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        name: str = "",
        timeout: float = 10.0,
        max_in_flight: int = 256,
        max_unfinished_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        """Connect; return once outcomes can come back.

        Args:
            address: any address of the broker.
            name: shown in the broker's status.
            timeout: seconds to wait for the broker.
            max_in_flight: requests at once; a further one waits for room.
            max_unfinished_bytes: the same for their payloads.

        Raises ConfigError, UnreachableError.
        """
        self._prefix = f"client-{secrets.token_hex(8)}/"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free_lanes: list[_Lane] = []
        self._lanes_count = 0
        self._pending: dict[tuple[str, int], tuple[_Lane, Future[Outcome]]] = {}
        # Of pending requests alone: the broker's boot under which the frame ended, and the last boot of which
        # the lane's stream missed outcomes. Where both are the same, the outcome will never come.
        self._ended_under: dict[tuple[str, int], int | None] = {}
        self._missed_under: dict[tuple[str, int], tuple[int, MissedReason]] = {}
        self._producer = Producer(
            address,
            name=name or self._prefix.rstrip("/"),
            max_unfinished_frames=max_in_flight,
            max_unfinished_bytes=max_unfinished_bytes,
            on_reject=self._take_reject,
            on_finished=self._take_finished,
        )
        try:
            self._subscriber = Subscriber(
                address,
                prefix=self._prefix,
                mode=Mode.EVERY,
                start=Start.NOW,
                timeout=timeout,
                sink=_Replies(self._take_item),
            )
        except BaseException:
            self._producer.close(timeout=0)
            raise

    def infer(
        self,
        image: object,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **options: Unpack[InferOptions],
    ) -> Outcome:
        """Send one array or encoded image and wait for its outcome, whatever its status.

        Args:
            image: see ``Producer.push``.
            timeout: seconds in all; None waits for ever.
            **options: model, color, priority, ttl_ms, meta, encoding, as in ``Producer.push``.

        Raises RequestTimeoutError, InvalidFrameError, ClosedError, ForkedError. Use
        ``headrace.raise_for_status`` to turn an outcome without a result into an error.
        """
        future = self.submit(image, timeout=timeout, **options)
        return _result(future, timeout)

    def infer_many(
        self,
        images: Iterable[object],
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **options: Unpack[InferOptions],
    ) -> list[Outcome]:
        """Send many arrays at once and return their outcomes in the same order.

        ``timeout`` is for each one. Raises what ``infer`` raises.
        """
        futures = [self.submit(image, timeout=timeout, **options) for image in images]
        return [_result(future, timeout) for future in futures]

    def submit(
        self,
        image: object,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **options: Unpack[InferOptions],
    ) -> Future[Outcome]:
        """Send one array and return at once; the future gets its outcome.

        Waits up to ``timeout`` seconds for room, then raises RequestTimeoutError. A future that is
        cancelled is forgotten; its frame is not called back.
        """
        future: Future[Outcome] = Future()
        lane = self._take_lane()
        key = (lane.stream, lane.next_seq)
        lane.next_seq += 1
        # Before the push: the outcome may be here before push() returns.
        with self._lock:
            self._pending[key] = (lane, future)
        try:
            self._producer.push(image, stream=key[0], seq=key[1], timeout=timeout, **options)
        except BaseException:
            self._forget(key)
            raise
        return future

    def close(self) -> None:
        """End at once; requests that wait get ClosedError."""
        # What is not delivered is told to each of the requests below.
        with contextlib.suppress(NotDeliveredError):
            self._producer.close(timeout=0)
        self._subscriber.close()
        with self._lock:
            waiting = [future for _, future in self._pending.values()]
            self._pending.clear()
        for future in waiting:
            _fail(future, ClosedError(f"the client for {self._producer.address} was closed"))

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in the client's own thread, whenever there may be room again."""
        self._producer.add_listener(listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() == self._pid:
            self.close()

    # -- lanes ---------------------------------------------------------------------------------------

    def _take_lane(self) -> _Lane:
        with self._lock:
            if self._free_lanes:
                return self._free_lanes.pop()
            self._lanes_count += 1
            return _Lane(f"{self._prefix}{self._lanes_count}")

    def _forget(self, key: tuple[str, int]) -> Future[Outcome] | None:
        """Free the lane of a request; return its future, None when it was answered already."""
        with self._lock:
            lane, future = self._pending.pop(key, (None, None))
            self._ended_under.pop(key, None)
            self._missed_under.pop(key, None)
            if lane is not None:
                self._free_lanes.append(lane)
            return future

    def _take_item(self, item: Outcome | Missed) -> None:
        if isinstance(item, Outcome):
            future = self._forget((item.stream, item.seq)) if item.epoch == self._producer.epoch else None
            if future is not None:
                _answer(future, item)
            return
        # A request whose frame ended under this boot will never be answered. One whose frame is unfinished,
        # or ended under a later boot, still has its outcome before it.
        with self._lock:
            keys = [key for key in self._pending if key[0] == item.stream]
            for key in keys:
                self._missed_under[key] = (item.boot, item.reason)
        for key in keys:
            self._fail_if_lost(key)

    def _take_finished(self, frame: FrameId) -> None:
        key = (frame.stream, frame.seq)
        with self._lock:
            if key not in self._pending:
                return
            self._ended_under[key] = self._producer.boot
        self._fail_if_lost(key)

    def _fail_if_lost(self, key: tuple[str, int]) -> None:
        with self._lock:
            missed_boot, reason = self._missed_under.get(key, (None, None))
            is_lost = missed_boot is not None and self._ended_under.get(key) == missed_boot
        future = self._forget(key) if is_lost else None
        if future is not None:
            _fail(future, RequestTimeoutError(f"the outcome of {key} was missed: {reason}"))

    def _take_reject(self, reject: Reject) -> None:
        """A frame that was not admitted: its published outcome says the same, but may come later, and a
        frame refused before it was sent has none."""
        if reject.stream is None or reject.seq is None:
            return
        future = self._forget((reject.stream, reject.seq))
        if future is not None:
            _answer(future, _outcome_of(reject, self._producer.epoch))


class _Lane:
    """A stream that carries one request at a time."""

    __slots__ = ("next_seq", "stream")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.next_seq = 0


class _Replies:
    """A sink that hands each item on at once; what it holds is bounded by the requests in flight."""

    def __init__(self, take: Callable[[Outcome | Missed], None]) -> None:
        self._take = take

    def has_room(self) -> bool:
        return True

    def put(self, items: Sequence[Outcome | Missed]) -> None:
        for item in items:
            self._take(item)


def _outcome_of(reject: Reject, epoch: int) -> Outcome:
    return Outcome(
        stream=reject.stream or "",
        epoch=epoch,
        seq=reject.seq or 0,
        boot=0,
        pub_seq=0,
        status=Status.REJECTED,
        code=reject.code,
        message=reject.message,
        retry_after_ms=reject.retry_after_ms,
    )


def _answer(future: Future[Outcome], outcome: Outcome) -> None:
    # False: the caller has cancelled it, nobody waits.
    if future.set_running_or_notify_cancel():
        future.set_result(outcome)


def _fail(future: Future[Outcome], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _result(future: Future[Outcome], timeout: float | None) -> Outcome:
    try:
        return future.result(timeout)
    except FutureTimeoutError:
        future.cancel()
        raise RequestTimeoutError(f"no outcome within {timeout:g} s") from None
