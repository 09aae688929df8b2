"""Takes orders to reload a model from the control socket, and reads the files meanwhile.

Not here: what becomes of an order (``reloads``), how files are handed to workers (``model_store``).

Opening and hashing gigabytes takes seconds, so each reload's files are read by a thread of its own; the loop
is woken when that is done and hands the result to the core. Only files in the folders that the broker was
told of are read: whoever reaches the control socket could otherwise fetch any file of this machine.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from headrace.broker import events
from headrace.broker.core import BrokerCore
from headrace.broker.model_store import ModelStore, OpenedFiles
from headrace.broker.reload_state import ReloadOrder
from headrace.broker.shell_settings import LocalModel
from headrace.errors import Code, ModelError, RemoteError
from headrace.protocol.messages import Value

_Tell = Callable[[events.Event, int], None]


class ReloadDesk:
    """See the module. All methods belong to the loop's thread."""

    def __init__(
        self,
        core: BrokerCore,
        store: ModelStore,
        folders: tuple[Path, ...],
        tell: _Tell,
        wake: Callable[[], None],
    ) -> None:
        """``folders``: absolute, where files may be read from. ``tell`` hands an event to the core."""
        self._core = core
        self._store = store
        self._folders = folders
        self._tell = tell
        self._wake = wake
        self._numbers = itertools.count(1)
        self._done: deque[tuple[int, OpenedFiles | str]] = deque()

    def begin(
        self, order: ReloadOrder, extra_files: list[str], gpu_files: list[str], now_ns: int
    ) -> dict[str, Value]:
        """Start a reload; return its number. The files are named relative to the folder of the graph.

        Raises RemoteError when it can't be started."""
        if not Path(order.path).is_absolute():
            raise RemoteError(Code.BAD_PARAMS, "path must be absolute, as it is on the broker's machine")
        event = events.ReloadAsked(order)
        self._check(event)
        graph = Path(order.path)
        extra, gpu = (tuple(graph.parent / name for name in names) for names in (extra_files, gpu_files))
        model = self._core.models.find(order.model)
        name = order.model if model is None else model.spec.name
        files = LocalModel(name, order.version, graph, extra, gpu_files=gpu)
        self._tell(event, now_ns)
        threading.Thread(
            target=self._read, args=(order.number, files), name="headrace-reading", daemon=True
        ).start()
        return {"number": order.number, "phase": "reading"}

    def next_number(self) -> int:
        """Return the number of a new reload."""
        return next(self._numbers)

    def roll_back(self, model: str, now_ns: int) -> dict[str, Value]:
        """Bring the version before the last reload back, or give up the one under way."""
        return self._order(model, events.RollbackAsked(model), now_ns)

    def commit(self, model: str, now_ns: int) -> dict[str, Value]:
        """Let go of the version before the last reload."""
        return self._order(model, events.CommitAsked(model), now_ns)

    def deliver(self, now_ns: int) -> None:
        """Hand what was read meanwhile to the core."""
        while self._done:
            number, opened = self._done.popleft()
            if isinstance(opened, str):
                self._tell(events.ModelFilesUnreadable(number, opened), now_ns)
                continue
            specs = self._core.models.worker_specs()
            kept = (file for spec in specs for file in (*spec.files, *spec.gpu_files, *spec.fp32_files))
            wanted = {file.sha256 for file in kept}
            self._store.adopt(opened, wanted)
            self._tell(events.ModelFilesRead(number, opened.files, opened.gpu_files), now_ns)

    def _order(
        self, reference: str, event: events.RollbackAsked | events.CommitAsked, now_ns: int
    ) -> dict[str, Value]:
        self._check(event)
        self._tell(event, now_ns)
        model = self._core.models.find(reference)
        if model is None or model.reload is None:  # pragma: no cover - _check has found both
            raise RemoteError(Code.NOT_FOUND, "there is no such model here")
        return {"serving": model.live.version, "phase": model.reload.phase.value}

    def _check(self, event: events.ReloadAsked | events.RollbackAsked | events.CommitAsked) -> None:
        refusal = self._core.reloads.find_refusal(event)
        if refusal is not None:
            raise RemoteError(*refusal)

    # -- the reading thread -------------------------------------------------------------------------

    def _read(self, number: int, files: LocalModel) -> None:
        try:
            self._done.append((number, self._open(files)))
        except (ModelError, OSError) as error:
            self._done.append((number, str(error)))
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the reload must end
            self._done.append((number, f"reading the files failed: {type(error).__name__}"))
        self._wake()

    def _open(self, files: LocalModel) -> OpenedFiles:
        for path in (files.path, *files.extra_files, *files.gpu_files):
            real = path.resolve()
            if not any(real.is_relative_to(folder) for folder in self._folders):
                listed = ", ".join(map(str, self._folders)) or "none"
                raise ModelError(
                    f"{path} lies in none of the folders that models may be reloaded from ({listed}): add its"
                    " folder to broker.reload_folders and start the broker again"
                )
        return self._store.read(files)
