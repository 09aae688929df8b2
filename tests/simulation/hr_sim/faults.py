"""Strikes the world with the faults that its options name, at random times and places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hr_sim.network import MS, Node
from hr_sim.reloading import ReloadOrders
from hr_sim.workers import WorkerNode

if TYPE_CHECKING:
    from hr_sim.world import World

_NS_PER_S = 1_000_000_000

#: Subscribers that may be added to one world.
MAX_LATE = 4


class Faults:
    """One timer per kind of fault that is switched on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._orders = ReloadOrders(world)
        for kind in world.options.rates:
            self._schedule(kind)

    def _schedule(self, kind: str) -> None:
        world = self._world
        gap_ns = _NS_PER_S / world.options.rates[kind] * world.rng.expovariate(1.0)
        world.after(int(gap_ns) + 1, self._strike, kind)

    def _strike(self, kind: str) -> None:
        if self._world.is_healing:
            return
        strike = getattr(self, f"_{kind}", None)
        if strike is not None and strike():
            self._world.count_fault(kind)
        self._schedule(kind)

    def _pick(self, nodes: list[Node]) -> Node | None:
        alive = [node for node in nodes if node.is_up]
        return self._world.rng.choice(alive) if alive else None

    def _short_ns(self) -> int:
        """Return a time from well under to well over the silence that ends a session."""
        return int(self._world.options.heartbeat_ms * MS * self._world.rng.choice((0.1, 1.0, 2.5, 4.0, 10.0)))

    def _restart_later(self, node: Node) -> None:
        self._world.after(self._short_ns(), self._world.start_again, node)

    def _kill(self, nodes: list[Node]) -> bool:
        node = self._pick(nodes)
        if node is None:
            return False
        node.kill()
        self._restart_later(node)
        return True

    def _pause(self, nodes: list[Node]) -> bool:
        node = self._pick(nodes)
        if node is None:
            return False
        node.pause(self._short_ns())
        return True

    # -- the kinds ----------------------------------------------------------------------------------

    def _broker_crash(self) -> bool:
        return self._kill([self._world.broker])

    def _broker_stop(self) -> bool:
        broker = self._world.broker
        if not broker.is_up:
            return False
        broker.stop()
        return True

    def _broker_pause(self) -> bool:
        return self._pause([self._world.broker])

    def _producer_crash(self) -> bool:
        return self._kill(list(self._world.producers))

    def _producer_pause(self) -> bool:
        return self._pause(list(self._world.producers))

    def _producer_goodbye(self) -> bool:
        world = self._world
        alive = [producer for producer in world.producers if producer.is_up]
        if not alive:
            return False
        producer = world.rng.choice(alive)
        producer.leave()
        self._restart_later(producer)
        return True

    def _worker_crash(self) -> bool:
        return self._kill(list(self._world.workers))

    def _worker_pause(self) -> bool:
        return self._pause(list(self._world.workers))

    def _any_worker(self) -> WorkerNode | None:
        alive = [worker for worker in self._world.workers if worker.is_up]
        return self._world.rng.choice(alive) if alive else None

    def _worker_stop(self) -> bool:
        worker = self._any_worker()
        if worker is None:
            return False
        worker.stop()
        return True

    def _worker_hang(self) -> bool:
        worker = self._any_worker()
        if worker is None:
            return False
        worker.hang_next = True
        return True

    def _worker_slow(self) -> bool:
        worker = self._any_worker()
        if worker is None:
            return False
        worker.slow_until_ns = self._world.now_ns + 2 * self._short_ns()
        return True

    def _worker_twin(self) -> bool:
        """A second process is started under the id of the first one."""
        world = self._world
        worker = self._any_worker()
        if worker is None or len(world.twins) >= 2:
            return False
        world.twins.append(WorkerNode(world, worker.name))
        return True

    def _subscriber_crash(self) -> bool:
        return self._kill(list(self._world.subscribers))

    def _subscriber_pause(self) -> bool:
        return self._pause(list(self._world.subscribers))

    def _subscriber_late(self) -> bool:
        world = self._world
        if len(world.subscribers) >= world.options.subscribers + MAX_LATE:
            return False
        world.add_subscriber(f"subscriber-late-{len(world.subscribers)}")
        return True

    def _reload(self) -> bool:
        return self._orders.reload()

    def _way_back(self) -> bool:
        return self._orders.way_back()

    def _nodes(self) -> list[Node]:
        world = self._world
        return [*world.producers, *world.plain, *world.workers, *world.subscribers]

    def _cut(self) -> bool:
        node = self._pick(self._nodes())
        if node is None or not node.links:
            return False
        self._world.rng.choice(node.links).cut()
        return True

    def _partition(self) -> bool:
        node = self._pick(self._nodes())
        if node is None:
            return False
        node.partitioned_until_ns = self._world.now_ns + self._short_ns()
        return True
