"""The asyncio twins: the same names and meanings, awaited instead of waited for.

Each wraps its blocking twin, whose own thread does the work and wakes the event loop. Use them as
async context managers, in one event loop. Cancelling an await leaves the object usable: a push that
was cancelled was not sent, a get that was cancelled has taken nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from headrace.arena import SHM_FOLDER
from headrace.clients.client import DEFAULT_TIMEOUT_S, Client, InferOptions
from headrace.clients.drafts import SlotOptions
from headrace.clients.lane import DEFAULT_SHM_BYTES, LaneChoice
from headrace.clients.producer import Producer
from headrace.clients.records import FrameId, Missed, ProducerAccount, SubscriberAccount
from headrace.clients.subscriber import Subscriber
from headrace.clients.subscriber_events import Mode, Start
from headrace.errors import ClosedError, NotDeliveredError, RequestTimeoutError
from headrace.protocol.messages import Color, Encoding, Keep, Outcome, Reject

T = TypeVar("T")


class _Bell:
    """Rung from any thread; waited for in one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def ring(self) -> None:
        # The loop may be gone by the time a thread of ours has its last word.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait_until(self, attempt: Callable[[], T | None], deadline: float | None) -> T | None:
        """Return what ``attempt`` returns as soon as it is not None; None when the time is over."""
        while True:
            self._event.clear()
            result = attempt()
            if result is not None:
                return result
            remaining_s = None if deadline is None else deadline - self._loop.time()
            if remaining_s is not None and remaining_s <= 0:
                return None
            try:
                async with asyncio.timeout(remaining_s):
                    await self._event.wait()
            except TimeoutError:
                return attempt()

    def deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._loop.time() + timeout


