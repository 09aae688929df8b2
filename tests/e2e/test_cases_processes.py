"""Field cases that are about processes and addresses: the commands as a person runs them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hr_cli
import hr_models
import hr_plant as hp
import hr_scripts
import hr_worker
import pytest
from hr_broker import broker_settings, running_broker
from hr_clients import AutoWorker, image

from headrace import Client, Control, Producer, Subscriber, addresses
from headrace.errors import RequestTimeoutError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import Outcome, Status

CONFIG = """
[broker]
port = 0
http = false
heartbeat_ms = 200
{broker}
[[models]]
name = "m"
[models.image]
[models.emulated]
base_ms = 1
per_frame_ms = 0
[[models.size_classes]]
height = 48
width = 64
{size_class}
"""


def config(folder: Path, broker: str = "", size_class: str = "") -> Path:
    path = folder / "test.toml"
    path.write_text(CONFIG.format(broker=broker, size_class=size_class))
    return path


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hp.Plant]:
    folder: Path = tmp_path_factory.mktemp("processes")
    with hp.running_plant(folder, hp.onnx_model(folder, hr_models.mean_color())) as running:
        yield running


# -- workers -------------------------------------------------------------------------------------------


def test_a_second_worker_of_one_id_is_told_and_ends(tmp_path: Path) -> None:
    """ZMQ-07: the first one is not disturbed: it goes on serving as the same process."""
    arguments = ("--id", "w1")
    with (
        hp.open_plant(hp.onnx_model(tmp_path, hr_models.mean_color())) as plant,
        hp.ProcessWorker(plant.endpoints, tmp_path / "1", *arguments) as first,
    ):
        plant.wait_for_workers()
        with hp.ProcessWorker(plant.endpoints, tmp_path / "2", *arguments) as second:
            code, said = second.wait(), second.stderr()
        (outcome,) = plant.outcomes(hr_worker.raw_frame(hp.solid(1, 2, 3)))
        workers = plant.ready_workers()

        assert first.is_alive
    assert code == ExitCode.CONFIG
    assert "give this one an id of its own" in said.splitlines()[-1]
    assert hp.mean(outcome) == [1, 2, 3]
    assert [(worker["id"], worker["pid"]) for worker in workers] == [("w1", first.pid)]


# -- control -------------------------------------------------------------------------------------------


def test_a_broker_that_was_stopped_answers_nobody_with_an_old_answer(tmp_path: Path) -> None:
    """ZMQ-10: a call to it times out; ten calls after SIGCONT each get their own answer."""
    with hr_cli.Process("broker", "--config", config(tmp_path), "--json") as broker:
        endpoints = broker.read_json()["endpoints"]
        with Control(endpoints["control"]) as control, Producer(endpoints["frames"]) as producer:
            boot, _ = control.positions()
            producer.wait_connected(5)
            broker.popen.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(RequestTimeoutError):
                    control.status(timeout=0.5)
            finally:
                broker.popen.send_signal(signal.SIGCONT)

            for number in range(10):
                stream = f"cam-{number}"
                producer.push(image(number), stream=stream, model="nobody")
                producer.flush(5)
                same_boot, positions = control.positions([f"{stream}\0"])
                assert (same_boot, positions) == (boot, {stream: 1})
            assert control.status()["account"]["rejected"] == 10
        assert broker.stop() == ExitCode.OK


# -- addresses -----------------------------------------------------------------------------------------


def ipc_path(folder: Path, length: int, letter: str = "x") -> str:
    """Return a path of so many bytes in UTF-8."""
    room = length - len(str(folder).encode()) - 1
    name = letter * (room // len(letter.encode()))
    return f"{folder}/{name}" + "y" * (room - len(name.encode()))


def test_an_ipc_path_of_107_bytes_starts(tmp_path: Path) -> None:
    """ZMQ-15: and is served."""
    path = ipc_path(tmp_path, 107)
    assert len(path.encode()) == 107
    with hr_cli.Process(
        "broker", "--config", config(tmp_path, f'frames = "ipc://{path}"'), "--json"
    ) as broker:
        assert broker.read_json()["endpoints"]["frames"] == f"ipc://{path}"
        assert hr_cli.run("status", "--connect", f"ipc://{path}", "--json").returncode == ExitCode.OK
        assert broker.stop() == ExitCode.OK


@pytest.mark.parametrize("letter", ["x", "é"], ids=["108-bytes", "short-in-characters"])
def test_a_longer_ipc_path_stops_the_start_at_once(tmp_path: Path, letter: str) -> None:
    """ZMQ-15: path, length and limit are named, and no socket is left behind."""
    path = ipc_path(tmp_path, 108 if letter == "x" else 120, letter)

    done = hr_cli.run("broker", "--config", config(tmp_path, f'frames = "ipc://{path}"'))

    assert done.returncode == ExitCode.CONFIG
    last_line = done.stderr.strip().splitlines()[-1]
    assert path in last_line
    assert str(len(path.encode())) in last_line
    assert "107" in last_line
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("127.0.0.1", ["127.0.0.1", "localhost"]),
        ("::1", ["[::1]", "localhost"]),
        ("localhost", ["127.0.0.1", "localhost"]),
        ("*", ["127.0.0.1", "[::1]", "localhost"]),
    ],
    ids=["ipv4", "ipv6", "localhost", "all"],
)
def test_a_broker_is_reached_by_every_name_that_should_reach_it(host: str, names: list[str]) -> None:
    """ZMQ-17: a client that says localhost finds a broker that listens on one of the two families."""
    with (
        running_broker(broker_settings(host=host, insecure=host == "*")) as broker,
        AutoWorker(addresses.discover(broker.endpoints.frames.replace("*", "localhost"))),
    ):
        port = broker.endpoints.frames.rpartition(":")[2]
        for name in names:
            with Client(f"{name}:{port}") as client:
                assert client.infer(image(1), timeout=10).status is Status.OK, name


# -- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, 1_000_000])
def test_a_batch_limit_that_is_none_is_refused_with_its_key(tmp_path: Path, limit: int) -> None:
    """BAT-11: the key, the value and the range in one line."""
    done = hr_cli.run("broker", "--config", config(tmp_path, size_class=f"max_batch_size = {limit}"))

    assert done.returncode == ExitCode.CONFIG
    assert f"max_batch_size = {limit}" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "keys",
    ["max_batch_size = 1", 'policy = "window"\nmax_queue_delay_ms = 0', "max_queue_delay_ms = 3600000"],
)
def test_extreme_limits_that_make_sense_start(tmp_path: Path, keys: str) -> None:
    """BAT-11: batches of one, no wait, an hour of wait."""
    with hr_cli.Process("broker", "--config", config(tmp_path, size_class=keys), "--json") as broker:
        broker.read_json()
        assert broker.stop() == ExitCode.OK


# -- the scripts of docs/protocol.md -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"), [("push.py", "intake"), ("dealer.py", "frames"), ("push.js", "intake")]
)
def test_a_script_of_ten_lines_gets_its_frames_run(
    plant: hp.Plant, tmp_path: Path, name: str, role: str
) -> None:
    """Ten frames of a script from the document, an outcome for each."""
    interpreter = hr_scripts.node() if name.endswith(".js") else sys.executable
    address, stream = getattr(plant.endpoints, role), f"script-{name}"
    with (
        Subscriber(plant.endpoints.frames, stream=stream) as subscriber,
        hr_scripts.running(interpreter, hr_scripts.script(name, tmp_path), address, stream) as process,
    ):
        outcomes = [subscriber.get(20) for _ in range(10)]
        hr_scripts.finished(process)

    assert [outcome.seq for outcome in outcomes if isinstance(outcome, Outcome)] == list(range(10))
    assert {outcome.status for outcome in outcomes if isinstance(outcome, Outcome)} == {Status.OK}


def test_the_subscriber_script_prints_the_outcomes_of_its_stream(plant: hp.Plant, tmp_path: Path) -> None:
    """The document's SUB script beside the client: it prints what was run."""
    path = hr_scripts.script("subscribe.py", tmp_path)
    before = len(plant.status()["streams"])
    with hr_scripts.running(sys.executable, path, plant.endpoints.results, "printed", "3") as process:
        # It does not say when it is subscribed: frames go on coming until it has had its three.
        with Producer(plant.endpoints.frames) as producer:
            while process.poll() is None:
                producer.push(image(1), stream="printed")
                producer.push(image(1), stream="printed-not")
                producer.flush(10)
        lines = hr_scripts.finished(process).splitlines()

    assert len(lines) == 3
    assert {(line.split()[0], line.split()[2]) for line in lines} == {("printed", "ok")}
    assert len(plant.status()["streams"]) == before + 2
