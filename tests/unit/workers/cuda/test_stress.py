"""Device and completion thread at once, batches of all shapes, failures among them."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hr_gpu import Faults, RecordingDevice
from hr_gpu_site import GpuSite, colors, colors_of

from headrace.errors import ClosedError, DeviceError
from headrace.workers.engine import BatchOutputs, StagedBatch

SLOTS = 3
COUNT = 300


@pytest.mark.parametrize("seed", range(3))
def test_every_batch_ends_once_in_order_with_its_own_answer(seed: int, tmp_path: Path) -> None:
    """Memory runs out and comes back meanwhile, one bucket has no graph; then the device is lost: from there
    on nothing is given out."""
    rng = random.Random(seed)
    site = GpuSite(tmp_path, RecordingDevice(Faults(fail_capture={2})))
    site.load()
    site.device.is_sealed = True
    free_slots = threading.Semaphore(SLOTS)
    sent: list[tuple[StagedBatch, int, int]] = []
    ended: list[BatchOutputs] = []

    def complete() -> None:
        while True:
            try:
                outputs = site.engine.collect()
            except ClosedError:
                return
            site.give_back(sent[len(ended)][0])
            ended.append(outputs)
            free_slots.release()

    completion = threading.Thread(target=complete)
    completion.start()
    for number in range(COUNT):
        assert free_slots.acquire(timeout=20)
        if number == COUNT - 10:
            site.device.faults.dies_when_serving = True
        site.device.faults.memory_rows = rng.choice([None, None, None, 2, 1])
        count = rng.randint(1, 4)
        batch = site.stage(colors(count, number), rng.choice(["small", "large"]))
        sent.append((batch, count, number))
        try:
            site.engine.submit(batch)
        except DeviceError:  # the completion thread has met the fault
            sent.pop()
            break
    site.engine.close()
    completion.join(20)

    assert not completion.is_alive()
    assert [outputs.batch for outputs in ended] == [batch.batch for batch, *_ in sent]
    fatal = [outputs.is_fatal for outputs in ended]
    assert fatal == sorted(fatal)  # once fatal, for ever fatal
    assert any(fatal)
    assert any("out of device memory" in outputs.error for outputs in ended)
    for outputs, (_, count, number) in zip(ended, sent, strict=True):
        if not outputs.error:
            np.testing.assert_allclose(colors_of(outputs), colors(count, number), atol=1e-3)
