"""/metrics, /healthz and /readyz of a running broker."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request

import hr_broker as hb
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from headrace.broker import http as broker_http
from headrace.broker import snapshot
from headrace.broker.http import STALLED_S, HttpServer, health
from headrace.errors import ConfigError
from headrace.protocol.messages import Batch, Status, Telemetry

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each scrape take its own snapshot."""
    monkeypatch.setattr(snapshot, "MIN_AGE_NS", 0)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return every sample as {(name, label value, ...): value}."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_show_the_account_and_the_classes() -> None:
    """accepted = ok + error + expired + superseded + unfinished, from the text alone."""
    with (
        hb.running_broker(hb.broker_settings(http_port=0)) as broker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
    ):
        producer.send(hb.frames(hb.frame("cam", 0), hb.frame("cam", 1, model="none")))
        producer.send_parts(b"\xc1")
        batch = worker.expect(Batch)
        waiting = samples(get(f"{broker.endpoints.http}/metrics")[1])
        worker.finish(batch)
        listener.outcomes(2)
        found = samples(get(f"{broker.endpoints.http}/metrics")[1])

    assert waiting["headrace_in_flight_frames", "m", "small", "1"] == 1
    assert waiting["headrace_unfinished_bytes",] == 8 * 8 * 3
    outcomes = {status: found["headrace_outcomes_total", status.value] for status in Status}
    accepted = found["headrace_frames_accepted_total",]
    assert accepted == sum(outcomes.values()) - outcomes[Status.REJECTED] == 1
    assert found["headrace_frames_unfinished",] == 0
    assert found["headrace_rejects_total", "unknown_model"] == 1
    assert found["headrace_misbehaved_total", "bad_msgpack"] == 1
    assert found["headrace_batches_total", "m", "small", "1"] == 1
    assert found["headrace_padding_waste_ratio", "m", "small", "1"] == pytest.approx(0.75)
    assert found["headrace_workers", "ready"] == 1
    assert found["headrace_published_outcomes_total",] == 2
    assert found["headrace_subscriptions",] == 1
    assert found["headrace_loop_turns_total",] > 0
    assert found["headrace_snapshot_age_seconds",] < 5


def test_subscriptions_are_counted_down_again() -> None:
    """A subscriber that went is no longer counted, killed or not."""
    with hb.running_broker(hb.broker_settings(http_port=0)) as broker:
        for _ in range(5):
            hb.Listener(broker.endpoints, b"cam\0").close()
        with hb.Listener(broker.endpoints, b"cam\0"):
            end = time.monotonic() + hb.TIMEOUT_S
            count = 0.0
            while count != 1 and time.monotonic() < end:
                count = samples(get(f"{broker.endpoints.http}/metrics")[1])["headrace_subscriptions",]

    assert count == 1


def test_connections_that_break_the_transport_are_counted() -> None:
    """SEC-04: ZeroMQ closes them without a word; the count by socket is what is seen of them."""
    with hb.running_broker(hb.broker_settings(http_port=0)) as broker:
        port = int(broker.endpoints.workers.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 5)
        found: dict[tuple[str, ...], float] = {}
        end = time.monotonic() + hb.TIMEOUT_S
        while ("headrace_handshakes_failed_total", "workers") not in found and time.monotonic() < end:
            found = samples(get(f"{broker.endpoints.http}/metrics")[1])

    assert found["headrace_handshakes_failed_total", "workers"] == 1


def test_what_a_worker_tells_of_its_device_is_shown() -> None:
    """Sums are counters, all else gauges; the label says what a figure is about."""
    with (
        hb.running_broker(hb.broker_settings(http_port=0)) as broker,
        hb.Worker(broker.endpoints) as worker,
    ):
        figures = {"gpu_busy_ratio": 0.5, "graph_replays_total/m:1 small x4": 12.0, "Not a name": 1.0}
        worker.send(Telemetry("w", figures))
        found: dict[tuple[str, ...], float] = {}
        end = time.monotonic() + hb.TIMEOUT_S
        while ("headrace_worker_gpu_busy_ratio", "", "w") not in found and time.monotonic() < end:
            text = get(f"{broker.endpoints.http}/metrics")[1]
            found = samples(text)

    assert found["headrace_worker_gpu_busy_ratio", "", "w"] == 0.5
    assert found["headrace_worker_graph_replays_total", "m:1 small x4", "w"] == 12
    assert "Not a name" not in text


