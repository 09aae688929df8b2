"""Subscriber: read the outcomes of streams, each once, in order, with every hole named.

Not here: the protocol (``subscriber_session``), the sockets and their thread (``subscriber_loop``).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from headrace import addresses
from headrace.clients.reader_queue import ReaderQueue
from headrace.clients.records import Missed, SubscriberAccount
from headrace.clients.subscriber_events import Mode, Start, State
from headrace.clients.subscriber_loop import Sink, SubscriberLoop
from headrace.clients.subscriber_session import MAX_TOPICS, SubscriberSession
from headrace.errors import ClosedError, ConfigError, ForkedError, RequestTimeoutError, UnreachableError
from headrace.forks import forks
from headrace.protocol.codec import topic_of
from headrace.protocol.messages import Outcome

_log = logging.getLogger("headrace.clients.subscriber")

MAX_STREAM_BYTES = 128

_DEFAULT_STARTS = {Mode.EVERY: Start.EARLIEST, Mode.LATEST: Start.NOW}

MemberT = TypeVar("MemberT", Mode, Start)


class Subscriber:
    """Reads the outcomes of streams. Iterating yields Outcome and Missed items.

    Per stream, outcomes come in the order in which the broker published them. What was lost on the way
    is fetched again; what the broker no longer keeps is yielded as Missed, so that nothing is lost in
    silence. A broker that restarts is found again. Several threads may read: each item goes to one.

    Invariants: each outcome is yielded at most once; the queue holds at most ``max_queued`` items and
    ``max_queued_bytes`` (and what one message or page brings beyond).
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        stream: str | None = None,
        streams: Sequence[str] | None = None,
        prefix: str | None = None,
        mode: Mode | str = Mode.EVERY,
        start: Start | str | None = None,
        timeout: float = 10.0,
        max_queued: int = 256,
        max_queued_bytes: int = 64 * 1024 * 1024,
        sink: Sink | None = None,
        on_item: Callable[[], None] = lambda: None,
    ) -> None:
        """Subscribe; return once the broker has confirmed it, so that what is pushed from then on comes.

        Args:
            address: any address of the broker.
            stream: one stream; give at most one of stream, streams and prefix (none means all streams).
            streams: several streams.
            prefix: all streams whose id begins so.
            mode: "every" outcome, or only the "latest" of each stream when reading is slower.
            start: "earliest" begins with what the broker still keeps, "now" with what comes. The default
                is "earliest" for every and "now" for latest.
            timeout: seconds to wait for the broker.
            max_queued: items read ahead of the reader in mode every (1 or more).
            max_queued_bytes: the same for their payloads.
            sink: takes the items in the subscriber's own thread instead of the queue.
            on_item: called after items were queued, in the subscriber's own thread or that of a reader
                that waits, and when it closes.

        Raises ConfigError, UnreachableError.
        """
        self.address = addresses.normalise(address)
        self.mode = _member(Mode, mode, "mode")
        self.start = _member(Start, start or _DEFAULT_STARTS[self.mode], "start")
        self._pid = os.getpid()
        self._forks_count = forks.value
        self._queue = ReaderQueue(
            self.mode,
            max_count=max_queued,
            max_bytes=max_queued_bytes,
            on_room=self._make_room,
            on_item=on_item,
        )
        topics = _topics(stream, streams, prefix)
        jitter = secrets.randbelow(1_000) / 1_000
        self._session = SubscriberSession(topics, mode=self.mode, start=self.start, jitter=jitter)
        self._changed = threading.Condition()
        self._has_ended = False
        # A sink may be empty, and so false: that it is there is what counts.
        self._loop = self._make_loop(self._queue if sink is None else sink)
        self._loop.thread.start()
        try:
            self.wait_connected(timeout)
        except BaseException:
            self.close()
            raise

    # -- reading -------------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Outcome | Missed:
        """Return the next item.

        Raises RequestTimeoutError when none came within ``timeout`` seconds (None waits for ever),
        ClosedError once closed, ForkedError.
        """
        self._check_fork()
        queue = self._queue
        if timeout == 0 or queue.is_answerable():
            return queue.get(timeout)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while not queue.is_answerable():
            if not self._loop.lead(queue.is_answerable, deadline_s, others_wait=queue.is_waited_for):
                break
        return queue.get(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))

    def __iter__(self) -> Iterator[Outcome | Missed]:
        """Yield items until closed."""
        return self.items()

    def items(self, timeout: float | None = None) -> Iterator[Outcome | Missed]:
        """Yield items until closed, or until none came for ``timeout`` seconds."""
        while True:
            try:
                item = self.get(timeout)
            except (ClosedError, RequestTimeoutError):
                return
            yield item

    def outcomes(self, timeout: float | None = None) -> Iterator[Outcome]:
        """Yield outcomes alone; Missed ranges are logged as warnings and counted in ``account``."""
        for item in self.items(timeout):
            if isinstance(item, Outcome):
                yield item
            else:
                _log.warning("missed outcomes: %s", item)

    # -- life ----------------------------------------------------------------------------------------

    def wait_connected(self, timeout: float) -> None:
        """Wait until the broker has confirmed the subscription; raise UnreachableError."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._session.state is not State.OPEN and not self._has_ended:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise UnreachableError(
                        f"{self.address}: no subscription within {timeout:g} s ({self._session.away_reason})"
                    )
                self._changed.wait(remaining_s)
            if self._has_ended:
                raise ClosedError(f"the subscriber for {self.address} is closed")

    def close(self) -> None:
        """End at once, from any thread: readers that wait get ClosedError, iterations end."""
        self._check_fork()
        self._queue.close(f"the subscriber for {self.address} is closed", is_dropped=True)
        if not self._loop.stop(timeout_s=5.0):
            _log.warning("the subscriber's thread for %s did not end within 5 s", self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if forks.value == self._forks_count:
            self.close()

    @property
    def is_connected(self) -> bool:
        return self._session.state is State.OPEN

    @property
    def boot(self) -> int | None:
        """The id of the broker's present life."""
        return self._session.boot

    @property
    def account(self) -> SubscriberAccount:
        counts = self._session.counts
        return SubscriberAccount(
            delivered=self._queue.delivered_count,
            missed=counts.missed,
            missed_unknown=counts.missed_unknown,
            skipped=counts.skipped + self._queue.skipped_count,
            duplicates=counts.duplicates,
            fetched=counts.fetched,
            behind=self._session.behind_count,
            sessions=counts.sessions,
            age_ms=self._queue.age_ms,
        )

    # -- helpers -------------------------------------------------------------------------------------

    def _make_loop(self, sink: Sink) -> SubscriberLoop:
        return SubscriberLoop(
            self.address,
            self._session,
            sink,
            put_all=self._queue.wake_readers,
            changed=self._notify,
            ended=self._take_end,
        )

    def _make_room(self) -> None:
        self._loop.wake()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take_end(self, failure: BaseException | None) -> None:
        reason = f"the subscriber for {self.address} is closed"
        if failure is not None:
            reason = f"the subscriber for {self.address} failed: {failure!r}"
        self._queue.close(reason, is_dropped=False)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _check_fork(self) -> None:
        if forks.value != self._forks_count:
            raise ForkedError(
                f"the subscriber for {self.address} was made in process {self._pid} and is used in its fork"
                f" {os.getpid()}; make a new one there"
            )


