"""Count what happens to connections below the protocol: made, lost, handshake failed.

ZeroMQ closes the connection of a peer whose part is over MAXMSGSIZE, or that does not speak its protocol,
without a word to us; its monitor events are the only trace. They are read once a second, not polled.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.broker.counters import Counters, count
from headrace.broker.sockets import Context, Role, Socket

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED

#: Events taken from one monitor at a time, so that a port scan can't hold the loop.
MAX_EVENTS_PER_READ = 1_000


class Monitors:
    """The monitor of each socket. Close before the sockets."""

    def __init__(self, context: Context, sockets: dict[Role, Socket], counters: Counters) -> None:
        self._counters = counters
        self._sockets = sockets
        self._pairs: dict[Role, Socket] = {}
        for role, socket in sockets.items():
            address = f"inproc://monitor-{role.value}"
            socket.monitor(address, _WATCHED)
            pair = context.socket(zmq.PAIR)
            # No bound on this queue: ZeroMQ's own thread would wait at a full one, with every connection.
            pair.setsockopt(zmq.RCVHWM, 0)
            pair.setsockopt(zmq.LINGER, 0)
            pair.connect(address)
            self._pairs[role] = pair

    def read(self) -> None:
        """Count the events that have come in."""
        for role, pair in self._pairs.items():
            for _ in range(MAX_EVENTS_PER_READ):
                try:
                    event = recv_monitor_message(pair, zmq.NOBLOCK)["event"]
                except zmq.Again:
                    break
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    count(self._counters.connected_count, role.value)
                elif event == zmq.EVENT_DISCONNECTED:
                    count(self._counters.disconnected_count, role.value)
                elif event & _FAILED:
                    count(self._counters.handshake_failed_count, role.value)

    def close(self) -> None:
        """Stop monitoring."""
        for role, pair in self._pairs.items():
            self._sockets[role].disable_monitor()
            pair.close()
        self._pairs.clear()
