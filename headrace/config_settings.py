"""Turn a checked configuration into the plain settings of the core, the broker's shell and a worker.

Nothing is decided here: each key goes to one field, and a test sees to it that none is forgotten.
"""

from __future__ import annotations

from pathlib import Path

from headrace.broker.settings import ClassPolicy, CoreSettings, ModelSettings
from headrace.broker.shell_settings import LocalModel, ShellSettings
from headrace.config import LoadedConfig, class_policy
from headrace.config_models import ImageSection, ModelSection, SizeClassSection
from headrace.config_queues import QueuesSection
from headrace.config_schema import Config
from headrace.errors import ConfigError, RemoteProtocolError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Color,
    EmulatedCost,
    Endpoints,
    Fit,
    ImageInput,
    Limits,
    ModelSpec,
    Oversize,
    Setup,
    SizeClassSpec,
)
from headrace.workers.worker_settings import WorkerSettings

_NO_ENDPOINTS = Endpoints(0, "tcp://", "tcp://", "tcp://", "tcp://", "tcp://", "", "")


def to_core_settings(config: Config) -> CoreSettings:
    """Return the core's settings; the files of the models are filled in by the shell."""
    admission = config.admission
    return CoreSettings(
        models=tuple(to_model_settings(config.queues, model) for model in config.models),
        default_model=admission.default_model,
        limits=Limits(**config.limits.model_dump()),
        default_timeout_ms=admission.default_timeout_ms,
        max_bytes=admission.max_bytes,
        priority_bytes_share=admission.priority_bytes_share,
        priority_reserve_frames=config.queues.priority_reserve_frames,
        check_deadlines=admission.check_deadlines,
        max_streams=admission.max_streams,
        max_producers=admission.max_producers,
        max_workers=admission.max_workers,
        credits_per_producer=admission.credits_per_producer,
        max_queued_per_stream=admission.max_queued_per_stream,
        max_unfinished_per_stream=admission.max_unfinished_per_stream,
        duplicate_window=admission.duplicate_window,
        stream_stale_ms=admission.stream_stale_ms,
        stream_idle_ms=admission.stream_idle_ms,
        ageing_ms=config.queues.ageing_ms,
        ageing_share=config.queues.ageing_share,
        heartbeat_ms=config.broker.heartbeat_ms,
        heartbeats_missed=config.broker.heartbeats_missed,
        max_attempts=admission.max_attempts,
        quarantine_ms=admission.quarantine_ms,
        quarantine_frames=admission.quarantine_frames,
        overdue_factor=config.hedging.overdue_factor,
        overdue_min_ms=config.hedging.overdue_min_ms,
        hedge_share=config.hedging.share,
        hedge_burst_frames=config.hedging.burst_frames,
        stuck_ms=config.hedging.stuck_ms,
        retention_frames=config.retention.frames_per_stream,
        retention_bytes=config.retention.max_bytes,
    )


def to_shell_settings(loaded: LoadedConfig) -> ShellSettings:
    """Return the broker's settings with the absolute paths of its model files.

    Raises ConfigError when there is no model, a file is not there, or no worker could be told of a model."""
    config = loaded.config
    broker = config.broker
    if not config.models:
        raise ConfigError(
            f"{loaded.source}: no [[models]]: a broker without a model can serve nothing; name one with"
            " --model (`headrace up --model model.onnx`), or add a [[models]] table to a file for --config"
        )
    core = to_core_settings(config)
    _check_set_up(loaded.source, core)
    return ShellSettings(
        core=core,
        host=broker.host,
        port=broker.port,
        frames=broker.frames,
        intake=broker.intake,
        results=broker.results,
        workers=broker.workers,
        control=broker.control,
        http_port=broker.http_port if broker.http else None,
        insecure=broker.insecure,
        grace_ms=broker.grace_ms,
        results_queue_messages=broker.results_queue_messages,
        local_models=_local_models(loaded),
        shm_folder=to_shm_folder(config),
        journal=loaded.journal_path(),
        reload_folders=loaded.reload_folders(),
    )


