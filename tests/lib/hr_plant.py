"""A real broker, real workers and raw sockets to them: what a field case needs from pixel to result.

The broker runs in a thread. Workers run in threads too, where a case may replace their engine, or as
processes, where a case looks at the process itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hr_models
import numpy as np
import onnx
import zmq
from hr_broker import TIMEOUT_S, BrokerThread, Caller, Listener, Peer, broker_settings, running_broker
from hr_clients import wait_for

from headrace.broker.settings import ClassPolicy, ModelSettings
from headrace.broker.shell_settings import LocalModel
from headrace.protocol import codec
from headrace.protocol.messages import (
    Endpoints,
    Frame,
    Frames,
    ImageInput,
    ModelSpec,
    Outcome,
    SizeClassSpec,
    Status,
)
from headrace.workers.devices import Device, choose_device
from headrace.workers.process import WorkerSettings, make_shell

#: Long enough for the frames of one message to share a batch, short enough not to be felt.
WINDOW = ClassPolicy("window", 20.0)

ADAPTIVE = ClassPolicy()

#: How much longer than by the clock alone something may take on a busy machine.
SLACK_US = 50_000

#: Frames of one message: the protocol's default limit.
MAX_BUNDLE = 256

#: One class, so that all frames of a case can share a batch.
CLASS = SizeClassSpec("small", 48, 64, max_batch_size=8)


@dataclass(frozen=True)
class PlantModel:
    """A model of the broker; ``local`` is None for an emulated one."""

    settings: ModelSettings
    local: LocalModel | None = None


def onnx_model(
    folder: Path,
    graph: onnx.ModelProto,
    *classes: SizeClassSpec,
    name: str = "m",
    policy: ClassPolicy = WINDOW,
    **fields: Any,
) -> PlantModel:
    """Write a graph and return it as a model of images, size class CLASS unless others are given.
    ``image=None`` makes it a model of plain tensors."""
    fields = {"image": ImageInput(), **fields}
    classes = classes or ((CLASS,) if fields["image"] is not None else ())
    path = hr_models.write(folder / name, graph)
    spec = ModelSpec(name, "1", size_classes=classes, **fields)
    return PlantModel(ModelSettings(spec, {"": policy}), LocalModel(name, "1", path))


class ThreadWorker:
    """A worker in a thread of the test. ``exit_code`` is set when it has ended."""

    def __init__(
        self, endpoints: Endpoints, folder: Path, device: Device | None = None, **fields: Any
    ) -> None:
        settings = WorkerSettings(endpoints.frames, "cpu", cache_dir=str(folder / "cache"), **fields)
        self.exit_code: int | None = None
        self._shell = make_shell(settings, device or choose_device("cpu", 1))
        self._thread = threading.Thread(target=self._main, name="real-worker", daemon=True)

    def _main(self) -> None:
        self.exit_code = self._shell.run()

    def run_to_its_end(self) -> int | None:
        """Start it and return the code it ends with by itself."""
        self._thread.start()
        self._thread.join(TIMEOUT_S)
        return self.exit_code

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.request_stop()
        self._thread.join(TIMEOUT_S)
        if kind is None:
            assert self.exit_code == 0, f"the worker ended with {self.exit_code}"


class ProcessWorker:
    """``headrace worker`` as a process; killed at the latest when the block is left."""

    def __init__(self, endpoints: Endpoints, folder: Path, *arguments: str, cwd: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stderr = (folder / "stderr").open("w+b")
        command = ["worker", "--connect", endpoints.frames, "--device", "cpu", "--threads", "1", *arguments]
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", *command],
            stderr=self._stderr,
            env={**os.environ, "HEADRACE_CACHE": str(folder / "cache")},
            cwd=cwd,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def stderr(self) -> str:
        self._stderr.flush()
        return Path(self._stderr.name).read_text(errors="replace")

    def wait(self) -> int:
        return self.popen.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.popen.kill()
        self.popen.wait(TIMEOUT_S)
        if error is not None:
            error.add_note(f"stderr of the worker:\n{self.stderr()}")
        self._stderr.close()


@dataclass
class Plant:
    """A broker with its workers; a script's DEALER, a subscriber to everything, a caller of control."""

    broker: BrokerThread
    producer: Peer
    listener: Listener
    caller: Caller
    _seen: dict[tuple[str, int, int], Outcome] = field(default_factory=dict)
    _next_seq: int = 0

    @property
    def endpoints(self) -> Endpoints:
        return self.broker.endpoints

    def outcomes(self, *frames: Frame, bundle: int = MAX_BUNDLE) -> list[Outcome]:
        """Send frames on stream ``cam``, up to ``bundle`` of them in one message; return their outcomes in
        the order of the frames."""
        first = self._next_seq
        self._next_seq += len(frames)
        numbered = [replace(f, stream="cam", seq=first + i, epoch=1) for i, f in enumerate(frames)]
        for start in range(0, len(numbered), bundle):
            self.producer.send(Frames(tuple(numbered[start : start + bundle])))
        return self.collect(*(("cam", first + i) for i in range(len(frames))))

    def outcomes_of_altered(self, frame: Frame, old: bytes, new: bytes) -> list[Outcome]:
        """Send a frame in whose header ``old``, which is there once, is replaced; return its outcome."""
        seq = self._next_seq
        self._next_seq += 1
        header, *payloads = codec.encode(Frames((replace(frame, stream="cam", seq=seq, epoch=1),)))
        assert bytes(header).count(old) == 1
        self.producer.send_parts(bytes(header).replace(old, new), *map(bytes, payloads))
        return self.collect(("cam", seq))

    def collect(self, *frames: tuple[str, int], epoch: int = 1) -> list[Outcome]:
        """Wait for the outcomes of (stream, seq) and return them in this order; others are kept."""
        keys = [(stream, epoch, seq) for stream, seq in frames]
        while any(key not in self._seen for key in keys):
            for outcome in self.listener.outcomes(1):
                key = (outcome.stream, outcome.epoch, outcome.seq)
                assert key not in self._seen, f"a second outcome of {key}"
                self._seen[key] = outcome
        return [self._seen.pop(key) for key in keys]

    def status(self) -> dict[str, Any]:
        return dict(self.caller.call("status").result)

    def ready_workers(self) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["state"] == "ready"]

    def wait_for_workers(self, count: int = 1) -> None:
        wait_for(lambda: len(self.ready_workers()) == count, 30.0)

    def assert_account_adds_up(self) -> None:
        """Everything that was received has its end, and exactly one."""
        account = self.status()["account"]
        ends = sum(account[status] for status in ("ok", "error", "expired", "superseded"))
        assert account["unfinished"] == 0, account
        assert account["accepted"] == ends, account
        assert account["received"] == ends + account["rejected"] + account["duplicates"], account


