"""Drives a worker session with real sockets, threads and time: the worker's I/O thread.

Not here: decisions (``worker_session``), batches (``pipeline``), signals and settings (``process``).

Theory of operation: whoever holds the turn lock owns the connection and the session. That is the I/O thread
for each of its turns, and while it sleeps the pipeline's thread that has a finished batch: its Done leaves at
once, where waking another thread for it took longer than sending it. Everything else that happens elsewhere
(a discovery, a fetch, a stop) comes in through one queue and a wake-up. A turn reads the connection first and
ticks last, so that a process that was stopped for a while finds what the broker sent meanwhile before it
wonders about its silence.

The I/O thread sleeps on the descriptors of its sockets, not on the sockets, which others may use meanwhile.
ZeroMQ signals such a descriptor once for all that came since the socket was last looked at, so whoever used a
socket looks whether there is something to read before the thread sleeps (again).
"""

from __future__ import annotations

import queue
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, assert_never

import structlog
import zmq

from headrace import addresses
from headrace.clients.sockets import Context, Link, Role, Waker
from headrace.errors import Code, ConfigError, HeadraceError, RemoteProtocolError, UnreachableError
from headrace.exit_codes import ExitCode
from headrace.protocol import codec
from headrace.protocol.messages import Batch, Limits, ModelSpec
from headrace.workers import worker_events as ev
from headrace.workers.engine import ModelKey
from headrace.workers.model_cache import FetchError, ModelCache, StoppedError
from headrace.workers.model_fetch import ControlChunks
from headrace.workers.worker_session import WorkerSession

#: The broker's socket sends at most ``slots`` batches; what else comes is small.
WORKER = Role("workers", zmq.DEALER, send_hwm=0, receive_hwm=0)

#: Largest part taken before the broker has told its own limits.
MAX_PART_BYTES = 1024 * 1024 * 1024

#: Messages read before results are sent again, so that neither direction starves the other.
MAX_MESSAGES_PER_TURN = 64

#: A poll is never longer, so that a wrong wake-up time can't hang the thread.
MAX_POLL_MS = 1_000

#: Time for what was sent last to leave. The session has waited for the broker's word on it already, unless
#: the broker did not answer.
LINGER_MS = 1_000

log = structlog.get_logger()


class Runner(Protocol):
    """What the shell asks of a pipeline."""

    def use_limits(self, limits: Limits) -> None: ...
    def load(self, models: tuple[ModelSpec, ...], files: dict[str, str]) -> None: ...
    def load_beside(self, spec: ModelSpec, files: dict[str, str]) -> None: ...
    def unload(self, key: ModelKey) -> None: ...
    def compare(self, batch: int, version: str) -> None: ...
    def run(self, batch: Batch) -> None: ...
    def drop(self, number: int) -> None: ...
    def close(self, timeout_s: float = ...) -> None: ...


