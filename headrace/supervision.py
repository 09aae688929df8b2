"""What ``headrace up`` does about its processes: a pure state machine without clock, signal or process.

:class:`Supervision` takes past events (a process ended, the broker is ready, somebody asked to stop, time
passed) and returns what to do. ``supervisor`` starts the processes and carries that out.

Theory of operation. The broker is started first; once it says ready, the workers are. A process that
ends is started again after a wait that doubles with each quick failure in a row; after
``max_quick_failures`` of them, or at an exit code that a restart can't mend, it is given up. A given-up
worker leaves the others running; when none is left, or the broker is given up, everything stops.
To stop is: the broker drains first, since it needs the workers for that; then the workers; what outlives
its grace is killed. A second request kills everything at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, assert_never

from headrace.config_schema import Config
from headrace.exit_codes import NEVER_RESTARTED, ExitCode
from headrace.signals import StopRequests

BROKER = "broker"

#: Time beyond its own grace in which a process says goodbye and closes its sockets.
CLOSING_MS = 5_000


@dataclass(frozen=True, slots=True)
class Rules:
    """When to start again and how long to wait. Times in nanoseconds."""

    worker_count: int
    backoff_ns: int = 500_000_000
    backoff_max_ns: int = 30_000_000_000
    quick_failure_ns: int = 10_000_000_000
    max_quick_failures: int = 5
    start_timeout_ns: int = 30_000_000_000
    broker_grace_ns: int = 15_000_000_000
    worker_grace_ns: int = 15_000_000_000

    @classmethod
    def from_config(cls, config: Config, worker_count: int) -> Rules:
        """Take the rules from the sections supervisor, broker and worker."""
        keys = config.supervisor
        return cls(
            worker_count=worker_count,
            backoff_ns=keys.backoff_ms * 1_000_000,
            backoff_max_ns=keys.backoff_max_ms * 1_000_000,
            quick_failure_ns=keys.quick_failure_ms * 1_000_000,
            max_quick_failures=keys.max_quick_failures,
            start_timeout_ns=keys.start_timeout_ms * 1_000_000,
            broker_grace_ns=(config.broker.grace_ms + CLOSING_MS) * 1_000_000,
            worker_grace_ns=(config.worker.grace_ms + CLOSING_MS) * 1_000_000,
        )


# Events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """The supervisor runs: start the broker."""


@dataclass(frozen=True, slots=True)
class BrokerReady:
    """The broker has bound its sockets and said so."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process ended. ``code`` is its exit code, negative for the signal that killed it."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """SIGTERM, SIGINT or stop(). The second one kills, unless it comes together with the first."""


@dataclass(frozen=True, slots=True)
class KillAsked:
    """End everything at once."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the deadlines."""


Event: TypeAlias = "Begun | BrokerReady | Ended | StopAsked | KillAsked | TimePassed"

# Actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start this process."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Log: ``event`` in fixed words about a process. ``level`` as in structlog."""

    level: str
    event: str
    name: str
    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything has ended: the supervisor's own exit code, and why when it is not 0."""

    code: int
    reason: str = ""


Action: TypeAlias = "Start | Terminate | Kill | Say | Finish"


class _Phase(Enum):
    RUNNING = auto()
    DRAINING_BROKER = auto()
    STOPPING_WORKERS = auto()
    FINISHED = auto()


class _State(Enum):
    WAITING = auto()  # to be started at `due_ns`, or with the first ready broker
    RUNNING = auto()
    GONE = auto()  # ended and not to be started again


@dataclass(slots=True)
class _Process:
    name: str
    state: _State = _State.WAITING
    started_ns: int = 0
    due_ns: int | None = None
    quick_failures: int = 0
    last_code: int = 0


