"""How client sockets are made: one table of options per role, one connection per socket.

A :class:`Link` is a connected socket together with its monitor. ZeroMQ's own reconnect is off: when
the connection goes, the link says so once and is closed, and its owner makes a new one after a new
discovery. So a connection carries a prefix of what was sent on it and never a queue of stale
messages, and names are looked up again each time.

Not thread-safe: the thread that makes a link owns it. A :class:`Waker` is the way in from others.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.errors import UnreachableError
from headrace.protocol.messages import Buffer

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

#: How long a closing socket may take to send its last words (Goodbye). Everything that matters has
#: been waited for before; on one host a message is out in well under a millisecond.
GOODBYE_LINGER_MS = 200

#: ZMTP pings find a peer that vanished without closing its connection (power cut, cut cable) even on
#: sockets whose protocol has no heartbeat of its own. Three missed ones end the connection.
PING_INTERVAL_MS = 1_000
PING_TIMEOUT_MS = 3_000

#: A handshake slower than this is a peer that accepts connections but does not serve.
HANDSHAKE_TIMEOUT_MS = 5_000

#: Payloads up to here are kept as bytes and copied when they are sent: pyzmq copies parts of this size
#: anyway (``zmq.COPY_THRESHOLD``), and making a part of its own costs 2 microseconds, as much as the copy.
COPIED_BYTES = 65_536

_LOST_EVENTS = (
    zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class Role:
    """One row of the option table. High-water marks are in messages; 0 means no mark of ZeroMQ's own,
    for sockets whose protocol bounds what is under way."""

    name: str
    kind: int
    send_hwm: int
    receive_hwm: int


#: Credits bound what a producer sends; what it receives is a few small messages per frame in flight.
PRODUCER = Role("frames", zmq.DEALER, send_hwm=0, receive_hwm=0)

#: The reader's queue, this mark, the kernel and the broker's mark for a subscriber add up to what a
#: slow reader lags behind. Small, since what is lost here is fetched again from the broker's ring.
SUBSCRIBER = Role("results", zmq.SUB, send_hwm=0, receive_hwm=64)

#: Requests wait for their answers, so few are under way.
CONTROL = Role("control", zmq.DEALER, send_hwm=64, receive_hwm=64)


class Link:
    """One connected socket and its monitor.

    Invariant: at most one connection in its life; once ``is_lost()`` said yes it stays lost.
    """

    def __init__(self, context: Context, role: Role, endpoint: str, *, max_message_bytes: int) -> None:
        """Connect; raise UnreachableError when the address can't even be tried."""
        self.role = role
        self.endpoint = endpoint
        self._is_lost = False
        self.socket: zmq.Socket[bytes] = context.socket(role.kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, role.send_hwm),
            (zmq.RCVHWM, role.receive_hwm),
            (zmq.MAXMSGSIZE, max_message_bytes),
            (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, -1),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.HEARTBEAT_IVL, PING_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
        ):
            self.socket.setsockopt(option, value)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_LOST_EVENTS)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UnreachableError(f"{role.name} at {endpoint}: {error.strerror}") from None

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)

    def unregister(self, poller: zmq.Poller) -> None:
        for registered in (self.socket, self.monitor):
            with contextlib.suppress(KeyError):
                poller.unregister(registered)

    def descriptors(self) -> tuple[int, int]:
        """Return what an owner can sleep on that leaves the socket to others meanwhile. They are signalled
        once for all that came since the socket was last used: ask ``has_input`` before sleeping."""
        return self.socket.fileno(), self.monitor.fileno()

    def has_input(self) -> bool:
        """Tell whether something can be received now, or the connection's end be read."""
        return bool((_events_of(self.socket) | _events_of(self.monitor)) & zmq.POLLIN)

    def has_message(self) -> bool:
        """Tell whether something can be received now; the connection's end is another matter."""
        return bool(_events_of(self.socket) & zmq.POLLIN)

    def is_lost(self) -> bool:
        """Read the monitor; tell whether the connection has gone (or was never made)."""
        # Not monitor.poll(0), for which pyzmq makes a poller each time.
        while not self._is_lost and _events_of(self.monitor) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor)["event"]
            self._is_lost = bool(event & _LOST_EVENTS)
        return self._is_lost

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send without waiting; False when the socket can't take it (then the link is of no more use).

        A part that views a zmq.Frame is sent as that frame: its bytes are shared, not copied.
        """
        send, last = self.socket.send, len(parts) - 1
        try:
            for index, part in enumerate(parts):
                flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
                if type(part) is bytes:
                    send(part, flags, copy=len(part) <= COPIED_BYTES)
                else:
                    send(_shared(part), flags, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return one message's parts, or None when there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def receive_shared(self) -> list[Buffer] | None:
        """Return one message's parts, or None: large ones as views of ZeroMQ's own memory, others as bytes,
        which is cheaper."""
        parts: list[Buffer] = []
        has_more = True
        try:
            while has_more:
                part = self.socket.recv(zmq.NOBLOCK, copy=False)
                has_more = part.more
                parts.append(part.bytes if len(part) <= COPIED_BYTES else part.buffer)
        except zmq.Again:
            return None
        return parts

    def close(self, linger_ms: int = 0) -> None:
        """Close socket and monitor. ``linger_ms`` is time for the last words, spent in the background."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class Waker:
    """Wakes an owner thread's poller from any other thread. Calls before a drain count as one."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def wake(self) -> None:
        # A full pipe means that a wake-up is already waiting to be read; a closed one that the owner
        # thread has ended and nobody is left to wake.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def __enter__(self) -> Waker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def snapshot(data: Buffer) -> Buffer:
    """Copy bytes once into memory that ZeroMQ can send as often as needed without copying again, or, where
    that is cheaper than such memory, with a copy each time.

    The copy is made now, so the caller may change its array at once. Nothing refers to Python memory
    from ZeroMQ's threads, so a fork meets no half-sent zero-copy buffer.
    """
    nbytes = data.nbytes if type(data) is memoryview else len(data)
    return bytes(data) if nbytes <= COPIED_BYTES else zmq.Frame(data, copy=True).buffer


def _shared(part: Buffer) -> Buffer | zmq.Frame:
    if isinstance(part, memoryview) and isinstance(part.obj, zmq.Frame):
        return part.obj
    return part


def _events_of(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.EVENTS))