def to_worker_settings(
    config: Config, *, worker_id: str = "", parent_pid: int | None = None
) -> WorkerSettings:
    """Return one worker's settings; ``worker_id`` "" lets it name itself."""
    worker = config.worker
    return WorkerSettings(
        address=worker.connect,
        device=worker.device,
        worker_id=worker_id,
        threads=worker.threads,
        slots=worker.slots,
        replicas=worker.replicas,
        cache_dir=worker.cache_dir,
        shm_folder=to_shm_folder(config),
        workers_on_host=worker.count or 1,
        parent_pid=parent_pid,
        grace_ms=worker.grace_ms,
        give_up_ms=worker.give_up_ms,
        gpu_memory_mb=worker.gpu_memory_mb,
    )


def to_shm_folder(config: Config) -> Path | None:
    """Return the shared-memory folder, None when the lane is off."""
    return Path(config.shm.folder) if config.shm.folder else None


def to_model_settings(queues: QueuesSection, model: ModelSection) -> ModelSettings:
    """Return one model's spec and the policy of each of its size classes ("" = any other)."""
    policies = {"": _policy(queues, model, None)}
    policies |= {item.label: _policy(queues, model, item) for item in model.size_classes}
    return ModelSettings(to_model_spec(model), policies)


def to_model_spec(model: ModelSection) -> ModelSpec:
    """Return the model as the wire describes it, without its files."""
    emulated = model.emulated
    return ModelSpec(
        name=model.name,
        version=model.version,
        image=_image_input(model.image) if model.image else None,
        size_classes=tuple(_size_class(item) for item in model.size_classes),
        oversize=Oversize(model.oversize),
        adapter=model.adapter,
        adapter_options=dict(model.adapter_options),
        emulated=EmulatedCost(emulated.base_ms, emulated.per_frame_ms) if emulated else None,
        fp32_sample_share=model.fp32_sample_share,
    )


def _check_set_up(source: str, core: CoreSettings) -> None:
    """Raise ConfigError for models that can't be described to a worker, who reads under default limits."""
    specs = tuple(model.spec for model in core.models)
    for where, told in [(f"models[{i}]", (spec,)) for i, spec in enumerate(specs)] + [("models", specs)]:
        # Addresses and files, which only a running broker knows, add less than a hundredth.
        set_up = Setup(0, core.heartbeat_ms, core.limits, told, _NO_ENDPOINTS)
        try:
            codec.decode(codec.encode(set_up), Limits())
        except (TypeError, ValueError, OverflowError, RemoteProtocolError) as error:
            raise ConfigError(f"{source}: {where}: workers can't be told of it: {error}") from None


def _policy(queues: QueuesSection, model: ModelSection, item: SizeClassSection | None) -> ClassPolicy:
    return ClassPolicy(**class_policy(queues, model, item))


def _image_input(image: ImageSection) -> ImageInput:
    return ImageInput(
        color=Color(image.color),
        channels=image.channels,
        scale=image.scale,
        mean=image.mean,
        std=image.std,
        pad_value=image.pad_value,
    )


def _size_class(item: SizeClassSection) -> SizeClassSpec:
    return SizeClassSpec(
        item.label, item.height, item.width, item.max_batch_size, Fit(item.fit), item.traffic_share
    )


def _local_models(loaded: LoadedConfig) -> tuple[LocalModel, ...]:
    models = []
    for index, model in enumerate(loaded.config.models):
        paths = tuple(loaded.model_files(index).values())
        if paths:
            on_gpu = tuple(loaded.model_files(index, "cuda").values())
            other = on_gpu if on_gpu != paths else ()
            fp32 = tuple(loaded.fp32_files(index).values())
            models.append(LocalModel(model.name, model.version, paths[0], paths[1:], other, fp32))
    return tuple(models)
