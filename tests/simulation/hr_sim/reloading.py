"""Orders to reload models, for a world in which they are a kind of fault."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from headrace.broker import events
from headrace.broker.reload_state import ReloadOrder
from hr_sim.network import MS

if TYPE_CHECKING:
    from hr_sim.world import World


class ReloadOrders:
    """Draws orders and gives them to whatever broker is up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"reloads {world.options.seed}")
        self._last = 0

    def reload(self) -> bool:
        """Ask for a new version of some model; its files are read a little later, if they can be."""
        rng, broker = self._rng, self._world.broker
        self._last += 1
        order = ReloadOrder(
            self._last,
            rng.choice(("mean", "edge")),
            version=f"r{self._last}",
            frames_count=rng.choice((0, 1, 8)),
            max_difference=rng.choice((None, 0.5)),
            is_forced=rng.random() < 0.2,
            timeout_ms=rng.choice((50, 1_000, 4_000)),
        )
        if not broker.is_up:
            return False
        broker.tell(events.ReloadAsked(order))
        read: events.ModelFilesRead | events.ModelFilesUnreadable = events.ModelFilesRead(order.number, ())
        if rng.random() < 0.1:
            read = events.ModelFilesUnreadable(order.number, "it is gone")
        self._world.after(rng.choice((0, 2, 100)) * MS, self._read, (broker.run, read))
        return True

    def _read(self, told: tuple[int, events.ModelFilesRead | events.ModelFilesUnreadable]) -> None:
        if self._world.broker.is_up and self._world.broker.run == told[0]:
            self._world.broker.tell(told[1])

    def way_back(self) -> bool:
        """Ask for the version before, or let it go."""
        broker = self._world.broker
        model = self._rng.choice(("mean", "edge"))
        kind = self._rng.choice((events.RollbackAsked, events.RollbackAsked, events.CommitAsked))
        if broker.is_up:
            broker.tell(kind(model))
        return broker.is_up
