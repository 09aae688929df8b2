"""The order of copies and replays, and what becomes of it when somebody breaks it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hr_gpu import OrderError, RecordingDevice, RecordingSession
from hr_gpu_site import GpuSite, colors, colors_of

from headrace.workers.cuda import graphs
from headrace.workers.cuda.device import PLAIN, Binding, Block, Event, Lane, SessionOptions, Stream
from headrace.workers.cuda.gate import Gate
from headrace.workers.cuda.layout import arrange
from headrace.workers.cuda.slots import BrokenOrderError, Slot, Slots
from headrace.workers.onnx_model import OnnxModel


def serve(site: GpuSite) -> None:
    """Load, then keep three batches of several shapes on the device, twelve in all; check every answer."""
    site.load()
    site.device.is_sealed = True
    shapes = [("small", 1), ("large", 4), ("small", 3), ("large", 2)] * 3
    on_device = []
    for number, (size_class, count) in enumerate(shapes):
        if len(on_device) == 3:
            _collect(site, on_device.pop(0))
        batch = site.stage(colors(count, number), size_class)
        site.engine.submit(batch)
        on_device.append((batch, count, number))
    for item in on_device:
        _collect(site, item)


def _collect(site: GpuSite, item: tuple[Any, int, int]) -> None:
    batch, count, number = item
    outputs = site.engine.collect()
    assert outputs.batch == batch.batch
    np.testing.assert_allclose(colors_of(outputs), colors(count, number), atol=1e-3)
    site.give_back(batch)


def test_batches_of_all_shapes_overlap_in_an_order_that_holds(tmp_path: Path) -> None:
    """Nothing is allocated while batches are served, and every shape is a replay."""
    site = GpuSite(tmp_path)

    serve(site)

    usages = [bucket.usage for bucket in site.engine._models[next(iter(site.specs))].buckets.values()]
    runs_before = len(usages)  # each bucket ran once at its own addresses before it was captured
    assert sum(usage.plain_runs for usage in usages) == runs_before
    assert all(usage.replays > 0 for usage in usages)


def test_the_order_of_one_batch(tmp_path: Path) -> None:
    """Copy in, wait, copy to the bound input, replay, copy from the bound output, wait, copy out."""
    site = GpuSite(tmp_path)
    site.load()
    site.device.log.clear()

    site.ask(colors(1))

    steps = [line for line in site.device.log if "begun" not in line]
    bucket = site.bucket(1)
    in_bytes, out_bytes = bucket.layout_in.nbytes, bucket.layout_out.nbytes
    assert steps == [
        f"copy_in: copy {in_bytes}",
        "copy_in: record copied_in of slot 0",
        "compute: wait copied_in of slot 0",
        f"compute: copy {in_bytes}",
        f"compute: replay {bucket.graph_id}",
        f"compute: copy {out_bytes}",
        "compute: record computed of slot 0",
        "copy_out: wait computed of slot 0",
        f"copy_out: copy {out_bytes}",
        "copy_out: record copied_out of slot 0",
    ]


def test_ranges_name_every_step_of_a_batch(tmp_path: Path) -> None:
    """What a profiler's timeline shows."""
    site = GpuSite(tmp_path)
    site.load()
    site.device.ranges.clear()

    site.ask(colors(2))

    label = "mean:1 small x2"
    assert site.device.ranges == [f"{step} {label}" for step in ("copy-in", "replay", "copy-out", "publish")]


# -- planted bugs -----------------------------------------------------------------------------------------


