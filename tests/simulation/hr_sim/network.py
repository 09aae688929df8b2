"""Nodes that take turns, and links between them that behave as TCP connections do.

Theory of operation. A node is a process with one loop: what arrives is put into its inbox, and a turn is
scheduled; the turn hands all of it to a production state machine and then one Tick, as the shells do. A
paused node takes no turn until it is continued. Inside a link nothing is lost or reordered; a cut loses what
is under way in both directions, and each end learns of it later. A process that dies leaves behind what its
kernel had taken already: a prefix of what was under way. A partition delays everything until it ends; new
connections can't be made meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hr_sim.world import World


@dataclass(slots=True)
class Wrapped:
    """What has arrived, as it went over the network: it is read (``World.unwrap``) in its receiver's turn."""

    message: Any


MS = 1_000_000
US = 1_000

#: A connection attempt is tried again this often, until discovery gives up.
_ATTEMPT_NS = 50 * MS
_DISCOVERY_NS = 2_000 * MS


#: How often sessions and the core check themselves.
CHECK_EVERY_TURNS = 20


class Node(ABC):
    """One process. Subclasses give it a loop (``turn``) and a wake-up time."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_up = True
        self.run = 0
        self.paused_until_ns = 0
        self.partitioned_until_ns = 0
        self.free_ns = 0
        self.links: list[Link] = []
        self._turn_ns: int | None = None
        self._turns = 0

    # -- turns --------------------------------------------------------------------------------------

    def wake(self, at_ns: int) -> None:
        """Take a turn at that time, or as soon after as the node runs."""
        at_ns = max(at_ns, self.world.now_ns, self.paused_until_ns, self.free_ns)
        if self._turn_ns is None or at_ns < self._turn_ns:
            self._turn_ns = at_ns
            self.world.at(at_ns, self._take_turn, self.run)

    def _take_turn(self, run: int) -> None:
        now_ns = self.world.now_ns
        if not self.is_up or run != self.run or self._turn_ns != now_ns:
            return
        self._turn_ns = None
        if now_ns < self.paused_until_ns:
            self.wake(self.paused_until_ns)
            return
        self.turn(now_ns)
        wakeup_ns = self.wakeup_ns()
        if wakeup_ns is not None and self.is_up:
            if wakeup_ns <= now_ns and self.free_ns <= now_ns:
                # A shell's poll has a resolution, too; a state machine that spins shows as too many events.
                wakeup_ns = now_ns + US
            self.wake(wakeup_ns)

    @abstractmethod
    def turn(self, now_ns: int) -> None:
        """Hand over what arrived, then a Tick; carry out what is asked for."""

    def check_now_and_then(self, session: Any) -> None:
        """Let a session check itself: it costs a walk over all it holds."""
        self._turns += 1
        if self._turns % CHECK_EVERY_TURNS == 0:
            session.check_invariants()

    @abstractmethod
    def wakeup_ns(self) -> int | None:
        """Return when the next turn is due at the latest."""

    # -- what happens to it -------------------------------------------------------------------------

    @abstractmethod
    def receive(self, link: Link, message: Any) -> None:
        """Something arrived."""

    def lose(self, link: Link) -> None:  # noqa: B027 - most nodes have nothing to do
        """The node has learnt that a connection is gone."""

    def pause(self, ns: int) -> None:
        """Stop it (SIGSTOP) for a while."""
        self.paused_until_ns = max(self.paused_until_ns, self.world.now_ns + ns)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self.is_up = False
        self.run += 1
        self._turn_ns = None
        for link in tuple(self.links):
            link.close(self)
        self.links.clear()

    def revive(self) -> None:
        """Start it anew: a new process."""
        self.is_up = True
        self.run += 1
        self._turn_ns = None
        self.paused_until_ns = 0
        self.free_ns = 0


class Link:
    """One connection of a client to a socket (``role``) of the broker. ``peer`` is its routing id there."""

    def __init__(self, world: World, client: Node, server: Node, role: str, peer: bytes) -> None:
        self.world = world
        self.role = role
        self.peer = peer
        self.client = client
        self.server = server
        self.topics: dict[bytes, None] = {}
        self.unread = 0
        low_us, high_us = world.options.delay_us
        self.delay_us = (low_us, world.rng.randint(low_us, high_us))
        self._open = {id(client): True, id(server): True}
        self._there = {id(client): True, id(server): True}
        self._pipes = {id(client): _Pipe(self, client), id(server): _Pipe(self, server)}
        client.links.append(self)
        server.links.append(self)

    def is_open(self, node: Node) -> bool:
        """Tell whether the node still takes the connection for open."""
        return self._open[id(node)]

    def is_there(self, node: Node) -> bool:
        """Tell whether the node's end still exists."""
        return self._there[id(node)]

    def send(self, sender: Node, message: Any) -> None:
        """Send to the other end. What is sent into a broken connection vanishes."""
        receiver = self.server if sender is self.client else self.client
        if self._there[id(receiver)] and self._there[id(sender)]:
            self._pipes[id(receiver)].send(message)

    def pending(self, receiver: Node) -> int:
        """Count what is under way to a node."""
        return len(self._pipes[id(receiver)].queue)

    def cut(self) -> None:
        """Lose everything under way; both ends learn of it some time later."""
        for node in (self.client, self.server):
            self._pipes[id(node)].queue.clear()
            self._there[id(node)] = False
        for node in (self.client, self.server):
            self.world.after(self._notice_ns(), self._tell, node)

    def close(self, by: Node) -> None:
        """One end is closed, by its process or by its death."""
        if not self._there[id(by)]:
            self._open[id(by)] = False
            return
        other = self.server if by is self.client else self.client
        self._there[id(by)] = self._open[id(by)] = False
        self._pipes[id(by)].queue.clear()
        pipe = self._pipes[id(other)]
        kept = self.world.rng.randint(0, len(pipe.queue))
        while len(pipe.queue) > kept:
            pipe.queue.pop()
        if self in by.links:
            by.links.remove(self)
        last_ns = pipe.queue[-1][0] if pipe.queue else self.world.now_ns
        self.world.at(max(last_ns, self.world.now_ns) + self._notice_ns(), self._tell, other)

    def _notice_ns(self) -> int:
        return self.world.rng.choice((0, 0, 1, 20)) * MS

    def _tell(self, node: Node) -> None:
        if self.world.now_ns < self.client.partitioned_until_ns:
            self.world.at(self.client.partitioned_until_ns, self._tell, node)
            return
        if self._open[id(node)]:
            self._open[id(node)] = False
            self._there[id(node)] = False
            if self in node.links:
                node.links.remove(self)
                node.lose(self)


