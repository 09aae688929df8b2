"""A broker with a journal over real sockets: started again, it knows what it has finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from hr_broker import (
    BrokerThread,
    Caller,
    Listener,
    Peer,
    Worker,
    broker_settings,
    frame,
    frames,
    running_broker,
    serve,
)
from hr_stand_in import StandIn

from headrace import Outcome, Subscriber
from headrace.broker.journal import Journal
from headrace.broker.metrics import render_metrics
from headrace.errors import JournalError
from headrace.protocol.messages import Batch, Credit, Endpoints, Hello, Reject, Status, Welcome

EPOCH = 2**64 - 3


def introduce(endpoints: Endpoints) -> Peer:
    producer = Peer(zmq.DEALER, endpoints.frames)
    producer.send(Hello(epoch=EPOCH))
    producer.expect(Welcome)
    return producer


def push(producer: Peer) -> None:
    """Four good frames, and between them one that no model takes."""
    for seq in range(5):
        model = "none" if seq == 2 else ""
        producer.send(frames(frame("cam", seq, epoch=EPOCH, model=model)))


def wait_finished(producer: Peer, count: int) -> Credit:
    while (credit := producer.expect(Credit)).finished < count:
        pass
    return credit


def run_once(path: Path) -> tuple[int, list[Outcome]]:
    """Run a broker until the five frames are finished; return its boot and what it published."""
    with (
        running_broker(broker_settings(journal=path)) as broker,
        Listener(broker.endpoints, b"cam\0") as listener,
        Worker(broker.endpoints) as worker,
        introduce(broker.endpoints) as producer,
    ):
        push(producer)
        serve(worker, 4)
        wait_finished(producer, 5)
        return broker.endpoints.boot, listener.outcomes(5)


def test_frames_sent_again_after_a_restart_are_not_run_again(tmp_path: Path) -> None:
    """Credit for the finished ones, the same reject for the refused one, no batch, nothing published."""
    path = tmp_path / "journal.db"
    run_once(path)

    with (
        running_broker(broker_settings(journal=path)) as broker,
        Listener(broker.endpoints, b"cam\0") as listener,
        Worker(broker.endpoints) as worker,
        introduce(broker.endpoints) as producer,
    ):
        push(producer)
        reject = producer.expect(Reject)
        credit = wait_finished(producer, 5)
        producer.send(frames(frame("cam", 5, epoch=EPOCH)))
        batch = worker.expect(Batch)
        worker.finish(batch)
        (outcome,) = listener.outcomes(1)

    assert (reject.seq, reject.code) == (2, "unknown_model")
    assert credit.streams == {"cam": 4}
    assert [one.seq for one in batch.frames] == [5]
    assert (outcome.seq, outcome.pub_seq, outcome.status) == (5, 0, Status.OK)


def test_earlier_boots_are_told_and_replayed(tmp_path: Path) -> None:
    """positions names them when asked, replay serves them, and a late subscriber gets them first."""
    path = tmp_path / "journal.db"
    first_boot, published = run_once(path)

    with running_broker(broker_settings(journal=path)) as broker, Caller(broker.endpoints) as caller:
        told = caller.call("positions", topics=["ca"], earlier=True).result
        plain = caller.call("positions", topics=["ca"]).result
        reply = caller.replay(stream="cam", boot=first_boot, first=0, last=9)
        lost = caller.replay(stream="cam", boot=first_boot ^ 1, first=0, last=9)
        journal = caller.call("status").result["journal"]
        with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
            got = [subscriber.get(5) for _ in range(5)]

    assert told["earlier_boots"] == [[first_boot, True]]
    assert told["earlier"] == {"cam": [[first_boot, 0, 5]]}
    assert told["streams"] == plain["streams"] == {"cam": [0, 0]}
    assert "earlier" not in plain
    assert (list(reply.outcomes), reply.missed, reply.has_more) == (published, (), False)
    assert (lost.outcomes, lost.missed) == ((), ((0, 10),))
    assert got == published
    assert isinstance(journal, dict)
    assert (journal["outcomes"], journal["damaged"]) == (5, 0)


def test_without_a_journal_positions_have_no_earlier_boots() -> None:
    """The parameter is taken; there is nothing to tell."""
    with running_broker() as broker, Caller(broker.endpoints) as caller:
        result = caller.call("positions", topics=[""], earlier=True).result

    assert set(result) == {"boot", "streams", "streams_next"}


def test_a_stream_that_only_the_journal_knows_is_listed(tmp_path: Path) -> None:
    """The core forgets an idle stream; what was recorded of it is told all the same."""
    path = tmp_path / "journal.db"
    first_boot, _ = run_once(path)

    with (
        running_broker(broker_settings(journal=path, core={"stream_idle_ms": 1})) as broker,
        Caller(broker.endpoints) as caller,
    ):
        while caller.call("status").result["streams"]:
            pass
        told = caller.call("positions", topics=["cam"], earlier=True).result

    assert told["streams"] == {"cam": [0, 0]}
    assert told["earlier"] == {"cam": [[first_boot, 0, 5]]}


def test_what_can_not_be_recorded_is_told_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: the broker ends with the reason; no subscriber and no producer has heard of it."""
    asked: list[int] = []

    def fail(_journal: Journal, outcomes: list[Outcome]) -> None:
        asked.append(len(outcomes))
        raise JournalError("planted: no space")

    monkeypatch.setattr(Journal, "append", fail)
    broker = BrokerThread(broker_settings(journal=tmp_path / "journal.db")).start()
    with (
        Listener(broker.endpoints, b"cam\0") as listener,
        Worker(broker.endpoints) as worker,
        introduce(broker.endpoints) as producer,
    ):
        producer.send(frames(frame("cam", 0, epoch=EPOCH)))
        serve(worker, 1)
        with pytest.raises(JournalError, match="no space"):
            broker.join()

        assert asked == [1]
        assert listener.has_nothing(0.05)
        while producer.socket.poll(50):
            assert not isinstance(producer.receive(), Credit)


