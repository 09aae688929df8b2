"""Producer processes: the production session in a loop as clients/producer_loop.py's, and plain scripts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.clients import producer_session as ps
from headrace.errors import RemoteProtocolError
from headrace.protocol.messages import Frame, Frames, Limits, ShmRef
from hr_sim.frames import StreamPlan
from hr_sim.network import MS, Dialer, Link, Node, Wrapped

if TYPE_CHECKING:
    from hr_sim.world import World

_NS_PER_S = 1_000_000_000


class ProducerNode(Node):
    """A producer of some streams. A restart is a new process: another epoch, seq from 0."""

    def __init__(self, world: World, name: str, streams: list[str]) -> None:
        super().__init__(world, name)
        self._plans = [world.frames.plan(stream) for stream in streams]
        self._dialer = Dialer(self, ("frames",))
        self._begin()

    def _begin(self) -> None:
        rng = self.world.rng
        self.epoch = rng.getrandbits(63)
        self.session = ps.ProducerSession(
            epoch=self.epoch, name=self.name, jitter=rng.random(), inlined=self._inlined
        )
        arena_bytes = self.world.options.arena_bytes
        self.arena = self.world.arenas.make(self.epoch, arena_bytes) if arena_bytes else None
        self.limits = Limits()
        self._next_seq = dict.fromkeys((plan.name for plan in self._plans), 0)
        self._inbox: deque[ps.Event | Wrapped] = deque()
        self._link: Link | None = None
        self._is_leaving = False
        self._next_push_ns = self.world.now_ns
        self._schedule_push()
        self.wake(self.world.now_ns)

    # -- the application ----------------------------------------------------------------------------

    def _schedule_push(self) -> None:
        options, rng = self.world.options, self.world.rng
        mean_ns = _NS_PER_S * options.burst * options.producers / options.frames_per_s
        self._next_push_ns += int(mean_ns * rng.expovariate(1.0)) + 1
        self.world.at(max(self._next_push_ns, self.world.now_ns), self._push, self.run)

    def _push(self, run: int) -> None:
        if run != self.run or not self.is_up or self._is_leaving or self.world.is_healing:
            return
        if self.world.now_ns < self.paused_until_ns:
            self.world.at(self.paused_until_ns, self._push, run)
            self._next_push_ns = self.paused_until_ns
            return
        frames = []
        for _ in range(self.world.rng.randint(1, 2 * self.world.options.burst - 1)):
            plan = self.world.rng.choice(self._plans)
            frames.append(self._make(plan))
        # A program waits when too much is unfinished, as Producer.push does.
        if self.session.unfinished_count < 4 * self.world.options.credits + 64:
            self._hand_over(frames)
        self._schedule_push()

    def _make(self, plan: StreamPlan) -> Frame:
        seq = self._next_seq[plan.name]
        self._next_seq[plan.name] = seq + self.world.rng.choice((1, 1, 1, 3))
        frame = self.world.frames.make(plan, seq, self.epoch)
        if self.arena is None or self.session.boot is None or isinstance(frame.payload, ShmRef):
            return frame
        slot = self.arena.take(bytes(frame.payload))
        if slot is None:
            self.world.count_fault("arena_full")
            return frame
        return replace(frame, payload=slot)

    def _inlined(self, frame: Frame) -> Frame:
        if self.arena is None or not isinstance(frame.payload, ShmRef):
            return frame
        payload = self.arena.read(frame.payload)
        assert payload is not None, "a slot of an unfinished frame was freed"
        return replace(frame, payload=payload)

    def _hand_over(self, frames: list[Frame]) -> None:
        self.world.pushes.push(self.name, self.epoch, frames)
        self._inbox.append(ps.FramesPushed(tuple(frames), (ps.FRAME_HEADER_BYTES + 64,) * len(frames)))
        self.wake(self.world.now_ns)

    # -- the process --------------------------------------------------------------------------------

    def receive(self, link: Link, message: Any) -> None:
        if link is self._link:
            self._inbox.append(Wrapped(message))
            self.wake(self.world.now_ns)

    def lose(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._inbox.append(ps.Disconnected("the connection was lost"))
            self.wake(self.world.now_ns)

    def dialled(self, links: list[Link]) -> None:
        if links:
            self._link = links[0]
        connected = ps.Connected("" if self.arena is None else self.arena.name)
        self._inbox.append(connected if links else ps.Disconnected("no answer"))
        self.wake(self.world.now_ns)

    def kill(self) -> None:
        super().kill()
        self._dialer.forget()
        self.world.pushes.abandon(self.epoch)
        if self.arena is not None:
            self.arena.has_owner = False

    def leave(self) -> None:
        """Close as a program does that waits for nothing: say goodbye and end."""
        self._is_leaving = True
        self._carry_out(self.session.handle(ps.CloseRequested(), self.world.now_ns))
        link = self._link
        if link is not None and link in self.links:
            # The goodbye leaves before the process ends (linger).
            self.links.remove(link)
            self.world.after(50 * MS, link.close, self)
        self.kill()

    def revive(self) -> None:
        super().revive()
        self._begin()

    def wakeup_ns(self) -> int | None:
        return self.session.next_wakeup_ns()

    def turn(self, now_ns: int) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Wrapped):
                try:
                    event = ps.MessageReceived(self.world.unwrap(event.message, self.limits))
                except RemoteProtocolError as error:
                    raise AssertionError(f"{self.name} can't read the broker: {error}") from error
            self._carry_out(self.session.handle(event, now_ns))
        self._carry_out(self.session.handle(ps.Tick(), now_ns))
        self.check_now_and_then(self.session)

    def _carry_out(self, actions: list[ps.Action]) -> None:
        self.world.event_count += 1
        for action in actions:
            match action:
                case ps.Send(message):
                    if self._link is not None:
                        self._link.send(self, self.world.wrap(message))
                case ps.Finished(frame, reject):
                    self.world.pushes.finish(frame, reject)
                    if self.arena is not None and isinstance(frame.payload, ShmRef):
                        self.arena.free(frame.payload)
                case ps.Disconnect():
                    if self._link is not None:
                        self._link.close(self)
                        self._link = None
                    # What came over a connection that is closed is not read any more.
                    self._inbox = deque(e for e in self._inbox if isinstance(e, ps.FramesPushed))
                case ps.Connect():
                    self._dialer.dial()


class PlainSender(Node):
    """A script that never says hello: it sends frames without seq and epoch, and now and then rubbish."""

    def __init__(self, world: World, name: str, *, is_intake: bool) -> None:
        super().__init__(world, name)
        self._plan = world.frames.plan(f"plain/{name}")
        self._dialer = Dialer(self, ("intake" if is_intake else "frames",))
        self._link: Link | None = None
        self._dialer.dial()
        world.after(self._pause_ns(), self._push, self.run)

    def _pause_ns(self) -> int:
        options = self.world.options
        return int(4 * _NS_PER_S / options.frames_per_s * self.world.rng.expovariate(1.0)) + 1

    def _push(self, run: int) -> None:
        world = self.world
        if world.is_healing:
            return
        if self._link is not None:
            if world.rng.random() < 0.05 * ("garbage" in world.options.rates):
                world.count_fault("garbage")
                self._link.send(self, world.garbage())
            else:
                frame = world.frames.make(self._plan, None, None)
                self._link.send(self, world.wrap(Frames((frame,))))
                world.pushes.plain_count += 1
        world.after(self._pause_ns(), self._push, run)

    def receive(self, link: Link, message: Any) -> None:
        pass

    def lose(self, link: Link) -> None:
        self._link = None
        self._dialer.dial()

    def dialled(self, links: list[Link]) -> None:
        self._link = links[0] if links else None
        if not links:
            self._dialer.dial()

    def turn(self, now_ns: int) -> None:
        pass

    def wakeup_ns(self) -> int | None:
        return None
