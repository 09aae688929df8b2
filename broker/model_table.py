"""The models that are served, and per size class its queue, its policy and its figures.

Not here: where frames wait inside a class (queues.py), which worker runs them (dispatch.py).

A model whose size classes the configuration leaves open gets them from the first READY that describes it;
they then hold for every worker.

A reload (reloads.py) puts another file in the place of a model's: queues, policies and the model's own name
and version stay; what changes is ``live_version``, the version that batches are sent with from then on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from headrace.broker.batching import BatchPolicy, make_policy
from headrace.broker.inflight import SuspectLine
from headrace.broker.queues import ClassQueue
from headrace.broker.records import FrameRecord
from headrace.broker.reload_state import Reload
from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.broker.size_class import MAX_KNOWN_SHAPES, SizeClasses, padding_waste
from headrace.broker.traffic import ArrivalRate
from headrace.protocol.messages import Fit, ModelProfile, ModelSpec, SizeClassSpec

#: Versions of reloads that are remembered by name, of all models together.
MAX_RELOADED_VERSIONS = 64


@dataclass(slots=True, eq=False)
class ServedClass:
    """One (model, size class). ``index`` is its place among all classes. Frames wait in ``queue``, or in
    ``suspects`` when they were with a worker that was lost. ``version`` is the configuration's, batches are
    sent with ``live_version``; ``sampled_by`` is the reload that compares some of them."""

    index: int
    model: str
    version: str
    spec: SizeClassSpec
    queue: ClassQueue
    policy: BatchPolicy
    max_queue_size: int
    objective_ns: int
    live_version: str
    sampled_by: Reload | None = None
    may_ride: bool = False  # in a batch of a larger class of the model (promotion.py)
    smaller: list[ServedClass] = field(default_factory=list, repr=False)  # ride in its batches
    kin: list[ServedClass] = field(default_factory=list, repr=False)  # where a frame of it may be
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)
    suspects: SuspectLine = field(default_factory=SuspectLine)
    in_flight_count: int = 0
    batches_count: int = 0
    frames_count: int = 0
    waste_sum: float = 0.0
    waste_by_shape: dict[tuple[int, ...], float] = field(default_factory=dict)
    promoted_count: int = 0  # frames of this class that rode in a batch of a larger one
    expired_count: int = 0
    superseded_count: int = 0
    turnaround_ns: int = 0  # of the last batch, dispatch to DONE; 0 = none yet

    def waste_of(self, shape: tuple[int, ...]) -> float:
        """Return the share of the class's area that is padding when it holds a frame of this shape."""
        waste = self.waste_by_shape.get(shape)
        if waste is None:
            if len(self.waste_by_shape) >= MAX_KNOWN_SHAPES:
                self.waste_by_shape.clear()
            waste = self.waste_by_shape[shape] = padding_waste(shape, self.spec)
        return waste

    @property
    def waiting_count(self) -> int:
        """Return how many frames wait, suspects included."""
        return len(self.queue) + len(self.suspects)

    def holds(self, record: FrameRecord | None) -> bool:
        """Return True for a frame of this class."""
        return record is not None and (record.model, record.version, record.size_class) == (
            self.model,
            self.version,
            self.spec.name,
        )


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model. ``placer`` is None as long as nobody has described its size classes.

    ``spec`` is the configuration's, ``live`` what runs: the same until a reload puts another in its place.
    ``kept`` is loaded beside it for a rollback, ``retired`` until its last batch is done. ``reload`` is the
    last one that was asked for."""

    spec: ModelSpec
    policies: dict[str, ClassPolicy]
    live: ModelSpec
    placer: SizeClasses | None = None
    classes: dict[str, ServedClass] = field(default_factory=dict)
    kept: ModelSpec | None = None
    retired: list[ModelSpec] = field(default_factory=list)
    reload: Reload | None = None

    @property
    def key(self) -> str:
        """Return "name:version"."""
        return f"{self.spec.name}:{self.spec.version}"

    def go_live(self, spec: ModelSpec) -> None:
        """From here on batches of all size classes are sent with this version."""
        self.live = spec
        for served in self.classes.values():
            served.live_version = spec.version


class ModelTable:
    """All models. Invariant: a class, once there, stays and keeps its index."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._by_version: dict[tuple[str, str], ServedModel] = {}  # those of reloads, the last ones
        self._by_key: dict[tuple[str, str], ServedModel] = {}
        self._by_reference: dict[str, ServedModel] = {}
        self.classes: list[ServedClass] = []
        for model in settings.models:
            self._add(model)
        first = settings.models[0].spec.name if settings.models else ""
        default = self._by_reference.get(settings.default_model or first)
        if default is not None:
            self._by_reference[""] = default

    def _add(self, settings: ModelSettings) -> None:
        spec = settings.spec
        model = ServedModel(spec, settings.policies, spec)
        self._by_key[spec.name, spec.version] = model
        self._by_reference[model.key] = model
        newest = self._by_reference.get(spec.name)
        if newest is None or _version_key(newest.spec.version) <= _version_key(spec.version):
            self._by_reference[spec.name] = model
        if spec.size_classes:
            self._describe(model, spec.size_classes)

    def find(self, reference: str) -> ServedModel | None:
        """Return the model a frame asks for: "" (the default), "name" (newest version), "name:version"."""
        return self._by_reference.get(reference)

    def get(self, name: str, version: str) -> ServedModel | None:
        """Return one version of a model, or the one in whose place that version was put."""
        return self._by_key.get((name, version)) or self._by_version.get((name, version))

    def is_configured(self, name: str, version: str) -> bool:
        """Tell whether the configuration has a model under this version."""
        return (name, version) in self._by_key

    def name_version(self, model: ServedModel, version: str) -> None:
        """Let ``get`` find a model by a version that a reload brings. A worker may speak of one long after it
        was rolled back; beyond a bound the oldest are forgotten."""
        self._by_version[model.spec.name, version] = model
        while len(self._by_version) > MAX_RELOADED_VERSIONS:
            del self._by_version[next(iter(self._by_version))]

    def class_of(self, record: FrameRecord) -> ServedClass:
        """Return the class that an admitted frame belongs to."""
        return self._by_key[record.model, record.version].classes[record.size_class]

    def specs(self) -> tuple[ModelSpec, ...]:
        """Return all models as they are now known, in the order of the configuration."""
        return tuple(model.spec for model in self._by_key.values())

    def worker_specs(self) -> tuple[ModelSpec, ...]:
        """Return what a worker is to load: of each model what runs, and what a rollback would run."""
        return tuple(
            spec for model in self._by_key.values() for spec in (model.live, model.kept) if spec is not None
        )

    def references(self) -> str:
        """Return the names of all models for an error message."""
        return ", ".join(model.key for model in self._by_key.values()) or "none"

    def all(self) -> list[ServedModel]:
        """Return all models in the order of the configuration."""
        return list(self._by_key.values())

    def learn(self, profile: ModelProfile) -> ServedModel:
        """Return the model that a worker describes; its size classes are the worker's if it had none."""
        model = self.get(profile.name, profile.version)
        if model is None:  # pragma: no cover - find_ready_fault has refused it
            raise KeyError(profile.name)
        if model.placer is None:
            specs = tuple(described.size_class for described in profile.classes)
            model.spec = model.live = replace(model.spec, size_classes=specs)
            self._describe(model, specs)
        return model

    def _describe(self, model: ServedModel, specs: tuple[SizeClassSpec, ...]) -> None:
        model.placer = SizeClasses(model.spec, specs)
        settings = self._settings
        for spec in specs:
            policy = model.policies.get(spec.name) or model.policies.get("") or ClassPolicy()
            served = ServedClass(
                index=len(self.classes),
                model=model.spec.name,
                version=model.spec.version,
                spec=spec,
                queue=ClassQueue(
                    settings.limits.priority_levels, settings.ageing_ms * 1_000_000, settings.ageing_share
                ),
                policy=make_policy(policy, spec.max_batch_size),
                max_queue_size=policy.max_queue_size,
                objective_ns=int(policy.objective_ms * 1e6),
                live_version=model.live.version,
                may_ride=policy.promote,
            )
            self.classes.append(served)
            model.classes[spec.name] = served
        classes = list(model.classes.values())
        for served in classes:
            served.smaller = _riding_classes(served, classes)
        has_riders = any(served.smaller for served in classes)
        for served in classes:
            served.kin = classes if has_riders else [served]


def _riding_classes(served: ServedClass, classes: list[ServedClass]) -> list[ServedClass]:
    """Return the classes whose frames may ride in a batch of ``served``: those inside it with its ``fit``."""
    spec = served.spec
    inside = [
        one
        for one in classes
        if one is not served
        and one.may_ride
        and one.spec.fit is spec.fit
        and spec.fit is not Fit.EXACT
        and one.spec.height <= spec.height
        and one.spec.width <= spec.width
    ]
    return sorted(inside, key=lambda one: -one.spec.height * one.spec.width)


def _version_key(version: str) -> list[tuple[int, int, str]]:
    # "10" is newer than "9", "1.10" than "1.9": digits compare as numbers, everything else as text.
    pieces = re.findall(r"\d+|\D+", version)
    return [(1, int(piece), "") if piece.isdigit() else (0, 0, piece) for piece in pieces]
