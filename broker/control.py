"""Answers to control requests: status, positions, replay, drain, fetch, record, reload and its ways back.

Each method checks its parameters one by one and names the one that is wrong. No answer is larger than a page:
what does not fit is asked for again with the place where the last page ended. Not here: sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headrace.broker.core import BrokerCore
from headrace.broker.figures import WorkerFigures
from headrace.broker.journal import Journal
from headrace.broker.model_store import MAX_CHUNK_BYTES, ModelStore
from headrace.broker.recording import MAX_FRAMES_PER_PAGE, Recording
from headrace.broker.reload_desk import ReloadDesk
from headrace.broker.reload_state import MAX_COMPARED_FRAMES, MAX_TIMEOUT_MS, ReloadOrder
from headrace.broker.status import MAX_STREAMS_PER_PAGE, page_of
from headrace.build_kind import build_kind
from headrace.errors import Code, RemoteError
from headrace.protocol.messages import Limits, ReplayReply, Reply, Request, Value
from headrace.protocol.peers import MAX_FIGURE, MAX_MODEL_FILES

Params: TypeAlias = "dict[str, Value]"

#: Payload bytes of one replay answer. A subscriber that is far behind takes several; none holds the loop for
#: more than about a millisecond.
MAX_REPLAY_BYTES = 4 * 1024 * 1024

#: Topics one ``positions`` request may name.
MAX_TOPICS = 1_024

_MAX_U64 = 2**64 - 1

#: What `reload` takes, and what a version may be called: as in the configuration.
_RELOAD_PARAMS = {
    "model", "path", "extra_files", "gpu_files", "version", "frames", "tolerance", "agreement", "force",
    "timeout_ms",
}  # fmt: skip
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: Largest pub_seq that can be asked for. The end of a missed range is one more and must fit the wire as well.
_MAX_PUB_SEQ = 2**63 - 1


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """What status says beside the core's own account: constant for the life of the broker."""

    release: str
    pid: int
    addresses: dict[str, str]


