"""The worker's side of the conversation with the broker, as a pure state machine.

``WorkerSession.handle(event, now_ns) -> list[Action]``: no sockets, no clock, no threads, no randomness.
``process`` drives it in production, a simulator in tests.

Theory of operation::

    DISCOVERING --found--> HELLO --Setup--> PREPARING --loaded, empty--> SERVING --stop--> DRAINING --> GONE
         ^                   |                  |                          |                  |
         +---- WAITING <-----+------------------+---- lost or silent ------+         lost: -->+

One connection is one socket; whatever ends it leads through WAITING (a back-off that doubles, with jitter
from outside) to a new discovery, so that a broker that moved is found. The same ``instance`` in each
WorkerHello tells the broker that it is the same process.

What happens to batches. Each is answered exactly once while its broker lives: Done, or Failed, with
``cancelled`` when it was dropped before it began. Answers that find no connection are held (a bounded
number) until Setup names the broker's boot: the same boot gets them, for another boot they mean nothing, or
worse another batch of that number. READY is sent when the pipeline is empty, so no more than ``slots``
batches beside cancelled ones are ever in it, and models are exchanged only then.

Draining. After Goodbye a batch may still be under way to us. Messages of one connection are taken in order,
so a Discover sent behind Goodbye and the last Done is a barrier: its answer means that both were taken and
that no further batch will come. Only then the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from headrace.errors import Code
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Cancel,
    Compare,
    Discover,
    Done,
    Endpoints,
    Failed,
    Goodbye,
    Heartbeat,
    Load,
    Message,
    ModelSpec,
    Ready,
    Refused,
    Setup,
    Telemetry,
    Unload,
    WorkerHello,
)
from headrace.workers import worker_events as ev
from headrace.workers.model_shelf import ModelShelf
from headrace.workers.worker_events import Action, Event

MS = 1_000_000

#: Heartbeats that may be missed before a peer counts as silent (DESIGN section 8).
HEARTBEATS_MISSED = 3


class State(Enum):
    """Where the worker stands; see the module."""

    NEW = "new"
    DISCOVERING = "discovering"
    WAITING = "waiting"
    HELLO = "hello"
    PREPARING = "preparing"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


#: States in which the broker knows this worker and its boot is known here.
KNOWN = frozenset({State.PREPARING, State.SERVING, State.DRAINING})


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Bounds of one session. ``slots`` batches may be in the pipeline at once; ``give_up_ms`` without a
    broker end the process (None: it waits for ever)."""

    slots: int = 2
    discovery_timeout_ms: int = 5_000
    hello_timeout_ms: int = 10_000  # the broker may probe another holder of our id first
    backoff_ms: int = 100
    backoff_max_ms: int = 5_000
    grace_ms: int = 30_000  # for batches in the pipeline, after a stop was asked for
    barrier_ms: int = 500  # for the broker's last word
    give_up_ms: int | None = None


