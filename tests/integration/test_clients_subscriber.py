"""Subscriber against a real broker over real sockets."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hr_broker import BrokerThread, broker_settings, emulated_model, running_broker
from hr_clients import AutoWorker, echo, image, unused_port, wait_for

from headrace import Missed, Outcome, Producer, Subscriber
from headrace.errors import ClosedError, ConfigError, RequestTimeoutError, UnreachableError
from headrace.protocol.messages import SizeClassSpec


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    with running_broker() as running:
        yield running


@pytest.fixture
def worker(broker: BrokerThread) -> Iterator[AutoWorker]:
    with AutoWorker(broker.endpoints) as running:
        yield running


def push(broker: BrokerThread, *streams: str, count: int, side: int = 8) -> None:
    with Producer(broker.endpoints.frames) as producer:
        for value in range(count):
            for stream in streams:
                producer.push(image(value, side), stream=stream)


def test_what_is_pushed_right_after_subscribing_comes(broker: BrokerThread, worker: AutoWorker) -> None:
    """ZMQ-01: 30 fresh subscribers, 15 frames each pushed in the same instant: 0 to 14, every time."""
    with Producer(broker.endpoints.frames) as producer:
        producer.wait_connected(5)
        for run in range(30):
            with Subscriber(broker.endpoints.frames, stream=f"cam-{run}", start="now") as subscriber:
                for value in range(15):
                    producer.push(image(value), stream=f"cam-{run}")

                got = [
                    item.seq for item in (subscriber.get(5) for _ in range(15)) if isinstance(item, Outcome)
                ]

            assert got == list(range(15)), f"run {run}"
            assert subscriber.account.fetched == 0 or got


def test_a_topic_is_a_whole_stream_name(broker: BrokerThread, worker: AutoWorker) -> None:
    """ZMQ-19: cam1 alone, never cam10 or cam1/left; a prefix takes what begins so."""
    streams = ("cam1", "cam10", "cam1/left")
    with (
        Subscriber(broker.endpoints.frames, stream="cam1") as one,
        Subscriber(broker.endpoints.frames, prefix="cam1/") as under,
        Subscriber(broker.endpoints.frames) as every,
    ):
        push(broker, *streams, count=100)

        assert [one.get(5).stream for _ in range(100)] == ["cam1"] * 100
        assert [under.get(5).stream for _ in range(100)] == ["cam1/left"] * 100
        assert {every.get(5).stream for _ in range(300)} == set(streams)
        for subscriber in (one, under, every):
            with pytest.raises(RequestTimeoutError):
                subscriber.get(0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"stream": ""},
        {"stream": "a\0"},
        {"stream": "a" * 129},
        {"streams": []},
        {"streams": "cam"},
        {"streams": [3]},
        {"stream": "a", "prefix": "b"},
        {"stream": "a", "mode": "some"},
        {"stream": "a", "start": "later"},
    ],
    ids=str,
)
def test_a_wrong_subscription_is_refused(arguments: dict[str, object]) -> None:
    """ZMQ-19: an empty stream name would subscribe to all."""
    with pytest.raises(ConfigError, match="subscriber"):
        Subscriber("127.0.0.1:1", **arguments)  # type: ignore[arg-type]


def test_starting_late_gets_what_is_kept_and_names_the_rest(worker: AutoWorker) -> None:
    """Of 50 outcomes the broker keeps 20: 30 are missed, 20 come, in order."""
    with running_broker(broker_settings(core={"retention_frames": 20})) as small, AutoWorker(small.endpoints):
        push(small, "cam", count=50)

        with Subscriber(small.endpoints.control, stream="cam") as subscriber:
            first = subscriber.get(5)
            rest = [subscriber.get(5) for _ in range(20)]

    assert isinstance(first, Missed)
    assert (first.first, first.last, first.reason, first.count) == (0, 29, "left_ring", 30)
    assert [item.seq for item in rest if isinstance(item, Outcome)] == list(range(30, 50))
    assert subscriber.account.missed == 30
    assert subscriber.account.fetched == 20


def test_starting_now_leaves_the_past_out(broker: BrokerThread, worker: AutoWorker) -> None:
    """Only what is published after the constructor has returned."""
    push(broker, "cam", count=10)

    with Subscriber(broker.endpoints.frames, stream="cam", start="now") as subscriber:
        with Producer(broker.endpoints.frames) as producer:
            producer.push(image(0), stream="cam2")
            producer.push(image(0), stream="cam", seq=100)
            producer.flush(5)
        item = subscriber.get(5)

    assert isinstance(item, Outcome)
    assert item.seq in {0, 100}
    assert item.pub_seq == 10


def test_a_slow_subscriber_is_told_of_everything_a_fast_one_has_no_gap() -> None:
    """ZMQ-02 and the rule that nothing is silent: the slow one's outcomes and missed ranges tile the line;
    the fast one beside it gets every outcome."""
    total = 600  # outcomes of 100 kB: more than the buffers of ZeroMQ and of the kernel hold
    settings = broker_settings(
        emulated_model("m", SizeClassSpec("hd", 184, 184, 4)),
        core={"retention_frames": 100},
        results_queue_messages=10,
    )
    with running_broker(settings) as broker, AutoWorker(broker.endpoints, answer=echo):
        slow = Subscriber(broker.endpoints.frames, stream="cam", max_queued=4)
        fast = Subscriber(broker.endpoints.frames, stream="cam")
        fast_items: list[Outcome | Missed] = []

        def read_fast() -> None:
            while len(fast_items) < total:
                fast_items.append(fast.get(20))

        reader = threading.Thread(target=read_fast)
        reader.start()
        push(broker, "cam", count=total, side=184)
        reader.join(30)

        seen = 0
        missed = 0
        while seen < total:
            item = slow.get(10)
            if isinstance(item, Missed):
                assert item.first == seen
                assert item.last is not None
                missed += item.last - item.first + 1
                seen = item.last + 1
            else:
                assert item.pub_seq == seen
                seen += 1
        slow.close()
        fast.close()

    assert [item.seq for item in fast_items if isinstance(item, Outcome)] == list(range(total))
    assert missed == slow.account.missed
    assert missed > 0, "the slow reader was never behind: the case tests nothing"


def test_latest_keeps_whole_messages_of_every_stream(broker: BrokerThread, worker: AutoWorker) -> None:
    """ZMQ-18: a reader slower than two streams still gets both, the newest of each, whole."""
    with Subscriber(broker.endpoints.frames, streams=["a", "b"], mode="latest") as subscriber:
        push(broker, "a", "b", count=200)
        wait_for(lambda: subscriber.account.skipped >= 2 * 199)

        items = [subscriber.get(5), subscriber.get(5)]

    assert {item.stream for item in items} == {"a", "b"}
    for item in items:
        assert isinstance(item, Outcome)
        assert item.seq == 199
        assert item.outputs == {"seq": 199, "first": 199}
    assert subscriber.account.skipped == 2 * 199


def test_closing_wakes_a_reader(broker: BrokerThread) -> None:
    """PRC-11: a get without a limit ends when another thread closes."""
    subscriber = Subscriber(broker.endpoints.frames, stream="cam")
    ended: list[str] = []

    def read() -> None:
        for _ in subscriber:
            pass
        try:
            subscriber.get()
        except ClosedError as error:
            ended.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    started = time.monotonic()

    subscriber.close()
    reader.join(5)

    assert ended
    assert time.monotonic() - started < 2


def test_iteration_can_end_by_silence(broker: BrokerThread, worker: AutoWorker) -> None:
    """items() and outcomes() with a limit stop after so long without an item."""
    with Subscriber(broker.endpoints.frames, stream="cam") as subscriber:
        push(broker, "cam", count=3)

        assert [outcome.seq for outcome in subscriber.outcomes(timeout=1)] == [0, 1, 2]
        assert subscriber.account.delivered == 3


def test_nothing_there_is_unreachable() -> None:
    """The constructor does not wait longer than told and leaves no thread behind."""
    before = threading.active_count()
    with unused_port() as port, pytest.raises(UnreachableError, match=r"no subscription within 0\.3 s"):
        Subscriber(f"127.0.0.1:{port}", stream="cam", timeout=0.3)

    wait_for(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("has_broker", [True, False], ids=["idle-broker", "no-broker"])
def test_control_c_ends_an_idle_client(broker: BrokerThread, has_broker: bool) -> None:
    """PRC-11: within two seconds, also before the broker exists."""
    code = (
        "import sys, headrace\n"
        "producer = headrace.Producer(sys.argv[1])\n"
        "print('up', flush=True)\n"
        "with headrace.Subscriber(sys.argv[1], timeout=60) as subscriber:\n"
        "    subscriber.get()\n"
    )
    with unused_port() as port:
        address = broker.endpoints.frames if has_broker else f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        started = time.monotonic()

        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)

    assert time.monotonic() - started < 2
    assert "KeyboardInterrupt" in errors


def test_the_threads_of_clients_import_nothing(broker: BrokerThread, worker: AutoWorker) -> None:
    """PRC-11: a Ctrl-C that hits an import can leave the import lock taken; a thread that imported then would
    never end, and close() would wait for it in vain."""
    code = (
        "import sys, threading, headrace, numpy\n"
        "address, imported = sys.argv[1], set()\n"
        "def hook(event, arguments):\n"
        "    if event == 'import' and threading.current_thread() is not threading.main_thread():\n"
        "        imported.add(arguments[0])\n"
        "headrace.Producer, headrace.Subscriber, headrace.Client, headrace.Control\n"
        "sys.addaudithook(hook)\n"
        "with headrace.Subscriber(address, stream='cam') as subscriber:\n"
        "    with headrace.Producer(address) as producer, headrace.Client(address) as client:\n"
        "        image = numpy.zeros((8, 8, 3), numpy.uint8)\n"
        "        producer.push(image, stream='cam')\n"
        "        subscriber.get(10)\n"
        "        client.infer(image)\n"
        "print(sorted(imported))\n"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", code, broker.endpoints.frames],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_every_name_that_should_reach_a_broker_does(
    broker: BrokerThread, worker: AutoWorker, host: str
) -> None:
    """ZMQ-17: a broker on IPv4 loopback alone is reached by address and by name."""
    port = broker.endpoints.frames.rpartition(":")[2]
    with Subscriber(f"{host}:{port}", stream="cam") as subscriber, Producer(f"{host}:{port}") as producer:
        producer.push(image(1), stream="cam")

        assert subscriber.get(5).stream == "cam"
