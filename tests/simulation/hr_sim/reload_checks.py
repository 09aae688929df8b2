"""Judges reloads: which version of a model a batch is sent with, and which an outcome names.

What is live is known from the broker's reports alone. After the switch was reported no batch leaves with the
old version; an outcome names the version of a batch that its frame was in, with the worker it names.
"""

from __future__ import annotations

from headrace.broker.settings import CoreSettings
from headrace.protocol.messages import Batch, Outcome, Value
from hr_sim.book import Seen, Violation


class ReloadChecks:
    """The part of a referee's book that is about versions."""

    def __init__(self, settings: CoreSettings) -> None:
        self._live = {model.spec.name: model.spec.version for model in settings.models}
        self._configured = dict(self._live)
        self._had: dict[int, list[tuple[str, str]]] = {}

    def report(self, name: str, values: dict[str, Value]) -> None:
        """The broker tells of a switch, or of the end of a reload."""
        if name not in {"model switched", "reload ended"}:
            return
        model = str(values["model"]).partition(":")[0]
        if name == "model switched":
            if values["old"] != self._live[model]:
                raise Violation(f"{model} switched from {values['old']}, {self._live[model]} was live")
            self._live[model] = str(values["version"])
        elif values["phase"] == "rolled_back":
            self._live[model] = str(values["serving"])
        elif values["serving"] != self._live[model]:
            raise Violation(f"{model}: {values['serving']} serves after {values['phase']}, without a switch")

    def send(self, batch: Batch, worker: str) -> None:
        """Judge the version of a batch that is sent."""
        live = self._live[batch.model]
        if batch.version != live:
            raise Violation(f"batch {batch.batch} of {batch.model} on {batch.version}, {live} is live")
        for frame in batch.frames:
            self._had.setdefault(frame.pts_ns or 0, []).append((batch.version, worker))

    def judge(self, seen: Seen, outcome: Outcome) -> None:
        """Judge the version that an outcome names."""
        had = self._had.pop(seen.id, [])
        if outcome.batch_size:
            if (outcome.version, outcome.worker) not in had:
                raise Violation(f"version {outcome.version} of {outcome.worker}, it was in {had}", seen.key)
        elif outcome.model and outcome.version not in [self._configured[outcome.model], *dict(had)]:
            raise Violation(f"version {outcome.version} without a batch of it: {had}", seen.key)
