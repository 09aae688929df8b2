"""The broker as a process: signals, exit codes, ports given back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hr_broker as hb
import hr_broker_main
import psutil
import pytest
import structlog
import zmq
from hr_signals import insist

from headrace.errors import ConfigError
from headrace.protocol.messages import Batch, Endpoints, Goodbye, Hello, Reject, Status, Welcome

pytestmark = pytest.mark.timeout(60)


class BrokerProcess:
    """A started broker process and its addresses."""

    def __init__(self, **settings: object) -> None:
        arguments = [sys.executable, "-P", hr_broker_main.__file__, json.dumps(settings)]
        environment = os.environ | {"PYTHONPATH": str(Path(hr_broker_main.__file__).parent)}
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        try:
            self.endpoints = Endpoints(**json.loads(line))
        except ValueError:
            self.process.kill()
            said = self.process.communicate(timeout=10)[1]
            raise AssertionError(f"the broker did not say where it is, but {line!r}: {said}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=10)


@contextlib.contextmanager
def broker_process(**settings: object) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(**settings)
    try:
        yield broker
    finally:
        broker.process.kill()
        broker.process.communicate(timeout=10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_an_idle_broker_ends_at_once(number: int) -> None:
    """PRC-11, PRC-04: nothing waits in a call that a signal can't reach."""
    with broker_process() as broker:
        began = time.monotonic()
        broker.signal(number)
        code = broker.wait()
        took_s = time.monotonic() - began

    assert code == 0
    assert took_s < 2


def test_an_idle_broker_costs_next_to_nothing() -> None:
    """With a worker, a subscriber and a producer that do nothing: 0.006 of a CPU when this was written."""
    watched_s = 2.0
    with (
        broker_process(http_port=0) as broker,
        hb.Listener(broker.endpoints),
        hb.Worker(broker.endpoints),
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(Hello(epoch=1))
        producer.expect(Welcome)
        process = psutil.Process(broker.process.pid)
        before = process.cpu_times()
        time.sleep(watched_s)  # what is measured, not waited for
        after = process.cpu_times()

    used_s = after.user + after.system - before.user - before.system
    assert used_s < 0.05 * watched_s


def test_a_broker_with_connected_peers_ends_in_time() -> None:
    """PRC-11: a producer, a subscriber and a stopped worker do not hold it."""
    with (
        broker_process() as broker,
        hb.Listener(broker.endpoints),
        hb.Worker(broker.endpoints),
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(Hello(epoch=1))
        producer.expect(Welcome)
        began = time.monotonic()
        broker.signal(signal.SIGTERM)
        code = broker.wait()
        took_s = time.monotonic() - began
        producer.expect(Goodbye)

    assert code == 0
    assert took_s < 2


def test_a_first_signal_drains() -> None:
    """What was admitted before SIGTERM is finished and published before the process ends."""
    with (
        broker_process() as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame("cam", 0)))
        batch = worker.expect(Batch)
        broker.signal(signal.SIGTERM)
        assert broker.process.poll() is None
        worker.finish(batch)
        (outcome,) = listener.outcomes(1)

        assert broker.wait() == 0
    assert outcome.status is Status.OK


def test_a_second_signal_ends_it_at_once() -> None:
    """Somebody who asks twice does not want to wait for the grace time."""
    with (
        broker_process(grace_ms=60_000) as broker,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(Hello(epoch=1))
        producer.expect(Welcome)
        producer.send(hb.frames(hb.frame("cam", 0, epoch=1)))
        worker.expect(Batch)
        broker.signal(signal.SIGTERM)
        producer.send(hb.frames(hb.frame("cam", 1, epoch=1)))
        producer.expect(Reject)  # the first signal has been taken

        assert insist(broker.process, signal.SIGTERM, 10) == 128 + signal.SIGTERM


def test_only_loopback_listens() -> None:
    """SEC-02: of all that the process listens on, nothing can be reached from another machine."""
    with broker_process(http_port=0) as broker:
        listening = [
            connection.laddr.ip
            for connection in psutil.Process(broker.process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]

    assert len(listening) == 6
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_killed_brokers_ports_are_free_at_once() -> None:
    """PRC-05: the next broker binds the same port; a third is told which process holds it."""
    with broker_process() as first:
        port = first.endpoints.frames
        first.process.kill()
        first.process.wait(timeout=10)

        with broker_process(frames=port) as second:
            assert second.endpoints.frames == port
            with pytest.raises(ConfigError, match=f"is taken by process {second.process.pid} "):
                hb.BrokerThread(hb.broker_settings(frames=port)).start()


def test_a_killed_brokers_ipc_paths_are_taken_over(tmp_path: Path) -> None:
    """PRC-05: files left by kill -9 do not stop the next start."""
    addresses = hb.ipc_addresses(tmp_path)
    with broker_process(**addresses) as first:
        first.process.kill()
        first.process.wait(timeout=10)
        assert (tmp_path / "frames").exists()

        with broker_process(**addresses) as second, hb.Caller(second.endpoints) as caller:
            assert caller.call("status").code == ""


def test_a_loop_that_raises_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a half-dead broker: the exit code says that it was a bug."""
    from headrace.broker import core, process

    def explode(*_args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(core.BrokerCore, "handle", explode)

    with structlog.testing.capture_logs() as logs:
        code = process.run(hb.broker_settings())

    assert code == 70
    assert [line["event"] for line in logs] == ["broker ready", "broker loop failed"]
