"""Worker processes: the production session in a loop as workers/shell.py's, over a device that is made up."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from headrace.errors import Code, RemoteProtocolError
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Batch,
    ClassProfile,
    Compared,
    Done,
    Failed,
    FrameResult,
    Limits,
    Message,
    ModelProfile,
    ModelSpec,
    ShmRef,
    Status,
    WorkerHello,
)
from headrace.workers import worker_events as ev
from headrace.workers.worker_session import SessionSettings, State, WorkerSession
from hr_sim.book import Violation
from hr_sim.network import MS, Dialer, Link, Node, Wrapped

if TYPE_CHECKING:
    from hr_sim.world import World

#: The broker's host.
HOST_KEY = "host"

#: A device that hangs does so for this long: for ever, as far as a seed goes.
_HANG_NS = 1_000_000 * MS


class WorkerNode(Node):
    """One worker. A restart keeps the id and draws a new instance."""

    def __init__(self, world: World, name: str, host_key: str = HOST_KEY) -> None:
        super().__init__(world, name)
        self._host_key = host_key
        rng = world.rng
        self._dialer = Dialer(self, ("workers",))
        # What the profile says and what a batch takes are two things.
        self._speed = rng.choice((0.5, 1.0, 1.0, 4.0))
        self._largest = rng.choice((1, 2, 32, 32))
        self.slow_until_ns = 0
        self.hang_next = False
        self._begin()

    def _begin(self) -> None:
        rng, options = self.world.rng, self.world.options
        self.instance = rng.getrandbits(63)
        hello = WorkerHello(self.name, self.instance, self._host_key, "emulated", "emulated", "sim", pid=1)
        settings = SessionSettings(slots=options.slots, grace_ms=300, hello_timeout_ms=3_000)
        self.session = WorkerSession(hello, settings, rng.random)
        self._limits = Limits()
        self._inbox: deque[ev.Event | Wrapped] = deque([ev.Started()])
        self._link: Link | None = None
        self._queue: deque[Batch] = deque()
        self._running: Batch | None = None
        self._stale: list[int] = []
        self._dropped: set[int] = set()
        self._held: dict[tuple[str, str], None] = {}  # models, by name and version
        self._compared_with: dict[int, str] = {}
        self._device_run = 0
        self.exit_code: int | None = None
        self.wake(self.world.now_ns)

    # -- the process --------------------------------------------------------------------------------

    def receive(self, link: Link, message: Any) -> None:
        if link is self._link:
            self._feed_later(Wrapped(message))

    def lose(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._feed_later(ev.LinkLost("the connection was closed"))

    def dialled(self, links: list[Link]) -> None:
        if not links:
            self._feed_later(ev.BrokerNotFound("no answer"))
            return
        self._link = links[0]
        self._feed_later(ev.BrokerFound(self.world.broker.endpoints))

    def stop(self) -> None:
        """SIGTERM."""
        self._feed_later(ev.StopRequested())

    def kill(self) -> None:
        super().kill()
        self._dialer.forget()
        self._device_run += 1

    def revive(self) -> None:
        super().revive()
        self._begin()

    def _feed_later(self, event: ev.Event | Wrapped) -> None:
        self._inbox.append(event)
        self.wake(self.world.now_ns)

    def wakeup_ns(self) -> int | None:
        return self.session.next_wakeup_ns()

    def turn(self, now_ns: int) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Wrapped):
                try:
                    event = ev.MessageReceived(self.world.unwrap(event.message, self._limits))
                except RemoteProtocolError as error:
                    raise AssertionError(f"{self.name} can't read the broker: {error}") from error
            self._feed(event, now_ns)
        self._feed(ev.Tick(), now_ns)
        self.check_now_and_then(self.session)

    def _feed(self, event: ev.Event, now_ns: int) -> None:
        if not self.is_up:
            return
        self.world.event_count += 1
        is_faulty = False
        for action in self.session.handle(event, now_ns):
            match action:
                case ev.Send(message):
                    if self._link is None or not self._link.is_open(self):
                        is_faulty = True
                    elif isinstance(event, ev.BatchFinished) and self._is_spoilt(message):
                        self.world.count_fault("unreadable_answer")
                        self._link.send(self, [b"\xc1"] if self.world.options.is_encoded else None)
                    else:
                        self._link.send(self, self.world.wrap(message))
                case ev.RunBatch(batch):
                    if (batch.model, batch.version) not in self._held:
                        raise Violation(f"{self.name} has no {batch.model}:{batch.version} for its batch")
                    self._queue.append(batch)
                    self._run_next()
                case ev.DropBatch(number):
                    self._dropped.add(number)
                case ev.FindBroker():
                    self._dialer.dial()
                case ev.Connect():
                    pass  # dialled() has made the link
                case ev.Disconnect():
                    if self._link is not None:
                        self._link.close(self)
                        self._link = None
                    # What came over a connection that is closed is not read any more.
                    left = (Wrapped, ev.LinkLost)
                    self._inbox = deque(e for e in self._inbox if not isinstance(e, left))
                case ev.UseLimits(limits):
                    self._limits = limits
                case ev.FetchModels(models):
                    self.world.after(5 * MS, self._fetched, (self.run, models))
                case ev.LoadBeside(spec):
                    self.world.after(
                        self.world.rng.choice((5, 60)) * MS, self._loaded_beside, (self.run, spec)
                    )
                case ev.UnloadModel(model, version):
                    self._unload(model, version)
                case ev.CompareBatch(number, version):
                    self._compared_with[number] = version
                case ev.LoadModels(models):
                    self._held.clear()
                    self.world.after(20 * MS, self._loaded, (self.run, models))
                case ev.Exit(code):
                    self._exit(code)
        if is_faulty:
            self._feed(ev.LinkLost("a message could not be sent"), now_ns)

    def _is_spoilt(self, message: Message) -> bool:
        """Tell whether nobody can read this answer, just given. Nothing is drawn for it: seeds keep their
        schedules. One that was held over a lost connection stays whole: it goes before READY, for which the
        broker would take it, and ends the worker."""
        if not isinstance(message, Done) or self.session.state is not State.SERVING:
            return False
        return (
            "garbage" in self.world.options.rates and not self.world.is_healing and message.batch % 50 == 49
        )

    def _exit(self, code: int) -> None:
        if code in {ExitCode.INTERNAL, ExitCode.CONFIG} and not self.world.is_twin_about(self):
            raise AssertionError(f"{self.name} ended with {code}")
        self.exit_code = code
        self.is_up = False
        self.run += 1
        self._device_run += 1
        links, self.links = tuple(self.links), []
        for link in links:
            # What was sent before has left (linger).
            self.world.after(100 * MS, link.close, self)
        if not self.name.endswith("twin"):
            self.world.after(50 * MS, self.world.start_again, self)

    # -- models -------------------------------------------------------------------------------------

    def _fetched(self, key: tuple[int, tuple[ModelSpec, ...]]) -> None:
        if key[0] == self.run and self.is_up:
            is_lost = not self.world.is_healing and self.world.rng.random() < 0.05
            self._feed_later(ev.FetchFailed(key[1], "cut") if is_lost else ev.ModelsFetched(key[1], {}))

    def _loaded(self, key: tuple[int, tuple[ModelSpec, ...]]) -> None:
        if key[0] != self.run or not self.is_up:
            return
        for spec in key[1]:
            self._held[spec.name, spec.version] = None
        self._feed_later(ev.ModelsLoaded(key[1], tuple(self._profile(spec) for spec in key[1])))

    def _profile(self, spec: ModelSpec) -> ModelProfile:
        options = self.world.options
        classes = []
        for size_class in spec.size_classes:
            largest = min(size_class.max_batch_size, self._largest)
            sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < largest] + [largest]
            buckets = tuple((size, options.batch_ms + options.frame_ms * size) for size in sizes)
            classes.append(ClassProfile(size_class, buckets))
        return ModelProfile(spec.name, spec.version, tuple(classes), ())

    def _loaded_beside(self, key: tuple[int, ModelSpec]) -> None:
        """A model was loaded beside the others; or can't be, or has taken the process with it."""
        if key[0] != self.run or not self.is_up:
            return
        spec, fate = key[1], 1.0 if self.world.is_healing else self.world.rng.random()
        if fate < 0.05:
            self.world.count_fault("killed_by_loading")
            self.kill()
            self.world.after(50 * MS, self.world.start_again, self)
        elif fate < 0.15:
            self.world.count_fault("not_loaded")
            self._feed_later(ev.BesideFailed(spec, Code.LOAD_FAILED, "it has no batch axis"))
        else:
            self._held[spec.name, spec.version] = None
            self._feed_later(ev.BesideLoaded(spec, self._profile(spec)))

    def _unload(self, model: str, version: str) -> None:
        inside = [batch for batch in (*self._queue, self._running) if batch is not None]
        if any((batch.model, batch.version) == (model, version) for batch in inside):
            raise Violation(f"{self.name} is to let go of {model}:{version} while it runs a batch of it")
        del self._held[model, version]

    def _compare(self, batch: Batch) -> None:
        version = self._compared_with.pop(batch.batch, None)
        if version is not None:
            # Every third version differs, and now and then one can't be run.
            max_abs = 1.0 if int(version[1:]) % 3 == 0 else 0.25
            count = len(batch.frames)
            error = "it broke" if self.world.rng.random() < 0.02 else ""
            self._feed_later(
                ev.BatchCompared(Compared(batch.batch, version, count, count, max_abs, error=error))
            )

    # -- the device ---------------------------------------------------------------------------------

    def unhang(self) -> None:
        """End whatever hangs as a watchdog does: with the process."""
        self.hang_next = False
        self.slow_until_ns = 0

    @property
    def is_hanging(self) -> bool:
        """Tell whether the device has a batch that will not end."""
        return self._is_hung

    _is_hung = False

    def _run_next(self) -> None:
        while self._running is None and self._queue:
            batch = self._queue.popleft()
            if batch.batch in self._dropped:
                self._answer(Failed(batch.batch, Code.CANCELLED, "dropped"))
                continue
            self._running = batch
            self._stale = self._stage(batch)
            options = self.world.options
            run_ns = int((options.batch_ms + options.frame_ms * len(batch.frames)) * MS / self._speed)
            if self.world.now_ns < self.slow_until_ns:
                run_ns *= 10
            self._is_hung = self.hang_next
            if self.hang_next:
                self.hang_next = False
                run_ns = _HANG_NS
            self._device_run += 1
            self.world.after(run_ns, self._ran, (self._device_run, run_ns))

    def _ran(self, key: tuple[int, int]) -> None:
        if key[0] != self._device_run or not self.is_up or self._running is None:
            return
        if self.world.now_ns < self.paused_until_ns:
            self.world.at(self.paused_until_ns, self._ran, key)
            return
        batch, self._running = self._running, None
        self._is_hung = False
        fates = [self.world.frames.fate_of.get(frame.pts_ns or 0, "") for frame in batch.frames]
        if "poison" in fates:
            guilty = batch.frames[fates.index("poison")]
            self.world.count_fault("poison")
            self.world.broker.referee.note_poisoned(self._link, batch.batch, guilty.pts_ns or 0)
            self.kill()
            self.world.after(50 * MS, self.world.start_again, self)
            return
        if "failing" in fates:
            self.world.count_fault("failing")
            self._answer(Failed(batch.batch, Code.BATCH_FAILED, "it broke"))
        else:
            results = [
                self._result_of(frame.pts_ns, fate) for frame, fate in zip(batch.frames, fates, strict=True)
            ]
            for index in self._stale:
                results[index] = FrameResult(Status.ERROR, Code.STALE_SLOT, "its slot was freed")
            if "miscount" in fates:
                self.world.count_fault("miscount")
                # One too few, but never none: that could not be said on the wire.
                results = results[:-1] or results * 2
            run_us = key[1] // 1_000
            self._answer(Done(batch.batch, tuple(results), 10, run_us, run_us + 20))
            self._compare(batch)
        self._run_next()

    def _stage(self, batch: Batch) -> list[int]:
        """Read the payloads; return the indices of those that are gone."""
        stale, arenas = [], self.world.arenas
        for index, frame in enumerate(batch.frames):
            payload = frame.payload
            if isinstance(payload, ShmRef):
                is_here = self._host_key == HOST_KEY
                payload = (arenas.read(payload) if is_here else None) or b""
            if payload:
                arenas.check_pixels(frame, bytes(payload))
            else:
                stale.append(index)
        return stale

    def _answer(self, message: Done | Failed) -> None:
        self._dropped.discard(message.batch)
        self._feed_later(ev.BatchFinished(message))

    def _result_of(self, frame_id: int | None, fate: str) -> FrameResult:
        if fate == "damaged":
            self.world.count_fault("damaged")
            return FrameResult(Status.ERROR, Code.DAMAGED_IMAGE, "cut short")
        return FrameResult(Status.OK, outputs=frame_id)
