"""What goes through a pipeline, and what it has loaded: data only.

See ``pipeline`` for what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from headrace.protocol.messages import Batch, ModelSpec
from headrace.workers.adapters import Adapter
from headrace.workers.beside import LoadedModel, Plans, Shadow
from headrace.workers.engine import Engine, ModelKey
from headrace.workers.staging import StagingPlan, StagingResult


class Place(Enum):
    """Where a batch is. Only a batch that is still WAITING can be dropped."""

    WAITING = "waiting"
    ON_DEVICE = "on_device"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Job:
    """One batch on its way through. ``place`` is written under the pipeline's lock, the rest by the thread
    that has the job."""

    batch: Batch
    received_ns: int
    place: Place = Place.WAITING
    plan: StagingPlan | None = None
    staging: StagingResult | None = None
    staged_ns: int = 0
    shadow: Shadow | None = None
    sample: Shadow | None = None


@dataclass(frozen=True, slots=True)
class LoadAll:
    """Replace what is loaded."""

    models: tuple[ModelSpec, ...]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class LoadBeside:
    """Load one more model, in a thread of its own."""

    spec: ModelSpec
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Adopt:
    """A model was loaded beside the others: serve it."""

    loaded: LoadedModel


@dataclass(frozen=True, slots=True)
class Unload:
    """Let go of one model."""

    key: ModelKey


@dataclass(frozen=True, slots=True)
class Served:
    """What is loaded: replaced as a whole. ``beside`` holds the engines of models loaded one by one."""

    engine: Engine | None = None
    plans: Plans = field(default_factory=dict)
    adapters: dict[ModelKey, Adapter] = field(default_factory=dict)
    beside: dict[ModelKey, Engine] = field(default_factory=dict)

    def engine_of(self, batch: Batch) -> Engine | None:
        """Return the engine that runs a batch."""
        if not self.beside:
            return self.engine
        return self.beside.get(ModelKey(batch.model, batch.version), self.engine)

    def engines(self) -> list[Engine]:
        """Return all of them."""
        return [*([] if self.engine is None else [self.engine]), *self.beside.values()]

    def without(self, key: ModelKey) -> Served:
        """Return the same without one model."""
        return Served(
            self.engine,
            {name: plan for name, plan in self.plans.items() if name[:2] != (key.name, key.version)},
            {each: adapter for each, adapter in self.adapters.items() if each != key},
            {each: engine for each, engine in self.beside.items() if each != key},
        )


Task: TypeAlias = Job | LoadAll | LoadBeside | Adopt | Unload | Shadow
