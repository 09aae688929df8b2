"""Asks the broker's control socket for chunks of model files, one request at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq

from headrace.clients.sockets import CONTROL, Context, Link
from headrace.errors import RemoteProtocolError, UnreachableError
from headrace.protocol import codec
from headrace.protocol.messages import Limits, Refused, Reply, Request
from headrace.workers.model_cache import FetchError, StoppedError

#: A chunk is read from the broker's page cache in well under a millisecond; a slow link at 1 MB/s needs a
#: second for one.
TIMEOUT_S = 10.0

#: How often a waiting request looks whether the process is to end.
STOP_CHECK_S = 0.05


class ControlChunks:
    """A ChunkSource over one connection; a context manager. Owned by one thread."""

    def __init__(
        self, context: Context, address: str, limits: Limits, should_stop: Callable[[], bool]
    ) -> None:
        self._limits = limits
        self._should_stop = should_stop
        self._last_id = 0
        self._address = address
        try:
            self._link = Link(context, CONTROL, address, max_message_bytes=limits.max_message_bytes)
        except UnreachableError as error:
            raise FetchError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._link.close()

    def fetch(self, sha256: str, offset: int, nbytes: int) -> tuple[int, bytes]:
        """Return the file's total size and up to ``nbytes`` bytes from ``offset``.

        Raises FetchError when the broker has no such file, or gives no usable answer in time."""
        self._last_id += 1
        request = Request(self._last_id, "fetch", {"sha256": sha256, "offset": offset, "nbytes": nbytes})
        if not self._link.send(codec.encode(request)):
            raise FetchError(f"{self._address}: the request can't be sent")
        reply = self._wait_for(self._last_id)
        if reply.code:
            raise FetchError(f"{self._address}: {reply.code}: {reply.message}")
        total = reply.result.get("total")
        if not isinstance(total, int) or len(reply.payloads) != 1:
            raise FetchError(f"{self._address}: the answer to fetch has no total, or no payload")
        return total, bytes(reply.payloads[0])

    def _wait_for(self, request_id: int) -> Reply:
        deadline = time.monotonic() + TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            if self._should_stop():
                raise StoppedError("fetching was given up")
            if self._link.is_lost():
                raise FetchError(f"{self._address}: the connection was lost")
            if not self._link.socket.poll(math.ceil(min(left_s, STOP_CHECK_S) * 1000), zmq.POLLIN):
                continue
            parts = self._link.receive()
            if parts is None:
                continue
            try:
                message = codec.decode(parts, self._limits, codec.TO_CONTROL)
            except RemoteProtocolError as error:
                raise FetchError(f"{self._address}: {error}") from error
            if isinstance(message, Refused):
                raise FetchError(f"{self._address}: {message.code}: {message.message}")
            if isinstance(message, Reply) and message.id == request_id:
                return message
        raise FetchError(f"{self._address}: no answer within {TIMEOUT_S:g} s")
