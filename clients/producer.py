"""Producer: push frames from any thread, know the end of each.

Not here: the protocol (``producer_session``), the socket and its thread (``producer_loop``), what can
be sent (``arrays``).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from headrace import addresses
from headrace.arena import SHM_FOLDER
from headrace.clients import arrays
from headrace.clients.drafts import Draft, Drafts, SlotOptions
from headrace.clients.held import Held
from headrace.clients.lane import DEFAULT_SHM_BYTES, Lane, LaneChoice
from headrace.clients.producer_loop import ProducerLoop, Progress, Situation
from headrace.clients.producer_session import ProducerSession
from headrace.clients.records import FrameId, ProducerAccount
from headrace.errors import (
    ClosedError,
    Code,
    ForkedError,
    InvalidFrameError,
    NotDeliveredError,
    RequestTimeoutError,
    UnreachableError,
)
from headrace.forks import forks
from headrace.protocol.messages import (
    Color,
    Encoding,
    Frame,
    Keep,
    Limits,
    ModelSpec,
    Payload,
    Reject,
    ShmRef,
)

_log = logging.getLogger("headrace.clients.producer")

#: How long close() without a time limit goes on waiting while the broker is there but no frame ends.
#: Long enough for a CPU worker that compiles a large model; it is a bound, not an expectation.
STALL_LIMIT_S = 30.0


class Producer:
    """Sends frames to a broker and keeps each until its end is known.

    Use it as a context manager, from as many threads as you like, for as many streams as you like.
    A broker that is away or restarts is waited for: frames pushed meanwhile are kept, up to the bounds
    below, and what was under way is sent again. A rejected frame is finished: to try again, push it
    again.

    Invariants: every accepted push() is counted in ``account`` exactly once, as finished or unfinished;
    at most ``max_unfinished_frames`` and ``max_unfinished_bytes`` are kept.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        name: str = "",
        max_unfinished_frames: int = 1_024,
        max_unfinished_bytes: int = 256 * 1024 * 1024,
        linger_s: float = 2.0,
        lane: LaneChoice | str = LaneChoice.AUTO,
        shm_bytes: int = DEFAULT_SHM_BYTES,
        shm_folder: str | os.PathLike[str] = SHM_FOLDER,
        on_reject: Callable[[Reject], None] | None = None,
        on_finished: Callable[[FrameId], None] | None = None,
    ) -> None:
        """Start connecting in the background; nothing is waited for.

        Args:
            address: any address of the broker: ``HOST``, ``HOST:PORT``, ``tcp://...`` or ``ipc://PATH``.
            name: shown in the broker's status.
            max_unfinished_frames: push() waits when so many frames have no known end (1 or more).
            max_unfinished_bytes: the same for their payload bytes.
            linger_s: how long close() waits for a broker that is not there.
            lane: "auto" puts payloads into shared memory where the broker can read it (same host, same user)
                and sends them inline else; "inline" always does the latter; "shm" never does.
            shm_bytes: size of this producer's shared memory, taken whole when the broker is found.
            shm_folder: where shared memory is; the broker's configuration (``shm.folder``) names the same.
            on_reject: called with each reject, in the producer's own thread: keep it short.
            on_finished: the same for each frame whose end is known.

        Raises ConfigError for an address or a lane that can't be read.
        """
        self.address = addresses.normalise(address)
        self.epoch = secrets.randbits(64)
        self.linger_s = linger_s
        self._on_reject = on_reject
        self._on_finished = on_finished
        self._pid = os.getpid()
        self._forks_count = forks.value
        self._drafts = Drafts()
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._progress = Progress((), {}, Situation(), 0, 0)
        self._failure: BaseException | None = None
        self._is_closing = False
        self._is_closed = False
        self._lane = Lane(lane, shm_bytes, self.epoch, Path(shm_folder))
        self._held = Held(self._lane, max_unfinished_frames, max_unfinished_bytes)
        session = ProducerSession(
            epoch=self.epoch,
            name=name,
            host_key=self._lane.host_key,
            jitter=secrets.randbelow(1_000) / 1_000,
            inlined=self._lane.inlined,
        )
        self._loop = ProducerLoop(
            self.address, session, self._lane, report=self._take_progress, fail=self._take_failure
        )
        self._loop.thread.start()
        atexit.register(self._close_at_exit)

    # -- pushing -------------------------------------------------------------------------------------

    def push(
        self,
        image: object,
        *,
        stream: str,
        model: str = "",
        color: Color | str = Color.RGB,
        priority: int = 0,
        ttl_ms: int | None = None,
        keep: Keep | str = Keep.ALL,
        pts_ns: int | None = None,
        meta: Mapping[str, object] | None = None,
        seq: int | None = None,
        encoding: Encoding | str | None = None,
        timeout: float | None = None,
    ) -> FrameId:
        """Take a frame over; the caller may change its array as soon as this returns.

        Waits while the producer holds as many unfinished frames or bytes as it may.

        Args:
            image: an array (any strides and byte order), an encoded JPEG or PNG as bytes, or a mapping
                of input name to array for a model with several inputs.
            stream: 1 to 128 bytes of UTF-8 without NUL; the outcomes' topic.
            model: "" (the broker's default), "name" or "name:version".
            color: order of the channels: "rgb", "bgr" or "gray".
            priority: 0 to 9 by default; larger is more urgent.
            ttl_ms: milliseconds from now after which the outcome is worthless (1 to 86,400,000).
            keep: "latest" lets a newer frame of the stream replace this one while it waits.
            pts_ns: the frame's own time, carried through unread.
            meta: small values carried through to the outcome.
            seq: the frame's number; must rise within the stream. None counts 0, 1, 2 ...
            encoding: see ``arrays.prepare``.
            timeout: seconds to wait for room; None waits for ever, 0 not at all.

        Raises InvalidFrameError (nothing was sent), RequestTimeoutError (no room in time), ClosedError,
        ForkedError.
        """
        self._check_usable()
        drafted = self._drafts.draft(
            image, self._progress.situation.limits, stream=stream, model=model, color=color,
            priority=priority, ttl_ms=ttl_ms, keep=keep, pts_ns=pts_ns, meta=meta, encoding=encoding,
        )  # fmt: skip
        nbytes = drafted.form.nbytes
        slot = self._reserve(nbytes, timeout)
        try:
            shape: tuple[int, ...] | None = drafted.form.shape
            if slot is not None and drafted.form.encoding is not Encoding.RAW:
                shape = self._lane.shape_in_slot(drafted.form.encoding, drafted.data)
                if shape is None:
                    self._lane.free(slot)
                    slot = None
            payload = self._lane.fill(slot, drafted.data)
        except BaseException:
            self._release(nbytes, slot)
            raise
        return self._submit(drafted, payload, seq, shape)

    @contextlib.contextmanager
    def slot(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike = np.uint8,
        *,
        seq: int | None = None,
        timeout: float | None = None,
        **options: Unpack[SlotOptions],
    ) -> Iterator[npt.NDArray[Any]]:
        """Give out an array to write a frame into, and push it at the end of the block.

        In shared memory the workers read it where it was written: a decoder that writes into the array has
        saved a copy. Where there is no slot the array is ordinary memory, and the frame goes inline. Its
        contents are undefined at first; it is not to be used after the block. A block that ends by an error
        pushes nothing.

        Args:
            shape: of the array; all axes positive.
            dtype: of the array, as frames have them.
            seq: as in ``push``.
            timeout: as in ``push``.
            **options: stream, model, color, priority, ttl_ms, keep, pts_ns, meta, as in ``push``.

        Raises what ``push`` raises.
        """
        self._check_usable()
        nbytes = arrays.frame_nbytes(shape, dtype, self.limits.max_frame_bytes)
        slot = self._reserve(nbytes, timeout)
        try:
            array = arrays.new_array(shape, dtype, None if slot is None else self._lane.view(slot))
            drafted = self._drafts.draft(array, self.limits, **options)
            yield array
            array.flags.writeable = False
            payload = slot if slot is not None else self._lane.fill(None, drafted.data)
        except BaseException:
            self._release(nbytes, slot)
            raise
        self._submit(drafted, payload, seq, drafted.form.shape)

    def flush(self, timeout: float | None = None) -> ProducerAccount:
        """Wait until every frame pushed before this call has a known end; return the account.

        Raises RequestTimeoutError after ``timeout`` seconds; None waits for ever.
        """
        self._check_usable()
        with self._changed:
            target = self._held.sent_count

            def is_done() -> bool:
                return self._failure is not None or self._held.oldest_ticket() > target

            if not self._changed.wait_for(is_done, timeout):
                raise RequestTimeoutError(
                    f"{self._unfinished_text()} have no known end after {timeout:g} s{self._away_text()}"
                )
            self._check_failure()
            return self._account()

    def close(self, timeout: float | None = None) -> ProducerAccount:
        """Wait for the outcomes of all frames, say goodbye and end; return the account.

        Without a ``timeout`` it waits as long as frames end: it gives up when the broker has been away
        for ``linger_s`` seconds, or when nothing has ended for STALL_LIMIT_S. Closing again does nothing.

        Raises NotDeliveredError when frames without a known end are left.
        """
        self._check_fork()
        with self._changed:
            if self._is_closed:
                return self._account()
            self._is_closing = True
            self._changed.notify_all()
            self._wait_for_the_rest(timeout)
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return self.account
        atexit.unregister(self._close_at_exit)
        if not self._loop.stop(timeout_s=5.0):
            _log.warning("the producer's thread for %s did not end within 5 s", self.address)
        self._notify()
        with self._changed:
            unfinished = self._held.unfinished_count
            self._lane.close(is_abandoned=unfinished > 0)
            if unfinished:
                raise NotDeliveredError(
                    f"{self._unfinished_text()} were not delivered to {self.address}{self._away_text()}",
                    unfinished=unfinished,
                    delivered=self._held.finished_count,
                )
            return self._account()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if forks.value != self._forks_count:
            return  # a forked child leaves the block: the parent's frames are not its concern
        if error is None:
            self.close()
            return
        try:
            self.close(timeout=self.linger_s)
        except NotDeliveredError as not_delivered:
            error.add_note(str(not_delivered))

    # -- what it knows -------------------------------------------------------------------------------

    @property
    def account(self) -> ProducerAccount:
        with self._changed:
            return self._account()

    def is_finished_up_to(self, sent: int) -> bool:
        """Tell whether the first ``sent`` frames pushed here all have a known end; raise ClosedError when
        that can't be known any more."""
        with self._changed:
            self._check_failure()
            return self._held.oldest_ticket() > sent

    @property
    def boot(self) -> int | None:
        """The run of the broker that this producer talks to, or talked to last."""
        return self._progress.situation.boot

    def is_unfinished(self, frame: FrameId) -> bool:
        """Tell whether a frame pushed here has no known end yet."""
        return frame.epoch == self.epoch and self._held.is_unfinished(frame.stream, frame.seq)

    @property
    def is_connected(self) -> bool:
        return self._progress.situation.is_connected

    @property
    def limits(self) -> Limits:
        """The broker's limits; the defaults until it was reached."""
        return self._progress.situation.limits

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The broker's models; empty until it was reached."""
        return self._progress.situation.models

    def wait_connected(self, timeout: float) -> None:
        """Wait until the broker has said welcome; raise UnreachableError after ``timeout`` seconds."""
        self._check_usable()
        with self._changed:
            is_there = self._changed.wait_for(lambda: self.is_connected or self._failure is not None, timeout)
            self._check_failure()
            if not is_there:
                raise UnreachableError(f"{self.address}: no welcome within {timeout:g} s{self._away_text()}")

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in the producer's own thread, whenever frames end or it closes."""
        with self._changed:
            self._listeners.append(listener)

    # -- in the loop's thread ------------------------------------------------------------------------

    def _take_progress(self, progress: Progress) -> None:
        if not progress.finished and progress.situation is self._progress.situation:
            self._progress = progress
            return
        with self._changed:
            self._progress = progress
            for finished in progress.finished:
                frame = finished.frame
                self._held.finish(frame.stream, frame.seq or 0, frame.nbytes, frame.payload, finished.reject)
            self._changed.notify_all()
        if self._on_reject is not None or self._on_finished is not None:
            for finished in progress.finished:
                self._call_back(finished.frame, finished.reject)
        self._notify()

    def _call_back(self, frame: Frame, reject: Reject | None) -> None:
        try:
            if reject is not None and self._on_reject is not None:
                self._on_reject(reject)
            if self._on_finished is not None:
                self._on_finished(FrameId(frame.stream, self.epoch, frame.seq or 0))
        except Exception:  # noqa: BLE001 - the user's code; the producer must outlive it
            _log.exception("a callback of the producer for %s failed", self.address)

    def _take_failure(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._notify()

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # -- pushing, step by step -----------------------------------------------------------------------

    def _reserve(self, nbytes: int, timeout: float | None) -> ShmRef | None:
        """Wait for room; return the slot that the payload goes into, None when it goes inline."""
        if timeout is None and threading.get_ident() == self._loop.thread.ident:
            timeout = 0.0  # waiting in the thread that makes room would be for ever
        held = self._held
        if nbytes > held.max_bytes:
            raise InvalidFrameError(
                Code.FRAME_TOO_LARGE, f"{nbytes} bytes; max_unfinished_bytes is {held.max_bytes}"
            )
        with self._changed:
            if not self._has_room(nbytes) and not self._changed.wait_for(
                lambda: self._has_room(nbytes) or self._is_closing, timeout
            ):
                raise RequestTimeoutError(
                    f"no room for a frame of {nbytes} bytes within {timeout:g} s: {held.frames_count} of"
                    f" {held.max_frames} frames and {held.nbytes} of {held.max_bytes} bytes are"
                    f" unfinished{self._away_text()}"
                )
            self._check_failure()
            if self._is_closing:
                raise ClosedError(f"the producer for {self.address} is closed")
            return held.reserve(nbytes)

    def _submit(
        self, drafted: Draft, payload: Payload, seq: int | None, shape: tuple[int, ...] | None
    ) -> FrameId:
        """Number a frame and hand it on; what it holds is released here if it can't be numbered."""
        with self._changed:
            try:
                number = self._held.number(drafted.words.stream, seq, payload)
            except InvalidFrameError:
                self._release(drafted.form.nbytes, payload)
                raise
            # Inside the lock, so that the loop gets the seqs of a stream in ascending order.
            frame = drafted.frame(payload, self.epoch, number)
            if shape is not None and shape is not drafted.form.shape:
                frame = replace(frame, shape=shape)
            self._loop.submit(frame, drafted.header_bytes)
        return FrameId(drafted.words.stream, self.epoch, number)

    def _has_room(self, nbytes: int) -> bool:
        return self._failure is not None or self._held.has_room(nbytes)

    def _release(self, nbytes: int, payload: Payload | None) -> None:
        with self._changed:
            self._held.release(nbytes, payload)
            self._changed.notify_all()

    # -- closing and telling -------------------------------------------------------------------------

    def _wait_for_the_rest(self, timeout: float | None) -> None:
        started = last_end = time.monotonic()
        away_since: float | None = None
        finished_count = self._held.finished_count
        while self._held.frames_count and self._failure is None and not self._is_closed:
            now = time.monotonic()
            if self._held.finished_count > finished_count:
                last_end, finished_count = now, self._held.finished_count
            away_since = None if self.is_connected else (away_since or now)
            if timeout is not None:
                limit = started + timeout
            else:
                limit = last_end + STALL_LIMIT_S
                if away_since is not None:
                    limit = min(limit, away_since + self.linger_s)
            if now >= limit:
                return
            self._changed.wait(limit - now)

    def _account(self) -> ProducerAccount:
        progress = self._progress
        return self._held.account(progress.by_status, progress.resent, progress.sessions)

    def _unfinished_text(self) -> str:
        return f"{self._held.unfinished_count} of {self._held.sent_count} frames"

    def _away_text(self) -> str:
        situation = self._progress.situation
        return "" if situation.is_connected else f" ({situation.away_reason})"

    def _check_usable(self) -> None:
        self._check_fork()
        if self._is_closing:
            raise ClosedError(f"the producer for {self.address} is closed")
        self._check_failure()

    def _check_fork(self) -> None:
        if forks.value != self._forks_count:
            raise ForkedError(
                f"the producer for {self.address} was made in process {self._pid} and is used in its fork"
                f" {os.getpid()}; make a new one there"
            )

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise ClosedError(f"the producer for {self.address} failed: {self._failure!r}") from self._failure

    def _close_at_exit(self) -> None:
        """The last chance of a producer that nobody closed: what is lost is at least said."""
        if forks.value != self._forks_count:
            return
        try:
            self.close()
        except NotDeliveredError as error:
            sys.stderr.write(f"headrace: {error}; close the producer, or use it in a with block\n")
