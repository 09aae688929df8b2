"""Clients over connections that are cut, or that swallow everything without a word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hr_broker import BrokerThread, running_broker
from hr_clients import AutoWorker, Relay, image, wait_for

from headrace import Missed, Outcome, Producer, Subscriber, addresses
from headrace.clients import producer_session
from headrace.protocol.messages import Endpoints


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    with running_broker() as running, AutoWorker(running.endpoints):
        yield running


def reroute(monkeypatch: pytest.MonkeyPatch, **relays: Relay) -> None:
    """Let discovery find the relays in place of the broker's own addresses."""
    found = addresses.discover

    def discover(*args: object, **kwargs: object) -> Endpoints:
        endpoints = found(*args, **kwargs)  # type: ignore[arg-type]
        return replace(endpoints, **{name: relay.endpoint for name, relay in relays.items()})  # type: ignore[arg-type]

    monkeypatch.setattr(addresses, "discover", discover)


def read_all(subscriber: Subscriber, count: int) -> list[Outcome | Missed]:
    return [subscriber.get(20) for _ in range(count)]


def test_frames_pass_once_over_a_connection_that_is_cut_again_and_again(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent again is recognised by the same broker: one outcome a frame, none lost."""
    with (
        Subscriber(broker.endpoints.frames, stream="cam") as subscriber,
        Relay(broker.endpoints.frames) as relay,
    ):
        reroute(monkeypatch, frames=relay)
        with Producer(broker.endpoints.frames) as producer:
            for value in range(400):
                producer.push(image(value), stream="cam")
                if value % 80 == 79:
                    # With up to 60 frames under way, and some finished since the last cut.
                    wait_for(lambda least=value - 60: producer.account.finished > least)  # type: ignore[misc]
                    relay.cut()
            account = producer.flush(20)

        items = read_all(subscriber, 400)
        assert subscriber.account.behind == 0

    assert [item.seq for item in items if isinstance(item, Outcome)] == list(range(400))
    assert (account.finished, account.unfinished) == (400, 0)
    assert sum(account.by_status.values()) + account.unknown == 400
    assert relay.cut_count >= 4
    assert account.sessions > 1


@pytest.mark.parametrize("cut", ["results", "control"])
def test_outcomes_pass_once_over_a_connection_that_is_cut_again_and_again(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """What was published meanwhile is fetched; nothing comes twice, nothing is missed."""
    with Producer(broker.endpoints.frames) as producer, Relay(getattr(broker.endpoints, cut)) as relay:
        producer.wait_connected(5)
        reroute(monkeypatch, **{cut: relay})
        with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
            items: list[Outcome | Missed] = []
            for round_ in range(5):
                for value in range(60):
                    producer.push(image(value), stream="cam", seq=round_ * 60 + value)
                relay.cut()
                items += read_all(subscriber, 60)
            account = subscriber.account

    assert [item.seq for item in items if isinstance(item, Outcome)] == list(range(300))
    assert (account.missed, account.missed_unknown, account.duplicates) == (0, 0, 0)
    assert account.sessions > 1


def test_a_link_that_swallows_everything_is_noticed_by_heartbeats(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ-11, the client's half: no FIN, no RST, no bytes; the producer leaves within three heartbeats and
    goes on over a fresh connection."""
    with Relay(broker.endpoints.frames) as relay:
        reroute(monkeypatch, frames=relay)
        with Producer(broker.endpoints.frames) as producer:
            producer.wait_connected(5)
            relay.is_swallowing.set()
            producer.push(image(1), stream="cam")

            wait_for(lambda: not producer.is_connected)
            relay.is_swallowing.clear()
            relay.cut()
            account = producer.flush(10)

    assert account.finished == 1
    assert producer_session.HEARTBEATS_MISSED == 3