class Saboteur(RecordingDevice):
    """A recording device between which and the engine one thing goes wrong, once ``is_active``."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: tuple[str, str] | None = None  # ("wait", "copied_in"): that call is left out
        self.moves: tuple[Lane, Lane] | None = None  # copies of one lane go to another
        self.is_copy_late = False  # the copy in comes after its event
        self.spoils_run: (
            Callable[[RecordingSession, Binding, int, bool], tuple[Binding, int, bool]] | None
        ) = None
        self._late: Callable[[], None] | None = None

    def wait(self, stream: Stream, event: Event) -> None:
        if not self._is_dropped("wait", event):
            super().wait(stream, event)

    def record(self, event: Event, stream: Stream) -> None:
        if not self._is_dropped("record", event):
            super().record(event, stream)
        if self._late is not None and event.name.startswith("copied_in"):
            late, self._late = self._late, None
            late()

    def synchronize(self, event: Event) -> None:
        if not self._is_dropped("synchronize", event):
            super().synchronize(event)

    def copy(self, target: Block, source: Block, nbytes: int, stream: Stream, *offsets: int) -> None:
        lane = stream.lane
        if self.moves is not None and lane is self.moves[0]:
            stream = self.stream(self.moves[1])
        if self.is_copy_late and lane is Lane.COPY_IN:
            self._late = lambda: RecordingDevice.copy(self, target, source, nbytes, stream, *offsets)
        else:
            super().copy(target, source, nbytes, stream, *offsets)

    def open_session(self, model: OnnxModel, options: SessionOptions) -> RecordingSession:
        session = super().open_session(model, options)
        honest = session.run

        def run(binding: Binding, graph_id: int, *, is_synchronised: bool) -> None:
            if self.spoils_run is not None:
                binding, graph_id, is_synchronised = self.spoils_run(
                    session, binding, graph_id, is_synchronised
                )
            honest(binding, graph_id, is_synchronised=is_synchronised)

        session.run = run  # type: ignore[method-assign]
        return session

    def _is_dropped(self, call: str, event: Event) -> bool:
        return self.drops == (call, event.name.split()[0])


def _drop(call: str, event: str) -> Callable[[Saboteur, pytest.MonkeyPatch], None]:
    def plant(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
        device.drops = (call, event)

    return plant


def _move(source: Lane, target: Lane) -> Callable[[Saboteur, pytest.MonkeyPatch], None]:
    def plant(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
        device.moves = (source, target)

    return plant


def _copy_late(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    device.is_copy_late = True


def _never_synchronise(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    device.spoils_run = lambda session, binding, graph_id, _: (binding, graph_id, False)


def _replay_another_graph(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    def spoil(
        session: RecordingSession, binding: Binding, graph_id: int, sync: bool
    ) -> tuple[Binding, int, bool]:
        known = sorted(session._graphs)
        return binding, (known[0] if graph_id != PLAIN and len(known) > 1 else graph_id), sync

    device.spoils_run = spoil


def _bind_again(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    """A binding made for the batch at hand: CUDA would go on reading the old addresses."""

    def spoil(
        session: RecordingSession, binding: Any, graph_id: int, sync: bool
    ) -> tuple[Binding, int, bool]:
        if graph_id not in session._graphs:
            return binding, graph_id, sync
        tensor = binding.inputs[0]
        place = arrange([]).bound(0)  # nothing more is bound
        block = device._inner.device_block(int(np.prod(tensor.shape)))
        moved = type(tensor)(tensor.name, tensor.dtype, tensor.shape, block.address)
        return session.bind((moved, *place), binding.outputs), graph_id, sync

    device.spoils_run = spoil


def _take_id_zero(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    device.spoils_run = lambda session, binding, graph_id, sync: (binding, max(graph_id, 0), sync)


def _capture_small_first(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    honest = graphs.choose
    patch.setattr(graphs, "choose", lambda c, b: (honest(c, b)[0][::-1], []))


def _one_slot_for_all(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    """A slot that is taken again while its batch is still on the device."""

    def take(self: Slots, bucket: Any) -> Slot:
        slot = self._slots[0]
        slot.bucket = bucket
        return slot

    patch.setattr(Slots, "take", take)


def _give_staging_back_early(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    from headrace.workers.cuda.engine import CudaEngine

    honest = CudaEngine.submit

    def submit(self: CudaEngine, batch: Any) -> None:
        honest(self, batch)
        pool = self.staging_pool()
        assert pool is not None
        pool.give_back(batch)

    patch.setattr(CudaEngine, "submit", submit)


def _allocate_per_batch(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    honest = Slots.launch

    def launch(self: Slots, slot: Slot, staged: Any, **how: Any) -> None:
        slot.stage_in = device.device_block(slot.stage_in.nbytes)
        honest(self, slot, staged, **how)

    patch.setattr(Slots, "launch", launch)


def _run_in_completion_thread(device: Saboteur, patch: pytest.MonkeyPatch) -> None:
    honest = Slots.finish
    errors: list[BaseException] = []

    def finish(self: Slots, slot: Slot, count: int) -> Any:
        bucket = slot.bucket
        assert bucket is not None

        def run() -> None:
            try:
                bucket.session.run(bucket.binding, bucket.graph_id, is_synchronised=False)
            except OrderError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(10)
        if errors:
            raise errors[0]
        return honest(self, slot, count)

    patch.setattr(Slots, "finish", finish)


PLANTED: dict[str, Callable[[Saboteur, pytest.MonkeyPatch], None]] = {
    "graph-does-not-wait-for-the-copy-in": _drop("wait", "copied_in"),
    "copy-out-does-not-wait-for-the-graph": _drop("wait", "computed"),
    "copy-in-is-not-marked": _drop("record", "copied_in"),
    "end-of-the-graph-is-not-marked": _drop("record", "computed"),
    "outputs-read-before-they-are-there": _drop("synchronize", "copied_out"),
    "end-of-the-copy-out-is-not-marked": _drop("record", "copied_out"),
    "copy-in-marked-before-it-is-made": _copy_late,
    "copies-of-the-graph-on-the-copy-in-stream": _move(Lane.COMPUTE, Lane.COPY_IN),
    "copy-out-on-the-copy-in-stream": _move(Lane.COPY_OUT, Lane.COPY_IN),
    "plain-run-not-synchronised": _never_synchronise,
    "another-graph-replayed": _replay_another_graph,
    "input-bound-again-for-a-replay": _bind_again,
    "graph-id-zero": _take_id_zero,
    "smallest-captured-first": _capture_small_first,
    "slot-taken-twice": _one_slot_for_all,
    "staging-buffer-given-back-at-submit": _give_staging_back_early,
    "memory-allocated-while-serving": _allocate_per_batch,
    "session-run-by-the-completion-thread": _run_in_completion_thread,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_caught(
    plant: Callable[[Saboteur, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a mistake that gives right results on most days on a GPU."""
    device = Saboteur()
    plant(device, monkeypatch)

    with pytest.raises((OrderError, BrokenOrderError)):
        serve(GpuSite(tmp_path, device))


