"""The configuration's schema: every section and key with its default, unit, range and reason.

This module holds the data model alone; ``headrace.config`` reads files and environment into it and
words the errors, ``headrace.config_docs`` prints docs/configuration.md from it. A key exists here or
nowhere: unknown keys are refused. Validation is strict: ``"5555"`` is not a port and ``true`` is not 1.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config_models import MAX_WAIT_MS, ModelSection, Section, key
from headrace.config_queues import HedgingSection, QueuesSection

#: Smallest ``max_message_bytes``: ZeroMQ applies it to its own handshake too, and a broker that cuts
#: its peers' handshakes is reachable for nobody (zeromq/libzmq#4436).
MIN_MESSAGE_BYTES = 64 * 1024

MIB = 1024 * 1024


class BrokerSection(Section):
    """Where the broker listens and how long it waits."""

    host: str = key(
        "127.0.0.1",
        "host",
        "Address that all sockets bind to. Loopback, so that nobody else"
        " on the network can reach the broker unless that is asked for.",
        min_length=1,
    )
    port: int = key(
        5555,
        "port",
        "Port of the frames socket; intake, results, workers and control take the"
        " next four. 0 = any free port for each.",
        ge=0,
        le=65531,
    )
    frames: str = key(
        "",
        "address",
        "Own address of the frames socket, `tcp://HOST:PORT` or `ipc://PATH`; empty = from host and port.",
    )
    intake: str = key("", "address", "Own address of the intake socket (plain PUSH scripts).")
    results: str = key("", "address", "Own address of the results socket (PUB).")
    workers: str = key("", "address", "Own address of the workers socket.")
    control: str = key("", "address", "Own address of the control socket (status, replay, model files).")
    http: bool = key(True, "on/off", "Serve /metrics, /healthz and /readyz over HTTP.")
    http_port: int = key(
        9555, "port", "Port of the HTTP server, on the same host. 0 = any free port.", ge=0, le=65535
    )
    insecure: bool = key(
        False,
        "on/off",
        "Allow a host other than loopback although peers are not"
        " authenticated. Everybody who reaches the ports can send and read.",
    )
    grace_ms: int = key(
        10_000,
        "ms",
        "Time that a stopping broker gives admitted frames to finish; the rest end as `error shutdown`.",
        ge=0,
        le=MAX_WAIT_MS,
    )
    heartbeat_ms: int = key(
        1_000,
        "ms",
        "Interval of heartbeats to and from every peer. Shorter finds dead peers sooner, longer is quieter.",
        ge=50,
        le=60_000,
    )
    heartbeats_missed: int = key(
        3, "intervals", "A peer silent for this many intervals is taken for dead.", ge=2, le=100
    )
    results_queue_messages: int = key(
        10_000,
        "messages",
        "Messages kept for one slow subscriber before it loses some (it is told, and fetches them again).",
        ge=1,
        le=10_000_000,
    )
    journal: str = key(
        "",
        "path",
        "File in which published outcomes are kept, so that they survive a restart of the broker and a power"
        " cut; relative to this file. Bounded as `[retention]` says. Each turn of the broker that finishes"
        " frames then waits for one fsync. Empty = outcomes are kept in memory alone.",
    )
    reload_folders: tuple[str, ...] = key(
        (),
        "paths",
        "Folders that files for `headrace reload` may lie in, beside the models' own; relative to this file."
        " Whoever reaches the control socket can have any file in them.",
        strict=False,
    )


class LimitsSection(Section):
    """What one message, frame or image may be at most. Checked before anything is allocated."""

    max_frame_bytes: int = key(
        64 * MIB, "bytes", "Payload of one frame. 64 MiB holds a raw 4K RGB image twice.", ge=1, le=2**40
    )
    max_message_bytes: int = key(
        128 * MIB,
        "bytes",
        "One message part. At least 65,536, because the connection's own handshake must fit too.",
        ge=MIN_MESSAGE_BYTES,
        le=2**40,
    )
    max_header_bytes: int = key(MIB, "bytes", "The msgpack header of a message.", ge=1024, le=64 * MIB)
    max_frames_per_message: int = key(256, "frames", "Frames that one message may bundle.", ge=1, le=65_536)
    max_meta_bytes: int = key(
        4096, "bytes", "A frame's own `meta` value, which is carried through to its outcome.", ge=0, le=MIB
    )
    max_pixels: int = key(
        64 * MIB,
        "pixels",
        "Height times width of an encoded image, read from its header"
        " before it is decoded: small files can hold huge images.",
        ge=1,
        le=2**40,
    )
    max_depth: int = key(16, "levels", "Nesting depth of a msgpack value.", ge=4, le=256)
    priority_levels: int = key(
        10, "levels", "Priorities are 0 to this minus 1; larger is more urgent.", ge=1, le=256
    )

    @model_validator(mode="after")
    def _frame_fits_its_message(self) -> Self:
        if self.max_frame_bytes > self.max_message_bytes:
            raise ValueError(
                f"max_frame_bytes = {self.max_frame_bytes} is larger than max_message_bytes"
                f" = {self.max_message_bytes}: such a frame could never arrive; raise the latter"
            )
        # A worker gets frames behind a header of up to max_header_bytes: without that room every batch
        # would be one frame, and nothing would say why.
        if self.max_frame_bytes + self.max_header_bytes > self.max_message_bytes:
            raise ValueError(
                f"max_frame_bytes = {self.max_frame_bytes} and max_header_bytes = {self.max_header_bytes}"
                f" together are larger than max_message_bytes = {self.max_message_bytes}: no batch could be"
                " sent to a worker; raise the latter or lower one of the others"
            )
        return self


class AdmissionSection(Section):
    """What the broker takes in at most, all producers together and each alone."""

    default_model: str = key(
        "",
        "model",
        "Model of a frame that names none, `name` or `name:version`; empty = the first one in this file.",
    )
    default_timeout_ms: int | None = key(
        None,
        "ms",
        "Deadline of a frame that brings no `ttl_ms`. Left out = such frames never expire.",
        ge=1,
        le=86_400_000,
    )
    max_bytes: int = key(
        512 * MIB,
        "bytes",
        "Payload bytes of all unfinished frames: the broker's memory"
        " bound. Beyond it frames are rejected `bytes_full`.",
        ge=1,
        le=2**50,
    )
    priority_bytes_share: float = key(
        0.0625,
        "share",
        "Part of `max_bytes` that the lowest priority can't fill and the highest can; those between"
        " in equal steps. So ordinary frames never keep urgent ones out.",
        ge=0,
        le=0.9,
    )
    check_deadlines: bool = key(
        True,
        "on/off",
        "Reject a frame (`wont_make_it`) that would be done after its deadline, by the measured run times of"
        " what is before it. Off = it waits, and expires.",
    )
    max_streams: int = key(10_000, "streams", "Streams remembered at once.", ge=1, le=10_000_000)
    max_producers: int = key(1_000, "producers", "Producers connected at once.", ge=1, le=1_000_000)
    max_workers: int = key(1_024, "workers", "Workers registered at once.", ge=1, le=1_000_000)
    credits_per_producer: int = key(
        64,
        "frames",
        "Unfinished frames that one producer may have at the broker."
        " More keeps batches fuller, fewer bounds the wait.",
        ge=1,
        le=1_000_000,
    )
    max_queued_per_stream: int = key(
        256,
        "frames",
        "Waiting frames of one stream in one size class, so that one stream can't fill the queue.",
        ge=1,
        le=10_000_000,
    )
    max_unfinished_per_stream: int = key(
        1_024,
        "frames",
        "Admitted frames of one stream without a published outcome: bounds what waits for one slow frame"
        " to keep the stream in order.",
        ge=1,
        le=10_000_000,
    )
    duplicate_window: int = key(
        4_096,
        "frames",
        "Finished frames remembered per stream, to recognise frames that a producer sends again.",
        ge=1,
        le=10_000_000,
    )
    stream_stale_ms: int = key(
        10_000,
        "ms",
        "A stream whose producer has not said goodbye and sends nothing for this long is reported as stale,"
        " once until it brings a frame again.",
        ge=100,
        le=86_400_000,
    )
    stream_idle_ms: int = key(
        600_000, "ms", "A stream with nothing unfinished is forgotten after this.", ge=1_000, le=86_400_000
    )
    max_attempts: int = key(
        2,
        "workers",
        "Workers that one frame may be lost with before it ends as `error poison_frame`.",
        ge=1,
        le=100,
    )
    quarantine_ms: int = key(
        600_000,
        "ms",
        "Frames with the content of a poison frame are refused for this long, so that sending it"
        " again costs no worker. 0 = never.",
        ge=0,
        le=86_400_000,
    )
    quarantine_frames: int = key(
        1_024, "contents", "Contents in quarantine at once; the oldest goes first.", ge=1, le=1_000_000
    )


class RetentionSection(Section):
    """Outcomes kept for subscribers that start late or have lost some; the journal keeps as many."""

    frames_per_stream: int = key(1_024, "outcomes", "Outcomes kept per stream.", ge=1, le=100_000_000)
    max_bytes: int = key(256 * MIB, "bytes", "Outcomes kept, all streams together.", ge=1, le=2**50)


class WorkerSection(Section):
    """How workers of this machine run."""

    connect: str = key(
        "127.0.0.1:5555",
        "address",
        "Any address of the broker: HOST, HOST:PORT, tcp://HOST:PORT or ipc://PATH.",
        min_length=1,
    )
    device: Literal["auto", "cpu", "cuda", "emulated"] = key(
        "auto",
        "device",
        "`auto` takes a GPU when there is one and says aloud when there is none; `cuda` ends"
        " with a reason when there is none; `emulated` sleeps instead of computing.",
    )
    count: int | None = key(
        None,
        "workers",
        "Workers that `headrace up` starts. Left out = one per visible GPU, or one on a machine without.",
        ge=1,
        le=1_024,
    )
    threads: int | None = key(
        None,
        "threads",
        "CPU threads of one session. Left out = the CPUs this process may use, divided by `count` and"
        " `replicas`.",
        ge=1,
        le=4_096,
    )
    slots: int = key(
        2, "batches", "Batches that one worker holds at once: 2 stages the next while one runs.", ge=1, le=16
    )
    replicas: int = key(
        1,
        "sessions",
        "Sessions of each model in one worker process, each with its own slots, threads and memory: for"
        " models too small to fill a device. The broker sees each as a worker, named ID-1, ID-2 ...",
        ge=1,
        le=16,
    )
    cache_dir: str = key(
        "",
        "path",
        "Where model files fetched from the broker are kept; empty = HEADRACE_CACHE or ~/.cache/headrace.",
    )
    grace_ms: int = key(
        30_000, "ms", "Time that a stopping worker gives its batches to finish.", ge=0, le=MAX_WAIT_MS
    )
    give_up_ms: int | None = key(
        None,
        "ms",
        "A worker that has found no broker for this long ends. Left out = it goes on trying.",
        ge=1,
        le=86_400_000,
    )
    gpu_memory_mb: int | None = key(
        None,
        "MiB",
        "Most that captured graphs with their buffers, and each session's arena, take of the GPU; what does"
        " not fit runs without a graph. Left out = what the GPU has.",
        ge=1,
        le=1_048_576,
    )


class ShmSection(Section):
    """Payloads in shared memory, between processes of one user on one host."""

    folder: str = key(
        "/dev/shm",  # noqa: S108 - a folder of memory
        "path",
        "Absolute path of the folder of producers' arenas: a file system in memory that broker, workers and"
        " producers all see (it must be the same for all). Empty = every payload travels in a message.",
    )

    @field_validator("folder", mode="after")
    @classmethod
    def _is_absolute(cls, folder: str) -> str:
        if folder and not folder.startswith("/"):
            raise ValueError("must be an absolute path, or empty to switch the lane off")
        return folder


class SupervisorSection(Section):
    """When `headrace up` starts a process that died again, and when it gives up."""

    backoff_ms: int = key(500, "ms", "Wait before the first restart; doubled each time.", ge=1, le=60_000)
    backoff_max_ms: int = key(30_000, "ms", "Longest wait before a restart.", ge=1, le=MAX_WAIT_MS)
    quick_failure_ms: int = key(
        10_000,
        "ms",
        "A process that lived shorter than this failed quickly; one that"
        " lived longer starts with a clean record.",
        ge=1,
        le=MAX_WAIT_MS,
    )
    max_quick_failures: int = key(
        5, "failures", "Quick failures in a row after which a process is given up.", ge=1, le=1_000
    )
    start_timeout_ms: int = key(
        30_000, "ms", "Time the broker gets to bind and say so.", ge=100, le=MAX_WAIT_MS
    )


class LogSection(Section):
    """What is logged to stderr, and how."""

    level: Literal["debug", "info", "warning", "error"] = key(
        "info", "level", "State changes at info, one line per batch at debug."
    )
    format: Literal["auto", "human", "json"] = key(
        "auto", "format", "`auto`: human on a terminal, JSON lines otherwise."
    )
    summary_ms: int = key(
        10_000,
        "ms",
        "A warning or error that repeats is written once per this interval,"
        " with the count of those left out.",
        ge=0,
        le=MAX_WAIT_MS,
    )


class Config(Section):
    """The whole file."""

    broker: BrokerSection = Field(default=BrokerSection(), description="Where the broker listens.")
    limits: LimitsSection = Field(default=LimitsSection())
    admission: AdmissionSection = Field(default=AdmissionSection())
    queues: QueuesSection = Field(default=QueuesSection())
    hedging: HedgingSection = Field(default=HedgingSection())
    retention: RetentionSection = Field(default=RetentionSection())
    worker: WorkerSection = Field(default=WorkerSection())
    shm: ShmSection = Field(default=ShmSection())
    supervisor: SupervisorSection = Field(default=SupervisorSection())
    log: LogSection = Field(default=LogSection())
    models: tuple[ModelSection, ...] = Field(default=(), strict=False)

    @field_validator("models", mode="after")
    @classmethod
    def _models_differ(cls, models: tuple[ModelSection, ...]) -> tuple[ModelSection, ...]:
        keys = [(model.name, model.version) for model in models]
        for index, pair in enumerate(keys):
            first = keys.index(pair)
            if first != index:
                raise ValueError(
                    f"entries {first} and {index} are both {pair[0]}:{pair[1]}: change the"
                    " name or version of one"
                )
        return models

    @model_validator(mode="after")
    def _batches_fit_a_message(self) -> Self:
        most = self.limits.max_frames_per_message
        for index, model in enumerate(self.models):
            for item in model.size_classes:
                if item.max_batch_size > most:
                    raise ValueError(
                        f"models[{index}]: size class {item.label}: max_batch_size = {item.max_batch_size} is"
                        f" larger than limits.max_frames_per_message = {most}: no message could hold such a"
                        " batch; lower the former or raise the latter"
                    )
        return self

    @model_validator(mode="after")
    def _default_model_exists(self) -> Self:
        wanted = self.admission.default_model
        known = {model.name for model in self.models} | {f"{m.name}:{m.version}" for m in self.models}
        if wanted and wanted not in known:
            raise ValueError(
                f"admission.default_model = {wanted!r} is no model of this file: use one of"
                f" {', '.join(sorted(known)) or '(none are configured)'}"
            )
        return self
