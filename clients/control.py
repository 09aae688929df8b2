"""Control: calls on the broker's control socket, from any thread.

A call that got no answer in time leaves nothing behind: its connection is dropped, and a late answer
carries an id that nobody waits for.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import zmq

from headrace import addresses
from headrace.clients.positions import read_positions
from headrace.clients.sockets import CONTROL, Context, Link
from headrace.errors import (
    ClosedError,
    Code,
    ForkedError,
    RemoteError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from headrace.protocol import codec
from headrace.protocol.messages import Buffer, Limits, Outcome, Refused, ReplayReply, Reply, Request, Value

#: How long one connection may leave a request unanswered before it is asked again on a new one. All
#: methods may be asked twice.
ATTEMPT_TIMEOUT_S = 5.0


class Control:
    """One connection to the control socket, made when needed and again after it was lost.

    Calls from several threads take turns. Invariant: an answer is returned only to the call that asked.
    """

    def __init__(self, address: str = "127.0.0.1", *, timeout: float = 5.0) -> None:
        """Nothing is connected yet. ``timeout``: seconds for a call that names none.

        Raises ConfigError for an address that can't be read.
        """
        self.address = addresses.normalise(address)
        self._timeout_s = timeout
        self._limits = Limits()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        # The process's own context, which is never terminated: calls run in the caller's thread, and Ctrl-C
        # may come inside pyzmq, between the making of a socket and anybody's knowing of it. Terminating a
        # context waits for every open socket, for ever.
        self._context: Context = zmq.Context.instance()
        self._link: Link | None = None
        self._is_closed = threading.Event()

    # -- methods of the broker -----------------------------------------------------------------------

    def status(self, timeout: float | None = None) -> dict[str, Value]:
        """Return the broker's account, classes, workers, streams, producers and models.

        The broker gives its streams in pages; all else is as the first answer had it.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout)
        status = self._reply("status", {}, timeout).result
        streams = status.get("streams")
        after = status.pop("streams_next", "")
        while after and isinstance(streams, dict):
            remaining_s = max(0.0, deadline - time.monotonic())
            page = self._reply("status", {"streams_after": after}, remaining_s).result
            more = page.get("streams")
            if not isinstance(more, dict) or not more.keys() - streams.keys():
                break
            streams.update(more)
            after = page.get("streams_next")
        return status

    def positions(
        self, topics: Sequence[str] = ("",), timeout: float | None = None
    ) -> tuple[int, dict[str, int]]:
        """Return the broker's boot and the next pub_seq of each stream.

        ``topics``: stream + NUL for one stream, a prefix without NUL for all that begin so.
        """
        listed: list[Value] = list(topics)
        positions: dict[str, int] = {}
        after = ""
        while True:
            params: dict[str, Value] = {"topics": listed}
            if after:
                params["streams_after"] = after
            page = read_positions(self._reply("positions", params, timeout).result)
            positions.update(page.streams)
            after = page.after
            if not after:
                return page.boot, positions

    def replay(
        self, stream: str, boot: int, first: int, last: int, timeout: float | None = None
    ) -> tuple[tuple[Outcome, ...], tuple[tuple[int, int], ...], bool]:
        """Return retained outcomes of pub_seq ``first`` to ``last``, both included.

        With them come the half-open ranges that are gone, and whether the answer was cut at its size
        limit: then ask again from the next pub_seq.
        """
        params: dict[str, Value] = {"stream": stream, "boot": boot, "first": first, "last": last}
        reply = self.call("replay", params, timeout)
        if not isinstance(reply, ReplayReply):
            raise RemoteProtocolError(Code.UNEXPECTED_TYPE, f"{self.address}: replay was answered otherwise")
        return reply.outcomes, reply.missed, reply.has_more

    def drain(self, *, stop: bool = False, timeout: float | None = None) -> int:
        """Let the broker admit nothing more; return how many frames it has yet to finish.

        With ``stop`` it ends when they are.
        """
        unfinished = self._reply("drain", {"stop": stop}, timeout).result.get("unfinished")
        if not isinstance(unfinished, int):
            raise RemoteProtocolError(
                Code.BAD_FIELD, f"{self.address}: drain did not tell what is unfinished"
            )
        return unfinished

    def fetch(
        self, sha256: str, offset: int, nbytes: int, timeout: float | None = None
    ) -> tuple[int, Buffer]:
        """Return the size of a model file and a chunk of it (at most ``nbytes``, fewer at its end)."""
        reply = self._reply("fetch", {"sha256": sha256, "offset": offset, "nbytes": nbytes}, timeout)
        total = reply.result.get("total")
        if not isinstance(total, int) or len(reply.payloads) != 1:
            raise RemoteProtocolError(Code.BAD_FIELD, f"{self.address}: fetch did not return a chunk")
        return total, reply.payloads[0]

    def reload(self, params: Mapping[str, Value], timeout: float | None = None) -> int:
        """Start putting another file in the place of a model's (docs/protocol.md, ``reload``).

        Returns the reload's number, under which status tells how far it is."""
        number = self._reply("reload", params, timeout).result.get("number")
        if not isinstance(number, int):
            raise RemoteProtocolError(Code.BAD_FIELD, f"{self.address}: reload did not tell its number")
        return number

    def roll_back(self, model: str = "", timeout: float | None = None) -> dict[str, Value]:
        """Bring back the version before the last reload, or give up the one under way."""
        return self._reply("rollback", {"model": model}, timeout).result

    def commit(self, model: str = "", timeout: float | None = None) -> dict[str, Value]:
        """Let go of the version before the last reload."""
        return self._reply("commit", {"model": model}, timeout).result

    def record(self, params: Mapping[str, Value], timeout: float | None = None) -> dict[str, Value]:
        """Return what has arrived at the broker since the last answer (docs/protocol.md, ``record``)."""
        return self._reply("record", params, timeout).result

    # -- calling -------------------------------------------------------------------------------------

    def call(
        self, method: str, params: Mapping[str, Value], timeout: float | None = None
    ) -> Reply | ReplayReply:
        """Call a method and return its answer.

        Raises RequestTimeoutError, UnreachableError (no broker found in time), RemoteError (the broker's
        refusal, with its code), ClosedError, ForkedError.
        """
        self._check_fork()
        timeout_s = self._timeout_s if timeout is None else timeout
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise RequestTimeoutError(f"{method}: another call to {self.address} took all of {timeout_s:g} s")
        try:
            while True:
                if self._is_closed.is_set():
                    raise ClosedError(f"control of {self.address} is closed")
                answer = self._attempt(method, dict(params), deadline)
                if answer is not None:
                    break
                if time.monotonic() >= deadline:
                    raise RequestTimeoutError(f"{method}: no answer of {self.address} within {timeout_s:g} s")
        finally:
            self._lock.release()
        if isinstance(answer, Reply) and answer.code:
            raise RemoteError(answer.code, answer.message)
        return answer

    def close(self) -> None:
        """Drop the connection; a call that waits raises ClosedError."""
        self._check_fork()
        self._is_closed.set()
        with self._lock:
            self._drop_link()

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

    def _reply(self, method: str, params: Mapping[str, Value], timeout: float | None) -> Reply:
        reply = self.call(method, params, timeout)
        if not isinstance(reply, Reply):
            raise RemoteProtocolError(
                Code.UNEXPECTED_TYPE, f"{self.address}: {method} was answered otherwise"
            )
        return reply

    def _attempt(self, method: str, params: dict[str, Value], deadline: float) -> Reply | ReplayReply | None:
        """Ask once; None when the connection went or kept silent."""
        request = Request(next(self._ids), method, params)
        link = self._link or self._connect(deadline)
        end = min(deadline, time.monotonic() + ATTEMPT_TIMEOUT_S)
        try:
            if not link.send(codec.encode(request)):
                self._drop_link()
                return None
            answer = self._wait(link, request.id, end)
        except BaseException:
            # Whatever interrupted the wait, the answer may still come: not on a connection we keep.
            self._drop_link()
            raise
        if answer is None:
            self._drop_link()
        return answer

    def _wait(self, link: Link, request_id: int, end: float) -> Reply | ReplayReply | None:
        poller = zmq.Poller()
        link.register(poller)
        while not self._is_closed.is_set():
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return None
            poller.poll(round(min(remaining_s, addresses.STOP_CHECK_S) * 1e3) + 1)
            while (parts := link.receive()) is not None:
                message = codec.decode(parts, self._limits, codec.TO_CONTROL)
                if isinstance(message, Refused):
                    raise RemoteError(message.code, message.message)
                if isinstance(message, Reply | ReplayReply) and message.id == request_id:
                    return message
            if link.is_lost():
                return None
        return None

    def _connect(self, deadline: float) -> Link:
        endpoints = addresses.discover(
            self.address,
            max(0.0, deadline - time.monotonic()),
            context=self._context,
            should_stop=self._is_closed.is_set,
        )
        limit = self._limits.max_message_bytes
        self._link = Link(self._context, CONTROL, endpoints.control, max_message_bytes=limit)
        return self._link

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"control of {self.address} was made in process {self._pid} and is used in its fork"
                f" {os.getpid()}; make a new one there"
            )