class AsyncProducer:
    """``Producer`` for asyncio; see there for every argument."""

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
    ) -> None:
        """Make one inside a running event loop. ``on_reject`` is called in that loop."""
        self._bell = _Bell()
        loop = asyncio.get_running_loop()
        self._producer = Producer(
            address,
            name=name,
            max_unfinished_frames=max_unfinished_frames,
            max_unfinished_bytes=max_unfinished_bytes,
            linger_s=linger_s,
            lane=lane,
            shm_bytes=shm_bytes,
            shm_folder=shm_folder,
            on_reject=None if on_reject is None else lambda r: _call_in(loop, on_reject, r),
        )
        self._producer.add_listener(self._bell.ring)

    async def push(
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
        """See ``Producer.push``. Other tasks run while it waits for room."""
        full: list[RequestTimeoutError] = []

        def attempt() -> FrameId | None:
            try:
                return self._producer.push(
                    image, stream=stream, model=model, color=color, priority=priority, ttl_ms=ttl_ms,
                    keep=keep, pts_ns=pts_ns, meta=meta, seq=seq, encoding=encoding, timeout=0,
                )  # fmt: skip
            except RequestTimeoutError as error:
                full[:] = [error]
                return None

        pushed = await self._bell.wait_until(attempt, self._bell.deadline(timeout))
        if pushed is None:
            raise full[0]
        return pushed

    @contextlib.asynccontextmanager
    async def slot(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike = np.uint8,
        *,
        seq: int | None = None,
        timeout: float | None = None,
        **options: Unpack[SlotOptions],
    ) -> AsyncIterator[npt.NDArray[Any]]:
        """See ``Producer.slot``. Other tasks run while it waits for room."""
        full: list[RequestTimeoutError] = []
        with contextlib.ExitStack() as stack:

            def attempt() -> npt.NDArray[Any] | None:
                try:
                    return stack.enter_context(
                        self._producer.slot(shape, dtype, seq=seq, timeout=0, **options)
                    )
                except RequestTimeoutError as error:
                    full[:] = [error]
                    return None

            array = await self._bell.wait_until(attempt, self._bell.deadline(timeout))
            if array is None:
                raise full[0]
            yield array

    async def flush(self, timeout: float | None = None) -> ProducerAccount:
        """See ``Producer.flush``."""
        target = self._producer.account.sent

        def attempt() -> ProducerAccount | None:
            return self._producer.account if self._producer.is_finished_up_to(target) else None

        account = await self._bell.wait_until(attempt, self._bell.deadline(timeout))
        if account is None:
            unfinished = self._producer.account.unfinished
            raise RequestTimeoutError(f"{unfinished} frames have no known end after {timeout:g} s")
        return account

    async def close(self, timeout: float | None = None) -> ProducerAccount:
        """See ``Producer.close``. Cancelled, it goes on closing in the background."""
        return await asyncio.shield(asyncio.to_thread(self._producer.close, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close(timeout=self._producer.linger_s)
        except NotDeliveredError as not_delivered:
            error.add_note(str(not_delivered))

    @property
    def account(self) -> ProducerAccount:
        return self._producer.account

    @property
    def is_connected(self) -> bool:
        return self._producer.is_connected


class AsyncSubscriber:
    """``Subscriber`` for asyncio: ``async with`` opens it, ``async for`` reads it."""

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
    ) -> None:
        """Make one inside a running event loop; it subscribes when entered (or ``open()`` is awaited)."""
        self._bell = _Bell()
        self._subscriber: Subscriber | None = None
        self._open = lambda: Subscriber(
            address, stream=stream, streams=streams, prefix=prefix, mode=mode, start=start,
            timeout=timeout, max_queued=max_queued, max_queued_bytes=max_queued_bytes,
            on_item=self._bell.ring,
        )  # fmt: skip

    async def open(self) -> Self:
        """Subscribe; return once the broker has confirmed it. See ``Subscriber`` for what it raises."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        try:
            self._subscriber = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_result)
            raise
        return self

    async def get(self, timeout: float | None = None) -> Outcome | Missed:
        """See ``Subscriber.get``."""
        subscriber = self._opened()

        def attempt() -> Outcome | Missed | None:
            try:
                return subscriber.get(0)
            except RequestTimeoutError:
                return None

        item: Outcome | Missed | None = await self._bell.wait_until(attempt, self._bell.deadline(timeout))
        if item is None:
            raise RequestTimeoutError(f"nothing came within {timeout:g} s")
        return item

    async def items(self, timeout: float | None = None) -> AsyncIterator[Outcome | Missed]:
        """Yield items until closed, or until none came for ``timeout`` seconds."""
        while True:
            try:
                item = await self.get(timeout)
            except (ClosedError, RequestTimeoutError):
                return
            yield item

    def __aiter__(self) -> AsyncIterator[Outcome | Missed]:
        return self.items()

    async def close(self) -> None:
        """End; whoever waits gets ClosedError, iterations end."""
        if self._subscriber is not None:
            await asyncio.shield(asyncio.to_thread(self._subscriber.close))
            self._bell.ring()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def account(self) -> SubscriberAccount:
        return self._opened().account

    def _opened(self) -> Subscriber:
        if self._subscriber is None:
            raise ClosedError("the subscriber was not opened: use it in an async with block")
        return self._subscriber


class AsyncClient:
    """``Client`` for asyncio: ``async with`` connects it."""

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        name: str = "",
        timeout: float = 10.0,
        max_in_flight: int = 256,
        max_unfinished_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        """Make one inside a running event loop; it connects when entered."""
        self._bell = _Bell()
        self._client: Client | None = None
        self._open = lambda: Client(
            address,
            name=name,
            timeout=timeout,
            max_in_flight=max_in_flight,
            max_unfinished_bytes=max_unfinished_bytes,
        )

    async def open(self) -> Self:
        """Connect; return once outcomes can come back."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        try:
            self._client = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_result)
            raise
        self._client.add_listener(self._bell.ring)
        return self

    async def infer(
        self,
        image: object,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **options: Unpack[InferOptions],
    ) -> Outcome:
        """See ``Client.infer``. Cancelled, the request is forgotten."""
        client = self._client
        if client is None:
            raise ClosedError("the client was not opened: use it in an async with block")
        full: list[RequestTimeoutError] = []

        def attempt() -> asyncio.Future[Outcome] | None:
            try:
                return asyncio.wrap_future(client.submit(image, timeout=0, **options))
            except RequestTimeoutError as error:
                full[:] = [error]
                return None

        deadline = self._bell.deadline(timeout)
        future = await self._bell.wait_until(attempt, deadline)
        if future is None:
            raise full[0]
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise RequestTimeoutError(f"no outcome within {timeout:g} s") from None

    async def infer_many(
        self,
        images: Iterable[object],
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **options: Unpack[InferOptions],
    ) -> list[Outcome]:
        """See ``Client.infer_many``."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.infer(image, timeout=timeout, **options)) for image in images]
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """See ``Client.close``."""
        if self._client is not None:
            await asyncio.shield(asyncio.to_thread(self._client.close))

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[Reject], None], reject: Reject) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, reject)


def _close_result(opening: asyncio.Future[Subscriber] | asyncio.Future[Client]) -> None:
    """Close what was opened although nobody waited for it any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.get_loop().run_in_executor(None, opening.result().close)
