"""Frames in shared memory that the GPU reads itself: real broker and producer, the cuda engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_broker import TIMEOUT_S, Listener, broker_settings, running_broker
from hr_clients import wait_for
from hr_gpu import RecordingDevice

import headrace
from headrace.broker.settings import ModelSettings
from headrace.broker.shell_settings import LocalModel
from headrace.protocol.messages import ImageInput, ModelSpec, SizeClassSpec, Status
from headrace.workers.cuda.arena_pins import MIN_ROW_BYTES, ArenaPins
from headrace.workers.cuda.engine import CudaEngine, CudaSettings
from headrace.workers.cuda.gate import Gate
from headrace.workers.devices import Device
from headrace.workers.process import WorkerSettings, make_shell

SIDE = 448
CLASS = SizeClassSpec("large", SIDE, SIDE, max_batch_size=4)
COUNT = 24


@pytest.mark.timeout(60)
def test_large_frames_are_read_where_the_producer_wrote_them(tmp_path: Path) -> None:
    """Each answer is its own frame's; the arena is registered once and given back in the end."""
    assert SIDE * SIDE * 3 >= MIN_ROW_BYTES
    gpu, gate = RecordingDevice(), Gate()
    pins = ArenaPins(gpu, gate)
    device = Device("cuda", "stand-in", lambda: CudaEngine(gpu, CudaSettings(slots=3), gate=gate), pins=pins)
    folder = tmp_path / "shm"
    folder.mkdir()
    path = hr_models.write(tmp_path, hr_models.mean_color())
    spec = ModelSpec("m", "1", image=ImageInput(), size_classes=(CLASS,))
    settings = broker_settings(ModelSettings(spec), local_models=(LocalModel("m", "1", path),))
    with (
        running_broker(replace(settings, shm_folder=folder)) as broker,
        Listener(broker.endpoints) as listener,
    ):
        shell = make_shell(
            WorkerSettings(
                broker.endpoints.frames, "cuda", cache_dir=str(tmp_path / "cache"), shm_folder=folder
            ),
            device,
        )
        thread = threading.Thread(target=shell.run, daemon=True)
        thread.start()
        with headrace.Producer(
            broker.endpoints.frames, lane="shm", shm_bytes=32 * 2**20, shm_folder=folder
        ) as producer:
            for number in range(COUNT):
                producer.push(np.full((SIDE, SIDE, 3), number, np.uint8), stream="cam")
            outcomes = sorted(listener.outcomes(COUNT), key=lambda outcome: outcome.seq)
            assert producer.flush(TIMEOUT_S).by_lane == {"shm": COUNT}
            assert pins.registered_count == 1
        shell.request_stop()
        thread.join(TIMEOUT_S)

    assert {outcome.status for outcome in outcomes} == {Status.OK}
    means = [np.frombuffer(outcome.payloads[0], "<f4") for outcome in outcomes]
    np.testing.assert_allclose(means, [[number] * 3 for number in range(COUNT)], atol=1e-3)
    wait_for(lambda: gpu.registered == {})  # by the thread that stages, as it ends
