"""The broker's sockets: one place that makes them, one table of their options, and how parts cross them.

Not here: which address they bind to (``binding``) and what the messages mean (``shell``). All sockets of a
broker belong to one thread.

Why these options (libzmq's manual, zmq_setsockopt(3)):

* ROUTER_MANDATORY: without it a message to a peer that has just gone vanishes without a sign.
* ROUTER_HANDOVER: a peer that names itself and reconnects takes its old connection's place at once; without
  it the new connection is parked unread until the old one is noticed to be dead (zeromq/libzmq#2019).
* XPUB_VERBOSER: every subscription is seen, also a second one to a known topic, and every end of one, so that
  each subscriber gets its confirmation and subscriptions can be counted.
* XPUB_NODROP off (its default): a subscriber whose queue is full loses messages, which it notices by pub_seq;
  nobody else waits for it.
* MAXMSGSIZE is per part and is checked before memory is taken; the sender's connection is closed. It stands a
  header above the frame limits, so that a frame just over them still arrives and is rejected by name.
* RCVHWM is per peer. Small, because what waits there is bounded by nothing else than RCVHWM x MAXMSGSIZE.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

import zmq

from headrace.broker.shell_settings import ShellSettings
from headrace.protocol.messages import Buffer

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"


class Role(StrEnum):
    """One socket each; the value is its key in the configuration and its field in Endpoints."""

    FRAMES = "frames"
    INTAKE = "intake"
    RESULTS = "results"
    WORKERS = "workers"
    CONTROL = "control"


_KINDS: dict[Role, int] = {
    Role.FRAMES: zmq.ROUTER,
    Role.INTAKE: zmq.PULL,
    Role.RESULTS: zmq.XPUB,
    Role.WORKERS: zmq.ROUTER,
    Role.CONTROL: zmq.ROUTER,
}

#: Roles whose peers can be answered.
ROUTED = frozenset(role for role, kind in _KINDS.items() if kind == zmq.ROUTER)

#: How long closing may wait for what is still queued for peers. Enough for the last outcomes and the goodbyes
#: on a working network, short enough that an idle broker ends within 2 seconds beside a stopped peer.
LINGER_MS = 1_000

#: A connection that has not finished its handshake by then is closed: port scanners hold no descriptors.
HANDSHAKE_MS = 10_000

#: Floor of ZeroMQ's own heartbeats. They find connections that died without a FIN; whether a peer is alive in
#: our sense is decided by the core with our own heartbeats, which may be much shorter.
MIN_PING_MS = 1_000

#: Largest message that a subscriber may send: a topic is at most 129 bytes.
MAX_SUBSCRIPTION_BYTES = 4_096

#: Parts from this size on stay in ZeroMQ's own memory instead of being copied into a bytes object. Measured
#: with pyzmq 27 per message of one payload, receiving alone: 16 KiB 3.3 us with the copy; 64 KiB 2.6 us
#: without and 5.8 us with it; 900 KiB 3.0 us without and 34 us with it. Smaller parts are copied, as each
#: kept one would hold on to a larger receive buffer.
ZERO_COPY_BYTES = 64 * 1024


# Plain numbers: the arithmetic of zmq's enums costs as much as sending a small part.
_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_INPUT = int(zmq.POLLIN)


def options_for(role: Role, settings: ShellSettings) -> dict[int, int]:
    """Return the options of one socket: the common ones, then the role's own."""
    core = settings.core
    ping_ms = max(core.heartbeat_ms, MIN_PING_MS)
    payload_bytes = core.limits.max_message_bytes + core.limits.max_header_bytes
    common: dict[int, int] = {
        zmq.LINGER: LINGER_MS,
        zmq.IPV6: 1,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        zmq.HEARTBEAT_IVL: ping_ms,
        zmq.HEARTBEAT_TIMEOUT: ping_ms * core.heartbeats_missed,
        zmq.HEARTBEAT_TTL: ping_ms * core.heartbeats_missed,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.BACKLOG: 1_024,
    }
    own: dict[Role, dict[int, int]] = {
        Role.FRAMES: {zmq.MAXMSGSIZE: payload_bytes, zmq.RCVHWM: 256, zmq.SNDHWM: 4_096},
        Role.INTAKE: {zmq.MAXMSGSIZE: payload_bytes, zmq.RCVHWM: 256},
        Role.RESULTS: {
            zmq.MAXMSGSIZE: MAX_SUBSCRIPTION_BYTES,
            zmq.RCVHWM: 4_096,
            zmq.SNDHWM: settings.results_queue_messages,
            zmq.XPUB_VERBOSER: 1,
            zmq.XPUB_NODROP: 0,
        },
        Role.WORKERS: {zmq.MAXMSGSIZE: payload_bytes, zmq.RCVHWM: 256, zmq.SNDHWM: 1_024},
        Role.CONTROL: {zmq.MAXMSGSIZE: core.limits.max_header_bytes, zmq.RCVHWM: 256, zmq.SNDHWM: 256},
    }
    routed = {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 1} if role in ROUTED else {}
    return common | own[role] | routed


def make_socket(context: Context, role: Role, settings: ShellSettings) -> Socket:
    """Make the socket of a role with its options set; it is not bound yet."""
    socket = context.socket(_KINDS[role])
    for option, value in options_for(role, settings).items():
        socket.setsockopt(option, value)
    return socket


def has_message(socket: Socket) -> bool:
    """Tell whether a message can be received now. That costs 1.2 microseconds, and to be told so by an
    exception of ``receive`` 2.9."""
    return bool(int(socket.getsockopt(_EVENTS)) & _INPUT)


def receive_routed(socket: Socket) -> tuple[bytes, list[Buffer]]:
    """Take one message from a ROUTER: routing id and parts. Raises zmq.Again when there is none."""
    routing_id = socket.recv(_LAST)
    return routing_id, receive(socket)


def receive(socket: Socket) -> list[Buffer]:
    """Take one message's parts. Large ones are memoryviews of ZeroMQ's own memory, the others bytes.

    Raises zmq.Again when there is none. A message is atomic: once its first part is here, all are.
    """
    parts: list[Buffer] = []
    has_more = True
    while has_more:
        part = socket.recv(_LAST, copy=False)
        has_more = part.more
        parts.append(part.bytes if len(part) < ZERO_COPY_BYTES else part.buffer)
    return parts


def send(socket: Socket, parts: Sequence[Buffer]) -> None:
    """Send one message without waiting.

    Raises zmq.Again when the peer's queue is full and ZMQError EHOSTUNREACH when a ROUTER has no such peer;
    both before anything was taken (ZeroMQ decides at the first part). Large parts are not copied; their
    memory belongs to a bytes object or to a received part, and neither is ever written to again.
    """
    last = len(parts) - 1
    for index, part in enumerate(parts):
        flags = _LAST if index == last else _MORE
        if type(part) is memoryview:
            owner = part.obj
            # A received part goes out again as itself: ZeroMQ counts the reference. Handing over the
            # memoryview instead would cost a second object and a callback from ZeroMQ's thread.
            if isinstance(owner, zmq.Frame) and len(owner) == part.nbytes:
                socket.send(owner, flags, copy=False)
                continue
        socket.send(part, flags, copy=len(part) < ZERO_COPY_BYTES)