@contextlib.contextmanager
def open_plant(*models: PlantModel, core: dict[str, Any] | None = None, **shell: Any) -> Iterator[Plant]:
    """Run a broker with these models and no worker."""
    local = tuple(model.local for model in models if model.local is not None)
    settings = broker_settings(*(m.settings for m in models), core=core, local_models=local, **shell)
    with (
        running_broker(settings) as broker,
        Listener(broker.endpoints, RCVHWM=0) as listener,
        Peer(zmq.DEALER, broker.endpoints.frames) as producer,
        Caller(broker.endpoints) as caller,
    ):
        yield Plant(broker, producer, listener, caller)


@contextlib.contextmanager
def running_plant(
    folder: Path, *models: PlantModel, device: Device | None = None, core: dict[str, Any] | None = None
) -> Iterator[Plant]:
    """Run a broker with these models and one worker in a thread, which is ready."""
    with open_plant(*models, core=core) as plant, ThreadWorker(plant.endpoints, folder, device):
        plant.wait_for_workers()
        yield plant


def tensor(outcome: Outcome, name: str = "") -> np.ndarray[Any, Any]:
    """Return one output of an ok outcome, the first one by default."""
    assert outcome.status is Status.OK, (outcome.code, outcome.message)
    index = next(i for i, spec in enumerate(outcome.tensors) if name in {"", spec.name})
    spec = outcome.tensors[index]
    return np.frombuffer(outcome.payloads[index], spec.dtype).reshape(spec.shape)


def mean(outcome: Outcome) -> list[int]:
    """Return the mean of each channel that the model saw, rounded."""
    return [round(float(value)) for value in tensor(outcome)]


def solid(red: int, green: int, blue: int, height: int = 48, width: int = 64) -> np.ndarray[Any, Any]:
    """Return an image of one colour, uint8 [height, width, 3]."""
    return np.full((height, width, 3), (red, green, blue), np.uint8)
