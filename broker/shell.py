"""The broker's shell: one thread that owns all sockets and drives the core.

Theory of operation. A turn is: wait until a socket has something, a wake-up of the core is due or somebody
asks for a drain; take a bounded number of messages from each socket, decode each and hand it to the core;
hand over one Tick, in which the core decides; with a journal, write the turn's
outcomes to it in one commit; carry out all actions in the order given. A send that finds its peer gone
becomes a PeerUnreachable event of the same turn, so that a batch that could not be sent is queued again at
once.

Not here: any decision about frames, batches or peers (``core``), what a message means (``inbound``), how an
action is sent (``outbound``), the options of sockets (``sockets``). Whatever is raised inside a turn ends the
loop: a broker that is half alive is worse than none.
"""

from __future__ import annotations

import contextlib
import os
import time

import structlog
import zmq

from headrace.broker import actions, events
from headrace.broker.arenas import Arenas
from headrace.broker.binding import BoundSockets
from headrace.broker.control import BrokerInfo, Control
from headrace.broker.core import BrokerCore
from headrace.broker.counters import Counters
from headrace.broker.inbound import Inbound
from headrace.broker.journal import Journal
from headrace.broker.model_store import ModelStore
from headrace.broker.monitors import Monitors
from headrace.broker.outbound import Outbound
from headrace.broker.recording import Recording
from headrace.broker.reload_desk import ReloadDesk
from headrace.broker.shell_settings import ShellSettings
from headrace.broker.snapshot import Snapshots
from headrace.broker.sockets import Role
from headrace.protocol.messages import Endpoints

#: Messages taken from one socket in one turn, so that a flood on one can't keep the others waiting. At some
#: 10 microseconds a message that is a few milliseconds.
MAX_MESSAGES_PER_TURN = 256

#: The loop turns at least this often, so that /healthz can tell a stalled loop from an idle one.
MAX_WAIT_NS = 1_000_000_000

#: How often socket monitors are read, and arenas that nobody needs any more are let go.
UPKEEP_NS = 1_000_000_000

#: The order in which sockets are drained: workers first, as what they finish frees slots and memory.
_ORDER = (Role.WORKERS, Role.CONTROL, Role.RESULTS, Role.FRAMES, Role.INTAKE)

log = structlog.get_logger()