class _Pipe:
    """One direction of a link."""

    def __init__(self, link: Link, receiver: Node) -> None:
        self.queue: deque[tuple[int, Any]] = deque()
        self._link = link
        self._receiver = receiver
        self._last_ns = 0
        self._is_scheduled = False

    def send(self, message: Any) -> None:
        world = self._link.world
        delay_ns = world.rng.randint(*self._link.delay_us) * US
        self._last_ns = max(self._last_ns, world.now_ns + delay_ns)
        self.queue.append((self._last_ns, message))
        self._schedule()

    def _schedule(self) -> None:
        if self.queue and not self._is_scheduled:
            self._is_scheduled = True
            world = self._link.world
            world.at(max(self.queue[0][0], world.now_ns), self._deliver, None)

    def _deliver(self, _: None) -> None:
        self._is_scheduled = False
        link = self._link
        now_ns = link.world.now_ns
        if now_ns < link.client.partitioned_until_ns:
            self._is_scheduled = True
            link.world.at(link.client.partitioned_until_ns, self._deliver, None)
            return
        while self.queue and self.queue[0][0] <= now_ns:
            message = self.queue.popleft()[1]
            if link.is_there(self._receiver):
                self._receiver.receive(link, message)
        self._schedule()


class Dialer:
    """Discovers the broker and makes links, as clients and workers do before they connect."""

    def __init__(self, node: Node, roles: tuple[str, ...]) -> None:
        self._node = node
        self._roles = roles
        self._attempt = 0

    def dial(self) -> None:
        """Try until the broker answers or discovery gives up; then call ``dialled`` of the node."""
        self._attempt += 1
        world = self._node.world
        world.after(
            self._delay_ns(), self._try, (self._attempt, world.now_ns + _DISCOVERY_NS, self._node.run)
        )

    def forget(self) -> None:
        """Drop what is being tried."""
        self._attempt += 1

    def _delay_ns(self) -> int:
        world = self._node.world
        return 2 * world.rng.randint(*world.options.delay_us) * US

    def _try(self, key: tuple[int, int, int]) -> None:
        node = self._node
        world = node.world
        attempt, until_ns, run = key
        if attempt != self._attempt or run != node.run or not node.is_up:
            return
        broker = world.broker
        can_reach = (
            broker.is_up
            and world.now_ns >= broker.paused_until_ns
            and world.now_ns >= node.partitioned_until_ns
        )
        if can_reach:
            node.dialled([broker.accept(node, role) for role in self._roles])
        elif world.now_ns >= until_ns:
            node.dialled([])
        else:
            world.after(_ATTEMPT_NS, self._try, key)