class Supervision:
    """See the module. Invariants: at most one Start per process without an Ended between; after Finish no
    action is ever returned again."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._phase = _Phase.RUNNING
        self._broker = _Process(BROKER)
        self._workers = [_Process(f"worker-{index}") for index in range(rules.worker_count)]
        self._was_broker_ready = False
        self._ready_by_ns: int | None = None
        self._kill_at_ns: int | None = None
        self._requests = StopRequests()
        self._code = int(ExitCode.OK)
        self._reason = ""

    @property
    def is_finished(self) -> bool:
        return self._phase is _Phase.FINISHED

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event, return what to do, in order."""
        if self.is_finished:
            return []
        actions: list[Action] = []
        match event:
            case Begun():
                self._start(self._broker, now_ns, actions)
            case BrokerReady():
                self._broker_ready(now_ns, actions)
            case Ended():
                self._ended(event, now_ns, actions)
            case StopAsked():
                self._stop_asked(now_ns, actions)
            case KillAsked():
                self._kill(now_ns, actions)
            case TimePassed():
                self._time_passed(now_ns, actions)
            case _:
                assert_never(event)
        self._advance(now_ns, actions)
        return actions

    def next_wakeup_ns(self) -> int | None:
        """Return when TimePassed has something to do, None when only an event can change anything."""
        times = [self._kill_at_ns, self._ready_by_ns]
        if self._phase is _Phase.RUNNING:
            times += [process.due_ns for process in self._all() if process.state is _State.WAITING]
        return min((time for time in times if time is not None), default=None)

    # -- events ------------------------------------------------------------------------------------

    def _broker_ready(self, now_ns: int, actions: list[Action]) -> None:
        self._ready_by_ns = None
        if self._phase is not _Phase.RUNNING or self._was_broker_ready:
            return
        self._was_broker_ready = True
        for worker in self._workers:
            self._start(worker, now_ns, actions)

    def _ended(self, event: Ended, now_ns: int, actions: list[Action]) -> None:
        process = next((item for item in self._all() if item.name == event.name), None)
        if process is None or process.state is not _State.RUNNING:
            return
        process.last_code = event.code
        process.state = _State.GONE
        if process is self._broker:
            self._ready_by_ns = None
        if self._phase is not _Phase.RUNNING:
            return
        if event.code in NEVER_RESTARTED or (process is self._broker and not self._was_broker_ready):
            level = "info" if event.code == ExitCode.OK else "error"
            actions.append(Say(level, "process ended", process.name, {"exit": describe_exit(event.code)}))
            return
        self._schedule(process, now_ns, actions)

    def _stop_asked(self, now_ns: int, actions: list[Action]) -> None:
        if self._requests.is_first(now_ns):
            if self._phase is _Phase.RUNNING:
                self._stop(now_ns, actions)
        elif self._requests.is_second(now_ns):
            self._kill(now_ns, actions)

    def _kill(self, now_ns: int, actions: list[Action]) -> None:
        if self._phase is _Phase.RUNNING:
            self._phase = _Phase.DRAINING_BROKER
            self._kill_at_ns = now_ns + self._rules.broker_grace_ns
        actions += [Kill(process.name) for process in self._all() if process.state is _State.RUNNING]
        self._code = self._code or int(ExitCode.FAILED)
        self._reason = self._reason or "killed at the second request to stop; unfinished frames are lost"

    def _time_passed(self, now_ns: int, actions: list[Action]) -> None:
        if self._ready_by_ns is not None and now_ns >= self._ready_by_ns:
            self._ready_by_ns = None
            waited_ms = self._rules.start_timeout_ns // 1_000_000
            actions += [
                Say("error", "broker not ready in time", BROKER, {"waited_ms": waited_ms}),
                Kill(BROKER),
            ]
        if self._kill_at_ns is not None and now_ns >= self._kill_at_ns:
            self._kill_at_ns = None
            for process in self._to_stop():
                actions += [Say("warning", "killed after its grace", process.name, {}), Kill(process.name)]
        if self._phase is _Phase.RUNNING:
            for process in self._all():
                if (
                    process.state is _State.WAITING
                    and process.due_ns is not None
                    and now_ns >= process.due_ns
                ):
                    self._start(process, now_ns, actions)

    # -- helpers -----------------------------------------------------------------------------------

    def _all(self) -> list[_Process]:
        return [self._broker, *self._workers]

    def _to_stop(self) -> list[_Process]:
        stopping = [self._broker] if self._phase is _Phase.DRAINING_BROKER else self._workers
        return [process for process in stopping if process.state is _State.RUNNING]

    def _start(self, process: _Process, now_ns: int, actions: list[Action]) -> None:
        process.state = _State.RUNNING
        process.started_ns = now_ns
        process.due_ns = None
        if process is self._broker:
            self._ready_by_ns = now_ns + self._rules.start_timeout_ns
        actions.append(Start(process.name))

    def _schedule(self, process: _Process, now_ns: int, actions: list[Action]) -> None:
        """Decide about a process that failed: again after a wait, or never."""
        rules = self._rules
        is_quick = now_ns - process.started_ns < rules.quick_failure_ns
        process.quick_failures = process.quick_failures + 1 if is_quick else 0
        values: dict[str, object] = {"exit": describe_exit(process.last_code)}
        if process.quick_failures >= rules.max_quick_failures:
            values["quick_failures"] = process.quick_failures
            actions.append(Say("error", "process given up", process.name, values))
            return
        doublings = max(0, process.quick_failures - 1)
        wait_ns = min(rules.backoff_ns << min(doublings, 40), rules.backoff_max_ns)
        process.state = _State.WAITING
        process.due_ns = now_ns + wait_ns
        values |= {"restart_in_ms": wait_ns // 1_000_000, "quick_failures": process.quick_failures}
        actions.append(Say("warning", "process ended, will be restarted", process.name, values))

    def _advance(self, now_ns: int, actions: list[Action]) -> None:
        """Move on to the next phase when this one has nothing left to wait for."""
        if self._phase is _Phase.RUNNING:
            if self._broker.state is _State.GONE:
                self._give_up(self._broker, now_ns, actions)
            elif self._workers and all(worker.state is _State.GONE for worker in self._workers):
                self._give_up(max(self._workers, key=lambda worker: worker.last_code != 0), now_ns, actions)
        if self._phase is _Phase.DRAINING_BROKER and self._broker.state is not _State.RUNNING:
            self._phase = _Phase.STOPPING_WORKERS
            running = [worker for worker in self._workers if worker.state is _State.RUNNING]
            actions += [Terminate(worker.name) for worker in running]
            self._kill_at_ns = now_ns + self._rules.worker_grace_ns
        if self._phase is _Phase.STOPPING_WORKERS and not self._to_stop():
            self._phase = _Phase.FINISHED
            self._kill_at_ns = None
            actions.append(Finish(self._code, self._reason))

    def _give_up(self, process: _Process, now_ns: int, actions: list[Action]) -> None:
        code = process.last_code
        self._code = code if code >= 0 else int(ExitCode.FAILED)
        if code != ExitCode.OK:
            what = "the broker" if process is self._broker else "no worker is left: the last one"
            self._reason = f"{what} ended with {describe_exit(code)}; its own message stands above"
        self._stop(now_ns, actions)

    def _stop(self, now_ns: int, actions: list[Action]) -> None:
        self._phase = _Phase.DRAINING_BROKER
        self._kill_at_ns = now_ns + self._rules.broker_grace_ns
        self._ready_by_ns = None
        if self._broker.state is _State.RUNNING:
            actions.append(Terminate(BROKER))


def describe_exit(code: int) -> str:
    """Return an exit code in words: "exit code 78 (config)" or "signal 9"."""
    if code < 0:
        return f"signal {-code}"
    names = {entry.value: entry.name.lower() for entry in ExitCode}
    return f"exit code {code} ({names.get(code, 'unknown')})"
