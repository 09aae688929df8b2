"""Payloads in shared memory: a real producer, broker and worker on one host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import hr_models
import numpy as np
import pytest
import zmq
from hr_broker import TIMEOUT_S, BrokerThread, Listener, Peer, broker_settings, running_broker
from hr_clients import wait_for

import headrace
from headrace.arena import ArenaWriter
from headrace.broker.settings import ModelSettings
from headrace.broker.shell_settings import LocalModel
from headrace.errors import ArenaError, InvalidFrameError, NotDeliveredError
from headrace.host import host_key
from headrace.protocol.messages import (
    Frame,
    Frames,
    Hello,
    ImageInput,
    ModelSpec,
    Outcome,
    ShmRef,
    SizeClassSpec,
    Status,
    Welcome,
)
from headrace.workers.devices import choose_device
from headrace.workers.process import WorkerSettings, make_shell

CLASS = SizeClassSpec("small", 96, 96, max_batch_size=8)
SIDE = 96
NBYTES = SIDE * SIDE * 3
SHM_BYTES = 1024 * 1024


@dataclass
class Plant:
    """A broker and one CPU worker with the mean-colour model, and a folder for shared memory."""

    folder: Path
    broker: BrokerThread
    listener: Listener

    def producer(self, **options: object) -> headrace.Producer:
        made = headrace.Producer(
            self.broker.endpoints.frames,
            **{"lane": "auto", "shm_bytes": SHM_BYTES, "shm_folder": self.folder, **options},  # type: ignore[arg-type]
        )
        made.wait_connected(TIMEOUT_S)
        return made

    def outcomes(self, count: int) -> list[Outcome]:
        return sorted(self.listener.outcomes(count), key=lambda outcome: outcome.seq)

    def arenas(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


Grow = Callable[..., AbstractContextManager[Plant]]


@pytest.fixture
def grow(tmp_path: Path) -> Grow:
    """Return what starts a plant; ``broker`` and ``worker`` say whether each reads shared memory."""
    path = hr_models.write(tmp_path, hr_models.mean_color())
    folder = tmp_path / "shm"
    folder.mkdir()
    spec = ModelSpec("m", "1", image=ImageInput(), size_classes=(CLASS,))

    @contextmanager
    def start(*, broker: bool = True, worker: bool = True) -> Iterator[Plant]:
        settings = broker_settings(ModelSettings(spec), local_models=(LocalModel("m", "1", path),))
        with running_broker(replace(settings, shm_folder=folder if broker else None)) as running:
            shell = make_shell(
                WorkerSettings(
                    running.endpoints.frames,
                    "cpu",
                    cache_dir=str(tmp_path / "cache"),
                    shm_folder=folder if worker else None,
                ),
                choose_device("cpu", 1),
            )
            thread = threading.Thread(target=shell.run, daemon=True)
            thread.start()
            try:
                with Listener(running.endpoints) as listener:
                    yield Plant(folder, running, listener)
            finally:
                shell.request_stop()
                thread.join(TIMEOUT_S)

    return start


def picture(value: int) -> np.ndarray:
    """Noise whose mean is told by its number."""
    return np.random.default_rng(value).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def assert_means(outcomes: list[Outcome], pictures: list[np.ndarray], tolerance: float = 0.5) -> None:
    """Each outcome is that of its own frame: the mean of each channel is what was sent."""
    for outcome, sent in zip(outcomes, pictures, strict=True):
        assert outcome.status is Status.OK, (outcome.code, outcome.message)
        found = np.frombuffer(outcome.payloads[0], "<f4")
        assert np.abs(found - sent.mean((0, 1))).max() < tolerance


def test_arrays_images_and_slots_go_through_shared_memory(grow: Grow) -> None:
    """One copy into the slot, one out of it; a decoder's own writing saves the first."""
    pictures = [picture(seq) for seq in range(24)]
    with grow() as plant, plant.producer() as producer:
        for seq, sent in enumerate(pictures):
            if seq % 3 == 0:
                producer.push(sent, stream="cam")
            elif seq % 3 == 1:
                with producer.slot(sent.shape, stream="cam") as array:
                    array[:] = sent
            else:
                encoded = cv2.imencode(".png", cv2.cvtColor(sent, cv2.COLOR_RGB2BGR))[1].tobytes()
                producer.push(encoded, stream="cam")
        assert_means(plant.outcomes(len(pictures)), pictures)

        account = producer.flush(TIMEOUT_S)
        assert account.by_lane == {"shm": 24}
        assert account.by_status == {"ok": 24}
        assert len(plant.arenas()) == 1
    assert plant.arenas() == []


