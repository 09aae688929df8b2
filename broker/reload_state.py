"""One reload of a model: what was asked for, how far it is, what the comparison has shown. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from headrace.protocol.messages import Compared, ModelSpec, Value

if TYPE_CHECKING:
    from headrace.broker.worker_registry import Worker

#: Least time between two batches of one model that are run twice ...
SAMPLE_EVERY_NS = 50_000_000

#: ... and in runs of such a batch: a comparison takes a tenth of one worker's time at most. Without this, 16
#: frames of ResNet-50 on a worker that was busy half of its time doubled the median latency.
SAMPLE_EVERY_RUNS = 10

#: Most frames that one reload may compare, and most time it may take.
MAX_COMPARED_FRAMES = 100_000
MAX_TIMEOUT_MS = 86_400_000


class Phase(StrEnum):
    """READING -> LOADING -> COMPARING -> SWITCHING -> LIVE -> COMMITTED, or to FAILED or ROLLED_BACK.

    SWITCHING: batches go with the new version, some of the old one are still in flight."""

    READING = "reading"
    LOADING = "loading"
    COMPARING = "comparing"
    SWITCHING = "switching"
    LIVE = "live"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


#: In these the old version serves and the new one does not yet.
ACTIVE = frozenset({Phase.READING, Phase.LOADING, Phase.COMPARING})


@dataclass(frozen=True, slots=True)
class ReloadOrder:
    """What was asked for. ``version`` "" is made from the files. Without ``max_difference`` (largest absolute
    difference of any output value) and ``min_agreement`` the comparison is reported and decides nothing;
    nor does it when ``is_forced``. ``frames_count`` 0: nothing is compared."""

    number: int
    model: str
    path: str = ""
    version: str = ""
    frames_count: int = 32
    max_difference: float | None = None
    min_agreement: float | None = None
    is_forced: bool = False
    timeout_ms: int = 300_000


@dataclass(slots=True)
class Tally:
    """The comparisons of one reload, added up."""

    batches_count: int = 0
    frames_count: int = 0
    agreed_count: int = 0
    non_finite_count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, compared: Compared) -> None:
        """Take in one batch."""
        self.batches_count += 1
        self.frames_count += compared.frames
        self.agreed_count += min(compared.agreed, compared.frames)
        self.non_finite_count += min(compared.non_finite, compared.frames)
        self.max_abs = max(self.max_abs, compared.max_abs)
        self.max_rel = max(self.max_rel, compared.max_rel)

    @property
    def agreement(self) -> float:
        """Return the share of the frames whose largest value is at the same place; 1 before the first."""
        return self.agreed_count / self.frames_count if self.frames_count else 1.0


@dataclass(slots=True, eq=False)
class Reload:
    """One reload. ``spec`` is known once the files were read. ``holders`` are the workers that were asked to
    load it, by index: one that is lost may have been killed by it."""

    order: ReloadOrder
    began_ns: int
    old_version: str
    spec: ModelSpec | None = None
    phase: Phase = Phase.READING
    code: str = ""
    message: str = ""
    ended_ns: int | None = None
    holders: dict[int, Worker] = field(default_factory=dict, repr=False)
    tally: Tally = field(default_factory=Tally)
    next_sample_ns: int = 0

    @property
    def deadline_ns(self) -> int:
        """Return when the reload is given up."""
        return self.began_ns + self.order.timeout_ms * 1_000_000

    @property
    def is_active(self) -> bool:
        """True as long as it may still fail on its own."""
        return self.phase in ACTIVE

    @property
    def new_version(self) -> str:
        """Return the label of the new version, "" before its files were read."""
        return self.order.version if self.spec is None else self.spec.version

    def end(self, phase: Phase, now_ns: int, code: str = "", message: str = "") -> None:
        """Enter a phase that a person may wait for."""
        self.phase = phase
        self.code = code
        self.message = message
        self.ended_ns = now_ns

    def takes_sample(self, worker: Worker, run_ns: int, now_ns: int) -> bool:
        """Tell whether a batch that is about to be sent is to be run on both versions, and note it if so.

        ``run_ns`` is how long it is predicted to run."""
        spec = self.spec
        if spec is None or now_ns < self.next_sample_ns or self.tally.frames_count >= self.order.frames_count:
            return False
        if (spec.name, spec.version) not in worker.profiles:
            return False
        self.next_sample_ns = now_ns + max(SAMPLE_EVERY_NS, SAMPLE_EVERY_RUNS * run_ns)
        return True

    def find_difference(self) -> str:
        """Return why the comparison forbids the switch, "" if it does not."""
        order, tally = self.order, self.tally
        if order.is_forced:
            return ""
        if tally.non_finite_count:
            return f"{tally.non_finite_count} frames have NaN or infinity in one version only"
        if order.max_difference is not None and tally.max_abs > order.max_difference:
            return f"outputs differ by up to {tally.max_abs:.6g}, allowed are {order.max_difference:g}"
        if order.min_agreement is not None and tally.agreement < order.min_agreement:
            return f"{tally.agreement:.4f} of the frames agree, required are {order.min_agreement:g}"
        return ""

    def status(self, now_ns: int) -> dict[str, Value]:
        """Return what `headrace reload --status` shows."""
        tally = self.tally
        until_ns = now_ns if self.ended_ns is None else self.ended_ns
        return {
            "number": self.order.number,
            "phase": self.phase.value,
            "path": self.order.path,
            "old_version": self.old_version,
            "new_version": self.new_version,
            "code": self.code,
            "message": self.message,
            "took_ms": (until_ns - self.began_ns) / 1e6,
            "frames_wanted": self.order.frames_count,
            "frames": tally.frames_count,
            "batches": tally.batches_count,
            "agreement": tally.agreement,
            "max_abs": tally.max_abs,
            "max_rel": tally.max_rel,
            "non_finite": tally.non_finite_count,
        }
