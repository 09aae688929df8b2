"""headrace: a ZeroMQ broker that batches frames by size class and feeds GPU workers.

The public names are loaded when they are first used, so that a process which needs none of them (a
worker, the command line) does not pay for their imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.clients.aio import AsyncClient, AsyncProducer, AsyncSubscriber
    from headrace.clients.client import Client
    from headrace.clients.control import Control
    from headrace.clients.producer import Producer
    from headrace.clients.records import FrameId, Missed, raise_for_status, tensors_of
    from headrace.clients.subscriber import Subscriber
    from headrace.errors import (
        ClosedError,
        ConfigError,
        ForkedError,
        FrameError,
        HeadraceError,
        InvalidFrameError,
        NotDeliveredError,
        RemoteError,
        RequestTimeoutError,
        UnreachableError,
    )
    from headrace.protocol.messages import Outcome, Status

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "headrace.clients.aio",
    "AsyncProducer": "headrace.clients.aio",
    "AsyncSubscriber": "headrace.clients.aio",
    "Client": "headrace.clients.client",
    "ClosedError": "headrace.errors",
    "ConfigError": "headrace.errors",
    "Control": "headrace.clients.control",
    "ForkedError": "headrace.errors",
    "FrameError": "headrace.errors",
    "FrameId": "headrace.clients.records",
    "HeadraceError": "headrace.errors",
    "InvalidFrameError": "headrace.errors",
    "Missed": "headrace.clients.records",
    "NotDeliveredError": "headrace.errors",
    "Outcome": "headrace.protocol.messages",
    "Producer": "headrace.clients.producer",
    "RemoteError": "headrace.errors",
    "RequestTimeoutError": "headrace.errors",
    "Status": "headrace.protocol.messages",
    "Subscriber": "headrace.clients.subscriber",
    "UnreachableError": "headrace.errors",
    "raise_for_status": "headrace.clients.records",
    "tensors_of": "headrace.clients.records",
}

__all__ = [
    "AsyncClient",
    "AsyncProducer",
    "AsyncSubscriber",
    "Client",
    "ClosedError",
    "ConfigError",
    "Control",
    "ForkedError",
    "FrameError",
    "FrameId",
    "HeadraceError",
    "InvalidFrameError",
    "Missed",
    "NotDeliveredError",
    "Outcome",
    "Producer",
    "RemoteError",
    "RequestTimeoutError",
    "Status",
    "Subscriber",
    "UnreachableError",
    "__version__",
    "raise_for_status",
    "tensors_of",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