def test_an_answer_holds_only_what_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay asked for in the very turn in which a frame ends: it is recorded before it is answered."""
    order: list[str] = []
    append = Journal.append

    def note(journal: Journal, outcomes: list[Outcome]) -> None:
        order.append(f"recorded {len(outcomes)}")
        append(journal, outcomes)

    monkeypatch.setattr(Journal, "append", note)
    with running_broker(broker_settings(journal=tmp_path / "journal.db")) as broker:
        control = broker.broker._shell._inbound._control
        core = control._core

        def note_replay(*arguments: object) -> object:
            answer = core.replay(*arguments)  # type: ignore[arg-type]
            order.append(f"told {len(answer[0])}")
            return answer

        monkeypatch.setattr(control, "_core", StandIn(core, replay=note_replay))
        with (
            Caller(broker.endpoints) as caller,
            Worker(broker.endpoints) as worker,
            introduce(broker.endpoints) as producer,
        ):
            producer.send(frames(frame("cam", 0, epoch=EPOCH)))
            worker.finish(worker.expect(Batch))
            params = {"stream": "cam", "boot": broker.endpoints.boot, "first": 0, "last": 0}
            while not caller.replay(**params).outcomes:
                pass

    assert order[order.index("told 1") - 1] in {"recorded 1", "told 0"}
    assert "recorded 1" in order[: order.index("told 1")]


def test_the_metrics_of_the_journal_are_there(tmp_path: Path) -> None:
    """Each bound has a metric beside it."""
    with running_broker(broker_settings(journal=tmp_path / "journal.db")) as broker:
        _, _, text = render_metrics(broker.broker._shell.snapshots)

    assert b"headrace_journal_bytes_limit 2.68435456e+08" in text
    assert b"headrace_journal_commits_total 0.0" in text
