"""What a worker session is told (past facts) and what it orders (imperatives): data only.

See ``worker_session`` for what it makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.protocol.messages import (
    Batch,
    Compared,
    Done,
    Endpoints,
    Failed,
    Limits,
    Message,
    ModelProfile,
    ModelSpec,
    Value,
)

# Events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs and its device is there."""


@dataclass(frozen=True, slots=True)
class BrokerFound:
    """Discovery had an answer; every address is connectable from here."""

    endpoints: Endpoints


@dataclass(frozen=True, slots=True)
class BrokerNotFound:
    """Discovery had no answer within its time."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection is gone, or can't take what is sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The broker sent a message."""

    message: Message


@dataclass(frozen=True, slots=True)
class MessageUnreadable:
    """The broker sent something that is no message of this protocol version."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelsFetched:
    """Every file of ``models`` is in the cache and verified. ``files``: sha256 -> local path."""

    models: tuple[ModelSpec, ...]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A file could not be had now (the broker went away, a checksum was wrong): worth another try."""

    models: tuple[ModelSpec, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ModelsLoaded:
    """Loaded, self-tested and measured."""

    models: tuple[ModelSpec, ...]
    profiles: tuple[ModelProfile, ...]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The models can't be served here, ever. ``exit_code`` tells a supervisor which kind it is."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class BesideLoaded:
    """A model was loaded, tested and measured beside those that serve."""

    spec: ModelSpec
    profile: ModelProfile


@dataclass(frozen=True, slots=True)
class BesideFailed:
    """A model that was to be loaded beside the others could not be had, or can't be served."""

    spec: ModelSpec
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class BatchCompared:
    """A batch was run on another version too, or was not."""

    message: Compared


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """The pipeline is through with a batch, in whatever way."""

    message: Done | Failed


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The device or the pipeline itself can't be trusted any more."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class FiguresTaken:
    """The device was asked for its figures, by name."""

    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class StopRequested:
    """SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Started
    | BrokerFound
    | BrokerNotFound
    | LinkLost
    | MessageReceived
    | MessageUnreadable
    | ModelsFetched
    | FetchFailed
    | ModelsLoaded
    | LoadFailed
    | BesideLoaded
    | BesideFailed
    | BatchCompared
    | BatchFinished
    | EngineFailed
    | FiguresTaken
    | StopRequested
    | Tick
)

# Actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindBroker:
    """Ask for the broker's addresses at the address the worker was given, for up to ``timeout_ms``."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Make a new connection to the broker's workers socket."""

    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection at once."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the current connection."""

    message: Message


@dataclass(frozen=True, slots=True)
class UseLimits:
    """The broker's limits hold for every message from here on."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class FetchModels:
    """Get the files of ``models`` that the cache lacks from the control socket at ``control``."""

    models: tuple[ModelSpec, ...]
    control: str


@dataclass(frozen=True, slots=True)
class LoadModels:
    """Replace what is loaded by ``models``. Only ordered while no batch is in the pipeline."""

    models: tuple[ModelSpec, ...]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class LoadBeside:
    """Get the files of a model from ``control`` and load it while batches run on the others."""

    spec: ModelSpec
    control: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Let go of a model; no batch in the pipeline needs it."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class CompareBatch:
    """Run the batch that comes next on another version of its model too, once it is finished."""

    batch: int
    version: str


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Stage, run and post-process a batch; exactly one BatchFinished will tell of it."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class DropBatch:
    """Don't run it if it has not begun. It is finished either way, and reported as such."""

    batch: int


@dataclass(frozen=True, slots=True)
class Report:
    """Something people want to see. ``level`` is info or warning; ``name`` is fixed lowercase words."""

    level: str
    name: str
    values: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process, after what was sent before has left."""

    code: int
    reason: str


Action: TypeAlias = (
    FindBroker
    | Connect
    | Disconnect
    | Send
    | UseLimits
    | FetchModels
    | LoadModels
    | LoadBeside
    | UnloadModel
    | CompareBatch
    | RunBatch
    | DropBatch
    | Report
    | Exit
)
