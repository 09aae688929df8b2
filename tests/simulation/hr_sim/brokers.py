"""The broker's process: the production core and control, in a loop that turns as broker/shell.py does."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.control import BrokerInfo, Control
from headrace.broker.core import BrokerCore
from headrace.broker.model_store import ModelStore
from headrace.errors import RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Batch,
    Cancel,
    Compared,
    Discover,
    Done,
    Failed,
    Frame,
    Frames,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Loaded,
    NotLoaded,
    Outcome,
    Outcomes,
    Ready,
    Refused,
    Request,
    Setup,
    ShmRef,
    Subscribed,
    Welcome,
    WorkerHello,
)
from hr_sim.models import core_settings, endpoints
from hr_sim.network import CHECK_EVERY_TURNS, MS, US, Link, Node
from hr_sim.referee import Referee
from hr_sim.workers import HOST_KEY

if TYPE_CHECKING:
    from hr_sim.world import World

#: As in the shell: what is taken from one socket in one turn, and in which order.
MAX_MESSAGES_PER_TURN = 256
_ORDER = ("workers", "control", "results", "frames", "intake")

MAX_BUNDLE = 64

_GRACE_NS = 500 * MS


class BrokerNode(Node):
    """One broker. Each start draws a new boot id and begins with an empty core and a new referee."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "broker")
        self.settings = core_settings(world.options)
        self.limits: Limits = self.settings.limits
        self._last_peer = 0
        self._begin()

    def _begin(self) -> None:
        self.boot = self.world.rng.getrandbits(63)
        self.core = BrokerCore(self.settings, self.boot, self.world.arenas.read)
        self._remote: dict[bytes, None] = {}
        self.referee = Referee(self.settings, self.boot, self.world)
        self.endpoints = endpoints(self.boot)
        info = BrokerInfo("sim", 1, {})
        self._control = Control(self.core, ModelStore(), self.limits, info, lambda _is_final: None)
        self._inbox: dict[str, deque[tuple[Link, Any]]] = {role: deque() for role in _ORDER}
        self._by_peer: dict[bytes, Link] = {}
        self._results: list[Link] = []
        self._actions: list[act.Action] = []
        self._unreachable: list[bytes] = []
        self._greeted: dict[bytes, None] = {}
        self._ending_ns: int | None = None
        self.world.boots.append(self.referee)
        self.wake(self.world.now_ns)

    # -- the process --------------------------------------------------------------------------------

    def accept(self, client: Node, role: str) -> Link:
        """Take a new connection to one of the sockets."""
        self._last_peer += 1
        peer = role[:1].encode() + self._last_peer.to_bytes(4, "big")
        link = Link(self.world, client, self, role, peer)
        if role == "results":
            self._results.append(link)
        else:
            self._by_peer[peer] = link
        return link

    def receive(self, link: Link, message: Any) -> None:
        self._inbox[link.role].append((link, message))
        self.wake(self.world.now_ns)

    def lose(self, link: Link) -> None:
        self._by_peer.pop(link.peer, None)
        if link in self._results:
            self._results.remove(link)

    def kill(self) -> None:
        super().kill()
        self.world.arenas.let_go(self.boot)
        self.referee.end(is_crash=True)

    def stop(self) -> None:
        """SIGTERM: drain, at most for the grace."""
        if self._ending_ns is None:
            self._ending_ns = self.world.now_ns + _GRACE_NS
            self._tell(events.DrainRequested(), self.world.now_ns)
            self.wake(self.world.now_ns)

    def revive(self) -> None:
        super().revive()
        self._begin()

    def wakeup_ns(self) -> int | None:
        times = [self.core.next_wakeup_ns(), self._ending_ns]
        if any(self._inbox.values()):
            times.append(self.world.now_ns)
        return min((time for time in times if time is not None), default=None)

    # -- one turn -----------------------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        if self._ending_ns is not None and now_ns >= self._ending_ns:
            self._tell(events.GraceEnded(), now_ns)
        for role in _ORDER:
            inbox = self._inbox[role]
            for _ in range(min(len(inbox), MAX_MESSAGES_PER_TURN)):
                link, message = inbox.popleft()
                self._take(role, link, message, now_ns)
        self._tell(events.Tick(), now_ns)
        self._carry_out(now_ns)
        self._turns += 1
        if self._turns % CHECK_EVERY_TURNS == 0:
            self.check()
            arenas = self.world.arenas
            used = self.core.arenas_in_use(arenas.held_by(self.boot))
            for name in arenas.sweep(self.boot, used):
                self._tell(events.ArenaClosed(name), now_ns)
        self.free_ns = now_ns + self.world.options.turn_us * US
        if self._ending_ns is not None and self.core.is_drained:
            self._end()

    def _end(self) -> None:
        for peer in list(self._greeted):
            self._send(peer, Goodbye("the broker stops"))
        self.check()
        self.is_up = False
        self.run += 1
        self.world.arenas.let_go(self.boot)
        self.referee.end(is_crash=False)
        # What it had sent leaves before the process ends (linger).
        self.world.after(MS, self._leave, self.run)
        self.world.after(200 * MS, self.world.start_again, self)

    def _leave(self, run: int) -> None:
        if run == self.run and not self.is_up:
            for link in tuple(self.links):
                link.close(self)
            self.links.clear()

    def has_left_ring(self, stream: str, pub_seq: int) -> bool:
        """Tell whether nobody can fetch an outcome any more."""
        return bool(self.core.replay(stream, self.boot, pub_seq, pub_seq, 1)[1])

    def tell(self, event: events.Event) -> None:
        """Hand over an event that comes from no connection."""
        self._tell(event, self.world.now_ns)
        self.wake(self.world.now_ns)

    def check(self) -> None:
        """Compare what the core says of itself with what the referee has seen."""
        self.core.check_invariants()
        self.referee.compare(self.core.account)

    def _tell(self, event: events.Event, now_ns: int) -> None:
        self.world.event_count += 1
        done = self.core.handle(event, now_ns)
        self.referee.observe(self._with_payload(event), done, now_ns)
        if isinstance(event, events.FrameArrived) and isinstance(event.frame, Frame):
            self.world.arenas.judge_arrival(event.frame, done)
        self._actions += done

    def _with_payload(self, event: events.Event) -> events.Event:
        """Return what the referee sees: it knows frames by their contents, wherever those lie."""
        if not isinstance(event, events.FrameArrived) or not isinstance(event.frame, Frame):
            return event
        if not isinstance(event.frame.payload, ShmRef):
            return event
        payload = self.world.arenas.read(event.frame.payload) or b""
        return replace(event, frame=replace(event.frame, payload=payload))

    # -- in -----------------------------------------------------------------------------------------

    def _take(self, role: str, link: Link, message: Any, now_ns: int) -> None:
        peer = link.peer
        if role == "results":
            self._take_subscription(link, message)
            return
        try:
            message = self.world.unwrap(message, self.limits)
        except RemoteProtocolError as error:
            if role != "intake":
                self._send(peer, Refused(error.code, error.message))
            known = None if role == "intake" else peer
            self._tell(events.PeerMisbehaved(known, error.code, error.kind), now_ns)
            return
        if role == "intake":
            for frame in message.frames:
                self._tell(events.FrameArrived(None, frame), now_ns)
        elif role == "frames":
            self._take_from_producer(peer, message, now_ns)
        elif role == "workers":
            self._take_from_worker(peer, message, now_ns)
        elif isinstance(message, Request):
            self._send(peer, self._control.answer(message, now_ns))

    def _take_from_producer(self, peer: bytes, message: Any, now_ns: int) -> None:
        match message:
            case Frames(frames):
                for frame in frames:
                    self._tell(events.FrameArrived(peer, frame), now_ns)
            case Heartbeat():
                self._tell(events.PeerHeard(peer, is_heartbeat=True), now_ns)
            case Hello():
                arena_bytes = self.world.arenas.open(message, self.boot)
                self._tell(events.ProducerArrived(peer, message, arena_bytes), now_ns)
            case Goodbye():
                self._greeted.pop(peer, None)
                self._tell(events.ProducerLeft(peer), now_ns)

    def _take_from_worker(self, peer: bytes, message: Any, now_ns: int) -> None:
        match message:
            case Done():
                self._tell(events.BatchDone(peer, message), now_ns)
            case Heartbeat(probe):
                self._tell(events.PeerHeard(peer, is_heartbeat=True, is_worker=True, probe=probe), now_ns)
            case Failed():
                self._tell(events.BatchFailed(peer, message), now_ns)
            case Ready():
                self._tell(events.WorkerReady(peer, message), now_ns)
            case Loaded():
                self._tell(events.ModelLoaded(peer, message), now_ns)
            case NotLoaded():
                self._tell(events.ModelNotLoaded(peer, message), now_ns)
            case Compared():
                self._tell(events.BatchCompared(peer, message), now_ns)
            case WorkerHello():
                self._tell(events.WorkerArrived(peer, message), now_ns)
            case Goodbye():
                self._tell(events.WorkerLeft(peer), now_ns)
            case Discover():
                self._send(peer, self.endpoints)

    def _take_subscription(self, link: Link, message: tuple[str, bytes]) -> None:
        kind, topic = message
        if kind == "unsubscribe":
            link.topics.pop(topic, None)
            return
        link.topics[topic] = None
        confirmed = Subscribed(self.boot, topic.rstrip(b"\0").decode())
        self._publish(topic, confirmed)

    # -- out ----------------------------------------------------------------------------------------

    def _carry_out(self, now_ns: int) -> None:
        reported: set[bytes] = set()
        while self._actions or self._unreachable:
            todo, self._actions = self._actions, []
            self._do_all(todo)
            gone, self._unreachable = self._unreachable, []
            for peer in gone:
                if peer not in reported:
                    reported.add(peer)
                    self._tell(events.PeerUnreachable(peer), now_ns)

    def _do_all(self, todo: list[act.Action]) -> None:
        index = 0
        while index < len(todo):
            action = todo[index]
            index += 1
            if not isinstance(action, act.PublishOutcome):
                self._do(action)
                continue
            by_stream: dict[str, list[Outcome]] = {action.outcome.stream: [action.outcome]}
            while index < len(todo) and isinstance(following := todo[index], act.PublishOutcome):
                by_stream.setdefault(following.outcome.stream, []).append(following.outcome)
                index += 1
            for stream, outcomes in by_stream.items():
                for start in range(0, len(outcomes), MAX_BUNDLE):
                    bundle = Outcomes(tuple(outcomes[start : start + MAX_BUNDLE]))
                    self._publish(codec.topic_of(stream), bundle)

    def _do(self, action: act.Action) -> None:
        match action:
            case act.SendBatch(peer, batch):
                self._send(peer, self._inlined(batch) if peer in self._remote else batch)
            case act.SendToWorker(peer, order):
                self._send(peer, order)
            case act.CancelBatch(peer, number):
                self._send(peer, Cancel(number))
            case act.GrantCredit(peer, credit):
                self._send(peer, credit)
            case act.SendReject(peer, reject):
                self._send(peer, reject)
            case act.SendHeartbeat(peer, _, probe):
                self._send(peer, Heartbeat(probe))
            case act.WelcomeProducer(peer, credits_count, models, is_shm_possible):
                welcome = Welcome(
                    self.boot,
                    credits_count,
                    self.settings.heartbeat_ms,
                    self.limits,
                    models,
                    self.endpoints,
                    is_shm_possible,
                )
                if self._send(peer, welcome):
                    self._greeted[peer] = None
            case act.SetUpWorker(peer, models, host_key):
                if host_key != HOST_KEY:
                    self._remote[peer] = None
                setup = Setup(self.boot, self.settings.heartbeat_ms, self.limits, models, self.endpoints)
                if self._send(peer, setup):
                    self._greeted[peer] = None
            case act.RefusePeer(peer, code, message):
                self._greeted.pop(peer, None)
                self._send(peer, Refused(code, message))

    def _inlined(self, batch: Batch) -> Batch:
        """Return a batch for a worker of another host."""
        frames = []
        for frame in batch.frames:
            payload = self.world.arenas.read(frame.payload) if isinstance(frame.payload, ShmRef) else None
            frames.append(frame if payload is None else replace(frame, payload=payload))
        return replace(batch, frames=tuple(frames))

    def _send(self, peer: bytes, message: Any) -> bool:
        if peer in self._unreachable:
            return False  # as the shell: nothing is sent behind a message that was dropped in this turn
        link = self._by_peer.get(peer)
        is_full = link is not None and link.pending(link.client) >= self.world.options.router_hwm
        if link is None or is_full or not link.is_open(self):
            if is_full:
                self.world.count_fault("router_full")
            self._greeted.pop(peer, None)
            self._unreachable.append(peer)
            return False
        link.send(self, self.world.wrap(message))
        return True

    def _publish(self, topic: bytes, message: Outcomes | Subscribed) -> None:
        wrapped: Any = None
        hwm = self.world.options.results_hwm
        for link in self._results:
            if not any(topic.startswith(subscribed) for subscribed in link.topics):
                continue
            # The subscriber's own queue takes messages before the broker's fills up.
            if link.pending(link.client) + link.unread >= hwm:
                self.world.count_fault("published_dropped")
                continue
            if wrapped is None:
                wrapped = self.world.wrap(message)
            link.send(self, (topic, wrapped))