def test_the_asyncio_twin_has_slots_too(grow: Grow) -> None:
    """Awaited instead of waited for; a block that fails pushes nothing."""
    pictures = [picture(seq) for seq in range(6)]

    async def push(plant: Plant) -> headrace.ProducerAccount:
        async with headrace.AsyncProducer(
            plant.broker.endpoints.frames, lane="shm", shm_bytes=4 * NBYTES, shm_folder=plant.folder
        ) as producer:
            for sent in pictures:
                async with producer.slot(sent.shape, stream="cam", timeout=TIMEOUT_S) as array:
                    array[:] = sent
            with pytest.raises(ZeroDivisionError):
                async with producer.slot((8, 8, 3), stream="cam"):
                    _ = 1 / 0
            return await producer.flush(TIMEOUT_S)

    with grow() as plant:
        account = asyncio.run(push(plant))
        assert_means(plant.outcomes(len(pictures)), pictures)

    assert account.by_lane == {"shm": 6}
    assert account.unfinished == 0


def test_slots_are_checked_as_pushes_are(grow: Grow) -> None:
    """Before memory of that size is made."""
    with grow() as plant, plant.producer() as producer:
        for shape, dtype, stream, words in (
            ((8, 0, 3), "uint8", "cam", "shape"),
            ((), "uint8", "cam", "axes"),
            ((8, 8, 3), "bool", "cam", "dtype"),
            ((8, 8, 3), "nonsense", "cam", "dtype"),
            ((2**20, 2**20), "uint8", "cam", "limit"),
            ((8, 8, 3), "uint8", "", "stream"),
        ):
            with pytest.raises(InvalidFrameError, match=words), producer.slot(shape, dtype, stream=stream):
                pass
        assert producer.account.sent == 0
        with producer.slot((4, 4, 3), ">u2", stream="cam") as array:
            array[:] = 258
        assert array.dtype == "<u2"
        assert not array.flags.writeable


def test_a_full_arena_sends_frames_inline_and_counts_them(grow: Grow) -> None:
    """Nothing waits for a slot where there is another way."""
    pictures = [picture(seq) for seq in range(40)]
    with grow() as plant, plant.producer(shm_bytes=4 * NBYTES) as producer:
        for sent in pictures:
            producer.push(sent, stream="cam")
        assert_means(plant.outcomes(len(pictures)), pictures)

        account = producer.flush(TIMEOUT_S)
        assert account.by_lane["shm"] + account.by_lane["inline"] == 40
        assert account.by_lane["inline"] == account.arena_full


def test_lane_shm_waits_for_a_slot(grow: Grow) -> None:
    """The choice of that lane alone is kept to, also when the arena holds three frames."""
    pictures = [picture(seq) for seq in range(20)]
    with grow() as plant, plant.producer(lane="shm", shm_bytes=4 * NBYTES) as producer:
        for sent in pictures:
            producer.push(sent, stream="cam", timeout=TIMEOUT_S)
        assert_means(plant.outcomes(len(pictures)), pictures)

        assert producer.flush(TIMEOUT_S).by_lane == {"shm": 20}


def test_a_stale_generation_is_an_error_of_that_frame_alone(grow: Grow) -> None:
    """Its neighbours in the batch get their results."""
    pictures = [picture(seq) for seq in range(6)]
    with grow() as plant, Peer(zmq.DEALER, plant.broker.endpoints.frames) as peer:
        arena = ArenaWriter.create(SHM_BYTES, 5, plant.folder)
        try:
            peer.send(Hello(5, "p", host_key(plant.folder), arena.name))
            assert peer.expect(Welcome).is_shm_possible
            frames = []
            for seq, sent in enumerate(pictures):
                ref = arena.take(NBYTES)
                assert ref is not None
                arena.view(ref)[:] = sent.tobytes()
                if seq == 3:
                    ref = replace(ref, generation=ref.generation - 1)
                frames.append(Frame("cam", ref, NBYTES, sent.shape, seq=seq, epoch=5))
            frames[4] = replace(frames[4], payload=replace(_slot(frames[4]), offset=SHM_BYTES - NBYTES))
            peer.send(Frames(tuple(frames)))
            outcomes = plant.outcomes(6)

            assert [(o.status, str(o.code)) for o in outcomes[3:5]] == [(Status.ERROR, "stale_slot")] * 2
            assert_means(outcomes[:3] + outcomes[5:], pictures[:3] + pictures[5:])
        finally:
            arena.close()


def _slot(frame: Frame) -> ShmRef:
    assert isinstance(frame.payload, ShmRef)
    return frame.payload


