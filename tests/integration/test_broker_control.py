"""Control calls over the socket: each method, its pages, its refusals."""

from __future__ import annotations

from pathlib import Path

import hr_broker as hb
import pytest
import zmq

from headrace.broker.shell_settings import LocalModel
from headrace.protocol.messages import Reject

pytestmark = pytest.mark.timeout(60)


def test_control_answers_every_method(tmp_path: Path) -> None:
    """status, positions, replay, fetch and drain over the socket."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"graph")
    local = LocalModel("m", "1", path)
    with (
        hb.running_broker(hb.broker_settings(local_models=(local,))) as broker,
        hb.Worker(broker.endpoints) as worker,
        hb.Listener(broker.endpoints, b"cam\0") as listener,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hb.Caller(broker.endpoints) as caller,
    ):
        producer.send(hb.frames(hb.frame("cam", 0), hb.frame("cam", 1)))
        hb.serve(worker, 2)
        listener.outcomes(2)

        status = caller.call("status")
        positions = caller.call("positions", topics=["cam\0", "nothing"])
        replay = caller.replay(stream="cam", boot=broker.endpoints.boot, first=0, last=9)
        fetched = caller.call("fetch", sha256=worker.setup.models[0].files[0].sha256, offset=1, nbytes=3)
        drained = caller.call("drain")
        producer.send(hb.frames(hb.frame("cam", 2)))
        reject = producer.expect(Reject)

    assert status.result["broker"]["addresses"]["frames"] == broker.endpoints.frames  # type: ignore[index,call-overload]
    assert status.result["account"]["ok"] == 2  # type: ignore[index,call-overload]
    assert positions.result["streams"] == {"cam": [0, 2]}
    assert [outcome.pub_seq for outcome in replay.outcomes] == [0, 1]
    assert (fetched.result, [bytes(payload) for payload in fetched.payloads]) == ({"total": 5}, [b"rap"])
    assert drained.result == {"unfinished": 0, "stop": False}
    assert reject.code == "draining"


@pytest.mark.parametrize(
    ("method", "params", "code", "named"),
    [
        (
            "reboot",
            {},
            "unknown_method",
            "there are commit, drain, fetch, positions, record, reload, replay, rollback, status",
        ),
        ("status", {"max_stream": 1}, "bad_params", "unknown parameter 'max_stream'"),
        ("positions", {}, "bad_params", "'topics' is missing"),
        ("positions", {"topics": [1]}, "bad_params", "'topics' is wrong"),
        ("positions", {"topics": [""] * 1_025}, "bad_params", "at most 1024"),
        ("replay", {"stream": "cam", "boot": 0, "first": -1, "last": 1}, "bad_params", "'first'"),
        ("replay", {"stream": "cam", "boot": 0, "first": True, "last": 1}, "bad_params", "'first'"),
        ("replay", {"stream": "cam", "boot": 0, "first": 0, "last": 2**64 - 1}, "bad_params", "'last'"),
        ("replay", {"stream": 5, "boot": 0, "first": 0, "last": 1}, "bad_params", "'stream'"),
        ("fetch", {"sha256": "00"}, "not_found", "no model file"),
        ("fetch", {"sha256": "00", "nbytes": 0}, "bad_params", "'nbytes'"),
        ("drain", {"stop": 1}, "bad_params", "'stop'"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(
    method: str, params: dict[str, object], code: str, named: str
) -> None:
    """Each parameter is checked; the answer names it."""
    with hb.running_broker() as broker, hb.Caller(broker.endpoints) as caller:
        reply = caller.call(method, **params)

    assert reply.code == code
    assert named in reply.message


def test_status_comes_in_pages() -> None:
    """However many streams there are, an answer stays small; the next page begins where the last ended."""
    with (
        hb.running_broker() as broker,
        hb.Listener(broker.endpoints) as listener,
        hb.Worker(broker.endpoints) as worker,
        hb.Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        hb.Caller(broker.endpoints) as caller,
    ):
        names = [f"cam-{number}" for number in range(5)]
        producer.send(hb.frames(*(hb.frame(name) for name in names)))
        hb.serve(worker, 5)
        listener.outcomes(5)

        pages, after = [], ""
        while True:
            page = caller.call("status", max_streams=2, streams_after=after).result
            pages.append(list(page["streams"]))  # type: ignore[arg-type]
            after = str(page["streams_next"])
            if not after:
                break

    assert pages == [names[:2], names[2:4], names[4:]]
