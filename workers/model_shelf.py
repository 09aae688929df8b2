"""What a worker has loaded, and the one model that it loads beside it: part of the worker session, pure.

Not here: what SETUP asks for and when READY is said (worker_session.py), loading itself (beside.py).

A model that is loaded beside those that serve changes nothing for them, whatever becomes of it. At most one
is under way; the broker asks for them one by one.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace.errors import Code
from headrace.protocol.messages import (
    Compare,
    Load,
    Loaded,
    Message,
    ModelProfile,
    ModelSpec,
    NotLoaded,
    Unload,
)
from headrace.workers import worker_events as ev
from headrace.workers.worker_events import Action

_Key: TypeAlias = "tuple[str, str]"


class ModelShelf:
    """See the module. Invariant: each model is here with the profile that was measured of it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._held: dict[_Key, tuple[ModelSpec, ModelProfile]] = {}
        self._under_way: ModelSpec | None = None

    @property
    def is_loading(self) -> bool:
        """True while a model is loaded beside the others."""
        return self._under_way is not None

    def clear(self) -> None:
        """Everything that was loaded is about to go."""
        self._held.clear()

    def fill(self, models: tuple[ModelSpec, ...], profiles: tuple[ModelProfile, ...]) -> None:
        """These were loaded, and nothing else is."""
        self._held = {
            (spec.name, spec.version): (spec, profile) for spec, profile in zip(models, profiles, strict=True)
        }

    def profiles_of(self, models: tuple[ModelSpec, ...]) -> tuple[ModelProfile, ...] | None:
        """Return the profiles of these models, None if one of them, as it is now, is not loaded."""
        found = [self._held.get((spec.name, spec.version)) for spec in models]
        profiles = [
            held[1] for held, spec in zip(found, models, strict=True) if held is not None and held[0] == spec
        ]
        return tuple(profiles) if len(profiles) == len(models) else None

    def drop_all_but(self, models: tuple[ModelSpec, ...]) -> list[Action]:
        """Let go of what was loaded beside these."""
        wanted = {(spec.name, spec.version) for spec in models}
        dropped = [key for key in self._held if key not in wanted]
        for key in dropped:
            del self._held[key]
        return [ev.UnloadModel(*key) for key in dropped]

    def order(self, message: Load | Unload | Compare, control: str) -> tuple[list[Action], Message | None]:
        """Return what to do about an order of the broker, and the answer if there is one already."""
        match message:
            case Compare(batch, version):
                return [ev.CompareBatch(batch, version)], None
            case Unload(name, version):
                known = self._held.pop((name, version), None)
                return ([] if known is None else [ev.UnloadModel(name, version)]), None
            case Load(model):
                spec = model.for_engine(self._engine)
                held = self._held.get((spec.name, spec.version))
                if held is not None and held[0] == spec:
                    return [], Loaded(held[1])
                if held is not None or self._under_way is not None:
                    reason = "another model is loaded under this name, or is about to be"
                    return [], NotLoaded(spec.name, spec.version, Code.RELOAD_BUSY, reason)
                self._under_way = spec
                return [ev.LoadBeside(spec, control)], None

    def take(self, event: ev.BesideLoaded | ev.BesideFailed) -> Message:
        """A model that was under way has been loaded, or can't be; return what the broker is told."""
        self._under_way = None
        spec = event.spec
        match event:
            case ev.BesideLoaded(_, profile):
                self._held[spec.name, spec.version] = (spec, profile)
                return Loaded(profile)
            case ev.BesideFailed(_, code, reason):
                return NotLoaded(spec.name, spec.version, code, reason)