def test_the_saboteur_without_a_plan_breaks_nothing(tmp_path: Path) -> None:
    """What the planted bugs are compared with."""
    serve(GpuSite(tmp_path, Saboteur()))


# -- captures and other threads ---------------------------------------------------------------------------


class NoGate(Gate):
    """A gate that stands open: the bug."""

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize(("gate", "is_caught"), [(Gate(), False), (NoGate(), True)], ids=["gate", "no-gate"])
def test_no_other_thread_is_on_the_device_while_a_graph_is_captured(
    gate: Gate, is_caught: bool, tmp_path: Path
) -> None:
    """A thread that asks the device in the middle of a capture waits until it is over; without the gate it
    would spoil the capture, and the device says so."""
    site = GpuSite(tmp_path, gate=gate)
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []
    has_asked = threading.Event()

    def ask() -> None:
        has_asked.set()
        try:
            with gate.use():
                site.device.memory()
        except OrderError as error:
            errors.append(error)

    def on_capture() -> None:
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        assert has_asked.wait(10)
        if is_caught:
            threads[-1].join(10)

    site.device.faults.on_capture = on_capture

    site.load()

    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(threads) == 6
    assert bool(errors) is is_caught


def test_a_capture_waits_for_a_thread_that_is_on_the_device() -> None:
    """Quiet begins when the last user has left, and new ones wait for its end."""
    gate = Gate()
    order: list[str] = []
    is_inside, may_leave = threading.Event(), threading.Event()

    def user() -> None:
        with gate.use():
            is_inside.set()
            may_leave.wait(10)
            order.append("user left")

    def capturer() -> None:
        with gate.quiet():
            order.append("quiet")

    first, second = threading.Thread(target=user), threading.Thread(target=capturer)
    first.start()
    assert is_inside.wait(10)
    second.start()
    may_leave.set()
    first.join(10)
    second.join(10)
    with gate.use():
        order.append("next user")

    assert order == ["user left", "quiet", "next user"]


# -- registered memory ------------------------------------------------------------------------------------


def test_memory_may_be_unregistered_only_when_no_copy_reads_it() -> None:
    """Order at stop: drain, unregister, unmap."""
    device = RecordingDevice()
    target = device.device_block(4096)
    foreign = device.register_host(memoryview(bytes(4096)))
    device.copy(target, foreign, 4096, device.stream(Lane.COPY_IN))

    with pytest.raises(OrderError, match="unregistered"):
        device.unregister_host(foreign)

    device.drain()
    device.unregister_host(foreign)
    assert device.registered == {}
    with pytest.raises(OrderError, match="no longer registered"):
        device.copy(target, foreign, 4096, device.stream(Lane.COPY_IN))