class Shell:
    """The loop. ``request_drain`` and ``stop`` may be called from any thread or signal handler; all else
    belongs to the thread that calls ``run``."""

    def __init__(
        self,
        settings: ShellSettings,
        core: BrokerCore,
        bound: BoundSockets,
        store: ModelStore,
        endpoints: Endpoints,
        release: str,
        journal: Journal | None = None,
        arenas: Arenas | None = None,
    ) -> None:
        limits = settings.core.limits
        self.counters = Counters()
        self.snapshots = Snapshots(core, self.counters, self._wake)
        self._core = core
        self._grace_ns = settings.grace_ms * 1_000_000
        self._actions: list[actions.Action] = []
        self._journal = journal
        if journal is not None:
            self.counters.journal = journal.counts
        self._recorded_count = 0  # actions of this turn whose outcomes are in the journal
        self._arenas = arenas or Arenas(None, "")
        self.counters.arenas = self._arenas.counts
        self._outbound = Outbound(
            bound.by_role, endpoints, limits, settings.core.heartbeat_ms, self.counters, self._arenas
        )
        info = BrokerInfo(
            release, os.getpid(), {**{r.value: a for r, a in bound.addresses.items()}, "http": endpoints.http}
        )
        recording = Recording()
        self._reloads = ReloadDesk(core, store, settings.folders_of_models(), self._tell, self._wake)
        told = (journal, recording, self._reloads, self.counters.figures)
        control = Control(core, store, limits, info, self._drain_from_control, *told)
        self._inbound = Inbound(
            bound.by_role,
            self._outbound,
            control,
            endpoints,
            limits,
            self.counters,
            self._tell,
            self._arenas,
            recording,
        )
        self._monitors = Monitors(bound.context, bound.by_role, self.counters)
        self._wake_read, self.wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self.wake_write, False)
        self._poller = zmq.Poller()
        for socket in bound.by_role.values():
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._sockets = bound.by_role
        self._next_upkeep_ns = 0
        # Written by request_drain() and stop(), from any thread.
        self._is_drain_requested = self._is_end_requested = self._is_stopped = False
        # The loop's own.
        self._is_draining = False
        self._is_ending = False
        self._grace_end_ns: int | None = None

    def request_drain(self) -> None:
        """Admit nothing more, finish what was admitted within the grace time, then end the loop."""
        self._is_end_requested = True
        self._is_drain_requested = True
        self._wake()

    def stop(self) -> None:
        """End the loop after the current turn, whatever is unfinished."""
        self._is_stopped = True
        self._wake()

    def run(self) -> None:
        """Turn until drained or stopped. Tells the peers, and leaves the sockets to their owner."""
        try:
            while not self._is_stopped:
                self._turn()
                if self._is_ending and self._core.is_drained:
                    break
            self._outbound.say_goodbye("the broker stops")
        finally:
            self.snapshots.close()

    def close(self) -> None:
        """Close the loop's own, whether it ran or not, after nobody can call request_drain() or stop() any
        more. The sockets close after it: their context would wait for a monitor for ever."""
        self._monitors.close()
        os.close(self._wake_read)
        os.close(self.wake_write)

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._timeout_ms()))
        began_ns = time.monotonic_ns()
        if self._wake_read in ready:
            os.read(self._wake_read, 4_096)
        self._take_requests(began_ns)
        self._reloads.deliver(began_ns)
        for role in _ORDER:
            if self._sockets[role] in ready:
                if role is Role.CONTROL:
                    self._record()  # a replay answered in this turn may hold what it has just finished
                self._inbound.drain(role, MAX_MESSAGES_PER_TURN, time.monotonic_ns)
        self._tell(events.Tick(), time.monotonic_ns())
        self._carry_out()
        if began_ns >= self._next_upkeep_ns:
            self._next_upkeep_ns = began_ns + UPKEEP_NS
            self._monitors.read()
            for name in self._arenas.sweep(self._core.arenas_in_use):
                self._tell(events.ArenaClosed(name), began_ns)
        ended_ns = time.monotonic_ns()
        self._count_turn(ended_ns - began_ns)
        self.snapshots.end_turn(ended_ns)

    def _timeout_ms(self) -> int:
        """Return how long the poller may wait, rounded up: waking early would turn the loop for nothing."""
        if self._is_drain_requested or self._is_stopped:
            return 0
        now_ns = time.monotonic_ns()
        wait_ns = MAX_WAIT_NS
        for wakeup_ns in (self._core.next_wakeup_ns(), self._grace_end_ns):
            if wakeup_ns is not None:
                wait_ns = min(wait_ns, wakeup_ns - now_ns)
        return max(0, -(-wait_ns // 1_000_000))

    def _take_requests(self, now_ns: int) -> None:
        if self._is_drain_requested:
            self._is_drain_requested = False
            if not self._is_draining:
                self._is_draining = True
                log.info("draining", unfinished_count=self._core.account.unfinished)
                self._tell(events.DrainRequested(), now_ns)
            if self._is_end_requested and not self._is_ending:
                self._is_ending = True
                self._grace_end_ns = now_ns + self._grace_ns
                log.info("stopping when drained", grace_ms=self._grace_ns // 1_000_000)
        if self._grace_end_ns is not None and now_ns >= self._grace_end_ns:
            self._grace_end_ns = None
            log.warning("grace ended", unfinished_count=self._core.account.unfinished)
            self._tell(events.GraceEnded(), now_ns)

    def _drain_from_control(self, is_final: bool) -> None:
        """Drain, and with ``is_final`` end the loop as a first SIGTERM would."""
        self._is_end_requested = self._is_end_requested or is_final
        self._is_drain_requested = True

    def _tell(self, event: events.Event, now_ns: int) -> None:
        self._actions.extend(self._core.handle(event, now_ns))

    def _carry_out(self) -> None:
        """Carry out what has gathered; then tell the core whom that could not reach, and carry out its
        answer.

        Ends, since each peer is reported once a turn and the core forgets a peer that is reported.
        """
        reported: set[bytes] = set()
        while self._actions or self._outbound.unreachable:
            self._record()
            todo, self._actions, self._recorded_count = self._actions, [], 0
            self._outbound.carry_out(todo)
            gone, self._outbound.unreachable = self._outbound.unreachable, {}
            for peer, undelivered in gone.items():
                if peer not in reported:
                    reported.add(peer)
                    # Only a Tick dispatches: next_wakeup_ns() is now, so what this peer had is sent
                    # elsewhere in the next turn, at once.
                    event = events.PeerUnreachable(peer, tuple(undelivered))
                    self._tell(event, time.monotonic_ns())

    def _record(self) -> None:
        """Write the outcomes that have gathered to the journal, before anybody is told of them."""
        if self._journal is None:
            return
        new = self._actions[self._recorded_count :]
        self._recorded_count = len(self._actions)
        outcomes = [action.outcome for action in new if isinstance(action, actions.PublishOutcome)]
        if outcomes:
            self._journal.append(outcomes)

    def _count_turn(self, took_ns: int) -> None:
        counters = self.counters
        counters.turn_count += 1
        counters.busy_ns += took_ns
        counters.longest_turn_ns = max(counters.longest_turn_ns, took_ns)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self.wake_write, b"\0")
