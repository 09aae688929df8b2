"""Single turns of the broker's loop, driven by the test instead of a thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import hr_broker as hb
import zmq

from headrace.broker.core import BrokerCore
from headrace.broker.outbound import PREFIXES
from headrace.broker.process import Broker
from headrace.broker.sockets import Role
from headrace.broker.worker_registry import WorkerState
from headrace.protocol import codec
from headrace.protocol.messages import Batch, Heartbeat, Setup, WorkerHello


class TurnedBroker:
    """A broker whose turns the test takes."""

    def __init__(self, broker: Broker) -> None:
        self.endpoints = broker.endpoints
        self._shell = broker._shell

    @property
    def core(self) -> BrokerCore:
        return self._shell._core

    def turn_until(self, is_met: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + hb.TIMEOUT_S
        while not is_met():
            assert time.monotonic() < ends_at, "the broker never came to it"
            self._shell._wake()  # or an idle turn would wait for a second
            self._shell._turn()

    def wait_until_gone(self, peer: bytes) -> None:
        """Wait until the workers socket knows that a connection has ended; the core is not told."""
        ends_at = time.monotonic() + hb.TIMEOUT_S
        socket = self._shell._sockets[Role.WORKERS]
        parts = [peer.removeprefix(PREFIXES[Role.WORKERS]), *codec.encode(Heartbeat())]
        with contextlib.suppress(zmq.ZMQError):
            while time.monotonic() < ends_at:
                socket.send_multipart(parts)
                socket.poll(1)
            raise AssertionError("the connection did not end")

    def add_worker(self, name: str, instance: int) -> hb.Peer:
        """Connect a worker of one slot, up to a READY that the broker has taken."""
        peer = hb.Peer(zmq.DEALER, self.endpoints.workers)
        peer.send(WorkerHello(name, instance, "", "cpu", "emulated", "0"))
        self.turn_until(lambda: bool(peer.socket.poll(0)))
        peer.send(hb.ready_for(peer.expect(Setup).models, name, instance, slots=1))
        self.turn_until(lambda: self.core.workers.by_id[name].state is WorkerState.READY)
        return peer


@contextlib.contextmanager
def turned_broker() -> Iterator[TurnedBroker]:
    """Open a broker that sends no heartbeats of its own accord while a test lasts."""
    with Broker(hb.broker_settings(core={"heartbeat_ms": 60_000})) as broker:
        try:
            yield TurnedBroker(broker)
        finally:
            broker.stop()
            broker.run()  # closes what belongs to the loop


def test_frames_that_never_left_for_a_dead_worker_are_no_suspects() -> None:
    """ZMQ-08: three workers die between choice and send; the fourth gets all frames as one batch."""
    with turned_broker() as broker, hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer:
        for number in range(3):
            broker.add_worker(f"mortal-{number}", number + 1).close()
        for peer in broker.core.workers.by_peer:
            broker.wait_until_gone(peer)
        producer.send(hb.frames(hb.frame("cam", 0), hb.frame("cam", 1)))
        broker.turn_until(lambda: not broker.core.workers.by_peer)
        with broker.add_worker("steady", 9) as steady:
            broker.turn_until(lambda: bool(steady.socket.poll(0)))
            batch = steady.expect(Batch)

    assert [frame.seq for frame in batch.frames] == [0, 1]
    assert broker.core.recovery.requeued_count == 3 * len(batch.frames)