class WorkerSession:
    """See the module. Invariants (``check_invariants``): at most ``slots`` batches in the pipeline; none
    of an earlier connection while SERVING; nothing is held while the broker knows us."""

    def __init__(self, hello: WorkerHello, settings: SessionSettings, jitter: Callable[[], float]) -> None:
        """``jitter`` returns a number from 0 to 1 for each back-off."""
        self.state = State.NEW
        self.hello = hello
        self._settings = settings
        self._jitter = jitter
        self._boot: int | None = None
        self._control = ""
        self._heartbeat_ns = 1_000 * MS
        self._heard_ns = self._sent_ns = self._seen_ns = self._patient_until_ns = 0
        self._heartbeat_due_ns = 0
        self._due_ns = 0  # end of the back-off, of the wait for Setup, or of the grace
        self._lonely_since_ns = 0
        self._attempts = 0
        self._setup: Setup | None = None
        self._busy_with: tuple[ModelSpec, ...] | None = None  # being fetched or loaded
        self._shelf = ModelShelf(hello.engine)
        self.in_flight: set[int] = set()
        self._cancelled: set[int] = set()  # of those in flight: the broker counts their slots as free
        self._orphans: set[int] = set()  # batches of an earlier boot, still in the pipeline
        self._held: list[Done | Failed] = []
        self._barriers = 0
        self._barrier_due_ns: int | None = None

    # -- the seam -------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one fact; return what to do, in order."""
        if self.state is State.GONE:
            return []
        if self.state in KNOWN and now_ns - self._seen_ns > 2 * self._heartbeat_ns:
            # We were stopped ourselves: that nothing was heard meanwhile says nothing about the broker.
            self._patient_until_ns = now_ns + self._heartbeat_ns
        self._seen_ns = now_ns
        out: list[Action] = []
        self._take(event, now_ns, out)
        return out

    def next_wakeup_ns(self) -> int | None:
        """Return when the next Tick is wanted at the latest, None when only events matter."""
        match self.state:
            case State.WAITING | State.HELLO:
                return self._due_ns
            case State.PREPARING | State.SERVING:
                return min(self._heartbeat_due_ns, self._silent_at_ns())
            case State.DRAINING:
                due = min(self._heartbeat_due_ns, self._silent_at_ns(), self._due_ns)
                return due if self._barrier_due_ns is None else min(due, self._barrier_due_ns)
            case _:
                return None

    def check_invariants(self) -> None:
        """Raise AssertionError when the session contradicts itself (a bug of ours)."""
        if not self._cancelled <= self.in_flight:
            raise AssertionError(f"cancelled {self._cancelled} but in flight {self.in_flight}")
        slots = self._settings.slots
        live_count = len(self.in_flight) - len(self._cancelled)
        if live_count > slots or len(self._cancelled) > slots + 1:
            raise AssertionError(f"{live_count} batches, {len(self._cancelled)} cancelled, {slots} slots")
        if len(self._held) > 2 * slots + 1:
            raise AssertionError(f"{len(self._held)} held answers, {slots} slots")
        if self._orphans and self.state is State.SERVING:
            raise AssertionError(f"serving beside {len(self._orphans)} batches of another boot")
        if self._held and self.state in KNOWN:
            raise AssertionError(f"{len(self._held)} answers held back from a broker that knows us")

    # -- events ---------------------------------------------------------------------------------------

    def _take(self, event: Event, now_ns: int, out: list[Action]) -> None:  # noqa: C901 - one case per event
        match event:
            case ev.Started():
                self._lonely_since_ns = now_ns
                self._discover(out)
            case ev.BrokerFound(endpoints):
                self._say_hello_to(endpoints, now_ns, out)
            case ev.BrokerNotFound(reason):
                if self.state is State.DISCOVERING:
                    self._back_off(reason, now_ns, out)
            case ev.LinkLost(reason):
                self._lose_link(reason, now_ns, out)
            case ev.MessageReceived(message):
                self._heard_ns = now_ns
                self._receive(message, now_ns, out)
            case ev.MessageUnreadable(code, reason):
                self._heard_ns = now_ns
                self._take_unreadable(code, reason, out)
            case ev.ModelsFetched() | ev.FetchFailed() | ev.ModelsLoaded() | ev.LoadFailed():
                self._take_preparation(event, now_ns, out)
            case ev.BesideLoaded() | ev.BesideFailed() | ev.BatchCompared():
                self._take_beside(event, now_ns, out)
            case ev.BatchFinished(message):
                self._finish(message, now_ns, out)
            case ev.EngineFailed(exit_code, reason):
                # Nothing more is sent: what a failed device computed can't be told from what it made up.
                self._exit(exit_code, reason, out)
            case ev.FiguresTaken(figures):
                self._tell_figures(figures, now_ns, out)
            case ev.StopRequested():
                self._stop(now_ns, out)
            case ev.Tick():
                self._tick(now_ns, out)
            case _:
                assert_never(event)

    def _receive(self, message: Message, now_ns: int, out: list[Action]) -> None:
        match message:
            case Setup():
                self._set_up(message, now_ns, out)
            case Batch():
                self._take_batch(message, now_ns, out)
            case Load() | Unload() | Compare():
                if self.state is State.SERVING:
                    self._take_order(message, now_ns, out)
            case Cancel(batch):
                if batch in self.in_flight:
                    self._cancelled.add(batch)
                    out.append(ev.DropBatch(batch))
            case Heartbeat(probe):
                if probe is not None and self.state in KNOWN:
                    # The broker asks whether we live, and waits little more than one interval.
                    self._send(message, now_ns, out)
            case Refused(code, reason):
                self._take_refusal(code, reason, now_ns, out)
            case Endpoints():
                if self.state is State.DRAINING and self._barriers:
                    self._barriers -= 1
                    self._leave_if_drained(out)
            case Goodbye(reason):
                out.append(ev.Report("info", "broker is stopping", {"reason": reason}))
            case _:
                name = type(message).__name__
                out.append(ev.Report("warning", "unexpected message", {"type": name}))

    def _tick(self, now_ns: int, out: list[Action]) -> None:
        match self.state:
            case State.WAITING:
                if now_ns >= self._due_ns:
                    self._discover(out)
            case State.HELLO:
                if now_ns >= self._due_ns:
                    self._lose_link("no answer to WorkerHello", now_ns, out)
            case State.PREPARING | State.SERVING | State.DRAINING:
                self._tick_connected(now_ns, out)

    def _tick_connected(self, now_ns: int, out: list[Action]) -> None:
        if now_ns >= self._silent_at_ns():
            self._lose_link(f"broker silent for {HEARTBEATS_MISSED} heartbeats", now_ns, out)
            return
        if self.state is State.DRAINING:
            if now_ns >= self._due_ns:
                self._hand_back(now_ns, out)
                return
            if self._barrier_due_ns is not None and now_ns >= self._barrier_due_ns:
                self._exit(ExitCode.OK, "stopped; the broker did not confirm", out)
                return
        if now_ns >= self._heartbeat_due_ns:
            self._send(Heartbeat(), now_ns, out)

    # -- finding and losing the broker ----------------------------------------------------------------

    def _discover(self, out: list[Action]) -> None:
        self.state = State.DISCOVERING
        out.append(ev.FindBroker(self._settings.discovery_timeout_ms))

    def _say_hello_to(self, endpoints: Endpoints, now_ns: int, out: list[Action]) -> None:
        if self.state is not State.DISCOVERING:
            return
        self._control = endpoints.control
        out.append(ev.Connect(endpoints.workers))
        self._say_hello(now_ns, out)

    def _say_hello(self, now_ns: int, out: list[Action]) -> None:
        self.state = State.HELLO
        self._setup = None
        self._due_ns = now_ns + self._settings.hello_timeout_ms * MS
        self._send(self.hello, now_ns, out)

    def _lose_link(self, reason: str, now_ns: int, out: list[Action]) -> None:
        if self.state is State.DRAINING:
            left = f" with {len(self.in_flight)} batches unfinished" if self.in_flight else ""
            self._exit(ExitCode.OK, f"stopped; the broker was gone ({reason}){left}", out)
        elif self.state in KNOWN or self.state is State.HELLO:
            out.append(ev.Disconnect())
            self._back_off(reason, now_ns, out)

    def _back_off(self, reason: str, now_ns: int, out: list[Action]) -> None:
        settings = self._settings
        if self.state in KNOWN:
            self._lonely_since_ns = now_ns
        lonely_ns = now_ns - self._lonely_since_ns
        if settings.give_up_ms is not None and lonely_ns >= settings.give_up_ms * MS:
            self._exit(ExitCode.UNAVAILABLE, f"no broker for {lonely_ns // MS} ms: {reason}", out)
            return
        self._attempts += 1
        full_ms = min(settings.backoff_max_ms, settings.backoff_ms * 2 ** min(self._attempts - 1, 16))
        # Between half and all of it: workers that lost the broker together do not come back together.
        wait_ns = int(full_ms * MS * (0.5 + 0.5 * self._jitter()))
        self.state = State.WAITING
        self._due_ns = now_ns + wait_ns
        out.append(
            ev.Report("warning", "broker not reached", {"reason": reason, "retry_in_ms": wait_ns // MS})
        )

    def _take_refusal(self, code: str, reason: str, now_ns: int, out: list[Action]) -> None:
        match code:
            case Code.ID_IN_USE:
                self._exit(ExitCode.CONFIG, f"worker id {self.hello.worker} is in use: {reason}", out)
            case Code.VERSION_MISMATCH | Code.BAD_VERSION:
                self._exit(ExitCode.UNAVAILABLE, self._mismatch(reason), out)
            case Code.UNKNOWN_PEER:
                # In HELLO it answers something we sent before; the WorkerHello is already on its way.
                if self.state in {State.PREPARING, State.SERVING}:
                    self._say_hello(now_ns, out)
            case Code.BAD_READY:
                self._exit(ExitCode.INTERNAL, f"the broker can't use this worker's READY: {reason}", out)
            case Code.WORKER_STUCK:
                # Its frames are with others by now. What hangs can't be ended from inside: a new process can.
                self._exit(ExitCode.DEVICE_LOST, f"told off by the broker: {reason}", out)
            case Code.TOO_MANY_WORKERS | Code.DRAINING | Code.ID_CLAIMED:
                if self.state is State.HELLO:
                    self._lose_link(f"{code}: {reason}", now_ns, out)
            case _:
                out.append(ev.Report("warning", "refused by the broker", {"code": code, "reason": reason}))

    def _take_unreadable(self, code: str, reason: str, out: list[Action]) -> None:
        if code == Code.BAD_VERSION:
            self._exit(ExitCode.UNAVAILABLE, self._mismatch(reason), out)
        else:
            out.append(ev.Report("warning", "unreadable message", {"code": code, "reason": reason}))

    def _mismatch(self, reason: str) -> str:
        own = f"protocol version {PROTOCOL_VERSION}, headrace {self.hello.release}"
        return f"broker and worker do not understand each other: this worker has {own}; broker: {reason}"

    # -- getting ready --------------------------------------------------------------------------------

    def _set_up(self, setup: Setup, now_ns: int, out: list[Action]) -> None:
        if self.state is not State.HELLO:
            out.append(ev.Report("warning", "unexpected message", {"type": "Setup"}))
            return
        if setup.boot != self._boot:
            # Only its own broker can use the result of a batch; another one numbers batches anew.
            out.extend(ev.DropBatch(batch) for batch in sorted(self.in_flight))
            self._orphans |= self.in_flight
            self.in_flight.clear()
            self._cancelled.clear()
            self._held.clear()
        self._boot = setup.boot
        self._setup = replace(setup, models=tuple(m.for_engine(self.hello.engine) for m in setup.models))
        self._heartbeat_ns = setup.heartbeat_ms * MS
        self.state = State.PREPARING
        out.append(ev.UseLimits(setup.limits))
        held, self._held = self._held, []
        for message in held:
            self._send(message, now_ns, out)
        self._heartbeat_due_ns = self._sent_ns + self._heartbeat_ns
        self._prepare(now_ns, out)

    def _prepare(self, now_ns: int, out: list[Action]) -> None:
        """Take the next step towards SERVING, if nothing is in its way."""
        if self.state is not State.PREPARING or self._setup is None:
            return
        if self.in_flight or self._orphans or self._busy_with is not None:
            return
        profiles = self._shelf.profiles_of(self._setup.models)
        if profiles is not None:
            self.state = State.SERVING
            self._attempts = 0
            out.extend(self._shelf.drop_all_but(self._setup.models))
            ready = Ready(self.hello.worker, self.hello.instance, self._settings.slots, profiles)
            self._send(ready, now_ns, out)
            out.append(ev.Report("info", "ready", {"models": len(profiles)}))
        elif not self._shelf.is_loading:
            self._busy_with = self._setup.models
            out.append(ev.FetchModels(self._setup.models, self._control))

    def _take_preparation(
        self,
        event: ev.ModelsFetched | ev.FetchFailed | ev.ModelsLoaded | ev.LoadFailed,
        now_ns: int,
        out: list[Action],
    ) -> None:
        match event:
            case ev.ModelsFetched(models, files):
                self._shelf.clear()  # from here on the engine has neither the old models nor the new
                out.append(ev.LoadModels(models, files))
            case ev.FetchFailed(_, reason):
                self._busy_with = None
                if self.state is State.PREPARING:
                    self._lose_link(f"models not fetched: {reason}", now_ns, out)
            case ev.ModelsLoaded(models, profiles):
                self._busy_with = None
                self._shelf.fill(models, profiles)
                self._prepare(now_ns, out)
            case ev.LoadFailed(exit_code, reason):
                if self.state in KNOWN:
                    self._send(Goodbye(reason[:200]), now_ns, out)
                self._exit(exit_code, reason, out)

    def _take_order(self, message: Load | Unload | Compare, now_ns: int, out: list[Action]) -> None:
        ordered, answer = self._shelf.order(message, self._control)
        out.extend(ordered)
        if answer is not None:
            self._send(answer, now_ns, out)

    def _take_beside(
        self, event: ev.BesideLoaded | ev.BesideFailed | ev.BatchCompared, now_ns: int, out: list[Action]
    ) -> None:
        answer = event.message if isinstance(event, ev.BatchCompared) else self._shelf.take(event)
        if self.state is State.SERVING:  # a broker that has met us anew asks again
            self._send(answer, now_ns, out)
        self._prepare(now_ns, out)

    def _tell_figures(self, figures: dict[str, float], now_ns: int, out: list[Action]) -> None:
        # Those that find no broker go untold: the next follow in seconds.
        if self.state in KNOWN:
            self._send(Telemetry(self.hello.worker, figures), now_ns, out)

    # -- batches --------------------------------------------------------------------------------------

    def _take_batch(self, batch: Batch, now_ns: int, out: list[Action]) -> None:
        number = batch.batch
        if number in self.in_flight:
            out.append(ev.Report("warning", "batch sent twice", {"batch": number}))
        elif self.state not in {State.SERVING, State.DRAINING}:
            self._send(Failed(number, Code.INTERNAL, "this worker is not ready"), now_ns, out)
        elif not self._has_room():
            reason = f"this worker granted {self._settings.slots} slots"
            self._send(Failed(number, Code.QUEUE_FULL, reason), now_ns, out)
        else:
            self.in_flight.add(number)
            out.append(ev.RunBatch(batch))

    def _has_room(self) -> bool:
        """A cancelled batch may still run for long, and gives its slot back at once; how many of those may
        pile up behind a device that hangs has a bound of its own."""
        slots = self._settings.slots
        return len(self.in_flight) - len(self._cancelled) < slots and len(self._cancelled) <= slots

    def _finish(self, message: Done | Failed, now_ns: int, out: list[Action]) -> None:
        if message.batch in self._orphans:
            self._orphans.discard(message.batch)
        elif message.batch in self.in_flight:
            self.in_flight.discard(message.batch)
            self._cancelled.discard(message.batch)
            if self.state in KNOWN:
                self._send(message, now_ns, out)
            else:
                self._held.append(message)
        if self.state is State.DRAINING:
            self._raise_barrier_if_empty(now_ns, out)
        self._prepare(now_ns, out)

    # -- heartbeats -----------------------------------------------------------------------------------

    def _send(self, message: Message, now_ns: int, out: list[Action]) -> None:
        self._sent_ns = now_ns
        self._heartbeat_due_ns = now_ns + self._heartbeat_ns
        out.append(ev.Send(message))

    def _silent_at_ns(self) -> int:
        return max(self._heard_ns + HEARTBEATS_MISSED * self._heartbeat_ns, self._patient_until_ns)

    # -- leaving --------------------------------------------------------------------------------------

    def _stop(self, now_ns: int, out: list[Action]) -> None:
        if self.state is State.DRAINING:
            return
        if self.state not in KNOWN:
            self._exit(ExitCode.OK, "stopped", out)
            return
        self.state = State.DRAINING
        self._due_ns = now_ns + self._settings.grace_ms * MS
        self._send(Goodbye("stopping"), now_ns, out)
        self._raise_barrier_if_empty(now_ns, out)

    def _raise_barrier_if_empty(self, now_ns: int, out: list[Action]) -> None:
        if self.in_flight:
            self._barrier_due_ns = None
            return
        self._barriers += 1
        self._barrier_due_ns = now_ns + self._settings.barrier_ms * MS
        self._send(Discover(), now_ns, out)

    def _hand_back(self, now_ns: int, out: list[Action]) -> None:
        """Give the broker back what will not be finished, so that it need not take us for lost first."""
        count = len(self.in_flight)
        for number in sorted(self.in_flight):
            self._send(Failed(number, Code.SHUTDOWN, "the worker stopped before it was done"), now_ns, out)
        self._exit(ExitCode.FAILED, f"grace ended with {count} batches unfinished", out)

    def _leave_if_drained(self, out: list[Action]) -> None:
        if not self.in_flight and not self._barriers:
            self._exit(ExitCode.OK, "stopped", out)

    def _exit(self, code: int, reason: str, out: list[Action]) -> None:
        self.state = State.GONE
        out.append(ev.Exit(int(code), reason))
