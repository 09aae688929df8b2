"""What the broker shows of itself: one nested dict that msgpack can hold, computed when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING

from headrace.broker.model_table import ServedClass, ServedModel
from headrace.broker.producer_registry import ProducerSession
from headrace.broker.stream_table import Stream
from headrace.broker.worker_registry import Worker
from headrace.protocol.messages import Value

if TYPE_CHECKING:
    from headrace.broker.core import BrokerCore

#: Streams in one page. A stream's id has up to 128 bytes and its status about 200 more, so that a page stays
#: well under the 1 MiB that a header may have.
MAX_STREAMS_PER_PAGE = 1_000

#: Producers told of in one status, and streams named of each: their counts say what is left out. With ids of
#: 128 bytes that is a third of the 1 MiB that a header may have.
MAX_PRODUCERS = 256
MAX_PRODUCER_STREAMS = 8

_NS_PER_MS = 1e6


def page_of(names: Iterable[str], after: str, count: int) -> tuple[list[str], str]:
    """Return the next ``count`` names in order, and the last of them if more follow ("" if none do)."""
    found = nsmallest(count + 1, (name for name in names if name > after))
    taken = found[:count]
    return taken, taken[-1] if len(found) > len(taken) > 0 else ""


def status_of(core: BrokerCore, now_ns: int, streams_after: str, max_streams: int) -> dict[str, Value]:
    """Return the broker's state: account, classes, workers, streams, producers, models, bounds in use.

    ``streams`` is a page: at most ``max_streams`` by name, those after ``streams_after``; the next page
    begins after ``streams_next``, "" when this was the last.
    """
    outcomes = core.outcomes
    page, streams_next = page_of(core.streams.by_name, streams_after, max_streams)
    streams: dict[str, Value] = {name: _stream(core, core.streams.by_name[name], now_ns) for name in page}
    sessions = islice(core.producers.by_peer.values(), MAX_PRODUCERS)
    producers: list[Value] = [_producer(session, now_ns) for session in sessions]
    return {
        "boot": core.boot,
        "is_draining": core.is_draining,
        "account": _account(core),
        "rejected_by_code": _counts(outcomes.rejected_by_code),
        "error_by_code": _counts(outcomes.error_by_code),
        "error_by_model": {model: _counts(codes) for model, codes in outcomes.error_by_model.items()},
        "misbehaved_by_code": _counts(core.misbehaved_by_code),
        "late_done": core.late_done_count,
        "requeued": core.recovery.requeued_count,
        "workers_lost": core.life.lost_count,
        "hedges": _hedges(core),
        "quarantined": len(core.quarantine),
        "unfinished_bytes": outcomes.unfinished_bytes,
        "max_bytes": core.settings.max_bytes,
        "retained": outcomes.retained_count,
        "retained_bytes": outcomes.retained_bytes,
        "retention_bytes": core.settings.retention_bytes,
        "reloads": _counts(core.reloads.ends_by_phase),
        "models": [_model(core, model, now_ns) for model in core.models.all()],
        "classes": [_class(core, served, now_ns) for served in core.models.classes],
        "workers": [_worker(worker, now_ns) for worker in core.workers.by_peer.values()],
        "streams_count": len(core.streams),
        "streams": streams,
        "streams_next": streams_next,
        "streams_stale": core.staleness.stale_count,
        "streams_forgotten": core.streams.forgotten_count,
        "producers_count": len(core.producers),
        "producers": producers,
    }


def _account(core: BrokerCore) -> dict[str, Value]:
    account = core.outcomes.account
    return {
        "received": account.received,
        "accepted": account.accepted,
        "ok": account.ok,
        "error": account.error,
        "expired": account.expired,
        "superseded": account.superseded,
        "rejected": account.rejected,
        "duplicates": account.duplicates,
        "unfinished": account.unfinished,
    }


def _hedges(core: BrokerCore) -> dict[str, Value]:
    hedges = core.hedges
    return {
        "batches": hedges.batches_count,
        "frames": hedges.frames_count,
        "won": hedges.won_count,
        "suppressed": hedges.suppressed_count,
        "budget_frames": hedges.budget_frames,
    }


def _model(core: BrokerCore, model: ServedModel, now_ns: int) -> dict[str, Value]:
    served = list(model.classes.values())
    ready = [len(core.dispatcher.pools.of(one).workers) for one in served]
    return {
        "name": model.spec.name,
        "version": model.spec.version,
        "is_described": model.placer is not None,
        "size_classes": [one.spec.name for one in served],
        "workers": max(ready, default=0),
        "live_version": model.live.version,
        "kept_version": "" if model.kept is None else model.kept.version,
        "reload": None if model.reload is None else model.reload.status(now_ns),
    }


def _class(core: BrokerCore, served: ServedClass, now_ns: int) -> dict[str, Value]:
    oldest_ns = served.queue.oldest_ns()
    queued: dict[str, Value] = {
        str(priority): count for priority, count in served.queue.waiting_by_priority().items()
    }
    return {
        "model": served.model,
        "version": served.version,
        "size_class": served.spec.name,
        "height": served.spec.height,
        "width": served.spec.width,
        "queued": queued,
        "waiting": served.waiting_count,
        "suspects": len(served.suspects),
        "in_flight": served.in_flight_count,
        "workers": len(core.dispatcher.pools.of(served).workers),
        "batches": served.batches_count,
        "frames_batched": served.frames_count,
        "mean_batch": served.frames_count / max(served.batches_count, 1),
        "padding_waste": served.waste_sum / max(served.frames_count, 1),
        "oldest_wait_ms": 0.0 if oldest_ns is None else (now_ns - oldest_ns) / _NS_PER_MS,
        "expired": served.expired_count,
        "superseded": served.superseded_count,
        "promoted": served.promoted_count,
        "window_ms": served.policy.window_ns / _NS_PER_MS,
        "batch_limit": served.spec.max_batch_size
        if served.policy.size_limit is None
        else served.policy.size_limit,
        "turnaround_ms": served.turnaround_ns / _NS_PER_MS,
        "run_ms": _run_ms(core, served),
    }


def _run_ms(core: BrokerCore, served: ServedClass) -> list[Value]:
    """Return [[bucket, milliseconds], ...] of one worker, the one that has served the class longest: what
    `headrace simulate --profile` reads."""
    worker = next(iter(core.dispatcher.pools.of(served).workers.values()), None)
    if worker is None:
        return []
    table = core.costs.table(worker.id, served.model, served.live_version, served.spec.name)
    return [[size, ms] for size, ms in table]


def _worker(worker: Worker, now_ns: int) -> dict[str, Value]:
    ready_for_ns = 0 if worker.ready_ns is None else now_ns - worker.ready_ns
    return {
        "id": worker.id,
        "device": worker.hello.device,
        "engine": worker.hello.engine,
        "release": worker.hello.release,
        "pid": worker.hello.pid,
        "state": worker.state.value,
        "slots": worker.slots,
        "in_flight": len(worker.in_flight),
        "batches": worker.batches_count,
        "frames": worker.frames_count,
        "busy_share": min(1.0, worker.ran_ns / ready_for_ns) if ready_for_ns > 0 else 0.0,
        "last_heard_ms": (now_ns - worker.pulse.last_heard_ns) / _NS_PER_MS,
        "is_overdue": bool(worker.in_flight) and now_ns >= worker.overdue_ns,
        "notes": list(worker.notes),
    }


def _stream(core: BrokerCore, stream: Stream, now_ns: int) -> dict[str, Value]:
    quiet_ns = now_ns - stream.last_frame_ns
    return {
        "counts": {status.value: count for status, count in stream.counts.items()},
        "next_pub_seq": stream.next_pub_seq,
        "unfinished": len(stream.order),
        "epoch": stream.owner_epoch,
        "has_owner": stream.owner_epoch is not None,
        "last_frame_ms": quiet_ns / _NS_PER_MS,
        "is_stale": stream.is_stale,
    }


def _producer(session: ProducerSession, now_ns: int) -> dict[str, Value]:
    return {
        "name": session.name,
        "epoch": session.epoch,
        "received": session.received,
        "finished": session.finished,
        "streams_count": len(session.streams),
        "streams": list(islice(session.streams, MAX_PRODUCER_STREAMS)),
        "last_heard_ms": (now_ns - session.pulse.last_heard_ns) / _NS_PER_MS,
    }


def _counts(counts: dict[str, int]) -> dict[str, Value]:
    return {str(code): count for code, count in counts.items()}
