"""The models of the simulated broker, its settings, and where frames belong, told without the core."""

from __future__ import annotations

from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.protocol.messages import (
    EmulatedCost,
    Endpoints,
    Fit,
    ImageInput,
    Limits,
    ModelSpec,
    Oversize,
    SizeClassSpec,
)
from hr_sim.options import Options

#: Sides of the square size classes: small, so that encoded payloads cost little.
SIDES = (4, 8, 16)

#: A frame of this side fits no class: letterboxed by one model, refused by the other.
TOO_LARGE_SIDE = 20


def model_specs(options: Options) -> tuple[ModelSpec, ...]:
    """Return two models with the same classes; the second refuses what is too large."""
    classes = tuple(
        SizeClassSpec(f"s{side}", side, side, options.max_batch_size, Fit.PAD)
        for side in SIDES[: options.classes]
    )
    return tuple(
        ModelSpec(
            name,
            "1",
            image=ImageInput(),
            size_classes=classes,
            oversize=oversize,
            emulated=EmulatedCost(options.batch_ms, options.frame_ms),
        )
        for name, oversize in (("mean", Oversize.LETTERBOX), ("edge", Oversize.REJECT))
    )


def core_settings(options: Options) -> CoreSettings:
    """Return the settings of the broker's core for a seed."""
    policy = ClassPolicy(
        options.policy,
        max_queue_delay_ms=options.max_queue_delay_ms,
        max_queue_size=options.max_queue_size,
        objective_ms=options.objective_ms,
        promote=options.promote,
    )
    return CoreSettings(
        models=tuple(ModelSettings(spec, {"": policy}) for spec in model_specs(options)),
        limits=Limits(max_frames_per_message=options.max_frames_per_message),
        max_bytes=options.max_bytes,
        max_streams=options.max_streams,
        credits_per_producer=options.credits,
        max_queued_per_stream=options.max_queued_per_stream,
        max_unfinished_per_stream=options.max_unfinished_per_stream,
        ageing_ms=options.ageing_ms,
        heartbeat_ms=options.heartbeat_ms,
        retention_frames=options.retention_frames,
        retention_bytes=options.retention_bytes,
        hedge_share=options.hedge_share,
        hedge_burst_frames=options.hedge_burst_frames,
        stuck_ms=options.stuck_ms,
        check_deadlines=options.check_deadlines,
    )


def expected_class(spec: ModelSpec, height: int, width: int) -> str | None:
    """Return the name of the class that a frame belongs to, None when it is to be refused.

    The promise in its own words: the smallest class that contains the frame; a larger frame goes to the
    largest one, or is refused."""
    holding = [c for c in spec.size_classes if c.height >= height and c.width >= width]
    if holding:
        return min(holding, key=lambda c: c.height * c.width).name
    if spec.oversize is Oversize.REJECT:
        return None
    return max(spec.size_classes, key=lambda c: c.height * c.width).name


def may_ride(settings: CoreSettings, key: tuple[str, str], larger_key: tuple[str, str]) -> bool:
    """Return True when a frame of one class (model, name) may be in a batch of the other one.

    The promise in its own words: promotion is on, the other class of the same model is larger both ways."""
    for model in settings.models:
        sides = {c.name: (c.height, c.width) for c in model.spec.size_classes}
        policy = model.policies.get("") or ClassPolicy()
        if model.spec.name == key[0] == larger_key[0] and policy.promote:
            (height, width), (larger_height, larger_width) = sides[key[1]], sides[larger_key[1]]
            return key != larger_key and height <= larger_height and width <= larger_width
    return False


def endpoints(boot: int) -> Endpoints:
    """Return addresses that nobody connects to: the world makes the links."""
    return Endpoints(
        boot, *(f"sim://{role}" for role in ("frames", "intake", "results", "workers", "control")), "", ""
    )