class Control:
    """Answers one request at a time, in the thread that owns the core.

    ``request_drain(is_final)`` begins a drain; ``is_final`` also ends the broker once it is drained.
    """

    def __init__(
        self,
        core: BrokerCore,
        store: ModelStore,
        limits: Limits,
        info: BrokerInfo,
        request_drain: Callable[[bool], None],
        journal: Journal | None = None,
        recording: Recording | None = None,
        reloads: ReloadDesk | None = None,
        figures: WorkerFigures | None = None,
    ) -> None:
        self._core = core
        self._store = store
        self._limits = limits
        self._info = info
        self._request_drain = request_drain
        self._journal = journal
        self._recording = recording or Recording()
        self._reloads = reloads
        self._figures = figures or WorkerFigures()
        self._methods: dict[str, Callable[[Request, int], Reply | ReplayReply]] = {
            "status": self._status,
            "positions": self._positions,
            "replay": self._replay,
            "drain": self._drain,
            "fetch": self._fetch,
            "record": self._record,
            "reload": self._reload,
            "rollback": self._rollback,
            "commit": self._commit,
        }

    def answer(self, request: Request, now_ns: int) -> Reply | ReplayReply:
        """Return the answer; a refusal is a Reply with a code."""
        method = self._methods.get(request.method)
        if method is None:
            known = ", ".join(sorted(self._methods))
            return Reply(
                request.id,
                code=Code.UNKNOWN_METHOD,
                message=f"no method {request.method[:64]!r}; there are {known}",
            )
        try:
            return method(request, now_ns)
        except RemoteError as error:
            return Reply(request.id, code=error.code, message=error.message)

    def _status(self, request: Request, now_ns: int) -> Reply:
        params = _Checked(request.params, {"streams_after", "max_streams"})
        after = params.text("streams_after", "")
        count = params.integer("max_streams", MAX_STREAMS_PER_PAGE, 0, MAX_STREAMS_PER_PAGE)
        result = self._core.status(now_ns, streams_after=after, max_streams=count)
        result["broker"] = {
            "release": self._info.release,
            "build": build_kind(),
            "pid": self._info.pid,
            "addresses": dict(self._info.addresses),
        }
        result["drift"] = [*self._figures.drift(now_ns)]
        if self._journal is not None:
            counts = self._journal.counts
            result["journal"] = {
                "path": str(self._journal.path),
                "outcomes": counts.kept_count,
                "bytes": counts.kept_bytes,
                "max_bytes": counts.max_bytes,
                "commits": counts.commit_count,
                "damaged": counts.damaged_count,
            }
        return Reply(request.id, result)

    def _positions(self, request: Request, _now_ns: int) -> Reply:
        params = _Checked(request.params, {"topics", "streams_after", "earlier"})
        topics = params.texts("topics", MAX_TOPICS)
        after = params.text("streams_after", "")
        with_earlier = params.flag("earlier", default=False)
        result = dict(self._core.positions(topics))
        streams = result.get("streams")
        if isinstance(streams, dict):
            earlier = self._earlier(topics, streams) if with_earlier else {}
            page, result["streams_next"] = page_of(streams, after, MAX_STREAMS_PER_PAGE)
            result["streams"] = {name: streams[name] for name in page}
            if with_earlier and self._journal is not None:
                result["earlier_boots"] = [[boot, one] for boot, one in self._journal.earlier_boots.items()]
                result["earlier"] = {name: earlier[name] for name in page if name in earlier}
        return Reply(request.id, result)

    def _earlier(self, topics: list[str], streams: dict[str, Value]) -> dict[str, Value]:
        """Return what the journal has of earlier boots, by stream; streams that the core knows no more are
        added to ``streams``, so that pages cover them."""
        if self._journal is None:
            return {}
        found = self._journal.positions(topics)
        forgotten = [name for name in found if name not in streams]
        known = self._core.positions([f"{name}\0" for name in forgotten])["streams"]
        for name in forgotten:
            streams[name] = known[name] if isinstance(known, dict) and name in known else [0, 0]
        return {name: [list[Value](entry) for entry in entries] for name, entries in found.items()}

    def _replay(self, request: Request, _now_ns: int) -> ReplayReply:
        params = _Checked(request.params, {"stream", "boot", "first", "last", "max_bytes"})
        boot = params.integer("boot", None, 0, _MAX_U64)
        source = self._core if self._journal is None or boot == self._core.boot else self._journal
        outcomes, missed, has_more = source.replay(
            params.text("stream"),
            boot,
            params.integer("first", None, 0, _MAX_PUB_SEQ),
            params.integer("last", None, 0, _MAX_PUB_SEQ),
            params.integer("max_bytes", MAX_REPLAY_BYTES, 1, MAX_REPLAY_BYTES),
        )
        return ReplayReply(request.id, tuple(outcomes), tuple(missed), has_more)

    def _drain(self, request: Request, _now_ns: int) -> Reply:
        params = _Checked(request.params, {"stop"})
        is_final = params.flag("stop", default=False)
        self._request_drain(is_final)
        return Reply(request.id, {"unfinished": self._core.account.unfinished, "stop": is_final})

    def _fetch(self, request: Request, _now_ns: int) -> Reply:
        params = _Checked(request.params, {"sha256", "offset", "nbytes"})
        chunk, total = self._store.read_chunk(
            params.text("sha256"),
            params.integer("offset", 0, 0, 2**63 - 1),
            params.integer("nbytes", MAX_CHUNK_BYTES, 1, _MAX_U64),
        )
        return Reply(request.id, {"total": total}, payloads=(chunk,))

    def _record(self, request: Request, now_ns: int) -> Reply:
        params = _Checked(request.params, {"after", "max_frames"})
        after = None if request.params.get("after") is None else params.integer("after", None, 0, _MAX_U64)
        count = params.integer("max_frames", MAX_FRAMES_PER_PAGE, 1, MAX_FRAMES_PER_PAGE)
        return Reply(request.id, self._recording.read(after, count, now_ns))

    def _reload(self, request: Request, now_ns: int) -> Reply:
        params = _Checked(request.params, _RELOAD_PARAMS)
        desk = self._desk()
        order = ReloadOrder(
            desk.next_number(),
            params.text("model", ""),
            params.text("path"),
            params.text("version", ""),
            params.integer("frames", 32, 0, MAX_COMPARED_FRAMES),
            params.number("tolerance"),
            params.number("agreement"),
            params.flag("force", default=False),
            params.integer("timeout_ms", 300_000, 1, MAX_TIMEOUT_MS),
        )
        if not _VERSION.fullmatch(order.version or "1"):
            raise RemoteError(Code.BAD_PARAMS, "version: letters, digits, . _ and -, at most 64, not empty")
        extra, gpu = (
            params.texts(name, MAX_MODEL_FILES) if name in request.params else []
            for name in ("extra_files", "gpu_files")
        )
        return Reply(request.id, desk.begin(order, extra, gpu, now_ns))

    def _rollback(self, request: Request, now_ns: int) -> Reply:
        params = _Checked(request.params, {"model"})
        return Reply(request.id, self._desk().roll_back(params.text("model", ""), now_ns))

    def _commit(self, request: Request, now_ns: int) -> Reply:
        params = _Checked(request.params, {"model"})
        return Reply(request.id, self._desk().commit(params.text("model", ""), now_ns))

    def _desk(self) -> ReloadDesk:
        if self._reloads is None:
            raise RemoteError(Code.UNKNOWN_METHOD, "models can't be reloaded here")
        return self._reloads


class _Checked:
    """Parameters read one by one; each reader raises RemoteError ``bad_params`` that names the parameter."""

    def __init__(self, params: Params, known: set[str]) -> None:
        unknown = sorted(params.keys() - known)
        if unknown:
            expected = ", ".join(sorted(known))
            raise RemoteError(Code.BAD_PARAMS, f"unknown parameter {unknown[0][:64]!r}; there are {expected}")
        self._params = params

    def text(self, name: str, default: str | None = None) -> str:
        value = self._params.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._params.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int | None, lowest: int, highest: int) -> int:
        value = self._params.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise self._wrong(name, f"an integer from {lowest} to {highest}")
        return value

    def number(self, name: str) -> float | None:
        """Read a number that may be left out."""
        value = self._params.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_FIGURE:
            raise self._wrong(name, f"a number from 0 to {MAX_FIGURE:g}")
        return float(value)

    def texts(self, name: str, max_count: int) -> list[str]:
        value = self._params.get(name)
        if not isinstance(value, list) or len(value) > max_count:
            raise self._wrong(name, f"a list of at most {max_count} strings")
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) != len(value):
            raise self._wrong(name, f"a list of at most {max_count} strings")
        return texts

    def _wrong(self, name: str, expected: str) -> RemoteError:
        is_missing = name not in self._params
        return RemoteError(
            Code.BAD_PARAMS,
            f"parameter {name!r} {'is missing' if is_missing else 'is wrong'}: it must be {expected}",
        )