def test_a_worker_without_shared_memory_gets_payloads_inline(grow: Grow) -> None:
    """Its host key is another one: the broker reads the mapping for it."""
    pictures = [picture(seq) for seq in range(12)]
    with grow(worker=False) as plant, plant.producer() as producer:
        for sent in pictures:
            producer.push(sent, stream="cam")
        assert_means(plant.outcomes(len(pictures)), pictures)

        assert producer.flush(TIMEOUT_S).by_lane == {"shm": 12}


def test_a_broker_without_shared_memory_gets_payloads_inline(
    grow: Grow, caplog: pytest.LogCaptureFixture
) -> None:
    """No arena is made for it, and it is no matter to warn of."""
    pictures = [picture(seq) for seq in range(8)]
    with caplog.at_level(logging.WARNING), grow(broker=False) as plant, plant.producer() as producer:
        for sent in pictures:
            producer.push(sent, stream="cam")
        assert_means(plant.outcomes(len(pictures)), pictures)

        assert producer.flush(TIMEOUT_S).by_lane == {"inline": 8}
        assert plant.arenas() == []
    assert "shared memory" not in caplog.text


def test_a_folder_that_is_too_small_is_said_once_and_frames_go_inline(
    grow: Grow, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has what is needed and what is free; nothing is lost."""
    about = os.statvfs("/")
    free_blocks = 16 * 1024 * 1024 // about.f_frsize
    small = os.statvfs_result((*about[:3], about.f_bfree, free_blocks, *about[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: small)
    pictures = [picture(seq) for seq in range(8)]
    with caplog.at_level(logging.WARNING), grow() as plant, plant.producer(shm_bytes=2**26) as producer:
        for sent in pictures:
            producer.push(sent, stream="cam")
        assert_means(plant.outcomes(len(pictures)), pictures)

        assert producer.flush(TIMEOUT_S).by_lane == {"inline": 8}
        assert plant.arenas() == []
        told = [record.getMessage() for record in caplog.records if "shared memory" in record.getMessage()]
        assert len(told) == 1
        assert str(2**26) in told[0]
        assert str(free_blocks * about.f_frsize) in told[0]

        with plant.producer(shm_bytes=2**26, lane="shm") as forced, pytest.raises(ArenaError, match="needed"):
            forced.push(pictures[0], stream="other")


def test_an_arena_of_another_epoch_is_not_taken(grow: Grow) -> None:
    """A producer can't name another one's memory."""
    with grow() as plant, Peer(zmq.DEALER, plant.broker.endpoints.frames) as peer:
        arena = ArenaWriter.create(SHM_BYTES, 6, plant.folder)
        try:
            peer.send(Hello(5, "p", host_key(plant.folder), arena.name))
            assert not peer.expect(Welcome).is_shm_possible
        finally:
            arena.close()


def test_a_killed_producers_accepted_frames_finish_and_its_arena_goes(grow: Grow) -> None:
    """The broker holds the file until then: a reclaim by anybody else leaves it alone."""
    pictures = [picture(seq) for seq in range(8)]
    with grow() as plant:
        with Peer(zmq.DEALER, plant.broker.endpoints.frames) as peer:
            arena = ArenaWriter.create(SHM_BYTES, 5, plant.folder)
            peer.send(Hello(5, "p", host_key(plant.folder), arena.name))
            peer.expect(Welcome)
            frames = []
            for seq, sent in enumerate(pictures):
                ref = arena.take(NBYTES)
                assert ref is not None
                arena.view(ref)[:] = sent.tobytes()
                frames.append(Frame("cam", ref, NBYTES, sent.shape, seq=seq, epoch=5))
            arena.drop_lock()  # as the kernel does at the owner's death
            assert headrace.arena.reclaim(plant.folder) == []
            peer.send(Frames(tuple(frames)))
            assert_means(plant.outcomes(len(pictures)), pictures)
            assert plant.arenas() == [arena.name]
        wait_for(lambda: plant.arenas() == [])


def test_a_producer_that_gives_up_leaves_its_arena_to_the_broker(grow: Grow) -> None:
    """Frames that the broker has are finished although their producer did not wait."""
    with grow() as plant:
        producer = plant.producer()
        sent = [picture(seq) for seq in range(30)]
        for one in sent:
            producer.push(one, stream="cam")
        with contextlib.suppress(NotDeliveredError):  # it may have been quick
            producer.close(timeout=0)
        assert {str(outcome.code) for outcome in plant.outcomes(1)} == {""}
        wait_for(lambda: plant.arenas() == [])
