"""The plain-script producers and the subscriber of docs/protocol.md, run as they stand there.

They run against plain sockets here: what they send must decode, what they are sent they must understand.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import hr_wire
import zmq
from hr_scripts import WAIT_S, finished, node, running, script

from headrace.protocol import codec
from headrace.protocol.messages import Frame, Outcome, Outcomes, Reject, Status

LIMITS = hr_wire.LIMITS


@contextlib.contextmanager
def bound(kind: int, folder: Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    address = f"ipc://{folder}/socket"
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = WAIT_S * 1000
        socket.bind(address)
        yield socket, address


def assert_ten_frames(frames: list[object]) -> None:
    assert [type(frame) for frame in frames] == [Frame] * 10
    assert {(frame.stream, frame.shape, frame.nbytes) for frame in frames} == {("cam-1", (48, 64, 3), 9216)}


def test_the_push_script_sends_ten_frames(tmp_path):
    """Ten lines of Python on the intake socket."""
    with (
        bound(zmq.PULL, tmp_path) as (socket, address),
        running(sys.executable, script("push.py", tmp_path), address, "cam-1") as process,
    ):
        frames = [
            frame
            for _ in range(10)
            for frame in codec.decode(socket.recv_multipart(), LIMITS, codec.FROM_INTAKE).frames
        ]
        finished(process)

    assert_ten_frames(frames)
    assert [bytes(frame.payload)[0] for frame in frames] == list(range(10))


def test_the_dealer_script_sends_ten_frames_and_prints_rejects(tmp_path):
    """Ten lines of Python on the frames socket, with the pixels in the header, and an answer."""
    with (
        bound(zmq.ROUTER, tmp_path) as (socket, address),
        running(sys.executable, script("dealer.py", tmp_path), address, "cam-1") as process,
    ):
        frames = []
        for _ in range(10):
            peer, *parts = socket.recv_multipart()
            frames += codec.decode(parts, LIMITS, codec.FROM_PRODUCER).frames
        reject = Reject("queue_full", "the queue is full", stream="cam-1", seq=9)
        socket.send_multipart([peer, *codec.encode(reject)])
        output = finished(process)

    assert_ten_frames(frames)
    assert "queue_full" in output


def test_the_node_script_sends_ten_frames(tmp_path):
    """The same in JavaScript, where node and its two packages are installed."""
    node_path = node()
    with (
        bound(zmq.PULL, tmp_path) as (socket, address),
        running(node_path, script("push.js", tmp_path), address, "cam-1") as process,
    ):
        frames = [
            frame
            for _ in range(10)
            for frame in codec.decode(socket.recv_multipart(), LIMITS, codec.FROM_INTAKE).frames
        ]
        finished(process)

    assert_ten_frames(frames)
    assert [bytes(frame.payload)[0] for frame in frames] == list(range(10))


def test_the_subscriber_script_prints_outcomes_of_its_stream_alone(tmp_path):
    """cam-1 is subscribed to; cam-10 is published as well and never arrives."""
    with (
        bound(zmq.XPUB, tmp_path) as (socket, address),
        running(sys.executable, script("subscribe.py", tmp_path), address, "cam-1", "2") as process,
    ):
        subscription = socket.recv()
        for number, stream in enumerate(("cam-10", "cam-1", "cam-1")):
            outcome = Outcome(stream, 1, number, 2, number, Status.OK, outputs={"mean": number})
            socket.send_multipart(codec.encode_published(Outcomes((outcome,))))
        output = finished(process)

    assert subscription == b"\x01cam-1\0"
    assert output.splitlines() == ["cam-1 1 ok {'mean': 1}", "cam-1 2 ok {'mean': 2}"]