def _topics(stream: str | None, streams: Sequence[str] | None, prefix: str | None) -> list[bytes]:
    given = [name for name in (stream, streams, prefix) if name is not None]
    if len(given) > 1:
        raise ConfigError("subscriber: give one of stream, streams and prefix, not several")
    if prefix is not None or not given:
        return [_checked(prefix or "", "prefix", lowest=0)]
    if isinstance(streams, str):
        raise ConfigError(f"subscriber: streams is a list of stream ids; for one use stream={streams!r}")
    names = [stream] if stream is not None else list(dict.fromkeys(streams or ()))
    if not 1 <= len(names) <= MAX_TOPICS:
        raise ConfigError(f"subscriber: {len(names)} streams; 1 to {MAX_TOPICS} can be named, or use prefix")
    for name in names:
        _checked(name, "stream", lowest=1)
    return [topic_of(name) for name in names]


def _checked(name: object, what: str, *, lowest: int) -> bytes:
    if not isinstance(name, str):
        raise ConfigError(f"subscriber: {what} {name!r} is not a string")
    encoded = name.encode("utf-8", "replace")
    if not lowest <= len(encoded) <= MAX_STREAM_BYTES or "\0" in name:
        raise ConfigError(
            f"subscriber: {what} {name!r} has {len(encoded)} bytes; {lowest} to {MAX_STREAM_BYTES}"
            " without NUL are right"
        )
    return encoded


def _member(kind: type[MemberT], value: str, what: str) -> MemberT:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"subscriber: {what} {value!r} is not one of {', '.join(kind)}") from None