class WorkerShell:
    """See the module. ``run`` is called once; ``request_stop`` and ``tell`` from any thread, any time."""

    def __init__(
        self,
        session: WorkerSession,
        address: str,
        cache_folder: Path,
        make_pipeline: Callable[[Callable[[ev.Event], None]], Runner],
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._session = session
        self._address = address
        self._clock = clock
        self._events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self._waker = Waker()
        self._is_stopping = threading.Event()
        self._turn_lock = threading.Lock()
        self._asleep_until_ns: int | None = 0  # None: until something comes
        self._poller = select.poll()
        self._poller.register(self._waker.fileno(), select.POLLIN)
        self._context: Context = zmq.Context()
        self._limits = Limits()
        self._cache = ModelCache(cache_folder, should_stop=self._is_stopping.is_set)
        self._pipeline = make_pipeline(self.tell)
        self._link: Link | None = None
        self._link_fault = ""
        self._helpers: list[threading.Thread] = []
        self._exit: ev.Exit | None = None

    def tell(self, event: ev.Event) -> None:
        """Hand an event to the session, from any thread."""
        self._events.put(event)
        if type(event) is not ev.BatchFinished or not self._turn_lock.acquire(blocking=False):
            self._waker.wake()
            return
        try:
            self._read_events()
            must_wake = self._must_wake()
        finally:
            self._turn_lock.release()
        if must_wake:
            self._waker.wake()

    def request_stop(self) -> None:
        """Finish what is in the pipeline, then end ``run``. Safe in a signal handler."""
        self.tell(ev.StopRequested())

    def run(self) -> int:
        """Serve until the session ends; return the exit code."""
        try:
            with self._turn_lock:
                self._feed(ev.Started())
            while self._exit is None:
                self._turn()
        finally:
            with self._turn_lock:  # what a pipeline's thread has to say from here on finds no connection
                self._disconnect(LINGER_MS)
            self._close()
        level = "info" if self._exit.code == ExitCode.OK else "error"
        getattr(log, level)("worker ended", reason=self._exit.reason, exit_code=self._exit.code)
        return self._exit.code

    # -- one turn --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        with self._turn_lock:
            timeout_ms = self._poll_ms()
        ready = {descriptor for descriptor, _ in self._poller.poll(timeout_ms)}
        if self._waker.fileno() in ready:
            self._waker.drain()
        with self._turn_lock:
            self._read_link(ready)
            self._read_events()
            self._feed(ev.Tick())

    def _poll_ms(self) -> int:
        """Return how long to sleep, and note it: who changes that has to wake the thread."""
        self._asleep_until_ns = wake_ns = self._session.next_wakeup_ns()
        if not self._events.empty() or (self._link is not None and self._link.has_message()):
            return 0
        if wake_ns is None:
            return MAX_POLL_MS
        # Rounded up: a poll that ends a fraction early would spin until the time has come.
        return min(MAX_POLL_MS, max(0, -(-(wake_ns - self._clock()) // 1_000_000)))

    def _must_wake(self) -> bool:
        """Tell whether the I/O thread has something to do before what it sleeps for."""
        if self._exit is not None or self._link is None or self._link.has_message():
            return True
        wake_ns = self._session.next_wakeup_ns()
        return wake_ns is not None and (self._asleep_until_ns is None or wake_ns < self._asleep_until_ns)

    def _read_link(self, ready: set[int]) -> None:
        """Read what has come, and the connection's end behind it, of which the descriptor of the monitor
        tells until it is read."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._link is None or self._exit is not None:
                return
            # Asked first: that there is nothing costs an exception to learn from receiving.
            parts = self._link.receive_shared() if self._link.has_message() else None
            if parts is None:
                if self._link.descriptors()[1] in ready and self._link.is_lost():
                    self._feed(ev.LinkLost("the connection was closed"))
                return
            try:
                message = codec.decode(parts, self._limits, codec.TO_WORKER)
            except RemoteProtocolError as error:
                self._feed(ev.MessageUnreadable(error.code, error.message))
            else:
                self._feed(ev.MessageReceived(message))

    def _read_events(self) -> None:
        # Bounded by what is there now; what arrives meanwhile is for the next turn.
        for _ in range(self._events.qsize()):
            self._feed(self._events.get_nowait())

    def _feed(self, event: ev.Event) -> None:
        if self._exit is not None:
            return
        for action in self._session.handle(event, self._clock()):
            self._carry_out(action)
        # Told at once and not through the queue, where it could meet the next connection.
        fault, self._link_fault = self._link_fault, ""
        if fault:
            self._feed(ev.LinkLost(fault))

    # -- actions ---------------------------------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:  # noqa: C901 - one case per action
        match action:
            case ev.Send(message):
                if self._link is None or not self._link.send(codec.encode(message)):
                    self._link_fault = "a message could not be sent"
            case ev.RunBatch(batch):
                self._pipeline.run(batch)
            case ev.DropBatch(number):
                self._pipeline.drop(number)
            case ev.FindBroker(timeout_ms):
                self._help("discovery", lambda: self._discover(timeout_ms / 1000))
            case ev.Connect(address):
                self._connect(address)
            case ev.Disconnect():
                self._disconnect()
            case ev.UseLimits(limits):
                self._limits = limits
                self._pipeline.use_limits(limits)
            case ev.FetchModels(models, control):
                self._help("fetch", lambda: self._fetch(models, control))
            case ev.LoadModels(models, files):
                names = [f"{spec.name}:{spec.version}" for spec in models]
                log.info("loading models", models=names)
                self._pipeline.load(models, files)
            case ev.LoadBeside(spec, control):
                log.info("loading a model beside the others", model=f"{spec.name}:{spec.version}")
                self._help("fetch", lambda: self._fetch_beside(spec, control))
            case ev.UnloadModel(name, version):
                log.info("unloading a model", model=f"{name}:{version}")
                self._pipeline.unload(ModelKey(name, version))
            case ev.CompareBatch(number, version):
                self._pipeline.compare(number, version)
            case ev.Report(level, name, values):
                getattr(log, level)(name, **values)
            case ev.Exit():
                self._exit = action
            case _:
                assert_never(action)

    def _connect(self, address: str) -> None:
        self._disconnect()
        try:
            self._link = Link(self._context, WORKER, address, max_message_bytes=MAX_PART_BYTES)
        except UnreachableError as error:
            self._link_fault = str(error)
        else:
            for descriptor in self._link.descriptors():
                self._poller.register(descriptor, select.POLLIN)

    def _disconnect(self, linger_ms: int = 0) -> None:
        if self._link is not None:
            for descriptor in self._link.descriptors():
                self._poller.unregister(descriptor)
            self._link.close(linger_ms)
            self._link = None

    # -- helper threads --------------------------------------------------------------------------------

    def _help(self, name: str, work: Callable[[], ev.Event | None]) -> None:
        """Run something that waits in a thread of its own; what it returns is told to the session.

        The session orders one discovery or fetch at a time, so there are at most two of them."""

        def run() -> None:
            event = work()
            if event is not None:
                self.tell(event)

        self._helpers = [thread for thread in self._helpers if thread.is_alive()]
        thread = threading.Thread(target=run, name=f"headrace-{name}", daemon=True)
        self._helpers.append(thread)
        thread.start()

    def _discover(self, timeout_s: float) -> ev.Event | None:
        try:
            endpoints = addresses.discover(
                self._address, timeout_s, context=self._context, should_stop=self._is_stopping.is_set
            )
        except ConfigError as error:
            return ev.LoadFailed(ExitCode.CONFIG, str(error))
        except RemoteProtocolError as error:
            return ev.MessageUnreadable(error.code, error.message)
        except (HeadraceError, zmq.ZMQError) as error:
            return ev.BrokerNotFound(str(error))
        return ev.BrokerFound(endpoints)

    def _fetch(self, models: tuple[ModelSpec, ...], control: str) -> ev.Event | None:
        try:
            with ControlChunks(self._context, control, self._limits, self._is_stopping.is_set) as source:
                files = self._cache.ensure(models, source)
        except StoppedError:
            return None
        except ConfigError as error:
            return ev.LoadFailed(ExitCode.CONFIG, str(error))
        except (FetchError, zmq.ZMQError) as error:
            return ev.FetchFailed(models, str(error))
        return ev.ModelsFetched(models, files)

    def _fetch_beside(self, spec: ModelSpec, control: str) -> ev.Event | None:
        fetched = self._fetch((spec,), control)
        match fetched:
            case ev.ModelsFetched(_, files):
                self._pipeline.load_beside(spec, files)
                return None
            case ev.FetchFailed(_, reason) | ev.LoadFailed(_, reason):
                return ev.BesideFailed(spec, Code.LOAD_FAILED, f"its files could not be had: {reason}")
            case _:
                return None

    def _close(self) -> None:
        self._is_stopping.set()
        self._pipeline.close(timeout_s=0.2)
        for thread in self._helpers:
            thread.join(timeout=1.0)
        if not any(thread.is_alive() for thread in self._helpers):
            # A socket that a helper still holds would let term() wait for ever; the process ends anyway.
            self._context.term()
        self._waker.close()