def test_ready_means_a_worker_for_each_model() -> None:
    """/readyz names what is missing; /healthz is well all the time."""
    settings = hb.broker_settings(hb.emulated_model("a"), hb.emulated_model("b"), http_port=0)
    with hb.running_broker(settings) as broker:
        before = get(f"{broker.endpoints.http}/readyz")
        health_before = get(f"{broker.endpoints.http}/healthz")
        with hb.Worker(broker.endpoints, slots=1) as worker:
            with hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer:
                producer.send(hb.frames(hb.frame("cam", 0, model="a")))
                worker.expect(Batch)  # READY has been taken
            after = get(f"{broker.endpoints.http}/readyz")

    assert before == (503, "no worker is ready for a:1, b:1\n")
    assert health_before == (200, "ok\n")
    assert after == (200, "ready\n")


def test_a_draining_broker_is_not_ready() -> None:
    """A load balancer sends nothing more to a broker that drains."""
    with (
        hb.running_broker(hb.broker_settings(http_port=0)) as broker,
        hb.Worker(broker.endpoints),
        hb.Caller(broker.endpoints) as caller,
    ):
        caller.call("drain")

        assert get(f"{broker.endpoints.http}/readyz") == (503, "draining\n")


def test_other_paths_are_told_what_there_is() -> None:
    """A person who guesses gets the list."""
    with hb.running_broker(hb.broker_settings(http_port=0)) as broker:
        status, text = get(f"{broker.endpoints.http}/")
        connection = http.client.HTTPConnection(broker.endpoints.http.removeprefix("http://"), timeout=5)
        connection.request("HEAD", "/healthz")
        head = connection.getresponse()
        connection.close()

    assert (status, text) == (404, "not here; there are /metrics, /healthz, /readyz\n")
    assert (head.status, head.read()) == (200, b"")


def test_a_stalled_loop_is_ill() -> None:
    """/healthz says 503 once the loop has stood still for some seconds."""
    now_ns = time.monotonic_ns()

    status, _, body = health(now_ns - int((STALLED_S + 1) * 1e9))

    assert status == 503
    assert b"stood still" in body
    assert health(now_ns)[0] == 200


def test_the_taken_http_port_is_named() -> None:
    """The error names the key, and nothing of the broker stays bound."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"broker\.http_port = {port}.* is taken by process"):
            hb.BrokerThread(hb.broker_settings(http_port=port)).start()


def test_clients_beyond_the_bound_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are bounded: one client too many finds its connection closed, the others are answered."""
    monkeypatch.setattr(broker_http, "MAX_CLIENTS", 2)
    release = threading.Event()
    is_inside = threading.Semaphore(0)

    def slow() -> broker_http.Answer:
        is_inside.release()
        release.wait(hb.TIMEOUT_S)
        return 200, broker_http.PLAIN, b"ok"

    server = HttpServer("127.0.0.1", 0)
    server.serve({"/slow": slow})
    try:
        clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(3)]
        for client in clients[:2]:
            client.request("GET", "/slow")
            assert is_inside.acquire(timeout=hb.TIMEOUT_S)
        clients[2].request("GET", "/slow")
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            clients[2].getresponse()
        release.set()

        assert [client.getresponse().status for client in clients[:2]] == [200, 200]
        for client in clients:
            client.close()
    finally:
        release.set()
        server.close()


def test_the_server_closes_whether_it_served_or_not() -> None:
    """A broker that failed to start after the port was bound gives it back."""
    server = HttpServer("*", 0)
    port = server.port

    server.close()

    with socket.create_server(("127.0.0.1", port)):
        pass
