"""The errors of headrace and their stable wire codes.

One root, :class:`HeadraceError`. *Local* errors are the caller's misuse or our own bug; *Remote*
errors are a peer's fault and carry a stable code that crosses the wire. The text of a Remote error
is always our own words: nothing a library printed is sent to a peer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Code(StrEnum):
    """Stable codes of everything that can go wrong with a message, a frame or a peer.

    docs/protocol.md lists each with its cause and remedy; a tidy test keeps the two equal. A code,
    once released, never changes its meaning.
    """

    # -- a message that can't be read (RemoteProtocolError) --
    BAD_MSGPACK = "bad_msgpack"
    TOO_DEEP = "too_deep"
    BAD_VERSION = "bad_version"
    UNKNOWN_TYPE = "unknown_type"
    UNEXPECTED_TYPE = "unexpected_type"
    MISSING_FIELD = "missing_field"
    BAD_FIELD = "bad_field"
    OUT_OF_RANGE = "out_of_range"
    TRAILING_BYTES = "trailing_bytes"
    PART_COUNT = "part_count"
    MESSAGE_TOO_LARGE = "message_too_large"

    # -- a frame that can't be admitted (outcome `rejected`) --
    BAD_STREAM = "bad_stream"
    BAD_DTYPE = "bad_dtype"
    BAD_SHAPE = "bad_shape"
    SIZE_MISMATCH = "size_mismatch"
    EMPTY_PAYLOAD = "empty_payload"
    FRAME_TOO_LARGE = "frame_too_large"
    BAD_ENCODING = "bad_encoding"
    BAD_COLOR = "bad_color"
    BAD_IMAGE = "bad_image"
    IMAGE_TOO_LARGE = "image_too_large"
    META_TOO_LARGE = "meta_too_large"
    UNKNOWN_MODEL = "unknown_model"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_CHANNELS = "wrong_channels"
    WRONG_SHAPE = "wrong_shape"
    WRONG_INPUTS = "wrong_inputs"
    OVERSIZE = "oversize"
    SEQ_BACKWARDS = "seq_backwards"
    STREAM_OWNED = "stream_owned"
    QUEUE_FULL = "queue_full"
    STREAM_QUEUE_FULL = "stream_queue_full"
    BYTES_FULL = "bytes_full"
    CREDIT_EXCEEDED = "credit_exceeded"
    TOO_MANY_STREAMS = "too_many_streams"
    TOO_MANY_PRODUCERS = "too_many_producers"
    WONT_MAKE_IT = "wont_make_it"
    DRAINING = "draining"
    LANE_UNAVAILABLE = "lane_unavailable"

    # -- an admitted frame that ended without a result (outcomes `error`, `expired`, `superseded`) --
    DAMAGED_IMAGE = "damaged_image"
    STALE_SLOT = "stale_slot"
    BATCH_FAILED = "batch_failed"
    POST_PROCESS_FAILED = "post_process_failed"
    RESULT_COUNT = "result_count"
    NON_FINITE = "non_finite"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"  # a batch the worker had not started when Cancel came: its slot is free
    POISON_FRAME = "poison_frame"
    DEADLINE = "deadline"
    NEWER_FRAME = "newer_frame"
    SHUTDOWN = "shutdown"

    # -- a worker or a request that is refused --
    ID_IN_USE = "id_in_use"
    ID_CLAIMED = "id_claimed"
    VERSION_MISMATCH = "version_mismatch"
    BAD_READY = "bad_ready"
    TOO_MANY_WORKERS = "too_many_workers"
    WORKER_STUCK = "worker_stuck"
    UNKNOWN_PEER = "unknown_peer"
    UNKNOWN_METHOD = "unknown_method"
    BAD_PARAMS = "bad_params"
    NOT_FOUND = "not_found"
    RELOAD_BUSY = "reload_busy"
    RELOAD_REFUSED = "reload_refused"
    RELOAD_DIFFERS = "reload_differs"
    RELOAD_TIMEOUT = "reload_timeout"
    LOAD_FAILED = "load_failed"
    INTERNAL = "internal"


class HeadraceError(Exception):
    """Root of every error that headrace raises on purpose."""


class LocalError(HeadraceError):
    """The caller's misuse, the machine's state, or our own bug: nothing a peer did."""


class RemoteError(HeadraceError):
    """A peer's fault, or a peer's refusal, with its stable code."""

    def __init__(self, code: Code | str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = str(code)
        self.message = message


class RemoteProtocolError(RemoteError):
    """A message from a peer that breaks the protocol. Nothing was allocated on its behalf.

    ``kind`` is the message's class, None if not even that could be read."""

    kind: type | None = None


class UnexpectedTypeError(RemoteProtocolError):
    """A message that has no place on the socket it came in on; ``kind`` is its class. The rest is unread."""

    kind: type

    def __init__(self, kind: type, message: str) -> None:
        super().__init__(Code.UNEXPECTED_TYPE, message)
        self.kind = kind


class FrameError(RemoteError):
    """A frame that ended without a result: ``status`` is error, expired, superseded or rejected."""

    def __init__(self, status: str, code: Code | str, message: str) -> None:
        super().__init__(code, message)
        self.status = status


class ConfigError(LocalError):
    """A setting that can't be used: names the file, the key, the value and the remedy."""

    exit_code: ClassVar[int] = 78  # EX_CONFIG of sysexits.h: a supervisor must not restart on it


class JournalError(LocalError):
    """The broker's journal can't be written any more: names the file and the reason. The broker ends, since
    what it can't record it may not publish."""


class ArenaError(LocalError):
    """Shared memory that can't be made or opened: names the folder or the arena, and the reason."""


class ModelError(LocalError):
    """A model that can't be served: names the file, what was found and what is supported."""

    exit_code: ClassVar[int] = 65  # EX_DATAERR of sysexits.h: a supervisor must not restart on it


class DeviceError(LocalError):
    """The device asked for is not there, or has failed: names the device and the reason."""

    exit_code: ClassVar[int] = 69  # EX_UNAVAILABLE of sysexits.h


class InvalidFrameError(LocalError):
    """An array or image that can't be sent; raised before anything leaves the process."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class NotDeliveredError(LocalError):
    """Frames whose outcome is unknown when a producer had to stop waiting.

    ``unfinished`` counts them; ``delivered`` counts the frames with a known outcome.
    """

    def __init__(self, message: str, *, unfinished: int, delivered: int) -> None:
        super().__init__(message)
        self.unfinished = unfinished
        self.delivered = delivered


class UnreachableError(LocalError):
    """Nothing answered at an address within the time limit; names both."""


class RequestTimeoutError(LocalError):
    """A request got no answer within its time limit."""


class ClosedError(LocalError):
    """The object was used after close()."""


class ForkedError(LocalError):
    """The object was made in another process: sockets do not survive a fork."""
